"""The layer between the network and the routes: access, rate limits, size limits and time limits.

It wraps the whole application, so a route cannot omit a check. Every path that is not in `OPEN` needs the
token.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from transduce.serving.limits import RETRY_SECONDS, RateLimit, Refusal
from transduce.serving.page import PATHS
from transduce.serving.request import read_fields
from transduce.serving.service import ClientDisconnected, LogFields, Service

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
DirectRoute = Callable[[Any], Awaitable[App]]
"""Takes a starlette request and returns its response, which is an ASGI application."""

PROBES = frozenset({"/health", "/ready"})
"""Not counted by the rate limit."""
OPEN = PROBES | PATHS
"""Paths that need no token."""
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}
"""A route can set other values."""
CLIENT_CLOSED_REQUEST = 499
"""The status code, as in nginx, of a request whose client disconnected before the response."""
GRACE_SECONDS = 5.0
"""Added to the time of a request for its response to be sent."""
CACHE_SIZE = 256
"""Host names and addresses whose parsed form is cached."""
MAX_DISCARDED_BODIES = 10
"""A body above the limit is read and discarded up to this many times the limit, so that the client can receive 413."""
FAILURE = "an internal error occurred"
"""Without details, because they could contain a text."""


@dataclass(frozen=True)
class Access:
    """The rules for which requests are allowed."""

    token: str | None = None
    hosts: tuple[str, ...] = ()
    """Allowed host names, in addition to localhost and IP addresses. Others are refused because of DNS rebinding."""
    origins: tuple[str, ...] = ()
    """Origins of other pages that may send requests."""

    def check_host(self, host: str | None) -> None:
        name = _part(f"//{host}", "hostname") if host else None
        if name is None or not (name == "localhost" or name in self.hosts or _is_address(name)):
            raise Refusal(400, "this Host is not allowed: start the server with --allow-host to add it")

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """Refuse requests of other pages, which could otherwise be sent without the consent of their visitor."""
        if origin is not None and origin not in self.origins and _part(origin, "netloc") != host:
            raise Refusal(403, "pages of this Origin are not allowed: start the server with --allow-origin to add it")

    def is_allowed(self, headers: Mapping[str, str]) -> bool:
        """Return whether the headers alone give access: no token is required, or Authorization has the right one."""
        try:
            self.check_token(bearer_token(headers))
        except Refusal:
            return False
        return True

    def check_token(self, token: str | None) -> None:
        if self.token is None:
            return
        if token is None:
            raise Refusal(401, "a token is required: send it as Authorization: Bearer, or as api_key")
        # All hashes have the same length, so that the time of the comparison reveals nothing about the token.
        expected, received = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (self.token, token))
        if not hmac.compare_digest(expected, received):
            raise Refusal(403, "Invalid API key")


@functools.lru_cache(CACHE_SIZE)
def _part(address: str, name: Literal["hostname", "netloc"]) -> str | None:
    try:
        return getattr(urlsplit(address), name)  # type: ignore[no-any-return]
    except ValueError:
        return None


@functools.lru_cache(CACHE_SIZE)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def client_of(scope: Scope) -> str:
    return _client(str((scope.get("client") or ("unknown", 0))[0]))


@functools.lru_cache(CACHE_SIZE)
def _client(text: str) -> str:
    """An IPv4 address, or the /64 network of an IPv6 address: one customer usually has all addresses of it."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def bearer_token(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


