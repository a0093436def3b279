"""The assignment of pairs to batches: a pure function of lengths, token budget, seed and epoch.

So all ranks compute the same plan without communication, and a run can resume at any step without replaying earlier
ones. Pairs of similar lengths share one of a few shapes, which are chosen once to minimise padding. The pairs of each
shape are cut into micro-batches, and these are grouped into optimiser steps. All of this is the same in every epoch. An
epoch only determines which pair of a shape goes into which micro-batch, and the order of the steps.
"""

# Axes: N examples, K shapes, M micro-batches, G grid of lengths.

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.errors import ConfigError, DataError

__all__ = ["Layout", "make_layout"]

Counts = NDArray[np.int64]

GRID_RESOLUTION = 64
"""Lengths up to this value are distinguished exactly; longer ones are rounded up by less than 1 / GRID_RESOLUTION."""


class MicroBatch(NamedTuple):
    rows: NDArray[np.int64]
    shape: tuple[int, int]
    """Source and target positions, at least as many as those of the longest row; end marks count."""


class Step(NamedTuple):
    """A range of micro-batch indices, from `first` up to but not including `last`."""

    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """The part of a plan that is the same in every epoch.

    `epoch` gives the plan of one epoch.

    >>> import numpy as np
    >>> from transduce.data.plan import make_layout
    >>> lengths = np.array([3, 4, 4, 9, 10, 10])
    >>> layout = make_layout(lengths, lengths, batch_tokens=20, n_shapes=2, seed=1)
    >>> epoch = layout.epoch(0)
    >>> sorted(int(row) for n in range(layout.n_steps) for batch in epoch.step(n) for row in batch.rows)
    [0, 1, 2, 3, 4, 5]
    """

    shape_N: NDArray[np.uint16]
    """Index of each example's shape."""
    shape_K2: Counts
    start_M: Counts
    """First example of each micro-batch; examples are ordered by shape."""
    n_rows_M: Counts
    shape_M: Counts
    steps: list[Step]
    seed: int

    @property
    def n_steps(self) -> int:
        return len(self.steps)

    def epoch(self, epoch: int) -> Epoch:
        """The plan of an epoch. Epochs are counted from 0."""
        rng = np.random.default_rng([self.seed, epoch])
        order_N = rng.permutation(len(self.shape_N)).astype(np.int32 if len(self.shape_N) < 2**31 else np.int64)
        # A stable sort keeps the random order within a shape, and is a radix sort, linear in N, for 16-bit integers.
        order_N = order_N[np.argsort(self.shape_N[order_N], kind="stable")]
        return Epoch(self, order_N, rng.permutation(self.n_steps))

    def non_pad_shares(self, source_length_N: NDArray[Any], target_length_N: NDArray[Any]) -> tuple[float, float]:
        """The shares of source and of target positions in an epoch's batches that are not padding."""
        positions = self.shape_K2[self.shape_M] * self.n_rows_M[:, None]
        n_source, n_target = positions.sum(axis=0)
        return float(source_length_N.sum() / n_source), float(target_length_N.sum() / n_target)


@dataclass(frozen=True)
class Epoch:
    layout: Layout
    order_N: NDArray[Any]
    order_of_steps: NDArray[np.int64]

    def step(self, step: int, rank: int = 0, n_ranks: int = 1) -> list[MicroBatch]:
        """A rank's micro-batches: every `n_ranks`-th, so that each belongs to exactly one rank. May be empty."""
        layout = self.layout
        first, last = layout.steps[self.order_of_steps[step]]
        share = []
        for m in range(first + rank, last, n_ranks):
            rows = self.order_N[layout.start_M[m] : layout.start_M[m] + layout.n_rows_M[m]]
            n_source, n_target = layout.shape_K2[layout.shape_M[m]]
            share.append(MicroBatch(rows.astype(np.int64), (int(n_source), int(n_target))))
        return share


