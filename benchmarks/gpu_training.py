"""Whole runs on a GPU, through the command line: killed and gone on with, and held to a budget.

python -m benchmarks.gpu_training --prepared FOLDER --out benchmarks/results/gpu_training_h200.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
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
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=int, default=90)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result: dict[str, Any] = {}
        for name, measure, run in (("resume", resume, "whole"), ("budget", budget, "timed")):
            result[name] = measure(options, Path(place))
            settled = Settled.from_json((Path(place) / run / "run.json").read_text())
            if options.out:  # after each: the device may be gone before the next has ended
                write_result(options.out, result | passport(settled.config, options.device))


def command(options: argparse.Namespace, folder: Path, *more: str) -> list[str]:
    train = [sys.executable, "-m", "transduce", "train", str(options.prepared), "--device", options.device]
    return [*train, "--out", str(folder), *more]


def resume(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """With dropout, deterministic: a run, and one that is killed half-way, must end with the same bits."""
    more = ["--size", "small", "--deterministic", "--set", f"train.max_steps={options.steps}"]
    more += ["--set", f"train.checkpoint_steps={options.steps // 8}", "--set", "data.n_shapes=16"]
    subprocess.run(command(options, place / "whole", *more), check=True)
    process = subprocess.Popen(command(options, place / "killed", *more))
    while not any(event["step"] >= options.steps // 2 for event in read_log(place / "killed" / LOG)):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = read_log(place / "killed" / LOG)[-1]["step"]
    subprocess.run(command(options, place / "killed", *more), check=True)
    hashes = [sha256(place / name / "model" / "weights.safetensors") for name in ("whole", "killed")]
    found = {"steps": options.steps, "killed_at": killed_at, "same_bits": hashes[0] == hashes[1], "sha256": hashes}
    print(json.dumps(found), flush=True)
    return found


def budget(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    start = time.monotonic()
    subprocess.run(command(options, place / "timed", "--budget", f"{options.budget}s"), check=True)
    seconds = time.monotonic() - start
    result = json.loads((place / "timed" / "result.json").read_text())
    found = {"budget": options.budget, "seconds": seconds, "result": result}
    found["tokens_per_second"] = [
        e["tokens_per_second"] for e in read_log(place / "timed" / LOG) if e["event"] == "step"
    ][-1]
    print(json.dumps(found), flush=True)
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
