"""What lies behind a translation: its tokens, what else could have been said, who looked at what; and vectors of texts.

The translation is the batcher's, as for /translate. The pass along it that tells the rest is made in one thread more.
"""

# Annotations of routes are looked at when they are made: they must be values here, not strings.

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from transduce.errors import ConfigError
from transduce.insight.attention import records_of
from transduce.insight.embed import POOLS, Pool, check_pool, embed
from transduce.insight.page import for_page
from transduce.search.spelling import LINE_BREAKS
from transduce.serving.application import ANYWHERE, QUESTION, REFUSALS, TEXT, described, left
from transduce.serving.batcher import RETRY_SECONDS, Job, Way
from transduce.serving.limits import Limits, Refusal
from transduce.serving.question import Question, read_question
from transduce.serving.service import Service
from transduce.translation.alignment import n_words
from transduce.translation.explain import Explained
from transduce.translation.result import FLAGS
from transduce.translation.translator import Translator

if TYPE_CHECKING:
    from fastapi import FastAPI

Gone = Callable[[], Awaitable[None]]
Prefix = str | list[str]

TOLD = (
    "body_bytes",
    "characters",
    "texts",
    "sentences",
    "tokens",
    "beam",
    "alternatives",
    "explained_texts",
    "explained_tokens",
    "inspected_tokens",
    "request_seconds",
)
"""Limits that a client can mind."""


def read_prefix(fields: dict[str, Any], limits: Limits) -> Prefix:
    """A text; or, where it must be exact, pieces of the model's vocabulary."""
    prefix = fields.get("prefix")
    if prefix is None:
        return ""
    texts = prefix if isinstance(prefix, list) else [prefix]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "prefix must be a text, or a list of pieces")
    if (n := sum(map(len, texts))) > limits.characters:
        raise Refusal(413, f"prefix has {n} characters, the limit is {limits.characters}")
    if any(character in LINE_BREAKS or character == "\t" for text in texts for character in text):
        raise Refusal(400, "prefix must be of one line and without tabs")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise Refusal(400, "prefix has half a character (a lone surrogate)")
    return list(texts) if isinstance(prefix, list) else str(prefix)


def prefix_ids(translator: Translator, prefix: Prefix, most: int) -> list[int]:
    try:
        ids = translator.encode_prefix(prefix) if isinstance(prefix, str) else _ids_of(translator, prefix)
    except ConfigError:  # more than the model has positions for
        raise Refusal(413, "prefix has more tokens than this model can say") from None
    longest = translator.longest_output
    most = most if longest is None else min(most, longest - 1)
    if len(ids) > most:
        raise Refusal(413, f"prefix has {len(ids)} tokens, the limit is {most}")
    return ids


def _ids_of(translator: Translator, pieces: Sequence[str]) -> list[int]:
    subwords = translator.subwords
    ids = [i for piece in pieces if (i := subwords.id_of(piece)) is not None and not subwords.is_special(i)]
    if len(ids) < len(pieces):
        raise Refusal(400, "prefix has a piece that this model does not know, or a mark")
    (text,) = subwords.decode([ids])
    if set(text) & {*LINE_BREAKS, "\t", "\ufffd"}:  # spelt in bytes
        raise Refusal(400, "prefix must be of one line, without tabs, and of whole characters")
    return ids


