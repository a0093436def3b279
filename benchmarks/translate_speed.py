"""Sentences translated per second, compared with CTranslate2 and Hugging Face: same weights, sentences and search.

    python benchmarks/translate_speed.py --quick                          # two cores, within two minutes
    python benchmarks/translate_speed.py --model RUN --source F --reference F

Each program runs in its own process. The processes take turns, each with the batch size that is best for it. For one
sentence at a time, CTranslate2 uses the number of threads that is best for it. All programs use beam 4 with the length
penalty length ** 1, which CTranslate2 and Hugging Face have. The translations are scored: a speed that costs more than
0.3 BLEU does not count. Without --quick, the first translation of a new process is also timed, from outside.
`translate_forced.py` measures other sizes, and how the speed grows with batch, beam and length.
The last line is `ratio R (low-high)`: our speed divided by that of CTranslate2 in int8, as the median, the lowest and
the highest value of all rounds.
"""

# ruff: noqa: E402  # the path must be set before the imports that need it

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

sys.path[:0] = [str(Path(__file__).parents[1])]  # lets this file run as a script

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
MAX_TOKENS = 100
"""The most tokens of a translation. Peers must know it beforehand."""
MAX_BLEU_LOSS = 0.3
PAUSE = 0.3
"""Seconds between turns. Threads of the previous program may still wait for work, and so keep a core busy."""

BATCH_SIZES = {OURS: (32, 64, 128), CT2: (16, 32, 64, 128), HF: (16, 32, 64)}
"""The batch sizes that are tried for each program."""

Translate = Callable[[list[str], int, int], list[str]]
"""Takes texts, the beam size and a setting: the batch size, or for a single text the number of threads."""


# In the process of a worker


def work(task: dict[str, Any]) -> None:
    """Read requests, and answer each with the seconds that the translation took, and with the translations."""
    translate = PROGRAMS[task["name"]](task)
    for line in sys.stdin:
        request = json.loads(line)
        texts = task["sources"][: request["n"]]
        calls = [[text] for text in texts] if request["one_by_one"] else [texts]
        began = time.perf_counter()
        translations = [text for call in calls for text in translate(call, request["beam"], request["setting"])]
        print(json.dumps([time.perf_counter() - began, translations]), flush=True)


def load_ours(task: dict[str, Any]) -> Translate:
    translator = Translator.load(task["model"], device=task["device"], precision=task["dtype"])

    def translate(texts: list[str], beam: int, setting: int) -> list[str]:
        translator.batch_size = setting
        translator.settings = replace(translator.settings, beam_size=beam, length_penalty="length", length_alpha=1.0)
        return [translation.text for translation in translator.translate(texts)]

    return translate


def load_ctranslate2(task: dict[str, Any]) -> Translate:
    import ctranslate2

    subwords = Translator.load(task["model"], device="cpu").subwords
    id_of = {piece: i for i, piece in enumerate(subwords.pieces(range(len(subwords))))}
    n_threads = torch.get_num_threads()
    translators = {
        (inter, intra): ctranslate2.Translator(
            task["converted"],
            device=task["device"],
            compute_type=task["dtype"],
            inter_threads=inter,
            intra_threads=intra,
        )
        for inter, intra in {(n_threads, 1), (1, 1), (1, n_threads)}
    }

    def translate(texts: list[str], beam: int, setting: int) -> list[str]:
        pieces = [subwords.pieces(ids) for ids in subwords.encode(texts)]
        results = translators[(1, setting) if len(texts) == 1 else (n_threads, 1)].translate_batch(
            pieces, beam_size=beam, length_penalty=1.0, max_decoding_length=MAX_TOKENS, max_batch_size=setting
        )
        return subwords.decode([[id_of[piece] for piece in result.hypotheses[0]] for result in results])

    return translate


