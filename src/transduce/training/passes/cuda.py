"""The operations of written passes on a GPU, for packed tokens. `cpu.py` has those of a CPU.

The operations between two matrix products are limited by memory bandwidth, so one kernel does all of them. No random
numbers are stored: a key and the index of a value decide whether dropout drops it, forward and backward. The slow twins
are in `model.py`, `attention.py` and `recipe.py`; tests compare both, with Triton's interpreter if there is no GPU.
"""

# Axes: N tokens, M attended positions, D = d_model, F = d_ff, V vocabulary, H heads, P all heads side by side.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from transduce.training.passes import kernels
from transduce.training.passes.layout import AttentionInputs, Dropout, NormGradients, PackedVisibility, Side
from transduce.training.passes.loss import add_product_

N_PARTIALS = 528
"""Programs of a kernel that also sums over all tokens. Each writes one partial sum: the order of addition is fixed, so
every run gives the same bits."""


# Embedding


def embed(
    side: Side, table_VD: Tensor, position_TD: Tensor, dropout: Dropout, dtype: torch.dtype
) -> tuple[Tensor, Dropout]:
    """The sum of embedding, times sqrt(d_model), and position, with dropout."""
    n, d_model = len(side.ids_N), table_VD.shape[1]
    out_ND = table_VD.new_empty(n, d_model, dtype=dtype)
    kernels.embed_kernel[(n,)](
        *side,
        table_VD,
        position_TD,
        out_ND,
        dropout.keys_P,
        dropout.place,
        dropout.threshold,
        d_model**0.5,
        dropout.factor,
        d_model,
        HAS_DROPOUT=dropout.probability > 0,
        C=triton.next_power_of_2(d_model),
    )
    return out_ND, dropout


def embed_backward(
    grad_ND: Tensor, side: Side, saved: Dropout, table_grad_VD: Tensor, position_grad_TD: Tensor | None
) -> None:
    """Adds to the gradients of the tables, always in the same order."""
    if position_grad_TD is not None:
        position_grad_TD += _sums_by(side.position_N, drop(grad_ND, saved), len(position_grad_TD))
    table_grad_VD += _sums_by(side.ids_N, drop(grad_ND, saved, grad_ND.shape[1] ** 0.5), len(table_grad_VD))


def _sums_by(ids_N: Tensor, x_ND: Tensor, n: int) -> Tensor:
    """Row i of the result is the sum of the rows of x whose id is i."""
    return torch.ops.aten.embedding_dense_backward(x_ND, ids_N, n, -1, False)  # type: ignore[no-any-return]


def drop(x_ND: Tensor, dropout: Dropout, factor: float = 1.0) -> Tensor:
    """Applies dropout and multiplies by a factor, in float32."""
    out_ND = torch.empty_like(x_ND, dtype=torch.float32)
    block = 1024
    kernels.drop_kernel[(triton.cdiv(x_ND.numel(), block),)](
        x_ND,
        out_ND,
        dropout.keys_P,
        dropout.place,
        dropout.threshold,
        dropout.factor * factor,
        x_ND.numel(),
        HAS_DROPOUT=dropout.probability > 0,
        C=block,
    )
    return out_ND


# Add & Norm


class Normed(NamedTuple):
    """What `add_and_norm_backward` needs."""

    sum_ND: Tensor
    mean_N: Tensor
    rate_N: Tensor
    """One over the standard deviation."""
    dropout: Dropout


def add_and_norm(
    x_ND: Tensor, y_ND: Tensor, gain_D: Tensor, bias_D: Tensor, eps: float, dropout: Dropout
) -> tuple[Tensor, Normed]:
    n, d_model = x_ND.shape
    out_ND, sum_ND = torch.empty_like(x_ND), torch.empty_like(x_ND)
    mean_N, rate_N = (x_ND.new_empty(n, dtype=torch.float32) for _ in range(2))
    columns, rows, warps = _norm_tile(d_model)
    kernels.add_and_norm_kernel[(triton.cdiv(n, rows),)](
        x_ND,
        y_ND,
        gain_D,
        bias_D,
        sum_ND,
        out_ND,
        mean_N,
        rate_N,
        dropout.keys_P,
        dropout.place,
        dropout.threshold,
        dropout.factor,
        eps,
        n,
        d_model,
        HAS_DROPOUT=dropout.probability > 0,
        R=rows,
        C=columns,
        num_warps=warps,
    )
    return out_ND, Normed(sum_ND, mean_N, rate_N, dropout)


