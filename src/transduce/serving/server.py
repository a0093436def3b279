"""uvicorn, with patience that ends: who says nothing is cut off, and SIGTERM waits for what was accepted."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.errors import ConfigError
from transduce.runtime import release_memory
from transduce.serving.guard import Access, client_of
from transduce.serving.limits import Limits
from transduce.serving.service import Service

SHORTEST_TOKEN = 16
TIDY_SECONDS = 20
"""After which memory that was needed once is given back."""
CLOSE_SECONDS = 2
"""For connections to end, once all is answered."""
FULL = (
    b"HTTP/1.1 %d %s\r\nretry-after: 2\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: 33\r\n\r\n" + b'{"error": "too many connections"}'
)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--token-file {path} cannot be read ({reason}): give a file with the token") from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {path} must be of {SHORTEST_TOKEN} or more ASCII characters without spaces: "
            "openssl rand -hex 32 makes one"
        )
    return token


def check_address(host: str, token: str | None, *, without_token: bool) -> None:
    if not is_loopback(host) and token is None and not without_token:
        raise ConfigError(
            f"--host {host} can be reached by others, and there is no token: add --token-file FILE, "
            "or --without-token if all who reach it may use it"
        )


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host}, port {port} cannot be listened at ({reason}): choose another by --port") from None


def log_line(values: dict[str, Any]) -> None:
    """JSON, so that nothing that a client sends can look like another line."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(json.dumps({"time": stamp, **values}), file=sys.stderr, flush=True)


def make_server(app: Any, service: Service, proxies: Sequence[str] = ()) -> Any:
    """`proxies`: addresses whose word about a client's address is taken."""
    import uvicorn

    limits = service.limits

    class Server(uvicorn.Server):
        """The first signal ends what is accepted, the second the server."""

        stop_at = tidy_at = 0.0
        tidying: asyncio.Future[None] | None = None
        """Held, or nobody would."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.is_draining:
                self.should_exit = True
            service.is_draining, self.stop_at = True, time.monotonic() + limits.drain_seconds

        async def on_tick(self, counter: int) -> bool:
            if service.is_draining:
                is_late = time.monotonic() > self.stop_at
                if is_late:
                    service.batcher.close()
                self.should_exit |= is_late or service.n_accepted == 0
            if time.monotonic() > self.tidy_at:
                self.tidy_at = time.monotonic() + TIDY_SECONDS
                self.tidying = asyncio.ensure_future(asyncio.to_thread(release_memory))
            return await super().on_tick(counter)

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        http=_protocol(limits, bool(proxies)),
        timeout_keep_alive=max(1, round(limits.header_seconds)),
        timeout_graceful_shutdown=CLOSE_SECONDS,
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    return Server(config)


def _protocol(limits: Limits, has_proxy: bool) -> type[Any]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connected: Counter[str] = Counter()

    class Impatient(H11Protocol):
        """uvicorn waits for ever for a request to begin, and for its headers to end."""

        of = ""
        is_counted = False
        clock: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio does so only for sockets that were made as TCP's by number. Without it each answer waits for
            # the client's system to say that its headers have come, which is 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.of = client_of({"client": self.client})
            if not has_proxy and connected[self.of] >= limits.client_connections:
                transport.write(FULL % (429, b"Too Many Requests"))
            elif connected.total() >= limits.connections:
                transport.write(FULL % (503, b"Service Unavailable"))
            else:
                self.is_counted = True
                connected[self.of] += 1
                self._wait_for_headers()
                return
            transport.close()

        def data_received(self, data: bytes) -> None:
            if self.is_counted:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.clock is not None:
                self.clock.cancel()
            if self.is_counted:
                connected[self.of] -= 1
                if not connected[self.of]:
                    del connected[self.of]

        def on_response_complete(self) -> None:
            self._wait_for_headers()
            super().on_response_complete()

        def _wait_for_headers(self) -> None:
            if self.clock is not None:
                self.clock.cancel()
            before = self.cycle
            self.clock = self.loop.call_later(limits.header_seconds, self._give_up, before)

        def _give_up(self, before: Any) -> None:
            if self.cycle is before and not self.transport.is_closing():
                self.transport.close()

    return Impatient


def serve(
    service: Service,
    access: Access,
    host: str,
    port: int,
    *,
    proxies: Sequence[str] = (),
    log_text: bool = False,
    quiet: bool = False,
) -> None:
    """Until a signal comes."""
    from transduce.serving.application import make_app

    with listen(host, port) as listening:
        app = make_app(service, access, (lambda values: None) if quiet else log_line, log_text=log_text)
        server = make_server(app, service, proxies)
        at = f"[{host}]" if ":" in host else host
        address = f"http://{at}:{listening.getsockname()[1]}"
        errors: list[Exception] = []

        def warm_up() -> None:
            try:
                service.start()
                gc.collect()
                gc.freeze()  # what is there now stays: looking through it again and again cost a twentieth of speed
                print(f"serving at {address}", file=sys.stderr, flush=True)
            except Exception as error:
                errors.append(error)
                server.should_exit = True

        threading.Thread(target=warm_up, daemon=True).start()
        server.run(sockets=[listening])
    service.batcher.close()
    service.batcher.join()
    if errors:
        raise errors[0]
