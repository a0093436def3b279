"""What the server holds: requests a second and how long they take, alone and together, under abuse and for long.

    python benchmarks/serve_load.py --quick                      # every part, within two minutes
    python benchmarks/serve_load.py --part clients --out F       # or abuse, or soak

clients: 1, 8 and 64 clients who each ask again as soon as they are answered, one held-out sentence at a time, of a
server whose requests share batches, of one whose requests do not (--alone), and of a plain one that translates one
request at a time (`one_at_a_time.py`), in turns; beside them the same sentences by `Translator` in bulk, batch 64, the
same threads. abuse: how long honest clients wait while another sends requests a
second over the limits and bodies that never end, beside how long they wait without him. soak: after a warm-up, the
most resident memory in the first and in the second half of so many requests.
Servers and clients are processes of their own on one machine: clients take time that the servers then lack.
"""

# ruff: noqa: E402  # the path must be set before what lies on it is imported

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]  # so that it can be run as a file too

import torch
import typer

from benchmarks.turns import Worker, ratio
from experiments.passport import passport, write_result
from transduce import Translator
from transduce.evaluation.evaluate import read_text
from transduce.model_folder.format import BUNDLED_MODEL, find_model

PARTS = ("clients", "abuse", "soak")
CLIENTS = (1, 8, 64)
WARM_UP = 50
N_LOOKS = 20
"""At the memory, during a soak."""
NO_RATE = ("client_rate=1e6", "client_burst=1000000", "client_connections=1000")
"""All clients are of one address here, and what is measured is not how often one may come."""
HONEST, ABUSER = "127.0.0.1", "127.0.0.9"
ABUSE_RATE = 50
"""Requests a second: one who is over a limit and one whose body never ends, in turns."""


HEAD = b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "


# In the process of the clients


class Load(NamedTuple):
    url: str
    texts: list[str]
    n_clients: int
    n_requests: int
    abuse: bool


async def ask_all(load: Load) -> dict[str, Any]:
    """Of so many requests, how long each took and its code; how long all took.

    Written on sockets: the usual clients take longer for a request than the server does, on cores that are its own.
    """
    numbers = itertools.count()
    seconds: list[float] = []
    codes: Counter[str] = Counter()
    host, port = load.url.removeprefix("http://").split(":")
    questions = [_question(text) for text in load.texts]

    async def client() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while (n := next(numbers)) < load.n_requests:
            began = time.perf_counter()
            writer.write(questions[n % len(questions)])
            code, _ = await _answer(reader)
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


def _question(text: str) -> bytes:
    body = json.dumps({"q": text, "source": "de", "target": "en"}).encode()
    return HEAD + str(len(body)).encode() + b"\r\n\r\n" + body


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    assert length is not None
    return head[9:12].decode(), await reader.readexactly(int(length[1]))


