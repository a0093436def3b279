"""Run the application with uvicorn, with time limits for slow clients and an orderly shutdown after SIGTERM."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transduce.engines.choose import Engine
from transduce.errors import ConfigError
from transduce.runtime import configure, release_memory
from transduce.serving.application import make_app
from transduce.serving.guard import Access, client_of
from transduce.serving.limits import Limits
from transduce.serving.service import LogFields, Service

MIN_TOKEN_LENGTH = 16
RELEASE_MEMORY_SECONDS = 20
"""Interval at which unused memory is returned to the system."""
CLOSE_SECONDS = 2
"""Time for connections to close, once all requests have their response."""
TOO_MANY_CONNECTIONS = (
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
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {path} must have {MIN_TOKEN_LENGTH} or more ASCII characters and no spaces: "
            "create one with openssl rand -hex 32"
        )
    return token


def check_address(host: str, token: str | None, *, without_token: bool) -> None:
    if not is_loopback(host) and token is None and not without_token:
        raise ConfigError(
            f"--host {host} can be reached from other machines, and there is no token: add --token-file FILE, "
            "or --without-token if everyone who can reach the server may use it"
        )


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen at {host}, port {port} ({reason}): choose another with --port") from None


def log_line(fields: LogFields) -> None:
    """Print one line of JSON. JSON escapes line breaks, so nothing that a client sends can look like another line."""
    timestamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    print(json.dumps({"time": timestamp, **fields}), file=sys.stderr, flush=True)


def make_server(app: Any, service: Service, proxies: Sequence[str] = ()) -> Any:
    """`proxies`: addresses whose X-Forwarded-For header is trusted."""
    import uvicorn

    limits = service.limits

    class Server(uvicorn.Server):
        """The first signal makes it finish the accepted requests and exit; the second makes it exit at once."""

        drain_until = next_release_at = 0.0
        releasing: asyncio.Future[None] | None = None
        """Stored because asyncio keeps only a weak reference to a task."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.is_draining:
                self.should_exit = True
            service.is_draining, self.drain_until = True, time.monotonic() + limits.drain_seconds

        async def on_tick(self, counter: int) -> bool:
            if service.is_draining:
                is_late = time.monotonic() > self.drain_until
                if is_late:
                    service.batcher.close()
                self.should_exit |= is_late or service.n_accepted == 0
            if time.monotonic() > self.next_release_at:
                self.next_release_at = time.monotonic() + RELEASE_MEMORY_SECONDS
                self.releasing = asyncio.ensure_future(asyncio.to_thread(release_memory))
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

    n_connections_of: Counter[str] = Counter()

    class LimitedProtocol(H11Protocol):
        """HTTP with limits for connections and for the time of headers, for which uvicorn itself has no limit."""

        address = ""
        is_counted = False
        timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # asyncio sets TCP_NODELAY only on sockets that were created with the protocol number of TCP. Without it,
            # the body of each response waits until the client's system has acknowledged the headers: 40 ms.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.address = client_of({"client": self.client})
            if not has_proxy and n_connections_of[self.address] >= limits.client_connections:
                transport.write(TOO_MANY_CONNECTIONS % (429, b"Too Many Requests"))
            elif n_connections_of.total() >= limits.connections:
                transport.write(TOO_MANY_CONNECTIONS % (503, b"Service Unavailable"))
            else:
                self.is_counted = True
                n_connections_of[self.address] += 1
                self._wait_for_headers()
                return
            transport.close()

        def data_received(self, data: bytes) -> None:
            if self.is_counted:
                super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.timer is not None:
                self.timer.cancel()
            if self.is_counted:
                n_connections_of[self.address] -= 1
                if not n_connections_of[self.address]:
                    del n_connections_of[self.address]

        def on_response_complete(self) -> None:
            self._wait_for_headers()
            super().on_response_complete()

        def _wait_for_headers(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(limits.header_seconds, self._close_unless_new_request, self.cycle)

        def _close_unless_new_request(self, last_request: Any) -> None:
            if self.cycle is last_request and not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol


def report_engines(service: Service) -> None:
    """Print one line for each engine: its directions and the reason for it."""
    directions_of: dict[Engine, list[str]] = {}
    for (source, target), engine in service.engines.items():
        directions_of.setdefault(engine, []).append(f"{source}-{target}")
    for engine, directions in directions_of.items():
        print(f"engine for {', '.join(directions)}: {engine}", file=sys.stderr, flush=True)


def serve(
    service: Service,
    access: Access,
    host: str,
    port: int,
    *,
    proxies: Sequence[str] = (),
    log_text: bool = False,
    quiet: bool = False,
    with_direct_routes: bool = True,
) -> None:
    """Serve until a signal arrives. `with_direct_routes`: see `make_app`."""
    log: Callable[[LogFields], None] = (lambda fields: None) if quiet else log_line
    for device in {translator.device.type for translator in service.directions.values()}:
        configure(device)
    with listen(host, port) as listening:
        app = make_app(service, access, log, log_text=log_text, with_direct_routes=with_direct_routes)
        server = make_server(app, service, proxies)
        host_in_url = f"[{host}]" if ":" in host else host
        url = f"http://{host_in_url}:{listening.getsockname()[1]}"
        errors: list[Exception] = []

        def warm_up() -> None:
            try:
                service.start()
                gc.collect()
                gc.freeze()  # otherwise the collector scans all models again and again
                report_engines(service)
                print(f"serving at {url}", file=sys.stderr, flush=True)
            except Exception as error:
                errors.append(error)
                server.should_exit = True

        threading.Thread(target=warm_up, daemon=True).start()
        server.run(sockets=[listening])
    service.batcher.close()
    service.batcher.join()
    if errors:
        raise errors[0]
