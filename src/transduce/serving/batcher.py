"""Sentences of many requests side by side in one search.

Each worker is a thread with a search of its own, which takes in sentences as they come: there is no batch to wait for.
Requests that search in another way (another model, a wider beam, more alternatives) are of another kind, and a search
is of one kind. Within a kind requests take turns, sentence by sentence, so that a long one does not hold up short ones.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

import torch

from transduce.config import DecodeConfig
from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.serving.limits import Limits, Refusal
from transduce.serving.metrics import Metrics
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

PATIENCE = 0.2
"""Seconds that a kind waits before searches of another kind take in no more, so that it comes in."""
RETRY_SECONDS = 2.0
STOP_SECONDS = 10.0
"""For a search to notice, within a turn, that nobody wants it any more."""


class Way(NamedTuple):
    """How a request is to be translated."""

    translator: Translator
    to: str | None
    settings: DecodeConfig


class Job:
    """The texts of a request. Whoever cancels its `future` withdraws it."""

    def __init__(self, way: Way, texts: Sequence[str], client: str, prefix: Sequence[int] = ()) -> None:
        """`prefix`: how every translation must begin."""
        self.way, self.client, self.arrived = way, client, time.monotonic()
        tag = way.translator.tag_for(way.to)
        self.lines = [way.translator.prepare(text, tag, list(prefix)) for text in texts]
        lengths = [len(ids) for line in self.lines for ids in line.ids]
        self.n_sentences, self.n_tokens, self.longest = len(lengths), sum(lengths), max(lengths, default=0)
        self.future: Future[list[Translation]] = Future()
        self.waiting: deque[Sentence] = deque()
        self.places: dict[int, tuple[int, int]] = {}
        """Of each sentence that is not found yet: its line, and the place in it."""

    def number(self, first: int) -> None:
        eos_id = self.way.translator.config.model.eos_id
        for n, line in enumerate(self.lines):
            for place, sentence in enumerate(line.sentences(first + len(self.places), eos_id)):
                self.waiting.append(sentence)
                self.places[sentence.number] = n, place

    def put(self, number: int, hypotheses: list[Hypothesis]) -> None:
        n, place = self.places[number]
        self.lines[n].results[place] = hypotheses  # before it is struck off: another worker may strike off the last
        del self.places[number]
        if not self.places:
            self.end()

    def end(self, error: Exception | None = None) -> None:
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result([self.way.translator.finish(line) for line in self.lines])
        except InvalidStateError:  # withdrawn, or it has failed already
            pass


Kind = tuple[int, DecodeConfig, int]


class Batcher:
    def __init__(self, limits: Limits, metrics: Metrics, n_workers: int, *, alone: bool = False) -> None:
        """`alone`: no two requests are ever in one search."""
        self.limits, self.metrics, self.alone = limits, metrics, alone
        self.changed = threading.Condition()
        self.kinds: dict[Kind, deque[Job]] = {}
        """Requests with sentences that wait. A kind of which none waits is not here."""
        self.jobs: dict[int, Job] = {}
        """Of sentences that a worker has."""
        self.unwanted: set[int] = set()
        """Among them, those whose request is over without them."""
        self.held: Counter[str] = Counter()
        """Sentences of each client, waiting or not."""
        self.next_number = 0
        self.is_closed = False
        self.workers = [_Worker(self) for _ in range(n_workers)]

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def submit(self, job: Job) -> None:
        with self.changed:
            if self.is_closed:
                raise Refusal(503, "the server is going down", RETRY_SECONDS)
            if self.held.total() + job.n_sentences > self.limits.queue:
                raise Refusal(503, "too much is waiting already", RETRY_SECONDS)
            if self.held[job.client] + job.n_sentences > self.limits.client_queue:
                raise Refusal(429, "too much of yours is waiting already", RETRY_SECONDS)
            job.number(self.next_number)
            if job.waiting:
                self.next_number += job.n_sentences
                self.held[job.client] += job.n_sentences
                self.kinds.setdefault(self._kind(job), deque()).append(job)
                self.changed.notify_all()
        if not job.n_sentences:
            job.end()
        job.future.add_done_callback(lambda _: self._done(job))

    def _kind(self, job: Job) -> Kind:
        return id(job.way.translator), job.way.settings, id(job) if self.alone else 0

    def _done(self, job: Job) -> None:
        """What nobody waits for any more does not wait either."""
        with self.changed:
            if n := len(job.waiting):
                self.metrics.left(n)
                self._release(job, n)
                job.waiting.clear()
                self._remove(self._kind(job), job)
            if job.places:
                self.unwanted |= {number for number, other in self.jobs.items() if other is job}

    def _remove(self, kind: Kind, job: Job) -> None:
        self.kinds[kind].remove(job)
        if not self.kinds[kind]:
            del self.kinds[kind]

    def _release(self, job: Job, n: int) -> None:
        self.held[job.client] -= n
        if not self.held[job.client]:
            del self.held[job.client]

    @property
    def n_waiting(self) -> int:
        with self.changed:
            return sum(len(job.waiting) for jobs in self.kinds.values() for job in jobs)

    @property
    def n_running(self) -> int:
        with self.changed:
            return len(self.jobs)

    def close(self) -> None:
        """Whatever was not found by now fails, and nothing more is taken in."""
        with self.changed:
            self.is_closed = True
            left = {id(job): job for job in [*self.jobs.values(), *itertools.chain(*self.kinds.values())]}
            self.changed.notify_all()
        for job in left.values():
            job.end(Refusal(503, "the server is going down", RETRY_SECONDS))

    def join(self) -> None:
        for worker in self.workers:
            worker.thread.join(STOP_SECONDS)

    # What workers ask

    def oldest_kind(self, worker: _Worker) -> Kind | None:
        """Waits until there is one. None: there will be none."""
        with self.changed:
            worker.kind = None
            self.changed.wait_for(lambda: self.is_closed or self.kinds)
            if self.is_closed:
                return None
            worker.kind = min(self.kinds, key=self._since)
            return worker.kind

    def _since(self, kind: Kind) -> float:
        return min(job.arrived for job in self.kinds[kind])

    def take(self, worker: _Worker) -> Sentence | None:
        """The next sentence of the worker's kind, unless it is another kind's turn, or another worker has fewer."""
        with self.changed:
            kind = worker.kind
            if kind is None or kind not in self.kinds or self._gives_way(worker, kind):
                return None
            job = self.kinds[kind].popleft()
            sentence = job.waiting.popleft()
            if job.waiting:
                self.kinds[kind].append(job)
            elif not self.kinds[kind]:
                del self.kinds[kind]
            self.jobs[sentence.number] = job
            worker.has.add(sentence.number)
            return sentence

    def _gives_way(self, worker: _Worker, kind: Kind) -> bool:
        if any(len(other.has) < len(worker.has) for other in self.workers if other.kind in (None, kind)):
            return True
        if len(self.kinds) == 1:
            return False
        late = min(time.monotonic() - PATIENCE, self._since(kind))
        return any(self._since(other) < late for other in self.kinds if other != kind)

    def give_back(self, worker: _Worker, number: int) -> Job | None:
        """Whose sentence the worker no longer has."""
        with self.changed:
            if number not in worker.has:
                return None
            worker.has.remove(number)
            self.unwanted.discard(number)
            job = self.jobs.pop(number)
            self._release(job, 1)
            return job

    def withdrawn(self, worker: _Worker, running: Sequence[Sentence]) -> list[int]:
        """The places of those that nobody wants any more."""
        if not self.unwanted:
            return []
        with self.changed:
            own = self.unwanted & worker.has
            return [place for place, sentence in enumerate(running) if sentence.number in own]


class _Worker:
    """A thread with a search, which is fed from the kind that the search is of."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.has, self.batch_size = batcher, set[int](), 1
        self.kind: Kind | None = None
        """None: it waits."""
        self.thread = threading.Thread(target=self._work, name="search", daemon=True)

    def _work(self) -> None:
        torch.set_num_threads(1)
        while self.batcher.oldest_kind(self) is not None:
            try:
                for sentence, hypotheses in self._search():
                    self._found(sentence, hypotheses)
            except Exception as error:  # theirs fail, and the next may do better
                for number in list(self.has):
                    if (job := self.batcher.give_back(self, number)) is not None:
                        job.end(error)

    def _search(self) -> Iterator[tuple[Sentence, list[Hypothesis]]]:
        first = self.batcher.take(self)  # by whom it is known how to search
        if first is None:
            return iter(())
        way = self.batcher.jobs[first.number].way
        self.batch_size = way.translator.batch_size_for(way.settings)
        return way.translator.search(_Feed(self, first), way.settings, cancelled=self._withdrawn)

    def _found(self, sentence: Sentence, hypotheses: list[Hypothesis]) -> None:
        self.batcher.metrics.found(len(sentence.source), len(hypotheses[0].ids))
        if (job := self.batcher.give_back(self, sentence.number)) is not None:
            job.put(sentence.number, hypotheses)

    def _withdrawn(self, running: Sequence[Sentence]) -> list[int]:
        self.batcher.metrics.took_turn(len(self.has), self.batch_size)
        places = self.batcher.withdrawn(self, running)
        for place in places:
            self.batcher.give_back(self, running[place].number)
        self.batcher.metrics.left(len(places))
        return places


class _Feed:
    def __init__(self, worker: _Worker, first: Sentence) -> None:
        self.worker, self.first = worker, [first]

    def get(self, wait: bool) -> Sentence | None:
        """Where none is there the search ends, and whoever waits does so for the next of any kind."""
        return self.first.pop() if self.first else self.worker.batcher.take(self.worker)