async def abuse(url: str, codes: Counter[str]) -> None:
    """From an address of its own, at a steady rate, without waiting for answers."""
    host, port = url.removeprefix("http://").split(":")
    long = json.dumps({"q": "Das ist gut. " * 5000, "source": "de", "target": "en"}).encode()
    sent = [HEAD + str(len(long)).encode() + b"\r\n\r\n" + long, HEAD + b'90000\r\n\r\n{"q": "']

    async def one(data: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(ABUSER, 0))
            writer.write(data)
            line = await reader.readline()
            codes[f"abuser {line[9:12].decode() or 'closed'}"] += 1
            writer.close()
        except OSError:
            codes["abuser closed"] += 1

    tasks = set()
    for n in itertools.count():
        task = asyncio.create_task(one(sent[n % 2]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(1 / ABUSE_RATE)


def work() -> None:
    sys.stdin.readline()  # the task, which is empty
    for line in sys.stdin:
        print(json.dumps(asyncio.run(ask_all(Load(**json.loads(line))))), flush=True)


# Beside them


@contextmanager
def server(threads: int, precision: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Ours: its address and the number of its process."""
    command = ["transduce", "serve", "--port", "0", "--quiet", "--device", "cpu", "--threads", str(threads)]
    with started(*command, "--dtype", precision, *flags) as found:
        yield found


@contextmanager
def started(*module: str) -> Iterator[tuple[str, int]]:
    place = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-m", *module], stderr=subprocess.PIPE, text=True, cwd=place) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            while line and not line.startswith("serving at "):
                line = process.stderr.readline()
            yield line.split()[-1], process.pid
        finally:
            process.terminate()


def limits(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--limit", setting)]


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Over rounds: requests a second of each, and how long requests of all took."""
    seconds = sorted(second for one in found for second in one["seconds"])
    codes = sum((Counter(one["codes"]) for one in found), Counter())
    return {
        "per_second": [len(one["seconds"]) / one["total"] for one in found],
        "p50_ms": 1e3 * seconds[len(seconds) // 2],
        "p99_ms": 1e3 * seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)],
        "codes": dict(codes),
    }


def told(name: str, of: dict[str, Any]) -> None:
    print(
        f"{name:38} {statistics.median(of['per_second']):8.1f} requests/s   p50 {of['p50_ms']:7.1f} ms   "
        f"p99 {of['p99_ms']:7.1f} ms   {of['codes']}",
        flush=True,
    )


class Bench(NamedTuple):
    texts: list[str]
    threads: int
    precision: str
    rounds: int
    n_requests: int
    load: Worker

    def ask(self, url: str, n_clients: int, n_requests: int, *, with_abuse: bool = False) -> dict[str, Any]:
        found = self.load.ask(Load(url, self.texts, n_clients, n_requests, with_abuse)._asdict())
        assert found is not None, "the clients have died"
        return found  # type: ignore[no-any-return]

    def clients(self) -> dict[str, Any]:
        flags = limits(*NO_RATE)
        found: dict[str, dict[str, list[Any]]] = {"together": {}, "alone": {}, "one at a time": {}}
        bulk: list[float] = []
        with (
            server(self.threads, self.precision, *flags) as (together, _),
            server(self.threads, self.precision, "--alone", *flags) as (alone, _),
            started("benchmarks.one_at_a_time", self.precision, str(self.threads)) as (one, _),
        ):
            urls = dict(zip(found, (together, alone, one), strict=True))
            for url in urls.values():
                self.ask(url, 8, WARM_UP)
            for _ in range(self.rounds):
                for n, (way, url) in itertools.product(CLIENTS, urls.items()):
                    if (n, way) == (CLIENTS[-1], "together"):
                        bulk.append(self.bulk())  # just before what it is compared with
                    share = self.n_requests if n > 1 else max(20, self.n_requests // 4)
                    found[way].setdefault(str(n), []).append(self.ask(url, n, share))
        result = {way: {n: summary(of) for n, of in by.items()} for way, by in found.items()}
        for way, by in result.items():
            for n_clients, of in by.items():
                told(f"{n_clients} clients, {way}", of)
        print(f"{'in bulk, batch 64':38} {statistics.median(bulk):8.1f} sentences/s", flush=True)
        by_way = {way: of[str(CLIENTS[-1])]["per_second"] for way, of in result.items()}
        ours = by_way.pop("together")
        over = {name: ratio(ours, theirs) for name, theirs in {**by_way, "bulk": bulk}.items()}
        shown = [f"{median:.2f} ({low:.2f}-{high:.2f}) times {name}" for name, (median, low, high) in over.items()]
        print(f"{CLIENTS[-1]} clients: {', '.join(shown)}", flush=True)
        return {**result, "bulk_per_second": bulk, "ratio_at_64": over}

    def bulk(self) -> float:
        """In a process of its own, so that its threads do not linger beside the servers."""
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
        """Eight honest clients. The rate is lifted, or it would refuse the abuser first: this is the harder case."""
        found: dict[str, list[Any]] = {"quiet": [], "beside an abuser": []}
        with server(self.threads, self.precision, *limits(*NO_RATE[:2])) as (url, _):
            self.ask(url, 8, WARM_UP)
            for _, name in itertools.product(range(self.rounds), found):
                found[name].append(self.ask(url, 8, self.n_requests, with_abuse=name != "quiet"))
        result = {name: summary(of) for name, of in found.items()}
        for name, of in result.items():
            told(f"8 honest clients, {name}", of)
        print(f"p99 {result['beside an abuser']['p99_ms'] / result['quiet']['p99_ms']:.2f} times the quiet one")
        return result

    def soak(self, n_requests: int) -> dict[str, Any]:
        with server(self.threads, self.precision, *limits(*NO_RATE)) as (url, process):
            self.ask(url, 64, max(WARM_UP, n_requests // 5))
            sizes = []
            for _ in range(N_LOOKS):
                self.ask(url, 64, n_requests // N_LOOKS)
                sizes.append(resident(process))
        # It goes up with long sentences and down when memory is given back: the highest of each half tell of growth.
        first, last = max(sizes[: N_LOOKS // 2]), max(sizes[N_LOOKS // 2 :])
        growth = (last - first) / first
        print(
            f"resident memory at most {first:.0f} MB in the first half of {n_requests} requests, "
            f"{last:.0f} MB in the second ({100 * growth:+.1f} %)",
            flush=True,
        )
        return {"n_requests": n_requests, "resident_mb": sizes, "growth": growth}


def resident(process: int) -> float:
    """MB, as Linux tells it."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("resident memory is read from /proc, which is not here")


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}; all when not given.")] = None,
    threads: Annotated[int, typer.Option(help="Of a server, and in bulk.")] = torch.get_num_threads(),
    dtype: Annotated[str, typer.Option(metavar="float32|int8")] = "float32",
    requests: Annotated[int, typer.Option(help="Of a round. At its end clients run out, so few would not do.")] = 3000,
    rounds: int = 3,
    soak: Annotated[int, typer.Option(help="Requests of the soak, after its warm-up.")] = 20_000,
    quick: Annotated[bool, typer.Option(help="Fewer requests, one round.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work()
        return
    chosen = part or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        raise SystemExit(f"--part {unknown.pop()} is none of {', '.join(PARTS)}")
    folder = find_model(Path(BUNDLED_MODEL))
    texts = read_text(folder / "heldout.de.xz")[:1000]
    load = Worker(__file__, {})
    bench = Bench(texts, threads, dtype, 1 if quick else rounds, 150 if quick else requests, load)
    result: dict[str, Any] = {
        "benchmark": "serve_load",
        "model": folder.name,
        "dtype": dtype,
        "threads": threads,
        "requests": bench.n_requests,
    }
    try:
        for name in chosen:
            result[name] = bench.soak(500 if quick else soak) if name == "soak" else getattr(bench, name)()
    finally:
        load.end()
    if out is not None:
        write_result(out, result | passport(Translator.load(folder, device="cpu").config, "cpu"))


if __name__ == "__main__":
    typer.run(main)