class Details:
    def __init__(self, service: Service) -> None:
        self.service, self.limits = service, service.limits
        self.n_taken = 0
        # One thread: these passes are for people who look, and searches need the cores.
        self.pool = ThreadPoolExecutor(1, "explain", initializer=torch.set_num_threads, initargs=(1,))

    @contextmanager
    def place(self) -> Iterator[None]:
        if self.n_taken >= self.limits.explaining:
            raise Refusal(503, "too many look inside at the moment", RETRY_SECONDS)
        self.n_taken += 1
        try:
            yield
        finally:
            self.n_taken -= 1

    async def run(self, work: Callable[..., bytes], *given: Any) -> bytes:
        return await asyncio.wrap_future(self.pool.submit(work, *given))

    async def job(self, way: Way, question: Question, client: str, note: dict[str, Any], prefix: list[int]) -> Job:
        if not self.service.is_warm:
            raise Refusal(503, "the server is still starting", RETRY_SECONDS)
        job = await asyncio.to_thread(Job, way, question.texts, client, prefix)
        note |= {"characters": sum(map(len, question.texts)), "sentences": job.n_sentences}
        self.service.check_size(job)
        return job

    async def found(
        self,
        question: Question,
        prefix: Prefix,
        most: int,
        client: str,
        gone: Gone,
        note: dict[str, Any],
        *,
        is_whole: bool = False,
    ) -> Job:
        """Lines that are translated. `most`: tokens of the longest sentence, or of the whole."""
        if any(set(text) & set(LINE_BREAKS) for text in question.texts):
            raise Refusal(400, "q must be a line, or a list of lines: leave line breaks out")
        if prefix and question.is_list:
            raise Refusal(400, "a prefix is of one text: send q as a text, not as a list")
        way, _ = self.service.way(question)
        ids = await asyncio.to_thread(prefix_ids, way.translator, prefix, most)
        job = await self.job(way, question, client, note, ids)
        if (n := job.n_tokens if is_whole else job.longest) > most:
            raise Refusal(413, f"{'q' if is_whole else 'a sentence of q'} has {n} tokens, the limit is {most}")
        self.service.batcher.submit(job)
        await self.service.wait(job, gone)
        return job

    async def explain(self, fields: dict[str, Any], client: str, gone: Gone, note: dict[str, Any]) -> bytes:
        question, prefix = read_question(fields, self.limits), read_prefix(fields, self.limits)
        if len(question.texts) > (most := self.limits.explained_texts):
            raise Refusal(413, f"q has {len(question.texts)} texts, the limit is {most}")
        with self.place():
            job = await self.found(question, prefix, self.limits.explained_tokens, client, gone, note)
            return await self.run(_explain, job, question)

    async def inspect(self, fields: dict[str, Any], client: str, gone: Gone, note: dict[str, Any]) -> bytes:
        question, prefix = read_question(fields, self.limits), read_prefix(fields, self.limits)
        if question.is_list or not question.texts[0].strip():
            raise Refusal(400, "q must be one text that is not blank")
        with self.place():
            job = await self.found(question, prefix, self.limits.inspected_tokens, client, gone, note, is_whole=True)
            return await self.run(_inspect, job, question)

    async def embed(self, fields: dict[str, Any], client: str, gone: Gone, note: dict[str, Any]) -> bytes:
        question = read_question(fields, self.limits)
        try:
            pool = check_pool(str(fields.get("pool") or "mean"))
        except ConfigError:
            raise Refusal(400, f"pool must be one of {', '.join(POOLS)}") from None
        with self.place():
            way, _ = self.service.way(question)
            await self.job(way, question, client, note, [])  # which is counted, and not done
            return await self.run(_embed, way, question, pool)


