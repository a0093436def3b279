"""Translation's speed for any size of model: random weights, sources of some tokens, translations of as many.

    python benchmarks/translate_forced.py --size base --out benchmarks/results/translate_forced_base_cpu.json
    python benchmarks/translate_forced.py --growth --out benchmarks/results/translate_growth_cpu.json

Ours beside CTranslate2 and Hugging Face, the same weights, in turns; beam 4, and whichever size of batch is best for
each. `--growth`: sentences a second against the size of a batch, the width of the beam and the length, as charts too.
The last line is `ratio R (low-high)`: ours over CTranslate2, both in int8.
"""

# ruff: noqa: E402  # the path must be set before what lies on it is imported

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
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
from transduce.checkpoint import BUNDLED
from transduce.config import PRESETS, RunConfig
from transduce.data.subword import SUBWORDS, Subwords
from transduce.decoding import Sentence, search
from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import to_marian
from transduce.native_stepper import NativeStepper
from transduce.stepper import FastStepper
from transduce.translate import in_threads

WAYS = ((OURS, "int8"), (OURS, "float32"), (CT2, "int8"), (CT2, "float32"), (HF, "float32"))
BATCHES = (16, 32, 64, 128)
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
        rows = torch.randint(100, 7000, (question["n"], question["length"] - 1)).tolist()
        began = time.perf_counter()
        n_tokens = go(rows, question["beam"], question["batch"])
        assert n_tokens >= question["n"] * (question["length"] - 1), "some have ended early"
        print(json.dumps(time.perf_counter() - began), flush=True)


def config_of(size: str, vocabulary: int) -> RunConfig:
    return with_model(PRESETS[size](), source_vocab_size=vocabulary, target_vocab_size=vocabulary)


def model_of(config: RunConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config.model).eval()


def ours(config: RunConfig, task: dict[str, Any]) -> Go:
    model, own = model_of(config), config.model
    stepper = NativeStepper(model) if task["dtype"] == "int8" else FastStepper(model)
    n_threads = torch.get_num_threads()

    def go(rows: Rows, beam: int, batch: int) -> int:
        length = len(rows[0]) + 1
        settings = replace(
            config.decode, beam_size=beam, min_length=length, max_extra_tokens=0, length_penalty="length",
            length_alpha=1.0, n_best=1,
        )  # fmt: skip
        sentences = [Sentence(i, [*row, own.eos_id]) for i, row in enumerate(rows)]
        found = in_threads(
            lambda share, stop: search(stepper, own, share, settings, batch_size=batch, batch_tokens=1_000_000),
            [sentences[i::n_threads] for i in range(n_threads)],
        )
        return sum(len(hypotheses[0].ids) for _, hypotheses in found)

    return go


def by_ctranslate2(config: RunConfig, task: dict[str, Any]) -> Go:
    import ctranslate2

    theirs = ctranslate2.Translator(
        task["converted"], compute_type=task["dtype"], inter_threads=torch.get_num_threads(), intra_threads=1
    )
    pieces = Subwords.load(BUNDLED / SUBWORDS).pieces(range(7000))

    def go(rows: Rows, beam: int, batch: int) -> int:
        length = len(rows[0]) + 1
        found = theirs.translate_batch(
            [[pieces[i] for i in row] for row in rows], beam_size=beam, length_penalty=1.0, max_batch_size=batch,
            min_decoding_length=length, max_decoding_length=length,
        )  # fmt: skip
        return sum(len(one.hypotheses[0]) for one in found)

    return go


def by_hugging_face(config: RunConfig, task: dict[str, Any]) -> Go:
    theirs, own = to_marian(model_of(config)), config.model

    def go(rows: Rows, beam: int, batch: int) -> int:
        n_tokens = 0
        for first in range(0, len(rows), batch):
            source_BS = torch.tensor([[*row, own.eos_id] for row in rows[first : first + batch]])
            found = theirs.generate(
                input_ids=source_BS, attention_mask=torch.ones_like(source_BS), num_beams=beam, do_sample=False,
                min_new_tokens=source_BS.shape[1], max_new_tokens=source_BS.shape[1], length_penalty=1.0,
                early_stopping=False,
            )  # fmt: skip
            n_tokens += found[:, 1:].numel()
        return n_tokens

    return go


