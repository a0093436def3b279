"""What the server gives nobody more of. Everything is bounded, and the defaults exist here alone."""

from __future__ import annotations

import difflib
import math
import time
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from transduce.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client is an address."""

    header_bytes: int = 16_384
    """Of a request's address and headers; more: 431, or 400 while they go on."""
    body_bytes: int = 100_000
    """Of a request's body; more: 413."""
    characters: int = 5_000
    """Of all texts of a request; more: 413."""
    texts: int = 100
    """In the list q; more: 413."""
    sentences: int = 200
    """In a request: one for each line, and more for a long line; more: 413."""
    tokens: int = 4_000
    """Subwords of a request's texts; more: 413."""
    sentence_tokens: int = 500
    """Subwords of what cannot be split, such as a letter under a thousand accents; more: 413."""
    beam: int = 8
    """The widest; wider: 422."""
    alternatives: int = 4
    """Beside the best; more: 422."""
    explained_texts: int = 16
    """In the list q of /explain; more: 413."""
    explained_tokens: int = 256
    """Subwords of each sentence of /explain, and of a prefix; more: 413."""
    inspected_tokens: int = 128
    """Subwords of the text of /inspect, whose answer grows with their square, and of its prefix; more: 413."""
    explaining: int = 32
    """Requests of all clients to /explain, /inspect and /embed that wait for a pass of the model; more: 503."""
    queue: int = 2_000
    """Sentences of all clients that wait or are being translated; more: 503."""
    client_queue: int = 500
    """The same of one client; more: 429."""
    client_rate: float = 20.0
    """Requests a second of one client, in the long run; more: 429."""
    client_burst: int = 60
    """Requests of one client at once, after a rest; more: 429."""
    client_connections: int = 100
    """Of one client, at a time; more: 429."""
    connections: int = 1_000
    """Of all clients; more: 503."""
    request_seconds: float = 30.0
    """From a request's last byte to its answer; longer: 503."""
    body_seconds: float = 10.0
    """For a request's body to come; longer: 408."""
    header_seconds: float = 10.0
    """For a request's headers to come, from the connection or the last answer on; longer: closed."""
    drain_seconds: float = 20.0
    """After SIGTERM, for what was accepted to be answered."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"limit {field.name} is {value}, must be above 0 and finite: nothing is unbounded")
        if self.alternatives >= self.beam:
            raise ConfigError(
                f"limit alternatives is {self.alternatives}, must be below limit beam, {self.beam}: change that one too"
            )

    def changed(self, settings: Iterable[str]) -> Limits:
        """By texts that read name=value."""
        kinds, changes = typing.get_type_hints(Limits), {}
        for setting in settings:
            name, equals, text = (part.strip() for part in setting.partition("="))
            if not equals:
                raise ConfigError(f"--limit {setting!r} must read name=value: for example characters=20000")
            if name not in kinds:
                near = difflib.get_close_matches(name, kinds, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(kinds)}"
                raise ConfigError(f"{name!r} is no limit: {remedy}")
            try:
                changes[name] = kinds[name](text)
            except ValueError:
                kind = "a whole number" if kinds[name] is int else "a number"
                raise ConfigError(f"limit {name} is {text!r}, must be {kind}: give one") from None
        return replace(self, **changes)


class Refusal(Exception):
    """What a client is told instead of an answer."""

    def __init__(self, code: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, math.ceil(retry_after)))}
        if code == 401:
            self.headers["www-authenticate"] = "Bearer"


MOST_CLIENTS = 10_000
"""That are remembered. Who was forgotten may come at once, as who is new."""


class Rate:
    """A bucket of tokens for each client: a request takes one, and they come back at a steady rate."""

    def __init__(self, a_second: float, burst: int, now: Callable[[], float] = time.monotonic) -> None:
        self.a_second, self.burst, self.now = a_second, burst, now
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens, and when they were counted; who came last stands last."""

    def take(self, client: str) -> None:
        now = self.now()
        tokens, then = self.buckets.pop(client, (float(self.burst), now))
        tokens = min(self.burst, tokens + (now - then) * self.a_second)
        self.buckets[client] = (tokens - 1 if tokens >= 1 else tokens), now
        if len(self.buckets) > MOST_CLIENTS:
            self.buckets.popitem(last=False)
        if tokens < 1:
            raise Refusal(429, "too many requests: slow down", (1 - tokens) / self.a_second)
