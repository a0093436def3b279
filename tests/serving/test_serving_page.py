"""The page of the server and its routes: details of translations, prefixes, attention records and vectors."""

from __future__ import annotations

import json
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from html import escape
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
from transduce.serving.manual import curl, manual, pretty
from transduce.serving.page import FILES, POLICY
from transduce.serving.schema import REFUSALS


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


@pytest.fixture(scope="module")
def live(translator: Translator) -> Iterator[Live]:
    with served(translator) as server:
        yield server


# Details


def test_details_equal_those_of_the_library(live: Live, translator: Translator) -> None:
    texts = [SENTENCE, "", "Ich bin müde."]
    expected = translator.translate(texts, with_details=True)
    assert live.post("/explain", []).json() == {"lines": []}
    lines = live.post("/explain", texts).json()["lines"]
    assert len(lines) == 3
    for line, translation in zip(lines, expected, strict=True):
        assert (line["translatedText"], line["flags"].keys()) == (translation.text, set(translation.flags))
        assert line["log_prob"] == pytest.approx(translation.log_prob, abs=1e-3)
        assert [tuple(link) for link in line["alignment"]] == list(translation.alignment or ())
        assert translation.tokens is not None
        assert [token["piece"] for token in line["tokens"]] == [token.piece for token in translation.tokens]
        for token, expected_token in zip(line["tokens"], translation.tokens, strict=True):
            assert token["probability"] == pytest.approx(expected_token.probability, abs=1e-4)
            assert [piece for piece, _ in token["runners_up"]] == [piece for piece, _ in expected_token.runners_up]


@pytest.mark.parametrize("text", [SENTENCE, "Das ist gut, und " * 30 + "das ist alles."], ids=["short", "in parts"])
def test_each_token_names_its_word(live: Live, text: str) -> None:
    line = live.post("/explain", text).json()
    words: dict[int, str] = {}
    for token in line["tokens"]:
        if token["word"] is not None:
            words[token["word"]] = words.get(token["word"], "") + token["piece"].removeprefix("▁")
    assert list(words.values()) == line["translatedText"].split()
    assert ("split" in line["flags"]) == (line["n_first"] < len(line["tokens"]))


def test_a_translation_begins_with_its_prefix_and_the_rest_is_a_new_search(live: Live, translator: Translator) -> None:
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
    (expected,) = translator.translate([SENTENCE], prefix="Tom bought a new car " + other.removeprefix("▁"))
    assert forced["translatedText"] == expected.text != free["translatedText"]


def test_the_pieces_of_a_prefix_are_not_divided_again(live: Live) -> None:
    pieces = ["▁T", "h", "i"]  # the subword model divides no text in this way
    line = live.post("/explain", prefix=pieces).json()
    assert [token["piece"] for token in line["tokens"][:3]] == pieces
    assert line["translatedText"].startswith("Thi")


def test_the_inspector_gets_the_record_of_the_same_translation(live: Live, translator: Translator) -> None:
    document = live.post("/inspect", SENTENCE, prefix="Yesterday").json()
    assert document["names"].keys() == {"kinds", "places", "flags", "rule", "meanings"}
    assert {head["label"] for head in document["records"][0]["heads"]} <= document["names"]["meanings"].keys()
    assert document["direction"] == "de-en"
    (record,), (expected,) = from_document(document), inspect(translator, [SENTENCE], prefix="Yesterday")
    assert (
        record.translation
        == expected.translation
        == live.post("/explain", SENTENCE, prefix="Yesterday").json()["translatedText"]
    )
    for kind, weight_LHQM in expected.weights.items():
        np.testing.assert_allclose(record.weights[kind], weight_LHQM, atol=2e-3)


@pytest.mark.parametrize("pool", ["mean", "max", "first"])
def test_vectors_equal_those_of_the_library(live: Live, translator: Translator, pool: Any) -> None:
    texts = ["Das ist gut.", " ", "Ich bin müde."]
    response = live.post("/embed", texts, pool=pool).json()
    assert (response["pool"], response["vectors"][1]) == (pool, None)
    expected_ND = embed(translator, texts, pool)
    np.testing.assert_allclose(response["vectors"][0], expected_ND[0], atol=1e-4)
    np.testing.assert_allclose(response["vectors"][2], expected_ND[2], atol=1e-4)
    assert live.post("/embed", []).json()["vectors"] == []
    one = live.post("/embed", texts[0], pool=pool).json()["vectors"]
    np.testing.assert_allclose(one, expected_ND[0], atol=1e-4)


