"""Statistics of a prepared folder: lengths, batches, and the share of padding in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transduce.config import DataConfig
from transduce.data.plan import make_layout
from transduce.data.prepare import Prepared

N_BARS = 12
MAX_COUNTED_TOKENS = 10_000_000
"""The share of byte tokens is measured on the first tokens, at most this many."""


@dataclass
class Bar:
    """One bar of the histogram: sentences of `first` to `last` tokens."""

    first: int
    last: int
    n_source: int
    n_target: int


@dataclass
class Stats:
    n_examples: int
    """A pair that is used in both directions counts as two."""
    mean_source_length: float
    mean_target_length: float
    """End marks count, and so do language tags if there are any."""
    longest: int
    bars: list[Bar]
    byte_share: float
    """The share of tokens that are single bytes, which spell characters that the vocabulary lacks."""
    batch_tokens: int
    n_steps: int
    n_micro_batches: int
    n_shapes: int
    source_tokens_per_step: float
    target_tokens_per_step: float
    source_non_pad_share: float
    target_non_pad_share: float


def measure(prepared: Prepared, config: DataConfig, seed: int) -> Stats:
    """Statistics of the training split for one epoch."""
    source_N, target_N = prepared.train.lengths()
    layout = make_layout(source_N, target_N, batch_tokens=config.batch_tokens, n_shapes=config.n_shapes, seed=seed)
    source_share, target_share = layout.non_pad_shares(source_N, target_N)
    return Stats(
        n_examples=len(prepared.train),
        mean_source_length=float(source_N.mean()),
        mean_target_length=float(target_N.mean()),
        longest=int(max(source_N.max(), target_N.max())),
        bars=_bars(source_N, target_N),
        byte_share=_byte_share(prepared),
        batch_tokens=config.batch_tokens,
        n_steps=layout.n_steps,
        n_micro_batches=len(layout.n_rows_M),
        n_shapes=len(layout.shape_K2),
        source_tokens_per_step=float(source_N.sum() / layout.n_steps),
        target_tokens_per_step=float(target_N.sum() / layout.n_steps),
        source_non_pad_share=source_share,
        target_non_pad_share=target_share,
    )


def _bars(source_N: NDArray[Any], target_N: NDArray[Any]) -> list[Bar]:
    """Bars of equal width, except that the last covers the longest one percent of the sentences."""
    both = np.concatenate([source_N, target_N])
    width = max(1, -(-int(np.quantile(both, 0.99)) // (N_BARS - 1)))
    bars = []
    for i in range(N_BARS):
        first, last = 1 + i * width, (i + 1) * width if i < N_BARS - 1 else int(both.max())
        n = [int(((length_N >= first) & (length_N <= last)).sum()) for length_N in (source_N, target_N)]
        bars.append(Bar(first, last, *n))
    return [bar for bar in bars if bar.first <= bar.last]


def _byte_share(prepared: Prepared) -> float:
    ids = prepared.train.store.ids[:MAX_COUNTED_TOKENS]
    is_byte_V = np.array([piece.startswith("<0x") for piece in prepared.subwords.pieces(range(len(prepared.subwords)))])
    return float(is_byte_V[ids].mean()) if len(ids) else 0.0
