"""The projection to the vocabulary and the smoothed loss in one: the logits of a batch are never held all at once.

Its slow twin is `Embedding.logits` followed by `recipe.loss`. The gradient is found on the way, chunk by chunk, while
the chunk's logits are still in the cache: what waits for the backward pass is as large as the input, not as the logits.
"""

# Axes: N tokens, C tokens of a chunk, D = d_model, V vocabulary.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 512
"""Tokens. On two cores 128 to 1,024 are alike, and 2,048 slower (benchmarks/LOG.md)."""


def projected_loss(
    x_ND: Tensor, W_VD: Tensor, b_V: Tensor | None, target_N: Tensor, label_smoothing: float, pad_id: int
) -> Tensor:
    """Cross-entropy with smoothed targets of x W^T + b, summed over the tokens that are not padding."""
    loss_sum: Tensor = _ProjectedLoss.apply(x_ND, W_VD, b_V, target_N, label_smoothing, pad_id)  # type: ignore[no-untyped-call]
    return loss_sum


class _ProjectedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, W_VD: Tensor, b_V: Tensor | None, target_N: Tensor, label_smoothing: float, pad_id: int
    ) -> Tensor:
        device = x_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else W_VD.dtype
        with torch.autocast(device, enabled=False):
            found = _loss_and_gradients(x_ND.to(dtype), W_VD, b_V, target_N, label_smoothing, pad_id)
        ctx.save_for_backward(found.grad_x_ND, found.grad_W_VD, found.grad_b_V)
        ctx.x_dtype, ctx.has_bias = x_ND.dtype, b_V is not None
        return found.loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_ND, grad_W_VD, grad_b_V = ctx.saved_tensors
        return (
            (grad_x_ND * grad).to(ctx.x_dtype),
            grad_W_VD * grad,
            grad_b_V * grad if ctx.has_bias else None,
            None,
            None,
            None,
        )


class _Found(NamedTuple):
    loss_sum: Tensor
    grad_x_ND: Tensor
    grad_W_VD: Tensor
    grad_b_V: Tensor


def _loss_and_gradients(
    x_ND: Tensor, W_VD: Tensor, b_V: Tensor | None, target_N: Tensor, label_smoothing: float, pad_id: int
) -> _Found:
    """Products in the precision of `x_ND`, all else in that of the weights."""
    n_vocabulary = len(W_VD)
    rough_W_VD, rough_b_V = W_VD.to(x_ND.dtype), None if b_V is None else b_V.to(x_ND.dtype)
    grad_x_ND, grad_W_VD, grad_b_V = torch.empty_like(x_ND), torch.zeros_like(W_VD), W_VD.new_zeros(n_vocabulary)
    loss_sum = W_VD.new_zeros(())
    for start in range(0, len(x_ND), CHUNK):
        x_CD, target_C1 = x_ND[start : start + CHUNK], target_N[start : start + CHUNK, None]
        token_C1 = target_C1 != pad_id
        logits_CV = F.linear(x_CD, rough_W_VD, rough_b_V).to(W_VD.dtype)
        wanted_C1 = logits_CV.gather(1, target_C1)
        log_Z_C1 = logits_CV.logsumexp(1, keepdim=True)
        loss_C1 = log_Z_C1 - (1 - label_smoothing) * wanted_C1 - label_smoothing * logits_CV.mean(1, keepdim=True)
        loss_sum += loss_C1.masked_fill(~token_C1, 0).sum()
        # By the logits, the gradient is what was given less what was wanted.
        grad_CV = logits_CV.sub_(log_Z_C1).exp_().sub_(label_smoothing / n_vocabulary)
        grad_CV.scatter_add_(1, target_C1, torch.full_like(wanted_C1, label_smoothing - 1)).mul_(token_C1)
        if b_V is not None:
            grad_b_V += grad_CV.sum(0)
        grad_CV = grad_CV.to(x_ND.dtype)
        torch.mm(grad_CV, rough_W_VD, out=grad_x_ND[start : start + CHUNK])
        grad_W_VD += grad_CV.T @ x_CD
    return _Found(loss_sum, grad_x_ND, grad_W_VD, grad_b_V)
