"""The routes /explain, /inspect, /embed and /limits: details of translations, and vectors of texts.

The batcher translates the sentences, as for /translate. The extra pass of the model that gives the details runs in one
separate thread.
"""

# No `from __future__ import annotations` here: FastAPI reads the annotations of routes as values.

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
from transduce.serving.batcher import Job, TranslationSettings
from transduce.serving.limits import RETRY_SECONDS, Limits, Refusal
from transduce.serving.request import AUTO, TranslationRequest, read_request, wait_for_disconnect
from transduce.serving.schema import (
    ATTENTION_RECORDS,
    EXPLANATION,
    GET_REFUSALS,
    LIMITS,
    POOL,
    PREFIX,
    REFUSALS,
    VECTORS,
    describe_request,
    describe_responses,
)
from transduce.serving.service import Disconnected, LogFields, Service
from transduce.translation.alignment import n_words
from transduce.translation.explain import Explained
from transduce.translation.result import FLAGS
from transduce.translation.translator import Translator

if TYPE_CHECKING:
    from fastapi import FastAPI

Prefix = str | list[str]
"""A text, or pieces of the model's vocabulary."""

REPORTED_LIMITS = (
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
"""Limits of a single request, which a client can respect."""


def read_prefix(fields: dict[str, Any], limits: Limits) -> Prefix:
    prefix = fields.get("prefix")
    if prefix is None:
        return ""
    texts = prefix if isinstance(prefix, list) else [prefix]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "prefix must be a text, or a list of pieces")
    if (n := sum(map(len, texts))) > limits.characters:
        raise Refusal(413, f"prefix has {n} characters, the limit is {limits.characters}")
    if any(character in LINE_BREAKS or character == "\t" for text in texts for character in text):
        raise Refusal(400, "prefix must be one line without tabs")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise Refusal(400, "prefix has half a character (a lone surrogate)")
    return list(texts) if isinstance(prefix, list) else str(prefix)


def prefix_ids(translator: Translator, prefix: Prefix, max_tokens: int) -> list[int]:
    try:
        ids = translator.encode_prefix(prefix) if isinstance(prefix, str) else _ids_of_pieces(translator, prefix)
    except ConfigError:  # more tokens than the model has positions
        raise Refusal(413, "prefix has more tokens than a translation of this model can have") from None
    longest = translator.longest_output
    max_tokens = max_tokens if longest is None else min(max_tokens, longest - 1)
    if len(ids) > max_tokens:
        raise Refusal(413, f"prefix has {len(ids)} tokens, the limit is {max_tokens}")
    return ids


def _ids_of_pieces(translator: Translator, pieces: Sequence[str]) -> list[int]:
    subwords = translator.subwords
    ids = [i for piece in pieces if (i := subwords.id_of(piece)) is not None and not subwords.is_special(i)]
    if len(ids) < len(pieces):
        raise Refusal(400, "prefix has a piece that is not in the vocabulary, or a special token")
    (text,) = subwords.decode([ids])
    if set(text) & {*LINE_BREAKS, "\t", "\ufffd"}:  # pieces of single bytes can form these
        raise Refusal(400, "prefix must be one line without tabs, of whole characters")
    return ids


class Details:
    def __init__(self, service: Service) -> None:
        self.service, self.limits = service, service.limits
        self.n_in_progress = 0
        # One thread, in which PyTorch uses one core: the searches of the batcher need the others. PyTorch keeps this
        # number for each thread. The executor starts the thread with the first request, not here.
        self.pool = ThreadPoolExecutor(1, "explain", initializer=torch.set_num_threads, initargs=(1,))

    @contextmanager
    def slot(self) -> Iterator[None]:
        if self.n_in_progress >= self.limits.explaining:
            raise Refusal(503, "too many requests for details are in progress", RETRY_SECONDS)
        self.n_in_progress += 1
        try:
            yield
        finally:
            self.n_in_progress -= 1

    async def run(self, work: Callable[..., bytes], *arguments: Any) -> bytes:
        return await asyncio.wrap_future(self.pool.submit(work, *arguments))

    async def make_job(
        self,
        settings: TranslationSettings,
        request: TranslationRequest,
        client: str,
        log_fields: LogFields,
        prefix: list[int],
    ) -> Job:
        if not self.service.is_warm:
            raise Refusal(503, "the server is still starting", RETRY_SECONDS)
        job = await asyncio.to_thread(Job, settings, request.texts, client, prefix)
        log_fields |= {"characters": sum(map(len, request.texts)), "sentences": job.n_sentences}
        self.service.check_size(job)
        return job

    async def translate(
        self,
        request: TranslationRequest,
        prefix: Prefix,
        max_tokens: int,
        client: str,
        disconnected: Disconnected,
        log_fields: LogFields,
        *,
        is_whole: bool = False,
    ) -> Job:
        """Translate single lines. `max_tokens`: of each sentence, or of the whole text if `is_whole`."""
        if any(set(text) & set(LINE_BREAKS) for text in request.texts):
            raise Refusal(400, "q must be a line, or a list of lines: remove the line breaks")
        if prefix and request.is_list:
            raise Refusal(400, "a prefix requires one text: send q as a text, not as a list")
        settings, _ = self.service.settings_for(request)
        ids = await asyncio.to_thread(prefix_ids, settings.translator, prefix, max_tokens)
        job = await self.make_job(settings, request, client, log_fields, ids)
        if (n := job.n_tokens if is_whole else job.longest) > max_tokens:
            raise Refusal(413, f"{'q' if is_whole else 'a sentence of q'} has {n} tokens, the limit is {max_tokens}")
        self.service.batcher.submit(job)
        await self.service.wait(job, disconnected)
        return job

    async def explain(
        self, fields: dict[str, Any], client: str, disconnected: Disconnected, log_fields: LogFields
    ) -> bytes:
        request, prefix = read_request(fields, self.limits), read_prefix(fields, self.limits)
        if len(request.texts) > (limit := self.limits.explained_texts):
            raise Refusal(413, f"q has {len(request.texts)} texts, the limit is {limit}")
        with self.slot():
            max_tokens = self.limits.explained_tokens
            job = await self.translate(request, prefix, max_tokens, client, disconnected, log_fields)
            return await self.run(_explain, job, request)

    async def inspect(
        self, fields: dict[str, Any], client: str, disconnected: Disconnected, log_fields: LogFields
    ) -> bytes:
        request, prefix = read_request(fields, self.limits), read_prefix(fields, self.limits)
        if request.is_list or not request.texts[0].strip():
            raise Refusal(400, "q must be one text that is not blank")
        with self.slot():
            max_tokens = self.limits.inspected_tokens
            job = await self.translate(request, prefix, max_tokens, client, disconnected, log_fields, is_whole=True)
            return await self.run(_inspect, job, request)

    async def embed(
        self, fields: dict[str, Any], client: str, disconnected: Disconnected, log_fields: LogFields
    ) -> bytes:
        request = read_request(fields, self.limits)
        try:
            pool = check_pool(str(fields.get("pool") or "mean"))
        except ConfigError:
            raise Refusal(400, f"pool must be one of {', '.join(POOLS)}") from None
        with self.slot():
            settings, _ = self.service.settings_for(request)
            await self.make_job(settings, request, client, log_fields, [])  # only to check its size
            return await self.run(_embed, settings, request, pool)


