"""How large the gradient of each layer is before anything is learnt, after the norm (the paper) and before it.

Post-norm is said to want a warm-up because its last layers begin with much larger gradients than its first (Xiong et
al. 2020, arXiv 2002.04745, who look at W_2 of the feed-forward networks). Here is what this program's first step finds.
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
    """Of the first step, dropout on, in float32: of the loss of a token, by each layer."""
    tokens = config.data.batch_tokens
    choices = Choices(device, "float32", torch.get_num_threads(), tokens, deterministic=False, way="plain")
    group, precision = Group(0, 1, torch.device(device)), torch.get_float32_matmul_precision()
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(Path(place), config, choices, prepared.train, prepared.valid, group, lambda event: None)
        torch.set_float32_matmul_precision(precision)  # a trainer lowers it on a GPU
        trainer.take_step(1, next(trainer.shares(0)))  # Adam leaves gradients where they are
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
