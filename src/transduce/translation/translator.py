"""From lines of text to translations. The command line, the evaluation and the server all use this one class.

Result i is the translation of line i. A blank line stays blank, a line that is too long is split, problems are flagged
on the result, and no line is dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack, get_args, overload

import torch

from transduce.config import DecodeConfig, RunConfig
from transduce.data.subword import SUBWORDS, Subwords, check_iterable, check_several, each_text
from transduce.engines.choose import Engine, choose_engine, make_stepper
from transduce.engines.layers import Precision
from transduce.errors import ConfigError, ModelFolderError
from transduce.model import Transformer
from transduce.model_folder.format import (
    BUNDLED,
    BUNDLED_MODEL,
    AlignmentHeads,
    Origin,
    load_model,
    load_origin,
    model_folder,
)
from transduce.runtime import check_device, default_device
from transduce.search.hypotheses import Hypothesis, Sentence
from transduce.search.loop import search, sentences_at_a_time
from transduce.search.protocols import Cancelled, Queue, Stepper
from transduce.search.spelling import LINE_BREAKS, one_line, whole_characters
from transduce.translation.alignment import Link, n_words
from transduce.translation.explain import Explained, explain
from transduce.translation.keywords import SearchKeywords, check_keywords, search_settings
from transduce.translation.lines import Line, LineStream
from transduce.translation.result import Alternative, Flag, Translation
from transduce.translation.segments import Segment, longest_repeat, split
from transduce.translation.threads import FirstThen, Result, SharedLines, Stopped, in_threads

CLOSE, CLOSE_SHARE = 1e-4, 1e-6
"""A difference in log-probability, absolute and as a share of it. Between batch sizes, float32 results differ by less
than half of the sum of both."""
LOOP = 12
"""Tokens in a repetition that is flagged."""
TOKENS_PER_SENTENCE = 48
"""The length that batches are sized for. A batch holds fewer sentences if they are longer."""
BATCH_SIZE = 64
USUAL_BEAM = 4
MIN_SENTENCES_PER_CORE = 8
"""With fewer, one search uses all cores."""
MAX_SHOWN_DIRECTIONS = 4


class Translator:
    """A model folder, ready to translate.

    >>> from transduce import Translator
    >>> translator = Translator.load(device="cpu")  # the bundled model; or the path of a model folder or a run
    >>> print(translator.translate("Das ist gut."))
    That's good.
    >>> [translation.text for translation in translator.translate(["Das ist gut.", ""])]
    ["That's good.", '']
    >>> first, second = translator.translate("Wo ist mein Buch?", n_best=2).alternatives
    >>> first.text, second.text
    ("Where's my book?", 'Where is my book?')
    """

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
        """`precision`: the number format of products; int8 needs a CPU. `batch_size`: the maximum for one search."""
        if precision not in get_args(Precision):
            raise ConfigError(f"precision is {precision!r}, must be {' or '.join(get_args(Precision))}: choose one")
        batch_size = BATCH_SIZE if batch_size is None else batch_size
        if batch_size < 1:
            raise ConfigError(f"batch size is {batch_size}, must be at least 1: raise it")
        self.model, self.config, self.subwords, self.heads = model, config, subwords, heads
        self.origin, self.settings, self.batch_size = origin or Origin(), settings or config.decode, batch_size
        self.device, self.precision = next(model.parameters()).device, precision
        self.folder: Path | None = None
        self.spelling: Callable[[str], str] = str
        """How messages write the name of a keyword. The command line writes --to for `to`."""
        if precision == "int8":
            _ = self.engine  # if the model does not support int8, the error is raised now, not at the first sentence
        self.rules = one_line(subwords, config.model).to(self.device)
        is_learned = config.model.positions == "learned"
        # The start mark of a translation takes a position too.
        self.longest_output = config.model.max_positions - 1 if is_learned else None
        max_positions = config.model.max_positions if is_learned else None
        n_marks = 1 + bool(self.origin.tagged_languages)
        self.longest_source = _lowest_bound(self.origin.longest_source, max_positions, n_reserved=n_marks)
        self.longest_target = _lowest_bound(self.origin.longest_target, max_positions, n_reserved=1)
        """The longest text, in tokens without tag and marks, that the model was trained on and has positions for."""

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
        """Loads a model folder, the model of a run, or the bundled model: `Translator.load("run", device="cpu")`.

        `device` is "cpu" or "cuda"; None: a GPU if there is one. `settings`: of the search; None: those of the model.
        `precision` is "float32" or "int8", which only a CPU has. `batch_size`: the maximum for one search.
        """
        _check_device(device)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype is {dtype!r}, must be a dtype of PyTorch: give torch.float32 or torch.bfloat16")
        folder = model_folder(Path(folder))
        model, config = load_model(folder, device or default_device())
        origin, heads = load_origin(folder)
        subwords = Subwords.load(folder / SUBWORDS)
        if len(subwords) > min(config.model.source_vocab_size, config.model.target_vocab_size):
            raise ModelFolderError(f"{folder / SUBWORDS} has more entries than the model: copy the folder again")
        translator = cls(
            model.to(dtype),
            config,
            subwords,
            origin,
            heads,
            settings=settings,
            batch_size=batch_size,
            precision=precision,
        )
        translator.folder = folder
        _ = translator.stepper  # built now, so that the first request is not slow
        return translator

    @cached_property
    def engine(self) -> Engine:
        """Which engine translates, and why. May run the C compiler once."""
        return choose_engine(self.model, self.precision)

    @cached_property
    def stepper(self) -> Stepper[Any]:
        """The engine, built on first use: it packs the weights."""
        return make_stepper(self.engine, self.model, self.precision)

    def __repr__(self) -> str:
        directions = [f"{source}-{target}" for source, target in self.origin.directions]
        if len(directions) > MAX_SHOWN_DIRECTIONS:
            directions = [*directions[:MAX_SHOWN_DIRECTIONS], f"{len(directions) - MAX_SHOWN_DIRECTIONS} more"]
        parts = [
            *([BUNDLED_MODEL if self.folder == BUNDLED else repr(str(self.folder))] if self.folder else []),
            *([", ".join(directions)] if directions else []),
            f"{sum(p.numel() for p in self.model.parameters()) / 1e6:.1f} M parameters",
            # Choosing the engine may run the C compiler, so it is shown only if it is chosen already.
            *([f"{self.engine.name} engine in {self.engine.precision}"] if "engine" in self.__dict__ else []),
            str(self.device),
        ]
        return f"<Translator: {'; '.join(parts)}>"

    # Translating

    @overload
    def translate(  # type: ignore[overload-overlap]  # a string is also an iterable of strings
        self,
        texts: str,
        to: str | None = None,
        *,
        with_details: bool = False,
        prefix: str = "",
        **search: Unpack[SearchKeywords],
    ) -> Translation: ...

    @overload
    def translate(
        self,
        texts: Iterable[str],
        to: str | None = None,
        *,
        with_details: bool = False,
        prefix: str = "",
        **search: Unpack[SearchKeywords],
    ) -> list[Translation]: ...

    def translate(
        self,
        texts: str | Iterable[str],
        to: str | None = None,
        *,
        with_details: bool = False,
        prefix: str = "",
        **search: Unpack[SearchKeywords],
    ) -> Translation | list[Translation]:
        """Translates one text, or a list of texts: `translator.translate("Das ist gut.")` is a `Translation`, and
        `translator.translate(["Das ist gut.", "Ja."])` is a list of two.

        `to`: the target language, if the model has several. `with_details` adds tokens and alignment. `prefix`: the
        beginning of every translation, which is forced: `translator.translate("Das ist gut.", prefix="It")`.

        Other keywords change the search for this call: `beam` (1 is greedy search), `n_best` (alternatives) and
        `max_extra_tokens` (the limit of length), as in `translator.translate("Ja.", beam=8, n_best=3)`. `sample=True`
        draws at random instead, with `temperature`, `top_k`, `top_p` and `seed`:
        `translator.translate("Ja.", sample=True, top_p=0.9, seed=7)`. `DecodeConfig` describes them.
        """
        if isinstance(texts, str):
            (translation,) = self.stream([texts], to, with_details=with_details, prefix=prefix, **search)
            return translation
        check_iterable(texts, "texts", "a string or a list of strings")
        all_texts = list(each_text(texts, "texts"))  # refused before the first one is translated
        return list(self.stream(all_texts, to, with_details=with_details, prefix=prefix, **search))

    def stream(
        self,
        texts: Iterable[str],
        to: str | None = None,
        *,
        with_details: bool = False,
        prefix: str = "",
        **search: Unpack[SearchKeywords],
    ) -> Iterator[Translation]:
        """Translates lines, in order. Each translation is yielded as soon as it and all before it are done:
        `next(translator.stream(["Das ist gut.", "Ja."]))` translates the first one.

        `texts`, unless it is a list, is read in a separate thread, a bounded number of lines ahead. The other arguments
        are those of `translate`.
        """
        lines = self._finished_lines(texts, to, prefix, search)
        return self._translations(lines, with_details)

    def _translations(self, lines: Generator[Line, None, None], with_details: bool) -> Iterator[Translation]:
        with contextlib.closing(lines):
            for line in lines:
                yield self._finish(line, list(self._explain(line)) if with_details else None)

    def explain(
        self, texts: Iterable[str], to: str | None = None, *, prefix: str = "", **search: Unpack[SearchKeywords]
    ) -> Iterator[tuple[Translation, list[Explained]]]:
        """Like `stream`, and also yields the pass of the model over each part of a line, the source of the details:
        `translation, parts = next(translator.explain(["Das ist gut."]))`."""
        return self._explanations(self._finished_lines(texts, to, prefix, search))

    def _explanations(self, lines: Generator[Line, None, None]) -> Iterator[tuple[Translation, list[Explained]]]:
        with contextlib.closing(lines):
            for line in lines:
                yield self.finish_explained(line)

    def _finished_lines(
        self, texts: Iterable[str], to: str | None, prefix: str, search: SearchKeywords
    ) -> Generator[Line, None, None]:
        """Refuses wrong arguments at once, and translates when the first line is requested."""
        check_several(texts, "texts", "[text]")
        check_keywords(search)
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            texts = each_text(texts, "texts")
        settings = search_settings(self.settings, search, self.spelling)
        return self._search_and_order(texts, self.tag_for(to), self.encode_prefix(prefix), settings)

    def _search_and_order(
        self, texts: Iterable[str], tag: list[int], prefix: list[int], settings: DecodeConfig
    ) -> Generator[Line, None, None]:
        lines = LineStream(
            texts, lambda text: self.prepare(text, tag, prefix), self.batch_size_for(settings), self.config.model.eos_id
        )
        try:
            while not lines.is_over:
                with contextlib.closing(self._search_lines(lines, settings)) as results:
                    for sentence, hypotheses in results:
                        lines.put(sentence.number, hypotheses)
                        yield from lines.finished()
                yield from lines.finished()  # blank lines after the last result
            if lines.error is not None:  # raised after all lines that came before it
                raise lines.error
        finally:
            lines.close()

    def _search_lines(self, lines: LineStream, settings: DecodeConfig) -> Generator[Result, None, None]:
        """One search per core if there are enough sentences; otherwise one search that uses all cores."""
        search_one = partial(self._search_until_stopped, settings)
        n_workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        if n_workers == 1:
            yield from search_one(lines)
        elif len(window := list(lines.take_window())) >= MIN_SENTENCES_PER_CORE * n_workers:
            # The window is sorted by length, so every n-th sentence makes shares of equal work.
            rest = SharedLines(lines)
            shares = [FirstThen(window[i::n_workers], rest) for i in range(n_workers)]
            yield from in_threads(search_one, shares)
        elif window:  # otherwise only blank lines have come, which the caller returns
            yield from search_one(FirstThen(window, lines))

    def _search_until_stopped(
        self, settings: DecodeConfig, sentences: Iterable[Sentence] | Queue, stop: threading.Event | None = None
    ) -> Iterator[Result]:
        def check_stop(_: Sequence[Sentence]) -> Iterable[int]:
            if stop is not None and stop.is_set():
                raise Stopped
            return ()

        return self.search(sentences, settings, cancelled=check_stop)

    def search(
        self,
        sentences: Iterable[Sentence] | Queue,
        settings: DecodeConfig | None = None,
        *,
        cancelled: Cancelled | None = None,
    ) -> Iterator[Result]:
        """Searches sentences that `prepare` made. `finish` makes text of the results. A server calls these directly."""
        settings = settings or self.settings
        batch_size = self.batch_size_for(settings)
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
            cancelled=cancelled,
        )

    def batch_size_for(self, settings: DecodeConfig) -> int:
        """Sentences in one search: fewer for a wide beam, and not so many that the engine becomes slower."""
        n = max(1, self.batch_size * USUAL_BEAM // max(USUAL_BEAM, settings.n_hypotheses))
        return sentences_at_a_time(self.stepper, n, settings.n_hypotheses)

    # From text to sentences

    def tag_for(self, to: str | None) -> list[int]:
        """The tokens at the beginning of a source that request this target language."""
        targets = list(dict.fromkeys(target for _, target in self.origin.directions))
        if not self.origin.tagged_languages:
            if to is not None and targets and to not in targets:
                known = ", ".join(targets)
                raise ConfigError(f"{self.spelling('to')} is {to!r}, this model translates into {known}: leave it out")
            return []
        known = ", ".join(self.origin.tagged_languages)
        if to is None:
            if len(self.origin.tagged_languages) > 1:
                example = self.spelling(f"to={self.origin.tagged_languages[0]!r}")
                raise ConfigError(f"this model translates into {known}: choose one with {example}")
            to = self.origin.tagged_languages[0]
        if to not in self.origin.tagged_languages:
            raise ConfigError(
                f"{self.spelling('to')} is {to!r}, this model translates into {known}: choose one of them"
            )
        return [self.subwords.tag(to)]

    def encode_prefix(self, prefix: str) -> list[int]:
        if set(prefix) & {*LINE_BREAKS, "\t"}:
            raise ConfigError(f"{self.spelling('prefix')} is {prefix!r}, must be one line without tabs: remove them")
        ids = self.subwords.encode([prefix.strip()])[0]
        if self.longest_output is not None and len(ids) >= self.longest_output:
            raise ConfigError(
                f"{self.spelling('prefix')} has {len(ids)} tokens, this model's limit is {self.longest_output}: "
                "shorten it"
            )
        return ids

    def prepare(self, text: str, tag: list[int], prefix: list[int]) -> Line:
        """Splits a line that is too long, and encodes it."""
        core = text.strip()
        if not core:
            return Line("", "", [], [], tag, prefix)
        before, _, after = text.partition(core)
        segments = [Segment(core, "")]
        ids = self.subwords.encode([core])
        if self.longest_source is not None and len(ids[0]) > self.longest_source:
            segments = split(core, lambda part: len(self.subwords.encode([part])[0]), self.longest_source)
            ids = self.subwords.encode([segment.text for segment in segments])
        return Line(before, after, segments, ids, tag, prefix)

    # From hypotheses to text

    def finish(self, line: Line) -> Translation:
        """The translation of a line whose segments all have results."""
        return self._finish(line, None)

    def finish_explained(self, line: Line) -> tuple[Translation, list[Explained]]:
        """The translation with tokens and alignment, and the passes of the model that they were computed from."""
        parts = list(self._explain(line))
        return self._finish(line, parts), parts

    def _explain(self, line: Line) -> Iterator[Explained]:
        parts = [(ids, line.results[segment][0]) for segment, ids in enumerate(line.ids)]
        return explain(self.model, self.subwords, parts, line.tag, self.heads)

    def _finish(self, line: Line, parts: Sequence[Explained] | None) -> Translation:
        tokens = None if parts is None else tuple(token for part in parts for token in part.tokens)
        alignment = None if parts is None else self._alignment(line, parts)
        if not line.segments:
            return Translation("", 0.0, 0.0, tokens=tokens, alignment=None if parts is None else ())
        results = [line.results[segment] for segment in range(len(line.segments))]
        alternatives = tuple(
            self._join(line, [hypotheses[min(n, len(hypotheses) - 1)] for hypotheses in results])
            for n in range(max(len(hypotheses) for hypotheses in results))
        )
        first = alternatives[0]
        flags = _flags(line, [hypotheses[0] for hypotheses in results], first.text)
        return Translation(first.text, first.score, first.log_prob, flags, alternatives, tokens, alignment)

    def _join(self, line: Line, hypotheses: Sequence[Hypothesis]) -> Alternative:
        # Only a hypothesis that was cut can end inside a character: the rules forbid an end mark there.
        ids = [h.ids if h.has_ended else whole_characters(h.ids, self.rules) for h in hypotheses]
        texts = self.subwords.decode(ids)
        joined = "".join(text + segment.gap for text, segment in zip(texts, line.segments, strict=True))
        return Alternative(
            line.before + joined + line.after,
            sum(hypothesis.score for hypothesis in hypotheses),
            sum(hypothesis.log_prob for hypothesis in hypotheses),
        )

    def _alignment(self, line: Line, parts: Sequence[Explained]) -> tuple[Link, ...] | None:
        if self.heads is None:
            return None
        links: dict[Link, None] = {}
        n_source = n_target = 0
        for segment, part in zip(line.segments, parts, strict=True):
            links |= dict.fromkeys((s + n_source, t + n_target) for s, t in part.links or ())
            # Without a gap, the next part continues the same word.
            n_source += max(0, n_words(part.source_words) - (not segment.gap))
            n_target += max(0, n_words(part.target_words) - (not segment.gap))
        return tuple(links)


def _flags(line: Line, best: Sequence[Hypothesis], text: str) -> tuple[Flag, ...]:
    """`best`: the best hypothesis of each segment."""
    is_loop = any(
        longest_repeat(hypothesis.ids) >= max(LOOP, longest_repeat(ids) + 1)
        for hypothesis, ids in zip(best, line.ids, strict=True)
    )
    applies: dict[Flag, bool] = {
        "split": len(line.segments) > 1,
        "limit": not all(hypothesis.has_ended for hypothesis in best),
        "loop": is_loop,
        "empty": not text.strip(),
        "close": any(h.margin < CLOSE - CLOSE_SHARE * h.log_prob for h in best),
    }
    return tuple(flag for flag, is_set in applies.items() if is_set)


def _check_device(device: str | None) -> None:
    """Refuses a device that this machine lacks. A GPU may have a number: cuda:1."""
    kind, _, number = str(device).partition(":")
    try:
        check_device(None if device is None else kind)
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("--")) from None
    if kind == "cuda" and number and not (number.isdecimal() and int(number) < torch.cuda.device_count()):
        raise ConfigError(f"device is {device}, must be below cuda:{torch.cuda.device_count()}: give another number")


def _lowest_bound(*bounds: int | None, n_reserved: int) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return max(1, min(known) - n_reserved) if known else None