# Beside them


def main(
    size: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "base",
    vocabulary: int = 32_000,
    length: Annotated[int, typer.Option(help="Tokens of a source and of a translation.")] = 20,
    sentences: int = 128,
    rounds: int = 5,
    growth: Annotated[bool, typer.Option("--growth", help="Charts instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work(json.loads(sys.stdin.readline()))
        return
    config = config_of(size, vocabulary)
    result: dict[str, Any] = {"benchmark": "translate_forced", "size": size, "sentences": sentences, "length": length}
    with tempfile.TemporaryDirectory() as place:
        ways = [way for way in WAYS if not growth or way[1] == "int8"]
        workers = {f"{name} ({dtype})": start(name, dtype, config, size, Path(place)) for name, dtype in ways}
        question = {"n": sentences, "length": length, "beam": 4}
        result |= grow(workers, question) if growth else measure(workers, question, rounds)
        for one in workers.values():
            one.end()
    if out is not None:
        write_result(out, result | passport(config, "cpu"))
        if growth:
            draw(out, result)
    if not growth:
        print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


def start(name: str, dtype: str, config: RunConfig, size: str, place: Path) -> Worker:
    task = {"name": name, "dtype": dtype, "size": size, "vocabulary": config.model.target_vocab_size}
    if name == CT2:
        task["converted"] = str(place / dtype)
        to_ctranslate2(model_of(config), Subwords.load(BUNDLED / SUBWORDS), place / dtype, dtype)
    return Worker(__file__, task)


def per_second(worker: Worker, question: dict[str, Any]) -> float:
    time.sleep(REST)
    seconds = worker.ask(question)
    assert seconds is not None, "it has died"
    return float(question["n"] / seconds)


def measure(workers: dict[str, Worker], question: dict[str, Any], rounds: int) -> dict[str, Any]:
    batch = {
        name: max(BATCHES, key=lambda batch, one=one: per_second(one, question | {"batch": batch}))  # type: ignore[misc]
        for name, one in workers.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, one in workers.items():
            speeds[name].append(per_second(one, question | {"batch": batch[name]}))
    for name, of in speeds.items():
        print(f"{name:26} {statistics.median(of):8.1f} sentences/s ({min(of):.1f}-{max(of):.1f}), batch {batch[name]}")
    ours, theirs = speeds[f"{OURS} (int8)"], speeds[f"{CT2} (int8)"]
    over_hf = ratio(ours, speeds[f"{HF} (float32)"])
    return {"per_second": speeds, "batch": batch, "ratio": ratio(ours, theirs), "over_hugging_face": over_hf}


def grow(workers: dict[str, Worker], question: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for of, values in GROWTH.items():
        found[of] = {name: [] for name in workers}
        for value in values:
            for name, one in workers.items():
                asked = {"batch": 64} | question | {of: value}
                asked["n"] = max(asked["n"], 2 * torch.get_num_threads() * asked["batch"])  # or no batch would be full
                if asked["batch"] * asked["beam"] < 8:
                    asked["n"] = 32  # one by one it takes long
                speeds = [per_second(one, asked) for _ in range(3)]
                found[of][name].append([value, statistics.median(speeds), min(speeds), max(speeds)])
                print(of, value, name, f"{statistics.median(speeds):.1f}", flush=True)
    return {"growth": found}


def draw(out: Path, result: dict[str, Any]) -> None:
    names = {"batch": "sentences at a time", "beam": "width of the beam", "length": "tokens of source and translation"}
    for of, lines in result["growth"].items():
        line_chart(
            out.with_name(f"{out.stem}_{of}.svg"), f"Translation, {result['size']}, two cores", names[of],
            "sentences a second", {name: [(x, y) for x, y, *_ in line] for name, line in lines.items()},
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
