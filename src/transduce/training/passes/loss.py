"""The projection to the vocabulary and the smoothed loss in one function that never holds all logits of a batch.

Its slow twin is `Embedding.logits` followed by `recipe.loss`. The forward pass also computes the gradient, chunk by
chunk, while the logits of the chunk are in the cache. So the backward pass needs a tensor of the size of the input, not
of the logits.
"""

# Axes: N tokens, C tokens of a chunk, D = d_model, V vocabulary.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK = 512
"""Tokens. On two cores 128 to 1,024 are equally fast, and 2,048 is slower (benchmarks/LOG.md)."""


def projected_loss(
    x_ND: Tensor, W_VD: Tensor, b_V: Tensor | None, target_N: Tensor, label_smoothing: float, pad_id: int
) -> Tensor:
    """The cross-entropy of x W^T + b with smoothed targets, summed over the tokens that are not padding."""
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
            result = loss_and_gradients(
                x_ND.to(dtype), W_VD, b_V, target_N, label_smoothing, pad_id, torch.zeros_like(W_VD)
            )
        ctx.save_for_backward(result.grad_x_ND, result.grad_W_VD, result.grad_b_V)
        ctx.x_dtype, ctx.has_bias = x_ND.dtype, b_V is not None
        return result.loss_sum

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


class LossAndGradients(NamedTuple):
    loss_sum: Tensor
    grad_x_ND: Tensor
    grad_W_VD: Tensor
    grad_b_V: Tensor


def loss_and_gradients(
    x_ND: Tensor,
    W_VD: Tensor,
    b_V: Tensor | None,
    target_N: Tensor,
    label_smoothing: float,
    pad_id: int,
    grad_W_VD: Tensor,
    factor: float = 1.0,
) -> LossAndGradients:
    """Adds the gradient of the weights to `grad_W_VD`. All gradients are multiplied by `factor`.

    Matrix products use the precision of `x_ND`; everything else uses that of `grad_W_VD`.
    """
    token_N = (target_N != pad_id).nonzero().squeeze(1)  # padding needs no product
    x_MD, target_M = x_ND[token_N], target_N[token_N]
    low_precision_W_VD, low_precision_b_V = W_VD.to(x_ND.dtype), None if b_V is None else b_V.to(x_ND.dtype)
    dtype, grad_b_V = grad_W_VD.dtype, grad_W_VD.new_zeros(len(W_VD))
    grad_x_MD = torch.empty_like(x_MD, dtype=dtype)
    # One buffer for all chunks: the first use of new memory costs more than the writing itself.
    buffer_CV = x_ND.new_empty(min(CHUNK, len(x_MD)), len(W_VD))
    loss_sum, mean_W_D = grad_W_VD.new_zeros(()), low_precision_W_VD.mean(0, dtype=dtype)
    mean_b = 0.0 if b_V is None else b_V.mean()
    for x_CD, target_C, grad_x_CD in zip(*(of.split(CHUNK) for of in (x_MD, target_M, grad_x_MD)), strict=True):
        logits_CV, target_C1 = buffer_CV[: len(x_CD)], target_C[:, None]
        torch.mm(x_CD, low_precision_W_VD.T, out=logits_CV)
        if low_precision_b_V is not None:
            logits_CV += low_precision_b_V
        logits_CV = logits_CV.to(dtype)
        target_logit_C1, mean_logit_C1 = logits_CV.gather(1, target_C1), (x_CD.to(dtype) @ mean_W_D)[:, None] + mean_b
        max_C1 = logits_CV.amax(1, keepdim=True)
        Z_C1 = logits_CV.sub_(max_C1).exp_().sum(1, keepdim=True)
        loss_C1 = max_C1 + Z_C1.log() - (1 - label_smoothing) * target_logit_C1 - label_smoothing * mean_logit_C1
        loss_sum += loss_C1.sum()
        # The gradient of the logits is probability minus smoothed target. Here: exp / Z, minus (1 - label_smoothing) at
        # the target. The part of the smoothed target that is the same for all entries is subtracted after the loop.
        logits_CV.mul_(factor / Z_C1)
        logits_CV.scatter_add_(1, target_C1, torch.full_like(Z_C1, factor * (label_smoothing - 1)))
        if b_V is not None:
            grad_b_V += logits_CV.sum(0)
        grad_CV = logits_CV.to(x_ND.dtype)
        if grad_CV.dtype == dtype:
            torch.mm(grad_CV, low_precision_W_VD, out=grad_x_CD)
        else:
            grad_x_CD.copy_(grad_CV @ low_precision_W_VD)
        add_product_(grad_W_VD, grad_CV.T, x_CD)
    uniform_part = factor * label_smoothing / len(W_VD)
    grad_x_MD -= uniform_part * low_precision_W_VD.sum(0, dtype=dtype)
    grad_W_VD -= uniform_part * x_MD.sum(0, dtype=dtype)
    grad_b_V -= uniform_part * len(x_MD)
    grad_x_ND = torch.zeros_like(x_ND, dtype=dtype).index_copy_(0, token_N, grad_x_MD)
    return LossAndGradients(loss_sum, grad_x_ND, grad_W_VD, grad_b_V)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Computes total += a b. The precision of a and b may be lower than that of the total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
