"""The ASGI application and its routes for translation, health and metrics."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of routes as values.

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from transduce import __version__
from transduce.serving.details import add_details
from transduce.serving.guard import CLIENT_CLOSED_REQUEST, FAILURE, Access, DirectRoute, Guard
from transduce.serving.limits import Refusal
from transduce.serving.manual import add_manual
from transduce.serving.page import add_page
from transduce.serving.request import read_request, wait_for_disconnect
from transduce.serving.schema import (
    FORMS,
    GET_REFUSALS,
    HEALTH,
    LANGUAGES,
    PROBE_REFUSALS,
    REFUSALS,
    STATUS,
    TEXT,
    TRANSLATION,
    describe_request,
    describe_responses,
)
from transduce.serving.service import ClientDisconnected, LogFields, Service

if TYPE_CHECKING:
    from fastapi import FastAPI


def make_app(
    service: Service,
    access: Access,
    log: Callable[[LogFields], None],
    *,
    log_text: bool = False,
    with_direct_routes: bool = True,
) -> Any:
    """Return an ASGI application.

    `with_direct_routes`: POST /translate bypasses FastAPI, for speed (see `Guard._call_route`). If it is False, the
    request passes through FastAPI like all others. The responses are the same.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    app = FastAPI(
        title="transduce",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        description="Translation, compatible with the API of LibreTranslate.",
    )

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)
        assert isinstance(error, Refusal)
        return JSONResponse({"error": error.message}, error.code, headers=error.headers)

    async def fail(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": FAILURE}, CLIENT_CLOSED_REQUEST if isinstance(error, ClientDisconnected) else 500)

    for error_class, handler in (
        (HTTPException, refuse),
        (Refusal, refuse),
        (ClientDisconnected, fail),
        (Exception, fail),
    ):
        app.add_exception_handler(error_class, handler)
    translate = add_translation(app, service, log_text=log_text)
    add_details(app, service, log_text=log_text)
    add_state(app, service, access)
    add_page(app)
    add_manual(app)
    known_paths = {route.path for route in app.routes if hasattr(route, "path")}
    direct_routes = {("POST", "/translate"): translate} if with_direct_routes else {}
    guard = Guard(app, service, access, known_paths, log, direct_routes)
    if not access.origins:
        return guard
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        guard,
        allow_origins=access.origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )


def add_translation(app: "FastAPI", service: Service, *, log_text: bool) -> DirectRoute:
    """Add /translate and /languages. Return the route of /translate."""
    from fastapi.responses import JSONResponse
    from starlette.requests import Request

    @app.post(
        "/translate",
        responses=describe_responses(TRANSLATION, *REFUSALS),
        openapi_extra=describe_request(*FORMS),
        summary="Translate text",
    )
    async def translate(request: Request) -> JSONResponse:
        translation_request = read_request(request.state.fields, service.limits)
        log_fields = request.state.log_fields
        disconnected = partial(wait_for_disconnect, request)
        response = await service.translate(translation_request, request.state.client, disconnected, log_fields)
        if log_text:
            log_fields |= {"q": translation_request.texts, **response}
        return JSONResponse(response)

    @app.get("/languages", responses=describe_responses(LANGUAGES, *GET_REFUSALS))
    async def languages() -> JSONResponse:
        return JSONResponse(service.languages())

    return translate


def add_state(app: "FastAPI", service: Service, access: Access) -> None:
    """Add /health, /ready and /metrics."""
    from fastapi.responses import JSONResponse, PlainTextResponse
    from starlette.requests import Request

    engines = service.engine_fields()
    engines_without_reasons = [{name: one[name] for name in one if name != "reason"} for one in engines]

    @app.get("/health", responses=describe_responses(HEALTH, *PROBE_REFUSALS), summary="Whether the process is running")
    async def health(request: Request) -> JSONResponse:
        # This route needs no token, but a reason can contain paths and the output of a compiler.
        can_see_reasons = access.is_allowed(request.headers)
        return JSONResponse({"status": "ok", "engines": engines if can_see_reasons else engines_without_reasons})

    @app.get(
        "/ready",
        responses=describe_responses(STATUS, *PROBE_REFUSALS, 503),
        summary="Whether the models are loaded and warmed up",
    )
    async def ready() -> JSONResponse:
        status = "shutting down" if service.is_draining else "ready" if service.is_warm else "starting"
        if status == "ready":
            return JSONResponse({"status": status})
        return JSONResponse({"error": status}, 503, headers={"retry-after": "2"})

    @app.get(
        "/metrics",
        responses=describe_responses(TEXT, *GET_REFUSALS, content_type="text/plain"),
        summary="Metrics for Prometheus",
    )
    async def metrics() -> PlainTextResponse:
        text = service.metrics.text(service.batcher.n_waiting, service.batcher.n_running)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")