def _as_json(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _explain(job: Job, question: Question) -> bytes:
    answers = [_line_to_json(job, place) for place in range(len(job.lines))]
    return _as_json({"lines": answers} if question.is_list else answers[0])


def _line_to_json(job: Job, place: int) -> dict[str, Any]:
    line = job.lines[place]
    translation, parts = job.way.translator.finish_explained(line)
    words, first = list[int | None](), 0
    for segment, part in zip(line.segments, parts, strict=True):
        words += [None if word is None else word + first for word in part.target_words]
        words += [None] * (len(part.tokens) - len(part.target_words))  # the end mark
        first += max(0, n_words(part.target_words) - (not segment.gap))
    tokens = [
        {
            "piece": token.piece,
            "probability": _short(token.probability),
            "word": word,
            "runners_up": [[piece, _short(probability)] for piece, probability in token.runners_up],
        }
        for token, word in zip(translation.tokens or (), words, strict=True)
    ]
    others = [{"text": other.text, "log_prob": _short(other.log_prob)} for other in translation.alternatives[1:]]
    return {
        "translatedText": translation.text,
        "log_prob": _short(translation.log_prob),
        "alternatives": others,
        "flags": {flag: FLAGS[flag] for flag in translation.flags},
        "tokens": tokens,
        "n_first": _n_first(parts),
        "alignment": None if translation.alignment is None else [list(link) for link in translation.alignment],
    }


def _n_first(parts: Sequence[Explained]) -> int:
    return len(parts[0].tokens) if parts else 0


def _inspect(job: Job, question: Question) -> bytes:
    (line,), way = job.lines, job.way
    translation, parts = way.translator.finish_explained(line)
    records = list(records_of(way.translator, question.texts[0], translation, parts, way.to))
    source = question.source if question.source != "auto" else "?"
    return _as_json(for_page(records, direction=f"{source}-{question.target}"))


def _embed(way: Way, question: Question, pool: Pool) -> bytes:
    vector_ND = embed(way.translator, question.texts, pool, way.to)
    vectors = [
        [_short(x) for x in vector_D.tolist()] if text.strip() else None
        for text, vector_D in zip(question.texts, vector_ND, strict=True)
    ]
    return _as_json({"vectors": vectors if question.is_list else vectors[0], "pool": pool})


def _short(x: float) -> float:
    return float(f"{x:.6g}")


# What the OpenAPI document says

PREFIX = {
    "oneOf": [TEXT, {"type": "array", "items": TEXT}],
    "description": "How the translation must begin: a text, or pieces as /explain has them. For one text alone.",
}
EXPLAINED = {
    "type": "object",
    "required": ["translatedText", "log_prob", "alternatives", "flags", "tokens", "n_first", "alignment"],
    "properties": {
        "translatedText": TEXT,
        "log_prob": {"type": "number"},
        "alternatives": {
            "type": "array",
            "items": {"type": "object", "properties": {"text": TEXT, "log_prob": {"type": "number"}}},
        },
        "flags": {"type": "object", "description": "What is less than it should be, and what that means."},
        "tokens": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "piece": TEXT,
                    "probability": {"type": "number"},
                    "word": {"type": ["integer", "null"], "description": "Of the translation, as spaces divide it."},
                    "runners_up": {"type": "array", "items": {"type": "array"}, "description": "[piece, probability]"},
                },
            },
        },
        "n_first": {"type": "integer", "description": "Tokens of the first sentence, which a prefix can reach."},
        "alignment": {
            "type": ["array", "null"],
            "items": {"type": "array", "items": {"type": "integer"}},
            "description": "[source word, target word]; null where the model does not say which heads align.",
        },
    },
}
EXPLANATIONS = {
    "oneOf": [EXPLAINED, {"type": "object", "properties": {"lines": {"type": "array", "items": EXPLAINED}}}],
    "description": "A list is answered with lines.",
}
RECORDS = {"type": "object", "description": "The document that transduce inspect --json writes, with names for a page."}
VECTORS = {
    "type": "object",
    "properties": {"vectors": {"type": ["array", "null"], "description": "null for a blank text"}, "pool": TEXT},
}
POOL = {"type": "string", "enum": list(POOLS), "default": "mean", "description": "Over the tokens of a text."}
LIMITS = {"type": "object", "additionalProperties": {"type": "number"}}


def asking(**more: dict[str, Any]) -> dict[str, Any]:
    schema = {**QUESTION, "properties": {**QUESTION["properties"], **more}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def add_details(app: "FastAPI", service: Service, *, log_text: bool) -> None:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    details = Details(service)

    def add(path: str, work: Callable[..., Awaitable[bytes]], answer: Any, asked: dict[str, Any], summary: str) -> None:
        async def route(request: Request) -> Response:
            state = request.state
            if log_text:
                state.note["q"] = state.fields.get("q")
            found = await work(state.fields, state.client, partial(left, request), state.note)
            return Response(found, media_type="application/json")

        responses = described(answer, *REFUSALS)
        app.add_api_route(
            path, route, methods=["POST"], responses=responses, openapi_extra=asked, summary=summary, name=path
        )

    add("/explain", details.explain, EXPLANATIONS, asking(prefix=PREFIX), "Translate, and tell of each token")
    add("/inspect", details.inspect, RECORDS, asking(prefix=PREFIX), "Translate, and tell what every head looked at")
    add("/embed", details.embed, VECTORS, asking(pool=POOL), "Texts as vectors")

    @app.get("/limits", responses=described(LIMITS, *ANYWHERE), summary="How much a request may ask for")
    async def limits() -> JSONResponse:
        return JSONResponse({name: getattr(service.limits, name) for name in TOLD})
