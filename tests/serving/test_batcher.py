"""The batcher: no group of jobs starves, no sentence is lost, and all workers share the work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.serving import Gate, gated
from transduce import Translator
from transduce.serving.batcher import Batcher, Job, TranslationSettings
from transduce.serving.limits import Limits, Refusal
from transduce.serving.metrics import Metrics


@contextmanager
def started(n_workers: int = 1, *, alone: bool = False, **limits: int) -> Iterator[Batcher]:
    batcher = Batcher(Limits(**limits), Metrics(), n_workers, alone=alone)
    batcher.start()
    try:
        yield batcher
    finally:
        batcher.close()
        batcher.join()


def job(translator: Translator, texts: list[str], *, n_best: int = 1, client: str = "") -> Job:
    decode = replace(translator.settings, n_best=n_best)
    return Job(TranslationSettings(translator, "en", decode), texts, client)


@pytest.fixture
def model() -> tuple[Translator, Gate]:
    return gated()


def test_a_group_does_not_starve_while_another_always_has_waiting_sentences(model: tuple[Translator, Gate]) -> None:
    translator, _ = model
    with started() as batcher:
        first, other = [job(translator, ["Ich bin müde."]) for _ in range(4)], job(translator, ["Ja."], n_best=2)
        for each in first:
            batcher.submit(each)
        batcher.submit(other)
        end, n_more = time.monotonic() + 30, 0
        while not other.future.done():
            assert time.monotonic() < end, "the other group starves"
            if batcher.n_waiting < 4:
                batcher.submit(job(translator, ["Ich bin müde."]))
                n_more += 1
            time.sleep(0.001)
        assert len(other.future.result()[0].alternatives) == 2
        assert n_more > 0


def test_a_short_request_overtakes_a_long_one(model: tuple[Translator, Gate]) -> None:
    translator, gate = model
    translator.batch_size = 4
    with started() as batcher:
        gate.is_open.clear()
        long, short = job(translator, ["Ich bin müde."] * 60), job(translator, ["Ja."])
        batcher.submit(long)
        batcher.submit(short)
        gate.is_open.set()
        short.future.result(30)
        assert len(long.unfinished) > 30
        assert [translation.text for translation in long.future.result(60)] == ["I'm tired."] * 60


@pytest.mark.parametrize("alone", [False, True])
def test_workers_share_sentences_and_with_alone_each_search_has_one_job(
    model: tuple[Translator, Gate], alone: bool
) -> None:
    translator, gate = model
    with started(n_workers=2, alone=alone) as batcher:
        gate.is_open.clear()
        jobs = [job(translator, ["Ja."]) for _ in range(8)]
        for each in jobs:
            batcher.submit(each)
        end = time.monotonic() + 10
        while not all(worker.numbers for worker in batcher.workers):
            assert time.monotonic() < end, "one worker has all sentences"
            time.sleep(0.01)
        gate.is_open.set()
        max_sentences = 0
        while not all(each.future.done() for each in jobs):
            max_sentences = max(max_sentences, *(len(worker.numbers) for worker in batcher.workers))
            time.sleep(0.0005)  # without a pause this loop would leave little time to the workers
        assert max_sentences == 1 if alone else 2 <= max_sentences <= 5
        assert {each.future.result()[0].text for each in jobs} == {"Yes."}


def test_sentences_are_counted_per_client_until_they_are_done_or_cancelled(model: tuple[Translator, Gate]) -> None:
    translator, gate = model
    with started(queue=5, client_queue=3) as batcher:
        gate.is_open.clear()
        one, two = job(translator, ["Ja."] * 3, client="one"), job(translator, ["Ja."] * 2, client="two")
        batcher.submit(one)
        with pytest.raises(Refusal, match="of this client are waiting"):
            batcher.submit(job(translator, ["Ja."], client="one"))
        batcher.submit(two)
        with pytest.raises(Refusal, match="too many sentences are waiting"):
            batcher.submit(job(translator, ["Ja."], client="three"))
        blank = job(translator, ["", " "], client="three")
        batcher.submit(blank)
        assert [translation.text for translation in blank.future.result(1)] == ["", ""]
        assert two.future.cancel()
        gate.is_open.set()
        one.future.result(30)
        end = time.monotonic() + 10
        while batcher.n_sentences_of:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not batcher.waiting
        assert not batcher.running
        batcher.close()
        with pytest.raises(Refusal, match="shutting down"):
            batcher.submit(job(translator, ["Ja."]))
