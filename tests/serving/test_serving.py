"""The server: compatibility with LibreTranslate, limits, access, and requests that are translated together."""

from __future__ import annotations

import ast
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import httpx
import pytest
from libretranslatepy import LibreTranslateAPI

from tests.support.bundled import heldout, transduce
from tests.support.serving import JSON, TOKEN, Live, gated, served, translator_with
from transduce import ConfigError, Translator, serving
from transduce.engines.choose import DESCRIPTIONS, Engine
from transduce.serving.guard import FAILURE, OPEN, SECURITY_HEADERS, Access
from transduce.serving.limits import Limits, RateLimit, Refusal
from transduce.serving.server import check_address, read_token, report_engines
from transduce.serving.service import Service


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served() as server:
        yield server


def wait_until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.01)


# Compatibility with LibreTranslate


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "with a token"])
def test_the_client_of_libretranslate_works(token: str | None) -> None:
    with served(access=Access(token)) as live:
        client = LibreTranslateAPI(live.url, token)
        assert client.translate("Das ist gut.", "de", "en") == "That's good."
        assert client.translate("Ich bin müde.", "auto", "en") == "I'm tired."
        german, english = client.languages()
        assert german == {"code": "de", "name": "German", "targets": ["en"]}
        assert english["code"] == "en"


def test_a_text_gets_a_text_and_a_list_gets_lists(live: Live) -> None:
    assert live.translate().json() == {"translatedText": "That's good."}
    assert live.translate(["Das ist gut.", "", "Ich bin müde."]).json() == {
        "translatedText": ["That's good.", "", "I'm tired."]
    }
    assert live.translate([]).json() == {"translatedText": []}
    one, several = live.translate(alternatives=2).json(), live.translate(["Das ist gut.", " "], alternatives=2).json()
    assert one["alternatives"] == several["alternatives"][0]
    assert len({one["translatedText"], *one["alternatives"]}) == 3
    assert live.translate(source="auto").json()["detectedLanguage"] == {"confidence": 0, "language": "de"}


def test_line_breaks_are_preserved(live: Live) -> None:
    assert live.translate(" Das ist gut.\r\n\r\nIch bin müde.\n").json() == {
        "translatedText": " That's good.\r\n\r\nI'm tired.\n"
    }


