"""Sentences of many requests in one search: none starves, none is lost, and cores share the work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.serving import Gate, gated
from transduce import Translator
from transduce.serving.batcher import Batcher, Job, Way
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
    return Job(Way(translator, "en", replace(translator.settings, n_best=n_best)), texts, client)


@pytest.fixture
def model() -> tuple[Translator, Gate]:
    return gated()


def test_another_kind_comes_in_while_there_is_always_more_of_the_first(model: tuple[Translator, Gate]) -> None:
    translator, _ = model
    with started() as batcher:
        first, other = [job(translator, ["Ich bin müde."]) for _ in range(4)], job(translator, ["Ja."], n_best=2)
        for one in first:
            batcher.submit(one)
        batcher.submit(other)
        end, n_more = time.monotonic() + 30, 0
        while not other.future.done():
            assert time.monotonic() < end, "it starves"
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
        assert len(long.places) > 30
        assert [found.text for found in long.future.result(60)] == ["I'm tired."] * 60


@pytest.mark.parametrize("alone", [False, True])
def test_workers_share_what_has_come_and_alone_shares_no_search(model: tuple[Translator, Gate], alone: bool) -> None:
    translator, gate = model
    with started(n_workers=2, alone=alone) as batcher:
        gate.is_open.clear()
        jobs = [job(translator, ["Ja."]) for _ in range(8)]
        for one in jobs:
            batcher.submit(one)
        end = time.monotonic() + 10
        while not all(worker.has for worker in batcher.workers):
            assert time.monotonic() < end, "one has all"
            time.sleep(0.01)
        gate.is_open.set()
        most = 0
        while not all(one.future.done() for one in jobs):
            most = max(most, *(len(worker.has) for worker in batcher.workers))
            time.sleep(0.0005)  # else the workers would hardly come to their turn
        assert most == 1 if alone else 2 <= most <= 5
        assert {one.future.result()[0].text for one in jobs} == {"Yes."}


def test_what_waits_is_counted_for_each_client_and_given_back(model: tuple[Translator, Gate]) -> None:
    translator, gate = model
    with started(queue=5, client_queue=3) as batcher:
        gate.is_open.clear()
        one, two = job(translator, ["Ja."] * 3, client="one"), job(translator, ["Ja."] * 2, client="two")
        batcher.submit(one)
        with pytest.raises(Refusal, match="of yours"):
            batcher.submit(job(translator, ["Ja."], client="one"))
        batcher.submit(two)
        with pytest.raises(Refusal, match="too much is waiting already"):
            batcher.submit(job(translator, ["Ja."], client="three"))
        blank = job(translator, ["", " "], client="three")
        batcher.submit(blank)
        assert [found.text for found in blank.future.result(1)] == ["", ""]
        assert two.future.cancel()
        gate.is_open.set()
        one.future.result(30)
        end = time.monotonic() + 10
        while batcher.held:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not batcher.kinds
        assert not batcher.jobs
        batcher.close()
        with pytest.raises(Refusal, match="going down"):
            batcher.submit(job(translator, ["Ja."]))
