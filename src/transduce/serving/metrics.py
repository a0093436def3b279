"""Counts, in the text form that Prometheus reads."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        found, so_far = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            found.append(f'{name}_bucket{{le="{bound}"}} {so_far}')
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {so_far}"]


class Metrics:
    """Written by the event loop and by the threads that search."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests: dict[tuple[str, int], int] = defaultdict(int)
        self.seconds, self.fill = Histogram(SECONDS), Histogram(SHARES)
        self.sentences = self.withdrawn = self.source_tokens = self.target_tokens = self.turns = 0

    def answered(self, path: str, code: int, seconds: float) -> None:
        with self.lock:
            self.requests[path, code] += 1
            self.seconds.add(seconds)

    def took_turn(self, n_running: int, batch_size: int) -> None:
        with self.lock:
            self.turns += 1
            self.fill.add(n_running / batch_size)

    def found(self, n_source: int, n_target: int) -> None:
        with self.lock:
            self.sentences += 1
            self.source_tokens += n_source
            self.target_tokens += n_target

    def left(self, n: int) -> None:
        with self.lock:
            self.withdrawn += n

    def text(self, n_waiting: int, n_running: int) -> str:
        with self.lock:
            requests = [
                f'transduce_requests_total{{path="{path}",code="{code}"}} {count}'
                for (path, code), count in sorted(self.requests.items())
            ]
            parts = [
                ("requests_total", "counter", "Answers, by path and code.", requests),
                (
                    "request_seconds",
                    "histogram",
                    "From a request to its answer.",
                    self.seconds.lines("transduce_request_seconds"),
                ),
                (
                    "batch_fill",
                    "histogram",
                    "Share of a batch's places taken, by turns of the search.",
                    self.fill.lines("transduce_batch_fill"),
                ),
            ]
            numbers = [
                ("queue_sentences", "gauge", "Sentences that wait.", n_waiting),
                ("running_sentences", "gauge", "Sentences that are being translated.", n_running),
                ("sentences_total", "counter", "Sentences translated.", self.sentences),
                ("withdrawn_sentences_total", "counter", "Sentences that nobody waited for any more.", self.withdrawn),
                ("source_tokens_total", "counter", "Subwords read, end marks counted.", self.source_tokens),
                ("target_tokens_total", "counter", "Subwords of the best translations.", self.target_tokens),
                ("turns_total", "counter", "Steps of all searches.", self.turns),
            ]
        parts += [(name, kind, told, [f"transduce_{name} {value}"]) for name, kind, told, value in numbers]
        return "".join(
            "\n".join([f"# HELP transduce_{name} {told}", f"# TYPE transduce_{name} {kind}", *lines]) + "\n"
            for name, kind, told, lines in parts
        )
