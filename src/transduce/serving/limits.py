"""Request limits and their defaults, the refusal of a request, and the rate limit per client.

No resource is unbounded. A client is identified by its IP address.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from transduce.config import parse_settings
from transduce.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Each field names the status code of a request that exceeds it."""

    header_bytes: int = 16_384
    """Bytes of a request's address and headers. If exceeded: 431, or 400 if the headers have not ended by then."""
    body_bytes: int = 100_000
    """Bytes of a request's body. If exceeded: 413."""
    characters: int = 5_000
    """Characters of all texts of a request. If exceeded: 413."""
    texts: int = 100
    """Texts in the list q. If exceeded: 413."""
    sentences: int = 200
    """Sentences of a request: one for each line, and more for a long line. If exceeded: 413."""
    tokens: int = 4_000
    """Tokens of all texts of a request. If exceeded: 413."""
    sentence_tokens: int = 500
    """Tokens of a sentence that cannot be split, such as a letter with a thousand accents. If exceeded: 413."""
    beam: int = 8
    """Beam size that a request may set. If exceeded: 422."""
    alternatives: int = 4
    """Alternatives in addition to the best translation. If exceeded: 422."""
    explained_texts: int = 16
    """Texts in the list q of /explain. If exceeded: 413."""
    explained_tokens: int = 256
    """Tokens of each sentence of /explain, and of its prefix. If exceeded: 413."""
    inspected_tokens: int = 128
    """Tokens of the text of /inspect, and of its prefix; the response grows with their square. If exceeded: 413."""
    explaining: int = 32
    """Requests to /explain, /inspect and /embed in progress, for all clients together. If exceeded: 503."""
    queue: int = 2_000
    """Sentences that wait or are being translated, for all clients together. If exceeded: 503."""
    client_queue: int = 500
    """Sentences that wait or are being translated, for one client. If exceeded: 429."""
    client_rate: float = 20.0
    """Requests per second of one client, on average. If exceeded: 429."""
    client_burst: int = 60
    """Requests that one client may send at once after a pause. If exceeded: 429."""
    client_connections: int = 100
    """Open connections of one client. If exceeded: 429."""
    connections: int = 1_000
    """Open connections of all clients together. If exceeded: 503."""
    request_seconds: float = 30.0
    """Seconds from the last byte of a request to its response. If exceeded: 503."""
    body_seconds: float = 10.0
    """Seconds for the body of a request to arrive. If exceeded: 408."""
    header_seconds: float = 10.0
    """Seconds for the headers of a request to arrive, counted from the connection or from the last response. If
    exceeded: the connection is closed."""
    drain_seconds: float = 20.0
    """Seconds after SIGTERM in which accepted requests are still answered."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"limit {field.name} is {value}, must be above 0 and finite: no limit can be removed")
        if self.alternatives >= self.beam:
            raise ConfigError(
                f"limit alternatives is {self.alternatives}, must be below limit beam, {self.beam}: change both"
            )

    def changed(self, settings: Iterable[str]) -> Limits:
        """Return these limits, changed by texts such as `characters=20000`."""
        changes = parse_settings(Limits, settings, flag="--limit", example="characters=20000", noun="limit")
        return replace(self, **changes)


class Refusal(Exception):
    """An error response: status code, message for the client, and headers."""

    def __init__(self, code: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
        if code == 401:
            self.headers["www-authenticate"] = "Bearer"


RETRY_SECONDS = 2.0
"""Sent as Retry-After with status 503."""
MAX_CLIENTS = 10_000
"""Clients with a stored bucket. A client whose bucket was dropped starts again with a full one."""


class RateLimit:
    """A token bucket for each client: each request takes one token, and tokens are added at a constant rate."""

    def __init__(self, per_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self.per_second, self.burst, self.now = per_second, burst, now
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens and the time at which they were counted, by client. The most recent client is last."""

    def take(self, client: str) -> None:
        now = self.now()
        n_tokens, counted_at = self.buckets.pop(client, (float(self.burst), now))
        n_tokens = min(self.burst, n_tokens + (now - counted_at) * self.per_second)
        self.buckets[client] = (n_tokens - 1 if n_tokens >= 1 else n_tokens), now
        if len(self.buckets) > MAX_CLIENTS:
            self.buckets.popitem(last=False)
        if n_tokens < 1:
            raise Refusal(429, "too many requests: slow down", (1 - n_tokens) / self.per_second)
