"""The paper's recipe: smoothed loss (5.4), Adam and its learning rate (5.3)."""

# Axes: B sentences, T target positions, V vocabulary.

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import TrainConfig
from transduce.errors import ConfigError
from transduce.model import Transformer
from transduce.training.passes.loss import projected_loss


def loss(logits_BTV: Tensor, target_out_BT: Tensor, label_smoothing: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy with smoothed targets, summed over the tokens, and the number of tokens.

    A sum and a count, not a mean: ranks and micro-batches hold unequal numbers of tokens, so a mean of means is wrong.
    """
    logits_BTV = logits_BTV.to(
        torch.promote_types(logits_BTV.dtype, torch.float32)
    )  # a bf16 sum over 37,000 logits is noise
    loss_sum = F.cross_entropy(
        logits_BTV.flatten(0, 1),
        target_out_BT.flatten(),
        ignore_index=pad_id,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return loss_sum, (target_out_BT != pad_id).sum()


def model_loss(
    model: Transformer,
    source_BS: Tensor,
    target_in_BT: Tensor,
    target_out_BT: Tensor,
    label_smoothing: float,
    *,
    in_chunks: bool,
) -> Tensor:
    """The summed loss of one pass. `in_chunks` gives the same sum with the logits of a few tokens in memory at once."""
    if not in_chunks:
        logits_BTV = model(source_BS, target_in_BT).logits_BTV
        return loss(logits_BTV, target_out_BT, label_smoothing, model.config.pad_id)[0]
    x_BTD, _ = model.decode(target_in_BT, model.encode(source_BS))
    W_VD, b_V = model.embedding.output_projection, model.embedding.output_bias
    return projected_loss(x_BTD.flatten(0, 1), W_VD, b_V, target_out_BT.flatten(), label_smoothing, model.config.pad_id)


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3; the first step is 1."""
    if min(step, warmup_steps) < 1:
        raise ConfigError(f"step is {step} and warmup_steps is {warmup_steps}, both must be at least 1: count from 1")
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def scheduled_rate(step: int, d_model: int, settings: TrainConfig) -> float:
    """The learning rate of a step, the first of which is 1. Only "paper" is in the paper: equation 3."""
    warmup_steps = settings.warmup_steps
    rate = settings.rate_factor * learning_rate(step, d_model, warmup_steps)
    if settings.schedule == "paper" or (step <= warmup_steps and settings.schedule != "inverse-root"):
        return rate
    peak_rate = settings.rate_factor * learning_rate(warmup_steps, d_model, warmup_steps)
    if settings.schedule == "inverse-root":
        return peak_rate if step <= warmup_steps else rate
    remaining = max(0.0, 1 - (step - warmup_steps) / (settings.max_steps - warmup_steps + 1))
    return peak_rate * (remaining if settings.schedule == "linear" else (1 - math.cos(math.pi * remaining)) / 2)


def adam(parameters: Iterable[torch.nn.Parameter], config: TrainConfig) -> torch.optim.Adam:
    """The learning rate is 0 until the caller sets it before each step."""
    return torch.optim.Adam(
        parameters, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
    )
