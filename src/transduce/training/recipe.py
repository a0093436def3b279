"""The paper's recipe: smoothed loss (5.4), Adam and its learning rate (5.3)."""

# Axes: B sentences, T target positions, V vocabulary.

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import TrainConfig


def loss(logits_BTV: Tensor, target_out_BT: Tensor, label_smoothing: float, pad_id: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy with smoothed targets, summed over the tokens, and their number.

    A sum and a count, not a mean: ranks and micro-batches hold unequal numbers of tokens, so that a mean of their
    means would be wrong.
    """
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))  # a sum of 37,000 in bf16 is noise
    loss_sum = F.cross_entropy(
        logits_BTV.flatten(0, 1),
        target_out_BT.flatten(),
        ignore_index=pad_id,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return loss_sum, (target_out_BT != pad_id).sum()


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3; the first step is 1."""
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def adam(parameters: Iterable[torch.nn.Parameter], config: TrainConfig) -> torch.optim.Adam:
    """Its learning rate is nobody's default: set it before each step."""
    return torch.optim.Adam(
        parameters, lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps, fused=True
    )
