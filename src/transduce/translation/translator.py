"""Text in, text out: the one road from lines to translations, for the command line, scores and servers alike.

Line i out is line i in. A blank line stays blank; what is too long is split; whatever is less than it should be is
flagged on the result, and nothing is dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from transduce.config import DecodeConfig, RunConfig
from transduce.data.subword import SUBWORDS, Subwords
from transduce.engines.cached import FastStepper, why_not
from transduce.engines.native.library import Precision
from transduce.engines.native.stepper import NativeStepper
from transduce.engines.native.stepper import why_not as why_not_native
from transduce.errors import ConfigError, ModelFolderError
from transduce.model import Transformer
from transduce.model_folder.format import BUNDLED, AlignmentHeads, Origin, load_model, load_origin, model_folder
from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.search.loop import Queue, Stepper, Withdrawn, search, side_by_side
from transduce.search.spelling import LINE_BREAKS, one_line, whole_characters
from transduce.translation.alignment import Link, n_words
from transduce.translation.explain import Explained, Token, explain
from transduce.translation.segments import Segment, longest_repeat, split

Found = tuple[Sentence, list[Hypothesis]]
T = TypeVar("T")

Flag = Literal["split", "limit", "loop", "empty", "close"]
FLAGS: dict[Flag, str] = {
    "split": "the line was longer than any that the model was trained on, and translated in parts",
    "limit": "the translation reached the longest length allowed and was cut there",
    "loop": "the translation says the same over and over, and the source does not",
    "empty": "the translation is empty, and the line is not",
    "close": "another choice was as good as this one: another batch size or machine may choose it",
}
CLOSE, CLOSE_SHARE = 1e-4, 1e-6
"""In log-probability, and as a share of it: between batch sizes, float32 differs by less than half of their sum."""
LOOP = 12
"""Tokens of the same, over and over."""
TOKENS_PER_SENTENCE = 48
"""What a batch is sized for. Where sentences are longer, fewer go side by side."""
BATCH_SIZE = 64
WINDOWS = 16
"""Batches of lines that are sorted by length before they are searched."""
MOST_HELD = 2
"""Windows of lines that are begun and not taken, before no more are begun."""
USUAL_BEAM = 4
LEAST_EACH = 8
"""Sentences for each core; of fewer, all cores work on all."""
GATHER_SECONDS = 0.005
"""For how long to wait for more lines before those that have come are begun with."""


class Alternative(NamedTuple):
    text: str
    score: float
    log_prob: float


@dataclass(frozen=True)
class Translation:
    text: str
    score: float
    """By which alternatives are ranked: log-probability over length penalty, added up over the parts of a line."""
    log_prob: float
    flags: tuple[Flag, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """The best of the beam, this one first."""
    tokens: tuple[Token, ...] | None = None
    alignment: tuple[Link, ...] | None = None
    """(source word, target word), as white space divides them, counted from 0."""


@dataclass
class _Line:
    """One on its way."""

    before: str
    after: str
    """White space around the text, which is kept."""
    segments: list[Segment]
    ids: list[list[int]]
    """Of each segment, without marks."""
    tag: list[int]
    prefix: list[int]
    found: dict[int, list[Hypothesis]] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return len(self.found) == len(self.segments)

    def sentences(self, first: int, eos_id: int) -> list[Sentence]:
        """One for each segment, numbered from the first."""
        prefixes = [self.prefix, *[[]] * len(self.ids)]
        return [
            Sentence(number, [*self.tag, *ids, eos_id], prefix)
            for number, (ids, prefix) in enumerate(zip(self.ids, prefixes, strict=False), first)
        ]


class Translator:
    """A model folder, ready to translate."""

    def __init__(
        self,
        model: Transformer,
        config: RunConfig,
        subwords: Subwords,
        origin: Origin | None = None,
        heads: AlignmentHeads | None = None,
        *,
        settings: DecodeConfig | None = None,
        batch_size: int | None = None,
        precision: Precision = "float32",
    ) -> None:
        """`precision`: of products in the decoder; int8 is for CPUs. `batch_size`: sentences side by side, at most."""
        batch_size = BATCH_SIZE if batch_size is None else batch_size
        if batch_size < 1:
            raise ConfigError(f"batch size is {batch_size}, must be at least 1: raise it")
        self.model, self.config, self.subwords, self.heads = model, config, subwords, heads
        self.origin, self.settings, self.batch_size = origin or Origin(), settings or config.decode, batch_size
        self.device, self.precision = next(model.parameters()).device, precision
        if precision == "int8" and (reason := self._why_no_int8()) is not None:
            raise ConfigError(f"there is no int8 where {reason}: take float32")
        self.rules = one_line(subwords, config.model).to(self.device)
        is_learned = config.model.positions == "learned"
        # Of a translation, the start mark takes a position too.
        self.longest_output = config.model.max_positions - 1 if is_learned else None
        most = config.model.max_positions if is_learned else None
        self.longest_source = _least(self.origin.longest_source, most, less=1 + bool(self.origin.tagged_languages))
        self.longest_target = _least(self.origin.longest_target, most, less=1)
        """Tokens of text, without tag and marks, that the model has met in training and has positions for."""

    @classmethod
    def load(
        cls,
        folder: str | Path = BUNDLED,
        *,
        device: str | None = None,
        dtype: torch.dtype = torch.float32,
        settings: DecodeConfig | None = None,
        batch_size: int | None = None,
        precision: Precision = "float32",
    ) -> Translator:
        """From a model folder, a run, or what comes with the package. `device` None: a GPU where there is one."""
        folder = model_folder(Path(folder))
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, config = load_model(folder, device)
        origin, heads = load_origin(folder)
        subwords = Subwords.load(folder / SUBWORDS)
        if len(subwords) > min(config.model.source_vocab_size, config.model.target_vocab_size):
            raise ModelFolderError(f"{folder / SUBWORDS} has more entries than the model: copy the folder again")
        found = cls(
            model.to(dtype),
            config,
            subwords,
            origin,
            heads,
            settings=settings,
            batch_size=batch_size,
            precision=precision,
        )
        _ = found.stepper  # made now: whoever asks first shall not wait for it
        return found

    def _why_no_int8(self) -> str | None:
        return "there is a GPU" if self.device.type != "cpu" else why_not(self.config.model)

    @cached_property
    def stepper(self) -> Stepper[Any]:
        """What the search asks: the model, or the same faster. `GraphStepper` is still to be measured on a GPU."""
        if self.device.type != "cpu" or why_not(self.config.model) is not None:
            return self.model
        is_native = next(self.model.parameters()).dtype == torch.float32 and self.why_slow is None
        return (NativeStepper if is_native else FastStepper)(self.model, self.precision)

    @property
    def why_slow(self) -> str | None:
        """None where the precision is compiled for this machine."""
        return why_not_native(self.config.model, self.precision)

    def translate(
        self, texts: Sequence[str], to: str | None = None, *, with_details: bool = False, prefix: str = ""
    ) -> list[Translation]:
        return list(self.stream(texts, to, with_details=with_details, prefix=prefix))

    def stream(
        self, texts: Iterable[str], to: str | None = None, *, with_details: bool = False, prefix: str = ""
    ) -> Iterator[Translation]:
        """In the order of the texts, each as soon as it and all before it are found. Holds some windows of lines.

        `texts`, unless it is a list, is read in a thread of its own: lines that come slowly are begun as they come.
        `with_details` adds tokens and alignment. `prefix`: how every translation must begin.
        """
        with contextlib.closing(self._found(texts, to, prefix)) as lines:
            for line in lines:
                yield self._finish(line, list(self._explain(line)) if with_details else None)

    def explain(
        self, texts: Iterable[str], to: str | None = None, *, prefix: str = ""
    ) -> Iterator[tuple[Translation, list[Explained]]]:
        """As `stream`, and of each part of a line the pass along its translation that the details are from."""
        with contextlib.closing(self._found(texts, to, prefix)) as lines:
            for line in lines:
                yield self.finish_explained(line)

    def _found(self, texts: Iterable[str], to: str | None, prefix: str) -> Generator[_Line, None, None]:
        lines = _Lines(self, texts, self.tag_for(to), self.encode_prefix(prefix))
        try:
            while not lines.is_over:
                with contextlib.closing(self._search(lines)) as found:
                    for sentence, hypotheses in found:
                        lines.put(sentence.number, hypotheses)
                        yield from lines.ready()
                yield from lines.ready()  # blank ones, after which nothing was found
            if lines.error is not None:  # after all that came before it
                raise lines.error
        finally:
            lines.close()

    def _search(self, lines: _Lines) -> Generator[Found, None, None]:
        """Each core has a search, and all take from what has come; a few sentences, and whoever comes while they are
        searched, are one search's, with all cores."""
        n_workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        if n_workers == 1:
            yield from self._search_one(lines)
        elif len(come := list(lines.take())) >= LEAST_EACH * n_workers:
            # They are sorted by length, so that every n-th are of all lengths.
            rest = _Shared(lines)
            yield from in_threads(self._search_one, [_Before(come[i::n_workers], rest) for i in range(n_workers)])
        elif come:  # else there were blank lines alone, which are to be given back
            yield from self._search_one(_Before(come, lines))

    def _search_one(
        self, sentences: Iterable[Sentence] | Queue, stop: threading.Event | None = None
    ) -> Iterator[Found]:
        def withdrawn(_: Sequence[Sentence]) -> Iterable[int]:
            if stop is not None and stop.is_set():
                raise _Stopped
            return ()

        return self.search(sentences, withdrawn=withdrawn)

    def search(
        self,
        sentences: Iterable[Sentence] | Queue,
        settings: DecodeConfig | None = None,
        *,
        withdrawn: Withdrawn | None = None,
    ) -> Iterator[Found]:
        """What `prepare` has made into sentences, for whoever feeds the search; `finish` makes text of it again."""
        settings = settings or self.settings
        batch_size = self.n_side_by_side(settings)
        return search(
            self.stepper,
            self.config.model,
            sentences,
            settings,
            self.rules,
            batch_size=batch_size,
            batch_tokens=batch_size * TOKENS_PER_SENTENCE,
            longest=self.longest_output,
            device=self.device,
            withdrawn=withdrawn,
        )

    def n_side_by_side(self, settings: DecodeConfig) -> int:
        """A wide beam takes more memory for each sentence, so fewer are searched together; and no more than pay."""
        n = max(1, self.batch_size * USUAL_BEAM // max(USUAL_BEAM, settings.n_hypotheses))
        return side_by_side(self.stepper, n, settings.n_hypotheses)

    def finish(self, line: _Line) -> Translation:
        return self._finish(line, None)

    def finish_explained(self, line: _Line) -> tuple[Translation, list[Explained]]:
        parts = list(self._explain(line))
        return self._finish(line, parts), parts

    def tag_for(self, to: str | None) -> list[int]:
        """What a source must begin with to be translated into that language."""
        targets = list(dict.fromkeys(target for _, target in self.origin.directions))
        if not self.origin.tagged_languages:
            if to is not None and targets and to not in targets:
                raise ConfigError(f"--to is {to!r}, this model translates into {', '.join(targets)}: leave it out")
            return []
        known = ", ".join(self.origin.tagged_languages)
        if to is None:
            if len(self.origin.tagged_languages) > 1:
                raise ConfigError(f"this model translates into {known}: choose one by --to")
            to = self.origin.tagged_languages[0]
        if to not in self.origin.tagged_languages:
            raise ConfigError(f"--to is {to!r}, this model translates into {known}: choose one of them")
        return [self.subwords.tag(to)]

    def encode_prefix(self, prefix: str) -> list[int]:
        if set(prefix) & {*LINE_BREAKS, "\t"}:
            raise ConfigError(f"--prefix is {prefix!r}, must be of one line and without tabs: leave them out")
        ids = self.subwords.encode([prefix.strip()])[0]
        if self.longest_output is not None and len(ids) >= self.longest_output:
            raise ConfigError(f"--prefix has {len(ids)} tokens, this model can say {self.longest_output}: shorten it")
        return ids

    def prepare(self, text: str, tag: list[int], prefix: list[int]) -> _Line:
        core = text.strip()
        if not core:
            return _Line("", "", [], [], tag, prefix)
        before, _, after = text.partition(core)
        segments = [Segment(core, "")]
        ids = self.subwords.encode([core])
        if self.longest_source is not None and len(ids[0]) > self.longest_source:
            segments = split(core, lambda part: len(self.subwords.encode([part])[0]), self.longest_source)
            ids = self.subwords.encode([segment.text for segment in segments])
        return _Line(before, after, segments, ids, tag, prefix)

    def _explain(self, line: _Line) -> Iterator[Explained]:
        parts = [(ids, line.found[place][0]) for place, ids in enumerate(line.ids)]
        return explain(self.model, self.subwords, parts, line.tag, self.heads)

    def _finish(self, line: _Line, parts: Sequence[Explained] | None) -> Translation:
        if not line.segments:
            is_explained = parts is not None
            return Translation(
                "", 0.0, 0.0, tokens=() if is_explained else None, alignment=() if is_explained else None
            )
        found = [line.found[place] for place in range(len(line.segments))]
        alternatives = tuple(
            self._join(line, [hypotheses[min(n, len(hypotheses) - 1)] for hypotheses in found])
            for n in range(max(len(hypotheses) for hypotheses in found))
        )
        flags: list[Flag] = ["split"] if len(line.segments) > 1 else []
        best = [hypotheses[0] for hypotheses in found]
        flags += ["limit"] if not all(hypothesis.has_ended for hypothesis in best) else []
        loops = any(
            longest_repeat(hypothesis.ids) >= max(LOOP, longest_repeat(ids) + 1)
            for hypothesis, ids in zip(best, line.ids, strict=True)
        )
        flags += ["loop"] if loops else []
        flags += ["empty"] if not alternatives[0].text.strip() else []
        flags += ["close"] if any(h.margin < CLOSE - CLOSE_SHARE * h.log_prob for h in best) else []
        tokens = tuple(token for part in parts for token in part.tokens) if parts is not None else None
        alignment = self._alignment(line, parts) if parts is not None else None
        first = alternatives[0]
        return Translation(first.text, first.score, first.log_prob, tuple(flags), alternatives, tokens, alignment)

    def _join(self, line: _Line, hypotheses: Sequence[Hypothesis]) -> Alternative:
        # What has ended by itself has ended with a whole character: the rules see to that.
        whole = [h.ids if h.has_ended else whole_characters(h.ids, self.rules) for h in hypotheses]
        texts = self.subwords.decode(whole)
        joined = "".join(text + segment.gap for text, segment in zip(texts, line.segments, strict=True))
        return Alternative(
            line.before + joined + line.after,
            sum(hypothesis.score for hypothesis in hypotheses),
            sum(hypothesis.log_prob for hypothesis in hypotheses),
        )

    def _alignment(self, line: _Line, parts: Sequence[Explained]) -> tuple[Link, ...] | None:
        if self.heads is None:
            return None
        links: dict[Link, None] = {}
        n_source = n_target = 0
        for segment, part in zip(line.segments, parts, strict=True):
            links |= dict.fromkeys((s + n_source, t + n_target) for s, t in part.links or ())
            # Where there is no gap, the next part goes on with the same word.
            n_source += max(0, n_words(part.source_words) - (not segment.gap))
            n_target += max(0, n_words(part.target_words) - (not segment.gap))
        return tuple(links)


def _least(*bounds: int | None, less: int) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return max(1, min(known) - less) if known else None


def in_threads(search_one: Callable[[T, threading.Event], Iterator[Found]], shares: Sequence[T]) -> Iterator[Found]:
    """What searches find that each have a share, a thread and a core: threads inside of operations so small would wait
    for each other most of the time. When this is left, whatever the reason, they have ended."""
    found: queue.SimpleQueue[Found | BaseException | None] = queue.SimpleQueue()  # whoever feeds the searches bounds it
    stop, n_threads = threading.Event(), torch.get_num_threads()

    def work(share: T) -> None:
        torch.set_num_threads(1)
        last: BaseException | None = None
        try:
            for item in search_one(share, stop):
                found.put(item)
        except BaseException as error:  # raised where somebody hears it
            last = error
        found.put(last)

    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    try:
        n_left = len(workers)
        while n_left:
            item = found.get()
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
        torch.set_num_threads(n_threads)  # what the workers said was said for threads to come, too


class _Stopped(Exception):
    """Nobody wants what would be found."""


class _Before:
    """Sentences that have come, before those that will."""

    def __init__(self, come: list[Sentence], lines: Queue) -> None:
        self.come, self.lines = come[::-1], lines

    def get(self, wait: bool) -> Sentence | None:
        return self.come.pop() if self.come else self.lines.get(wait)


class _Shared:
    """Sentences of lines that are here, for several searches. Nobody waits for more: once there are none, or whoever
    wants the lines is slow to take them, there are none for anybody, so that all end and begin again together."""

    def __init__(self, lines: _Lines) -> None:
        self.lines, self.lock, self.is_over = lines, threading.Lock(), False

    def get(self, wait: bool) -> Sentence | None:
        with self.lock:
            found = None if self.is_over or not self.lines.has_room else self.lines.get(wait=False)
            self.is_over = found is None
            return found


class _Lines:
    """Lines that come, the sentences that are made of them, and the way back. A thread reads, unless all lines are here
    from the start; all else is the search's, or of several, one at a time.

    What has come is sorted by length, some batches at a time, so that sentences side by side are alike.
    """

    def __init__(self, translator: Translator, texts: Iterable[str], tag: list[int], prefix: list[int]) -> None:
        self.translator, self.tag, self.prefix = translator, tag, prefix
        self.window = WINDOWS * translator.n_side_by_side(translator.settings)
        self.read: queue.Queue[str | BaseException | None] = queue.Queue(self.window)
        self.is_closed = self.has_ended = False
        self.error: BaseException | None = None
        self.sentences: list[Sentence] = []
        self.places: dict[int, tuple[_Line, int]] = {}
        self.n_sentences = 0
        self.lines: dict[int, _Line] = {}
        self.n_lines = self.n_given = 0
        self.given = iter(texts) if isinstance(texts, list | tuple) else None
        if self.given is None:  # for one sentence a thread would cost a tenth of its time
            threading.Thread(target=self._read, args=(iter(texts),), daemon=True).start()

    def _read(self, texts: Iterator[str]) -> None:
        last: BaseException | None = None
        try:
            for text in texts:
                if not self._offer(text):
                    return
        except BaseException as error:  # it is raised where it can be dealt with, in the thread that translates
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
        return bool(self.sentences) or len(self.lines) < MOST_HELD * self.window

    def get(self, wait: bool) -> Sentence | None:
        """None also after blank lines alone, which must be given back before the next are waited for."""
        if not self.sentences:
            self._gather(wait)
        return self.sentences.pop() if self.sentences else None

    def take(self) -> Iterator[Sentence]:
        """All that have come, at most a window of them; the first is waited for."""
        sentence = self.get(wait=True)
        while sentence is not None:
            yield sentence
            sentence = self.sentences.pop() if self.sentences else None

    def _gather(self, wait: bool) -> None:
        """Takes in the lines that have come."""
        n_taken = 0
        while not self.has_ended and n_taken < self.window:
            try:
                item = (
                    next(self.given, None)
                    if self.given is not None
                    else self.read.get(block=wait, timeout=GATHER_SECONDS if n_taken else None)
                )
            except queue.Empty:
                break
            if isinstance(item, str):
                self._take_in(item)
                n_taken += 1
            else:
                self.has_ended, self.error = True, item
        self.sentences.sort(key=lambda sentence: len(sentence.source))  # the longest is taken first

    def _take_in(self, text: str) -> None:
        line = self.translator.prepare(text, self.tag, self.prefix)
        self.lines[self.n_lines] = line
        self.n_lines += 1
        for place, sentence in enumerate(line.sentences(self.n_sentences, self.translator.config.model.eos_id)):
            self.sentences.append(sentence)
            self.places[sentence.number] = line, place
        self.n_sentences += len(line.ids)

    def put(self, number: int, hypotheses: list[Hypothesis]) -> None:
        line, place = self.places.pop(number)
        line.found[place] = hypotheses

    def ready(self) -> Iterator[_Line]:
        while self.n_given in self.lines and self.lines[self.n_given].is_done:
            yield self.lines.pop(self.n_given)
            self.n_given += 1
