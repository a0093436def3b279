"""The operations of written passes on a CPU, for padded tokens. `cuda.py` has those of a GPU.

Beside matrix products, the first use of new memory and PyTorch's random numbers cost the most time. So most operations
work in place, gradients are added directly to existing ones, and dropout uses 16 random bits for each value.
"""

# Axes: B sentences, N tokens, Q queries, M attended positions, K = d_k, U = d_v, D = d_model, F = d_ff, V vocabulary,
# H heads, P all heads side by side.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.training.passes.layout import AttentionInputs, Dropout, NormGradients, PaddedVisibility, Side
from transduce.training.passes.loss import loss_and_gradients


def mask_of(shape: torch.Size, dropout: Dropout, dtype: torch.dtype) -> Tensor | None:
    """The tensor that dropout multiplies with: 0, or 1 / (1 - probability). None without dropout."""
    if dropout.probability == 0:
        return None
    n, threshold = shape.numel(), round(dropout.probability * 2**16)
    bits = np.random.SFC64(int(dropout.keys_P[dropout.place]) & 0xFFFFFFFF).random_raw(-(-n // 4)).view(np.uint16)
    # NumPy compares 16-bit numbers twenty times faster than PyTorch.
    mask = np.multiply(bits[:n] >= threshold, np.float32(1 / (1 - threshold / 2**16)))
    return torch.from_numpy(mask).view(shape).to(dtype)


def embed(
    side: Side, table_VD: Tensor, position_TD: Tensor, dropout: Dropout, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The sum of embedding, times sqrt(d_model), and position, with dropout."""
    x_ND = F.embedding(side.ids_N, table_VD).mul_(table_VD.shape[1] ** 0.5).add_(position_TD[side.position_N])
    mask_ND = mask_of(x_ND.shape, dropout, x_ND.dtype)
    return (x_ND if mask_ND is None else x_ND.mul_(mask_ND)).to(dtype), mask_ND


def embed_backward(
    grad_ND: Tensor, side: Side, mask_ND: Tensor | None, table_grad_VD: Tensor, position_grad_TD: Tensor | None
) -> None:
    """Adds to the gradients of the tables."""
    grad_ND = grad_ND.to(table_grad_VD.dtype)
    grad_ND = grad_ND if mask_ND is None else grad_ND * mask_ND
    if position_grad_TD is not None:
        position_grad_TD.index_add_(0, side.position_N, grad_ND)
    table_grad_VD.index_add_(0, side.ids_N, grad_ND, alpha=grad_ND.shape[1] ** 0.5)


class Normed(NamedTuple):
    """What `add_and_norm_backward` needs."""

    sum_ND: Tensor
    mean_N1: Tensor
    rate_N1: Tensor
    mask_ND: Tensor | None


def add_and_norm(
    x_ND: Tensor, y_ND: Tensor, gain_D: Tensor, bias_D: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Normed]:
    """Overwrites y."""
    mask_ND = mask_of(y_ND.shape, dropout, y_ND.dtype)
    sum_ND = x_ND + y_ND if mask_ND is None else torch.addcmul(x_ND, y_ND, mask_ND, out=y_ND)
    out_ND, mean_N1, rate_N1 = torch.native_layer_norm(sum_ND, gain_D.shape, gain_D, bias_D, eps)
    return out_ND, Normed(sum_ND, mean_N1, rate_N1, mask_ND)


def add_and_norm_backward(
    grad_ND: Tensor, normed: Normed, gain_D: Tensor, bias_D: Tensor, grads: NormGradients
) -> tuple[Tensor, Tensor]:
    """The gradients of x and y. Without dropout both are the same tensor."""
    grad_x_ND, gain_grad_D, bias_grad_D = torch.ops.aten.native_layer_norm_backward(
        grad_ND, normed.sum_ND, gain_D.shape, normed.mean_N1, normed.rate_N1, gain_D, bias_D, [True, True, True]
    )
    grad_y_ND = grad_x_ND if normed.mask_ND is None else normed.mask_ND.mul_(grad_x_ND)
    grads.gain_D.add_(gain_grad_D)
    grads.bias_D.add_(bias_grad_D)
    if grads.y_bias_D is not None:
        grads.y_bias_D.add_(grad_y_ND.sum(0, dtype=gain_D.dtype))
    return grad_x_ND, grad_y_ND


def linear_relu(x_ND: Tensor, W_DF: Tensor, b_F: Tensor) -> Tensor:
    """max(0, x W + b). `addmm` is slower, because it first writes the bias to every row."""
    return torch.mm(x_ND, W_DF).add_(b_F).relu_()


def relu_backward_(grad_NF: Tensor, hidden_NF: Tensor, bias_grad_F: Tensor) -> None:
    """Sets the gradient to zero where the activation was zero, and adds its sum over the tokens to that of the bias."""
    torch.ops.aten.threshold_backward.grad_input(grad_NF, hidden_NF, 0, grad_input=grad_NF)
    bias_grad_F.add_(grad_NF.sum(0, dtype=bias_grad_F.dtype))


class Attended(NamedTuple):
    """What `attend_backward` needs beside the inputs."""

    head_NP: Tensor
    log_Z: Tensor


class AttendedByProducts(NamedTuple):
    """The same for `attend_by_products`."""

    head_NP: Tensor
    weight_BHQM: Tensor


MAX_KEYS_BY_PRODUCTS = 256
"""Keys. The backward pass needs all attention weights, and those of longer sentences take too much memory."""


def attend(inputs: AttentionInputs, visible: PaddedVisibility, n_heads: int) -> Attended | AttendedByProducts:
    """Equation 1. Heads lie side by side in each row; the inputs may be views of wider tensors."""
    n_keys = len(inputs.key_MP) // max(visible.n_sentences, 1)
    # For short sentences in bfloat16, PyTorch's fused backward pass takes twenty times as long as plain products.
    if inputs.key_MP.dtype == torch.bfloat16 and n_keys <= MAX_KEYS_BY_PRODUCTS:
        return attend_by_products(inputs, visible, n_heads)
    query, key, value = (_heads(x, visible, n_heads) for x in inputs)
    head_BHQU, log_Z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, visible.is_causal, attn_mask=visible.hidden_B11M
    )
    return Attended(_side_by_side(head_BHQU), log_Z)


def attend_by_products(inputs: AttentionInputs, visible: PaddedVisibility, n_heads: int) -> AttendedByProducts:
    query_BHQK, key_BHMK, value_BHMU = (_heads(x, visible, n_heads) for x in inputs)
    score_BHQM = (query_BHQK @ key_BHMK.transpose(2, 3)).mul_(query_BHQK.shape[3] ** -0.5)
    if visible.hidden_B11M is not None:
        score_BHQM.add_(visible.hidden_B11M)
    if visible.is_causal:
        score_BHQM.add_(torch.full(score_BHQM.shape[2:], -torch.inf, dtype=score_BHQM.dtype).triu_(1))
    weight_BHQM = score_BHQM.softmax(-1)
    return AttendedByProducts(_side_by_side(weight_BHQM @ value_BHMU), weight_BHQM)


def attend_backward(
    grad_NP: Tensor,
    inputs: AttentionInputs,
    attended: Attended | AttendedByProducts,
    visible: PaddedVisibility,
    n_heads: int,
    grads: AttentionInputs,
) -> None:
    """Writes into `grads`, which may be views of wider tensors."""
    grad, query, key, value, head = (_heads(x, visible, n_heads) for x in (grad_NP, *inputs, attended.head_NP))
    if isinstance(attended, AttendedByProducts):
        weight_BHQM = attended.weight_BHQM
        weight_grad_BHQM = grad @ value.transpose(2, 3)
        score_grad_BHQM = torch._softmax_backward_data(weight_grad_BHQM, weight_BHQM, -1, weight_BHQM.dtype)
        score_grad_BHQM.mul_(query.shape[3] ** -0.5)
        key_grad, value_grad = score_grad_BHQM.transpose(2, 3) @ query, weight_BHQM.transpose(2, 3) @ grad
        results = [score_grad_BHQM @ key, key_grad, value_grad]
    else:
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, head, attended.log_Z, 0.0, visible.is_causal, attn_mask=visible.hidden_B11M
        )
    for out_NP, grad_BHNK in zip(grads, results, strict=True):
        _heads(out_NP, visible, n_heads).copy_(grad_BHNK)


def _heads(x_NP: Tensor, visible: PaddedVisibility, n_heads: int) -> Tensor:
    return x_NP.view(visible.n_sentences, -1, n_heads, x_NP.shape[1] // n_heads).transpose(1, 2)


def _side_by_side(head_BHQU: Tensor) -> Tensor:
    return head_BHQU.transpose(1, 2).flatten(2).flatten(0, 1)


def projected_loss(
    x_TD: Tensor,
    W_VD: Tensor,
    W_grad_VD: Tensor,
    target_T: Tensor,
    label_smoothing: float,
    pad_id: int,
    factor_1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the summed loss and the gradient of x, and adds to `W_grad_VD`. `factor_1` multiplies both gradients."""
    result = loss_and_gradients(x_TD, W_VD, None, target_T, label_smoothing, pad_id, W_grad_VD, float(factor_1))
    return result.loss_sum, result.grad_x_ND.to(x_TD.dtype)
