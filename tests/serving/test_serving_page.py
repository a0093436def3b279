"""The page of the server, and what it asks for: details of a translation, another word forced, a look inside."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.serving import SENTENCE, TOKEN, Live, served
from transduce import Translator
from transduce.insight.attention import from_document, inspect
from transduce.insight.embed import embed
from transduce.serving.guard import Access
from transduce.serving.limits import Limits
from transduce.serving.manual import manual
from transduce.serving.page import FILES, POLICY


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


@pytest.fixture(scope="module")
def live(translator: Translator) -> Iterator[Live]:
    with served(translator) as found:
        yield found


# Details


def test_details_are_those_of_the_library(live: Live, translator: Translator) -> None:
    texts = [SENTENCE, "", "Ich bin müde."]
    wanted = translator.translate(texts, with_details=True)
    assert live.post("/explain", []).json() == {"lines": []}
    lines = live.post("/explain", texts).json()["lines"]
    assert len(lines) == 3
    for line, one in zip(lines, wanted, strict=True):
        assert (line["translatedText"], line["flags"].keys()) == (one.text, set(one.flags))
        assert line["log_prob"] == pytest.approx(one.log_prob, abs=1e-3)
        assert [tuple(link) for link in line["alignment"]] == list(one.alignment or ())
        assert one.tokens is not None
        assert [token["piece"] for token in line["tokens"]] == [token.piece for token in one.tokens]
        for token, own in zip(line["tokens"], one.tokens, strict=True):
            assert token["probability"] == pytest.approx(own.probability, abs=1e-4)
            assert [piece for piece, _ in token["runners_up"]] == [piece for piece, _ in own.runners_up]


@pytest.mark.parametrize("text", [SENTENCE, "Das ist gut, und " * 30 + "das ist alles."], ids=["short", "in parts"])
def test_each_token_names_its_word(live: Live, text: str) -> None:
    line = live.post("/explain", text).json()
    words: dict[int, str] = {}
    for token in line["tokens"]:
        if token["word"] is not None:
            words[token["word"]] = words.get(token["word"], "") + token["piece"].removeprefix("▁")
    assert list(words.values()) == line["translatedText"].split()
    assert ("split" in line["flags"]) == (line["n_first"] < len(line["tokens"]))


def test_a_prefix_is_kept_and_the_rest_is_searched_again(live: Live, translator: Translator) -> None:
    free = live.post("/explain", SENTENCE, alternatives=2).json()
    assert len(free["alternatives"]) == 2
    place = next(t for t, token in enumerate(free["tokens"]) if token["piece"] == "▁yesterday")
    other = free["tokens"][place]["runners_up"][0][0]
    pieces = [*[token["piece"] for token in free["tokens"][:place]], other]
    forced = live.post("/explain", SENTENCE, prefix=pieces).json()
    assert [token["piece"] for token in forced["tokens"][: place + 1]] == pieces
    assert forced["tokens"][place]["runners_up"][0][0] == "▁yesterday"
    by_text = live.post("/explain", SENTENCE, prefix="Tom bought a new car " + other.removeprefix("▁")).json()
    assert by_text == forced
    (wanted,) = translator.translate([SENTENCE], prefix="Tom bought a new car " + other.removeprefix("▁"))
    assert forced["translatedText"] == wanted.text != free["translatedText"]


def test_a_piece_inside_a_word_is_not_spelt_anew(live: Live) -> None:
    pieces = ["▁T", "h", "i"]  # as no text would be divided
    found = live.post("/explain", prefix=pieces).json()
    assert [token["piece"] for token in found["tokens"][:3]] == pieces
    assert found["translatedText"].startswith("Thi")


def test_the_inspector_gets_the_record_of_the_same_translation(live: Live, translator: Translator) -> None:
    answer = live.post("/inspect", SENTENCE, prefix="Yesterday")
    document = answer.json()
    assert document["names"].keys() == {"kinds", "places", "flags"}
    assert document["direction"] == "de-en"
    (record,), (wanted,) = from_document(document), inspect(translator, [SENTENCE], prefix="Yesterday")
    assert (
        record.translation
        == wanted.translation
        == live.post("/explain", SENTENCE, prefix="Yesterday").json()["translatedText"]
    )
    for kind, weight_LHQM in wanted.weights.items():
        np.testing.assert_allclose(record.weights[kind], weight_LHQM, atol=2e-3)


@pytest.mark.parametrize("pool", ["mean", "max", "first"])
def test_vectors_are_those_of_the_library(live: Live, translator: Translator, pool: Any) -> None:
    texts = ["Das ist gut.", " ", "Ich bin müde."]
    found = live.post("/embed", texts, pool=pool).json()
    assert (found["pool"], found["vectors"][1]) == (pool, None)
    wanted_ND = embed(translator, texts, pool)
    np.testing.assert_allclose(found["vectors"][0], wanted_ND[0], atol=1e-4)
    np.testing.assert_allclose(found["vectors"][2], wanted_ND[2], atol=1e-4)
    assert live.post("/embed", []).json()["vectors"] == []
    one = live.post("/embed", texts[0], pool=pool).json()["vectors"]
    np.testing.assert_allclose(one, wanted_ND[0], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "changes", "code", "told"),
    [
        ("/explain", {"q": None}, 400, "missing q"),
        ("/explain", {"q": "a\nb"}, 400, "leave line breaks out"),
        ("/explain", {"target": "fr"}, 400, "de to en"),
        ("/explain", {"prefix": 5}, 400, "prefix must be"),
        ("/explain", {"prefix": ["▁It", 5]}, 400, "prefix must be"),
        ("/explain", {"prefix": "It\n"}, 400, "one line"),
        ("/explain", {"prefix": "a\tb"}, 400, "without tabs"),
        ("/explain", {"prefix": "\ud800"}, 400, "half a character"),
        ("/explain", {"prefix": ["no such piece"]}, 400, "does not know"),
        ("/explain", {"prefix": ["</s>"]}, 400, "a mark"),
        ("/explain", {"prefix": ["<0x0A>"]}, 400, "one line"),
        ("/explain", {"prefix": ["<0xE2>"]}, 400, "whole characters"),
        ("/explain", {"q": ["a", "b"], "prefix": "It"}, 400, "one text"),
        ("/explain", {"prefix": "x" * 5001}, 413, "5001 characters"),
        ("/inspect", {"q": ["a"]}, 400, "one text"),
        ("/inspect", {"q": " "}, 400, "not blank"),
        ("/inspect", {"q": "a\u2028b"}, 400, "leave line breaks out"),
        ("/embed", {"pool": "median"}, 400, "mean, max, first"),
    ],
)
def test_what_cannot_be_is_told(live: Live, path: str, changes: dict[str, Any], code: int, told: str) -> None:
    answer = live.post(path, **changes)
    assert answer.status_code == code
    assert answer.json().keys() == {"error"}
    assert told in answer.json()["error"]


WORDS = "eins zwei drei vier fünf sechs sieben acht neun zehn"


@pytest.mark.parametrize(
    ("path", "limit", "below", "above"),
    [
        ("/explain", "explained_texts", ["a"] * 3, ["a"] * 4),
        ("/explain", "texts", ["a"] * 3, ["a"] * 4),
        ("/embed", "texts", ["a"] * 3, ["a"] * 4),
        ("/embed", "sentences", ["a"] * 3, ["a"] * 4),
        ("/inspect", "characters", "aaa", "aaaa"),
    ],
)
def test_a_limit_is_kept_at_its_bound(translator: Translator, path: str, limit: str, below: Any, above: Any) -> None:
    limits: dict[str, Any] = {limit: 3}
    with served(translator, **limits) as live:
        assert live.post(path, below).status_code == 200
        answer = live.post(path, above)
        assert (answer.status_code, "the limit is 3" in answer.json()["error"]) == (413, True)


@pytest.mark.parametrize(
    ("path", "limit"), [("/explain", "explained_tokens"), ("/inspect", "inspected_tokens"), ("/embed", "tokens")]
)
def test_tokens_are_counted_to_the_last(translator: Translator, path: str, limit: str) -> None:
    n = len(translator.subwords.encode([WORDS])[0])
    limits: dict[str, Any]
    for most, code in ((n, 200), (n - 1, 413)):
        limits = {limit: most}
        with served(translator, **limits) as live:
            assert live.post(path, WORDS).status_code == code
    if path != "/embed":
        limits = {limit: 5}
        with served(translator, **limits) as live:
            assert live.post(path, prefix=["▁That"] * 5).status_code == 200
            assert live.post(path, prefix=["▁That"] * 6).status_code == 413


def test_more_than_may_look_inside_at_once_are_sent_away(translator: Translator) -> None:
    with served(translator, explaining=1) as live:
        began, go_on = threading.Event(), threading.Event()
        own = translator.finish_explained

        def slow(line: Any) -> Any:
            began.set()
            assert go_on.wait(60)
            return own(line)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(translator, "finish_explained", slow)
            first: list[int] = []
            asking = threading.Thread(target=lambda: first.append(live.post("/explain").status_code))
            asking.start()
            assert began.wait(60)
            for path in ("/explain", "/inspect", "/embed"):
                answer = live.post(path)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert live.ask().status_code == 200, "others are not held up"
            go_on.set()
            asking.join(60)
        assert first == [200]
        assert live.post("/embed").status_code == 200


def test_before_it_is_warm_the_page_is_there_and_details_are_not(translator: Translator) -> None:
    with served(translator) as live:
        live.service.is_warm = False
        assert httpx.get(live.url).status_code == 200
        for path in ("/explain", "/inspect", "/embed"):
            assert (live.post(path).status_code, live.post(path).headers["retry-after"]) == (503, "2")


def test_what_is_new_needs_the_token_and_the_page_does_not(translator: Translator) -> None:
    with served(translator, access=Access(TOKEN)) as live:
        for path in ("/explain", "/inspect", "/embed"):
            assert live.post(path).status_code == 401
            assert live.post(path, api_key=TOKEN).status_code == 200
        assert httpx.get(f"{live.url}/limits").status_code == 401
        for path in FILES:
            assert httpx.get(f"{live.url}{path}").status_code == 200


def test_the_openapi_document_tells_of_them_and_not_of_files(live: Live) -> None:
    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    assert {"/explain", "/inspect", "/embed", "/limits"} <= paths.keys()
    assert not paths.keys() & FILES.keys()
    asked = paths["/explain"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"q", "source", "target", "prefix"} <= asked.keys()
    assert httpx.get(f"{live.url}/limits").json()["inspected_tokens"] == Limits().inspected_tokens


def test_the_manual_tells_of_every_route_and_field(live: Live) -> None:
    answer = httpx.get(f"{live.url}/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    for path, methods in httpx.get(f"{live.url}/openapi.json").json()["paths"].items():
        for method, route in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in answer.text
            asked = route.get("requestBody", {"content": {"": {"schema": {"properties": {}}}}})["content"]
            for field in next(iter(asked.values()))["schema"]["properties"]:
                assert f"<dt><code>{field}</code></dt>" in answer.text
    assert manual({"paths": {"/<script>": {"get": {"summary": "<b>", "responses": {}}}}}).count("<script>") == 0


def test_texts_are_not_logged(live: Live) -> None:
    n_before = len(live.log)
    live.post("/explain", "Geheim")
    (line,) = live.logged("/explain", 1, n_before)
    assert line["characters"] == 6
    assert "Geheim" not in json.dumps(live.log)


# Files


def test_each_file_has_a_strict_policy_and_is_sent_once(live: Live) -> None:
    for path, (_, kind) in FILES.items():
        answer = httpx.get(f"{live.url}{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(f"{live.url}{path}", headers={"if-none-match": f'"x", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        other = httpx.get(f"{live.url}{path}", headers={"if-none-match": '"another"'})
        assert (other.status_code, other.content) == (200, answer.content)
        head = httpx.head(f"{live.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
    for source in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert source in POLICY
    assert "unsafe" not in POLICY


def test_the_page_has_no_script_or_style_of_its_own_and_asks_nobody_else(live: Live) -> None:
    html = httpx.get(live.url).text
    assert "<style" not in html
    assert "style=" not in html
    assert " on" not in html.replace(" one", "")
    assert html.count("<script") == html.count('.js" defer></script>') == 4
    for path in FILES:
        text = httpx.get(f"{live.url}{path}").text.replace("http://www.w3.org/2000/svg", "")
        assert "http" + "://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
        assert "eval(" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/translate.html",
        "/index.html",
        "/../pyproject.toml",
        "/page/style.css",
        "/style.css/",
        "/style.css%00",
        "//style.css",
        "/..%2f..%2fpyproject.toml",
        "/%2e%2e/serving/app.py",
        "/style.css/../../app.py",
        "/.git/config",
        "/STYLE.CSS",
        "/inspector.js?/../x",
        "/\\..\\app.py",
        "/%5c..%5capp.py",
        "/etc/passwd",
        "/asking.js;x",
        "/style.css%2f..%2fapp.py",
    ],
)
def test_no_other_name_reaches_a_file(live: Live, path: str) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as raw:  # a client would put the path in order
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    code = int(answer.split()[1])
    assert code == (200 if path.startswith("/inspector.js?") else 404)
    assert b"[project]" not in answer
    assert b"def make_app" not in answer
