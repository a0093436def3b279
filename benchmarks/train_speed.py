"""Target tokens per second in training, compared with peers on the same batch, loss and optimiser in one run.

    python benchmarks/train_speed.py --quick                          # two cores, small, within two minutes
    python benchmarks/train_speed.py --size base
    python benchmarks/train_speed.py --size base --device cuda        # one GPU

Each program has its own process. The processes take turns in every round, so that noise of the machine affects all of
them equally. Each program runs in the faster of float32 and bf16 (on a GPU: in bf16, the faster of eager and compiled).
On a CPU, the fastest peer is then compared again with the memory allocator settings of our trainer. The last line is
`ratio R (low-high)`: our speed divided by that of the fastest peer with default settings, as the median, the lowest
and the highest value of all rounds. Ids are synthetic, without padding. Peers that are not installed are omitted.
JoeyNMT is installed by `pip install --no-deps joeynmt`, because its version pins are old, and then the packages that it
imports.
"""

# ruff: noqa: E402  # the path must be set before the imports that need it

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path[:0] = [str(Path(__file__).parents[1])]  # lets this file run as a script

import torch
import typer
from torch import Tensor

from benchmarks import turns
from benchmarks.peers import PACKAGES, PEERS
from experiments.passport import passport, write_result
from transduce import RunConfig, Transformer
from transduce.config import PRESETS
from transduce.runtime import keep_memory
from transduce.training.choices import Choices
from transduce.training.passes.written import written_passes
from transduce.training.recipe import adam, loss

LENGTH = 32
OURS = "ours"
N_TRIES = 3
"""Number of steps that select the fastest way of a program: a single step is too noisy."""


@dataclass(frozen=True)
class Way:
    """A program and its settings."""

    name: str
    dtype: str = "float32"
    compiled: bool = False
    keeps_memory: bool = False
    """With the allocator settings of our trainer."""

    def __str__(self) -> str:
        extras = [self.dtype, *["compiled"] * self.compiled, *["keeps memory"] * self.keeps_memory]
        return f"{self.name} ({', '.join(extras)})"


# In the process of a worker


def work(task: dict[str, Any]) -> None:
    """Read a number of steps from each line, and answer with the seconds that they took."""
    way, config, device = Way(**task["way"]), PRESETS[task["size"]](), task["device"]
    if way.keeps_memory:
        keep_memory()
    step = make_step(way, config, device, task["tokens"])
    for line in sys.stdin:
        print(seconds(step, int(line), device), flush=True)


