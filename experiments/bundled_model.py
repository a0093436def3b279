"""Makes the bundled model from the German and English sentences of Tatoeba (CC-BY 2.0), in three commands:

    python -m experiments.bundled_model split --data-root FOLDER --work WORK
    python -m experiments.bundled_model train --work WORK
    python -m experiments.bundled_model pack --work WORK

A fourth command, `depths`, compares numbers of encoder and decoder layers on the validation text. `split` holds out
sentences for validation and test, each with only one translation. No held-out German or English sentence occurs in the
training text. `train` calls `transduce train` and takes three minutes on one H200. `pack` converts the weights to
float16, scores the model on the test text and writes it into the package. FOLDER is the same as for
`transduce prepare --data-root`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from experiments.passport import passport, write_result
from transduce import Translator, load_model, override, save_model
from transduce.data.corpora import read_pairs
from transduce.data.prepare import Prepared
from transduce.data.subword import SUBWORDS, Subwords
from transduce.evaluation.evaluate import add_to_card, evaluate_files
from transduce.model_folder.format import BUNDLED, BUNDLED_MODEL, MODEL, WEIGHTS, load_origin
from transduce.training.run import RESULT

N_HELD_OUT = 2_000
VOCABULARY = 8_000
LANGUAGES = ("de", "en")
TRAIN = [
    "data.batch_tokens=8192",
    "model.dropout=0.2",
    "train.max_steps=14000",
    "train.warmup_steps=2000",
    "train.rate_factor=1",
    "train.clip_norm=1",
    "train.patience=none",
    "train.average_last=10",
    "train.checkpoint_steps=400",
    "train.valid_translations=0",
]
DEPTHS: dict[str, list[int | str]] = {
    "3+3": [],
    "4+2": [4, 2],
    "6+2": [6, 2],
    "6+2 at half the rate": [6, 2, "train.rate_factor=0.5"],
    "6+2 pre-norm": [6, 2, "model.norm=pre"],
}
"""Encoder layers, decoder layers, then other settings. The deeper a post-norm stack is, the sooner it diverges."""
CARD_TEXT = """# {name}

German to English, for short everyday sentences. This is the bundled model: `transduce translate` uses it by default.

- **Model**: {n_parameters:,} parameters, {config.n_encoder_layers} encoder layers, {config.n_decoder_layers} decoder \
layers, d_model {config.d_model}, {config.n_heads} heads, d_ff {config.d_ff}, \
{config.source_vocab_size:,} subwords for both languages; weights stored in float16, {size:.1f} MB.
- **Trained** for {seconds:.0f} s on a GPU ({steps:,} steps, {target_tokens:,} target tokens) on {n_train:,} pairs of \
Tatoeba. No English or German sentence of these pairs is in the validation or test set.
- **Scores** on {n_sentences:,} held-out sentences (`heldout.de.xz`, `heldout.en.xz`), beam {beam}, 95 % intervals: \
{scores}. Measured by `transduce evaluate`; `card.json` has the details.
- **Not for**: long or technical text, names, or numbers that matter. Its longest training sentence has \
{longest} subwords; longer text is split.
- **Licence**: the data is CC-BY 2.0 (https://creativecommons.org/licenses/by/2.0). Attribution: \
www.manythings.org/anki and tatoeba.org (file of 2018-05-13).

Made by:

    python -m experiments.bundled_model split --data-root FOLDER --work WORK
    transduce train WORK/prepared --out WORK/run --size small {settings}
    python -m experiments.bundled_model pack --work WORK
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (split, train, pack, depths):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        command.add_argument("--work", type=Path, required=True)
        if function is depths:
            command.add_argument("--steps", type=int, default=8000)
            command.add_argument("--beside", type=int, default=len(DEPTHS), help="Number of simultaneous runs.")
            command.add_argument("--out", type=Path, required=True)
        if function is split:
            command.add_argument("--data-root", type=Path, required=True)
    options = parser.parse_args()
    options.function(options)


def split(options: argparse.Namespace) -> None:
    folder = options.data_root / "tatoeba-en-de"
    pairs = list(dict.fromkeys(read_pairs(*(folder / f"all.{language}.xz" for language in LANGUAGES))))
    group_of = groups(pairs)
    ranked = sorted(dict.fromkeys(group_of), key=lambda group: hashlib.blake2b(b"".join(pairs[group])).digest())
    test, valid = set(ranked[:N_HELD_OUT]), set(ranked[N_HELD_OUT : 2 * N_HELD_OUT])
    parts = {
        "train": [pair for pair, group in zip(pairs, group_of, strict=True) if group not in test | valid],
        "valid": [pairs[group] for group in ranked if group in valid],  # a group's number is that of its first pair
        "test": [pairs[group] for group in ranked if group in test],
    }
    options.work.mkdir(parents=True, exist_ok=True)
    for name, pairs_of_part in parts.items():
        for side, language in enumerate(LANGUAGES):
            (options.work / f"{name}.{language}").write_bytes(b"".join(pair[side] + b"\n" for pair in pairs_of_part))
        print(f"{name}: {len(pairs_of_part):,} pairs")
    files = {name: [str(options.work / f"{name}.{language}") for language in LANGUAGES] for name in parts}
    command = [sys.executable, "-m", "transduce", "prepare", *files["train"], "--valid", *files["valid"]]
    command += ["--vocab-size", str(VOCABULARY), "--out", str(options.work / "prepared")]
    subprocess.run(command, check=True)


def train(options: argparse.Namespace) -> None:
    train_with(TRAIN, options.work / "prepared", options.work / "run")


def train_with(settings: list[str], prepared: Path, run: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "transduce", "train", str(prepared), "--size", "small", "--out", str(run), *flags]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True)


