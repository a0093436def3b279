"""Whole runs on a GPU by the command line: one is killed and resumed, and one has a time budget.

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
from transduce.training.journal import LOG, read_log
from transduce.training.settle import Settled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200, help="Steps of the run that is killed.")
    parser.add_argument("--budget", type=int, default=90, help="Seconds of the run with a budget.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {}
        for name, measure, run in (("resume", resume, "whole"), ("budget", budget, "timed")):
            result[name] = measure(options, Path(folder))
            settled = Settled.from_json((Path(folder) / run / "run.json").read_text())
            if options.out:  # after each part, because the time on a GPU may end
                write_result(options.out, result | passport(settled.config, options.device))


def command(options: argparse.Namespace, out: Path, *more: str) -> list[str]:
    train = [sys.executable, "-m", "transduce", "train", str(options.prepared), "--device", options.device]
    return [*train, "--out", str(out), *more]


def resume(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run that is killed half-way and resumed must end with the same bits as a whole run. With dropout and
    --deterministic."""
    more = ["--size", "small", "--deterministic", "--set", f"train.max_steps={options.steps}"]
    more += ["--set", f"train.checkpoint_steps={options.steps // 8}", "--set", "data.n_shapes=16"]
    subprocess.run(command(options, folder / "whole", *more), check=True)
    process = subprocess.Popen(command(options, folder / "killed", *more))
    while not any(event["step"] >= options.steps // 2 for event in read_log(folder / "killed" / LOG)):
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = read_log(folder / "killed" / LOG)[-1]["step"]
    subprocess.run(command(options, folder / "killed", *more), check=True)
    hashes = [sha256(folder / name / "model" / "weights.safetensors") for name in ("whole", "killed")]
    outcome = {"steps": options.steps, "killed_at": killed_at, "same_bits": hashes[0] == hashes[1], "sha256": hashes}
    print(json.dumps(outcome), flush=True)
    return outcome


def budget(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    start = time.monotonic()
    subprocess.run(command(options, folder / "timed", "--budget", f"{options.budget}s"), check=True)
    seconds = time.monotonic() - start
    result = json.loads((folder / "timed" / "result.json").read_text())
    outcome = {"budget": options.budget, "seconds": seconds, "result": result}
    outcome["tokens_per_second"] = [
        e["tokens_per_second"] for e in read_log(folder / "timed" / LOG) if e["event"] == "step"
    ][-1]
    print(json.dumps(outcome), flush=True)
    return outcome


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
