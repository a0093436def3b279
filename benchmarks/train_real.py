"""Target tokens per second of whole runs of `transduce train` on real text, with logging, validation and checkpoints.

    python -m benchmarks.train_real --prepared FOLDER --size base --out benchmarks/results/train_real_base_h200.json

Compares the written passes with the plain ones, at the same seed and number of steps, so that their validation losses
can be compared. Tokens per second do not include padding. The value is the median of the log after the first third.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.passport import passport, write_result
from transduce.training.journal import LOG, read_log
from transduce.training.settle import Settled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ways", nargs="+", default=["written", "plain"], choices=["written", "plain"])
    parser.add_argument("--set", nargs="*", default=[], help="Settings of the run, as for transduce.")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "train_real", "size": options.size, "steps": options.steps, "ways": {}}
    for way in options.ways:
        with tempfile.TemporaryDirectory() as folder:
            result["ways"][way], settled = run(options, way, Path(folder) / "run")
        print(json.dumps({way: result["ways"][way]}), flush=True)
        if options.out:  # after each run, because the time on a GPU may end
            write_result(options.out, result | passport(settled.config, settled.choices.device))


def run(options: argparse.Namespace, way: str, folder: Path) -> tuple[dict[str, Any], Settled]:
    settings = [
        f"train.max_steps={options.steps}",
        f"train.checkpoint_steps={max(1, options.steps // 4)}",
        # A short run needs a short warm-up and a fifth of equation 3's rate: the peak is 5e-4 for base in 600 steps.
        f"train.warmup_steps={max(1, options.steps // 2)}",
        "train.rate_factor=0.2",
        "train.clip_norm=1",
        "train.valid_translations=0",
        *options.set,
    ]
    command = [sys.executable, "-m", "transduce", "train", str(options.prepared), "--size", options.size]
    command += ["--out", str(folder), "--passes", way]
    command += ["--device", options.device] if options.device else []
    for setting in settings:
        command += ["--set", setting]
    began = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - began
    events = read_log(folder / LOG)
    speeds = [e["tokens_per_second"] for e in events if e["event"] == "step" and e["step"] > options.steps / 3]
    settled = Settled.from_json((folder / "run.json").read_text())
    assert settled.choices.way == way, f"it ran {settled.choices.way}: {settled.choices.why_plain}"
    return {
        "target_tokens_per_second": statistics.median(speeds),
        "lowest": min(speeds),
        "highest": max(speeds),
        "valid_loss": [[e["step"], e["loss"]] for e in events if e["event"] == "valid"],
        "seconds": seconds,
        "memory_bytes": max(e["memory_bytes"] for e in events if e["event"] == "step"),
    }, settled


if __name__ == "__main__":
    main()
