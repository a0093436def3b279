"""Translation's speed for any size of model: random weights, sources of some tokens, translations of as many.

    python benchmarks/translate_forced.py --size base --out benchmarks/results/translate_forced_base_cpu.json
    python benchmarks/translate_forced.py --growth --out benchmarks/results/translate_growth_cpu.json
    python benchmarks/translate_forced.py --device cuda --vocabulary 37000 --source FILE --subwords FILE

Ours beside CTranslate2 and Hugging Face, the same weights, in turns; beam 4, and whichever size of batch is best for
each. With `--source`, lengths are those of its lines in these subwords. On a GPU ours is beside Hugging Face, both in
bfloat16, and one sentence at a time, greedy, is timed too. `--growth`: sentences a second against the size of a batch,
the width of the beam and the length, as charts too.
The last line is `ratio R (low-high)`: ours over CTranslate2, both in int8; on a GPU, over Hugging Face.
"""

# ruff: noqa: E402  # the path must be set before what lies on it is imported

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path[:0] = [str(Path(__file__).parents[1])]  # so that it can be run as a file too

import torch
import typer

from benchmarks.translate_speed import CT2, HF, OURS, REST
from benchmarks.turns import Worker, ratio
from experiments.chart import line_chart
from experiments.passport import passport, write_result
from transduce import Transformer, with_model
from transduce.config import PRESETS, RunConfig
from transduce.data.subword import SUBWORDS, Subwords
from transduce.engines.cuda.recorded import RecordedStepper
from transduce.engines.native.stepper import NativeStepper
from transduce.evaluation.evaluate import read_text
from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import to_marian
from transduce.model_folder.format import BUNDLED
from transduce.search.candidates import free
from transduce.search.hypotheses import Sentence
from transduce.search.loop import search
from transduce.translation.threads import Result, in_threads
from transduce.translation.translator import TOKENS_PER_SENTENCE

WAYS = {
    "cpu": ((OURS, "int8"), (OURS, "float32"), (CT2, "int8"), (CT2, "float32"), (HF, "float32")),
    "cuda": ((OURS, "bfloat16"), (OURS, "float32"), (HF, "bfloat16")),
}
PEERS = {"cpu": (f"{OURS} (int8)", f"{CT2} (int8)"), "cuda": (f"{OURS} (bfloat16)", f"{HF} (bfloat16)")}
"""Whose ratio is told."""
BATCHES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": dict.fromkeys((OURS, CT2, HF), (16, 32, 64, 128)),
    "cuda": {OURS: (256, 512, 1024), HF: (128, 256, 512)},
}
GROWTH = {"batch": (1, 4, 16, 64, 256), "beam": (1, 2, 4, 8, 16), "length": (10, 20, 40, 80, 160)}

Rows = list[list[int]]
Go = Callable[[Rows, int, int], int]
"""Sources, the width of the beam and the size of a batch; how many tokens came out."""


# In the process of a way


def work(task: dict[str, Any]) -> None:
    config = config_of(task["size"], task["vocabulary"])
    go = {OURS: ours, CT2: by_ctranslate2, HF: by_hugging_face}[task["name"]](config, task)
    for line in sys.stdin:
        question = json.loads(line)
        torch.manual_seed(0)
        rows = [torch.randint(100, 7000, (length - 1,)).tolist() for length in question["lengths"]]
        began = time.perf_counter()
        n_tokens = go(rows, question["beam"], question["batch"])
        assert n_tokens >= sum(map(len, rows)), "some have ended early"
        print(json.dumps(time.perf_counter() - began), flush=True)


def config_of(size: str, vocabulary: int) -> RunConfig:
    return with_model(PRESETS[size](), source_vocab_size=vocabulary, target_vocab_size=vocabulary)


def model_of(config: RunConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config.model).eval()


def by_length(rows: Rows) -> list[tuple[int, list[int]]]:
    """The longest first, each with its number."""
    return sorted(enumerate(rows), key=lambda numbered: -len(numbered[1]))


