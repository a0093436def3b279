"""Counters and histograms in the text format of Prometheus."""

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
        lines, n_so_far = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            n_so_far += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {n_so_far}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {n_so_far}"]


class Metrics:
    """Updated by the event loop and by the search threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.n_requests: dict[tuple[str, int], int] = defaultdict(int)
        """By path and status code."""
        self.seconds, self.fill = Histogram(SECONDS), Histogram(SHARES)
        self.n_sentences = self.n_cancelled = self.n_source_tokens = self.n_target_tokens = self.n_turns = 0

    def add_response(self, path: str, code: int, seconds: float) -> None:
        with self.lock:
            self.n_requests[path, code] += 1
            self.seconds.add(seconds)

    def add_turn(self, n_running: int, batch_size: int) -> None:
        with self.lock:
            self.n_turns += 1
            self.fill.add(n_running / batch_size)

    def add_sentence(self, n_source: int, n_target: int) -> None:
        with self.lock:
            self.n_sentences += 1
            self.n_source_tokens += n_source
            self.n_target_tokens += n_target

    def add_cancelled(self, n: int) -> None:
        with self.lock:
            self.n_cancelled += n

    def text(self, n_waiting: int, n_running: int) -> str:
        with self.lock:
            requests = [
                f'transduce_requests_total{{path="{path}",code="{code}"}} {count}'
                for (path, code), count in sorted(self.n_requests.items())
            ]
            parts = [
                ("requests_total", "counter", "Responses, by path and status code.", requests),
                (
                    "request_seconds",
                    "histogram",
                    "Seconds from a request to its response.",
                    self.seconds.lines("transduce_request_seconds"),
                ),
                (
                    "batch_fill",
                    "histogram",
                    "Share of the batch that is in use, for each turn of a search.",
                    self.fill.lines("transduce_batch_fill"),
                ),
            ]
            numbers = [
                ("queue_sentences", "gauge", "Sentences that wait.", n_waiting),
                ("running_sentences", "gauge", "Sentences that are being translated.", n_running),
                ("sentences_total", "counter", "Sentences translated.", self.n_sentences),
                ("cancelled_sentences_total", "counter", "Sentences cancelled.", self.n_cancelled),
                ("source_tokens_total", "counter", "Source tokens, end marks included.", self.n_source_tokens),
                ("target_tokens_total", "counter", "Tokens of the best translations.", self.n_target_tokens),
                ("turns_total", "counter", "Turns of all searches.", self.n_turns),
            ]
        parts += [
            (name, kind, description, [f"transduce_{name} {value}"]) for name, kind, description, value in numbers
        ]
        return "".join(
            "\n".join([f"# HELP transduce_{name} {description}", f"# TYPE transduce_{name} {kind}", *lines]) + "\n"
            for name, kind, description, lines in parts
        )
