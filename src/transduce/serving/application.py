"""The routes, and what the OpenAPI document says of them."""

# Annotations of routes are looked at when they are made: they must be values here, not strings.

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from transduce import __version__
from transduce.serving.guard import LEFT, Access, Guard, Route
from transduce.serving.limits import Refusal
from transduce.serving.question import read_question
from transduce.serving.service import ClientLeft, Service

if TYPE_CHECKING:
    from fastapi import FastAPI

TEXT = {"type": "string"}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
REFUSALS = {
    400: "What was asked cannot be.",
    401: "A token is needed.",
    403: "The token is wrong, or the page may not ask.",
    408: "The body came too slowly.",
    413: "More than a limit allows.",
    415: "A body of another form.",
    422: "A number out of its bounds.",
    429: "Too much from this client; Retry-After says when to come again.",
    431: "Address and headers are longer than the limit.",
    503: "Too much at the moment, starting, or going down; Retry-After says when to come again.",
}
ANYWHERE = tuple(code for code in REFUSALS if code != 422)
"""Of those, what routes without numbers have too."""


def one_or_list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [schema, {"type": "array", "items": schema}]}


QUESTION: dict[str, Any] = {
    "type": "object",
    "required": ["q", "source", "target"],
    "properties": {
        "q": {**one_or_list(TEXT), "description": "A text of any number of lines, or several."},
        "source": {**TEXT, "description": "A language of /languages; auto where there is no choice."},
        "target": {**TEXT, "description": "A language of /languages."},
        "format": {"type": "string", "enum": ["text"], "default": "text"},
        "alternatives": {"type": "integer", "minimum": 0, "default": 0, "description": "Beside the best."},
        "beam": {"type": "integer", "minimum": 1, "description": "Hypotheses kept. Not in LibreTranslate."},
        "api_key": {**TEXT, "description": "The token, unless it is sent as Authorization: Bearer."},
    },
}
DETECTED = {"type": "object", "properties": {"confidence": {"type": "number"}, "language": TEXT}}
ANSWER = {
    "type": "object",
    "required": ["translatedText"],
    "properties": {
        "translatedText": one_or_list(TEXT),
        "alternatives": {"type": "array", "items": one_or_list(TEXT)},
        "detectedLanguage": {**one_or_list(DETECTED), "description": "Where source is auto: it was the only one."},
    },
}
LANGUAGES = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["code", "name", "targets"],
        "properties": {"code": TEXT, "name": TEXT, "targets": {"type": "array", "items": TEXT}},
    },
}
STATUS = {"type": "object", "properties": {"status": TEXT}}


def described(schema: dict[str, Any], *codes: int, kind: str = "application/json") -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {}
    found[200] = {"description": "As asked.", "content": {kind: {"schema": schema}}}
    for code in codes:
        found[code] = {"description": REFUSALS[code], "content": {"application/json": {"schema": ERROR}}}
    return found


def make_app(service: Service, access: Access, log: Callable[[dict[str, Any]], None], *, log_text: bool = False) -> Any:
    """An ASGI application."""
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    from transduce.serving.details import add_details
    from transduce.serving.manual import add_manual
    from transduce.serving.page import add_page

    app = FastAPI(
        title="transduce",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        description="Translation, by LibreTranslate's API.",
    )

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)
        assert isinstance(error, Refusal)
        return JSONResponse({"error": error.message}, error.code, headers=error.headers)

    async def fail(request: Request, error: Exception) -> JSONResponse:
        code = LEFT if isinstance(error, ClientLeft) else 500
        return JSONResponse({"error": "something went wrong here"}, code)  # and not what, which could hold a text

    for kind, handler in ((HTTPException, refuse), (Refusal, refuse), (ClientLeft, fail), (Exception, fail)):
        app.add_exception_handler(kind, handler)
    translate = add_translation(app, service, log_text=log_text)
    add_details(app, service, log_text=log_text)
    add_state(app, service)
    add_page(app)
    add_manual(app)
    known = {route.path for route in app.routes if hasattr(route, "path")}
    guarded = Guard(app, service, access, known, log, {("POST", "/translate"): translate})
    if not access.origins:
        return guarded
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        guarded,
        allow_origins=access.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )


async def left(request: Any) -> None:
    """Returns when nobody waits for an answer any more."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def add_translation(app: "FastAPI", service: Service, *, log_text: bool) -> Route:
    """The route of those who translate."""
    from fastapi.responses import JSONResponse
    from starlette.requests import Request

    forms = ("application/json", "application/x-www-form-urlencoded", "multipart/form-data")
    asked = {"requestBody": {"required": True, "content": {form: {"schema": QUESTION} for form in forms}}}

    @app.post("/translate", responses=described(ANSWER, *REFUSALS), openapi_extra=asked, summary="Translate text")
    async def translate(request: Request) -> JSONResponse:
        question = read_question(request.state.fields, service.limits)
        note = request.state.note
        answer = await service.answer(question, request.state.client, partial(left, request), note)
        if log_text:
            note |= {"q": question.texts, **answer}
        return JSONResponse(answer)

    @app.get("/languages", responses=described(LANGUAGES, *ANYWHERE))
    async def languages() -> JSONResponse:
        return JSONResponse(service.languages())

    return translate


def add_state(app: "FastAPI", service: Service) -> None:
    from fastapi.responses import JSONResponse, PlainTextResponse

    @app.get("/health", responses=described(STATUS, 400, 403, 431), summary="The process answers")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/ready", responses=described(STATUS, 400, 403, 431, 503), summary="Models are loaded and warm")
    async def ready() -> JSONResponse:
        status = "going down" if service.is_draining else "ready" if service.is_warm else "starting"
        if status == "ready":
            return JSONResponse({"status": status})
        return JSONResponse({"error": status}, 503, headers={"retry-after": "2"})

    kind = "text/plain"

    @app.get("/metrics", responses=described(TEXT, *ANYWHERE, kind=kind), summary="Counts, for Prometheus")
    async def metrics() -> PlainTextResponse:
        text = service.metrics.text(service.batcher.n_waiting, service.batcher.n_running)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
