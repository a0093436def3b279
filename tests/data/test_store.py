"""The store returns the pairs that were written, for every corpus and direction; damaged files are refused."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transduce import DataError, ModelConfig, make_batch
from transduce.data import batches
from transduce.data import store as store_module
from transduce.data.batches import Examples, StepBatches, prefetch, steps
from transduce.data.plan import make_layout
from transduce.data.store import Encoded, Store, StoredCorpus, StoreWriter, id_type

Pairs = list[tuple[list[int], list[int]]]
CONFIG = ModelConfig(source_vocab_size=101, target_vocab_size=101)
TAGS = {"de": 90, "en": 91, "fr": 92}


def write(path: Path, corpora: list[tuple[str, str, bool, Pairs]], dtype: str = "<u2", part: int = 3) -> Store:
    """Write the pairs in parts, as worker processes do."""
    with StoreWriter(path, np.dtype(dtype)) as writer:
        all_pairs = [pair for *_, pairs in corpora for pair in pairs]
        for first in range(0, len(all_pairs), part):
            part_pairs = all_pairs[first : first + part]
            ids = [i for pair in part_pairs for side in pair for i in side]
            lengths = np.array([[len(source), len(target)] for source, target in part_pairs], dtype=np.uint32)
            writer.add(Encoded(np.array(ids), lengths[:, 0], lengths[:, 1]))
        writer.finish([StoredCorpus(a, b, both, len(pairs)) for a, b, both, pairs in corpora], subwords="abc")
    return Store(path)


def random_pairs(n: int, seed: int = 0) -> Pairs:
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(4, 90, rng.integers(0, 12)).tolist(), rng.integers(4, 90, rng.integers(0, 12)).tolist())
        for _ in range(n)
    ]


ids = st.lists(st.integers(0, 2**16 - 1), max_size=8)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(ids, ids), max_size=20), st.integers(1, 5), st.sampled_from(["<u2", "<u4"]))
def test_pairs_round_trip(tmp_path: Path, pairs: Pairs, part: int, dtype: str) -> None:
    path = tmp_path / "x.tokens"
    path.unlink(missing_ok=True)
    store = write(path, [("de", "en", False, pairs)], dtype, part)
    assert [(source.tolist(), target.tolist()) for source, target in (store[i] for i in range(len(store)))] == pairs
    assert store.n_source_tokens == sum(len(source) for source, _ in pairs)
    assert store.n_target_tokens == sum(len(target) for _, target in pairs)
    store.verify()
    assert [file.name for file in tmp_path.iterdir()] == ["x.tokens"]


def test_large_vocabularies_use_wider_ids() -> None:
    assert id_type(65_536) == np.dtype("<u2")
    assert id_type(65_537) == np.dtype("<u4")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tokens"
    write(path, [("de", "en", False, random_pairs(50))])
    whole = path.read_bytes()

    def damaged(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    for cut in (0, 1, 7, len(whole) // 2, len(whole) - 1):
        with pytest.raises(DataError, match=r"x\.tokens (is damaged|cannot be read).*run transduce prepare again"):
            Store(damaged(whole[:cut]))
    with pytest.raises(DataError, match="its size does not match its header"):
        Store(damaged(whole[:40] + whole[48:]))
    with pytest.raises(DataError, match="its header cannot be read"):
        Store(damaged(whole[:-40] + b"{" * 24 + whole[-16:]))
    with pytest.raises(DataError, match="format_version 2, this program reads 1"):
        Store(damaged(whole.replace(b'"format_version": 1', b'"format_version": 2')))
    with pytest.raises(DataError, match="its header lacks a field"):
        Store(damaged(whole.replace(b'"n_pairs": 50', b'"n_paars": 50', 1)))
    flipped = bytearray(whole)
    flipped[11] ^= 1
    store = Store(damaged(bytes(flipped)))
    with pytest.raises(DataError, match="its checksum does not match its header"):
        store.verify()
    with pytest.raises(DataError, match="cannot be read"):
        Store(tmp_path / "nothing")
    Store(damaged(whole)).verify()


def slow_rows(corpora: list[tuple[str, str, bool, Pairs]], tags: dict[str, int]) -> Pairs:
    """All rows, corpus by corpus, forward then backward, each source after its tag."""
    rows: Pairs = []
    for source_language, target_language, both_ways, pairs in corpora:
        tag = [tags[target_language]] if tags else []
        rows += [(tag + source, target) for source, target in pairs]
        if both_ways:
            tag = [tags[source_language]] if tags else []
            rows += [(tag + target, source) for source, target in pairs]
    return rows


CORPORA: list[tuple[str, str, bool, Pairs]] = [
    ("de", "en", True, random_pairs(23, 1)),
    ("fr", "en", False, random_pairs(17, 2)),
    ("fr", "de", True, random_pairs(0, 3)),
    ("fr", "de", True, random_pairs(11, 4)),
]


@pytest.mark.parametrize(("corpora", "tags"), [(CORPORA, TAGS), ([("de", "en", False, random_pairs(31))], {})])
def test_batches_from_the_store_equal_make_batch(
    tmp_path: Path, corpora: list[tuple[str, str, bool, Pairs]], tags: dict[str, int]
) -> None:
    examples = Examples(write(tmp_path / "x.tokens", corpora), tags)
    expected = slow_rows(corpora, tags)
    assert len(examples) == len(expected)
    source_N, target_N = examples.lengths()
    assert source_N.tolist() == [len(source) + 1 for source, _ in expected]
    assert target_N.tolist() == [len(target) + 1 for _, target in expected]
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = rng.permutation(len(expected))[: rng.integers(1, 9)]
        shape = int(source_N[rows].max()), int(target_N[rows].max())
        slow_batch = make_batch([expected[row] for row in rows], CONFIG)
        for fast, slow in zip(examples.batch(rows, shape, CONFIG), slow_batch, strict=True):
            np.testing.assert_array_equal(fast, slow)
        wider = examples.batch(rows, (shape[0] + 3, shape[1] + 2), CONFIG)
        np.testing.assert_array_equal(wider.source_BS[:, : shape[0]], slow_batch.source_BS)
        assert (wider.source_BS[:, shape[0] :] == CONFIG.pad_id).all()
        assert (wider.target_in_BT[:, shape[1] :] == CONFIG.pad_id).all()


def test_batches_from_any_step_equal_those_of_a_full_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(store_module, "LARGE_STORE", 0)  # release pages, which must not change results
    examples = Examples(write(tmp_path / "x.tokens", CORPORA), TAGS)
    layout = make_layout(*examples.lengths(), batch_tokens=60, n_shapes=5, seed=1)
    from_start = list(itertools.islice(steps(examples, layout, CONFIG), 3 * layout.n_steps))
    for first in (0, 1, layout.n_steps - 1, layout.n_steps, 2 * layout.n_steps + 2):
        resumed = itertools.islice(steps(examples, layout, CONFIG, first), 4)
        assert_same_steps(list(resumed), from_start[first : first + 4])
    shares = [list(itertools.islice(steps(examples, layout, CONFIG, 5, rank, 3), 4)) for rank in range(3)]
    for together, whole in zip(zip(*shares, strict=True), from_start[5:9], strict=True):
        assert sorted(number for share in together for number in share.numbers) == whole.numbers
        for share in together:
            assert share.n_target_tokens == whole.n_target_tokens, "every rank has the token count of the whole step"
            for number, batch in zip(share.numbers, share.batches, strict=True):
                np.testing.assert_array_equal(batch.source_BS, whole.batches[number].source_BS)
    assert sum(batch.n_target_tokens for batch in from_start[5].batches) == from_start[5].n_target_tokens


def assert_same_steps(ours: list[StepBatches], expected: list[StepBatches]) -> None:
    assert [step.numbers for step in ours] == [step.numbers for step in expected]
    for step, other in zip(ours, expected, strict=True):
        for batch, other_batch in zip(step.batches, other.batches, strict=True):
            for array, other_array in zip(batch, other_batch, strict=True):
                np.testing.assert_array_equal(array, other_array)


def test_prefetch_keeps_order_and_raises_errors_in_the_consumer() -> None:
    assert list(prefetch(range(100), 3)) == list(range(100))
    assert list(prefetch([None, 0, None])) == [None, 0, None]

    def failing() -> Iterator[int]:
        yield 1
        raise DataError("line 2")

    items = prefetch(failing())
    assert next(items) == 1
    with pytest.raises(DataError, match="line 2"):
        next(items)


def test_prefetch_runs_ahead_only_by_its_limit() -> None:
    produced: list[int] = []

    def numbers() -> Iterator[int]:
        for n in itertools.count():
            produced.append(n)
            yield n

    items: Any = prefetch(numbers(), 4)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(produced) < 5:
        assert time.monotonic() < deadline, "no item is produced ahead"
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(produced) <= 7
    before = threading.active_count()
    items.close()
    assert threading.active_count() == before - 1, "the thread ends with its consumer"