def depths(options: argparse.Namespace) -> None:
    """Train all depths side by side, with fewer steps than `train`, and score each on the validation text."""

    def run_one(name: str) -> Path:
        layers = [f"model.n_{side}_layers={n}" for side, n in zip(("encoder", "decoder"), DEPTHS[name], strict=False)]
        settings = [*TRAIN, f"train.max_steps={options.steps}", *layers, *map(str, DEPTHS[name][2:])]
        run = Path(folder) / name.replace(" ", "_")
        train_with(settings, options.work / "prepared", run, "--quiet")
        return run

    result: dict[str, Any] = {"experiment": "bundled_depths", "steps": options.steps, "models": {}}
    with tempfile.TemporaryDirectory() as folder:
        with ThreadPoolExecutor(options.beside) as pool:
            runs = dict(zip(DEPTHS, pool.map(run_one, DEPTHS), strict=True))
        for name, run in runs.items():
            source, reference = (options.work / f"valid.{language}" for language in LANGUAGES)
            began = time.perf_counter()
            evaluation, _ = evaluate_files(run, source, reference, Translator.load)
            _, config = load_model(run / MODEL)
            result["models"][name] = {
                **{score.name: [score.value, score.interval] for score in evaluation.scores},
                "seconds_to_translate": time.perf_counter() - began,
                "bytes": (run / MODEL / WEIGHTS).stat().st_size,
            }
            print(name, result["models"][name], flush=True)
            write_result(options.out, result | passport(config, "cuda" if torch.cuda.is_available() else "cpu"))


def pack(options: argparse.Namespace) -> None:
    run = options.work / "run"
    model, config = load_model(run / MODEL)
    assert override(config, TRAIN) == config, "the model was trained with other settings"
    subwords, (origin, heads) = Subwords.load(run / MODEL / SUBWORDS), load_origin(run / MODEL)
    if BUNDLED.exists():
        shutil.rmtree(BUNDLED)
    save_model(BUNDLED, model, config, subwords, origin, heads, torch.float16)
    heldout = {}
    for language in LANGUAGES:
        heldout[language] = BUNDLED / f"heldout.{language}.xz"
        heldout[language].write_bytes(lzma.compress((options.work / f"test.{language}").read_bytes(), preset=9))
    translator = Translator.load(BUNDLED, device="cpu")
    evaluation, passport = evaluate_files(BUNDLED, heldout["de"], heldout["en"], lambda path: translator)
    assert add_to_card(BUNDLED, evaluation, passport)
    result = json.loads((run / RESULT).read_text())
    scores = [
        f"{score.name} {score.value:.1f} ({score.interval[0]:.1f} to {score.interval[1]:.1f})"
        for score in evaluation.scores
        if score.interval is not None
    ]
    text = CARD_TEXT.format(
        name=BUNDLED_MODEL,
        config=config.model,
        beam=config.decode.beam_size,
        scores=", ".join(scores),
        n_parameters=sum(p.numel() for p in model.parameters()),
        size=(BUNDLED / WEIGHTS).stat().st_size / 1e6,
        n_train=Prepared(options.work / "prepared").report.train.n_pairs,
        n_sentences=evaluation.n_sentences,
        longest=origin.longest_source,
        settings=" ".join(f"--set {setting}" for setting in TRAIN),
        **result,
    )
    (BUNDLED / "CARD.md").write_text(text, encoding="utf-8")
    print(text)


def groups(pairs: list[tuple[bytes, bytes]]) -> list[int]:
    """For each pair, the number of the first pair in its group. Two pairs with the same German or the same English
    sentence are in one group, and so are all pairs that a chain of such links connects."""
    parent = list(range(len(pairs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for side in range(len(LANGUAGES)):
        first: dict[bytes, int] = {}
        for i, pair in enumerate(pairs):
            a, b = root(first.setdefault(pair[side], i)), root(i)
            parent[max(a, b)] = min(a, b)
    return [root(i) for i in range(len(pairs))]


if __name__ == "__main__":
    main()
