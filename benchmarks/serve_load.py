"""Requests per second and latency of the server: with few and many clients, under abuse, and over a long time.

    python benchmarks/serve_load.py --quick                      # every part, within two minutes
    python benchmarks/serve_load.py --part clients --out F       # or abuse, soak, routes

clients: 1, 8 and 64 clients. Each sends its next request, one held-out sentence, as soon as it has the response to the
last one. Three servers take turns: one whose requests share batches, one with a batch for each request (`--alone`), and
a plain one that translates one request at a time (`one_at_a_time.py`). They are compared with `Translator` on the same
sentences in bulk, with batch size 64 and the same number of threads.
abuse: the latency of regular clients with and without an abusive client, which sends requests that are too long and
bodies that never end.
soak: the peak of resident memory in the first and in the second half of many requests, after a warm-up.
routes: what it gains that `/translate` is called directly, without FastAPI (`all_routes.py` has no direct routes).
Servers and clients are separate processes on one machine, so the clients take CPU time from the servers.
"""

# ruff: noqa: E402  # the path must be set before the imports that need it

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]  # lets this file run as a script

import torch
import typer

from benchmarks.turns import Worker, ratio
from experiments.passport import passport, write_result
from transduce import Translator
from transduce.evaluation.evaluate import read_text
from transduce.model_folder.format import BUNDLED_MODEL, find_model

PARTS = ("clients", "abuse", "soak", "routes")
N_CLIENTS = (1, 8, 64)
WARM_UP = 50
"""Requests to each server before its first measurement."""
N_SAMPLES = 20
"""Measurements of memory during a soak."""
NO_RATE = ("client_rate=1e6", "client_burst=1000000", "client_connections=1000")
"""All clients here have the same address, so the limits of one client are lifted: they are not the subject."""
ABUSER = "127.0.0.9"
"""The address of the abusive client. All other clients use 127.0.0.1."""
ABUSE_RATE = 50
"""Requests per second of the abusive client: alternately one that is too long and one whose body never ends."""
SERVERS = {"together": "shared batches", "alone": "--alone", "one at a time": "plain server"}
"""Keys of the result, with the names that are printed."""
WITHOUT_ABUSE, WITH_ABUSE = "quiet", "beside an abuser"
"""Keys of the result."""

HEAD = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "


# In the process of the clients


class Load(NamedTuple):
    """What the clients do in one measurement."""

    url: str
    texts: list[str]
    n_clients: int
    n_requests: int
    abuse: bool


async def send_all(load: Load) -> dict[str, Any]:
    """The seconds of each request, the number of responses with each status code, and the seconds of all requests.

    It uses plain sockets, because the usual client libraries take more time for a request than the server.
    """
    numbers = itertools.count()
    seconds: list[float] = []
    codes: Counter[str] = Counter()
    host, port = load.url.removeprefix("http://").split(":")
    requests = [translate_request(text) for text in load.texts]

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while (n := next(numbers)) < load.n_requests:
            began = time.perf_counter()
            writer.write(requests[n % len(requests)])
            code, _ = await read_response(reader)
            seconds.append(time.perf_counter() - began)
            codes[code] += 1
        writer.close()

    abuser = asyncio.create_task(abuse(load.url, codes)) if load.abuse else None
    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.n_clients)))
    total = time.perf_counter() - began
    if abuser is not None:
        abuser.cancel()
    return {"seconds": seconds, "codes": dict(codes), "total": total}


def translate_request(text: str) -> bytes:
    body = json.dumps({"q": text, "source": "de", "target": "en"}).encode()
    return HEAD + str(len(body)).encode() + b"\r\n\r\n" + body


