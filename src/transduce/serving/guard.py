"""What stands between the network and the routes: who may ask, how much, how often and how slowly.

It wraps the whole application, so that a route cannot forget any of it. Whatever is not in `OPEN` needs the token.
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

from transduce.serving.batcher import RETRY_SECONDS
from transduce.serving.limits import Rate, Refusal
from transduce.serving.page import PATHS
from transduce.serving.question import read_fields
from transduce.serving.service import ClientLeft, Service

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Route = Callable[[Any], Awaitable[App]]
"""From a request to its answer, which sends itself."""

PROBES = frozenset({"/health", "/ready"})
OPEN = PROBES | PATHS
"""Paths that need no token. Probes are not counted against a client either."""
SECURITY = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}
"""Unless a route says otherwise."""
LEFT = 499
"""The code of an answer that nobody waited for, as nginx has it."""
GRACE_SECONDS = 5.0
"""On top of a request's time, for its answer to be taken."""
REMEMBERED = 256
"""Names and addresses that need not be taken apart again."""
DISCARDED = 10
"""Times the limit of a body, that are read of one that is too long, so that its sender hears of it."""


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    token: str | None = None
    hosts: tuple[str, ...] = ()
    """Names, beside localhost and any address: a name that someone else points at us is not ours."""
    origins: tuple[str, ...] = ()
    """Of pages from elsewhere that may ask too."""

    def check_host(self, host: str | None) -> None:
        name = _part(f"//{host}", "hostname") if host else None
        if name is None or not (name == "localhost" or name in self.hosts or _is_address(name)):
            raise Refusal(400, "this Host is not served here: --allow-host on the server's side adds one")

    def check_origin(self, origin: str | None, host: str | None) -> None:
        """A page from elsewhere could have its visitors ask without their knowing."""
        if origin is not None and origin not in self.origins and _part(origin, "netloc") != host:
            raise Refusal(403, "pages of this Origin may not ask: --allow-origin on the server's side adds one")

    def check_token(self, given: str | None) -> None:
        if self.token is None:
            return
        if given is None:
            raise Refusal(401, "a token is needed: send it as Authorization: Bearer, or as api_key")
        # Hashes are equally long: how long a comparison takes tells nothing about the token.
        own, theirs = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (self.token, given))
        if not hmac.compare_digest(own, theirs):
            raise Refusal(403, "Invalid API key")


@functools.lru_cache(REMEMBERED)
def _part(address: str, name: Literal["hostname", "netloc"]) -> str | None:
    try:
        return getattr(urlsplit(address), name)  # type: ignore[no-any-return]
    except ValueError:
        return None


@functools.lru_cache(REMEMBERED)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def client_of(scope: Scope) -> str:
    return _client(str((scope.get("client") or ("unknown", 0))[0]))