def ours(config: RunConfig, task: dict[str, Any]) -> Go:
    device, dtype = task["device"], task["dtype"]
    on_gpu = device == "cuda"
    model, own = model_of(config).to(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32), config.model
    stepper = RecordedStepper(model) if on_gpu else NativeStepper(model, dtype)
    n_threads, rules = 1 if on_gpu else torch.get_num_threads(), free(own).to(device)

    def go(rows: Rows, beam: int, batch: int) -> int:
        longest = max(map(len, rows)) + 1  # before which none may end; and at its source's length each must
        settings = replace(
            config.decode,
            beam_size=beam,
            min_length=longest,
            max_extra_tokens=0,
            length_penalty="length",
            length_alpha=1.0,
            n_best=1,
        )
        sentences = [Sentence(i, [*row, own.eos_id]) for i, row in by_length(rows)]

        def search_one(share: Sequence[Sentence], stop: threading.Event) -> Iterator[Result]:
            return search(
                stepper,
                own,
                share,
                settings,
                rules,
                batch_size=batch,
                batch_tokens=TOKENS_PER_SENTENCE * batch if on_gpu else 1_000_000,
                device=device,
            )

        shares = [sentences[i::n_threads] for i in range(n_threads)]
        found = in_threads(search_one, shares) if n_threads > 1 else search_one(sentences, threading.Event())
        return sum(len(hypotheses[0].ids) for _, hypotheses in found)

    return go


def by_ctranslate2(config: RunConfig, task: dict[str, Any]) -> Go:
    import ctranslate2

    theirs = ctranslate2.Translator(
        task["converted"], compute_type=task["dtype"], inter_threads=torch.get_num_threads(), intra_threads=1
    )
    pieces = Subwords.load(BUNDLED / SUBWORDS).pieces(range(7000))

    def go(rows: Rows, beam: int, batch: int) -> int:
        length = max(map(len, rows)) + 1
        found = theirs.translate_batch(
            [[pieces[i] for i in row] for row in rows],
            beam_size=beam,
            length_penalty=1.0,
            max_batch_size=batch,
            min_decoding_length=length,
            max_decoding_length=length,
        )
        return sum(len(one.hypotheses[0]) for one in found)

    return go


def by_hugging_face(config: RunConfig, task: dict[str, Any]) -> Go:
    device, own = task["device"], config.model
    theirs = to_marian(model_of(config)).to(device, getattr(torch, task["dtype"]))

    def go(rows: Rows, beam: int, batch: int) -> int:
        n_tokens, ordered = 0, [row for _, row in by_length(rows)]
        for first in range(0, len(ordered), batch):
            some = ordered[first : first + batch]
            longest = len(some[0]) + 1
            source_BS = torch.tensor([[*row, own.eos_id, *[own.pad_id] * (longest - len(row) - 1)] for row in some])
            found = theirs.generate(
                input_ids=source_BS.to(device),
                attention_mask=(source_BS != own.pad_id).long().to(device),
                num_beams=beam,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                length_penalty=1.0,
                early_stopping=False,
            )
            n_tokens += found[:, 1:].numel()
        return n_tokens

    return go


# Beside them


