"""The norm of each layer's gradient in the first training step, with post-norm (the paper) and with pre-norm.

Xiong et al. (2020, arXiv 2002.04745) explain the need for warm-up in post-norm models: the last layers start with much
larger gradients than the first ones. They measure W_2 of the feed-forward networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.passport import passport
from transduce import RunConfig
from transduce.data.prepare import Prepared
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.passes.written import gradient_of
from transduce.training.trainer import Trainer


def gradient_norms(config: RunConfig, prepared: Prepared, device: str) -> dict[str, Any]:
    """Gradient norms of each layer for the mean loss per token in the first step, in float32 and with dropout."""
    tokens = config.data.batch_tokens
    choices = Choices(device, "float32", torch.get_num_threads(), tokens, deterministic=False, way="plain")
    group, precision = Group(0, 1, torch.device(device)), torch.get_float32_matmul_precision()
    choices.configure_process()
    torch.set_float32_matmul_precision(precision)  # restored because the line above lowers it on a GPU
    with tempfile.TemporaryDirectory() as run_folder:
        trainer = Trainer(Path(run_folder), config, choices, prepared.train, prepared.valid, group, lambda event: None)
        trainer.take_step(1, next(trainer.shares(0)))  # the gradients stay in place after Adam's update
    layers = [
        {
            "stack": stack,
            "layer": number,
            "all": norm_of(layer.parameters()),
            "W_2": norm_of([layer.feed_forward.W_2.W]),
        }
        for stack in ("encoder", "decoder")
        for number, layer in enumerate(getattr(trainer.model, stack), 1)
    ]
    return {"norm": config.model.norm, "seed": config.train.seed, "layers": layers, **passport(config, device)}


def norm_of(parameters: Iterable[nn.Parameter]) -> float:
    return float(torch.nn.utils.get_total_norm([gradient_of(parameter) for parameter in parameters]))
