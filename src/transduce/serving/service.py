"""The models of a server, and how a question becomes an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from transduce.config import DecodeConfig
from transduce.errors import ConfigError
from transduce.search.spelling import LINE_BREAKS
from transduce.serving.batcher import RETRY_SECONDS, Batcher, Job, Way
from transduce.serving.limits import Limits, Refusal
from transduce.serving.metrics import Metrics
from transduce.serving.question import AUTO, Question
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

BREAKS = re.compile(f"([{LINE_BREAKS}]+)")
SHORT = 500
"""Characters that are divided into subwords where they come in: a thread for that would take longer."""
WARM_UP = ["1.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."]
"""Numbers, which any language may hold."""

NAMES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fa": "Persian",
    "fi": "Finnish",
    "fr": "French",
    "ga": "Irish",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "id": "Indonesian",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nb": "Norwegian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sr": "Serbian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
}
"""By ISO 639-1. What is not here is called by its code."""


class Service:
    def __init__(
        self, translators: dict[str, Translator], limits: Limits, *, n_workers: int = 1, alone: bool = False
    ) -> None:
        """Translators by name. `alone`: requests never share a search, to see what sharing is worth."""
        self.limits, self.metrics = limits, Metrics()
        self.batcher = Batcher(limits, self.metrics, n_workers, alone=alone)
        self.directions: dict[tuple[str, str], Translator] = {}
        self.is_warm = self.is_draining = False
        self.n_accepted = 0
        """Requests that have begun and are not answered yet."""
        names: dict[tuple[str, str], str] = {}
        for name, translator in translators.items():
            if not translator.origin.directions:
                raise ConfigError(f"{name} does not say between which languages: train it again with --languages")
            if translator.settings.method != "beam":
                raise ConfigError(f"decode.method is {translator.settings.method}, a server searches: make it beam")
            for direction in translator.origin.directions:
                if direction in names:
                    pair = "-".join(direction)
                    raise ConfigError(f"{names[direction]} and {name} both translate {pair}: keep one of them")
                names[direction], self.directions[direction] = name, translator

    def start(self) -> None:
        """Returns when each model has translated something."""
        self.batcher.start()
        n_each = len(self.batcher.workers)
        for (_, target), translator in self.directions.items():
            job = Job(Way(translator, target, translator.settings), WARM_UP * n_each, client="")
            self.batcher.submit(job)
            job.future.result()
        self.is_warm = True

    def languages(self) -> list[dict[str, Any]]:
        codes = sorted({code for direction in self.directions for code in direction})
        return [
            {"code": code, "name": NAMES.get(code, code), "targets": [t for s, t in self.directions if s == code]}
            for code in codes
        ]

    def way(self, question: Question) -> tuple[Way, str | None]:
        """And the source language, where there is no choice."""
        source, target = question.source, question.target
        sources = [s for s, t in self.directions if t == target and source in (s, AUTO)]
        translators = {id(found): found for s in sources if (found := self.directions[s, target])}
        if not translators:
            known = ", ".join(f"{s} to {t}" for s, t in self.directions)
            raise Refusal(400, f"from source to target there is no model here: there is {known}")
        if len(translators) > 1:
            raise Refusal(400, f"source is auto, it can be {', '.join(sources)}: name one, languages are not detected")
        (translator,) = translators.values()
        settings = _settings(translator.settings, question.beam, question.n_alternatives + 1)
        return Way(translator, target, settings), sources[0] if len(sources) == 1 else None

    async def answer(
        self, question: Question, client: str, gone: Callable[[], Awaitable[None]], note: dict[str, Any]
    ) -> dict[str, Any]:
        """`gone` returns when the client has left; what is worth writing down goes into `note`."""
        if not self.is_warm:
            raise Refusal(503, "the server is still starting", RETRY_SECONDS)
        way, source = self.way(question)
        parts = [BREAKS.split(text) for text in question.texts]  # lines, and between them what breaks them
        lines = [line for of in parts for line in of[::2]]
        n_characters = sum(map(len, question.texts))
        make = partial(Job, way, lines, client)
        job = make() if n_characters <= SHORT else await asyncio.to_thread(make)
        note |= {"characters": n_characters, "sentences": job.n_sentences}
        self.check_size(job)
        self.batcher.submit(job)
        found = iter(await self.wait(job, gone))
        answers = [_joined(of, [next(found) for _ in of[::2]]) for of in parts]
        return _shaped(question, answers, source)

    def check_size(self, job: Job) -> None:
        for what, n, most in (
            ("sentences", job.n_sentences, self.limits.sentences),
            ("tokens", job.n_tokens, self.limits.tokens),
            ("tokens without a place to split them", job.longest, self.limits.sentence_tokens),
        ):
            if n > most:
                raise Refusal(413, f"q has {n} {what}, the limit is {most}")

    async def wait(self, job: Job, gone: Callable[[], Awaitable[None]]) -> list[Translation]:
        """Withdraws what is late, or what nobody waits for."""
        result, leaving = asyncio.wrap_future(job.future), asyncio.ensure_future(gone())
        both: set[asyncio.Future[Any]] = {result, leaving}
        try:
            await asyncio.wait(both, timeout=self.limits.request_seconds, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            if leaving.done():
                raise ClientLeft
            raise Refusal(503, f"not done within {self.limits.request_seconds:g} s", RETRY_SECONDS)
        finally:
            result.cancel()
            leaving.cancel()


@lru_cache(maxsize=1024)
def _settings(settings: DecodeConfig, beam: int | None, n_best: int) -> DecodeConfig:
    """Remembered: to check them takes as long as to read the question."""
    return replace(settings, beam_size=beam or max(settings.beam_size, n_best), n_best=n_best)


class ClientLeft(Exception):
    """Nobody is there to be answered."""


def _joined(parts: Sequence[str], found: Sequence[Translation]) -> list[str]:
    """Of a text's lines, what is best for each, then what is second, as far as any has one."""
    choices = [[other.text for other in line.alternatives] or [line.text] for line in found]
    answers = []
    for n in range(max(map(len, choices))):
        lines = [choice[min(n, len(choice) - 1)] for choice in choices]
        answers.append("".join(line + gap for line, gap in zip(lines, [*parts[1::2], ""], strict=True)))
    return answers


def _shaped(question: Question, answers: list[list[str]], source: str | None) -> dict[str, Any]:
    """As LibreTranslate has it."""
    shaped: dict[str, Any] = {"translatedText": [best for best, *_ in answers]}
    if question.n_alternatives:
        shaped["alternatives"] = [others for _, *others in answers]
    if question.source == AUTO and source is not None:
        # Nothing was detected: it is what the model translates from.
        shaped["detectedLanguage"] = [{"confidence": 0, "language": source} for _ in answers]
    return shaped if question.is_list else {name: values[0] for name, values in shaped.items()}