@pytest.mark.parametrize(
    ("path", "changes", "code", "message"),
    [
        ("/explain", {"q": None}, 400, "missing q"),
        ("/explain", {"q": "a\nb"}, 400, "line break"),
        ("/explain", {"target": "fr"}, 400, "de to en"),
        ("/explain", {"prefix": 5}, 400, "prefix must be"),
        ("/explain", {"prefix": ["▁It", 5]}, 400, "prefix must be"),
        ("/explain", {"prefix": "It\n"}, 400, "one line"),
        ("/explain", {"prefix": "a\tb"}, 400, "without tabs"),
        ("/explain", {"prefix": "\ud800"}, 400, "half a character"),
        ("/explain", {"prefix": ["no such piece"]}, 400, "not in the vocabulary"),
        ("/explain", {"prefix": ["</s>"]}, 400, "special token"),
        ("/explain", {"prefix": ["<0x0A>"]}, 400, "one line"),
        ("/explain", {"prefix": ["<0xE2>"]}, 400, "whole characters"),
        ("/explain", {"q": ["a", "b"], "prefix": "It"}, 400, "one text"),
        ("/explain", {"prefix": "x" * 5001}, 413, "5001 characters"),
        ("/inspect", {"q": ["a"]}, 400, "one text"),
        ("/inspect", {"q": " "}, 400, "not blank"),
        ("/inspect", {"q": "a\u2028b"}, 400, "line break"),
        ("/embed", {"pool": "median"}, 400, "mean, max, first"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(
    live: Live, path: str, changes: dict[str, Any], code: int, message: str
) -> None:
    response = live.post(path, **changes)
    assert response.status_code == code
    assert response.json().keys() == {"error"}
    assert message in response.json()["error"]


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
def test_a_limit_is_exact(translator: Translator, path: str, limit: str, below: Any, above: Any) -> None:
    limits: dict[str, Any] = {limit: 3}
    with served(translator, **limits) as live:
        assert live.post(path, below).status_code == 200
        response = live.post(path, above)
        assert (response.status_code, "the limit is 3" in response.json()["error"]) == (413, True)


@pytest.mark.parametrize(
    ("path", "limit"), [("/explain", "explained_tokens"), ("/inspect", "inspected_tokens"), ("/embed", "tokens")]
)
def test_the_limits_of_tokens_are_exact(translator: Translator, path: str, limit: str) -> None:
    n = len(translator.subwords.encode([WORDS])[0])
    limits: dict[str, Any]
    for max_tokens, code in ((n, 200), (n - 1, 413)):
        limits = {limit: max_tokens}
        with served(translator, **limits) as live:
            assert live.post(path, WORDS).status_code == code
    if path != "/embed":
        limits = {limit: 5}
        with served(translator, **limits) as live:
            assert live.post(path, prefix=["▁That"] * 5).status_code == 200
            assert live.post(path, prefix=["▁That"] * 6).status_code == 413


def test_requests_for_details_are_limited_and_translations_continue(translator: Translator) -> None:
    with served(translator, explaining=1) as live:
        began, may_continue = threading.Event(), threading.Event()
        finish_explained = translator.finish_explained

        def slow(line: Any) -> Any:
            began.set()
            assert may_continue.wait(60)
            return finish_explained(line)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(translator, "finish_explained", slow)
            codes: list[int] = []
            client = threading.Thread(target=lambda: codes.append(live.post("/explain").status_code))
            client.start()
            assert began.wait(60)
            for path in ("/explain", "/inspect", "/embed"):
                response = live.post(path)
                assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert live.translate().status_code == 200, "requests to /translate must not wait"
            may_continue.set()
            client.join(60)
        assert codes == [200]
        assert live.post("/embed").status_code == 200


def test_before_the_warm_up_has_ended_the_page_is_served_and_details_are_refused(translator: Translator) -> None:
    with served(translator) as live:
        live.service.is_warm = False
        assert httpx.get(live.url).status_code == 200
        for path in ("/explain", "/inspect", "/embed"):
            assert (live.post(path).status_code, live.post(path).headers["retry-after"]) == (503, "2")


def test_details_need_the_token_and_the_page_does_not(translator: Translator) -> None:
    with served(translator, access=Access(TOKEN)) as live:
        for path in ("/explain", "/inspect", "/embed"):
            assert live.post(path).status_code == 401
            assert live.post(path, api_key=TOKEN).status_code == 200
        assert httpx.get(f"{live.url}/limits").status_code == 401
        for path in FILES:
            assert httpx.get(f"{live.url}{path}").status_code == 200


def test_the_openapi_document_describes_the_routes_of_details_but_no_files(live: Live) -> None:
    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    assert {"/explain", "/inspect", "/embed", "/limits"} <= paths.keys()
    assert not paths.keys() & FILES.keys()
    fields = paths["/explain"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"q", "source", "target", "prefix"} <= fields.keys()
    assert httpx.get(f"{live.url}/limits").json()["inspected_tokens"] == Limits().inspected_tokens


def test_the_manual_describes_every_route_and_field(live: Live) -> None:
    response = httpx.get(f"{live.url}/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in response.headers["content-security-policy"]
    descriptions = []
    for path, methods in httpx.get(f"{live.url}/openapi.json").json()["paths"].items():
        for method, route in methods.items():
            assert f"<code>{method.upper()} {path}</code>" in response.text
            assert f'<pre class="command">curl -s {live.url}{path}' in response.text
            descriptions += [route["description"], route["responses"]["200"]["description"]]
            assert all(f"<p>{escape(text)}</p>" in response.text for text in descriptions[-2:])
            content = route.get("requestBody", {"content": {"": {"schema": {"properties": {}}}}})["content"]
            for field in next(iter(content.values()))["schema"]["properties"]:
                assert f"<dt><code>{field}</code></dt>" in response.text
    assert len(set(descriptions)) == len(descriptions), "a description is repeated"
    for reason in REFUSALS.values():
        assert response.text.count(reason) == 1
    hostile = {"paths": {"/<script>": {"get": {"description": "<script>", "responses": {}}}}}
    assert manual(hostile, "http://localhost:1<script>").count("<script>") == 0


def check_example(example: Any, value: Any) -> None:
    """Check that a response has the values of the example. "…" stands for any values, and fields may be omitted."""
    if isinstance(example, dict):
        for name, one in example.items():
            check_example(one, value[name])
    elif isinstance(example, list):
        values = [*value[: len(example) - 1], "…"] if example[-1:] == ["…"] else value
        for one, other in zip(example, values, strict=True):
            check_example(one, other)
    elif isinstance(example, float):
        assert value == pytest.approx(example, rel=1e-3, abs=1e-4)
    elif example != "…":
        assert value == example


def test_the_examples_of_the_manual_are_responses_of_the_server(live: Live) -> None:
    paths = httpx.get(f"{live.url}/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, route in methods.items():
            schemas = [content["schema"] for content in route["responses"]["200"]["content"].values()]
            if method == "get":
                response = httpx.get(f"{live.url}{path}")
            else:
                body = route["requestBody"]["content"]["application/json"]["schema"]["example"]
                response = httpx.post(f"{live.url}{path}", json=body)
            assert response.status_code == 200
            if path == "/metrics":
                assert response.headers["content-type"].startswith("text/plain")
                continue
            example = schemas[0]["example"]
            assert json.loads(pretty(example)) == example
            if path == "/health":  # the engine depends on the machine
                assert [engine.keys() for engine in example["engines"]] == [response.json()["engines"][0].keys()]
                example = {"status": example["status"]}
            check_example(example, response.json())


def test_an_address_that_is_not_a_word_of_a_shell_is_quoted() -> None:
    assert curl("http://a/limits", None) == "curl -s http://a/limits"
    command = curl("http://a:$(b)/translate", {"q": "Tom's <b>"})
    assert shlex.split(command)[2:] == [
        "http://a:$(b)/translate",
        "-H",
        "content-type: application/json",
        "-d",
        '{"q": "Tom\'s <b>"}',
    ]


def test_texts_are_not_logged(live: Live) -> None:
    n_before = len(live.log)
    live.post("/explain", "Geheim")
    (line,) = live.logged("/explain", 1, n_before)
    assert line["characters"] == 6
    assert "Geheim" not in json.dumps(live.log)


# Files


def test_each_file_has_a_strict_policy_and_is_sent_only_if_it_has_changed(live: Live) -> None:
    for path, (_, content_type) in FILES.items():
        response = httpx.get(f"{live.url}{path}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(content_type)
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        unchanged = httpx.get(f"{live.url}{path}", headers={"if-none-match": f'"x", W/{response.headers["etag"]}'})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        changed = httpx.get(f"{live.url}{path}", headers={"if-none-match": '"another"'})
        assert (changed.status_code, changed.content) == (200, response.content)
        head = httpx.head(f"{live.url}{path}")
        assert (head.status_code, head.content) == (200, b"")
    for source in ("default-src 'none'", "script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"):
        assert source in POLICY
    assert "unsafe" not in POLICY


def test_the_page_has_no_inline_script_or_style_and_makes_no_third_party_requests(live: Live) -> None:
    html = httpx.get(live.url).text
    assert "<style" not in html
    assert "style=" not in html
    assert re.search(r"\son\w+=", html) is None
    assert html.count("<script") == html.count('.js" defer></script>') == 4
    docs = httpx.get(f"{live.url}/docs").text
    assert docs.count("<script") == docs.count('.js" defer></script>') == 1
    assert "<style" not in docs
    assert re.search(r"\sstyle=|\son\w+=", docs) is None
    for path in FILES:
        text = httpx.get(f"{live.url}{path}").text.replace("http://www.w3.org/2000/svg", "")
        assert "http" + "://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
        assert "eval(" not in text
        assert "import " not in text or not path.endswith(".js")


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
        "/api.js;x",
        "/style.css%2f..%2fapp.py",
    ],
)
def test_no_other_path_reaches_a_file(live: Live, path: str) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:  # httpx would normalise the path
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        response = b"".join(iter(lambda: connection.recv(65536), b""))
    code = int(response.split()[1])
    assert code == (200 if path.startswith("/inspector.js?") else 404)
    assert b"[project]" not in response
    assert b"def make_app" not in response
