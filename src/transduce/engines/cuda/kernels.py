"""Triton kernels for a decoder step: attention that reads only visible cells, and `Peaks` in one pass over the logits.

The slow twins are `CachedStepper.attend_to_past`, `CachedStepper.attend_to_memory` and `Peaks.of`.
"""

# Axes: as in cached.py and peaks.py; V is padded to whole groups. In a tile: Q queries, K and U the widths of a key and
# a value, each padded to a size that a tile can have; C cells or source positions, or columns of logits; G groups.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from transduce.search.peaks import GROUP, Peaks

LOG2_E = tl.constexpr(1.4426950408889634)
TILE = 4096
"""Logits that are read together."""
CELLS = 64


@triton.jit
def attend_kernel(
    query,
    key,
    value,
    hidden,
    new,
    place,
    out,
    n_seen,
    n_cells,
    query_row,
    new_row,
    key_b,
    key_h,
    key_c,
    key_k,
    value_b,
    value_h,
    value_c,
    hidden_b,
    hidden_q,
    n_queries: tl.constexpr,
    d_k: tl.constexpr,
    d_v: tl.constexpr,
    HAS_NEW: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    U: tl.constexpr,
    C: tl.constexpr,
):
    """Equation 1 for one head of one sentence and its few queries. With HAS_NEW, the new token of each query is written
    to its cell, and only that query sees it."""
    b, h, n_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    q_Q1, k_1K, u_1U = tl.arange(0, Q)[:, None], tl.arange(0, K)[None], tl.arange(0, U)[None]
    row_Q1, is_query_Q1, is_k_1K, is_u_1U = b * n_queries + q_Q1, q_Q1 < n_queries, k_1K < d_k, u_1U < d_v
    is_QK, is_QU = is_query_Q1 & is_k_1K, is_query_Q1 & is_u_1U
    query_QK = tl.load(query + row_Q1 * query_row + h * d_k + k_1K, is_QK, 0.0)
    key, value = key + b * key_b + h * key_h, value + b * value_b + h * value_h
    if HAS_NEW:
        new_at = new + row_Q1 * new_row + h * (d_k + d_v)
        key_QK, value_QU = tl.load(new_at + k_1K, is_QK, 0.0), tl.load(new_at + d_k + u_1U, is_QU, 0.0)
        cell_Q1 = tl.load(place + row_Q1 * n_heads + h, is_query_Q1, 0) - (b * n_heads + h) * n_cells
        tl.store(key + cell_Q1 * key_c + k_1K * key_k, key_QK, is_QK)
        tl.store(value + cell_Q1 * value_c + u_1U, value_QU, is_QU)
        top_Q1 = tl.sum(query_QK.to(tl.float32) * key_QK.to(tl.float32), 1, keep_dims=True)
        sum_Q1, out_QU = tl.full([Q, 1], 1.0, tl.float32), value_QU.to(tl.float32)
    else:
        top_Q1 = tl.full([Q, 1], float("-inf"), tl.float32)
        sum_Q1, out_QU = tl.zeros([Q, 1], tl.float32), tl.zeros([Q, U], tl.float32)
    for start in range(0, n_seen, C):
        c_C = start + tl.arange(0, C)
        hidden_at = hidden + b * hidden_b + q_Q1 * hidden_q + c_C[None]
        hidden_QC = tl.load(hidden_at, is_query_Q1 & (c_C < n_seen)[None], float("-inf")).to(tl.float32)
        if HAS_NEW:  # the cell may not hold the new token before this kernel ends
            hidden_QC = tl.where(cell_Q1 == c_C[None], float("-inf"), hidden_QC)
        is_seen_C = tl.max(hidden_QC, 0) == 0
        if tl.max(is_seen_C.to(tl.int32), 0) == 1:
            key_KC = tl.load(key + c_C[None] * key_c + tl.trans(k_1K) * key_k, is_seen_C[None] & tl.trans(is_k_1K), 0.0)
            score_QC = tl.dot(query_QK, key_KC, input_precision="ieee") + hidden_QC
            new_top_Q1 = tl.maximum(top_Q1, tl.max(score_QC, 1, keep_dims=True))
            # A query without a visible cell so far has top -inf: avoid inf - inf.
            safe_Q1 = tl.where(new_top_Q1 == float("-inf"), 0.0, new_top_Q1)
            weight_QC = tl.exp2((score_QC - safe_Q1) * LOG2_E)
            rescale_Q1 = tl.exp2((top_Q1 - safe_Q1) * LOG2_E)
            value_CU = tl.load(value + c_C[:, None] * value_c + u_1U, is_seen_C[:, None] & is_u_1U, 0.0)
            product_QU = tl.dot(weight_QC.to(value_CU.dtype), value_CU, input_precision="ieee")
            sum_Q1 = sum_Q1 * rescale_Q1 + tl.sum(weight_QC, 1, keep_dims=True)
            out_QU, top_Q1 = out_QU * rescale_Q1 + product_QU, new_top_Q1
    out_at = out + row_Q1 * (n_heads * d_v) + h * d_v + u_1U
    sum_Q1 = tl.where(is_query_Q1, sum_Q1, 1.0)
    tl.store(out_at, (out_QU / sum_Q1).to(out.dtype.element_ty), is_QU)


