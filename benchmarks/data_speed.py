"""Time and memory of the data pipeline: preparation, encoding compared with plain SentencePiece, and the batch plan.

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
"""Pairs that are encoded or written at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="The folder with the corpora.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="Repetitions of each measurement of time.")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[100_000, 1_000_000, 10_000_000],
        help="Numbers of synthetic pairs, for the measurement of memory.",
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](options.child[1])))
        return
    # Imported only here: it imports torch, which would count as memory of the child processes.
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
            "prepare_multi30k": printed(prepare_multi30k(options.data_root, Path(folder), options.rounds)),
            "encode": printed(encode(options.data_root, Path(folder), options.rounds)),
            "padding": printed(padding(options.data_root, Path(folder))),
            "plan": printed(in_a_new_process("plan", 10_000_000)),
            "memory": [printed(memory(size, Path(folder))) for size in options.sizes],
        }
    if options.out:
        write_result(options.out, result)


def printed(result: dict[str, Any]) -> dict[str, Any]:
    """Print the result and return it."""
    print(json.dumps(result), flush=True)
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def prepare_multi30k(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """The seconds of the whole command, measured from outside, and of its stages."""
    times, reports = [], []
    for _ in range(rounds):
        out = folder / "multi30k"
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        arguments = ["--data-root", str(root), "--out", str(out)]
        command = [sys.executable, "-m", "transduce", "prepare", "multi30k", *arguments]
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
        reports.append(Prepared(out).report)
    return {
        "pairs": reports[0].corpora[0].n_read,
        "seconds": spread(times),
        "stages": {stage: spread([report.seconds[stage] for report in reports]) for stage in reports[0].seconds},
    }


def encode(root: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Encode Europarl with the vocabulary that `prepare` makes from it, from lines in memory to ids in memory."""
    corpus = named_corpus("europarl", "train", None, root)
    assert corpus is not None
    prepare([corpus], folder / "europarl", DataConfig())
    subwords = Prepared(folder / "europarl").subwords
    processor = sentencepiece.SentencePieceProcessor(model_proto=subwords.model)
    pairs = list(itertools.islice(corpus.read([]), 100_000))
    lines = [text.decode() for pair in pairs for text in pair]

    def encode_plainly() -> Any:
        return np.concatenate([np.array(processor.encode(line), dtype=np.uint16) for line in lines])

    def encode_ours(n_processes: int) -> Any:
        chunks: Iterator[list[RawPair]] = (pairs[i : i + CHUNK] for i in range(0, len(pairs), CHUNK))
        parts = ordered_map(partial(encode_pairs, subwords=subwords), chunks, n_processes)
        return np.concatenate([part.ids for part in parts])

    encoders: dict[str, Callable[[], Any]] = {"plain": encode_plainly}
    encoders |= {"one process": partial(encode_ours, 1), "two processes": partial(encode_ours, 2)}
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        results = []
        for name, encoder in encoders.items():
            start = time.perf_counter()
            results.append(encoder())
            times[name].append(time.perf_counter() - start)
        assert all((ids == results[0]).all() for ids in results), "the encoders give different ids"
    return {
        "pairs": len(pairs),
        "pairs_per_second": {name: spread([len(pairs) / t for t in by_round]) for name, by_round in times.items()},
        "ratio_to_plain": {
            name: spread([plain / t for plain, t in zip(times["plain"], by_round, strict=True)])
            for name, by_round in times.items()
        },
    }


def padding(root: Path, folder: Path) -> dict[str, Any]:
    """The share of padding in batches of the paper's 25,000 tokens. The other measurements have prepared the data."""
    shares = {}
    for name in ("multi30k", "europarl"):
        stats = measure(Prepared(folder / name), DataConfig(), seed=1)
        shares[name] = {
            "steps": stats.n_steps,
            "micro_batches": stats.n_micro_batches,
            "shapes": stats.n_shapes,
            "source_non_pad_share": stats.source_non_pad_share,
            "target_non_pad_share": stats.target_non_pad_share,
            "source_tokens_per_step": stats.source_tokens_per_step,
            "target_tokens_per_step": stats.target_tokens_per_step,
        }
    return shares


def in_a_new_process(name: str, argument: object) -> dict[str, Any]:
    """Run a function of CHILDREN in a new process, so that its resident memory is not mixed with that of others."""
    command = [sys.executable, "-m", "benchmarks.data_speed", "--data-root", ".", "--child", name, str(argument)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def memory(n_pairs: int, folder: Path) -> dict[str, Any]:
    """Memory and time of preparing synthetic pairs of about fifteen words, and then of reading batches of them."""
    data = folder / f"synthetic-{n_pairs}"
    data.mkdir()
    write_synthetic(n_pairs, data)
    result = in_a_new_process("prepare", data) | in_a_new_process("read", data)
    shutil.rmtree(data)
    return {"pairs": n_pairs} | result


def write_synthetic(n_pairs: int, folder: Path) -> None:
    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(50_000)]
    with (folder / "x.de").open("w") as source, (folder / "x.en").open("w") as target:
        for _ in range(0, n_pairs, CHUNK):
            # A few words are very frequent, as in natural language.
            words_of_pairs = (50_000 * rng.random((CHUNK, 2, 30)) ** 4).astype(int)
            length = np.clip(rng.gamma(4, 4, CHUNK).astype(int), 3, 30)
            for (source_words, target_words), n in zip(words_of_pairs.tolist(), length.tolist(), strict=True):
                source.write(" ".join(words[w] for w in source_words[:n]) + "\n")
                target.write(" ".join(words[w] for w in target_words[:n]) + "\n")


def prepare_child(folder: str) -> dict[str, Any]:
    workers_mib: dict[str, float] = {}

    def watch_workers(*_: object) -> None:
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(OSError, KeyError):  # a worker that has ended has no memory
                workers_mib[pid] = max(workers_mib.get(pid, 0.0), mib("VmHWM", pid))

    start = time.perf_counter()
    files = [f"{folder}/x.de", f"{folder}/x.en"]
    report = prepare([find_corpus(files, None)], f"{folder}/out", DataConfig(), progress=watch_workers)
    return {
        "prepare_seconds": time.perf_counter() - start,
        "prepare_stages": report.seconds,
        "prepare_peak_mib": mib("VmHWM"),
        "prepare_worker_peak_mib": max(workers_mib.values(), default=None),
    }


def read_child(folder: str) -> dict[str, Any]:
    prepared = Prepared(f"{folder}/out")
    resident_before = mib("VmRSS")
    examples = prepared.train
    layout = make_layout(*examples.lengths(), batch_tokens=25_000, n_shapes=128, seed=1)
    start = time.perf_counter()
    n_steps, max_resident = 1000, 0.0
    for n_done, _ in enumerate(steps(examples, layout, ModelConfig()), 1):
        if n_done % 20 == 0:
            max_resident = max(max_resident, mib("VmRSS"))
        if n_done == n_steps:
            break
    return {
        "store_mib": (Path(folder) / "out" / "train.tokens").stat().st_size / 2**20,
        "open_resident_mib": resident_before,
        "read_most_resident_mib": max_resident,
        "read_peak_mib": mib("VmHWM"),
        "batches_per_second": n_steps / (time.perf_counter() - start),
    }


def mib(field: str, pid: str = "self") -> float:
    """A field of /proc: VmRSS is the resident memory now, VmHWM its peak so far."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[field].split()[0]) / 1024


def plan_child(n_pairs: str) -> dict[str, Any]:
    """The plan of the batches of an epoch, for pairs of random lengths."""
    rng = np.random.default_rng(1)
    source_N = np.maximum(1, rng.gamma(2.5, 12, int(n_pairs))).astype(np.int32)
    ratio_N = 0.96 + 0.14 * rng.standard_normal(int(n_pairs), dtype=np.float32)
    target_N = np.maximum(1, source_N * ratio_N).astype(np.int32)
    del ratio_N
    resident_before = mib("VmRSS")
    start = time.perf_counter()
    layout = make_layout(source_N, target_N, batch_tokens=25_000, n_shapes=128, seed=1)
    layout_done = time.perf_counter()
    epoch = layout.epoch(3)
    epoch_done = time.perf_counter()
    middle_step = epoch.step(layout.n_steps // 2)
    seek_done = time.perf_counter()
    return {
        "pairs": int(n_pairs),
        "steps": layout.n_steps,
        "layout_seconds": layout_done - start,
        "epoch_seconds": epoch_done - layout_done,
        "seek_to_the_middle_seconds": seek_done - epoch_done,
        "rows_of_that_step": sum(len(micro.rows) for micro in middle_step),
        "lengths_resident_mib": resident_before,
        "peak_mib": mib("VmHWM"),
    }


CHILDREN = {"prepare": prepare_child, "read": read_child, "plan": plan_child}

if __name__ == "__main__":
    main()
