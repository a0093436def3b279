"""Compares sizes, dropout, batch sizes and learning rates on a small corpus. The table in `training/dial.py` uses the
results.

python -m experiments.dial --prepared FOLDER --out experiments/results/dial_NAME.json --tokens 2e7 --device cuda

Several variants run at the same time, because a small model leaves most of a GPU idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.passport import passport, write_result
from transduce import RunConfig, override, with_model
from transduce.config import PRESETS
from transduce.data.prepare import Prepared
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=float, default=2e7, help="target tokens to train on")
    parser.add_argument("--sizes", nargs="*", default=["tiny", "small"])
    parser.add_argument("--dropouts", type=float, nargs="*", default=[0.1, 0.3])
    parser.add_argument("--batches", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--peaks", type=float, nargs="*", default=[1e-3, 2e-3, 4e-3], help="peaks of the learning rate")
    parser.add_argument("--set", nargs="*", default=[], help="settings, as for transduce")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--beside", type=int, default=8, help="number of simultaneous runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="no variant starts after this time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.prepared, json.loads(options.child), options.set, options.device)))
        return
    variants = [
        {"size": size, "dropout": dropout, "batch_tokens": batch, "peak": peak, "tokens": options.tokens}
        for size, dropout, batch, peak in itertools.product(
            options.sizes, options.dropouts, options.batches, options.peaks
        )
    ]
    results = run_beside(options, variants)
    results.sort(key=lambda result: float(result["best_loss"]))
    report = Prepared(options.prepared).report
    if options.out:
        summary = {
            "experiment": "dial",
            "pairs": report.train.n_pairs,
            "vocab_size": report.vocab_size,
            "results": results,
        }
        write_result(options.out, summary | passport(RunConfig(), options.device))


def run_beside(options: argparse.Namespace, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    waiting, running, results = list(variants), list[tuple[dict[str, Any], subprocess.Popen[str]]](), []
    last_start = time.monotonic() + 60 * options.minutes
    while (waiting and time.monotonic() < last_start) or running:
        while waiting and len(running) < options.beside and time.monotonic() < last_start:
            variant = waiting.pop(0)
            command = [sys.executable, "-m", "experiments.dial", "--prepared", str(options.prepared)]
            command += ["--device", options.device, "--child", json.dumps(variant), "--set", *options.set]
            running.append((variant, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        for variant, process in list(running):
            if process.poll() is not None:
                running.remove((variant, process))
                out = process.communicate()[0]
                if process.returncode == 0:
                    results.append(json.loads(out.splitlines()[-1]))
                    print(json.dumps(results[-1]), flush=True)
        time.sleep(0.2)
    return results


def run(folder: Path, variant: dict[str, Any], settings: list[str], device: str) -> dict[str, Any]:
    prepared = Prepared(folder)
    n = len(prepared.subwords)
    config = with_model(
        PRESETS[variant["size"]](), dropout=variant["dropout"], source_vocab_size=n, target_vocab_size=n
    )
    max_steps = max(1, int(variant["tokens"] / variant["batch_tokens"] / 0.9))
    warmup_steps = max(1, min(4000, max_steps // 5))
    factor = variant["peak"] * (config.model.d_model * warmup_steps) ** 0.5
    train = replace(
        config.train,
        max_steps=max_steps,
        warmup_steps=warmup_steps,
        rate_factor=factor,
        clip_norm=1.0,
        checkpoint_steps=max(1, max_steps // 20),
    )
    config = replace(config, train=train, data=replace(config.data, batch_tokens=variant["batch_tokens"]))
    config = override(config, settings)
    dtype = "bfloat16" if device == "cuda" else "float32"
    choices = Choices(device, dtype, 1, config.data.batch_tokens, False)  # type: ignore[arg-type]
    choices.configure_process()
    with tempfile.TemporaryDirectory() as run_folder:
        group = Group(0, 1, torch.device(device))
        trainer = Trainer(Path(run_folder), config, choices, prepared.train, prepared.valid, group, lambda event: None)
        began = time.monotonic()
        trainer.run()
        choice = trainer.finish()
    losses = list(trainer.state.losses.items())
    return {
        **variant,
        "steps": max_steps,
        "warmup_steps": warmup_steps,
        "rate_factor": factor,
        "settings": settings,
        "epochs": max_steps / trainer.layout.n_steps,
        "seconds": round(time.monotonic() - began, 1),
        "best_loss": min(one.loss for one in choice.candidates.values() if one.loss is not None),
        "taken": choice.taken,
        "best_step": trainer.state.best_step(),
        "curve": [[step, round(value, 4)] for step, value in losses],
    }


if __name__ == "__main__":
    main()
