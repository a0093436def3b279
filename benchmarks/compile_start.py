"""The cost of torch.compile: seconds until the first steps, and then the speed, compared with eager passes.

Compiles whole passes or single layers, with an empty ("cold") and with a filled ("warm") cache of kernels. All passes
are the plain ones of `model.py` and autograd, because the written passes do not use torch.compile.

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

N_FIRST_STEPS = 60
"""Steps that are timed one by one. The speed is measured after them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--size", default="base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--ways", default="no,layers,all", help="What is compiled, comma-separated. Default: all three."
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="Time for measuring the speed, after the warm-up.")
    parser.add_argument("--one", help="Measure this way in this process, and print the result.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options)))
        return
    results: dict[str, Any] = {}
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm") if way != "no" else ("cold",):
                environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                command = [sys.executable, "-m", "benchmarks.compile_start", "--one", way, "--prepared"]
                command += [str(options.prepared), "--size", options.size, "--device", options.device]
                command += ["--seconds", str(options.seconds)]
                done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                results[f"{way}, {start}"] = json.loads(done.stdout.splitlines()[-1])
                print(way, start, results[f"{way}, {start}"], flush=True)
    if options.out:
        from transduce.config import PRESETS

        write_result(options.out, {"ways": results} | passport(PRESETS[options.size](), options.device))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """`ready`, `first_step` and `step_60` are seconds since the beginning of this function, imports included."""
    began = time.perf_counter()
    import torch

    from transduce.data.batches import prefetch
    from transduce.data.prepare import Prepared
    from transduce.training.choices import choose
    from transduce.training.request import Request
    from transduce.training.settle import longest_sentence, make_trainer, resolve_config

    prepared = Prepared(options.prepared)
    request = Request(prepared=str(options.prepared), size=options.size, device=options.device)
    config, _ = resolve_config(request, prepared, None)
    choices = choose(config, options.device, 1, longest_sentence(prepared), deterministic=False, passes="plain")
    choices.configure_process()
    trainer = make_trainer(Path("unused"), None, config, choices, prepared, lambda event: None)
    compile_parts(options.one, trainer)
    shares = prefetch(trainer.shares(0))
    result: dict[str, Any] = {"ready": time.perf_counter() - began}
    n_steps, n_tokens, timed_from = 0, 0, time.perf_counter()
    slow_steps = []
    while n_steps < N_FIRST_STEPS or time.perf_counter() - timed_from < options.seconds:
        share = next(shares)
        step_began = time.perf_counter()
        trainer.take_step(n_steps + 1, share)
        if n_steps < N_FIRST_STEPS:
            trainer.window.loss.item()  # waits for the device
            if (seconds := time.perf_counter() - step_began) > 1:
                slow_steps.append((n_steps + 1, round(seconds, 1)))
        n_steps, n_tokens = n_steps + 1, n_tokens + share.n_target_tokens
        if n_steps == 1:
            result["first_step"] = time.perf_counter() - began
        if n_steps == N_FIRST_STEPS:
            result["step_60"] = time.perf_counter() - began
            n_tokens, timed_from = 0, time.perf_counter()
    trainer.window.loss.item()
    result["tokens_per_second"] = n_tokens / (time.perf_counter() - timed_from)
    validation_began = time.perf_counter()
    score = trainer.validation_loss()
    result["valid_loss"] = None if score is None else score.loss
    result["validation"] = time.perf_counter() - validation_began
    result["slow_steps"] = slow_steps
    result["steps"] = n_steps
    result["n_graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    return result


def compile_parts(way: str, trainer: Trainer) -> None:
    """`way`: "all" compiles the whole pass, "layers" compiles the loss and each layer, and "no" compiles nothing."""
    import torch

    from transduce.training import recipe, validation

    if way == "all":
        gradients = trainer.gradients
        gradients.loss_of = torch.compile(gradients.loss_of, dynamic=True)  # type: ignore[method-assign]
    elif way == "layers":
        recipe.loss = torch.compile(recipe.loss, dynamic=True)
        validation.loss = recipe.loss  # type: ignore[attr-defined]  # a name that this module imports
        torch._dynamo.config.recompile_limit = 32
        for layer in [*trainer.model.encoder, *trainer.model.decoder]:
            layer.forward = torch.compile(layer.forward, dynamic=True)


if __name__ == "__main__":
    main()