@functools.lru_cache(REMEMBERED)
def _client(text: str) -> str:
    """An address; of the sixth version what belongs to one customer, who has more addresses than we could count."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(address) if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


class Guard:
    def __init__(
        self,
        app: App,
        service: Service,
        access: Access,
        known: Collection[str],
        log: Callable[[dict[str, Any]], None],
        direct: Mapping[tuple[str, str], Route],
    ) -> None:
        """`known`: paths that are called by their names in logs and metrics; others could be anything. `direct`: by
        method and path, routes of the application that are asked without it, which takes as long as all else does; they
        refuse by a Refusal alone."""
        self.app, self.service, self.access, self.known, self.log = app, service, access, known, log
        self.direct = direct
        self.limits = service.limits
        self.rate = Rate(self.limits.client_rate, self.limits.client_burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, client, note = time.monotonic(), client_of(scope), dict[str, Any]()
        answer = _Answer(send)
        try:
            await self._guarded(scope, receive, answer, client, note)
        except Refusal as refusal:
            await answer.refuse(refusal)
        except ClientLeft:
            answer.code = LEFT
        except TimeoutError:
            await answer.refuse(Refusal(503, "not done in time", RETRY_SECONDS))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]  # but not what it says, which could hold a text
            note["error"] = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            await answer.refuse(Refusal(500, "something went wrong here"))
        finally:
            path = scope["path"] if scope["path"] in self.known else "other"
            seconds = time.monotonic() - began
            self.service.metrics.answered(path, answer.code, seconds)
            self.log({"client": client, "path": path, "code": answer.code, "seconds": round(seconds, 4), **note})

    async def _guarded(
        self, scope: Scope, receive: Receive, answer: _Answer, client: str, note: dict[str, Any]
    ) -> None:
        self._check_head(scope)
        headers = headers_of(scope)
        n_hosts = sum(name == b"host" for name, _ in scope["headers"])
        self.access.check_host(headers.get("host") if n_hosts == 1 else None)
        self.access.check_origin(headers.get("origin"), headers.get("host"))
        state = scope.setdefault("state", {})
        state |= {"client": client, "note": note, "fields": {}}
        if scope["path"] in PROBES:
            await self.app(scope, receive, answer.send)
            return
        self.rate.take(client)
        if self.service.is_draining:
            raise Refusal(503, "the server is going down", RETRY_SECONDS)
        self.service.n_accepted += 1
        try:
            state["fields"] = await self._admit(scope, headers, receive, answer)
            async with asyncio.timeout(self.limits.request_seconds + GRACE_SECONDS):
                await self._ask(scope, _replay(b"", receive), answer.send)
        finally:
            self.service.n_accepted -= 1

    def _check_head(self, scope: Scope) -> None:
        """The network's side counts what has not ended yet; what came whole is counted here."""
        n, most = len(scope["path"]) + len(scope["query_string"]), self.limits.header_bytes
        if n + sum(len(name) + len(text) for name, text in scope["headers"]) > most:
            raise Refusal(431, f"address and headers have more than {most} bytes, which is the limit")

    async def _ask(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        app = self.app
        if (route := self.direct.get((scope["method"], scope["path"]))) is not None:
            app = await route(Request(scope, receive))
        await app(scope, receive, send)

    async def _admit(self, scope: Scope, headers: dict[str, str], receive: Receive, answer: _Answer) -> dict[str, Any]:
        """The fields of a body that has come whole, from somebody who may ask."""
        from starlette.requests import Request

        scheme, _, token = headers.get("authorization", "").partition(" ")
        has_bearer = scheme.lower() == "bearer"
        if has_bearer:
            self.access.check_token(token.strip())
        body = await self._body(receive)
        answer.has_body = True
        fields = await read_fields(Request(scope, _replay(body, receive)), body, self.limits)
        if scope["path"] not in OPEN and not has_bearer:
            key = fields.get("api_key")
            self.access.check_token(key if isinstance(key, str) else None)
        return fields

    async def _body(self, receive: Receive) -> bytes:
        most, body = self.limits.body_bytes, bytearray()
        n = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while n <= DISCARDED * most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    n += len(message.get("body", b""))
                    if n <= most:
                        body += message.get("body", b"")
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self.limits.body_seconds:g} s") from None
        if n > most:
            raise Refusal(413, f"the body has more than {most} bytes, which is the limit")
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that was read already, then what comes after it: that the client leaves."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


class _Answer:
    """On its way out: it gets the headers that keep browsers safe, and its code is noted."""

    def __init__(self, forward: Send) -> None:
        self.forward, self.code, self.has_begun = forward, 0, False
        self.has_body = False
        """The request's has come: the connection can be used again."""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.code = True, message["status"]
            headers = list(message.get("headers", []))
            have = {name.lower() for name, _ in headers}
            headers += [(name, value) for name, value in SECURITY.items() if name not in have]
            message = {**message, "headers": headers}
        await self.forward(message)

    async def refuse(self, refusal: Refusal) -> None:
        if self.has_begun:  # too late for words: what is not whole is cut off
            return
        body = json.dumps({"error": refusal.message}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        if not self.has_body:
            headers["connection"] = "close"
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": refusal.code, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})
