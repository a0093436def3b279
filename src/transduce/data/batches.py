"""Pairs of token ids to batches: the one place that pads, shifts right and adds the marks."""

# Axes: B sentences, S source positions, T target positions, W either; N rows.

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from transduce.config import ModelConfig
from transduce.data.plan import Layout
from transduce.data.store import Store

Ids = NDArray[np.int64]
Item = TypeVar("Item")

ROWS_AT_ONCE = 500
"""After so many rows pages are let go, so that resident memory stays flat: each row touches four places of the store,
and the system maps 64 KiB around each."""


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


def within_tokens(items: Iterable[Item], length: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Lists of at most so many tokens, padding counted, or of one item that has more. Items come sorted by length."""
    some: list[Item] = []
    for item in items:
        if some and (len(some) + 1) * length(item) > most:
            yield some
            some = []
        some.append(item)
    if some:
        yield some


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> Ids:
    ids_BT = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for ids_T, row in zip(ids_BT, rows, strict=True):
        ids_T[: len(row)] = row
    return ids_BT


class Examples:
    """Rows (corpus, pair, direction) of a store. A tag before the source says which language is wanted."""

    def __init__(self, store: Store, tags: dict[str, int]) -> None:
        """`tags`: an id for each target language, or none where there is but one direction."""
        self.store = store
        parts, first = [], 0
        for corpus in store.corpora:
            last = first + corpus.n_pairs
            parts.append((first, last, False, tags.get(corpus.target_language)))
            if corpus.both_ways:
                parts.append((first, last, True, tags.get(corpus.source_language)))
            first = last
        self._first_pair = np.array([part[0] for part in parts], dtype=np.int64)
        self._first_row = np.concatenate([[0], np.cumsum([part[1] - part[0] for part in parts])]).astype(np.int64)
        self._is_reversed = np.array([part[2] for part in parts], dtype=bool)
        self._tag = np.array([-1 if part[3] is None else part[3] for part in parts], dtype=np.int64)
        self.n_tag = int(bool(tags))
        assert bool(tags) == bool((self._tag >= 0).any()) == bool((self._tag >= 0).all()), "all have a tag, or none"

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def lengths(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Of source and target of every row, with the tag and the end marks."""
        sources, targets = [], []
        ends = self._first_pair + np.diff(self._first_row)
        for first, end, is_reversed in zip(self._first_pair, ends, self._is_reversed, strict=True):
            source_N = self.store.source_length_N[first:end]
            target_N = self.store.target_length_N[first:end]
            source_N, target_N = (target_N, source_N) if is_reversed else (source_N, target_N)
            sources.append(source_N.astype(np.int32) + 1 + self.n_tag)
            targets.append(target_N.astype(np.int32) + 1)
        self.store.release()
        return np.concatenate(sources), np.concatenate(targets)

    def batch(self, rows: NDArray[Any], shape: tuple[int, int], config: ModelConfig) -> Batch:
        """The rows as a batch of so many source and target positions. Its slow twin is `make_batch`."""
        source_BS = np.full((len(rows), shape[0]), config.pad_id, dtype=np.int64)
        target_out_BT = np.full((len(rows), shape[1]), config.pad_id, dtype=np.int64)
        n_target_tokens = 0
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            n_target_tokens += self._fill(rows[some], source_BS[some], target_out_BT[some], config.eos_id)
            self.store.release()
        return Batch(source_BS, shift_right(target_out_BT, config), target_out_BT, n_target_tokens)

    def pair(self, row: int) -> tuple[Ids, Ids]:
        """The ids of a row's source and target, without tag and end marks."""
        places = self._places(np.array([row]))
        (source_start,), (target_start,) = places.source_start_B, places.target_start_B
        (source_length,), (target_length,) = places.source_length_B, places.target_length_B
        ids = self.store.ids
        return ids[source_start : source_start + source_length], ids[target_start : target_start + target_length]

    def tag(self, row: int) -> list[int]:
        """What stands before its source, if anything."""
        part = int(np.searchsorted(self._first_row, row, side="right")) - 1
        return [int(self._tag[part])] if self.n_tag else []

    def n_target_tokens(self, rows: NDArray[Any]) -> int:
        """End marks counted."""
        return int(self._places(rows).target_length_B.sum()) + len(rows)

    def _fill(self, rows: NDArray[Any], source_BS: Ids, target_out_BT: Ids, eos_id: int) -> int:
        """Writes the rows' ids and end marks over the padding. Returns the number of target tokens."""
        places = self._places(rows)
        if self.n_tag:
            source_BS[:, 0] = self._tag[places.part_B]
            source_BS = source_BS[:, 1:]
        self._gather(places.source_start_B, places.source_length_B, source_BS, eos_id)
        self._gather(places.target_start_B, places.target_length_B, target_out_BT, eos_id)
        return int(places.target_length_B.sum()) + len(rows)

    def _places(self, rows: NDArray[Any]) -> _Places:
        part_B = np.searchsorted(self._first_row, rows, side="right") - 1
        pair_B = rows - self._first_row[part_B] + self._first_pair[part_B]
        start_B = self.store.start_N[pair_B].astype(np.int64)
        length_B = self.store.source_length_N[pair_B].astype(np.int64)
        other_length_B = self.store.target_length_N[pair_B].astype(np.int64)
        forward = start_B, length_B, start_B + length_B, other_length_B
        backward = forward[2:] + forward[:2]
        is_reversed_B = self._is_reversed[part_B]
        return _Places(part_B, *(np.where(is_reversed_B, b, f) for f, b in zip(forward, backward, strict=True)))

    def _gather(self, start_B: Ids, length_B: Ids, ids_BW: Ids, eos_id: int) -> None:
        place_W = np.arange(ids_BW.shape[1])
        is_id_BW = place_W < length_B[:, None]
        ids_BW[is_id_BW] = self.store.ids[(start_B[:, None] + place_W)[is_id_BW]]
        ids_BW[np.arange(len(start_B)), length_B] = eos_id


class _Places(NamedTuple):
    """Of rows: which part of the examples each belongs to, and where its tokens lie in the store."""

    part_B: Ids
    source_start_B: Ids
    source_length_B: Ids
    target_start_B: Ids
    target_length_B: Ids


def shift_right(target_out_BT: Ids, config: ModelConfig) -> Ids:
    """The end mark is not put in: it would only be asked what comes after the end."""
    target_in_BT = np.full_like(target_out_BT, config.pad_id)
    target_in_BT[:, 0] = config.bos_id
    before_BT = target_out_BT[:, :-1]
    target_in_BT[:, 1:] = np.where(before_BT == config.eos_id, config.pad_id, before_BT)
    return target_in_BT


class StepBatches(NamedTuple):
    """A rank's share of an optimiser step."""

    numbers: list[int]
    """Which of the step's micro-batches these are: the same whichever rank has them."""
    batches: list[Batch]
    n_target_tokens: int
    """Of the whole step, over all ranks."""


def steps(
    examples: Examples, layout: Layout, config: ModelConfig, first_step: int = 0, rank: int = 0, n_ranks: int = 1
) -> Iterator[StepBatches]:
    """Epoch after epoch, for ever; from any step on, counted from 0, without replay."""
    epoch = layout.epoch(first_step // layout.n_steps)
    for step in itertools.count(first_step):
        number, place = divmod(step, layout.n_steps)
        if place == 0 and step != first_step:
            epoch = layout.epoch(number)
        everything = epoch.step(place)
        numbers = list(range(rank, len(everything), n_ranks))
        mine = [examples.batch(*everything[m], config) for m in numbers]
        if n_ranks == 1:
            n_target_tokens = sum(batch.n_target_tokens for batch in mine)
        else:
            n_target_tokens = sum(examples.n_target_tokens(micro.rows) for micro in everything)
        yield StepBatches(numbers, mine, n_target_tokens)


def prefetch(items: Iterable[Item], n_ahead: int = 4) -> Iterator[Item]:
    """The same items in the same order, made ahead of time in a thread."""
    ahead: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(n_ahead)
    is_over = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not is_over.is_set():
            with contextlib.suppress(queue.Full):
                ahead.put((item, error), timeout=0.1)
                break

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if is_over.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # it belongs to whoever reads
            put(None, error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ahead.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item whenever there is no error
    finally:
        is_over.set()
        thread.join()
