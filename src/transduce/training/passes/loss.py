"""The projection to the vocabulary and the smoothed loss in one: the logits of a batch are never held all at once.

Its slow twin is `Embedding.logits` followed by `recipe.loss`. The gradient is found on the way, chunk by chunk, while
the chunk's logits are still in the cache: what waits for the backward pass is as large as the input, not as the logits.
"""

# Axes: N tokens, C tokens of a chunk, D = d_model, V vocabulary.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
            found = loss_and_gradients(
                x_ND.to(dtype), W_VD, b_V, target_N, label_smoothing, pad_id, torch.zeros_like(W_VD)
            )
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


def loss_and_gradients(
    x_ND: Tensor,
    W_VD: Tensor,
    b_V: Tensor | None,
    target_N: Tensor,
    label_smoothing: float,
    pad_id: int,
    grad_W_VD: Tensor,
    factor: float = 1.0,
) -> _Found:
    """Products in the precision of `x_ND`, all else in that of `grad_W_VD`, to which the gradient of the weights is
    added. All gradients are times `factor`."""
    token_N = (target_N != pad_id).nonzero().squeeze(1)  # padding is not worth a product
    x_MD, target_M = x_ND[token_N], target_N[token_N]
    rough_W_VD, rough_b_V = W_VD.to(x_ND.dtype), None if b_V is None else b_V.to(x_ND.dtype)
    dtype, grad_b_V = grad_W_VD.dtype, grad_W_VD.new_zeros(len(W_VD))
    grad_x_MD = torch.empty_like(x_MD, dtype=dtype)
    # One buffer for all chunks: memory that was never touched costs more than what is written to it.
    room_CV = x_ND.new_empty(min(CHUNK, len(x_MD)), len(W_VD))
    loss_sum, mean_W_D = grad_W_VD.new_zeros(()), rough_W_VD.mean(0, dtype=dtype)
    mean_b = 0.0 if b_V is None else b_V.mean()
    for x_CD, target_C, grad_x_CD in zip(*(of.split(CHUNK) for of in (x_MD, target_M, grad_x_MD)), strict=True):
        logits_CV, target_C1 = room_CV[: len(x_CD)], target_C[:, None]
        torch.mm(x_CD, rough_W_VD.T, out=logits_CV)
        if rough_b_V is not None:
            logits_CV += rough_b_V
        logits_CV = logits_CV.to(dtype)
        wanted_C1, mean_C1 = logits_CV.gather(1, target_C1), (x_CD.to(dtype) @ mean_W_D)[:, None] + mean_b
        top_C1 = logits_CV.amax(1, keepdim=True)
        Z_C1 = logits_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
        loss_C1 = top_C1 + Z_C1.log() - (1 - label_smoothing) * wanted_C1 - label_smoothing * mean_C1
        loss_sum += loss_C1.sum()
        # By the logits, the gradient is what was given less what was wanted: exp / Z, less one at the target, less the
        # same everywhere, which comes at the end.
        logits_CV.mul_(factor / Z_C1)
        logits_CV.scatter_add_(1, target_C1, torch.full_like(Z_C1, factor * (label_smoothing - 1)))
        if b_V is not None:
            grad_b_V += logits_CV.sum(0)
        grad_CV = logits_CV.to(x_ND.dtype)
        if grad_CV.dtype == dtype:
            torch.mm(grad_CV, rough_W_VD, out=grad_x_CD)
        else:
            grad_x_CD.copy_(grad_CV @ rough_W_VD)
        add_product_(grad_W_VD, grad_CV.T, x_CD)
    everywhere = factor * label_smoothing / len(W_VD)
    grad_x_MD -= everywhere * rough_W_VD.sum(0, dtype=dtype)
    grad_W_VD -= everywhere * x_MD.sum(0, dtype=dtype)
    grad_b_V -= everywhere * len(x_MD)
    grad_x_ND = torch.zeros_like(x_ND, dtype=dtype).index_copy_(0, token_N, grad_x_MD)
    return _Found(loss_sum, grad_x_ND, grad_W_VD, grad_b_V)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, whatever its precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