def test_json_and_both_kinds_of_forms_give_the_same_response(live: Live) -> None:
    fields = {"q": "Wo ist mein Buch?", "source": "de", "target": "en", "alternatives": "1"}
    parts = {name: (None, value) for name, value in fields.items()}
    responses = [
        httpx.post(f"{live.url}/translate", **body).json()
        for body in ({"json": fields}, {"data": fields}, {"files": parts})
    ]
    assert responses[0]["translatedText"] == "Where's my book?"
    assert responses[0] == responses[1] == responses[2]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"q": None}, 400, "missing q"),
        ({"q": 5}, 400, "a text, or a list"),
        ({"q": ["a", 5]}, 400, "a text, or a list"),
        ({"q": {"a": "b"}}, 400, "a text, or a list"),
        ({"q": "\ud800"}, 400, "half a character"),
        ({"source": None}, 400, "missing source"),
        ({"target": ["en"]}, 400, "missing target"),
        ({"target": "fr"}, 400, "de to en"),
        ({"source": "en", "target": "de"}, 400, "de to en"),
        ({"format": "html"}, 400, "html is not supported"),
        ({"format": 1}, 400, "format"),
        ({"alternatives": "many"}, 422, "alternatives must be"),
        ({"alternatives": True}, 422, "alternatives must be"),
        ({"alternatives": -1}, 422, "alternatives must be"),
        ({"alternatives": 3, "beam": 3}, 422, "above alternatives"),
        ({"beam": 0}, 422, "beam must be"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(
    live: Live, changes: dict[str, Any], code: int, message: str
) -> None:
    response = live.translate(**changes)
    assert response.status_code == code
    assert response.json().keys() == {"error"}
    assert message in response.json()["error"]


def test_auto_is_refused_if_several_source_languages_are_possible() -> None:
    models = {
        "one": translator_with([("de", "en"), ("nl", "en")]),
        "two": translator_with([("fr", "en"), ("en", "de")]),
    }
    with served(models) as live:
        response = live.translate(source="auto")
        assert (response.status_code, "de, nl, fr" in response.json()["error"]) == (400, True)
        for source in ("de", "nl", "fr"):
            assert live.translate(source=source).json() == {"translatedText": "That's good."}
        assert "detectedLanguage" in live.translate(source="auto", target="de").json()
        targets = {language["code"]: language["targets"] for language in httpx.get(f"{live.url}/languages").json()}
        assert targets == {"de": ["en"], "en": ["de"], "fr": ["en"], "nl": ["en"]}
    with pytest.raises(ConfigError, match=r"one and two both translate de-en: keep one"):
        Service({"one": translator_with(), "two": translator_with()}, Limits())
    with pytest.raises(ConfigError, match="does not name its languages"):
        Service({"one": translator_with([])}, Limits())


def test_the_openapi_document_has_every_route(live: Live) -> None:
    document = httpx.get(f"{live.url}/openapi.json").json()
    paths = {"/translate", "/languages", "/health", "/ready", "/metrics", "/explain", "/inspect", "/embed", "/limits"}
    assert document["paths"].keys() == paths


FIELDS = {"q": "Das ist gut.", "source": "de", "target": "en"}
REQUESTS: list[dict[str, Any]] = [
    *(
        {"json": FIELDS | changes}
        for changes in ({}, {"q": ["Ja.", "", "Nein."]}, {"alternatives": 2}, {"source": "auto"}, {"q": " a\nb\r\n"})
    ),
    *({"json": FIELDS | changes} for changes in ({"q": 5}, {"target": "fr"}, {"beam": 9}, {"format": "html"})),
    {"data": FIELDS},
    {"files": {name: (None, value) for name, value in FIELDS.items()}},
    {"content": b"{", "headers": JSON},
    {"content": b"x", "headers": {"content-type": "text/plain"}},
    {"content": b""},
    {"json": FIELDS | {"q": "a" * 6000}},
    {"json": FIELDS | {"q": "a" * 200_000}},
    {"json": FIELDS, "headers": {"authorization": ""}},
    {"json": FIELDS, "headers": {"authorization": "Bearer wrong"}},
    {"json": FIELDS, "headers": {"origin": "https://other.example"}},
    {"json": FIELDS, "headers": {"host": "other.example"}},
    {"json": FIELDS, "params": {"x": "1"}},
    {"json": FIELDS, "path": "/translate/"},
    {"json": FIELDS, "method": "PUT"},
    {"method": "GET"},
]


def send(live: Live, request: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
    """Return the status code, the JSON and the headers of the response."""
    options = {"method": "POST", "path": "/translate", "headers": {}, **request}
    headers = {"authorization": f"Bearer {TOKEN}", **options.pop("headers")}
    response = httpx.request(options.pop("method"), live.url + options.pop("path"), headers=headers, **options)
    # The length depends on the spaces in the JSON.
    others = {name: text for name, text in response.headers.items() if name not in ("date", "content-length")}
    return response.status_code, response.json(), others


def test_direct_routes_and_fastapi_give_the_same_responses_and_log_entries() -> None:
    responses, logs = [], []
    for with_direct_routes in (True, False):
        translator, gate = gated()
        access = Access(TOKEN)
        with served(translator, access=access, n_workers=1, with_direct_routes=with_direct_routes) as live:
            received = [send(live, request) for request in REQUESTS]
            live.service.is_warm = False
            received.append(send(live, {"json": FIELDS}))
            live.service.is_warm = True
            stepper, gate.stepper = gate.stepper, None  # type: ignore[assignment]
            received.append(send(live, {"json": FIELDS}))
            gate.stepper = stepper
            n_requests = len(received)
            wait_until(lambda live=live, n_requests=n_requests: len(live.log) == n_requests)
            responses.append(received)
            logs.append([{name: entry[name] for name in entry if name != "seconds"} for entry in live.log])
    for by_direct_route, by_fastapi, request in zip(
        *responses, [*REQUESTS, "before the warm-up", "with a failing search"], strict=True
    ):
        assert by_direct_route == by_fastapi, request
    assert logs[0] == logs[1]
    codes = {code for code, _, _ in responses[0]}
    assert codes == {200, 400, 401, 403, 404, 405, 413, 415, 422, 500, 503}


def test_only_direct_routes_bypass_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI

    calls: list[str] = []
    call = FastAPI.__call__

    async def record(self: FastAPI, scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])
        await call(self, scope, receive, send)

    monkeypatch.setattr(FastAPI, "__call__", record)
    for with_direct_routes, expected in ((True, ["/languages"]), (False, ["/translate", "/languages"])):
        calls.clear()
        with served(with_direct_routes=with_direct_routes) as live:
            assert live.translate().status_code == 200
            assert httpx.get(f"{live.url}/languages").status_code == 200
        assert calls == expected


# The engine


def test_health_names_the_engine_of_each_direction_and_its_reason() -> None:
    native = translator_with([("de", "en"), ("nl", "en")])
    fallback = translator_with([("en", "de")])
    reason = "the compiler failed: /home/user/cache: no space"
    fallback.__dict__["engine"] = Engine("cached", "float32", reason, is_fallback=True)
    engine = native.engine
    expected = [
        {
            "source": source,
            "target": target,
            "engine": name,
            "precision": "float32",
            "is_fallback": is_fallback,
            "reason": text,
        }
        for source, target, name, is_fallback, text in (
            ("de", "en", engine.name, engine.is_fallback, engine.reason),
            ("nl", "en", engine.name, engine.is_fallback, engine.reason),
            ("en", "de", "cached", True, reason),
        )
    ]
    without_reasons = [{name: one[name] for name in one if name != "reason"} for one in expected]
    models = {"native": native, "fallback": fallback}
    with served(models) as live:
        assert httpx.get(f"{live.url}/health").json() == {"status": "ok", "engines": expected}
    with served(models, access=Access(TOKEN)) as live:
        for token, engines in ((TOKEN, expected), ("wrong", without_reasons), (None, without_reasons)):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            response = httpx.get(f"{live.url}/health", headers=headers)
            assert (response.status_code, response.json()) == (200, {"status": "ok", "engines": engines})


def test_the_start_up_lines_name_the_engine_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    models = {"one": translator_with([("de", "en"), ("nl", "en")]), "two": translator_with([("en", "de")])}
    models["two"].__dict__["engine"] = Engine("cached", "float32", "no compiler: not found", is_fallback=True)
    report_engines(Service(models, Limits()))
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"engine for de-en, nl-en: {models['one'].engine}"
    assert models["one"].engine.reason in first
    assert second == f"engine for en-de: cached ({DESCRIPTIONS['cached']}), float32: no compiler: not found"


def test_the_command_prints_the_engine_once_before_it_serves() -> None:
    command = [sys.executable, "-m", "transduce", "serve", "--port", "0", "--device", "cpu", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("serving at "):
            lines.append(process.stderr.readline())
            assert lines[-1], "the server did not start"
        process.terminate()
    engine = Translator.load(device="cpu").engine
    assert [line for line in lines if "engine" in line] == [f"engine for de-en: {engine}\n"]
    assert lines[-2] == f"engine for de-en: {engine}\n"


# Structure


def test_the_modules_of_serving_form_no_import_cycle() -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    paths = {f"transduce.serving.{path.stem}": path for path in Path(serving.__path__[0]).glob("*.py")}
    imports_of = {module: imported_modules(path) & (paths.keys() - {module}) for module, path in paths.items()}
    assert "transduce.serving.schema" in imports_of["transduce.serving.details"]
    assert "transduce.serving.application" not in imports_of["transduce.serving.details"]
    modules = [*TopologicalSorter(imports_of).static_order()]  # raises CycleError if there is a cycle
    assert sorted(modules) == sorted(paths)


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


# Limits

WORDS = "eins zwei drei vier fünf sechs sieben acht neun zehn"


@pytest.mark.parametrize(
    ("limit", "below", "above", "code"),
    [
        ({"characters": 20}, {"q": ["a" * 10, "b" * 10]}, {"q": ["a" * 10, "b" * 11]}, 413),
        ({"texts": 3}, {"q": ["a"] * 3}, {"q": ["a"] * 4}, 413),
        ({"sentences": 3}, {"q": "a\nb\nc"}, {"q": ["a\nb", "c\nd"]}, 413),
        ({"alternatives": 2}, {"alternatives": 2}, {"alternatives": 3}, 422),
        ({"beam": 5}, {"beam": 5}, {"beam": 6}, 422),
        ({"queue": 3, "client_queue": 9}, {"q": "a\nb\nc"}, {"q": "a\nb\nc\nd"}, 503),
        ({"queue": 9, "client_queue": 4}, {"q": "a\nb\nc\nd"}, {"q": "a\nb\nc\nd\ne"}, 429),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_limit_is_exact(limit: dict[str, Any], below: Any, above: Any, code: int) -> None:
    with served(n_workers=1, **limit) as live:
        assert live.translate(**below).status_code == 200
        refused = live.translate(**above)
        assert refused.status_code == code, refused.text
        assert ("retry-after" in refused.headers) == (code in (429, 503))
        assert live.translate(**below).status_code == 200


def test_the_limits_of_tokens_are_exact() -> None:
    translator = translator_with()
    n = sum(len(ids) for ids in translator.prepare(WORDS, [], []).ids)
    accents = "a" + "\u0301" * 30
    (longest,) = translator.prepare(accents, [], []).ids
    assert len(longest) > 40, "the text is too short to exceed the length at which lines are split"
    for n_too_many, code in ((0, 200), (1, 413)):
        with served(translator, tokens=n - n_too_many, n_workers=1) as live:
            assert live.translate(WORDS).status_code == code
        with served(translator, sentence_tokens=len(longest) - n_too_many, n_workers=1) as live:
            assert live.translate(accents).status_code == code


def test_the_limit_of_the_bytes_of_a_body_is_exact(live: Live) -> None:
    limit = live.service.limits.body_bytes
    start = b'{"q":"Ja.","source":"de","target":"en"'
    for n, code in ((limit, 200), (limit + 1, 413), (9 * limit, 413)):
        body = start + b" " * (n - len(start) - 1) + b"}"
        for content in (body, iter([body[:5], body[5:]])):  # with Content-Length, and in chunks
            response = httpx.post(f"{live.url}/translate", content=content, headers=JSON)
            assert response.status_code == code


def test_the_rate_of_each_client_is_limited() -> None:
    now = 0.0
    rate = RateLimit(2.0, 3, lambda: now)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(Refusal) as refusal:
        rate.take("a")
    assert (refusal.value.code, refusal.value.headers) == (429, {"retry-after": "1"})
    rate.take("b")
    now = 0.5
    rate.take("a")
    with pytest.raises(Refusal):
        rate.take("a")
    now = 100
    for _ in range(3):
        rate.take("a")
    with served(client_rate=0.1, client_burst=2) as live:
        codes = [live.translate("").status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert httpx.get(f"{live.url}/health").status_code == 200, "probes are not counted"


def test_the_header_of_a_proxy_is_used_only_if_the_proxy_is_trusted() -> None:
    for proxies, codes in (((), [200, 429, 429]), (("127.0.0.1",), [200, 200, 429])):
        with served(client_rate=0.01, client_burst=1, proxies=proxies) as live:
            received = [
                httpx.get(f"{live.url}/languages", headers={"x-forwarded-for": address}).status_code
                for address in ("9.9.9.1", "9.9.9.2", "6.6.6.6, 9.9.9.2")
            ]
            assert received == codes


def test_every_limit_can_be_changed_and_none_can_be_removed() -> None:
    for field in fields(Limits):
        assert getattr(Limits().changed([f"{field.name}=7"]), field.name) == 7
        for value in ("0", "-1"):
            with pytest.raises(ConfigError, match=field.name):
                Limits().changed([f"{field.name}={value}"])
    for setting, message in (
        ("beams=3", "did you mean beam"),
        ("beam", "name=value"),
        ("beam=x", "a whole number"),
        ("beam=4", "below limit beam"),
        ("body_seconds=inf", "finite"),
        ("body_seconds=nan", "finite"),
    ):
        with pytest.raises(ConfigError, match=message):
            Limits().changed([setting])


# Access


def test_every_route_except_probes_and_pages_needs_the_token() -> None:
    with served(access=Access(TOKEN)) as live:
        paths = httpx.get(f"{live.url}/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).json()["paths"]
        for path in [*paths, "/openapi.json", "/nothing"]:
            method = "POST" if "post" in paths.get(path, {}) else "GET"
            response = httpx.request(method, live.url + path)
            assert response.status_code == (200 if path in OPEN else 401), path
            assert ("www-authenticate" in response.headers) == (path not in OPEN)
        assert live.translate().status_code == 401
        assert live.translate(api_key=TOKEN).status_code == 200
        for wrong in (TOKEN[:-1], TOKEN + "x", "", "\u00e4"):
            assert live.translate(api_key=wrong).status_code == 403
        assert live.translate(api_key=5).status_code == 401
        for header, code in ((f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), ("Bearer x", 403), ("Basic x", 401)):
            fields = {"q": "Ja.", "source": "de", "target": "en"}
            response = httpx.post(f"{live.url}/translate", json=fields, headers={"authorization": header})
            assert response.status_code == code, header


def test_an_address_other_than_loopback_requires_a_token(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_address(host, None, without_token=False)
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="--token-file"):
            check_address(host, None, without_token=False)
        check_address(host, TOKEN, without_token=False)
        check_address(host, None, without_token=True)
    done = transduce("serve", "--host", "0.0.0.0", "--port", "0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--token-file" in done.stderr
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    (tmp_path / "token").write_text("short\n")
    for path in ("token", "nothing"):
        with pytest.raises(ConfigError):
            read_token(tmp_path / path)


def test_a_missing_package_is_reported_in_one_line() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['serve']; from transduce.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"transduce: transduce serve needs the package uvicorn: .*pip install .+\n", done.stderr)


def test_a_port_in_use_is_reported_in_one_line(live: Live) -> None:
    done = transduce("serve", "--port", str(live.port))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "choose another with --port" in done.stderr


def test_other_hosts_and_origins_are_refused() -> None:
    access = Access(hosts=("mine.example",), origins=("https://page.example",))
    with served(access=access) as live:

        def get(**headers: str) -> httpx.Response:
            return httpx.get(f"{live.url}/languages", headers=headers)

        for host, code in (
            ("localhost:1", 200),
            ("127.0.0.1", 200),
            ("[::1]:5", 200),
            ("mine.example", 200),
            ("evil.example", 400),
            ("[::1", 400),
            ("", 400),
        ):
            assert get(host=host).status_code == code, host
        for origin in ("https://evil.example", "null", "http://[", "https://page.example.evil"):
            assert get(origin=origin).status_code == 403
            assert "access-control-allow-origin" not in get(origin=origin).headers
        assert get(origin=live.url).status_code == 200, "a page of this server"
        allowed = get(origin="https://page.example")
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        preflight = {"origin": "https://page.example", "access-control-request-method": "POST"}
        assert httpx.options(f"{live.url}/translate", headers=preflight).status_code == 200
    with served() as live:
        assert "access-control-allow-origin" not in httpx.get(f"{live.url}/languages").headers


def test_responses_have_the_security_headers(live: Live) -> None:
    others = [httpx.get(f"{live.url}/{path}") for path in ("nothing", "health")]
    for response in (live.translate(), live.translate(q=None), *others):
        headers = {name: response.headers[name.decode()].encode() for name in SECURITY_HEADERS}
        assert headers == SECURITY_HEADERS


def test_the_log_has_no_text_without_log_text() -> None:
    for log_text in (False, True):
        with served(log_text=log_text) as live:
            live.translate("Ich bin müde.")
            httpx.get(f"{live.url}/ein/Geheimnis?q=Geheimnis")
            wait_until(lambda: len(live.log) == 2)
            assert ("müde" in str(live.log), "tired" in str(live.log)) == (log_text, log_text)
            assert "Geheimnis" not in str(live.log)
            assert (live.log[0]["code"], live.log[0]["characters"], live.log[1]["path"]) == (200, 13, "other")


def test_metrics_count_requests_sentences_and_tokens(live: Live) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{live.url}/metrics").text.splitlines()
        for line in lines:
            assert re.fullmatch(r'# (HELP|TYPE) transduce_\w+ .+|transduce_\w+(\{[\w="/.,+]+\})? [\d.]+', line), line
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = read()
    live.translate(["Das ist gut.", "Ja."])
    live.translate(q=None)
    after = read()

    def grew(name: str) -> float:
        return after[f"transduce_{name}"] - before.get(f"transduce_{name}", 0)

    assert grew('requests_total{path="/translate",code="200"}') == 1
    assert grew('requests_total{path="/translate",code="400"}') == 1
    assert grew("sentences_total") == 2
    assert grew("source_tokens_total") > grew("target_tokens_total") / 3 > 0
    assert grew('request_seconds_bucket{le="+Inf"}') == grew("request_seconds_count") == 3
    assert grew('batch_fill_bucket{le="+Inf"}') == grew("turns_total") > 0
    assert after["transduce_queue_sentences"] == after["transduce_running_sentences"] == 0


# Requests that are translated together


def test_the_body_of_a_response_is_sent_at_once(live: Live) -> None:
    """Headers and body are sent separately. Without TCP_NODELAY the body is sent 40 ms after the headers."""
    seconds = []
    with httpx.Client() as session:
        for _ in range(31):
            began = time.perf_counter()
            session.get(f"{live.url}/languages")
            seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.035


def test_64_clients_each_get_the_translation_that_one_client_gets(live: Live) -> None:
    texts = heldout()[0][:192]
    translator = Translator.load(device="cpu")
    alone, wide = translator.translate(texts), replace(translator.settings, n_best=3)

    def client(place: int) -> list[tuple[int, httpx.Response]]:
        with httpx.Client(timeout=120) as session:
            return [
                (
                    i,
                    session.post(
                        f"{live.url}/translate",
                        json={"q": texts[i], "source": "de", "target": "en", "alternatives": 2 * (i % 5 == 0)},
                    ),
                )
                for i in range(place, len(texts), 64)
            ]

    with ThreadPoolExecutor(64) as clients:
        responses = dict(pair for pairs in clients.map(client, range(64)) for pair in pairs)
    assert {response.status_code for response in responses.values()} == {200}
    # A search for alternatives is longer and can find a better translation, so the comparison uses the same settings.
    with_alternatives = Translator.load(device="cpu", settings=wide).translate(texts[::5])
    expected = dict(enumerate(alone)) | dict(zip(range(0, len(texts), 5), with_alternatives, strict=True))
    for i, response in responses.items():
        assert response.json()["translatedText"] == expected[i].text or "close" in expected[i].flags, texts[i]
        if i % 5 == 0:
            alternatives = [other.text for other in expected[i].alternatives[1:]]
            assert response.json()["alternatives"] == alternatives or "close" in expected[i].flags
    fill = live.service.metrics.fill
    assert fill.total / sum(fill.counts) * 64 > 3, "the requests did not share searches"


def test_the_request_of_a_client_that_disconnects_is_cancelled_and_others_continue() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live, ThreadPoolExecutor(1) as other:
        gate.is_open.clear()
        request = other.submit(live.translate, "Ich bin müde.")
        wait_until(lambda: live.service.batcher.n_running == 1)
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            body = b'{"q": ["Das ist gut.", "Ja.", "Nein."], "source": "de", "target": "en"}'
            head = "POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: live.service.n_accepted == 2 and live.service.batcher.n_sentences_of.total() == 4)
        wait_until(lambda: live.service.n_accepted == 1)
        gate.is_open.set()
        assert request.result().json() == {"translatedText": "I'm tired."}
        wait_until(lambda: live.service.batcher.n_sentences_of.total() == 0)
        assert live.service.metrics.n_cancelled == 3
        assert live.log[0]["code"] == 499


def test_a_request_that_takes_too_long_is_refused_and_cancelled() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1, request_seconds=0.3) as live:
        gate.is_open.clear()
        late = live.translate(["Das ist gut.", "Ja."])
        assert (late.status_code, late.headers["retry-after"]) == (503, "2")
        n_steps = gate.n_steps
        gate.is_open.set()
        wait_until(lambda: live.service.batcher.n_sentences_of.total() == 0)
        wait_until(lambda: live.service.batcher.workers[0].group is None)
        assert live.service.metrics.n_cancelled == 2
        assert "transduce_cancelled_sentences_total 2\n" in httpx.get(f"{live.url}/metrics").text
        assert gate.n_steps - n_steps < 3, "the search continues for cancelled sentences"
        assert live.translate().status_code == 200


def test_a_search_that_fails_gives_an_error_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live:
        with monkeypatch.context() as broken:
            broken.setattr(gate, "stepper", None)
            response = live.translate("Geheimnis")
            assert (response.status_code, response.json()) == (500, {"error": FAILURE})
        assert live.translate().status_code == 200
        assert re.fullmatch(r"AttributeError at serving.py:\d+", live.log[0]["error"])


def test_after_sigterm_accepted_requests_are_answered_and_new_ones_refused() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live, ThreadPoolExecutor(1) as other:
        assert httpx.get(f"{live.url}/ready").json() == {"status": "ready"}
        gate.is_open.clear()
        accepted = other.submit(live.translate)
        wait_until(lambda: live.service.batcher.n_running == 1)
        live.server.handle_exit(15, None)
        refused = live.translate()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert httpx.get(f"{live.url}/ready").status_code == 503
        assert httpx.get(f"{live.url}/health").status_code == 200
        gate.is_open.set()
        assert accepted.result().json() == {"translatedText": "That's good."}
        live.thread.join(10)
        assert not live.thread.is_alive()


def test_after_sigterm_the_wait_for_accepted_requests_is_limited() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1, drain_seconds=0.3) as live, ThreadPoolExecutor(1) as other:
        gate.is_open.clear()
        accepted = other.submit(live.translate)
        wait_until(lambda: live.service.batcher.n_running == 1)
        began = time.monotonic()
        live.server.handle_exit(15, None)
        assert accepted.result().status_code == 503
        live.thread.join(10)
        assert time.monotonic() - began < 5
        gate.is_open.set()


def test_the_server_is_not_ready_before_the_warm_up_has_ended() -> None:
    translator, gate = gated()
    gate.is_open.clear()
    opener = threading.Timer(1.0, gate.is_open.set)
    service = Service({"model": translator}, Limits())
    opener.start()
    warming = threading.Thread(target=service.start)
    warming.start()
    wait_until(lambda: service.batcher.n_running > 0)
    assert not service.is_warm
    warming.join()
    assert service.is_warm
    with served(translator, n_workers=1) as live:
        live.service.is_warm = False
        for response in (live.translate(), httpx.get(f"{live.url}/ready")):
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    service.batcher.close()
    service.batcher.join()
