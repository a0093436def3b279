"""`Peaks` on a GPU, by one look at all logits. The slow twin is `Peaks.of`."""

# Axes: R rows, V vocabulary filled up to whole groups, N groups; of a tile C columns, G groups.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from transduce.peaks import GROUP, Peaks

LOG2_E = tl.constexpr(1.4426950408889634)
TILE = 4096


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
    """What stands past the vocabulary, up to a whole group, counts for nothing; a search never chooses it."""
    n_rows, width = logits_RV.shape
    assert width % GROUP == 0
    assert logits_RV.is_contiguous()
    n_groups = -(-n_vocabulary // GROUP)
    peak_RN = logits_RV.new_empty(n_rows, n_groups, dtype=torch.float32)
    log_sum_R1 = logits_RV.new_empty(n_rows, 1, dtype=torch.float32)
    peaks_kernel[(n_rows,)](logits_RV, peak_RN, log_sum_R1, n_vocabulary, width, n_groups, W=GROUP, C=TILE, num_warps=8)

    def look(row: Tensor, group: Tensor) -> Tensor:
        return logits_RV.view(-1, GROUP)[row * (width // GROUP) + group]

    return Peaks(peak_RN, log_sum_R1, look, lambda: logits_RV[:, :n_vocabulary])