def _norm_tile(d_model: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a tile: about 2,048 values, 16 for each thread."""
    columns = triton.next_power_of_2(d_model)
    rows = max(1, 2048 // columns)
    return columns, rows, max(1, min(8, rows * columns // 512))


def add_and_norm_backward(
    grad_ND: Tensor, normed: Normed, gain_D: Tensor, bias_D: Tensor, grads: NormGradients
) -> tuple[Tensor, Tensor]:
    """The gradients of x and y. Without dropout both are the same tensor."""
    (n, d_model), dropout = grad_ND.shape, normed.dropout
    has_dropout = dropout.probability > 0
    grad_x_ND = torch.empty_like(grad_ND)
    grad_y_ND = torch.empty_like(grad_ND) if has_dropout else grad_x_ND
    columns, rows, warps = _norm_tile(d_model)
    warps = max(1, warps // 2)  # each thread also holds sums of three kinds
    n_programs = min(N_PARTIALS, triton.cdiv(n, rows))
    partial_P3D = grad_ND.new_empty(n_programs, 3, d_model, dtype=torch.float32)
    kernels.add_and_norm_backward_kernel[(n_programs,)](
        grad_ND,
        *normed[:3],
        gain_D,
        grad_x_ND,
        grad_y_ND,
        partial_P3D,
        dropout.keys_P,
        dropout.place,
        dropout.threshold,
        dropout.factor,
        n,
        d_model,
        HAS_DROPOUT=has_dropout,
        R=rows,
        C=columns,
        num_warps=warps,
    )
    _add_partials(partial_P3D, [grad for grad in grads if grad is not None])
    return grad_x_ND, grad_y_ND


def _add_partials(partial_PKD: Tensor, totals: Sequence[Tensor]) -> None:
    """Adds to each total the sum of its partial sums."""
    n_programs, n_kinds, width = partial_PKD.shape
    rows, columns = min(128, triton.next_power_of_2(n_programs)), 16
    padded = [*totals, totals[-1], totals[-1]][:3]  # the kernel takes three, and reads only the first len(totals)
    kernels.add_partials_kernel[(triton.cdiv(width, columns), len(totals))](
        partial_PKD, *padded, n_programs, n_kinds, width, R=rows, C=columns
    )


def linear_relu(x_ND: Tensor, W_DF: Tensor, b_F: Tensor) -> Tensor:
    """max(0, x W + b), which is one kernel of cuBLAS."""
    return torch._addmm_activation(b_F, x_ND, W_DF)


def relu_backward_(grad_NF: Tensor, hidden_NF: Tensor, bias_grad_F: Tensor) -> None:
    """Sets the gradient to zero where the activation was zero, and adds its sum over the tokens to that of the bias."""
    n, d_ff = grad_NF.shape
    rows, columns = 16, min(512, triton.next_power_of_2(d_ff))
    n_programs = min(N_PARTIALS // 8, triton.cdiv(n, rows))
    partial_P1F = grad_NF.new_empty(n_programs, 1, d_ff, dtype=torch.float32)
    kernels.relu_backward_kernel[(n_programs, triton.cdiv(d_ff, columns))](
        grad_NF, hidden_NF, partial_P1F, n, d_ff, R=rows, C=columns
    )
    _add_partials(partial_P1F, [bias_grad_F])


# Attention. A tile of queries goes through all keys from the first to the last that any of them sees.


class Attended(NamedTuple):
    """What `attend_backward` needs beside the inputs."""

    head_NP: Tensor
    log_Z_HN: Tensor
    """Base-2 logarithm of the sum of exponentials."""


TILE, BACKWARD_TILE = 64, 32
"""Queries and keys of a tile. For the gradients of keys and values, smaller tiles hold more sums in registers."""


def attend(inputs: AttentionInputs, visible: PackedVisibility, n_heads: int) -> Attended:
    """Equation 1. Heads lie side by side in each row; the inputs may be views of wider tensors."""
    query_NP, key_MP, value_MP = inputs
    n, d_k, d_v = len(query_NP), query_NP.shape[1] // n_heads, value_MP.shape[1] // n_heads
    head_NP = query_NP.new_empty(n, n_heads * d_v)
    log_Z_HN = query_NP.new_empty(n_heads, n, dtype=torch.float32)
    kernels.attend_kernel[(n_heads, triton.cdiv(n, TILE))](
        *inputs,
        head_NP,
        log_Z_HN,
        visible.first_N,
        visible.last_N,
        query_NP.stride(0),
        key_MP.stride(0),
        value_MP.stride(0),
        head_NP.stride(0),
        n,
        d_k**-0.5,
        D_K=d_k,
        D_V=d_v,
        Q=TILE,
        M=TILE,
    )
    return Attended(head_NP, log_Z_HN)


def attend_backward(
    grad_NP: Tensor,
    inputs: AttentionInputs,
    attended: Attended,
    visible: PackedVisibility,
    n_heads: int,
    grads: AttentionInputs,
) -> None:
    """Writes into `grads`, which may be views of wider tensors."""
    query_NP, key_MP, value_MP = inputs
    n, m = len(query_NP), len(key_MP)
    d_k, d_v = query_NP.shape[1] // n_heads, value_MP.shape[1] // n_heads
    delta_HN = torch.empty_like(attended.log_Z_HN)
    assert grad_NP.stride(0) == attended.head_NP.stride(0)
    kernels.attend_backward_query_kernel[(n_heads, triton.cdiv(n, TILE))](
        *inputs,
        attended.head_NP,
        grad_NP,
        attended.log_Z_HN,
        delta_HN,
        grads.query_NP,
        visible.first_N,
        visible.last_N,
        query_NP.stride(0),
        key_MP.stride(0),
        value_MP.stride(0),
        grad_NP.stride(0),
        grads.query_NP.stride(0),
        n,
        d_k**-0.5,
        D_K=d_k,
        D_V=d_v,
        Q=TILE,
        M=TILE,
        num_stages=2,
    )
    kernels.attend_backward_key_kernel[(n_heads, triton.cdiv(m, BACKWARD_TILE))](
        *inputs,
        grad_NP,
        attended.log_Z_HN,
        delta_HN,
        grads.key_MP,
        grads.value_MP,
        *visible,
        query_NP.stride(0),
        key_MP.stride(0),
        value_MP.stride(0),
        grad_NP.stride(0),
        grads.key_MP.stride(0),
        grads.value_MP.stride(0),
        n,
        m,
        d_k**-0.5,
        D_K=d_k,
        D_V=d_v,
        Q=BACKWARD_TILE,
        M=BACKWARD_TILE,
        num_warps=2,
        num_stages=2,
    )


# The smoothed loss


def loss_and_gradient_(
    logits_NV: Tensor, target_N: Tensor, label_smoothing: float, pad_id: int, factor_1: Tensor
) -> Tensor:
    """Returns the loss of each token, and overwrites the logits with their gradient times `factor_1`."""
    n, n_vocabulary = logits_NV.shape
    loss_N = logits_NV.new_empty(n, dtype=torch.float32)
    block = min(8192, triton.next_power_of_2(n_vocabulary))
    kernels.loss_kernel[(n,)](
        logits_NV,
        target_N,
        loss_N,
        factor_1,
        label_smoothing,
        pad_id,
        ROW_STRIDE=logits_NV.stride(0),
        N_COLUMNS=n_vocabulary,
        C=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return loss_N


LOSS_TOKENS = 32_768
"""At most this many tokens have their logits in memory at once."""


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
    loss_sum, grad_TD = x_TD.new_zeros((), dtype=torch.float32), torch.empty_like(x_TD)
    for x_ND, target_N, grad_ND in zip(*(of.split(LOSS_TOKENS) for of in (x_TD, target_T, grad_TD)), strict=True):
        logits_NV = x_ND @ W_VD.T
        loss_sum += loss_and_gradient_(logits_NV, target_N, label_smoothing, pad_id, factor_1).sum()
        torch.mm(logits_NV, W_VD, out=grad_ND)
        add_product_(W_grad_VD, logits_NV.T, x_ND)
    return loss_sum, grad_TD
