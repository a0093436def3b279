"""The fast decoder equals the model, step by step, whoever comes, goes or changes places."""

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
from transduce.translation import translator as translate
from transduce.translation.lines import MAX_WINDOWS, WINDOW_BATCHES
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
def test_logits_are_the_models(changes: dict[str, Any]) -> None:
    """In float64. Two rows of each sentence change places at every step; sentences join and leave."""
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
        (expected_RV, slow), (found, quick) = (
            stepper.step(last_R, state) for stepper, state in zip(steppers, states, strict=True)
        )
        found_RV = found.logits()
        torch.testing.assert_close(found_RV, expected_RV, atol=1e-9, rtol=0)
        rows_R = torch.randint(0, 2, (2 * n,)) + 2 * torch.arange(n).repeat_interleave(2)
        if i % 9 == 5:
            kept = torch.randperm(n)[: n - 1]
            rows_R = rows_R.view(n, 2)[kept].flatten()
            states = [slow.select(rows_R, kept), quick.select(rows_R, kept)]
        else:
            states = [slow.select(rows_R), quick.select(rows_R)]
        if i % 9 == 8:
            place = torch.randint(0, states[0].n_sentences, (1,))
            fresh = [stepper.start(second[:1]).select(torch.tensor([0, 0])) for stepper in (model, fast)]
            states = [
                put(state, place, other, state.n_sentences, 2) for state, other in zip(states, fresh, strict=True)
            ]
        if i % 9 == 6:
            new = [stepper.start(second).select(torch.arange(2).repeat_interleave(2)) for stepper in (model, fast)]
            states = [state.join(other) for state, other in zip(states, new, strict=True)]
    assert isinstance(states[1], Cells)
    assert states[1].cell_LBHCW.shape[3] < 2 * 40 + 32, "cells that nobody needs any more are given up"


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_blocks_are_those_found_at_once(precision: Precision, bias: bool) -> None:
    config = prime_config(tied_embeddings="none", target_vocab_size=2 * BLOCK + 79, output_bias=bias)
    fast = CachedStepper(random_model(config, torch.float32).eval(), precision)
    x_RD = torch.randn(FEW_ROWS + 3, config.d_model)
    found, expected = fast.peaks(x_RD), Peaks.of(fast.output(x_RD))
    torch.testing.assert_close(found.logits(), expected.logits())
    torch.testing.assert_close(found.peak_RN, expected.peak_RN)
    torch.testing.assert_close(found.log_sum_R1, expected.log_sum_R1)
    row = torch.arange(FEW_ROWS + 3)[:, None].expand_as(found.peak_RN)
    group = torch.arange(found.peak_RN.shape[1]).expand_as(found.peak_RN)
    torch.testing.assert_close(found.look(row, group), expected.look(row, group))


def test_nobody_left_is_no_fault() -> None:
    config = prime_config()
    fast = CachedStepper(random_model(config).eval())
    state = fast.start(sources(2, 5, 0, config.pad_id))
    _, state = fast.step(torch.tensor([5, 6]), state)
    nobody = state.select(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))
    assert nobody.n_sentences == 0
    again = nobody.join(fast.start(sources(1, 4, 1, config.pad_id)))
    found, _ = fast.step(torch.tensor([5]), again)
    assert bool(found.logits().isfinite().all())


def test_what_is_not_written_out_is_told() -> None:
    assert unsupported(prime_config()) is None
    assert unsupported(prime_config(norm="pre")) == "model.norm is pre"
    assert unsupported(prime_config(attention_window=4)) == "attention has a window"


@pytest.mark.parametrize("bias", [True, False])
def test_eight_bits_are_near_and_rows_know_nothing_of_each_other(bias: bool) -> None:
    torch.manual_seed(0)
    W, x, b = torch.randn(64, 100), torch.randn(20, 64) * torch.logspace(-3, 3, 20)[:, None], torch.randn(100)
    weights = Linear(W, b if bias else None)
    expected = Product(weights)(x)
    found = Int8Product(weights)(x)
    off_R = (found - expected).norm(dim=1) / (expected - (b if bias else 0)).norm(dim=1)
    assert float(off_R.max()) < 0.02
    assert float(off_R.min()) > 0.001, "it is not float32 after all"
    alone = torch.cat([Int8Product(weights)(row[None]) for row in x])
    assert torch.equal(alone, found)
    nothing = Int8Product(Linear(W, None))(torch.zeros(2, 64))
    assert torch.equal(nothing, torch.zeros(2, 100))


