"""Batches from pairs of token ids. Padding, shifting right and adding start and end marks happen only here."""

# Axes: B sentences, S source positions, T target positions, W source or target positions; N rows.

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

__all__ = ["Batch", "Examples", "make_batch", "steps"]

Ids = NDArray[np.int64]
Item = TypeVar("Item")

ROWS_AT_ONCE = 500
"""Memory pages of the store are released after this many rows, so that resident memory does not grow: each row touches
four places of the store, and the system maps 64 KiB around each."""


class Batch(NamedTuple):
    """Token ids of B sentence pairs, padded on the right to S source and T target positions.

    `target_in_BT` is the input of the decoder, and `target_out_BT` the tokens that it must predict.

    >>> from transduce import Batch, make_batch, tiny
    >>> batch = make_batch([([5, 6, 7], [8, 9])], tiny().model)
    >>> isinstance(batch, Batch), batch.source_BS.shape, batch.target_in_BT.shape
    (True, (1, 4), (1, 3))
    """

    source_BS: Ids
    target_in_BT: Ids
    target_out_BT: Ids
    n_target_tokens: int
    """End marks count, padding does not."""


def make_batch(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], config: ModelConfig) -> Batch:
    """Make a batch of pairs (source ids, target ids), which have no marks.

    The end mark is appended to both sides. `target_in` is `target_out` shifted right, after the start mark.

    >>> from transduce import make_batch, tiny
    >>> batch = make_batch([([5, 6, 7], [8, 9]), ([5], [8])], tiny().model)
    >>> batch.source_BS.tolist()  # 2 is the end mark, 0 is padding
    [[5, 6, 7, 2], [5, 2, 0, 0]]
    >>> batch.target_in_BT.tolist()  # 1 is the start mark
    [[1, 8, 9], [1, 8, 0]]
    >>> batch.target_out_BT.tolist(), batch.n_target_tokens
    ([[8, 9, 2], [8, 2, 0]], 5)
    """
    sources, targets = zip(*pairs, strict=True)
    target_out = [[*target, config.eos_id] for target in targets]
    return Batch(
        source_BS=pad_right([[*source, config.eos_id] for source in sources], config.pad_id),
        target_in_BT=pad_right([[config.bos_id, *target] for target in targets], config.pad_id),
        target_out_BT=pad_right(target_out, config.pad_id),
        n_target_tokens=sum(map(len, target_out)),
    )


def batches_within_tokens(
    items: Iterable[Item], length: Callable[[Item], int], max_tokens: int
) -> Iterator[list[Item]]:
    """Group items, which must be sorted by length, into batches of at most `max_tokens`, padding included.

    An item that is longer forms a batch by itself.
    """
    batch: list[Item] = []
    for item in items:
        if batch and (len(batch) + 1) * length(item) > max_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> Ids:
    ids_BT = np.full((len(rows), max(map(len, rows))), pad_id, dtype=np.int64)
    for ids_T, row in zip(ids_BT, rows, strict=True):
        ids_T[: len(row)] = row
    return ids_BT