def main(
    size: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "base",
    vocabulary: int = 32_000,
    length: Annotated[int, typer.Option(help="Tokens of a source and of a translation.")] = 20,
    sentences: int = 128,
    source: Annotated[Path | None, typer.Option(help="Lengths are those of its lines.")] = None,
    subwords: Annotated[Path | None, typer.Option(help="In these subwords.")] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    rounds: int = 5,
    growth: Annotated[bool, typer.Option("--growth", help="Charts instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work(json.loads(sys.stdin.readline()))
        return
    config = config_of(size, vocabulary)
    lengths = [length] * sentences
    if source is not None:
        ids = Subwords.load(subwords or BUNDLED / SUBWORDS).encode(read_text(source)[:sentences])
        lengths = [len(one) + 1 for one in ids]
    result: dict[str, Any] = {
        "benchmark": "translate_forced",
        "size": size,
        "sentences": len(lengths),
        "target_tokens": sum(lengths),
        "longest": max(lengths),
    }
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = PEERS[device]
        ways = {f"{name} ({dtype})": (name, dtype) for name, dtype in WAYS[device]}
        workers = {
            name: start(*way, config, size, device, Path(place))
            for name, way in ways.items()
            if not growth or name in (ours, theirs)
        }
        question = {"lengths": lengths, "beam": 4}
        if growth:
            result |= grow(workers, question)
        else:
            result |= measure(workers, question, rounds, device)
        for one in workers.values():
            one.end()
    if out is not None:
        write_result(out, result | passport(config, device))
        if growth:
            draw(out, result)
    if not growth:
        print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


def start(name: str, dtype: str, config: RunConfig, size: str, device: str, place: Path) -> Worker:
    task = {"name": name, "dtype": dtype, "size": size, "vocabulary": config.model.target_vocab_size, "device": device}
    if name == CT2:
        task["converted"] = str(place / dtype)
        to_ctranslate2(model_of(config), Subwords.load(BUNDLED / SUBWORDS), place / dtype, dtype)
    return Worker(__file__, task)


def per_second(worker: Worker, question: dict[str, Any]) -> float:
    time.sleep(REST)
    seconds = worker.ask(question)
    assert seconds is not None, "it has died"
    return float(len(question["lengths"]) / seconds)


def measure(workers: dict[str, Worker], question: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    batch = {
        name: best_batch(one, question, device, BATCHES[device][name.split(" (")[0]]) for name, one in workers.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, one in workers.items():
            speeds[name].append(per_second(one, question | {"batch": batch[name]}))
    for name, of in speeds.items():
        print(f"{name:26} {statistics.median(of):8.1f} sentences/s ({min(of):.1f}-{max(of):.1f}), batch {batch[name]}")
    ours, theirs = PEERS[device]
    found: dict[str, Any] = {"per_second": speeds, "batch": batch, "ratio": ratio(speeds[ours], speeds[theirs])}
    if device == "cpu":
        return found | {"over_hugging_face": ratio(speeds[ours], speeds[f"{HF} (float32)"])}
    usual = statistics.median_low(question["lengths"])
    alone = {"lengths": [usual] * 10, "beam": 1, "batch": 1}
    milliseconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, one in workers.items():
            milliseconds[name].append(1000 / per_second(one, alone))
    for name, of in milliseconds.items():
        of.pop(0)  # to warm up
        print(f"{name:26} {statistics.median(of):8.1f} ms for {usual} tokens, greedy ({min(of):.1f}-{max(of):.1f})")
    return found | {"milliseconds_alone_greedy": milliseconds, "tokens_alone": usual}


def best_batch(worker: Worker, question: dict[str, Any], device: str, batches: Sequence[int]) -> int:
    if device == "cuda":  # enough for a few full batches, of all lengths
        question = question | {"lengths": question["lengths"][: 2 * batches[-1]]}
    speeds = {batch: per_second(worker, question | {"batch": batch}) for batch in [*batches, *batches]}
    print({batch: round(speed, 1) for batch, speed in speeds.items()}, flush=True)  # of the second time
    return max(speeds, key=lambda batch: speeds[batch])


def grow(workers: dict[str, Worker], question: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    n, length = len(question["lengths"]), question["lengths"][0]
    for of, values in GROWTH.items():
        found[of] = {name: [] for name in workers}
        for value in values:
            asked = {"batch": 64, "beam": 4, "length": length} | {of: value}
            full = max(n, 2 * torch.get_num_threads() * asked["batch"])  # or no batch would be full
            asked["lengths"] = [asked["length"]] * (32 if asked["batch"] * asked["beam"] < 8 else full)
            for name, one in workers.items():
                speeds = [per_second(one, asked) for _ in range(3)]
                found[of][name].append([value, statistics.median(speeds), min(speeds), max(speeds)])
                print(of, value, name, f"{statistics.median(speeds):.1f}", flush=True)
    return {"growth": found}


def draw(out: Path, result: dict[str, Any]) -> None:
    names = {"batch": "batch size, at most", "beam": "width of the beam", "length": "tokens of source and translation"}
    for of, lines in result["growth"].items():
        line_chart(
            out.with_name(f"{out.stem}_{of}.svg"),
            f"Translation, {result['size']}, two cores",
            names[of],
            "sentences a second",
            {name: [(x, y) for x, y, *_ in line] for name, line in lines.items()},
        )


if __name__ == "__main__":
    typer.run(main)
