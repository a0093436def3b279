"""The server: what clients of LibreTranslate expect, every limit at its bound, and nobody gets another's text."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import httpx
import pytest
from libretranslatepy import LibreTranslateAPI

from tests.support.bundled import heldout, transduce
from tests.support.serving import TOKEN, Live, bundled, gated, served
from transduce import ConfigError, Translator
from transduce.serving.guard import OPEN, SECURITY, Access
from transduce.serving.limits import Limits, Rate, Refusal
from transduce.serving.server import check_address, read_token
from transduce.serving.service import Service


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served() as found:
        yield found


def until(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


# As LibreTranslate


@pytest.mark.parametrize("token", [None, TOKEN], ids=["open", "with a token"])
def test_libretranslates_own_client_works(token: str | None) -> None:
    with served(access=Access(token)) as live:
        client = LibreTranslateAPI(live.url, token)
        assert client.translate("Das ist gut.", "de", "en") == "That's good."
        assert client.translate("Ich bin müde.", "auto", "en") == "I'm tired."
        german, english = client.languages()
        assert german == {"code": "de", "name": "German", "targets": ["en"]}
        assert english["code"] == "en"


def test_a_text_is_answered_by_a_text_and_a_list_by_lists(live: Live) -> None:
    assert live.ask().json() == {"translatedText": "That's good."}
    assert live.ask(["Das ist gut.", "", "Ich bin müde."]).json() == {
        "translatedText": ["That's good.", "", "I'm tired."]
    }
    assert live.ask([]).json() == {"translatedText": []}
    one, several = live.ask(alternatives=2).json(), live.ask(["Das ist gut.", " "], alternatives=2).json()
    assert one["alternatives"] == several["alternatives"][0]
    assert len({one["translatedText"], *one["alternatives"]}) == 3
    assert live.ask(source="auto").json()["detectedLanguage"] == {"confidence": 0, "language": "de"}


def test_lines_stay_lines(live: Live) -> None:
    assert live.ask(" Das ist gut.\r\n\r\nIch bin müde.\n").json() == {
        "translatedText": " That's good.\r\n\r\nI'm tired.\n"
    }


def test_json_forms_and_parts_say_the_same(live: Live) -> None:
    asked = {"q": "Wo ist mein Buch?", "source": "de", "target": "en", "alternatives": "1"}
    answers = [
        httpx.post(f"{live.url}/translate", **how).json()
        for how in ({"json": asked}, {"data": asked}, {"files": {name: (None, v) for name, v in asked.items()}})
    ]
    assert answers[0]["translatedText"] == "Where's my book?"
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("changes", "code", "told"),
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
        ({"format": "html"}, 400, "html is not translated"),
        ({"format": 1}, 400, "format"),
        ({"alternatives": "many"}, 422, "alternatives must be"),
        ({"alternatives": True}, 422, "alternatives must be"),
        ({"alternatives": -1}, 422, "alternatives must be"),
        ({"alternatives": 3, "beam": 3}, 422, "above alternatives"),
        ({"beam": 0}, 422, "beam must be"),
    ],
)
def test_what_cannot_be_is_told(live: Live, changes: dict[str, Any], code: int, told: str) -> None:
    answer = live.ask(**changes)
    assert answer.status_code == code
    assert answer.json().keys() == {"error"}
    assert told in answer.json()["error"]


def test_auto_is_refused_where_there_is_a_choice() -> None:
    models = {"one": bundled([("de", "en"), ("nl", "en")]), "two": bundled([("fr", "en"), ("en", "de")])}
    with served(models) as live:
        answer = live.ask(source="auto")
        assert (answer.status_code, "de, nl, fr" in answer.json()["error"]) == (400, True)
        for source in ("de", "nl", "fr"):
            assert live.ask(source=source).json() == {"translatedText": "That's good."}
        assert "detectedLanguage" in live.ask(source="auto", target="de").json()
        targets = {each["code"]: each["targets"] for each in httpx.get(f"{live.url}/languages").json()}
        assert targets == {"de": ["en"], "en": ["de"], "fr": ["en"], "nl": ["en"]}
    with pytest.raises(ConfigError, match=r"one and two both translate de-en: keep one"):
        Service({"one": bundled(), "two": bundled()}, Limits())
    with pytest.raises(ConfigError, match="does not say between which languages"):
        Service({"one": bundled([])}, Limits())


def test_the_openapi_document_has_every_route(live: Live) -> None:
    found = httpx.get(f"{live.url}/openapi.json").json()
    known = {"/translate", "/languages", "/health", "/ready", "/metrics", "/explain", "/inspect", "/embed", "/limits"}
    assert found["paths"].keys() == known


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
def test_a_limit_is_kept_at_its_bound(limit: dict[str, Any], below: Any, above: Any, code: int) -> None:
    with served(n_workers=1, **limit) as live:
        assert live.ask(**below).status_code == 200
        refused = live.ask(**above)
        assert refused.status_code == code, refused.text
        assert ("retry-after" in refused.headers) == (code in (429, 503))
        assert live.ask(**below).status_code == 200


def test_the_limits_of_tokens_are_kept_at_their_bounds() -> None:
    translator = bundled()
    n = sum(len(ids) for ids in translator.prepare(WORDS, [], []).ids)
    accents = "a" + "\u0301" * 30
    (longest,) = translator.prepare(accents, [], []).ids
    assert len(longest) > 40, "it is longer than what is split"
    for spare, code in ((0, 200), (1, 413)):
        with served(translator, tokens=n - spare, n_workers=1) as live:
            assert live.ask(WORDS).status_code == code
        with served(translator, sentence_tokens=len(longest) - spare, n_workers=1) as live:
            assert live.ask(accents).status_code == code


def test_the_limit_of_bytes_is_kept_at_its_bound(live: Live) -> None:
    most = live.service.limits.body_bytes
    start = b'{"q":"Ja.","source":"de","target":"en"'
    for n, code in ((most, 200), (most + 1, 413), (9 * most, 413)):
        body = start + b" " * (n - len(start) - 1) + b"}"
        for sent in (body, iter([body[:5], body[5:]])):  # with its length told, and in chunks
            answer = httpx.post(f"{live.url}/translate", content=sent, headers={"content-type": "application/json"})
            assert answer.status_code == code


def test_a_client_may_come_so_often_and_no_oftener() -> None:
    now = 0.0
    rate = Rate(2.0, 3, lambda: now)
    for _ in range(3):
        rate.take("a")
    with pytest.raises(Refusal) as told:
        rate.take("a")
    assert (told.value.code, told.value.headers) == (429, {"retry-after": "1"})
    rate.take("b")
    now = 0.5
    rate.take("a")
    with pytest.raises(Refusal):
        rate.take("a")
    now = 100
    for _ in range(3):
        rate.take("a")
    with served(client_rate=0.1, client_burst=2) as live:
        codes = [live.ask("").status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        assert httpx.get(f"{live.url}/health").status_code == 200, "probes are not counted"


def test_proxies_are_believed_only_if_told() -> None:
    for proxies, codes in (((), [200, 429, 429]), (("127.0.0.1",), [200, 200, 429])):
        with served(client_rate=0.01, client_burst=1, proxies=proxies) as live:
            found = [
                httpx.get(f"{live.url}/languages", headers={"x-forwarded-for": address}).status_code
                for address in ("9.9.9.1", "9.9.9.2", "6.6.6.6, 9.9.9.2")
            ]
            assert found == codes


def test_every_limit_can_be_changed_and_none_can_be_lifted() -> None:
    for field in fields(Limits):
        assert getattr(Limits().changed([f"{field.name}=7"]), field.name) == 7
        for value in ("0", "-1"):
            with pytest.raises(ConfigError, match=field.name):
                Limits().changed([f"{field.name}={value}"])
    for setting, told in (
        ("beams=3", "did you mean beam"),
        ("beam", "name=value"),
        ("beam=x", "a whole number"),
        ("beam=4", "below limit beam"),
        ("body_seconds=inf", "finite"),
        ("body_seconds=nan", "finite"),
    ):
        with pytest.raises(ConfigError, match=told):
            Limits().changed([setting])


# Who may ask


def test_every_route_but_probes_needs_the_token() -> None:
    with served(access=Access(TOKEN)) as live:
        paths = httpx.get(f"{live.url}/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}).json()["paths"]
        for path in [*paths, "/openapi.json", "/nothing"]:
            method = "POST" if "post" in paths.get(path, {}) else "GET"
            answer = httpx.request(method, live.url + path)
            assert answer.status_code == (200 if path in OPEN else 401), path
            assert ("www-authenticate" in answer.headers) == (path not in OPEN)
        assert live.ask().status_code == 401
        assert live.ask(api_key=TOKEN).status_code == 200
        for wrong in (TOKEN[:-1], TOKEN + "x", "", "\u00e4"):
            assert live.ask(api_key=wrong).status_code == 403
        assert live.ask(api_key=5).status_code == 401
        for header, code in ((f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), ("Bearer x", 403), ("Basic x", 401)):
            asked = {"q": "Ja.", "source": "de", "target": "en"}
            answer = httpx.post(f"{live.url}/translate", json=asked, headers={"authorization": header})
            assert answer.status_code == code, header


def test_another_address_than_loopback_wants_a_token(tmp_path: Path) -> None:
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


def test_what_is_not_installed_is_one_line() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv[1:] = ['serve']; from transduce.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "transduce: uvicorn is not installed: pip install 'transduce[serve]'\n",
    )


def test_a_port_that_is_taken_is_one_line(live: Live) -> None:
    done = transduce("serve", "--port", str(live.port))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "choose another by --port" in done.stderr


def test_names_and_origins_of_others_are_refused() -> None:
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
        assert get(origin=live.url).status_code == 200, "a page of ours"
        allowed = get(origin="https://page.example")
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        asking = {"origin": "https://page.example", "access-control-request-method": "POST"}
        assert httpx.options(f"{live.url}/translate", headers=asking).status_code == 200
    with served() as live:
        assert "access-control-allow-origin" not in httpx.get(f"{live.url}/languages").headers


def test_answers_have_the_headers_that_keep_browsers_safe(live: Live) -> None:
    for answer in (live.ask(), live.ask(q=None), httpx.get(f"{live.url}/nothing"), httpx.get(f"{live.url}/health")):
        assert {name: answer.headers[name.decode()].encode() for name in SECURITY} == SECURITY


def test_the_log_has_no_text_unless_told() -> None:
    for log_text in (False, True):
        with served(log_text=log_text) as live:
            live.ask("Ich bin müde.")
            httpx.get(f"{live.url}/ein/Geheimnis?q=Geheimnis")
            until(lambda: len(live.log) == 2)
            assert ("müde" in str(live.log), "tired" in str(live.log)) == (log_text, log_text)
            assert "Geheimnis" not in str(live.log)
            assert (live.log[0]["code"], live.log[0]["characters"], live.log[1]["path"]) == (200, 13, "other")


def test_metrics_count(live: Live) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{live.url}/metrics").text.splitlines()
        for line in lines:
            assert re.fullmatch(r'# (HELP|TYPE) transduce_\w+ .+|transduce_\w+(\{[\w="/.,+]+\})? [\d.]+', line), line
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    before = read()
    live.ask(["Das ist gut.", "Ja."])
    live.ask(q=None)
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


# Side by side


def test_an_answer_does_not_wait_for_the_network(live: Live) -> None:
    """Headers and body are sent apart. Held back until the first have been confirmed, the second comes 40 ms later."""
    seconds = []
    with httpx.Client() as session:
        for _ in range(31):
            began = time.perf_counter()
            session.get(f"{live.url}/languages")
            seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.035


def test_64_clients_each_get_what_they_would_get_alone(live: Live) -> None:
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
        answers = dict(pair for some in clients.map(client, range(64)) for pair in some)
    assert {answer.status_code for answer in answers.values()} == {200}
    # With alternatives a search goes on for longer and may find a better one: those are held to their own kind.
    own = Translator.load(device="cpu", settings=wide).translate(texts[::5])
    expected = dict(enumerate(alone)) | dict(zip(range(0, len(texts), 5), own, strict=True))
    for i, answer in answers.items():
        assert answer.json()["translatedText"] == expected[i].text or "close" in expected[i].flags, texts[i]
        if i % 5 == 0:
            others = [other.text for other in expected[i].alternatives[1:]]
            assert answer.json()["alternatives"] == others or "close" in expected[i].flags
    share = live.service.metrics.fill
    assert share.total / sum(share.counts) * 64 > 3, "they were side by side"


def test_who_leaves_is_left_out_and_others_are_answered() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live, ThreadPoolExecutor(1) as other:
        gate.is_open.clear()
        stays = other.submit(live.ask, "Ich bin müde.")
        until(lambda: live.service.batcher.n_running == 1)
        with socket.create_connection(("127.0.0.1", live.port)) as leaves:
            body = b'{"q": ["Das ist gut.", "Ja.", "Nein."], "source": "de", "target": "en"}'
            head = "POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            leaves.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: live.service.n_accepted == 2 and live.service.batcher.held.total() == 4)
        until(lambda: live.service.n_accepted == 1)
        gate.is_open.set()
        assert stays.result().json() == {"translatedText": "I'm tired."}
        until(lambda: live.service.batcher.held.total() == 0)
        assert live.service.metrics.withdrawn == 3
        assert live.log[0]["code"] == 499


def test_what_takes_too_long_is_told_and_leaves() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1, request_seconds=0.3) as live:
        gate.is_open.clear()
        late = live.ask(["Das ist gut.", "Ja."])
        assert (late.status_code, late.headers["retry-after"]) == (503, "2")
        n_steps = gate.steps
        gate.is_open.set()
        until(lambda: live.service.batcher.held.total() == 0)
        until(lambda: live.service.batcher.workers[0].kind is None)
        assert live.service.metrics.withdrawn == 2
        assert gate.steps - n_steps < 3, "nobody goes on for them"
        assert live.ask().status_code == 200


def test_a_search_that_fails_is_told_and_the_next_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live:
        with monkeypatch.context() as broken:
            broken.setattr(gate, "stepper", None)
            answer = live.ask("Geheimnis")
            assert (answer.status_code, answer.json()) == (500, {"error": "something went wrong here"})
        assert live.ask().status_code == 200
        assert re.fullmatch(r"AttributeError at serving.py:\d+", live.log[0]["error"])


def test_after_sigterm_what_was_accepted_is_answered_and_the_rest_refused() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1) as live, ThreadPoolExecutor(1) as other:
        assert httpx.get(f"{live.url}/ready").json() == {"status": "ready"}
        gate.is_open.clear()
        accepted = other.submit(live.ask)
        until(lambda: live.service.batcher.n_running == 1)
        live.server.handle_exit(15, None)
        refused = live.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert httpx.get(f"{live.url}/ready").status_code == 503
        assert httpx.get(f"{live.url}/health").status_code == 200
        gate.is_open.set()
        assert accepted.result().json() == {"translatedText": "That's good."}
        live.thread.join(10)
        assert not live.thread.is_alive()


def test_after_sigterm_nothing_is_waited_for_longer_than_allowed() -> None:
    translator, gate = gated()
    with served(translator, n_workers=1, drain_seconds=0.3) as live, ThreadPoolExecutor(1) as other:
        gate.is_open.clear()
        accepted = other.submit(live.ask)
        until(lambda: live.service.batcher.n_running == 1)
        began = time.monotonic()
        live.server.handle_exit(15, None)
        assert accepted.result().status_code == 503
        live.thread.join(10)
        assert time.monotonic() - began < 5
        gate.is_open.set()


def test_not_ready_before_it_is_warm() -> None:
    translator, gate = gated()
    gate.is_open.clear()
    opener = threading.Timer(1.0, gate.is_open.set)
    service = Service({"model": translator}, Limits())
    opener.start()
    warming = threading.Thread(target=service.start)
    warming.start()
    until(lambda: service.batcher.n_running > 0)
    assert not service.is_warm
    warming.join()
    assert service.is_warm
    with served(translator, n_workers=1) as live:
        live.service.is_warm = False
        for answer in (live.ask(), httpx.get(f"{live.url}/ready")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    service.batcher.close()
    service.batcher.join()
