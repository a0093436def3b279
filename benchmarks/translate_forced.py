"""Translation speed for a model of any size: random weights, and translations with as many tokens as their source.

    python benchmarks/translate_forced.py --size base --out benchmarks/results/translate_forced_base_cpu.json
    python benchmarks/translate_forced.py --growth --out benchmarks/results/translate_growth_cpu.json
    python benchmarks/translate_forced.py --device cuda --vocabulary 37000 --source FILE --subwords FILE

Compares our program with CTranslate2 and Hugging Face, with the same weights, in turns, with beam 4, each with the
batch size that is best for it. With `--source`, the lengths are those of the lines of a file, in the subwords of
`--subwords`. On a GPU our program is compared with Hugging Face, both in bfloat16, and greedy translation of one
sentence at a time is timed too. `--growth` measures sentences per second by batch size, beam size and length, and also
draws charts.
The last line is `ratio R (low-high)`: our speed divided by that of CTranslate2, both in int8, or on a GPU by that of
Hugging Face, as the median, the lowest and the highest value of all rounds.
"""

# ruff: noqa: E402  # the path must be set before the imports that need it

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

sys.path[:0] = [str(Path(__file__).parents[1])]  # lets this file run as a script

import torch
import typer

from benchmarks.translate_speed import CT2, HF, OURS, PAUSE
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
"""The two ways whose ratio is reported."""
BATCH_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": dict.fromkeys((OURS, CT2, HF), (16, 32, 64, 128)),
    "cuda": {OURS: (256, 512, 1024), HF: (128, 256, 512)},
}
"""The batch sizes that are tried for each program."""
GROWTH = {"batch": (1, 4, 16, 64, 256), "beam": (1, 2, 4, 8, 16), "length": (10, 20, 40, 80, 160)}
"""The values of each quantity. The other quantities stay at 64, 4 and `--length`."""

Rows = list[list[int]]
Translate = Callable[[Rows, int, int], int]
"""Takes source ids, the beam size and the batch size, and returns the number of tokens of all translations."""


# In the process of a worker


def work(task: dict[str, Any]) -> None:
    """Read requests, and answer each with the seconds that the translation took."""
    config = config_of(task["size"], task["vocabulary"])
    translate = PROGRAMS[task["name"]](config, task)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(0)
        rows = [torch.randint(100, 7000, (length - 1,)).tolist() for length in request["lengths"]]
        began = time.perf_counter()
        n_tokens = translate(rows, request["beam"], request["batch"])
        assert n_tokens >= sum(map(len, rows)), "some translations ended too early"
        print(json.dumps(time.perf_counter() - began), flush=True)


def config_of(size: str, vocabulary: int) -> RunConfig:
    return with_model(PRESETS[size](), source_vocab_size=vocabulary, target_vocab_size=vocabulary)