def test_translations_are_the_models() -> None:
    texts = heldout()[0][:120]
    fast, slow = Translator.load(device="cpu"), Translator.load(device="cpu")
    slow.stepper = slow.model
    assert fast.engine.name != "model"
    found, expected = fast.translate(texts), slow.translate(texts)
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text or "close" in one.flags
    assert sum(one.text == other.text for one, other in zip(found, expected, strict=True)) > 117


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "whoever changed it has put it back"
    torch.set_num_threads(before)


def n_searches() -> int:
    return sum("work" in thread.name for thread in threading.enumerate())


def test_several_searches_give_back_the_lines_of_one(two_threads: None) -> None:
    texts = heldout()[0][:150]
    texts[3] = texts[70] = texts[71] = ""
    translator = Translator.load(device="cpu", batch_size=8)
    found = translator.translate(texts)
    torch.set_num_threads(1)
    expected = translator.translate(texts)
    torch.set_num_threads(2)
    assert len(found) == 150
    for one, other in zip(found, expected, strict=True):
        assert one.text == other.text or "close" in one.flags
    assert sum(one.text == other.text for one, other in zip(found, expected, strict=True)) > 145


def test_searches_go_on_from_window_to_window(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would else wait for each other at the end of each."""
    shares: list[int] = []

    def noted(search_one: Any, of: Any) -> Any:
        shares.append(len(of))
        return in_threads(search_one, of)

    monkeypatch.setattr(translate, "in_threads", noted)
    texts = heldout()[0][:150]
    translator = Translator.load(device="cpu", batch_size=2)
    assert len(texts) > 4 * WINDOW_BATCHES * translator.batch_size
    found = translator.translate(texts)
    assert shares == [2]
    torch.set_num_threads(1)
    expected = translator.translate(texts)
    torch.set_num_threads(2)
    assert [one.text for one in found] == [one.text for one in expected]


def test_all_searches_have_something_to_do(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is less than one batch, and after those who give the lines have paused."""
    done: dict[int, set[int]] = {}
    rounds: list[int] = []

    def noted(search_one: Any, of: Any) -> Any:
        rounds.append(len(of))

        def with_thread(share: Any, stop: Any) -> Any:
            for found in search_one(share, stop):
                done.setdefault(threading.get_ident(), set()).add(found[0].number)
                yield found

        return in_threads(with_thread, of)

    monkeypatch.setattr(translate, "in_threads", noted)
    translator = Translator.load(device="cpu", batch_size=32)
    translator.translate(heldout()[0][:20])
    assert sorted(map(len, done.values())) == [10, 10]

    def with_a_pause() -> Iterator[str]:
        for n, text in enumerate(heldout()[0][:300]):
            time.sleep(1 if n == 150 else 0)
            yield text

    rounds.clear()
    assert len(list(translator.stream(with_a_pause()))) == 300
    assert rounds == [2, 2], "who was left alone went on alone"


def test_whoever_is_slow_to_take_lines_is_not_overrun(two_threads: None) -> None:
    translator = Translator.load(device="cpu", batch_size=2)
    texts = iter(heldout()[0][:400])
    stream: Any = translator.stream(texts)
    first = next(stream)
    deadline = time.monotonic() + 60
    while n_searches() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert n_searches() == 0, "they go on, and somebody has to hold what they find"
    window = WINDOW_BATCHES * translator.batch_size
    assert 400 - len(list(texts)) <= (2 + MAX_WINDOWS) * window + 2, "one is being read, one has been"
    stream.close()
    assert first.text


def test_whoever_leaves_early_leaves_no_search_behind(two_threads: None) -> None:
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for text in heldout()[0] * 5:
            read += 1
            yield text

    translator = Translator.load(device="cpu", batch_size=4)
    stream: Any = translator.stream(texts())
    next(stream)
    assert n_searches() > 0
    stream.close()
    assert n_searches() == 0
    assert read < 300, "no more is read than some windows hold"


def test_what_fails_in_a_search_fails_here(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.load(device="cpu")

    def fail(beams: Beams, state: Cells, how: SearchSettings) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(translator.stepper, "turn", fail, raising=False)
    with pytest.raises(MemoryError, match="no room"):
        translator.translate(heldout()[0][:40])
    assert n_searches() == 0


def test_a_blank_line_is_given_back_before_the_next_comes(two_threads: None) -> None:
    asked: queue.Queue[str] = queue.Queue()
    stream = Translator.load(device="cpu").stream(iter(asked.get, "the end"))
    for text in ("", "Ich bin müde.", "", "", "Ja."):
        asked.put(text)
        assert bool(next(stream).text) == bool(text)
    asked.put("the end")
    assert list(stream) == []
