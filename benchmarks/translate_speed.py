"""Sentences translated a second, ours beside CTranslate2 and Hugging Face: the same weights, sentences and search.

    python benchmarks/translate_speed.py --quick                          # two cores, within two minutes
    python benchmarks/translate_speed.py --model RUN --source F --reference F

Each way is a process of its own; they take turns. All search with beam 4 under the length penalty that CTranslate2 and
Hugging Face have, length ** 1. What each says is scored: speed that costs more than 0.3 BLEU does not count.
The last line is `ratio R (low-high)`: ours over CTranslate2 in int8, the median of the rounds, the lowest, the highest.
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

from benchmarks.turns import Worker, ratio
from experiments.passport import passport, write_result
from transduce import Translator
from transduce.checkpoint import BUNDLED_MODEL, find_model
from transduce.evaluate import read_text
from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import to_marian
from transduce.metrics import bleu

OURS, CT2, HF = "ours", "CTranslate2", "Hugging Face"
PEER = f"{CT2} (int8)"
MOST_TOKENS = 100
"""Of a translation, where a peer wants it known beforehand."""
SAME_BLEU = 0.3

Translate = Callable[[list[str], int], list[str]]
"""Texts and the width of the beam."""


# In the process of a way


def work(task: dict[str, Any]) -> None:
    """Reads which sentences to translate and how, and answers with what they became and how long it took."""
    translate = WAYS[task["name"]](task)
    for line in sys.stdin:
        question = json.loads(line)
        texts = task["sources"][: question["n"]]
        began = time.perf_counter()
        if question["one_by_one"]:
            found = [translate([text], question["beam"])[0] for text in texts]
        else:
            found = translate(texts, question["beam"])
        print(json.dumps([time.perf_counter() - began, found]), flush=True)


def ours(task: dict[str, Any]) -> Translate:
    translator = Translator.load(
        task["model"], device=task["device"], batch_size=task["batch_size"], precision=task["dtype"]
    )

    def translate(texts: list[str], beam: int) -> list[str]:
        translator.settings = replace(translator.settings, beam_size=beam, length_penalty="length", length_alpha=1.0)
        return [found.text for found in translator.translate(texts)]

    return translate


def by_ctranslate2(task: dict[str, Any]) -> Translate:
    import ctranslate2

    subwords = Translator.load(task["model"], device="cpu").subwords
    number = {piece: i for i, piece in enumerate(subwords.pieces(range(len(subwords))))}
    n_threads = torch.get_num_threads()
    kinds = {"bulk": (n_threads, 1), "one": (1, task["threads_for_one"])}  # what is best for each
    theirs = {
        kind: ctranslate2.Translator(
            task["converted"], device=task["device"], compute_type=task["dtype"], inter_threads=inter,
            intra_threads=intra,
        )
        for kind, (inter, intra) in kinds.items()
    }  # fmt: skip

    def translate(texts: list[str], beam: int) -> list[str]:
        pieces = [subwords.pieces(ids) for ids in subwords.encode(texts)]
        found = theirs["one" if len(texts) == 1 else "bulk"].translate_batch(
            pieces, beam_size=beam, length_penalty=1.0, max_decoding_length=MOST_TOKENS,
            max_batch_size=task["batch_size"],
        )  # fmt: skip
        return subwords.decode([[number[piece] for piece in one.hypotheses[0]] for one in found])

    return translate


def by_hugging_face(task: dict[str, Any]) -> Translate:
    translator = Translator.load(task["model"], device="cpu")
    subwords, config, device = translator.subwords, translator.config.model, task["device"]
    theirs = to_marian(translator.model).to(device)

    def translate(texts: list[str], beam: int) -> list[str]:
        rows = [[*ids, config.eos_id] for ids in subwords.encode(texts)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # batches of a length, as its users do
        found: dict[int, list[int]] = {}
        for first in range(0, len(order), task["batch_size"]):
            some = order[first : first + task["batch_size"]]
            longest = max(len(rows[i]) for i in some)
            source_BS = torch.tensor([[*rows[i], *[config.pad_id] * (longest - len(rows[i]))] for i in some])
            generated = theirs.generate(
                input_ids=source_BS.to(device), attention_mask=(source_BS != config.pad_id).long().to(device),
                num_beams=beam, do_sample=False, max_new_tokens=MOST_TOKENS, length_penalty=1.0,
                bad_words_ids=[[config.pad_id]], early_stopping=False,
            )  # fmt: skip
            for i, ids in zip(some, generated.tolist(), strict=True):
                found[i] = [token for token in ids[1:] if token not in (config.eos_id, config.pad_id)]
        return subwords.decode([found[i] for i in range(len(rows))])

    return translate


WAYS: dict[str, Callable[[dict[str, Any]], Translate]] = {OURS: ours, CT2: by_ctranslate2, HF: by_hugging_face}


# Beside them


def main(
    model: Annotated[Path, typer.Option(help="A model folder, or a run.")] = Path(BUNDLED_MODEL),
    source: Annotated[
        Path | None, typer.Option(help="What to translate; the model's own held-out text if none.")
    ] = None,
    reference: Path | None = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    sentences: int = 1000,
    rounds: int = 5,
    quick: Annotated[bool, typer.Option(help="Fewer sentences and rounds.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work(json.loads(sys.stdin.readline()))
        return
    folder = find_model(model)
    sources, references = (
        read_text(path or folder / f"heldout.{language}.xz")[: 400 if quick else sentences]
        for path, language in ((source, "de"), (reference, "en"))
    )
    rounds = 3 if quick else rounds
    with tempfile.TemporaryDirectory() as place:
        workers = start(folder, device, sources, Path(place))
        result = measure(workers, references, rounds, 20 if quick else 50)
        for one in workers.values():
            one.end()
    if out is not None:
        write_result(out, {"benchmark": "translate_speed", "model": folder.name, **result} | passport(
            Translator.load(folder, device="cpu").config, device))  # fmt: skip
    print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


def start(folder: Path, device: str, sources: list[str], place: Path) -> dict[str, Worker]:
    translator = Translator.load(folder, device="cpu")
    found = {}
    for name, dtype, batch_size in (
        (OURS, "float32", 128),
        (OURS, "int8", 128),
        (CT2, "int8", 128),
        (CT2, "float32", 128),
        (HF, "float32", 32),
    ):
        task = {"name": name, "model": str(folder), "device": device, "sources": sources, "dtype": dtype,
                "batch_size": batch_size, "threads_for_one": 1}  # fmt: skip
        if name == CT2:
            task["converted"] = str(place / dtype)
            to_ctranslate2(translator.model, translator.subwords, place / dtype, dtype)
        found[f"{name} ({dtype})"] = Worker(__file__, task)
    return found


def measure(workers: dict[str, Worker], references: list[str], rounds: int, n_alone: int) -> dict[str, Any]:
    kinds = {
        "beam 4": {"n": len(references), "beam": 4, "one_by_one": False},
        "greedy": {"n": len(references), "beam": 1, "one_by_one": False},
        "one by one, greedy": {"n": n_alone, "beam": 1, "one_by_one": True},
        "one by one, beam 4": {"n": n_alone, "beam": 4, "one_by_one": True},
    }
    for one in workers.values():
        one.ask(kinds["beam 4"] | {"n": 40})
    result: dict[str, Any] = {"sentences": len(references), "per_second": {}, "bleu": {}}
    for kind, question in kinds.items():
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        said = {}
        for _ in range(rounds):
            for name, one in workers.items():
                answer = one.ask(question)
                assert answer is not None, f"{name} has died"
                speeds[name].append(question["n"] / answer[0])
                said[name] = answer[1]
        result["per_second"][kind] = speeds
        result["bleu"][kind] = {name: bleu(texts, references[: question["n"]], n_bootstrap=0).value
                                for name, texts in said.items()}  # fmt: skip
        print(kind)
        for name, of in speeds.items():
            print(f"  {name:26} {statistics.median(of):9,.1f} sentences/s ({min(of):,.1f}-{max(of):,.1f}), "
                  f"BLEU {result['bleu'][kind][name]:.1f}", flush=True)  # fmt: skip
    bulk, scores = result["per_second"]["beam 4"], result["bleu"]["beam 4"]
    own = max((name for name in bulk if name.startswith(OURS)), key=lambda name: statistics.median(bulk[name]))
    result |= {"ours": own, "ratio": ratio(bulk[own], bulk[PEER])}
    if scores[own] < scores[f"{OURS} (float32)"] - SAME_BLEU:
        raise SystemExit(f"{own} loses {scores[f'{OURS} (float32)'] - scores[own]:.2f} BLEU: its speed does not count")
    return result


if __name__ == "__main__":
    typer.run(main)
