"""A server that runs in this process during a test, and a model that a test can stop and start."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from transduce import Translator
from transduce.model_folder.format import Origin
from transduce.search.protocols import Stepper
from transduce.serving.application import make_app
from transduce.serving.guard import Access
from transduce.serving.limits import Limits
from transduce.serving.server import listen, make_server
from transduce.serving.service import Service

JSON = {"content-type": "application/json"}
SENTENCE = "Tom hat gestern ein neues Auto gekauft, weil das alte kaputt war."
TOKEN = "a-token-of-more-than-16-characters"


def translator_with(directions: Sequence[tuple[str, str]] = (("de", "en"),)) -> Translator:
    """Return the bundled model with these directions in its description."""
    translator = Translator.load(device="cpu")
    origin = Origin(tuple(directions), longest_source=40)
    return Translator(translator.model, translator.config, translator.subwords, origin)


class Gate:
    """A stepper that waits before each step while its gate is closed."""

    def __init__(self, stepper: Stepper[Any]) -> None:
        self.stepper, self.start, self.is_open = stepper, stepper.start, threading.Event()
        self.n_steps = 0
        self.is_open.set()
        if hasattr(stepper, "turn"):  # the native engine
            self.turn, self.enter = self._turn, stepper.enter  # type: ignore[attr-defined]

    def step(self, last_R: Any, state: Any) -> Any:
        assert self.is_open.wait(60)
        self.n_steps += 1
        return self.stepper.step(last_R, state)

    def _turn(self, *arguments: Any) -> Any:
        assert self.is_open.wait(60)
        self.n_steps += 1
        return self.stepper.turn(*arguments)  # type: ignore[attr-defined]


def gated() -> tuple[Translator, Gate]:
    translator = translator_with()
    gate = Gate(translator.stepper)
    translator.stepper = gate
    return translator, gate


@dataclass
class Live:
    url: str
    port: int
    service: Service
    log: list[dict[str, Any]]
    server: Any
    thread: threading.Thread

    def translate(self, q: Any = "Das ist gut.", **fields: Any) -> httpx.Response:
        return self.post("/translate", q, **fields)

    def post(self, path: str, q: Any = "Das ist nicht gut.", **fields: Any) -> httpx.Response:
        body = json.dumps({"q": q, "source": "de", "target": "en"} | fields)
        return httpx.post(f"{self.url}{path}", content=body, headers=JSON, timeout=60)

    def logged(self, path: str, n: int, first: int = 0) -> list[dict[str, Any]]:
        """Wait for at least n entries in the log, because an entry is written after its response is sent."""
        end = time.monotonic() + 20
        while len(entries := [entry for entry in self.log[first:] if entry["path"] == path]) < n:
            assert time.monotonic() < end
            time.sleep(0.01)
        return entries


@contextmanager
def served(
    translator: Translator | dict[str, Translator] | None = None,
    *,
    access: Access | None = None,
    n_workers: int = 2,
    alone: bool = False,
    proxies: Sequence[str] = (),
    log_text: bool = False,
    with_direct_routes: bool = True,
    **limits: Any,
) -> Iterator[Live]:
    models = translator if isinstance(translator, dict) else {"model": translator or translator_with()}
    no_rate_limit = {"client_rate": 1e6, "client_burst": 10**6}
    service = Service(models, Limits(**(no_rate_limit | limits)), n_workers=n_workers, alone=alone)
    log: list[dict[str, Any]] = []
    app = make_app(service, access or Access(), log.append, log_text=log_text, with_direct_routes=with_direct_routes)
    server = make_server(app, service, proxies)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        service.start()
        port = listening.getsockname()[1]
        try:
            yield Live(f"http://127.0.0.1:{port}", port, service, log, server, thread)
        finally:
            server.should_exit = True
            service.batcher.close()
            thread.join(30)
            service.batcher.join()
    assert not thread.is_alive()
