"""Equation 1, attention, three times: the obvious way, fused, and in blocks when a window restricts it.

All three take a `Visible`, which describes who may look at whom, so that a fast way need not build the matrix.
A query that may look at nothing yields zeros, not NaN, forward and backward; the tests hold all three to it.
"""

# Axes: B batch, H heads, Q queries, M attended positions, K = d_k, U = d_v.
# In blocks: N blocks, Z queries in one, Y = 3 Z positions that it meets, X = B N.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Visible(NamedTuple):
    """Who may look at whom: all that is given must allow it. True = may look."""

    explicit_BQM: Tensor | None = None
    """Any axis may have length 1: padding is the same for all queries, so it comes as (B, 1, M)."""
    look_ahead: bool = True
    """False hides from query q every position after q."""
    window: int | None = None
    """Position q sees m where 2 |q - m| <= window."""

    def matrix(self, n_queries: int, n_attended: int, device: torch.device) -> Tensor:
        """visible_BQM, with length 1 on axes along which nothing changes."""
        visible_BQM = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
        if self.explicit_BQM is not None:
            visible_BQM = visible_BQM & self.explicit_BQM
        if self.look_ahead and self.window is None:
            return visible_BQM
        offset_QM = torch.arange(n_attended, device=device) - torch.arange(n_queries, device=device)[:, None]
        if not self.look_ahead:
            visible_BQM = visible_BQM & (offset_QM <= 0)
        if self.window is not None:
            visible_BQM = visible_BQM & (2 * offset_QM.abs() <= self.window)
        return visible_BQM


def attend(
    query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float
) -> tuple[Tensor, Tensor]:
    """Equation 1 as it is written. Returns the weights too, as they are before dropout."""
    d_k = query_BHQK.shape[-1]
    score_BHQM = query_BHQK @ key_BHMK.transpose(-1, -2) / math.sqrt(d_k)
    visible_B1QM = visible.matrix(query_BHQK.shape[2], key_BHMK.shape[2], query_BHQK.device).unsqueeze(1)
    score_BHQM = score_BHQM.masked_fill(~visible_B1QM, torch.finfo(score_BHQM.dtype).min)
    weight_BHQM = score_BHQM.softmax(-1) * visible_B1QM
    return F.dropout(weight_BHQM, dropout) @ value_BHMU, weight_BHQM


def attend_fast(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """`attend` without the weights, by the quicker of the two ways below."""
    # Short rows are cheaper whole: cut into blocks, each query would meet three blocks of keys anyway.
    if visible.window is not None and query_BHQK.shape[2] > 3 * _block(visible.window):
        return attend_window(query_BHQK, key_BHMK, value_BHMU, visible, dropout)
    return attend_fused(query_BHQK, key_BHMK, value_BHMU, visible, dropout)


def attend_fused(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """PyTorch's kernels, which never hold the weights of all queries at once."""
    if visible.explicit_BQM is None and visible.window is None:
        # Kernels that know they may stop at the diagonal do half the work.
        causal = not visible.look_ahead
        return F.scaled_dot_product_attention(query_BHQK, key_BHMK, value_BHMU, None, dropout, is_causal=causal)
    visible_BQM = visible.matrix(query_BHQK.shape[2], key_BHMK.shape[2], query_BHQK.device)
    return _scaled_dot_product(query_BHQK, key_BHMK, value_BHMU, visible_BQM.unsqueeze(1), dropout)


def attend_window(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """Restricted self-attention (section 4). Memory grows with n r, not n n.

    Queries are cut into blocks no shorter than half a window, so that a block sees only itself and the two beside it.
    """
    assert visible.window is not None
    n, n_block = query_BHQK.shape[2], _block(visible.window)
    n_fill = -n % n_block
    # Keys and values start one block early: block i of the queries then meets three blocks from place i on.
    query_BHNZK = torch.unflatten(F.pad(query_BHQK, (0, 0, 0, n_fill)), 2, (-1, n_block))
    key_BHNYK = _three_blocks(key_BHMK, n_block, n_fill)
    value_BHNYU = _three_blocks(value_BHMU, n_block, n_fill)

    token_BM = torch.ones(1, n, dtype=torch.bool, device=query_BHQK.device)
    if visible.explicit_BQM is not None:
        assert visible.explicit_BQM.shape[1] == 1, "only padding, alike for all queries, can be cut into blocks"
        token_BM = visible.explicit_BQM[:, 0]
    token_BNY = F.pad(token_BM, (n_block, n_block + n_fill)).unfold(1, 3 * n_block, n_block)
    offset_ZY = torch.arange(-n_block, 2 * n_block, device=query_BHQK.device)
    offset_ZY = offset_ZY - torch.arange(n_block, device=query_BHQK.device)[:, None]
    near_ZY = 2 * offset_ZY.abs() <= visible.window
    if not visible.look_ahead:
        near_ZY = near_ZY & (offset_ZY <= 0)
    visible_BNZY = token_BNY[:, :, None] & near_ZY

    n_blocks = query_BHNZK.shape[2]
    head_XHZU = _scaled_dot_product(
        query_BHNZK.transpose(1, 2).flatten(0, 1),
        key_BHNYK.transpose(1, 2).flatten(0, 1),
        value_BHNYU.transpose(1, 2).flatten(0, 1),
        visible_BNZY.expand(len(query_BHQK), -1, -1, -1).flatten(0, 1).unsqueeze(1),
        dropout,
    )
    head_BHNZU = torch.unflatten(head_XHZU, 0, (-1, n_blocks)).transpose(1, 2)
    return head_BHNZU.flatten(2, 3)[:, :, :n]


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, dropout: float) -> Tensor:
    head = F.scaled_dot_product_attention(query, key, value, visible, dropout)
    # cuDNN (bf16, torch 2.11) gives a query that may look at nothing some mixture of the values; all others give zeros.
    return head.masked_fill(~visible.any(-1, keepdim=True), 0) if head.is_cuda else head


def _block(window: int) -> int:
    # 32: narrower blocks would make matrices too thin to be worth a launch.
    return max(window // 2, 32)


def _three_blocks(x_BHMK: Tensor, n_block: int, n_fill: int) -> Tensor:
    return F.pad(x_BHMK, (0, 0, n_block, n_block + n_fill)).unfold(2, 3 * n_block, n_block).transpose(-1, -2)