def make_step(way: Way, config: RunConfig, device: str, tokens: int) -> Callable[[], None]:
    """Forward, backward and Adam on one batch; float32 weights and moments."""
    torch.manual_seed(0)
    ids = torch.randint(3, config.model.target_vocab_size, (3, tokens // LENGTH, LENGTH))
    dtype: torch.dtype = getattr(torch, way.dtype)
    model = Transformer(config.model) if way.name == OURS else PEERS[way.name](config.model)
    model = model.to(device).train()
    optimiser = adam(model.parameters(), config.train)
    optimiser.param_groups[0]["lr"] = 1e-4
    if isinstance(model, Transformer):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        n_threads = torch.get_num_threads()
        choices = Choices(device, "float32", n_threads, ids[0].numel(), False, "written")
        choices.configure_process()
        passes = written_passes(model, LENGTH, dtype, ids[0].numel(), config.train.label_smoothing, n_threads)

        def add_gradients() -> None:
            optimiser.zero_grad(set_to_none=False)
            passes.add_gradients([list(ids)], [1], 1 / ids[0].numel())

    else:
        ids = ids.to(device)

        def loss_of(source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                logits_BTV = model(source_BS, target_in_BT)
            loss_sum, n_tokens = loss(logits_BTV, target_out_BT, config.train.label_smoothing, config.model.pad_id)
            return loss_sum / n_tokens

        forward = torch.compile(loss_of, dynamic=False) if way.compiled else loss_of

        def add_gradients() -> None:
            optimiser.zero_grad()
            forward(*ids).backward()

    def step() -> None:
        add_gradients()
        optimiser.step()

    return step


def seconds(step: Callable[[], None], n: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(n):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


# In the main process


class Worker(turns.Worker):
    def __init__(self, way: Way, size: str, device: str, tokens: int) -> None:
        self.way, self.tokens, self.is_warm = way, tokens // LENGTH * LENGTH, False
        super().__init__(__file__, {"way": asdict(way), "size": size, "device": device, "tokens": tokens})

    def warm_up(self, n_steps: int) -> None:
        """Start the warm-up without waiting for its end."""
        self.begin(n_steps)
        self.is_warm = True

    def speed(self, n_steps: int) -> float | None:
        """Target tokens per second, or None if the process has died: some precisions crash on some machines."""
        seconds_spent = self.request(n_steps)
        return None if seconds_spent is None else self.tokens * n_steps / float(seconds_spent)


def installed(names: list[str]) -> list[str]:
    """The peers whose package is installed. Print a line for each other one."""
    missing = [name for name in names if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None]
    for name in missing:
        print(f"without {name}: {PACKAGES[name]} is not installed", flush=True)
    return [name for name in names if name not in missing]


def candidates(name: str, device: str, keeps_memory: bool) -> list[Way]:
    """The ways of a program. Only the fastest of them takes part in the comparison."""
    if device == "cuda":
        return [Way(name, "bfloat16")] + [Way(name, "bfloat16", compiled=True)] * (name != OURS)
    return [Way(name, dtype, keeps_memory=keeps_memory) for dtype in ("float32", "bfloat16")]


def best(speeds: list[float | None]) -> float | None:
    return max((speed for speed in speeds if speed is not None), default=None)


def fastest(workers: list[Worker], n_warm: int) -> Worker | None:
    """The fastest of the workers. The others are ended."""
    result: tuple[float, Worker] | None = None
    for worker in workers:
        if not worker.is_warm:
            worker.warm_up(n_warm)
        worker.answer()
        speed = best([worker.speed(1) for _ in range(N_TRIES)])
        summary = "does not run here" if speed is None else f"{speed:,.0f} tokens/s in its best step of {N_TRIES}"
        print(f"  {worker.way}: {summary}", flush=True)
        if speed is None or (result is not None and result[0] >= speed):
            worker.end()
            continue
        if result is not None:
            result[1].end()
        result = speed, worker
    return None if result is None else result[1]


def fastest_of_each(ways: list[list[Way]], size: str, device: str, tokens: int, n_warm: int) -> list[Worker]:
    """The fastest worker of each list, if any of them runs. On a GPU, all ways are compiled at the same time, because
    compilation uses only CPU cores."""

    def start(ways_of_one: list[Way]) -> list[Worker]:
        return [Worker(way, size, device, tokens) for way in ways_of_one]

    started = [start(ways_of_one) for ways_of_one in ways] if device == "cuda" else []
    for worker in (worker for workers in started for worker in workers if worker.way.compiled):
        worker.warm_up(n_warm)
    selected = [fastest(started[i] if started else start(ways_of_one), n_warm) for i, ways_of_one in enumerate(ways)]
    return [worker for worker in selected if worker is not None]


def take_turns(workers: list[Worker], rounds: int, n_steps: int) -> dict[str, list[float]]:
    """Target tokens per second of each worker, one value per round."""
    speeds: dict[str, list[float]] = {str(one.way): [] for one in workers}
    for _ in range(rounds):
        for one in workers:
            speed = one.speed(n_steps)
            assert speed is not None, f"{one.way} has died"
            speeds[str(one.way)].append(speed)
    for way, values in sorted(speeds.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(values)
        print(f"{way:44} {median:12,.0f} target tokens/s ({min(values):,.0f}-{max(values):,.0f})", flush=True)
    return speeds


def main(
    size: Annotated[str, typer.Option(help=f"The size of the model: {', '.join(PRESETS)}.")] = "small",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    tokens: Annotated[
        int | None, typer.Option(help="Target tokens per batch. Default: 4096 on a CPU, 25600 on a GPU.")
    ] = None,
    rounds: int = 7,
    quick: Annotated[bool, typer.Option(help="Use fewer rounds and peers.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    if worker:
        work(json.loads(sys.stdin.readline()))
        return
    on_gpu = device == "cuda"
    tokens, rounds = tokens or (25_600 if on_gpu else 4096), 5 if quick else rounds
    names = installed([name for name in PEERS if not quick or name in ("nn.Transformer", "Marian")])
    n_warm, n_steps = (3, 20) if on_gpu else (1, 1)

    def start(ways: list[list[Way]]) -> list[Worker]:
        return fastest_of_each(ways, size, device, tokens, n_warm)

    ours, *peers = start([candidates(OURS, device, not on_gpu), *(candidates(name, device, False) for name in names)])
    speeds = take_turns([ours, *peers], rounds, n_steps)
    peer = max(peers, key=lambda one: statistics.median(speeds[str(one.way)]))
    for one in peers:
        one.end()
    result: dict[str, Any] = {
        "benchmark": "train_speed",
        "size": size,
        "target_tokens_per_batch": tokens // LENGTH * LENGTH,
        "length": LENGTH,
        "target_tokens_per_second": speeds,
        "ours": str(ours.way),
        "fastest_peer": str(peer.way),
        "ratio": turns.ratio(speeds[str(ours.way)], speeds[str(peer.way)]),
    }
    if not on_gpu:
        print("with the same allocator settings:")
        for same_settings in start([[replace(peer.way, keeps_memory=True)]]):
            again = take_turns([ours, same_settings], rounds, n_steps)
            same_settings.end()
            result["keeping_memory"] = {
                "target_tokens_per_second": again,
                "ratio": turns.ratio(again[str(ours.way)], again[str(same_settings.way)]),
            }
            print("{:.2f} ({:.2f}-{:.2f})".format(*result["keeping_memory"]["ratio"]))
    ours.end()
    if out is not None:
        write_result(out, result | passport(PRESETS[size](), device))
    print(f"{ours.way} relative to {peer.way}:")
    print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
