"""A server that lives as long as a test, and a model that waits until it is told to go on."""

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


def bundled(directions: Sequence[tuple[str, str]] = (("de", "en"),)) -> Translator:
    """The model that comes along, under whatever names of languages."""
    own = Translator.load(device="cpu")
    return Translator(own.model, own.config, own.subwords, Origin(tuple(directions), longest_source=40))


class Gate:
    """A stepper that takes no step while its gate is shut."""

    def __init__(self, stepper: Stepper[Any]) -> None:
        self.stepper, self.start, self.is_open = stepper, stepper.start, threading.Event()
        self.steps = 0
        self.is_open.set()
        if hasattr(stepper, "turn"):  # where it is compiled
            self.turn, self.enter = self._turn, stepper.enter  # type: ignore[attr-defined]

    def step(self, last_R: Any, state: Any) -> Any:
        assert self.is_open.wait(60)
        self.steps += 1
        return self.stepper.step(last_R, state)

    def _turn(self, *given: Any) -> Any:
        assert self.is_open.wait(60)
        self.steps += 1
        return self.stepper.turn(*given)  # type: ignore[attr-defined]


def gated() -> tuple[Translator, Gate]:
    translator = bundled()
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

    def ask(self, q: Any = "Das ist gut.", **fields: Any) -> httpx.Response:
        return self.post("/translate", q, **fields)

    def post(self, path: str, q: Any = "Das ist nicht gut.", **fields: Any) -> httpx.Response:
        body = json.dumps({"q": q, "source": "de", "target": "en"} | fields)
        return httpx.post(f"{self.url}{path}", content=body, headers=JSON, timeout=60)

    def logged(self, path: str, n: int, first: int = 0) -> list[dict[str, Any]]:
        """At least n lines of the log, which come after their answers."""
        end = time.monotonic() + 20
        while len(found := [line for line in self.log[first:] if line["path"] == path]) < n:
            assert time.monotonic() < end
            time.sleep(0.01)
        return found


@contextmanager
def served(
    translator: Translator | dict[str, Translator] | None = None,
    *,
    access: Access | None = None,
    n_workers: int = 2,
    alone: bool = False,
    proxies: Sequence[str] = (),
    log_text: bool = False,
    **limits: Any,
) -> Iterator[Live]:
    models = translator if isinstance(translator, dict) else {"model": translator or bundled()}
    generous = {"client_rate": 1e6, "client_burst": 10**6}
    service = Service(models, Limits(**(generous | limits)), n_workers=n_workers, alone=alone)
    log: list[dict[str, Any]] = []
    app = make_app(service, access or Access(), log.append, log_text=log_text)
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