def _to_json(response: dict[str, Any]) -> bytes:
    return json.dumps(response, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _explain(job: Job, request: TranslationRequest) -> bytes:
    lines = [_explain_line(job, n) for n in range(len(job.lines))]
    return _to_json({"lines": lines} if request.is_list else lines[0])


def _explain_line(job: Job, n: int) -> dict[str, Any]:
    line = job.lines[n]
    translation, parts = job.settings.translator.finish_explained(line)
    words, first = list[int | None](), 0
    for segment, part in zip(line.segments, parts, strict=True):
        words += [None if word is None else word + first for word in part.target_words]
        words += [None] * (len(part.tokens) - len(part.target_words))  # the end mark
        first += max(0, n_words(part.target_words) - (not segment.gap))
    tokens = [
        {
            "piece": token.piece,
            "probability": _round(token.probability),
            "word": word,
            "runners_up": [[piece, _round(probability)] for piece, probability in token.runners_up],
        }
        for token, word in zip(translation.tokens or (), words, strict=True)
    ]
    alternatives = [{"text": other.text, "log_prob": _round(other.log_prob)} for other in translation.alternatives[1:]]
    return {
        "translatedText": translation.text,
        "log_prob": _round(translation.log_prob),
        "alternatives": alternatives,
        "flags": {flag: FLAGS[flag] for flag in translation.flags},
        "tokens": tokens,
        "n_first": _n_tokens_of_first(parts),
        "alignment": None if translation.alignment is None else [list(link) for link in translation.alignment],
    }


def _n_tokens_of_first(parts: Sequence[Explained]) -> int:
    return len(parts[0].tokens) if parts else 0


def _inspect(job: Job, request: TranslationRequest) -> bytes:
    (line,), settings = job.lines, job.settings
    translation, parts = settings.translator.finish_explained(line)
    records = list(records_of(settings.translator, request.texts[0], translation, parts, settings.target))
    source = request.source if request.source != AUTO else "?"
    return _to_json(for_page(records, direction=f"{source}-{request.target}"))


def _embed(settings: TranslationSettings, request: TranslationRequest, pool: Pool) -> bytes:
    vector_ND = embed(settings.translator, request.texts, pool, settings.target)
    vectors = [
        [_round(x) for x in vector_D.tolist()] if text.strip() else None
        for text, vector_D in zip(request.texts, vector_ND, strict=True)
    ]
    return _to_json({"vectors": vectors if request.is_list else vectors[0], "pool": pool})


def _round(x: float) -> float:
    """Round to six digits."""
    return float(f"{x:.6g}")


def add_details(app: "FastAPI", service: Service, *, log_text: bool) -> None:
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    details = Details(service)

    def add(
        path: str,
        work: Callable[..., Awaitable[bytes]],
        response_schema: dict[str, Any],
        request_fields: dict[str, dict[str, Any]],
        summary: str,
    ) -> None:
        async def route(request: Request) -> Response:
            state = request.state
            if log_text:
                state.log_fields["q"] = state.fields.get("q")
            body = await work(state.fields, state.client, partial(wait_for_disconnect, request), state.log_fields)
            return Response(body, media_type="application/json")

        app.add_api_route(
            path,
            route,
            methods=["POST"],
            responses=describe_responses(response_schema, *REFUSALS),
            openapi_extra=describe_request("application/json", **request_fields),
            summary=summary,
            name=path,
        )

    prefix = {"prefix": PREFIX}
    add("/explain", details.explain, EXPLANATION, prefix, "Translate, with probabilities and alignment of each token")
    add("/inspect", details.inspect, ATTENTION_RECORDS, prefix, "Translate, with the attention weights of every head")
    add("/embed", details.embed, VECTORS, {"pool": POOL}, "Texts as vectors")

    @app.get("/limits", responses=describe_responses(LIMITS, *GET_REFUSALS), summary="The limits of a request")
    async def limits() -> JSONResponse:
        return JSONResponse({name: getattr(service.limits, name) for name in REPORTED_LIMITS})
