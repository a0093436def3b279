"""The cached decoder equals the model at every step, while sentences join and leave and hypotheses are reordered."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.bundled import heldout
from tests.support.primes import prime_config, random_model
from tests.support.search import sources
from transduce import Translator
from transduce.engines.cached import BLOCK, FEW_ROWS, CachedStepper, unsupported
from transduce.engines.cells import Cells
from transduce.engines.layers import Linear, Precision
from transduce.engines.products import Int8Product, Product
from transduce.search.candidates import SearchSettings
from transduce.search.hypotheses import Beams
from transduce.search.loop import put
from transduce.search.peaks import Peaks
from transduce.translation import translator as translator_module
from transduce.translation.lines import MAX_WINDOWS, WINDOW_BATCHES
from transduce.translation.result import Translation
from transduce.translation.threads import in_threads


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned", "max_positions": 60},
        {"attention_bias": True, "output_bias": True},
        {"activation": "gelu"},
        {"tied_embeddings": "none", "target_vocab_size": 43},
    ],
    ids=str,
)
def test_logits_equal_those_of_the_model(changes: dict[str, Any]) -> None:
    """In float64. The two rows of each sentence are reordered at every step; sentences join and leave."""
    config = prime_config(**changes)
    model = random_model(config).eval()
    fast = CachedStepper(model)
    first, second = (sources(n, longest, n, config.pad_id) for n, longest in ((3, 11), (2, 17)))
    states: list[Any] = [stepper.start(first).select(torch.arange(3).repeat_interleave(2)) for stepper in (model, fast)]
    torch.manual_seed(1)
    steppers: list[Any] = [model, fast]
    for i in range(40):
        n = states[0].n_sentences
        last_R = torch.randint(3, 30, (2 * n,))
        (expected_RV, slow), (peaks, quick) = (
            stepper.step(last_R, state) for stepper, state in zip(steppers, states, strict=True)
        )
        torch.testing.assert_close(peaks.logits(), expected_RV, atol=1e-9, rtol=0)
        rows_R = torch.randint(0, 2, (2 * n,)) + 2 * torch.arange(n).repeat_interleave(2)
        if i % 9 == 5:
            kept = torch.randperm(n)[: n - 1]
            rows_R = rows_R.view(n, 2)[kept].flatten()
            states = [slow.select(rows_R, kept), quick.select(rows_R, kept)]
        else:
            states = [slow.select(rows_R), quick.select(rows_R)]
        if i % 9 == 8:
            place = torch.randint(0, states[0].n_sentences, (1,))
            new = [stepper.start(second[:1]).select(torch.tensor([0, 0])) for stepper in (model, fast)]
            states = [put(state, place, other, state.n_sentences, 2) for state, other in zip(states, new, strict=True)]
        if i % 9 == 6:
            new = [stepper.start(second).select(torch.arange(2).repeat_interleave(2)) for stepper in (model, fast)]
            states = [state.join(other) for state, other in zip(states, new, strict=True)]
    assert isinstance(states[1], Cells)
    assert states[1].cell_LBHCW.shape[3] < 2 * 40 + 32, "cells that are no longer in use must be removed"


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_logits_computed_in_blocks_equal_those_of_one_product(precision: Precision, has_bias: bool) -> None:
    config = prime_config(tied_embeddings="none", target_vocab_size=2 * BLOCK + 79, output_bias=has_bias)
    fast = CachedStepper(random_model(config, torch.float32).eval(), precision)
    x_RD = torch.randn(FEW_ROWS + 3, config.d_model)
    peaks, expected = fast.peaks(x_RD), Peaks.of(fast.output(x_RD))
    torch.testing.assert_close(peaks.logits(), expected.logits())
    torch.testing.assert_close(peaks.peak_RN, expected.peak_RN)
    torch.testing.assert_close(peaks.log_sum_R1, expected.log_sum_R1)
    row = torch.arange(FEW_ROWS + 3)[:, None].expand_as(peaks.peak_RN)
    group = torch.arange(peaks.peak_RN.shape[1]).expand_as(peaks.peak_RN)
    torch.testing.assert_close(peaks.read_groups(row, group), expected.read_groups(row, group))


def test_a_state_without_sentences_can_be_joined() -> None:
    config = prime_config()
    fast = CachedStepper(random_model(config).eval())
    state = fast.start(sources(2, 5, 0, config.pad_id))
    _, state = fast.step(torch.tensor([5, 6]), state)
    empty = state.select(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
    assert empty.n_sentences == 0
    joined = empty.join(fast.start(sources(1, 4, 1, config.pad_id)))
    peaks, _ = fast.step(torch.tensor([5]), joined)
    assert bool(peaks.logits().isfinite().all())


def test_unsupported_options_are_reported() -> None:
    assert unsupported(prime_config()) is None
    assert unsupported(prime_config(norm="pre")) == "model.norm is pre"
    assert unsupported(prime_config(attention_window=4)) == "attention has a window"


@pytest.mark.parametrize("has_bias", [True, False])
def test_int8_products_are_close_and_rows_are_independent(has_bias: bool) -> None:
    torch.manual_seed(0)
    W, x, b = torch.randn(64, 100), torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None], torch.randn(100)
    weights = Linear(W, b if has_bias else None)
    expected, result = Product(weights)(x), Int8Product(weights)(x)
    error_R = (result - expected).norm(dim=1) / (expected - (b if has_bias else 0)).norm(dim=1)
    assert float(error_R.max()) < 0.02
    assert float(error_R.min()) > 0.001, "the product was computed in float32"
    alone = torch.cat([Int8Product(weights)(row[None]) for row in x])
    assert torch.equal(alone, result)
    of_zeros = Int8Product(Linear(W, None))(torch.zeros(2, 64))
    assert torch.equal(of_zeros, torch.zeros(2, 100))


def test_translations_equal_those_of_the_model() -> None:
    texts = heldout()[0][:120]
    fast, slow = Translator.load(device="cpu"), Translator.load(device="cpu")
    slow.stepper = slow.model
    assert fast.engine.name != "model"
    assert_same_texts(fast.translate(texts), slow.translate(texts), max_different=2)


def assert_same_texts(results: list[Translation], expected: list[Translation], max_different: int) -> None:
    """Only translations with the flag "close" may differ, and at most `max_different` of them."""
    assert len(results) == len(expected)
    different = [result for result, other in zip(results, expected, strict=True) if result.text != other.text]
    assert all("close" in result.flags for result in different)
    assert len(different) <= max_different


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "the number of threads must be restored"
    torch.set_num_threads(before)


def n_searches() -> int:
    return sum("work" in thread.name for thread in threading.enumerate())


def test_several_searches_return_the_lines_of_one(two_threads: None) -> None:
    texts = heldout()[0][:150]
    texts[3] = texts[70] = texts[71] = ""
    translator = Translator.load(device="cpu", batch_size=8)
    results = translator.translate(texts)
    torch.set_num_threads(1)
    expected = translator.translate(texts)
    torch.set_num_threads(2)
    assert len(results) == 150
    assert_same_texts(results, expected, max_different=4)


def test_searches_continue_from_window_to_window(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for each other at the end of each window."""
    n_shares: list[int] = []

    def recorded(search_one: Any, shares: Any) -> Any:
        n_shares.append(len(shares))
        return in_threads(search_one, shares)

    monkeypatch.setattr(translator_module, "in_threads", recorded)
    texts = heldout()[0][:150]
    translator = Translator.load(device="cpu", batch_size=2)
    assert len(texts) > 4 * WINDOW_BATCHES * translator.batch_size
    results = translator.translate(texts)
    assert n_shares == [2]
    torch.set_num_threads(1)
    expected = translator.translate(texts)
    torch.set_num_threads(2)
    assert [result.text for result in results] == [other.text for other in expected]