class Guard:
    def __init__(
        self,
        app: App,
        service: Service,
        access: Access,
        known_paths: Collection[str],
        log: Callable[[LogFields], None],
        direct_routes: Mapping[tuple[str, str], DirectRoute],
    ) -> None:
        """`known_paths` appear in the log and the metrics; all other paths are recorded as "other".

        `direct_routes`, by method and path, are a short cut: see `_call_route`. Empty: all requests pass through `app`.
        """
        self.app, self.service, self.access, self.known_paths, self.log = app, service, access, known_paths, log
        self.direct_routes = direct_routes
        self.limits = service.limits
        self.rate_limit = RateLimit(self.limits.client_rate, self.limits.client_burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, client, log_fields = time.monotonic(), client_of(scope), LogFields()
        response = _Response(send)
        try:
            await self._respond(scope, receive, response, client, log_fields)
        except Refusal as refusal:
            await response.refuse(refusal)
        except ClientDisconnected:
            response.code = CLIENT_CLOSED_REQUEST
        except TimeoutError:
            await response.refuse(Refusal(503, "the request took too long", RETRY_SECONDS))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]  # not the message, which could contain a text
            log_fields["error"] = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            await response.refuse(Refusal(500, FAILURE))
        finally:
            path = scope["path"] if scope["path"] in self.known_paths else "other"
            seconds = time.monotonic() - began
            self.service.metrics.add_response(path, response.code, seconds)
            entry = {"client": client, "path": path, "code": response.code, "seconds": round(seconds, 4)}
            self.log(entry | log_fields)

    async def _respond(
        self, scope: Scope, receive: Receive, response: _Response, client: str, log_fields: LogFields
    ) -> None:
        self._check_header_size(scope)
        headers = headers_of(scope)
        n_hosts = sum(name == b"host" for name, _ in scope["headers"])
        self.access.check_host(headers.get("host") if n_hosts == 1 else None)
        self.access.check_origin(headers.get("origin"), headers.get("host"))
        state = scope.setdefault("state", {})
        state |= {"client": client, "log_fields": log_fields, "fields": {}}
        if scope["path"] in PROBES:
            await self.app(scope, receive, response.send)
            return
        self.rate_limit.take(client)
        if self.service.is_draining:
            raise Refusal(503, "the server is shutting down", RETRY_SECONDS)
        self.service.n_accepted += 1
        try:
            state["fields"] = await self._read_and_authorise(scope, headers, receive, response)
            async with asyncio.timeout(self.limits.request_seconds + GRACE_SECONDS):
                await self._call_route(scope, _replay(b"", receive), response.send)
        finally:
            self.service.n_accepted -= 1

    def _check_header_size(self, scope: Scope) -> None:
        """Check the size of complete headers, because uvicorn limits only headers that have not ended yet."""
        n_bytes, limit = len(scope["path"]) + len(scope["query_string"]), self.limits.header_bytes
        n_bytes += sum(len(name) + len(text) for name, text in scope["headers"])
        if n_bytes > limit:
            raise Refusal(431, f"the address and the headers have more than {limit} bytes, which is the limit")

    async def _call_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the direct route of this method and path if there is one, and `app` otherwise.

        A direct route bypasses FastAPI: its middleware for exceptions, its routing, and its resolution of dependencies.
        The reason is speed: on a short request this machinery takes a large share of the time of the event loop
        (`benchmarks/serve_load.py --part routes` measures it, and docs/performance.md has the ratio).

        Two tasks of FastAPI are repeated here. Method and path must be equal to those of the route; all other requests
        reach `app`, which answers 404 or 405. `__call__` turns Refusal, ClientDisconnected and all other errors into
        responses with the status codes and messages of `app`. No check is bypassed: this class checks host, origin,
        token, rate, sizes and times of all requests, and the route checks the fields.
        """
        from starlette.requests import Request

        app = self.app
        if (route := self.direct_routes.get((scope["method"], scope["path"]))) is not None:
            app = await route(Request(scope, receive))
        await app(scope, receive, send)

    async def _read_and_authorise(
        self, scope: Scope, headers: dict[str, str], receive: Receive, response: _Response
    ) -> dict[str, Any]:
        """Return the fields of the body, once it is complete and the token is checked."""
        from starlette.requests import Request

        if (token := bearer_token(headers)) is not None:
            self.access.check_token(token)
        body = await self._body(receive)
        response.has_request_body = True
        fields = await read_fields(Request(scope, _replay(body, receive)), body, self.limits)
        if scope["path"] not in OPEN and token is None:
            key = fields.get("api_key")
            self.access.check_token(key if isinstance(key, str) else None)
        return fields

    async def _body(self, receive: Receive) -> bytes:
        limit, body = self.limits.body_bytes, bytearray()
        n_bytes = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while n_bytes <= MAX_DISCARDED_BODIES * limit:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    n_bytes += len(message.get("body", b""))
                    if n_bytes <= limit:
                        body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None
        if n_bytes > limit:
            raise Refusal(413, f"the body has more than {limit} bytes, which is the limit")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receiver of a body that was read already, and then of the messages after it, such as a disconnect."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again


class _Response:
    """The way of a response to its client: adds the security headers, and records the status code."""

    def __init__(self, forward: Send) -> None:
        self.forward, self.code, self.has_begun = forward, 0, False
        self.has_request_body = False
        """Whether the body of the request was read to its end. Only then can the connection be reused."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.code = True, message["status"]
            headers = list(message.get("headers", []))
            names = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in SECURITY_HEADERS.items() if name not in names]
            message = {**message, "headers": headers}
        await self.forward(message)

    async def refuse(self, refusal: Refusal) -> None:
        if self.has_begun:  # too late for another response; uvicorn closes the connection of an incomplete one
            return
        body = json.dumps({"error": refusal.message}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        if not self.has_request_body:
            headers["connection"] = "close"
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.code, "headers": raw_headers})
        await self.send({"type": "http.response.body", "body": body})