def load_hugging_face(task: dict[str, Any]) -> Translate:
    translator = Translator.load(task["model"], device="cpu")
    subwords, config, device = translator.subwords, translator.config.model, task["device"]
    model = to_marian(translator.model).to(device)

    def translate(texts: list[str], beam: int, setting: int) -> list[str]:
        rows = [[*ids, config.eos_id] for ids in subwords.encode(texts)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # batches of similar lengths, as users make them
        translations: dict[int, list[int]] = {}
        for first in range(0, len(order), setting):
            batch = order[first : first + setting]
            longest = max(len(rows[i]) for i in batch)
            source_BS = torch.tensor([[*rows[i], *[config.pad_id] * (longest - len(rows[i]))] for i in batch])
            generated = model.generate(
                input_ids=source_BS.to(device),
                attention_mask=(source_BS != config.pad_id).long().to(device),
                num_beams=beam,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                length_penalty=1.0,
                bad_words_ids=[[config.pad_id]],
                early_stopping=False,
            )
            for i, ids in zip(batch, generated.tolist(), strict=True):
                translations[i] = [token for token in ids[1:] if token not in (config.eos_id, config.pad_id)]
        return subwords.decode([translations[i] for i in range(len(rows))])

    return translate


PROGRAMS: dict[str, Callable[[dict[str, Any]], Translate]] = {
    OURS: load_ours,
    CT2: load_ctranslate2,
    HF: load_hugging_face,
}


# In the main process


def main(
    model: Annotated[Path, typer.Option(help="A model folder or a run folder.")] = Path(BUNDLED_MODEL),
    source: Annotated[
        Path | None, typer.Option(help="The text to translate. Default: the held-out text of the model.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Its translation. Default: the held-out text of the model.")
    ] = None,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    sentences: int = 1000,
    rounds: int = 5,
    quick: Annotated[bool, typer.Option(help="Use fewer sentences and rounds.")] = False,
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
    with tempfile.TemporaryDirectory() as temporary:
        workers = start_workers(folder, device, sources, Path(temporary))
        result = measure(workers, references, rounds, 20 if quick else 50)
        for process in workers.values():
            process.end()
    if not quick:
        result["cold_start_seconds"] = cold_starts(folder, sources[0], rounds)
    if out is not None:
        write_result(
            out,
            {"benchmark": "translate_speed", "model": folder.name, **result}
            | passport(Translator.load(folder, device="cpu").config, device),
        )
    print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


COLD_START_SCRIPTS = {
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
translator = ctranslate2.Translator({converted!r}, compute_type="int8", intra_threads=1)
(result,) = translator.translate_batch([subwords.encode({text!r}, out_type=str)], beam_size=4)
print(subwords.decode(result.hypotheses[0]))
""",
    f"{HF} (float32)": """
import torch, sentencepiece
from transformers import MarianMTModel
subwords = sentencepiece.SentencePieceProcessor(model_file={converted!r} + "/subwords.model")
model = MarianMTModel.from_pretrained({marian!r})
source = torch.tensor([[*subwords.encode({text!r}), model.config.eos_token_id]])
print(subwords.decode(model.generate(source, num_beams=4, max_new_tokens=50, do_sample=False)[0].tolist()))
""",
}


def cold_starts(folder: Path, text: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of processes that translate one sentence, from their start to their end."""
    seconds: dict[str, list[float]] = {name: [] for name in COLD_START_SCRIPTS}
    with tempfile.TemporaryDirectory() as temporary:
        translator = Translator.load(folder, device="cpu")
        converted, marian = f"{temporary}/ct2", f"{temporary}/marian"
        to_ctranslate2(translator.model, translator.subwords, Path(converted), "int8")
        to_marian(translator.model).save_pretrained(marian)
        for _ in range(rounds):
            for name, template in COLD_START_SCRIPTS.items():
                script = template.format(model=str(folder), text=text, converted=converted, marian=marian)
                began = time.perf_counter()
                done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
                seconds[name].append(time.perf_counter() - began)
                assert done.stdout.strip(), f"{name} has printed no translation"
    for name, values in seconds.items():
        print(f"cold start, {name:26} {statistics.median(values):.2f} s ({min(values):.2f}-{max(values):.2f})")
    return seconds


def start_workers(folder: Path, device: str, sources: list[str], temporary: Path) -> dict[str, Worker]:
    """One worker for each program and precision."""
    translator = Translator.load(folder, device="cpu")
    workers = {}
    for name, dtype in ((OURS, "int8"), (OURS, "float32"), (CT2, "int8"), (CT2, "float32"), (HF, "float32")):
        task = {"name": name, "model": str(folder), "device": device, "sources": sources, "dtype": dtype}
        if name == CT2:
            task["converted"] = str(temporary / dtype)
            to_ctranslate2(translator.model, translator.subwords, temporary / dtype, dtype)
        workers[f"{name} ({dtype})"] = Worker(__file__, task)
    return workers


def answer_of(worker: Worker, name: str, request: dict[str, Any]) -> tuple[float, list[str]]:
    """The seconds that the translation took, and the translations."""
    answer = worker.request(request)
    assert answer is not None, f"{name} has died"
    seconds, texts = answer
    return seconds, texts


def best_settings(workers: dict[str, Worker], *, one_by_one: bool) -> dict[str, int]:
    """The fastest batch size of each worker; for one sentence at a time, the fastest number of threads."""
    best = {}
    request = {"n": 10 if one_by_one else 200, "beam": 1 if one_by_one else 4, "one_by_one": one_by_one}
    for name, worker in workers.items():
        program = name.split(" (")[0]
        settings: tuple[int, ...] = BATCH_SIZES[program]
        if one_by_one:  # only CTranslate2 has a setting for the number of threads
            settings = tuple({1, torch.get_num_threads()}) if program == CT2 else (1,)
        answer_of(worker, name, request | {"n": 10, "setting": settings[0]})  # warm-up
        seconds = {setting: answer_of(worker, name, request | {"setting": setting})[0] for setting in settings}
        best[name] = min(seconds, key=lambda setting: seconds[setting])
    return best


def measure(workers: dict[str, Worker], references: list[str], rounds: int, n_alone: int) -> dict[str, Any]:
    """`n_alone`: the number of sentences that are translated one at a time."""
    kinds = {
        "beam 4": {"n": len(references), "beam": 4, "one_by_one": False},
        "greedy": {"n": len(references), "beam": 1, "one_by_one": False},
        "one by one, greedy": {"n": n_alone, "beam": 1, "one_by_one": True},
        "one by one, beam 4": {"n": n_alone, "beam": 4, "one_by_one": True},
    }
    best = {kind: best_settings(workers, one_by_one=kind == "one by one") for kind in ("bulk", "one by one")}
    result: dict[str, Any] = {"sentences": len(references), "best": best, "per_second": {}, "bleu": {}}
    for kind, request in kinds.items():
        settings = best["one by one" if request["one_by_one"] else "bulk"]
        speeds: dict[str, list[float]] = {name: [] for name in workers}
        translations = {}
        for _ in range(rounds):
            for name, worker in workers.items():
                time.sleep(PAUSE)
                seconds, translations[name] = answer_of(worker, name, request | {"setting": settings[name]})
                speeds[name].append(request["n"] / seconds)
        scores = {
            name: bleu(texts, references[: request["n"]], n_bootstrap=0).value for name, texts in translations.items()
        }
        result["per_second"][kind], result["bleu"][kind] = speeds, scores
        print(kind)
        for name, values in speeds.items():
            print(
                f"  {name:26} {statistics.median(values):9,.1f} sentences/s ({min(values):,.1f}-{max(values):,.1f}), "
                f"BLEU {scores[name]:.1f}",
                flush=True,
            )
    return result | comparison(result["per_second"], result["bleu"]["beam 4"])


def comparison(per_second: dict[str, dict[str, list[float]]], scores: dict[str, float]) -> dict[str, Any]:
    """Our fastest precision compared with the peers. `scores`: BLEU with beam 4."""
    bulk, alone = per_second["beam 4"], per_second["one by one, greedy"]
    ours, ours_alone = fastest_of_ours(bulk), fastest_of_ours(alone)
    if (loss := scores[f"{OURS} (float32)"] - scores[ours]) > MAX_BLEU_LOSS:
        raise SystemExit(f"{ours} loses {loss:.2f} BLEU, so its speed does not count")
    return {
        "ours": ours,
        "ratio": ratio(bulk[ours], bulk[PEER]),
        "over_hugging_face": ratio(bulk[ours], bulk[f"{HF} (float32)"]),
        "latency_over_ctranslate2_float32": ratio(alone[f"{CT2} (float32)"], alone[ours_alone]),
    }


def fastest_of_ours(speeds: dict[str, list[float]]) -> str:
    return max((name for name in speeds if name.startswith(OURS)), key=lambda name: statistics.median(speeds[name]))


if __name__ == "__main__":
    typer.run(main)