def model_of(config: RunConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(config.model).eval()


def by_length(rows: Rows) -> list[tuple[int, list[int]]]:
    """The rows with their numbers, the longest first."""
    return sorted(enumerate(rows), key=lambda numbered_row: -len(numbered_row[1]))


def load_ours(config: RunConfig, task: dict[str, Any]) -> Translate:
    device, dtype = task["device"], task["dtype"]
    on_gpu = device == "cuda"
    model = model_of(config).to(device, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    stepper = RecordedStepper(model) if on_gpu else NativeStepper(model, dtype)
    n_threads, rules = 1 if on_gpu else torch.get_num_threads(), free(config.model).to(device)

    def translate(rows: Rows, beam: int, batch: int) -> int:
        # No translation may end before the length of the longest source, and each must end at that of its own source.
        settings = replace(
            config.decode,
            beam_size=beam,
            min_length=max(map(len, rows)) + 1,
            max_extra_tokens=0,
            length_penalty="length",
            length_alpha=1.0,
            n_best=1,
        )
        sentences = [Sentence(i, [*row, config.model.eos_id]) for i, row in by_length(rows)]

        def search_one(share: Sequence[Sentence], stop: threading.Event) -> Iterator[Result]:
            return search(
                stepper,
                config.model,
                share,
                settings,
                rules,
                batch_size=batch,
                batch_tokens=TOKENS_PER_SENTENCE * batch if on_gpu else 1_000_000,
                device=device,
            )

        shares = [sentences[i::n_threads] for i in range(n_threads)]
        results = in_threads(search_one, shares) if n_threads > 1 else search_one(sentences, threading.Event())
        return sum(len(hypotheses[0].ids) for _, hypotheses in results)

    return translate


def load_ctranslate2(config: RunConfig, task: dict[str, Any]) -> Translate:
    import ctranslate2

    translator = ctranslate2.Translator(
        task["converted"], compute_type=task["dtype"], inter_threads=torch.get_num_threads(), intra_threads=1
    )
    pieces = Subwords.load(BUNDLED / SUBWORDS).pieces(range(7000))

    def translate(rows: Rows, beam: int, batch: int) -> int:
        length = max(map(len, rows)) + 1
        results = translator.translate_batch(
            [[pieces[i] for i in row] for row in rows],
            beam_size=beam,
            length_penalty=1.0,
            max_batch_size=batch,
            min_decoding_length=length,
            max_decoding_length=length,
        )
        return sum(len(result.hypotheses[0]) for result in results)

    return translate


def load_hugging_face(config: RunConfig, task: dict[str, Any]) -> Translate:
    device, pad_id, eos_id = task["device"], config.model.pad_id, config.model.eos_id
    model = to_marian(model_of(config)).to(device, getattr(torch, task["dtype"]))

    def translate(rows: Rows, beam: int, batch: int) -> int:
        n_tokens, ordered = 0, [row for _, row in by_length(rows)]
        for first in range(0, len(ordered), batch):
            batch_rows = ordered[first : first + batch]
            longest = len(batch_rows[0]) + 1
            source_BS = torch.tensor([[*row, eos_id, *[pad_id] * (longest - len(row) - 1)] for row in batch_rows])
            generated = model.generate(
                input_ids=source_BS.to(device),
                attention_mask=(source_BS != pad_id).long().to(device),
                num_beams=beam,
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                length_penalty=1.0,
                early_stopping=False,
            )
            n_tokens += generated[:, 1:].numel()
        return n_tokens

    return translate


PROGRAMS: dict[str, Callable[[RunConfig, dict[str, Any]], Translate]] = {
    OURS: load_ours,
    CT2: load_ctranslate2,
    HF: load_hugging_face,
}


# In the main process


def main(
    size: Annotated[str, typer.Option(help=f"The size of the model: {', '.join(PRESETS)}.")] = "base",
    vocabulary: Annotated[int, typer.Option(help="The size of the vocabulary.")] = 32_000,
    length: Annotated[int, typer.Option(help="Tokens of each source and of each translation.")] = 20,
    sentences: int = 128,
    source: Annotated[Path | None, typer.Option(help="Use the lengths of the lines of this file.")] = None,
    subwords: Annotated[
        Path | None, typer.Option(help="The subwords for --source. Default: those of the bundled model.")
    ] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    rounds: int = 5,
    growth: Annotated[bool, typer.Option("--growth", help="Measure and draw the growth instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work(json.loads(sys.stdin.readline()))
        return
    config = config_of(size, vocabulary)
    lengths = [length] * sentences
    if source is not None:
        rows = Subwords.load(subwords or BUNDLED / SUBWORDS).encode(read_text(source)[:sentences])
        lengths = [len(row) + 1 for row in rows]
    result: dict[str, Any] = {
        "benchmark": "translate_forced",
        "size": size,
        "sentences": len(lengths),
        "target_tokens": sum(lengths),
        "longest": max(lengths),
    }
    with tempfile.TemporaryDirectory() as temporary:
        workers = {
            name: start_worker(program, dtype, config, size, device, Path(temporary))
            for name, (program, dtype) in ((f"{way[0]} ({way[1]})", way) for way in WAYS[device])
            if not growth or name in PEERS[device]
        }
        request = {"lengths": lengths, "beam": 4}
        result |= measure_growth(workers, request) if growth else measure(workers, request, rounds, device)
        for process in workers.values():
            process.end()
    if out is not None:
        write_result(out, result | passport(config, device))
        if growth:
            draw(out, result)
    if not growth:
        print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


def start_worker(name: str, dtype: str, config: RunConfig, size: str, device: str, temporary: Path) -> Worker:
    task = {"name": name, "dtype": dtype, "size": size, "vocabulary": config.model.target_vocab_size, "device": device}
    if name == CT2:
        task["converted"] = str(temporary / dtype)
        to_ctranslate2(model_of(config), Subwords.load(BUNDLED / SUBWORDS), temporary / dtype, dtype)
    return Worker(__file__, task)


def per_second(worker: Worker, request: dict[str, Any]) -> float:
    """Sentences translated per second."""
    time.sleep(PAUSE)
    seconds = worker.request(request)
    assert seconds is not None, "a worker has died"
    return float(len(request["lengths"]) / seconds)


def measure(workers: dict[str, Worker], request: dict[str, Any], rounds: int, device: str) -> dict[str, Any]:
    batch = {
        name: best_batch(worker, request, device, BATCH_SIZES[device][name.split(" (")[0]])
        for name, worker in workers.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            speeds[name].append(per_second(worker, request | {"batch": batch[name]}))
    for name, values in speeds.items():
        spread = f"({min(values):.1f}-{max(values):.1f})"
        print(f"{name:26} {statistics.median(values):8.1f} sentences/s {spread}, batch size {batch[name]}")
    ours, theirs = PEERS[device]
    result: dict[str, Any] = {"per_second": speeds, "batch": batch, "ratio": ratio(speeds[ours], speeds[theirs])}
    if device == "cpu":
        return result | {"over_hugging_face": ratio(speeds[ours], speeds[f"{HF} (float32)"])}
    return result | measure_alone(workers, statistics.median_low(request["lengths"]), rounds)


def measure_alone(workers: dict[str, Worker], length: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per sentence of `length` tokens, translated greedily, one at a time."""
    request = {"lengths": [length] * 10, "beam": 1, "batch": 1}
    milliseconds: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, worker in workers.items():
            milliseconds[name].append(1000 / per_second(worker, request))
    for name, values in milliseconds.items():
        values.pop(0)  # the first round is the warm-up
        spread = f"({min(values):.1f}-{max(values):.1f})"
        print(f"{name:26} {statistics.median(values):8.1f} ms for {length} tokens, greedy {spread}")
    return {"milliseconds_alone_greedy": milliseconds, "tokens_alone": length}


def best_batch(worker: Worker, request: dict[str, Any], device: str, batch_sizes: Sequence[int]) -> int:
    """The fastest batch size. Each is measured twice, and the first time is the warm-up."""
    if device == "cuda":  # enough sentences for a few full batches of all lengths
        request = request | {"lengths": request["lengths"][: 2 * batch_sizes[-1]]}
    speeds = {batch: per_second(worker, request | {"batch": batch}) for batch in [*batch_sizes, *batch_sizes]}
    print({batch: round(speed, 1) for batch, speed in speeds.items()}, flush=True)
    return max(speeds, key=lambda batch: speeds[batch])


def measure_growth(workers: dict[str, Worker], request: dict[str, Any]) -> dict[str, Any]:
    """For each quantity, way and value: the value, and the median, lowest and highest sentences per second."""
    growth: dict[str, Any] = {}
    n_sentences, length = len(request["lengths"]), request["lengths"][0]
    for quantity, values in GROWTH.items():
        growth[quantity] = {name: [] for name in workers}
        for value in values:
            point = {"batch": 64, "beam": 4, "length": length} | {quantity: value}
            # Enough sentences to fill batches, but few if one batch is so small that each sentence takes long.
            n_full = max(n_sentences, 2 * torch.get_num_threads() * point["batch"])
            n = 32 if point["batch"] * point["beam"] < 8 else n_full
            task = {"lengths": [point["length"]] * n, "beam": point["beam"], "batch": point["batch"]}
            for name, worker in workers.items():
                speeds = [per_second(worker, task) for _ in range(3)]
                growth[quantity][name].append([value, statistics.median(speeds), min(speeds), max(speeds)])
                print(quantity, value, name, f"{statistics.median(speeds):.1f}", flush=True)
    return {"growth": growth}


def draw(out: Path, result: dict[str, Any]) -> None:
    axes = {"batch": "highest batch size", "beam": "beam size", "length": "tokens of source and translation"}
    for quantity, lines in result["growth"].items():
        line_chart(
            out.with_name(f"{out.stem}_{quantity}.svg"),
            f"Translation, {result['size']}, two cores",
            axes[quantity],
            "sentences per second",
            {name: [(x, y) for x, y, *_ in line] for name, line in lines.items()},
        )


if __name__ == "__main__":
    typer.run(main)
