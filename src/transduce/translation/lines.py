"""From lines of text to sentences of a search and back, in order and in bounded memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.translation.segments import Segment

WINDOW_BATCHES = 16
"""Batches of lines that are sorted by length together before they are searched."""
MAX_WINDOWS = 2
"""Windows of lines in work at a time. No more lines are read until the oldest are done and returned."""
GATHER_SECONDS = 0.005
"""Seconds to wait for more lines before the lines read so far are searched."""


@dataclass
class Line:
    """A line of text on its way through a search."""

    before: str
    after: str
    """White space around the text, which is kept."""
    segments: list[Segment]
    ids: list[list[int]]
    """Token ids of each segment, without marks."""
    tag: list[int]
    prefix: list[int]
    results: dict[int, list[Hypothesis]] = field(default_factory=dict)
    """The hypotheses of each segment whose search is done."""

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.segments)

    def sentences(self, first: int, eos_id: int) -> list[Sentence]:
        """One sentence for each segment, numbered from `first`."""
        prefixes = [self.prefix, *[[]] * len(self.ids)]
        return [
            Sentence(number, [*self.tag, *ids, eos_id], prefix)
            for number, (ids, prefix) in enumerate(zip(self.ids, prefixes, strict=False), first)
        ]


class LineStream:
    """Reads lines, makes sentences of them, and returns the finished lines in order. It is a `Queue` of sentences.

    Lines are sorted by length, a window at a time, so that a batch holds sentences of similar length. A thread reads
    them, unless they come as a list. Only one thread at a time may call the other methods.
    """

    def __init__(self, texts: Iterable[str], prepare: Callable[[str], Line], batch_size: int, eos_id: int) -> None:
        self.prepare, self.eos_id = prepare, eos_id
        self.window = WINDOW_BATCHES * batch_size
        self.read: queue.Queue[str | BaseException | None] = queue.Queue(self.window)
        self.is_closed = self.has_ended = False
        self.error: BaseException | None = None
        self.sentences: list[Sentence] = []
        self.segments: dict[int, tuple[Line, int]] = {}
        """For each sentence number: the line, and the index of the segment in the line."""
        self.n_sentences = 0
        self.lines: dict[int, Line] = {}
        self.n_read = self.n_returned = 0
        self.listed = iter(texts) if isinstance(texts, list | tuple) else None
        if self.listed is None:  # for a single sentence, starting a thread would take a tenth of the time
            threading.Thread(target=self._read, args=(iter(texts),), daemon=True).start()

    def _read(self, texts: Iterator[str]) -> None:
        last: BaseException | None = None
        try:
            for text in texts:
                if not self._offer(text):
                    return
        except BaseException as error:  # raised again in the thread that translates
            last = error
        self._offer(last)

    def _offer(self, item: str | BaseException | None) -> bool:
        while not self.is_closed:
            try:
                self.read.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def close(self) -> None:
        self.is_closed = True

    @property
    def is_over(self) -> bool:
        return self.has_ended and not self.lines

    @property
    def has_room(self) -> bool:
        return bool(self.sentences) or len(self.lines) < MAX_WINDOWS * self.window

    def get(self, wait: bool) -> Sentence | None:
        """The next sentence. Also None if only blank lines were read: they must be returned before waiting again."""
        if not self.sentences:
            self._gather(wait)
        return self.sentences.pop() if self.sentences else None

    def take_window(self) -> Iterator[Sentence]:
        """All sentences read so far, at most a window of them. Waits for the first."""
        sentence = self.get(wait=True)
        while sentence is not None:
            yield sentence
            sentence = self.sentences.pop() if self.sentences else None

    def _gather(self, wait: bool) -> None:
        """Makes sentences of the lines read so far."""
        n_taken = 0
        while not self.has_ended and n_taken < self.window:
            try:
                if self.listed is not None:
                    item = next(self.listed, None)
                else:
                    item = self.read.get(block=wait, timeout=GATHER_SECONDS if n_taken else None)
            except queue.Empty:
                break
            if isinstance(item, str):
                self._add(item)
                n_taken += 1
            else:
                self.has_ended, self.error = True, item
        self.sentences.sort(key=lambda sentence: len(sentence.source))  # the longest is taken first

    def _add(self, text: str) -> None:
        line = self.prepare(text)
        self.lines[self.n_read] = line
        self.n_read += 1
        for segment, sentence in enumerate(line.sentences(self.n_sentences, self.eos_id)):
            self.sentences.append(sentence)
            self.segments[sentence.number] = line, segment
        self.n_sentences += len(line.ids)

    def put(self, number: int, hypotheses: list[Hypothesis]) -> None:
        line, segment = self.segments.pop(number)
        line.results[segment] = hypotheses

    def finished(self) -> Iterator[Line]:
        """Lines that are done, in order, up to the first that is not."""
        while self.n_returned in self.lines and self.lines[self.n_returned].is_done:
            yield self.lines.pop(self.n_returned)
            self.n_returned += 1
