"""The way of the data, measured: preparing, encoding beside plain SentencePiece, the batch plan, and resident memory.

python -m benchmarks.data_speed --data-root FOLDER --out benchmarks/results/data_speed.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from transduce import DataConfig, ModelConfig
from transduce.data.batches import steps
from transduce.data.corpora import RawPair, find_corpus, named_corpus
from transduce.data.parallel import ordered_map
from transduce.data.plan import make_layout
from transduce.data.prepare import Prepared, encode_pairs, prepare
from transduce.data.stats import measure

CHUNK = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](options.child[1])))
        return
    # Torch comes with it, which would count in the memory of the processes below.
    from experiments.passport import commit, sources, write_result

    with tempfile.TemporaryDirectory() as folder:
        result = {
            "commit": commit(),
            "sources": sources(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "sentencepiece": sentencepiece.__version__,
            },
            "prepare_multi30k": told(prepare_multi30k(options.data_root, Path(folder), options.rounds)),
            "encode": told(encode(options.data_root, Path(folder), options.rounds)),
            "padding": told(padding(options.data_root, Path(folder))),
            "plan": told(in_a_new_process("plan", 10_000_000)),
            "memory": [told(memory(size, Path(folder))) for size in options.sizes],
        }
    if options.out:
        write_result(options.out, result)


def told(found: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(found), flush=True)
    return found


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def prepare_multi30k(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """The whole command, from its start to its end."""
    times, reports = [], []
    for _ in range(rounds):
        out = folder / "multi30k"
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        where = ["--data-root", str(root), "--out", str(out)]
        command = [sys.executable, "-m", "transduce", "prepare", "multi30k", *where]
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
        reports.append(Prepared(out).report)
    return {
        "pairs": reports[0].corpora[0].n_read,
        "seconds": spread(times),
        "stages": {stage: spread([r.seconds[stage] for r in reports]) for stage in reports[0].seconds},
    }


def encode(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Europarl, in the vocabulary that prepare makes of it; both from lines in memory to arrays of ids in memory."""
    corpus = named_corpus("europarl", "train", None, root)
    assert corpus is not None
    prepare([corpus], folder / "europarl", DataConfig())
    subwords = Prepared(folder / "europarl").subwords
    processor = sentencepiece.SentencePieceProcessor(model_proto=subwords.model)
    pairs = list(itertools.islice(corpus.read([]), 100_000))
    lines = [text.decode() for pair in pairs for text in pair]

    def plain() -> Any:
        return np.concatenate([np.array(processor.encode(line), dtype=np.uint16) for line in lines])

    def ours(n_processes: int) -> Any:
        chunks: Iterator[list[RawPair]] = (pairs[i : i + CHUNK] for i in range(0, len(pairs), CHUNK))
        parts = ordered_map(partial(encode_pairs, subwords=subwords), chunks, n_processes)
        return np.concatenate([part.ids for part in parts])

    ways: dict[str, Callable[[], Any]] = {"plain": plain}
    ways |= {"one process": partial(ours, 1), "two processes": partial(ours, 2)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        found = []
        for name, way in ways.items():
            start = time.perf_counter()
            found.append(way())
            times[name].append(time.perf_counter() - start)
        assert all((ids == found[0]).all() for ids in found), "all give the same ids"
    return {
        "pairs": len(pairs),
        "pairs_per_second": {name: spread([len(pairs) / t for t in some]) for name, some in times.items()},
        "ratio_to_plain": {
            name: spread([p / t for p, t in zip(times["plain"], some, strict=True)]) for name, some in times.items()
        },
    }


def padding(root: Path, folder: Path) -> dict[str, Any]:
    """At the paper's 25,000 tokens, of the folders that the others have prepared."""
    found = {}
    for name in ("multi30k", "europarl"):
        stats = measure(Prepared(folder / name), DataConfig(), seed=1)
        found[name] = {
            "steps": stats.n_steps,
            "micro_batches": stats.n_micro_batches,
            "shapes": stats.n_shapes,
            "source_non_pad_share": stats.source_non_pad_share,
            "target_non_pad_share": stats.target_non_pad_share,
            "source_tokens_per_step": stats.source_tokens_per_step,
            "target_tokens_per_step": stats.target_tokens_per_step,
        }
    return found


def in_a_new_process(name: str, argument: object) -> dict[str, Any]:
    """So that its resident memory is its own."""
    command = [sys.executable, "-m", "benchmarks.data_speed", "--data-root", ".", "--child", name, str(argument)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def memory(n_pairs: int, folder: Path) -> dict[str, Any]:
    """Synthetic pairs of some fifteen words: what preparing them takes, and then reading batches of them."""
    place = folder / f"synthetic-{n_pairs}"
    place.mkdir()
    write_synthetic(n_pairs, place)
    found = in_a_new_process("prepare", place) | in_a_new_process("read", place)
    shutil.rmtree(place)
    return {"pairs": n_pairs} | found


def write_synthetic(n_pairs: int, place: Path) -> None:
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(50_000)]
    with (place / "x.de").open("w") as source, (place / "x.en").open("w") as target:
        for _ in range(0, n_pairs, CHUNK):
            # Frequent words are very frequent, as in a language.
            chosen = (50_000 * rng.random((CHUNK, 2, 30)) ** 4).astype(int)
            length = np.clip(rng.gamma(4, 4, CHUNK).astype(int), 3, 30)
            for (source_words, target_words), n in zip(chosen.tolist(), length.tolist(), strict=True):
                source.write(" ".join(words[w] for w in source_words[:n]) + "\n")
                target.write(" ".join(words[w] for w in target_words[:n]) + "\n")


def prepare_child(place: str) -> dict[str, Any]:
    workers_mib: dict[str, float] = {}

    def watch_workers(*_: object) -> None:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(OSError, KeyError):  # it may just have ended
                workers_mib[pid] = max(workers_mib.get(pid, 0.0), mib("VmHWM", pid))

    start = time.perf_counter()
    files = [f"{place}/x.de", f"{place}/x.en"]
    report = prepare([find_corpus(files, None)], f"{place}/out", DataConfig(), progress=watch_workers)
    return {
        "prepare_seconds": time.perf_counter() - start,
        "prepare_stages": report.seconds,
        "prepare_peak_mib": mib("VmHWM"),
        "prepare_worker_peak_mib": max(workers_mib.values(), default=None),
    }


def read_child(place: str) -> dict[str, Any]:
    prepared = Prepared(f"{place}/out")
    before = mib("VmRSS")
    examples = prepared.train
    layout = make_layout(*examples.lengths(), batch_tokens=25_000, n_shapes=128, seed=1)
    start = time.perf_counter()
    n_steps, most = 1000, 0.0
    for n_done, _ in enumerate(steps(examples, layout, ModelConfig()), 1):
        if n_done % 20 == 0:
            most = max(most, mib("VmRSS"))
        if n_done == n_steps:
            break
    return {
        "store_mib": (Path(place) / "out" / "train.tokens").stat().st_size / 2**20,
        "open_resident_mib": before,
        "read_most_resident_mib": most,
        "read_peak_mib": mib("VmHWM"),
        "batches_per_second": n_steps / (time.perf_counter() - start),
    }


def mib(field: str, pid: str = "self") -> float:
    """VmRSS: resident now; VmHWM: resident at most, so far."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[field].split()[0]) / 1024


def plan_child(n_pairs: str) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    source_N = np.maximum(1, rng.gamma(2.5, 12, int(n_pairs))).astype(np.int32)
    ratio_N = 0.96 + 0.14 * rng.standard_normal(int(n_pairs), dtype=np.float32)
    target_N = np.maximum(1, source_N * ratio_N).astype(np.int32)
    del ratio_N
    before = mib("VmRSS")
    start = time.perf_counter()
    layout = make_layout(source_N, target_N, batch_tokens=25_000, n_shapes=128, seed=1)
    made = time.perf_counter()
    epoch = layout.epoch(3)
    planned = time.perf_counter()
    first = epoch.step(layout.n_steps // 2)
    sought = time.perf_counter()
    return {
        "pairs": int(n_pairs),
        "steps": layout.n_steps,
        "layout_seconds": made - start,
        "epoch_seconds": planned - made,
        "seek_to_the_middle_seconds": sought - planned,
        "rows_of_that_step": sum(len(micro.rows) for micro in first),
        "lengths_resident_mib": before,
        "peak_mib": mib("VmHWM"),
    }


CHILDREN = {"prepare": prepare_child, "read": read_child, "plan": plan_child}

if __name__ == "__main__":
    main()
