"""One search per core, all fed from the same lines.

The operations of a search are so small that threads inside one operation would mostly wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.search.protocols import Queue
from transduce.translation.lines import LineStream

Result = tuple[Sentence, list[Hypothesis]]
T = TypeVar("T")


def in_threads(search_one: Callable[[T, threading.Event], Iterator[Result]], shares: Sequence[T]) -> Iterator[Result]:
    """Yields the results of one search per share, each in its own thread. All threads have ended when this returns."""
    # It needs no bound: the queue that feeds the searches is bounded.
    results: queue.SimpleQueue[Result | BaseException | None] = queue.SimpleQueue()
    stop, n_threads = threading.Event(), torch.get_num_threads()

    def work(share: T) -> None:
        torch.set_num_threads(1)
        last: BaseException | None = None
        try:
            for item in search_one(share, stop):
                results.put(item)
        except BaseException as error:  # raised again below, in the thread that reads the results
            last = error
        results.put(last)

    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    try:
        n_left = len(workers)
        while n_left:
            item = results.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                n_left -= 1
            else:
                yield item
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        torch.set_num_threads(n_threads)  # the workers' setting also applies to threads that start later


class Stopped(Exception):
    """The results of this search are no longer needed."""


class FirstThen:
    """A queue of the given sentences, followed by another queue."""

    def __init__(self, sentences: list[Sentence], rest: Queue) -> None:
        self.sentences, self.rest = sentences[::-1], rest

    def get(self, wait: bool) -> Sentence | None:
        return self.sentences.pop() if self.sentences else self.rest.get(wait)


class SharedLines:
    """The sentences of a line stream, shared by several searches. It never waits: when no sentence is available, or too
    many finished lines are unread, it ends for all searches, and they start again together."""

    def __init__(self, lines: LineStream) -> None:
        self.lines, self.lock, self.is_over = lines, threading.Lock(), False

    def get(self, wait: bool) -> Sentence | None:
        with self.lock:
            sentence = None if self.is_over or not self.lines.has_room else self.lines.get(wait=False)
            self.is_over = sentence is None
            return sentence
