"""Pairs of token ids to a batch: the one place that pads, shifts right and adds the marks."""

# Axes: B sentences, S source positions, T target positions.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.config import ModelConfig

Ids = NDArray[np.int64]


class Batch(NamedTuple):
    source_BS: Ids
    target_in_BT: Ids
    target_out_BT: Ids
    n_target_tokens: int
    """End marks counted, padding not."""


def make_batch(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], config: ModelConfig) -> Batch:
    """Sources end with the end mark. `target_in` is `target_out` shifted right behind the start mark."""
    sources, targets = zip(*pairs, strict=True)
    target_out = [[*target, config.eos_id] for target in targets]
    return Batch(
        source_BS=pad_right([[*source, config.eos_id] for source in sources], config.pad_id),
        target_in_BT=pad_right([[config.bos_id, *target] for target in targets], config.pad_id),
        target_out_BT=pad_right(target_out, config.pad_id),
        n_target_tokens=sum(map(len, target_out)),
    )


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> NDArray[Any]:
    ids_BT = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for ids_T, row in zip(ids_BT, rows, strict=True):
        ids_T[: len(row)] = row
    return ids_BT
