"""Training on real text through `transduce train`: target tokens a second, with all that belongs to a run.

    python -m benchmarks.train_real --prepared FOLDER --size base --out benchmarks/results/train_real_base_h200.json

The passes written out, and the plain ones as their slow twin: the same seed and steps, so that the validation
loss of one can be held to the other's. Tokens a second, padding not counted, are the median over the log after the
first third.
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
from transduce.training.run import LOG, Settled, read_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ways", nargs="+", default=["written", "plain"], choices=["written", "plain"])
    parser.add_argument("--set", nargs="*", default=[], help="Settings of the run.")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "train_real", "size": options.size, "steps": options.steps, "ways": {}}
    for way in options.ways:
        with tempfile.TemporaryDirectory() as place:
            result["ways"][way], settled = run(options, way, Path(place) / "run")
        print(json.dumps({way: result["ways"][way]}), flush=True)
        if options.out:  # after each: the device may be gone before the next has ended
            write_result(options.out, result | passport(settled.config, settled.choices.device))


def run(options: argparse.Namespace, way: str, folder: Path) -> tuple[dict[str, Any], Settled]:
    settings = [
        f"train.max_steps={options.steps}",
        f"train.checkpoint_steps={max(1, options.steps // 4)}",
        # So few steps want the rate of equation 3 sooner, and a fifth of it: 5e-4 at its peak for base in 600 steps.
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