class Examples:
    """The rows of a split of prepared data: its sentence pairs, and those in reverse for a corpus used both ways.

    If there are several target languages, a tag before the source selects one.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from transduce import DataConfig
    >>> from transduce.data.corpora import Corpus
    >>> from transduce.data.prepare import Prepared, prepare
    >>> folder = Path(tempfile.mkdtemp())
    >>> text = "".join(f"Haus {n} ist neu.\\tHouse {n} is new.\\n" for n in range(100))
    >>> _ = (folder / "text.tsv").write_text(text)
    >>> corpus = Corpus("text", (folder / "text.tsv",), ("de", "en"))
    >>> _ = prepare([corpus], folder / "prepared", DataConfig(valid_pairs=0))
    >>> prepared = Prepared(folder / "prepared")
    >>> examples = prepared.train
    >>> source, target = examples.pair(7)
    >>> len(examples), prepared.subwords.decode([source.tolist(), target.tolist()])
    (100, ['Haus 7 ist neu.', 'House 7 is new.'])
    """

    def __init__(self, store: Store, tags: dict[str, int], rows: NDArray[np.int64] | None = None) -> None:
        """`tags`: the id of each target language's tag; empty if there is only one target language. `rows`: only these
        rows, in this order, instead of all."""
        self.store, self._tags, self._rows = store, tags, rows
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
        assert bool(tags) == bool((self._tag >= 0).any()) == bool((self._tag >= 0).all()), (
            "all rows have a tag, or none"
        )

    def __len__(self) -> int:
        return int(self._first_row[-1]) if self._rows is None else len(self._rows)

    def sample(self, n: int) -> Examples:
        """At most `n` rows, spread evenly over all."""
        if n >= len(self):
            return self
        rows = np.linspace(0, len(self) - 1, n).astype(np.int64)
        return Examples(self.store, self._tags, rows if self._rows is None else self._rows[rows])

    def lengths(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Lengths of source and target of every row; tags and end marks count."""
        sources, targets = [], []
        ends = self._first_pair + np.diff(self._first_row)
        for first, end, is_reversed in zip(self._first_pair, ends, self._is_reversed, strict=True):
            source_N = self.store.source_length_N[first:end]
            target_N = self.store.target_length_N[first:end]
            source_N, target_N = (target_N, source_N) if is_reversed else (source_N, target_N)
            sources.append(source_N.astype(np.int32) + 1 + self.n_tag)
            targets.append(target_N.astype(np.int32) + 1)
        self.store.release()
        rows = slice(None) if self._rows is None else self._rows
        return np.concatenate(sources)[rows], np.concatenate(targets)[rows]

    def batch(self, rows: NDArray[Any], shape: tuple[int, int], config: ModelConfig) -> Batch:
        """Make a batch of `shape` (source positions, target positions). `make_batch` is the slow version."""
        source_BS = np.full((len(rows), shape[0]), config.pad_id, dtype=np.int64)
        target_out_BT = np.full((len(rows), shape[1]), config.pad_id, dtype=np.int64)
        n_target_tokens = 0
        for first in range(0, len(rows), ROWS_AT_ONCE):
            block = slice(first, first + ROWS_AT_ONCE)
            n_target_tokens += self._fill(rows[block], source_BS[block], target_out_BT[block], config.eos_id)
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
        """The tag before the source of a row, or an empty list if rows have no tags."""
        return [int(self._tag[self._places(np.array([row])).part_B[0]])] if self.n_tag else []

    def n_target_tokens(self, rows: NDArray[Any]) -> int:
        """Target tokens of the rows, including end marks."""
        return int(self._places(rows).target_length_B.sum()) + len(rows)

    def _fill(self, rows: NDArray[Any], source_BS: Ids, target_out_BT: Ids, eos_id: int) -> int:
        """Write the rows' ids and end marks over the padding, and return the number of target tokens."""
        places = self._places(rows)
        if self.n_tag:
            source_BS[:, 0] = self._tag[places.part_B]
            source_BS = source_BS[:, 1:]
        self._gather(places.source_start_B, places.source_length_B, source_BS, eos_id)
        self._gather(places.target_start_B, places.target_length_B, target_out_BT, eos_id)
        return int(places.target_length_B.sum()) + len(rows)

    def _places(self, rows: NDArray[Any]) -> _Places:
        rows = rows if self._rows is None else self._rows[rows]
        part_B = np.searchsorted(self._first_row, rows, side="right") - 1
        pair_B = rows - self._first_row[part_B] + self._first_pair[part_B]
        start_B = self.store.start_N[pair_B].astype(np.int64)
        source_length_B = self.store.source_length_N[pair_B].astype(np.int64)
        target_length_B = self.store.target_length_N[pair_B].astype(np.int64)
        forward = start_B, source_length_B, start_B + source_length_B, target_length_B
        backward = forward[2:] + forward[:2]
        is_reversed_B = self._is_reversed[part_B]
        return _Places(part_B, *(np.where(is_reversed_B, b, f) for f, b in zip(forward, backward, strict=True)))

    def _gather(self, start_B: Ids, length_B: Ids, ids_BW: Ids, eos_id: int) -> None:
        position_W = np.arange(ids_BW.shape[1])
        is_id_BW = position_W < length_B[:, None]
        ids_BW[is_id_BW] = self.store.ids[(start_B[:, None] + position_W)[is_id_BW]]
        ids_BW[np.arange(len(start_B)), length_B] = eos_id


class _Places(NamedTuple):
    """For each row, its part of the examples and the location of its tokens in the store."""

    part_B: Ids
    source_start_B: Ids
    source_length_B: Ids
    target_start_B: Ids
    target_length_B: Ids


def shift_right(target_out_BT: Ids, config: ModelConfig) -> Ids:
    """Shift the targets right behind the start mark. The end mark is left out, since no token follows it."""
    target_in_BT = np.full_like(target_out_BT, config.pad_id)
    target_in_BT[:, 0] = config.bos_id
    previous_BT = target_out_BT[:, :-1]
    target_in_BT[:, 1:] = np.where(previous_BT == config.eos_id, config.pad_id, previous_BT)
    return target_in_BT


class StepBatches(NamedTuple):
    """A rank's share of an optimiser step."""

    numbers: list[int]
    """Indices of these micro-batches within the step. They do not depend on the number of ranks."""
    batches: list[Batch]
    n_target_tokens: int
    """Target tokens of the whole step, over all ranks."""


def steps(
    examples: Examples, layout: Layout, config: ModelConfig, first_step: int = 0, rank: int = 0, n_ranks: int = 1
) -> Iterator[StepBatches]:
    """Yield the batches of each optimiser step, epoch after epoch, without end.

    They start at `first_step`, counted from 0, without replaying earlier steps. Each of `n_ranks` processes gets its
    share of every step.

    >>> import tempfile
    >>> from itertools import islice
    >>> from pathlib import Path
    >>> from transduce import DataConfig, tiny
    >>> from transduce.data.batches import steps
    >>> from transduce.data.corpora import Corpus
    >>> from transduce.data.plan import make_layout
    >>> from transduce.data.prepare import Prepared, prepare
    >>> folder = Path(tempfile.mkdtemp())
    >>> text = "".join(f"Haus {n} ist neu.\\tHouse {n} is new.\\n" for n in range(100))
    >>> _ = (folder / "text.tsv").write_text(text)
    >>> corpus = Corpus("text", (folder / "text.tsv",), ("de", "en"))
    >>> _ = prepare([corpus], folder / "prepared", DataConfig(valid_pairs=0))
    >>> examples = Prepared(folder / "prepared").train
    >>> layout = make_layout(*examples.lengths(), batch_tokens=500, n_shapes=4, seed=1)
    >>> epoch = list(islice(steps(examples, layout, tiny().model), layout.n_steps))
    >>> sum(len(batch.source_BS) for step in epoch for batch in step.batches)  # every pair once
    100
    """
    epoch = layout.epoch(first_step // layout.n_steps)
    for step in itertools.count(first_step):
        epoch_number, step_in_epoch = divmod(step, layout.n_steps)
        if step_in_epoch == 0 and step != first_step:
            epoch = layout.epoch(epoch_number)
        micro_batches = epoch.step(step_in_epoch)
        numbers = list(range(rank, len(micro_batches), n_ranks))
        batches = [examples.batch(*micro_batches[m], config) for m in numbers]
        if n_ranks == 1:
            n_target_tokens = sum(batch.n_target_tokens for batch in batches)
        else:
            n_target_tokens = sum(examples.n_target_tokens(micro.rows) for micro in micro_batches)
        yield StepBatches(numbers, batches, n_target_tokens)


def prefetch(items: Iterable[Item], n_ahead: int = 4) -> Iterator[Item]:
    """Yield the same items in the same order, produced up to `n_ahead` items ahead by a thread."""
    ahead: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(n_ahead)
    is_closed = threading.Event()

    def put(item: Item | None, error: BaseException | None) -> None:
        while not is_closed.is_set():
            with contextlib.suppress(queue.Full):
                ahead.put((item, error), timeout=0.1)
                break

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if is_closed.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # raised again in the consumer
            put(None, error)

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ahead.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # not None if there is no error
    finally:
        is_closed.set()
        thread.join()
