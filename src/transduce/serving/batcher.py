"""Translate the sentences of many requests together in one search.

Each worker is a thread that runs one search. Waiting sentences join a running search at its next turn; there are no
fixed batches to wait for. All sentences of a search share one translator and one set of search settings, so waiting
jobs are grouped by these, and a worker serves one group at a time. Within a group, jobs take turns sentence by
sentence, so a long request does not delay short ones.
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
from transduce.serving.limits import RETRY_SECONDS, Limits, Refusal
from transduce.serving.metrics import Metrics
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

PREEMPT_SECONDS = 0.2
"""Seconds a waiting group waits before it pre-empts the others: their searches then accept no more sentences."""
STOP_SECONDS = 10.0
"""The longest wait for a worker to stop. A worker notices within one turn that its sentences are cancelled."""


class TranslationSettings(NamedTuple):
    translator: Translator
    target: str | None
    """The target language. None: the only one of the model."""
    decode: DecodeConfig


class Job:
    """The texts of one request. Cancelling its `future` cancels the job."""

    def __init__(
        self, settings: TranslationSettings, texts: Sequence[str], client: str, prefix: Sequence[int] = ()
    ) -> None:
        """`prefix`: token ids that every translation must begin with."""
        self.settings, self.client, self.arrived_at = settings, client, time.monotonic()
        tag = settings.translator.tag_for(settings.target)
        self.lines = [settings.translator.prepare(text, tag, list(prefix)) for text in texts]
        lengths = [len(ids) for line in self.lines for ids in line.ids]
        self.n_sentences, self.n_tokens, self.longest = len(lengths), sum(lengths), max(lengths, default=0)
        self.future: Future[list[Translation]] = Future()
        self.waiting: deque[Sentence] = deque()
        self.unfinished: dict[int, tuple[int, int]] = {}
        """The line and the segment of each sentence that has no result yet, by number of the sentence."""

    def number_sentences(self, first: int) -> None:
        eos_id = self.settings.translator.config.model.eos_id
        for n, line in enumerate(self.lines):
            for segment, sentence in enumerate(line.sentences(first + len(self.unfinished), eos_id)):
                self.waiting.append(sentence)
                self.unfinished[sentence.number] = n, segment

    def add_result(self, number: int, hypotheses: list[Hypothesis]) -> None:
        n, segment = self.unfinished[number]
        self.lines[n].results[segment] = hypotheses  # before the deletion: another worker may delete the last one
        del self.unfinished[number]
        if not self.unfinished:
            self.finish()

    def finish(self, error: Exception | None = None) -> None:
        try:
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result([self.settings.translator.finish(line) for line in self.lines])
        except InvalidStateError:  # the job was cancelled, or has failed before
            pass


Group = tuple[int, DecodeConfig, int]
"""Jobs of equal groups can share a search: the id of the translator, the search settings, and the id of the job if
jobs do not share searches at all."""


class Batcher:
    def __init__(self, limits: Limits, metrics: Metrics, n_workers: int, *, alone: bool = False) -> None:
        """`alone`: each request has a search for itself."""
        self.limits, self.metrics, self.alone = limits, metrics, alone
        self.changed = threading.Condition()
        """The lock of all state below."""
        self.waiting: dict[Group, deque[Job]] = {}
        """Jobs with waiting sentences. Groups without such jobs are not in it."""
        self.running: dict[int, Job] = {}
        """The jobs of the sentences that workers are translating, by number of the sentence."""
        self.cancelled: set[int] = set()
        """The sentences in `running` whose job is cancelled or has failed."""
        self.n_sentences_of: Counter[str] = Counter()
        """Waiting and running sentences of each client."""
        self.next_number = 0
        self.is_closed = False
        self.workers = [_Worker(self) for _ in range(n_workers)]

    def start(self) -> None:
        for worker in self.workers:
            worker.thread.start()

    def submit(self, job: Job) -> None:
        with self.changed:
            if self.is_closed:
                raise Refusal(503, "the server is shutting down", RETRY_SECONDS)
            if self.n_sentences_of.total() + job.n_sentences > self.limits.queue:
                raise Refusal(503, "too many sentences are waiting", RETRY_SECONDS)
            if self.n_sentences_of[job.client] + job.n_sentences > self.limits.client_queue:
                raise Refusal(429, "too many sentences of this client are waiting", RETRY_SECONDS)
            job.number_sentences(self.next_number)
            if job.waiting:
                self.next_number += job.n_sentences
                self.n_sentences_of[job.client] += job.n_sentences
                self.waiting.setdefault(self._group_of(job), deque()).append(job)
                self.changed.notify_all()
        if not job.n_sentences:
            job.finish()
        job.future.add_done_callback(lambda _: self._drop_rest(job))

    def _group_of(self, job: Job) -> Group:
        return id(job.settings.translator), job.settings.decode, id(job) if self.alone else 0

    def _drop_rest(self, job: Job) -> None:
        """Remove the waiting sentences of a job that is done, and cancel its running ones."""
        with self.changed:
            if n := len(job.waiting):
                self.metrics.add_cancelled(n)
                self._subtract(job, n)
                job.waiting.clear()
                self._remove_waiting(self._group_of(job), job)
            if job.unfinished:
                self.cancelled |= {number for number, other in self.running.items() if other is job}

    def _remove_waiting(self, group: Group, job: Job) -> None:
        self.waiting[group].remove(job)
        if not self.waiting[group]:
            del self.waiting[group]

    def _subtract(self, job: Job, n: int) -> None:
        self.n_sentences_of[job.client] -= n
        if not self.n_sentences_of[job.client]:
            del self.n_sentences_of[job.client]

    @property
    def n_waiting(self) -> int:
        with self.changed:
            return sum(len(job.waiting) for jobs in self.waiting.values() for job in jobs)

    @property
    def n_running(self) -> int:
        with self.changed:
            return len(self.running)

    def close(self) -> None:
        """Fail all unfinished jobs. No job is accepted afterwards."""
        with self.changed:
            self.is_closed = True
            unfinished = {id(job): job for job in [*self.running.values(), *itertools.chain(*self.waiting.values())]}
            self.changed.notify_all()
        for job in unfinished.values():
            job.finish(Refusal(503, "the server is shutting down", RETRY_SECONDS))

    def join(self) -> None:
        for worker in self.workers:
            worker.thread.join(STOP_SECONDS)

    # Called by workers

    def assign_oldest_group(self, worker: _Worker) -> Group | None:
        """Wait for a job, and assign the group that has waited longest. Return None if the batcher is closed."""
        with self.changed:
            worker.group = None
            self.changed.wait_for(lambda: self.is_closed or self.waiting)
            if self.is_closed:
                return None
            worker.group = min(self.waiting, key=self._first_arrival)
            return worker.group

    def _first_arrival(self, group: Group) -> float:
        return min(job.arrived_at for job in self.waiting[group])

    def take(self, worker: _Worker) -> Sentence | None:
        """Return the next sentence of the worker's group. None if there is none, or if the worker must yield."""
        with self.changed:
            group = worker.group
            if group is None or group not in self.waiting or self._must_yield(worker, group):
                return None
            job = self.waiting[group].popleft()
            sentence = job.waiting.popleft()
            if job.waiting:
                self.waiting[group].append(job)
            elif not self.waiting[group]:
                del self.waiting[group]
            self.running[sentence.number] = job
            worker.numbers.add(sentence.number)
            return sentence

    def _must_yield(self, worker: _Worker, group: Group) -> bool:
        """Return whether a worker with fewer sentences can take the next one, or another group pre-empts this one."""
        if any(len(other.numbers) < len(worker.numbers) for other in self.workers if other.group in (None, group)):
            return True
        if len(self.waiting) == 1:
            return False
        latest = min(time.monotonic() - PREEMPT_SECONDS, self._first_arrival(group))
        return any(self._first_arrival(other) < latest for other in self.waiting if other != group)

    def release(self, worker: _Worker, number: int) -> Job | None:
        """Take a sentence from its worker. Return its job, or None if the worker does not have the sentence."""
        with self.changed:
            if number not in worker.numbers:
                return None
            worker.numbers.remove(number)
            self.cancelled.discard(number)
            job = self.running.pop(number)
            self._subtract(job, 1)
            return job

    def cancelled_places(self, worker: _Worker, running: Sequence[Sentence]) -> list[int]:
        """Return the places in `running` of cancelled sentences."""
        if not self.cancelled:
            return []
        with self.changed:
            numbers = self.cancelled & worker.numbers
            return [place for place, sentence in enumerate(running) if sentence.number in numbers]


