"""Sentences translated a second, ours beside CTranslate2 and Hugging Face: the same weights, sentences and search.

    python benchmarks/translate_speed.py --quick                          # two cores, within two minutes
    python benchmarks/translate_speed.py --model RUN --source F --reference F

Each way is a process of its own; they take turns, each with the size of batch that is best for it, and CTranslate2 with
one sentence at a time on as many threads as are best. All search with beam 4 under the length penalty that CTranslate2
and Hugging Face have, length ** 1. What each says is scored: speed that costs more than 0.3 BLEU does not count.
Without --quick the first translation of a new process is timed too, from outside. Other sizes, and how speed grows with
batch, beam and length: `translate_forced.py`.
The last line is `ratio R (low-high)`: ours over CTranslate2 in int8, the median of the rounds, the lowest, the highest.
"""

# ruff: noqa: E402  # the path must be set before what lies on it is imported

from __future__ import annotations

import json
import statistics
import subprocess
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
from transduce.evaluation.evaluate import read_text
from transduce.evaluation.metrics import bleu
from transduce.interop.ctranslate2 import to_ctranslate2
from transduce.interop.marian import to_marian
from transduce.model_folder.format import BUNDLED_MODEL, find_model

OURS, CT2, HF = "ours", "CTranslate2", "Hugging Face"
PEER = f"{CT2} (int8)"
MOST_TOKENS = 100
"""Of a translation, where a peer wants it known beforehand."""
SAME_BLEU = 0.3
REST = 0.3
"""Seconds between turns: threads of who was last may still be waiting for work, and keep a core busy by it."""

BEST = {OURS: (32, 64, 128), CT2: (16, 32, 64, 128), HF: (16, 32, 64)}
"""Sizes of batches to try."""

Translate = Callable[[list[str], int, int], list[str]]
"""Texts, the width of the beam, and how many at a time; of one text, on how many threads."""


# In the process of a way


def work(task: dict[str, Any]) -> None:
    """Reads which sentences to translate and how, and answers with what they became and how long it took."""
    translate = WAYS[task["name"]](task)
    for line in sys.stdin:
        question = json.loads(line)
        texts, how = task["sources"][: question["n"]], (question["beam"], question["best"])
        began = time.perf_counter()
        one_by_one = ([text] for text in texts)
        found = [text for some in (one_by_one if question["one_by_one"] else [texts]) for text in translate(some, *how)]
        print(json.dumps([time.perf_counter() - began, found]), flush=True)


def ours(task: dict[str, Any]) -> Translate:
    translator = Translator.load(task["model"], device=task["device"], precision=task["dtype"])

    def translate(texts: list[str], beam: int, best: int) -> list[str]:
        translator.batch_size = best
        translator.settings = replace(translator.settings, beam_size=beam, length_penalty="length", length_alpha=1.0)
        return [found.text for found in translator.translate(texts)]

    return translate


def by_ctranslate2(task: dict[str, Any]) -> Translate:
    import ctranslate2

    subwords = Translator.load(task["model"], device="cpu").subwords
    number = {piece: i for i, piece in enumerate(subwords.pieces(range(len(subwords))))}
    n_threads = torch.get_num_threads()
    theirs = {
        (inter, intra): ctranslate2.Translator(
            task["converted"],
            device=task["device"],
            compute_type=task["dtype"],
            inter_threads=inter,
            intra_threads=intra,
        )
        for inter, intra in {(n_threads, 1), (1, 1), (1, n_threads)}
    }

    def translate(texts: list[str], beam: int, best: int) -> list[str]:
        pieces = [subwords.pieces(ids) for ids in subwords.encode(texts)]
        found = theirs[(1, best) if len(texts) == 1 else (n_threads, 1)].translate_batch(
            pieces, beam_size=beam, length_penalty=1.0, max_decoding_length=MOST_TOKENS, max_batch_size=best
        )
        return subwords.decode([[number[piece] for piece in one.hypotheses[0]] for one in found])

    return translate


