"""Malformed and malicious requests: the server refuses each with its own error response and keeps running."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serve_load import resident
from tests.support.bundled import heldout
from tests.support.serving import JSON, Live, served
from transduce import Translation, Translator
from transduce.serving.limits import Limits

FORM = {"content-type": "application/x-www-form-urlencoded"}
CONTENT_TYPES = [
    "application/json",
    *FORM.values(),
    "multipart/form-data; boundary=x",
    "multipart/form-data",
    "text/plain",
    "application/json; charset=utf-16",
    "text/html",
    "application/octet-stream",
    "image/png",
    "x",
    "",
]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served(body_seconds=1.0, header_seconds=1.0) as server:
        yield server


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    10**400,
    1e308,
    0.5,
    "",
    " ",
    "\0",
    "\x1b[31m",
    "\u202eabc\u202c",
    "\u200b" * 50,
    "\u0301" * 4999,
    "\ufeff",
    "\ud800",
    "\udfff\ud800",
    "a\u0301" * 40,
    "\U0001f469\u200d\U0001f469" * 30,
    "<script>alert(1)</script>",
    "'; DROP TABLE x; --",
    "{{7*7}}",
    "${jndi:ldap://x}",
    "../../../etc/passwd",
    "file:///etc/passwd",
    "%00",
    "%n%s",
    "a" * 4999,
    "ß" * 200,
    "漢" * 1500,
    "a\n" * 150,
    "\r\n" * 1000,
    "\u2028" * 300,
    "<0x00><0xff>",
    "</s>",
    "<s><pad>",
    "▁" * 50,
    [],
    [[]],
    [None],
    [["a"]],
    {},
    {"a": 1},
    ["a"] * 100,
    ["a"] * 101,
    [""] * 100,
    "auto",
    "de",
    "en",
    "de\0",
    "DE",
    "1" * 99,
    "-0",
    "٣",
    "1e2",
    "0x10",
    "1_0",
]


def bodies() -> Iterator[bytes]:
    fields = {"q": " ", "source": "de", "target": "en"}  # blank, so that accepted requests are quick
    for name, value in itertools.product(
        ["q", "source", "target", "format", "alternatives", "beam", "api_key"], VALUES
    ):
        yield json.dumps(fields | {name: value}).encode()
    yield from (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"\x00",
        b'{"q":"\xff"}',
        b"q=%ff&source=de&target=en",
        b"=&=&=",
    )
    yield from (b"[" * 50_000, b'{"a":' * 10_000, b'{"q":' + b"[" * 40_000 + b"]" * 40_000 + b"}", b'{"q":1e999}')
    yield from (b"q=" + b"a" * 90_000, b"&".join([b"q=a"] * 149), b"&".join([b"q=a"] * 20_000), b'{"q": NaN}')
    yield b'--x\r\ncontent-disposition: form-data; name="q"; filename="../../x"\r\n\r\nJa.\r\n--x--\r\n'
    yield b'--x\r\ncontent-disposition: form-data; name="q"\r\ncontent-type: text/plain; charset=zzz\r\n\r\nJ\r\n--x--'
    yield b"--x\r\n" * 5_000
    yield b'--x\r\ncontent-disposition: form-data; name="_charset_"\r\n\r\nutf-7\r\n--x--\r\n'


def send_all_bodies(url: str) -> int:
    """Send every body above with the content types that suit it. Return the number of requests."""
    requests = [(body, JSON["content-type"]) for body in bodies()]
    not_json = [body for body in bodies() if not body.startswith(b'{"q": ')]
    requests += itertools.product(not_json, CONTENT_TYPES[1:])
    with httpx.Client(timeout=20) as session:
        for body, content_type in requests:
            response = session.post(f"{url}/translate", content=body, headers={"content-type": content_type})
            assert response.status_code in (200, 400, 413, 415, 422), (response.status_code, content_type, body[:100])
            assert response.json().keys() <= {"error", "translatedText", "alternatives", "detectedLanguage"}
    return len(requests)


def test_no_body_makes_the_server_fail_or_hang(live: Live) -> None:
    assert send_all_bodies(live.url) > 500
    assert live.translate().json() == {"translatedText": "That's good."}


@pytest.mark.parametrize(
    "path",
    [
        "/../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/translate/",
        "//translate",
        "/a\\b",
        "/static/../app.py",
        "/translate%00",
        "/%",
        "/%ff%fe",
        "/translate;x=1",
        "/*",
        "http://evil.example/translate",
        "/" + "a" * 9000,
        "/?" + "b=1&" * 2000,
    ],
)
def test_no_path_reaches_a_file_or_causes_a_server_error(live: Live, path: str) -> None:
    for method in (b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"TRACE", b"CONNECT", b"PROPFIND"):
        response = raw(
            live, method + b" " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        assert code_of(response) in (200, 400, 404, 405, 415), (method, response[:200])
        assert b"root:" not in response


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 50_000 + b"\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcdef",
        b"POST /translate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /translate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"GET /languages HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        b"GET /languages HTTP/1.1\r\nhost: localhost\r\nauthorization: \xff\xff\r\norigin: \xff\r\n\r\n",
    ],
    ids=range(13),
)
def test_malformed_http_gets_an_error_response_or_is_closed(live: Live, sent: bytes) -> None:
    response = raw(live, sent)
    assert not response or code_of(response) in (200, 400, 403, 404, 415, 431, 501)
    assert live.translate("").status_code == 200


HEADER_BYTES = Limits().header_bytes


@pytest.mark.parametrize("n", [HEADER_BYTES - 400, HEADER_BYTES + 1])
@pytest.mark.parametrize(
    "kind", ["one header", "many headers", "the path", "an unfinished header", "many unfinished headers"]
)
def test_the_size_of_headers_is_limited(live: Live, kind: str, n: int) -> None:
    """Unfinished headers below the limit get no response: the connection is closed after the time for headers."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    sent = {
        "one header": head + b"x: " + b"y" * n + b"\r\n\r\n",
        "many headers": head + b"x: y\r\n" * (n // 2) + b"\r\n",
        "the path": b"GET /" + b"a" * n + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        "an unfinished header": b"x: " + b"y" * n,
        "many unfinished headers": b"xx: yyyyyyyyyyyy\r\n" * (n // 18 + 1),
    }[kind]
    code_below = {"one header": 200, "many headers": 200, "the path": 404}
    began, response = time.monotonic(), raw(live, *((sent,) if kind in code_below else (head, sent)))
    if n > HEADER_BYTES:
        assert code_of(response) == (431 if kind in code_below else 400)
        assert time.monotonic() - began < 0.9, "the server waited for the end"
    else:
        assert (code_of(response) if response else None) == code_below.get(kind)


@pytest.mark.parametrize(
    "around", [b"1;" + b"x" * 9000, b"0\r\nx: " + b"y" * 9000], ids=["a chunk extension", "trailers"]
)
def test_chunk_extensions_and_trailers_are_limited(live: Live, around: bytes) -> None:
    head = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    began, response = time.monotonic(), raw(live, head, around, b"z" * 9000)
    assert code_of(response) == 400
    assert time.monotonic() - began < 0.9, "the server waited for the end"


BODY = b'{"q": "Ja.", "source": "de", "target": "en"}'


def request(*headers: bytes) -> bytes:
    lines = [b"host: localhost", b"content-type: application/json", b"content-length: %d" % len(BODY), *headers]
    return b"POST /translate HTTP/1.1\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + BODY


def test_an_offer_of_http2_gets_a_response_in_http1(live: Live) -> None:
    """Java's HttpClient sends this offer by default."""
    offer = (b"connection: upgrade, http2-settings, close", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQ")
    response = raw(live, request(*offer))
    assert code_of(response) == 200
    assert b"translatedText" in response


def test_pipelined_requests_all_get_a_response(live: Live) -> None:
    assert raw(live, request() * 3 + request(b"connection: close")).count(b"translatedText") == 4


def test_trailers_are_not_used_as_headers(live: Live) -> None:
    """A proxy that checks only headers could otherwise be bypassed."""
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    head = b"POST /translate HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
    host, content_type = b"host: localhost\r\n", b"content-type: application/json\r\n"
    for before, after, code in ((host + content_type, b"", 200), (content_type, host, 400), (host, content_type, 415)):
        assert code_of(raw(live, head + before + b"\r\n" + chunks + after + b"\r\n")) == code


def test_a_request_must_have_exactly_one_host(live: Live) -> None:
    one, other = b"host: localhost\r\n", b"host: 127.0.0.1\r\n"
    for hosts, code in ((one, 200), (other, 200), (one + other, 400), (one + one, 400), (b"", 400)):
        assert code_of(raw(live, b"GET /health HTTP/1.1\r\nconnection: close\r\n" + hosts + b"\r\n")) == code


def raw(live: Live, *sent: bytes, seconds: float = 10) -> bytes:
    """Return everything that the server sends until it closes the connection. Pauses separate several pieces."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=seconds) as connection:
        try:
            for piece in sent:
                connection.sendall(piece)
                time.sleep(0.05 if len(sent) > 1 else 0)
            response = b""
            while more := connection.recv(65536):
                response += more
        except (ConnectionResetError, BrokenPipeError):
            pass
        return response


def code_of(response: bytes) -> int:
    match = re.match(rb"HTTP/1.1 (\d+) ", response)
    assert match, response[:200]
    return int(match[1])


def test_slow_requests_are_refused_or_closed(live: Live) -> None:
    head = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for sent, code in (
        (b"", None),
        (b"GET /languages HTT", None),
        (head, None),
        (head + b"content-length: 10\r\n\r\n{", 408),
        (head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", 408),
    ):
        began = time.monotonic()
        response = raw(live, sent)
        assert 0.5 < time.monotonic() - began < 5
        assert (code_of(response) if response else None) == code


def test_a_client_that_sends_single_bytes_is_closed_too(live: Live) -> None:
    for start in (b"", b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n"):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", live.port), timeout=0.05) as connection:
            connection.sendall(start)
            while not is_closed_after_a_byte(connection):
                assert time.monotonic() - began < 6


def is_closed_after_a_byte(connection: socket.socket) -> bool:
    """Send one byte. Return whether the server has closed the connection."""
    try:
        connection.sendall(b"a")
        return not connection.recv(4096)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_connection_in_use_is_not_closed(live: Live) -> None:
    with httpx.Client() as session:
        for _ in range(4):
            assert session.get(f"{live.url}/languages").status_code == 200
            time.sleep(0.4)


def test_connections_are_limited_per_client_and_in_total() -> None:
    with served(client_connections=3, connections=4, header_seconds=60) as live:
        held = [socket.create_connection(("127.0.0.1", live.port), timeout=10) for _ in range(3)]
        time.sleep(0.1)
        assert code_of(raw(live, b"")) == 429
        other = socket.socket()
        other.bind(("127.0.0.2", 0))
        other.settimeout(10)
        other.connect(("127.0.0.1", live.port))
        other.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert code_of(other.recv(4096)) == 200
        with socket.socket() as third:
            third.bind(("127.0.0.3", 0))
            third.settimeout(10)
            third.connect(("127.0.0.1", live.port))
            assert code_of(third.recv(4096)) == 503
        for connection in [*held, other]:
            connection.close()
        time.sleep(0.1)
        assert live.translate("").status_code == 200


# Slow tests


@contextmanager
def in_a_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server in a process of its own: the process, its address, and its log lines after the start."""
    command = [sys.executable, "-m", "transduce", "serve", "--port", "0", "--device", "cpu", *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith("serving at http://127.0.0.1:"):
            assert line, "the server did not start"
        reader = threading.Thread(target=lines.extend, args=(process.stderr,))
        reader.start()
        try:
            yield process, line.split()[-1], lines
        finally:
            process.kill()
            reader.join(30)


class Load:
    """Clients that send requests until the server is gone, and compare each translation with the expected one."""

    def __init__(self, url: str, expected: dict[str, Translation], n_clients: int = 32) -> None:
        self.url, self.expected, self.n_clients = url, expected, n_clients
        self.codes: Counter[Any] = Counter()
        self.faults: list[str] = []
        self.clients = [threading.Thread(target=self._send, args=(place,)) for place in range(n_clients)]
        for client in self.clients:
            client.start()

    def _send(self, place: int) -> None:
        texts = list(self.expected)
        with httpx.Client(timeout=60) as session:
            for i in itertools.count(place, self.n_clients):
                text = texts[i % len(texts)]
                try:
                    response = session.post(f"{self.url}/translate", json={"q": text, "source": "de", "target": "en"})
                except httpx.HTTPError as error:
                    self.codes[type(error).__name__] += 1
                    return
                self.codes[response.status_code] += 1
                self._check(response, self.expected[text])

    def _check(self, response: httpx.Response, expected: Translation) -> None:
        if response.status_code == 200:
            if response.json()["translatedText"] != expected.text and "close" not in expected.flags:
                self.faults.append(f"{response.text} for {expected.text}")
        elif "retry-after" not in response.headers:
            self.faults.append(f"{response.status_code} without Retry-After")


@pytest.mark.slow
def test_malformed_bodies_do_not_make_the_memory_grow() -> None:
    """Compare the peak of the last four passes with that of the four before. The first four are a warm-up."""
    sizes = []
    with in_a_process("--limit", "client_rate=1e6", "--limit", "client_burst=1000000") as (process, url, _):
        for _ in range(12):
            send_all_bodies(url)
            sizes.append(resident(process.pid))
    assert max(sizes[8:]) < 1.02 * max(sizes[4:8]), sizes


@pytest.mark.slow
@pytest.mark.parametrize("n_responses", [21, 100, 300])
def test_after_sigterm_under_load_every_accepted_request_gets_its_own_translation(n_responses: int) -> None:
    texts = heldout()[0][:400]
    expected = dict(zip(texts, Translator.load(device="cpu").translate(texts), strict=True))
    with in_a_process("--limit", "client_rate=1e6", "--limit", "client_burst=1000000") as (process, url, lines):
        load = Load(url, expected)
        while load.codes[200] < n_responses:
            time.sleep(0.01)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert time.monotonic() - began < 25
        for client in load.clients:
            client.join(30)
    assert not load.faults
    # Requests after the exit of the server fail to connect.
    assert load.codes.keys() <= {200, 503, "ConnectError", "ReadError", "RemoteProtocolError", "WriteError"}
    logged = Counter(json.loads(line)["code"] for line in lines if "/translate" in line)
    assert logged.keys() <= {200, 503}
    assert logged[200] == load.codes[200] > 20, "a logged response has not arrived"
    assert load.codes[503] > 0


@pytest.mark.slow
def test_responses_conform_to_the_openapi_document(tmp_path: Path) -> None:
    with served(request_seconds=10) as live:
        checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{live.url}/openapi.json",
            "--checks",
            checks,
            "--max-examples",
            "60",
            "--seed",
            "1",
            "--no-color",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert sum(1 for entry in live.log if entry["path"] == "/translate") > 60
