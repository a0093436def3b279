"""What torch.compile costs before it pays: whole passes and single layers beside eager, cold and with a warm cache.

python -m benchmarks.compile_start --prepared FOLDER --size base --out benchmarks/results/compile_start_base_h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.passport import passport, write_result

if TYPE_CHECKING:
    from transduce.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ways", default="no,layers,all")
    parser.add_argument("--seconds", type=float, default=15.0, help="of steps that are timed, once warm")
    parser.add_argument("--one", help="measure this way in this process, and print it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    found: dict[str, Any] = {}
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm") if way != "no" else ("cold",):
                environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                command = [sys.executable, "-m", "benchmarks.compile_start", "--one", way, "--prepared"]
                command += [str(options.prepared), "--size", options.size, "--device", options.device]
                command += ["--seconds", str(options.seconds)]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                found[f"{way}, {start}"] = json.loads(done.stdout.splitlines()[-1])
                print(way, start, found[f"{way}, {start}"], flush=True)
    if options.out:
        from transduce.config import PRESETS

        write_result(options.out, {"ways": found} | passport(PRESETS[options.size](), options.device))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    began = time.perf_counter()
    import torch

    from transduce.data.batches import prefetch
    from transduce.data.prepare import Prepared
    from transduce.training.choices import choose
    from transduce.training.run import Request, _trainer, configure, longest_of

    prepared = Prepared(options.prepared)
    request = Request(prepared=str(options.prepared), size=options.size, device=options.device)
    config, _ = configure(request, prepared, None)
    choices = choose(config, options.device, 1, longest_of(prepared), False)
    trainer = _trainer(Path("nowhere"), None, config, choices, prepared, lambda event: None)
    compile_by(options.one, trainer)
    shares = prefetch(trainer.shares(0))
    found: dict[str, Any] = {"ready": time.perf_counter() - began}
    n_steps, n_tokens, timed = 0, 0, time.perf_counter()
    slow_steps = []
    while n_steps < 60 or time.perf_counter() - timed < options.seconds:
        share = next(shares)
        start = time.perf_counter()
        trainer.take_step(n_steps + 1, share)
        if n_steps < 60:
            trainer.window.loss.item()
            if (spent := time.perf_counter() - start) > 1:
                slow_steps.append((n_steps + 1, round(spent, 1)))
        n_steps, n_tokens = n_steps + 1, n_tokens + share.n_target_tokens
        if n_steps == 1:
            found["first_step"] = time.perf_counter() - began
        if n_steps == 60:
            found["step_60"] = time.perf_counter() - began
            n_tokens, timed = 0, time.perf_counter()
    trainer.window.loss.item()
    found["tokens_per_second"] = n_tokens / (time.perf_counter() - timed)
    began_validation = time.perf_counter()
    found["valid_loss"] = trainer.validation_loss().loss
    found["validation"] = time.perf_counter() - began_validation
    found["slow_steps"] = slow_steps
    found["steps"] = n_steps
    found["n_graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    return found


def compile_by(way: str, trainer: Trainer) -> None:
    import torch

    from transduce.training import trainer as loop
    from transduce.training.recipe import loss

    if way == "all":
        trainer.loss_of = torch.compile(trainer.loss_of, dynamic=True)  # type: ignore[method-assign]
    elif way == "layers":
        setattr(loop, "loss", torch.compile(loss, dynamic=True))  # noqa: B010
        torch._dynamo.config.recompile_limit = 32
        for layer in [*trainer.model.encoder, *trainer.model.decoder]:
            layer.forward = torch.compile(layer.forward, dynamic=True)


if __name__ == "__main__":
    main()