def by_hugging_face(task: dict[str, Any]) -> Translate:
    translator = Translator.load(task["model"], device="cpu")
    subwords, config, device = translator.subwords, translator.config.model, task["device"]
    theirs = to_marian(translator.model).to(device)

    def translate(texts: list[str], beam: int, best: int) -> list[str]:
        rows = [[*ids, config.eos_id] for ids in subwords.encode(texts)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # batches of a length, as its users do
        found: dict[int, list[int]] = {}
        for first in range(0, len(order), best):
            some = order[first : first + best]
            longest = max(len(rows[i]) for i in some)
            source_BS = torch.tensor([[*rows[i], *[config.pad_id] * (longest - len(rows[i]))] for i in some])
            generated = theirs.generate(
                input_ids=source_BS.to(device),
                attention_mask=(source_BS != config.pad_id).long().to(device),
                num_beams=beam,
                do_sample=False,
                max_new_tokens=MOST_TOKENS,
                length_penalty=1.0,
                bad_words_ids=[[config.pad_id]],
                early_stopping=False,
            )
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
    if not quick:
        result["cold_start_seconds"] = cold_starts(folder, sources[0], rounds)
    if out is not None:
        write_result(
            out,
            {"benchmark": "translate_speed", "model": folder.name, **result}
            | passport(Translator.load(folder, device="cpu").config, device),
        )
    print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


COLD = {
    f"{OURS} (int8)": """
from transduce import Translator
print(Translator.load({model!r}, precision="int8").translate([{text!r}])[0].text)
""",
    f"{OURS} (float32)": """
from transduce import Translator
print(Translator.load({model!r}).translate([{text!r}])[0].text)
""",
    f"{CT2} (int8)": """
import ctranslate2, sentencepiece
subwords = sentencepiece.SentencePieceProcessor(model_file={converted!r} + "/subwords.model")
theirs = ctranslate2.Translator({converted!r}, compute_type="int8", intra_threads=1)
(found,) = theirs.translate_batch([subwords.encode({text!r}, out_type=str)], beam_size=4)
print(subwords.decode(found.hypotheses[0]))
""",
    f"{HF} (float32)": """
import torch, sentencepiece
from transformers import MarianMTModel
subwords = sentencepiece.SentencePieceProcessor(model_file={converted!r} + "/subwords.model")
theirs = MarianMTModel.from_pretrained({marian!r})
source = torch.tensor([[*subwords.encode({text!r}), theirs.config.eos_token_id]])
print(subwords.decode(theirs.generate(source, num_beams=4, max_new_tokens=50, do_sample=False)[0].tolist()))
""",
}


def cold_starts(folder: Path, text: str, rounds: int) -> dict[str, list[float]]:
    """From the start of a process until it has said its first translation and ended."""
    seconds: dict[str, list[float]] = {name: [] for name in COLD}
    with tempfile.TemporaryDirectory() as place:
        translator = Translator.load(folder, device="cpu")
        names = {"model": str(folder), "text": text, "converted": f"{place}/ct2", "marian": f"{place}/marian"}
        to_ctranslate2(translator.model, translator.subwords, Path(names["converted"]), "int8")
        to_marian(translator.model).save_pretrained(names["marian"])
        for _ in range(rounds):
            for name, script in COLD.items():
                began = time.perf_counter()
                done = subprocess.run([sys.executable, "-c", script.format(**names)], check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - began)
                assert done.stdout.strip(), f"{name} has said nothing"
    for name, of in seconds.items():
        print(f"cold start, {name:26} {statistics.median(of):.2f} s ({min(of):.2f}-{max(of):.2f})")
    return seconds


def start(folder: Path, device: str, sources: list[str], place: Path) -> dict[str, Worker]:
    translator = Translator.load(folder, device="cpu")
    found = {}
    for name, dtype in ((OURS, "int8"), (OURS, "float32"), (CT2, "int8"), (CT2, "float32"), (HF, "float32")):
        task = {"name": name, "model": str(folder), "device": device, "sources": sources, "dtype": dtype}
        if name == CT2:
            task["converted"] = str(place / dtype)
            to_ctranslate2(translator.model, translator.subwords, place / dtype, dtype)
        found[f"{name} ({dtype})"] = Worker(__file__, task)
    return found


def best_of(workers: dict[str, Worker], kind: str) -> dict[str, int]:
    """The size of batch with which each is fastest in bulk; how many threads CTranslate2 wants for one sentence."""
    is_bulk, found = kind == "bulk", {}
    question = {"n": 200 if is_bulk else 10, "beam": 4 if is_bulk else 1, "one_by_one": not is_bulk}
    for name, one in workers.items():
        way = name.split(" (")[0]
        own = BEST[way] if is_bulk else tuple({1, torch.get_num_threads()}) if way == CT2 else (1,)
        one.ask(question | {"n": 10, "best": own[0]})
        seconds = {value: one.ask(question | {"best": value})[0] for value in own}  # type: ignore[index]
        found[name] = min(seconds, key=lambda value: seconds[value])
    return found


def measure(workers: dict[str, Worker], references: list[str], rounds: int, n_alone: int) -> dict[str, Any]:
    kinds = {
        "beam 4": {"n": len(references), "beam": 4, "one_by_one": False},
        "greedy": {"n": len(references), "beam": 1, "one_by_one": False},
        "one by one, greedy": {"n": n_alone, "beam": 1, "one_by_one": True},
        "one by one, beam 4": {"n": n_alone, "beam": 4, "one_by_one": True},
    }
    best = {kind: best_of(workers, kind) for kind in ("bulk", "one by one")}
    result: dict[str, Any] = {"sentences": len(references), "best": best, "per_second": {}, "bleu": {}}
    for kind, question in kinds.items():
        chosen = best["one by one" if question["one_by_one"] else "bulk"]
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        said = {}
        for _ in range(rounds):
            for name, one in workers.items():
                time.sleep(REST)
                answer = one.ask(question | {"best": chosen[name]})
                assert answer is not None, f"{name} has died"
                speeds[name].append(question["n"] / answer[0])
                said[name] = answer[1]
        result["per_second"][kind] = speeds
        result["bleu"][kind] = {
            name: bleu(texts, references[: question["n"]], n_bootstrap=0).value for name, texts in said.items()
        }
        print(kind)
        for name, of in speeds.items():
            print(
                f"  {name:26} {statistics.median(of):9,.1f} sentences/s ({min(of):,.1f}-{max(of):,.1f}), "
                f"BLEU {result['bleu'][kind][name]:.1f}",
                flush=True,
            )
    bulk, scores = result["per_second"]["beam 4"], result["bleu"]["beam 4"]
    own = max((name for name in bulk if name.startswith(OURS)), key=lambda name: statistics.median(bulk[name]))
    alone = result["per_second"]["one by one, greedy"]
    fastest = max((name for name in alone if name.startswith(OURS)), key=lambda name: statistics.median(alone[name]))
    result |= {
        "ours": own,
        "ratio": ratio(bulk[own], bulk[PEER]),
        "over_hugging_face": ratio(bulk[own], bulk[f"{HF} (float32)"]),
        "latency_over_ctranslate2_float32": ratio(alone[f"{CT2} (float32)"], alone[fastest]),
    }
    if scores[own] < scores[f"{OURS} (float32)"] - SAME_BLEU:
        raise SystemExit(f"{own} loses {scores[f'{OURS} (float32)'] - scores[own]:.2f} BLEU: its speed does not count")
    return result


if __name__ == "__main__":
    typer.run(main)