def make_layout(
    source_length_N: NDArray[Any],
    target_length_N: NDArray[Any],
    *,
    batch_tokens: int,
    n_shapes: int,
    seed: int,
    micro_tokens: int | None = None,
) -> Layout:
    """Cut the examples into micro-batches and group these into optimiser steps.

    `batch_tokens` limits the source tokens and the target tokens of a step, and `micro_tokens` those of a micro-batch;
    padding counts. A step holds as many full micro-batches as fit. The rest of each shape, less than a full
    micro-batch, goes into steps of several shapes. Micro-batches have at most `n_shapes` different shapes.

    >>> import numpy as np
    >>> from transduce.data.plan import make_layout
    >>> lengths = np.array([3, 4, 4, 9, 10, 10])  # of source and target, end marks included
    >>> layout = make_layout(lengths, lengths, batch_tokens=20, n_shapes=2, seed=1)
    >>> layout.shape_K2.tolist(), layout.n_steps
    ([[4, 4], [10, 10]], 3)
    """
    micro_tokens = batch_tokens if micro_tokens is None else micro_tokens
    if not 1 <= micro_tokens <= batch_tokens:
        raise ConfigError(f"micro-batch of {micro_tokens} tokens, must be from 1 to batch_tokens {batch_tokens}")
    if len(source_length_N) == 0:
        raise DataError("there are no pairs to make batches of: give more text, or clean less")
    longest_N = np.maximum(source_length_N, target_length_N)
    if (longest := int(longest_N.max())) > micro_tokens:
        raise DataError(
            f"pair {int(longest_N.argmax()) + 1} has {longest:,} tokens, a batch holds {micro_tokens:,}: "
            "raise data.batch_tokens, or lower data.max_characters and prepare again"
        )
    shape_K2, shape_N = choose_shapes(source_length_N, target_length_N, n_shapes)
    n_per_shape_K = np.bincount(shape_N, minlength=len(shape_K2))
    n_fit_K = micro_tokens // shape_K2.max(axis=1)
    full, rest = _cut(n_per_shape_K, n_fit_K)
    rng = np.random.default_rng([seed])
    rng.shuffle(full)
    rng.shuffle(rest)
    n_full_per_step = batch_tokens // micro_tokens
    n_in_steps = len(full) - len(full) % n_full_per_step
    micro = full[:n_in_steps]
    steps = [Step(first, first + n_full_per_step) for first in range(0, n_in_steps, n_full_per_step)]
    for pieces in _fill_steps_evenly(np.concatenate([full[n_in_steps:], rest]), shape_K2.max(axis=1), batch_tokens):
        steps.append(Step(len(micro), len(micro) + len(pieces)))
        micro = np.concatenate([micro, pieces])
    return Layout(shape_N, shape_K2, micro[:, 0], micro[:, 1], micro[:, 2], steps, seed)


def _cut(n_per_shape_K: Counts, n_fit_K: Counts) -> tuple[Counts, Counts]:
    """Full micro-batches, and the partly filled one of each shape, each as (start, number of rows, shape)."""
    first_K = np.cumsum(n_per_shape_K) - n_per_shape_K
    n_full_K = n_per_shape_K // n_fit_K
    shape_M = np.repeat(np.arange(len(n_fit_K)), n_full_K)
    index_M = np.arange(len(shape_M)) - np.repeat(np.cumsum(n_full_K) - n_full_K, n_full_K)
    full = np.stack([first_K[shape_M] + index_M * n_fit_K[shape_M], n_fit_K[shape_M], shape_M], axis=1)
    n_rest_K = n_per_shape_K % n_fit_K
    rest = np.stack([first_K + n_full_K * n_fit_K, n_rest_K, np.arange(len(n_fit_K))], axis=1)
    return full, rest[n_rest_K > 0]


def _fill_steps_evenly(pieces: Counts, width_K: Counts, batch_tokens: int) -> list[Counts]:
    """Fill steps to the smallest budget that needs no additional step.

    So no step is small, which would make its gradient mostly noise.
    """
    n_steps = len(_fill_steps(pieces, width_K, batch_tokens))
    too_small, enough = int(width_K.max()) - 1, batch_tokens
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        if len(_fill_steps(pieces, width_K, middle)) > n_steps:
            too_small = middle
        else:
            enough = middle
    return _fill_steps(pieces, width_K, enough)


