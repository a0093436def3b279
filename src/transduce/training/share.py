"""A rank's share of an optimiser step, and how it is cut into passes that fit into memory."""

# Axes: B sentences, S source positions, T target positions.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

Tensors = tuple[Tensor, Tensor, Tensor]
"""source_BS, target_in_BT, target_out_BT."""
Part = tuple[Tensor, ...]
"""Some rows of a batch."""


class Share(NamedTuple):
    """A rank's share of a step as tensors; see `StepBatches`."""

    numbers: list[int]
    batches: list[Tensors]
    n_target_tokens: int


class Pass(NamedTuple):
    """The parts of batches that go through the model at once."""

    place: tuple[int, int]
    """The first part's micro-batch and number: it identifies the pass within the step, whichever rank runs it."""
    parts: list[Part]

    @property
    def n_positions(self) -> int:
        return sum(n_positions(part) for part in self.parts)


def passes_of(share: Share, limit: int | None, room: int, can_join: bool) -> Iterator[Pass]:
    """`limit`: batches with more positions are split, None for no limit. `can_join`: a pass takes parts until `room`
    positions are full; otherwise each part is a pass of its own."""
    current, n_current = Pass((0, 0), []), 0
    for number, batch in zip(share.numbers, share.batches, strict=True):
        for i, part in enumerate(split_rows(batch, limit)):
            if current.parts and (not can_join or n_current + n_positions(part) > room):
                yield current
                current, n_current = Pass((0, 0), []), 0
            if not current.parts:
                current = Pass((number, i), [])
            current.parts.append(part)
            n_current += n_positions(part)
    if current.parts:
        yield current


def split_rows(batch: Sequence[Tensor], limit: int | None) -> Iterator[Part]:
    """Parts with at most `limit` positions, but at least one row each."""
    n_rows = len(batch[0])
    n_fit = n_rows if limit is None else max(1, limit // width_of(batch))
    for first in range(0, n_rows, n_fit):
        yield tuple(ids[first : first + n_fit] for ids in batch)


def n_positions(part: Sequence[Tensor]) -> int:
    """Positions of the longer side, padding included."""
    return len(part[0]) * width_of(part)


def width_of(batch: Sequence[Tensor]) -> int:
    return max(batch[0].shape[1], batch[1].shape[1])