def test_all_searches_get_work(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less than one batch of lines, and after a pause in the input."""
    done: dict[int, set[int]] = {}
    n_shares: list[int] = []

    def recorded(search_one: Any, shares: Any) -> Any:
        n_shares.append(len(shares))

        def with_thread(share: Any, stop: Any) -> Any:
            for result in search_one(share, stop):
                done.setdefault(threading.get_ident(), set()).add(result[0].number)
                yield result

        return in_threads(with_thread, shares)

    monkeypatch.setattr(translator_module, "in_threads", recorded)
    translator = Translator.load(device="cpu", batch_size=32)
    translator.translate(heldout()[0][:20])
    assert sorted(map(len, done.values())) == [10, 10]

    def with_a_pause() -> Iterator[str]:
        for n, text in enumerate(heldout()[0][:300]):
            time.sleep(1 if n == 150 else 0)
            yield text

    n_shares.clear()
    assert len(list(translator.stream(with_a_pause()))) == 300
    assert n_shares == [2, 2], "after the pause, one search did all the work"


def test_searches_stop_while_finished_lines_are_not_read(two_threads: None) -> None:
    translator = Translator.load(device="cpu", batch_size=2)
    texts = iter(heldout()[0][:400])
    stream: Any = translator.stream(texts)
    first = next(stream)
    deadline = time.monotonic() + 60
    while n_searches() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert n_searches() == 0, "searches continue, and their results fill the memory"
    window = WINDOW_BATCHES * translator.batch_size
    assert 400 - len(list(texts)) <= (2 + MAX_WINDOWS) * window + 2, (
        "more lines were read than the windows in work and the queue hold"
    )
    stream.close()
    assert first.text


def test_closing_a_stream_early_ends_its_searches(two_threads: None) -> None:
    n_read = 0

    def texts() -> Iterator[str]:
        nonlocal n_read
        for text in heldout()[0] * 5:
            n_read += 1
            yield text

    translator = Translator.load(device="cpu", batch_size=4)
    stream: Any = translator.stream(texts())
    next(stream)
    assert n_searches() > 0
    stream.close()
    assert n_searches() == 0
    assert n_read < 300, "only a few windows of lines may be read ahead"


def test_an_error_in_a_search_is_raised_to_the_caller(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.load(device="cpu")

    def fail(beams: Beams, state: Cells, settings: SearchSettings) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(translator.stepper, "turn", fail, raising=False)
    with pytest.raises(MemoryError, match="no room"):
        translator.translate(heldout()[0][:40])
    assert n_searches() == 0


def test_a_blank_line_is_returned_before_the_next_line_arrives(two_threads: None) -> None:
    texts: queue.Queue[str] = queue.Queue()
    stream = Translator.load(device="cpu").stream(iter(texts.get, "the end"))
    for text in ("", "Ich bin müde.", "", "", "Ja."):
        texts.put(text)
        assert bool(next(stream).text) == bool(text)
    texts.put("the end")
    assert list(stream) == []
