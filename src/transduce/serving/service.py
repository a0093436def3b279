"""The models of a server, and the way from a request to its response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from transduce.config import DecodeConfig
from transduce.engines.choose import Engine
from transduce.errors import ConfigError
from transduce.search.spelling import LINE_BREAKS
from transduce.serving.batcher import Batcher, Job, TranslationSettings
from transduce.serving.limits import RETRY_SECONDS, Limits, Refusal
from transduce.serving.metrics import Metrics
from transduce.serving.request import AUTO, TranslationRequest
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

BREAKS = re.compile(f"([{LINE_BREAKS}]+)")
MAX_INLINE_CHARACTERS = 500
"""Up to this length a text is divided into tokens in the event loop: handing it to a thread would take longer."""
WARM_UP = ["1.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."]
"""Numbers, because every language can contain them."""

LANGUAGE_NAMES = {
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
"""Names by ISO 639-1 code. A language without an entry is shown by its code."""

Direction = tuple[str, str]
"""Source and target language."""
Disconnected = Callable[[], Awaitable[None]]
"""Returns when the client has closed the connection."""
LogFields = dict[str, Any]
"""The entry of a request in the log. The functions that handle the request add fields to it."""


class ClientDisconnected(Exception):
    """The client closed the connection before its response was ready."""


class Service:
    def __init__(
        self, translators: dict[str, Translator], limits: Limits, *, n_workers: int = 1, alone: bool = False
    ) -> None:
        """Translators by name. `alone`: requests never share a search, to measure what sharing gains."""
        self.limits, self.metrics = limits, Metrics()
        self.batcher = Batcher(limits, self.metrics, n_workers, alone=alone)
        self.directions: dict[Direction, Translator] = {}
        self.is_warm = self.is_draining = False
        self.n_accepted = 0
        """Requests that have been accepted and have no response yet."""
        names: dict[Direction, str] = {}
        for name, translator in translators.items():
            if not translator.origin.directions:
                raise ConfigError(f"{name} does not name its languages: train it again with --languages")
            if translator.settings.method != "beam":
                raise ConfigError(
                    f"decode.method is {translator.settings.method}, a server supports only beam: change it to beam"
                )
            for direction in translator.origin.directions:
                if direction in names:
                    pair = "-".join(direction)
                    raise ConfigError(f"{names[direction]} and {name} both translate {pair}: keep one of them")
                names[direction], self.directions[direction] = name, translator
        self.engines: dict[Direction, Engine] = {
            direction: translator.engine for direction, translator in self.directions.items()
        }

    def engine_fields(self) -> list[dict[str, Any]]:
        """Return the engine of each direction and the reason for it, as /health shows them."""
        return [
            {
                "source": source,
                "target": target,
                "engine": engine.name,
                "precision": engine.precision,
                "is_fallback": engine.is_fallback,
                "reason": engine.reason,
            }
            for (source, target), engine in self.engines.items()
        ]

    def start(self) -> None:
        """Start the workers, and translate a text with each model. Return when all are done."""
        self.batcher.start()
        n_copies = len(self.batcher.workers)
        for (_, target), translator in self.directions.items():
            settings = TranslationSettings(translator, target, translator.settings)
            job = Job(settings, WARM_UP * n_copies, client="")
            self.batcher.submit(job)
            job.future.result()
        self.is_warm = True

    def languages(self) -> list[dict[str, Any]]:
        codes = sorted({code for direction in self.directions for code in direction})
        return [
            {
                "code": code,
                "name": LANGUAGE_NAMES.get(code, code),
                "targets": [target for source, target in self.directions if source == code],
            }
            for code in codes
        ]

    def settings_for(self, request: TranslationRequest) -> tuple[TranslationSettings, str | None]:
        """Return the settings for the request, and its source language if only one is possible."""
        source, target = request.source, request.target
        sources = [s for s, t in self.directions if t == target and source in (s, AUTO)]
        translators = {id(self.directions[s, target]): self.directions[s, target] for s in sources}
        if not translators:
            known = ", ".join(f"{s} to {t}" for s, t in self.directions)
            raise Refusal(400, f"there is no model from this source to this target, only {known}")
        if len(translators) > 1:
            raise Refusal(400, f"source is auto, but languages are not detected: choose one of {', '.join(sources)}")
        (translator,) = translators.values()
        decode = _decode_config(translator.settings, request.beam, request.n_alternatives + 1)
        return TranslationSettings(translator, target, decode), sources[0] if len(sources) == 1 else None

    async def translate(
        self, request: TranslationRequest, client: str, disconnected: Disconnected, log_fields: LogFields
    ) -> dict[str, Any]:
        """Return the response to /translate."""
        if not self.is_warm:
            raise Refusal(503, "the server is still starting", RETRY_SECONDS)
        settings, source = self.settings_for(request)
        parts = [BREAKS.split(text) for text in request.texts]  # lines, and the line breaks between them
        lines = [line for lines_and_breaks in parts for line in lines_and_breaks[::2]]
        n_characters = sum(map(len, request.texts))
        make_job = partial(Job, settings, lines, client)
        job = make_job() if n_characters <= MAX_INLINE_CHARACTERS else await asyncio.to_thread(make_job)
        log_fields |= {"characters": n_characters, "sentences": job.n_sentences}
        self.check_size(job)
        self.batcher.submit(job)
        translations = iter(await self.wait(job, disconnected))
        texts = [
            _join_lines(lines_and_breaks, [next(translations) for _ in lines_and_breaks[::2]])
            for lines_and_breaks in parts
        ]
        return _to_response(request, texts, source)

    def check_size(self, job: Job) -> None:
        for what, n, limit in (
            ("sentences", job.n_sentences, self.limits.sentences),
            ("tokens", job.n_tokens, self.limits.tokens),
            ("tokens that cannot be split", job.longest, self.limits.sentence_tokens),
        ):
            if n > limit:
                raise Refusal(413, f"q has {n} {what}, the limit is {limit}")

    async def wait(self, job: Job, disconnected: Disconnected) -> list[Translation]:
        """Wait for the job. Cancel it when its time is over or its client disconnects."""
        result, disconnect = asyncio.wrap_future(job.future), asyncio.ensure_future(disconnected())
        both: set[asyncio.Future[Any]] = {result, disconnect}
        try:
            await asyncio.wait(both, timeout=self.limits.request_seconds, return_when=asyncio.FIRST_COMPLETED)
            if result.done():
                return result.result()
            if disconnect.done():
                raise ClientDisconnected
            raise Refusal(503, f"the translation took longer than {self.limits.request_seconds:g} s", RETRY_SECONDS)
        finally:
            result.cancel()
            disconnect.cancel()


@lru_cache(maxsize=1024)
def _decode_config(decode: DecodeConfig, beam: int | None, n_best: int) -> DecodeConfig:
    """Cached, because validating the config takes as long as reading the request."""
    return replace(decode, beam_size=beam or max(decode.beam_size, n_best), n_best=n_best)


def _join_lines(lines_and_breaks: Sequence[str], translations: Sequence[Translation]) -> list[str]:
    """Return whole texts: the best of each line first, then the second best. A line with fewer repeats its last."""
    choices = [[other.text for other in line.alternatives] or [line.text] for line in translations]
    texts = []
    for n in range(max(map(len, choices))):
        lines = [choice[min(n, len(choice) - 1)] for choice in choices]
        texts.append("".join(line + gap for line, gap in zip(lines, [*lines_and_breaks[1::2], ""], strict=True)))
    return texts


def _to_response(request: TranslationRequest, texts: list[list[str]], source: str | None) -> dict[str, Any]:
    """Return the fields that LibreTranslate has too."""
    response: dict[str, Any] = {"translatedText": [best for best, *_ in texts]}
    if request.n_alternatives:
        response["alternatives"] = [alternatives for _, *alternatives in texts]
    if request.source == AUTO and source is not None:
        # Nothing was detected: this is the only source language of the model.
        response["detectedLanguage"] = [{"confidence": 0, "language": source} for _ in texts]
    return response if request.is_list else {name: values[0] for name, values in response.items()}