async def read_response(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The status code and the body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length is not None
    return head[9:12].decode(), await reader.readexactly(int(length[1]))


async def abuse(url: str, codes: Counter[str]) -> None:
    """Send abusive requests from another address, at a constant rate, without waiting for responses."""
    host, port = url.removeprefix("http://").split(":")
    requests = [translate_request("Das ist gut. " * 5000), HEAD + b'90000\r\n\r\n{"q": "']

    async def send(request: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ABUSER, 0))
            writer.write(request)
            line = await reader.readline()
            codes[f"abuser {line[9:12].decode() or 'closed'}"] += 1
            writer.close()
        except OSError:
            codes["abuser closed"] += 1

    tasks = set()
    for n in itertools.count():
        task = asyncio.create_task(send(requests[n % 2]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(1 / ABUSE_RATE)


def work() -> None:
    """Read loads, and answer each with its measurements."""
    sys.stdin.readline()  # the task, which is empty
    for line in sys.stdin:
        print(json.dumps(asyncio.run(send_all(Load(**json.loads(line))))), flush=True)


# In the main process


@contextmanager
def our_server(threads: int, precision: str, *flags: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of `transduce serve`."""
    command = ["transduce", "serve", "--port", "0", "--quiet", "--device", "cpu", "--threads", str(threads)]
    with running(*command, "--dtype", precision, *flags) as url_and_pid:
        yield url_and_pid


@contextmanager
def running(*module: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a server, which is a module with arguments."""
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-m", *module], stderr=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            while line and not line.startswith("serving at "):
                line = process.stderr.readline()
            assert line, f"{module[0]} has ended before it was ready"
            yield line.split()[-1], process.pid
        finally:
            process.terminate()


def limits(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--limit", setting)]


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests per second of each round, and the latency and status codes of the requests of all rounds."""
    seconds = sorted(second for measured in rounds for second in measured["seconds"])
    codes = sum((Counter(measured["codes"]) for measured in rounds), Counter())
    return {
        "per_second": [len(measured["seconds"]) / measured["total"] for measured in rounds],
        "p50_ms": 1e3 * seconds[len(seconds) // 2],
        "p99_ms": 1e3 * seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)],
        "codes": dict(codes),
    }


def print_summary(name: str, values: dict[str, Any]) -> None:
    print(
        f"{name:38} {statistics.median(values['per_second']):8.1f} requests/s   p50 {values['p50_ms']:7.1f} ms   "
        f"p99 {values['p99_ms']:7.1f} ms   {values['codes']}",
        flush=True,
    )


class Bench(NamedTuple):
    texts: list[str]
    threads: int
    precision: str
    rounds: int
    n_requests: int
    worker: Worker
    """The process of the clients."""

    def send(self, url: str, n_clients: int, n_requests: int, *, with_abuse: bool = False) -> dict[str, Any]:
        measured = self.worker.request(Load(url, self.texts, n_clients, n_requests, with_abuse)._asdict())
        assert measured is not None, "the process of the clients has died"
        return measured  # type: ignore[no-any-return]

    def clients(self) -> dict[str, Any]:
        flags = limits(*NO_RATE)
        measured: dict[str, dict[str, list[Any]]] = {server: {} for server in SERVERS}
        bulk: list[float] = []
        with (
            our_server(self.threads, self.precision, *flags) as (together, _),
            our_server(self.threads, self.precision, "--alone", *flags) as (alone, _),
            running("benchmarks.one_at_a_time", self.precision, str(self.threads)) as (one_at_a_time, _),
        ):
            urls = dict(zip(SERVERS, (together, alone, one_at_a_time), strict=True))
            for url in urls.values():
                self.send(url, 8, WARM_UP)
            for _ in range(self.rounds):
                for n_clients, (server, url) in itertools.product(N_CLIENTS, urls.items()):
                    if (n_clients, server) == (N_CLIENTS[-1], "together"):
                        bulk.append(self.bulk())  # immediately before the measurement that it is compared with
                    n_requests = self.n_requests if n_clients > 1 else max(20, self.n_requests // 4)
                    measured[server].setdefault(str(n_clients), []).append(self.send(url, n_clients, n_requests))
        result = {server: {n: summary(rounds) for n, rounds in by_n.items()} for server, by_n in measured.items()}
        for server, by_n in result.items():
            for n, values in by_n.items():
                print_summary(f"{n} client{'s' * (n != '1')}, {SERVERS[server]}", values)
        print(f"{'in bulk, batch size 64':38} {statistics.median(bulk):8.1f} sentences/s", flush=True)
        speeds = {server: by_n[str(N_CLIENTS[-1])]["per_second"] for server, by_n in result.items()}
        ours = speeds.pop("together")
        ratios = {name: ratio(ours, theirs) for name, theirs in {**speeds, "bulk": bulk}.items()}
        texts = [
            f"{median:.2f} ({low:.2f}-{high:.2f}) times {SERVERS.get(name, name)}"
            for name, (median, low, high) in ratios.items()
        ]
        print(f"{N_CLIENTS[-1]} clients, {SERVERS['together']}: {', '.join(texts)}", flush=True)
        return {**result, "bulk_per_second": bulk, "ratio_at_64": ratios}

    def bulk(self) -> float:
        """Sentences per second of `Translator`, in its own process, so that no threads remain beside the servers."""
        code = (
            "import sys, json, time, torch; from transduce import Translator; "
            "task = json.load(sys.stdin); torch.set_num_threads(task['threads']); "
            "t = Translator.load(device='cpu', batch_size=64, precision=task['precision']); "
            "t.translate(task['texts'][:64]); began = time.perf_counter(); t.translate(task['texts']); "
            "print(len(task['texts']) / (time.perf_counter() - began))"
        )
        texts = [self.texts[i % len(self.texts)] for i in range(self.n_requests)]
        task = json.dumps({"threads": self.threads, "precision": self.precision, "texts": texts})
        done = subprocess.run([sys.executable, "-c", code], input=task, check=True, capture_output=True, text=True)
        return float(done.stdout)

    def abuse(self) -> dict[str, Any]:
        """Eight regular clients. Rate limits are lifted, which makes the test harder: they would stop the abuser."""
        measured: dict[str, list[Any]] = {WITHOUT_ABUSE: [], WITH_ABUSE: []}
        with our_server(self.threads, self.precision, *limits(*NO_RATE[:2])) as (url, _):
            self.send(url, 8, WARM_UP)
            for _, name in itertools.product(range(self.rounds), measured):
                measured[name].append(self.send(url, 8, self.n_requests, with_abuse=name == WITH_ABUSE))
        result = {name: summary(rounds) for name, rounds in measured.items()}
        print_summary("8 regular clients, without abuse", result[WITHOUT_ABUSE])
        print_summary("8 regular clients, with abuse", result[WITH_ABUSE])
        print(
            f"p99 with abuse: {result[WITH_ABUSE]['p99_ms'] / result[WITHOUT_ABUSE]['p99_ms']:.2f} times that without"
        )
        return result

    def soak(self, n_requests: int) -> dict[str, Any]:
        with our_server(self.threads, self.precision, *limits(*NO_RATE)) as (url, pid):
            self.send(url, 64, max(WARM_UP, n_requests // 5))
            sizes = []
            for _ in range(N_SAMPLES):
                self.send(url, 64, n_requests // N_SAMPLES)
                sizes.append(resident(pid))
        # Memory rises with long sentences and falls when it is released, so only the peaks of both halves show growth.
        first, second = max(sizes[: N_SAMPLES // 2]), max(sizes[N_SAMPLES // 2 :])
        growth = (second - first) / first
        print(
            f"peak resident memory: {first:.0f} MB in the first half of {n_requests} requests, "
            f"{second:.0f} MB in the second half ({100 * growth:+.1f} %)",
            flush=True,
        )
        return {"n_requests": n_requests, "resident_mb": sizes, "growth": growth}

    def routes(self) -> dict[str, Any]:
        """64 clients, with and without direct routes, in turns."""
        n_clients, speeds = N_CLIENTS[-1], dict[str, list[float]]()
        with (
            our_server(self.threads, self.precision, *limits(*NO_RATE)) as (direct, _),
            running("benchmarks.all_routes", self.precision, str(self.threads), *NO_RATE) as (through_fastapi, _),
        ):
            urls = {"direct": direct, "through FastAPI": through_fastapi}
            for url in urls.values():
                self.send(url, 8, WARM_UP)
            for _, (name, url) in itertools.product(range(self.rounds), urls.items()):
                total = self.send(url, n_clients, self.n_requests)["total"]
                speeds.setdefault(name, []).append(self.n_requests / total)
        median, low, high = ratio(speeds["direct"], speeds["through FastAPI"])
        print(f"{n_clients} clients, direct routes: {median:.2f} ({low:.2f}-{high:.2f}) times those through FastAPI")
        return {"per_second": speeds, "ratio": (median, low, high)}


def resident(pid: int) -> float:
    """The resident memory of a process in MB, as Linux reports it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("resident memory is read from /proc, which this system does not have")


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(PARTS)}. Default: all.")] = None,
    threads: Annotated[
        int, typer.Option(help="Threads of each server and of bulk translation.")
    ] = torch.get_num_threads(),
    dtype: Annotated[str, typer.Option(metavar="float32|int8")] = "float32",
    requests: Annotated[
        int,
        typer.Option(help="Requests per round. At the end of a round clients become idle, so few distort the speed."),
    ] = 3000,
    rounds: int = 3,
    soak: Annotated[int, typer.Option(help="Requests of the soak, after its warm-up.")] = 20_000,
    quick: Annotated[bool, typer.Option(help="Use fewer requests and one round.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work()
        return
    parts = part or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--part is {unknown.pop()!r}, must be one of {', '.join(PARTS)}")
    folder = find_model(Path(BUNDLED_MODEL))
    texts = read_text(folder / "heldout.de.xz")[:1000]
    clients = Worker(__file__, {})
    bench = Bench(texts, threads, dtype, 1 if quick else rounds, 150 if quick else requests, clients)
    measure: dict[str, Callable[[], dict[str, Any]]] = {
        "clients": bench.clients,
        "abuse": bench.abuse,
        "soak": lambda: bench.soak(500 if quick else soak),
        "routes": bench.routes,
    }
    result: dict[str, Any] = {
        "benchmark": "serve_load",
        "model": folder.name,
        "dtype": dtype,
        "threads": threads,
        "requests": bench.n_requests,
    }
    try:
        for name in parts:
            result[name] = measure[name]()
    finally:
        clients.end()
    if out is not None:
        write_result(out, result | passport(Translator.load(folder, device="cpu").config, "cpu"))


if __name__ == "__main__":
    typer.run(main)