class _Worker:
    """A thread that runs one search at a time, on the sentences of one group."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.batch_size = batcher, 1
        self.numbers: set[int] = set()
        """The sentences that it is translating."""
        self.group: Group | None = None
        """None while it waits."""
        self.thread = threading.Thread(target=self._work, name="search", daemon=True)

    def _work(self) -> None:
        # One search per thread: the operations of a search are too small for threads inside them. PyTorch keeps this
        # number for each thread; only threads that start later, here those of the server, also begin with it.
        torch.set_num_threads(1)
        while self.batcher.assign_oldest_group(self) is not None:
            try:
                for sentence, hypotheses in self._search():
                    self._add_result(sentence, hypotheses)
            except Exception as error:  # fails the jobs of this search; the worker continues with the next
                for number in list(self.numbers):
                    if (job := self.batcher.release(self, number)) is not None:
                        job.finish(error)

    def _search(self) -> Iterator[tuple[Sentence, list[Hypothesis]]]:
        first = self.batcher.take(self)  # its job has the settings of the search
        if first is None:
            return iter(())
        settings = self.batcher.running[first.number].settings
        self.batch_size = settings.translator.batch_size_for(settings.decode)
        return settings.translator.search(
            _WorkerQueue(self, first), settings.decode, cancelled=self._cancelled_in_this_turn
        )

    def _add_result(self, sentence: Sentence, hypotheses: list[Hypothesis]) -> None:
        self.batcher.metrics.add_sentence(len(sentence.source), len(hypotheses[0].ids))
        if (job := self.batcher.release(self, sentence.number)) is not None:
            job.add_result(sentence.number, hypotheses)

    def _cancelled_in_this_turn(self, running: Sequence[Sentence]) -> list[int]:
        self.batcher.metrics.add_turn(len(self.numbers), self.batch_size)
        places = self.batcher.cancelled_places(self, running)
        for place in places:
            self.batcher.release(self, running[place].number)
        self.batcher.metrics.add_cancelled(len(places))
        return places


class _WorkerQueue:
    """The sentences of a search: `first`, then those that the batcher gives to the worker."""

    def __init__(self, worker: _Worker, first: Sentence) -> None:
        self.worker, self.first = worker, [first]

    def get(self, wait: bool) -> Sentence | None:
        """Return the next sentence, without waiting: if there is none, the search ends and its worker waits instead."""
        return self.first.pop() if self.first else self.worker.batcher.take(self.worker)