def attend_to_past(
    query_RP: Tensor, new_RP: Tensor, cell_BHCW: Tensor, place_BKH: Tensor, hidden_BKC: Tensor
) -> Tensor:
    """Attention to each hypothesis's past and its new token, which is written to its cell: (R, all heads)."""
    d_k = query_RP.shape[1] // cell_BHCW.shape[1]
    key, value = cell_BHCW[..., :d_k], cell_BHCW[..., d_k:]
    return _attend(query_RP, key, value, hidden_BKC, new_RP, place_BKH)


def attend_to_memory(query_RP: Tensor, key_BHKS: Tensor, value_BHSU: Tensor, unseen_B11S: Tensor) -> Tensor:
    n_queries = len(query_RP) // len(key_BHKS)
    unseen_BKS = unseen_B11S[:, 0].expand(-1, n_queries, -1)
    return _attend(query_RP, key_BHKS.transpose(2, 3), value_BHSU, unseen_BKS, None, None)


def _attend(
    query_RP: Tensor,
    key_BHMK: Tensor,
    value_BHMU: Tensor,
    hidden_BKM: Tensor,
    new_RP: Tensor | None,
    place_BKH: Tensor | None,
) -> Tensor:
    (n, n_queries, n_seen), n_heads, d_v = hidden_BKM.shape, key_BHMK.shape[1], value_BHMU.shape[3]
    d_k = query_RP.shape[1] // n_heads
    assert query_RP.stride(1) == value_BHMU.stride(3) == hidden_BKM.stride(2) == 1
    out_RP = query_RP.new_empty(len(query_RP), n_heads * d_v)
    attend_kernel[n, n_heads](
        query_RP,
        key_BHMK,
        value_BHMU,
        hidden_BKM,
        new_RP,
        place_BKH,
        out_RP,
        n_seen,
        key_BHMK.shape[2],
        query_RP.stride(0),
        0 if new_RP is None else new_RP.stride(0),
        *key_BHMK.stride(),
        *value_BHMU.stride()[:3],
        *hidden_BKM.stride()[:2],
        n_queries=n_queries,
        d_k=d_k,
        d_v=d_v,
        HAS_NEW=new_RP is not None,
        Q=_padded(n_queries),
        K=_padded(d_k),
        U=_padded(d_v),
        C=CELLS,
        num_warps=4,
    )
    return out_RP


def _padded(n: int) -> int:
    """The next size that a product of tiles can have."""
    return max(16, triton.next_power_of_2(n))


@triton.jit
def peaks_kernel(logits, peak_out, log_sum_out, n_columns, row_stride, n_groups, W: tl.constexpr, C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group_G = tl.arange(0, C // W)
    top, sum_C = float("-inf"), tl.zeros([C], tl.float32)
    for start in range(0, n_columns, C):
        column_C = start + tl.arange(0, C)
        x_C = tl.load(logits + row * row_stride + column_C, column_C < n_columns, float("-inf")).to(tl.float32)
        peak_G = tl.max(tl.reshape(x_C, [C // W, W]), 1)
        at_G = start // W + group_G
        tl.store(peak_out + row * n_groups + at_G, peak_G, at_G < n_groups)
        new_top = tl.maximum(top, tl.max(peak_G))
        sum_C = sum_C * tl.exp2((top - new_top) * LOG2_E) + tl.exp2((x_C - new_top) * LOG2_E)
        top = new_top
    tl.store(log_sum_out + row, top + tl.log2(tl.sum(sum_C)) / LOG2_E)


def peaks_of(logits_RV: Tensor, n_vocabulary: int) -> Peaks:
    """`logits_RV` is padded to whole groups. Columns past the vocabulary are ignored."""
    n_rows, width = logits_RV.shape
    assert width % GROUP == 0
    assert logits_RV.is_contiguous()
    n_groups = -(-n_vocabulary // GROUP)
    peak_RN = logits_RV.new_empty(n_rows, n_groups, dtype=torch.float32)
    log_sum_R1 = logits_RV.new_empty(n_rows, 1, dtype=torch.float32)
    peaks_kernel[(n_rows,)](logits_RV, peak_RN, log_sum_R1, n_vocabulary, width, n_groups, W=GROUP, C=TILE, num_warps=8)

    def read_groups(row: Tensor, group: Tensor) -> Tensor:
        return logits_RV.view(-1, GROUP)[row * (width // GROUP) + group]

    return Peaks(peak_RN, log_sum_R1, read_groups, lambda: logits_RV[:, :n_vocabulary])
