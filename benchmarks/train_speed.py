"""Target tokens per second in training, ours beside peers: the same batch, loss and optimiser, side by side in one run.

    python benchmarks/train_speed.py --quick                          # two cores, small, within two minutes
    python benchmarks/train_speed.py --size base
    python benchmarks/train_speed.py --size base --device cuda        # one GPU

Each way is a process of its own: they take turns, round after round, so that a noisy machine is noisy to all. A peer
runs in float32 or bf16, whichever is faster here (on a GPU: bf16, eager and compiled). On a CPU the fastest peer then
takes turns with ours once more, with the memory allocator set as our trainer sets it. The last line is
`ratio R (low-high)`: ours over the fastest peer as it comes, the median of the rounds, the lowest and the highest.
Synthetic ids, no padding. Peers that are not installed are left out (JoeyNMT: `pip install --no-deps joeynmt`, for its
pins are old; then what its import asks for).
"""

# ruff: noqa: E402  # the path must be set before what lies on it is imported

from __future__ import annotations

import contextlib
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

sys.path[:0] = [str(Path(__file__).parents[1])]  # so that it can be run as a file too

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
"""Steps by which a way is chosen: one alone is noise."""


@dataclass(frozen=True)
class Way:
    name: str
    dtype: str = "float32"
    compiled: bool = False
    keeps_memory: bool = False
    """The allocator as our trainer sets it."""

    def __str__(self) -> str:
        extras = [self.dtype, *["compiled"] * self.compiled, *["keeps memory"] * self.keeps_memory]
        return f"{self.name} ({', '.join(extras)})"


# In the process of a way


def work(task: dict[str, Any]) -> None:
    """Reads how many steps to take, line by line, and answers with the seconds that they took."""
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
    all_threads: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if isinstance(model, Transformer):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        n_threads = torch.get_num_threads()
        choices = Choices(device, "float32", n_threads, ids[0].numel(), False, "written")
        choices.apply()
        all_threads = choices.all_threads
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
        with all_threads():
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


# Beside them


class Worker(turns.Worker):
    def __init__(self, way: Way, size: str, device: str, tokens: int) -> None:
        self.way, self.tokens, self.is_warm = way, tokens // LENGTH * LENGTH, False
        super().__init__(__file__, {"way": asdict(way), "size": size, "device": device, "tokens": tokens})

    def warm_up(self, n_steps: int) -> None:
        """Begins with it: the answer is still to come."""
        self.begin(n_steps)
        self.is_warm = True

    def speed(self, n_steps: int) -> float | None:
        """Target tokens per second; None where the process has died, as some precisions do on some machines."""
        spent = self.ask(n_steps)
        return None if spent is None else self.tokens * n_steps / float(spent)


def installed(names: list[str]) -> list[str]:
    """Those whose package is here; a line for each that is left out."""
    absent = [name for name in names if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None]
    for name in absent:
        print(f"without {name}: {PACKAGES[name]} is not installed", flush=True)
    return [name for name in names if name not in absent]


def candidates(name: str, device: str, keeps_memory: bool) -> list[Way]:
    """The ways of which the fastest takes part."""
    if device == "cuda":
        return [Way(name, "bfloat16")] + [Way(name, "bfloat16", compiled=True)] * (name != OURS)
    return [Way(name, dtype, keeps_memory=keeps_memory) for dtype in ("float32", "bfloat16")]


def best(speeds: list[float | None]) -> float | None:
    return max((speed for speed in speeds if speed is not None), default=None)


def fastest(workers: list[Worker], n_warm: int) -> Worker | None:
    """The others are ended."""
    found: tuple[float, Worker] | None = None
    for worker in workers:
        if not worker.is_warm:
            worker.warm_up(n_warm)
        worker.answer()
        speed = best([worker.speed(1) for _ in range(N_TRIES)])
        said = "does not run here" if speed is None else f"{speed:,.0f} tokens/s in its best step of {N_TRIES}"
        print(f"  {worker.way}: {said}", flush=True)
        if speed is None or (found is not None and found[0] >= speed):
            worker.end()
            continue
        if found is not None:
            found[1].end()
        found = speed, worker
    return None if found is None else found[1]


def fastest_of_each(ways: list[list[Way]], size: str, device: str, tokens: int, n_warm: int) -> list[Worker]:
    """Of each list one, where any runs. On a GPU they are compiled beside each other, which takes cores alone."""

    def started(some: list[Way]) -> list[Worker]:
        return [Worker(way, size, device, tokens) for way in some]

    at_once = [started(some) for some in ways] if device == "cuda" else []
    for worker in (worker for some in at_once for worker in some if worker.way.compiled):
        worker.warm_up(n_warm)
    found = [fastest(at_once[i] if at_once else started(some), n_warm) for i, some in enumerate(ways)]
    return [worker for worker in found if worker is not None]


def take_turns(workers: list[Worker], rounds: int, n_steps: int) -> dict[str, list[float]]:
    """Target tokens per second of each, one figure a round."""
    speeds: dict[str, list[float]] = {str(one.way): [] for one in workers}
    for _ in range(rounds):
        for one in workers:
            speed = one.speed(n_steps)
            assert speed is not None, f"{one.way} has died"
            speeds[str(one.way)].append(speed)
    for way, of in sorted(speeds.items(), key=lambda item: -statistics.median(item[1])):
        print(f"{way:44} {statistics.median(of):12,.0f} target tokens/s ({min(of):,.0f}-{max(of):,.0f})", flush=True)
    return speeds


def main(
    size: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "small",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    tokens: Annotated[int | None, typer.Option(help="Target tokens in a batch.")] = None,
    rounds: int = 7,
    quick: Annotated[bool, typer.Option(help="Fewer rounds and peers.")] = False,
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
        print("with the allocator set alike:")
        for alike in start([[replace(peer.way, keeps_memory=True)]]):
            again = take_turns([ours, alike], rounds, n_steps)
            alike.end()
            result["keeping_memory"] = {
                "target_tokens_per_second": again,
                "ratio": turns.ratio(again[str(ours.way)], again[str(alike.way)]),
            }
            print("{:.2f} ({:.2f}-{:.2f})".format(*result["keeping_memory"]["ratio"]))
    ours.end()
    if out is not None:
        write_result(out, result | passport(PRESETS[size](), device))
    print(f"{ours.way} over {peer.way}:")
    print("ratio {:.2f} ({:.2f}-{:.2f})".format(*result["ratio"]))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    typer.run(main)
