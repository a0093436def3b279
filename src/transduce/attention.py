"""Equation 1, attention, in three versions: as written in the paper, fused, and in blocks for a window (section 4).

Every version takes a `Visible`, which describes the visible positions, so that a fast version need not build the whole
matrix. A query that sees no position gives zeros, not NaN, in the forward and the backward pass; tests check all three.
"""

# Axes: B batch, H heads, Q queries, M attended positions, K = d_k, U = d_v.
# In blocks: N blocks, Z queries of a block, Y = 3 Z positions that a block may attend to, X = B N.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Visible(NamedTuple):
    """Which positions each query may attend to. A position is visible if all conditions below allow it."""

    explicit_BQM: Tensor | None = None
    """True for a visible position. Any axis may have length 1: padding is (B, 1, M), the same for all queries."""
    look_ahead: bool = True
    """False hides every position after q from query q."""
    window: int | None = None
    """If set, query q sees position m only if 2 |q - m| <= window."""

    def matrix(self, n_queries: int, n_attended: int, device: torch.device) -> Tensor:
        """visible_BQM. Axes along which it does not change have length 1."""
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
    """Equation 1 as written: softmax(Q K^T / sqrt(d_k)) V. Also returns the attention weights before dropout."""
    d_k = query_BHQK.shape[-1]
    score_BHQM = query_BHQK @ key_BHMK.transpose(-1, -2) / math.sqrt(d_k)
    visible_B1QM = visible.matrix(query_BHQK.shape[2], key_BHMK.shape[2], query_BHQK.device).unsqueeze(1)
    score_BHQM = score_BHQM.masked_fill(~visible_B1QM, torch.finfo(score_BHQM.dtype).min)
    weight_BHQM = score_BHQM.softmax(-1) * visible_B1QM
    return F.dropout(weight_BHQM, dropout) @ value_BHMU, weight_BHQM


def attend_fast(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """`attend` without the attention weights, by the faster of the two functions below."""
    # Blocks do not pay off for short sequences, because each query is multiplied with three blocks of keys.
    if visible.window is not None and query_BHQK.shape[2] > 3 * _block_length(visible.window):
        return attend_window(query_BHQK, key_BHMK, value_BHMU, visible, dropout)
    return attend_fused(query_BHQK, key_BHMK, value_BHMU, visible, dropout)


def attend_fused(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """PyTorch's fused kernels, which never hold the attention weights of all queries at once."""
    if visible.explicit_BQM is None and visible.window is None:
        # With is_causal instead of a matrix, the kernels skip the half above the diagonal.
        is_causal = not visible.look_ahead
        return F.scaled_dot_product_attention(query_BHQK, key_BHMK, value_BHMU, None, dropout, is_causal=is_causal)
    visible_BQM = visible.matrix(query_BHQK.shape[2], key_BHMK.shape[2], query_BHQK.device)
    return _scaled_dot_product(query_BHQK, key_BHMK, value_BHMU, visible_BQM.unsqueeze(1), dropout)


def attend_window(query_BHQK: Tensor, key_BHMK: Tensor, value_BHMU: Tensor, visible: Visible, dropout: float) -> Tensor:
    """Restricted self-attention (section 4). Memory grows with n r instead of n n.

    Queries are cut into blocks of at least half a window, so that a block sees only itself and its two neighbours.
    """
    assert visible.window is not None
    n, n_block = query_BHQK.shape[2], _block_length(visible.window)
    n_padding = -n % n_block
    query_BHNZK = torch.unflatten(F.pad(query_BHQK, (0, 0, 0, n_padding)), 2, (-1, n_block))
    key_BHNYK = _three_blocks(key_BHMK, n_block, n_padding)
    value_BHNYU = _three_blocks(value_BHMU, n_block, n_padding)

    is_token_BM = torch.ones(1, n, dtype=torch.bool, device=query_BHQK.device)
    if visible.explicit_BQM is not None:
        assert visible.explicit_BQM.shape[1] == 1, "explicit visibility must be the same for all queries"
        is_token_BM = visible.explicit_BQM[:, 0]
    is_token_BNY = F.pad(is_token_BM, (n_block, n_block + n_padding)).unfold(1, 3 * n_block, n_block)
    offset_ZY = torch.arange(-n_block, 2 * n_block, device=query_BHQK.device)
    offset_ZY = offset_ZY - torch.arange(n_block, device=query_BHQK.device)[:, None]
    in_window_ZY = 2 * offset_ZY.abs() <= visible.window
    if not visible.look_ahead:
        in_window_ZY = in_window_ZY & (offset_ZY <= 0)
    visible_BNZY = is_token_BNY[:, :, None] & in_window_ZY

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
    # For a query that sees no position, cuDNN (bf16, torch 2.11) returns a mixture of the values; other kernels zeros.
    return head.masked_fill(~visible.any(-1, keepdim=True), 0) if head.is_cuda else head


def _block_length(window: int) -> int:
    # Blocks below 32 give matrices that are too small to be worth a kernel launch.
    return max(window // 2, 32)


def _three_blocks(x_BHMK: Tensor, n_block: int, n_padding: int) -> Tensor:
    """For each block, the block before it, itself and the block after it."""
    # One block of padding in front: the three blocks for block i then start at block i of the padded sequence.
    return F.pad(x_BHMK, (0, 0, n_block, n_block + n_padding)).unfold(2, 3 * n_block, n_block).transpose(-1, -2)