def _fill_steps(pieces: Counts, width_K: Counts, batch_tokens: int) -> list[Counts]:
    """Fill steps with pieces in order, and start a new step when the next row, with its padding, does not fit."""
    steps: list[list[tuple[int, int, int]]] = []
    room = 0
    for start, n_rows, shape in pieces.tolist():
        while n_rows:
            if room < width_K[shape]:
                steps.append([])
                room = batch_tokens
            n_taken = min(n_rows, room // int(width_K[shape]))
            steps[-1].append((start, n_taken, shape))
            room -= n_taken * int(width_K[shape])
            start, n_rows = start + n_taken, n_rows - n_taken
    return [np.array(step, dtype=np.int64) for step in steps]


def choose_shapes(
    source_length_N: NDArray[Any], target_length_N: NDArray[Any], n_shapes: int
) -> tuple[Counts, NDArray[np.uint16]]:
    """At most `n_shapes` shapes (source length, target length), and the index of each example's shape.

    All examples start in one box of the plane of source and target lengths. The split that saves the most padding is
    applied repeatedly until there are enough boxes. The work depends on the number of distinct lengths: examples are
    only counted at the start and looked up at the end.
    """
    source_grid_G, source_N = _on_grid(source_length_N)
    target_grid_G, target_N = _on_grid(target_length_N)
    cell_N = source_N.astype(np.int64) * len(target_grid_G) + target_N
    n_GG = np.bincount(cell_N, minlength=len(source_grid_G) * len(target_grid_G))
    boxes = _split_boxes(n_GG.reshape(len(source_grid_G), len(target_grid_G)), source_grid_G, target_grid_G, n_shapes)
    shape_GG = np.zeros((len(source_grid_G), len(target_grid_G)), dtype=np.uint16)
    for number, box in enumerate(boxes):
        shape_GG[box.rows, box.columns] = number
    shape_K2 = np.array([(source_grid_G[b.rows.stop - 1], target_grid_G[b.columns.stop - 1]) for b in boxes])
    return shape_K2, shape_GG.reshape(-1)[cell_N]


def _on_grid(length_N: NDArray[Any]) -> tuple[Counts, NDArray[np.int32]]:
    """A grid of lengths, and for each example the index of its grid length: the smallest that is not shorter."""
    longest = int(length_N.max())
    grid = list(range(1, min(longest, GRID_RESOLUTION) + 1))
    while grid[-1] < longest:
        grid.append(min(grid[-1] + max(grid[-1] // GRID_RESOLUTION, 1), longest))
    grid_G = np.array(grid, dtype=np.int64)
    is_used_G = np.bincount(np.searchsorted(grid_G, length_N), minlength=len(grid_G)) > 0
    grid_G = grid_G[is_used_G]
    return grid_G, np.searchsorted(grid_G, length_N).astype(np.int32)


class _Box(NamedTuple):
    rows: slice
    columns: slice


def _split_boxes(n_GG: Counts, source_grid_G: Counts, target_grid_G: Counts, n_shapes: int) -> list[_Box]:
    boxes: list[_Box] = []
    heap: list[tuple[float, int, list[_Box]]] = []  # best split of each box: (-gain, box, parts)

    def add(box: _Box) -> None:
        gain, parts = _best_split(n_GG, source_grid_G, target_grid_G, box)
        heapq.heappush(heap, (-gain, len(boxes), parts))
        boxes.append(box)

    add(_tight(n_GG, _Box(slice(0, n_GG.shape[0]), slice(0, n_GG.shape[1]))))
    while len(heap) < n_shapes and heap[0][0] < 0:
        for part in heapq.heappop(heap)[2]:
            add(_tight(n_GG, part))
    return [boxes[number] for _, number, _ in sorted(heap, key=lambda split: split[1])]


def _best_split(n_GG: Counts, source_grid_G: Counts, target_grid_G: Counts, box: _Box) -> tuple[float, list[_Box]]:
    """The split along source or target lengths that saves the most positions: the gain and the two parts."""
    best_gain, best_parts = 0.0, list[_Box]()
    n_in_box = n_GG[box.rows, box.columns]
    cost = n_in_box.sum() * (source_grid_G[box.rows.stop - 1] + target_grid_G[box.columns.stop - 1])
    for axis, (grid_G, other_grid_G) in enumerate([(source_grid_G, target_grid_G), (target_grid_G, source_grid_G)]):
        along, across = box[axis], box[1 - axis]
        n_AC = n_in_box if axis == 0 else n_in_box.T
        if len(n_AC) < 2:
            continue
        # The last used column of each line, then of all lines up to it, and of all lines from it on.
        last_A = np.where(n_AC > 0, np.arange(across.start, across.stop), across.start).max(axis=1)
        below_A, above_A = np.maximum.accumulate(last_A), np.maximum.accumulate(last_A[::-1])[::-1]
        n_below_A = np.cumsum(n_AC.sum(axis=1))
        cost_below_A = n_below_A * (grid_G[along] + other_grid_G[below_A])
        n_above_A = n_below_A[-1] - n_below_A
        cost_A = cost_below_A[:-1] + n_above_A[:-1] * (grid_G[along.stop - 1] + other_grid_G[above_A[1:]])
        best = int(cost_A.argmin())
        if (gain := float(cost - cost_A[best])) > best_gain:
            middle = along.start + best + 1
            halves = slice(along.start, middle), slice(middle, along.stop)
            best_gain = gain
            best_parts = [_Box(half, across) if axis == 0 else _Box(across, half) for half in halves]
    return best_gain, best_parts


def _tight(n_GG: Counts, box: _Box) -> _Box:
    """Remove empty rows and columns at the borders of a box."""
    n_in_box = n_GG[box.rows, box.columns]
    rows, columns = np.flatnonzero(n_in_box.any(axis=1)), np.flatnonzero(n_in_box.any(axis=0))
    return _Box(
        slice(box.rows.start + int(rows[0]), box.rows.start + int(rows[-1]) + 1),
        slice(box.columns.start + int(columns[0]), box.columns.start + int(columns[-1]) + 1),
    )
