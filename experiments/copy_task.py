"""Four tasks on strings of letters. A correct model reaches a perfect score on each task within about a minute.

    python -m experiments.copy_task --task map
    python -m experiments.copy_task --task all --out experiments/results    # all tasks, one JSON file each

Copy keeps symbols and order, map replaces the symbols, reorder and reverse change the order. Together they cover what
translation needs. The training loop is minimal and uses the paper's loss, Adam, learning rate schedule and average of
the last checkpoints. Not in the paper: dropout is 0, because no string occurs twice, and gradients are clipped.
"""

from __future__ import annotations

import random
import string
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.passport import passport, write_result
from transduce import (
    Batch,
    RunConfig,
    Transformer,
    base,
    greedy,
    load_model,
    make_batch,
    reference,
    save_model,
    with_model,
)
from transduce.training.recipe import adam, learning_rate, loss

LETTERS = string.ascii_lowercase
MAPPED = "qwertyuiopasdfghjklzxcvbnm"
"""The image of each letter: the rows of a keyboard. No letter maps to itself, and the map is not a shift of the
alphabet."""
FIRST_LETTER_ID = 3  # after padding, start and end
CHECKPOINT_STEPS = 50
BATCH_SIZE = 64
CLIP_NORM = 1.0
LONGEST = 12
ALL = "all"
"""The value of --task that selects all tasks, from the easiest to the hardest."""


class Task(StrEnum):
    """From the easiest to the hardest."""

    copy = "copy"
    map = "map"
    reorder = "reorder"
    reverse = "reverse"

    def answer(self, ids: list[int]) -> list[int]:
        if self is Task.map:
            return [FIRST_LETTER_ID + LETTERS.index(MAPPED[i - FIRST_LETTER_ID]) for i in ids]
        if self is Task.reorder:  # 1 2 3 4 5 6 -> 3 1 2 6 4 5
            return [x for i in range(0, len(ids), 3) for x in ids[i + 2 : i + 3] + ids[i : i + 2]]
        return ids if self is Task.copy else ids[::-1]


class Score(NamedTuple):
    n_right: int
    n_strings: int

    def __str__(self) -> str:
        return f"{self.n_right} of {self.n_strings} held-out strings exactly right"


def copy_task(steps: int = 2000, seed: int = 1) -> RunConfig:
    n = FIRST_LETTER_ID + len(LETTERS)
    config = with_model(
        base(),
        source_vocab_size=n,
        target_vocab_size=n,
        n_encoder_layers=2,
        n_decoder_layers=2,
        d_model=64,
        d_ff=256,
        n_heads=4,
        d_k=16,
        d_v=16,
        dropout=0.0,
    )
    # 20 checkpoints, as for the paper's big model: so small a model oscillates around its optimum for a long time.
    train = replace(config.train, max_steps=steps, warmup_steps=400, average_last=20, seed=seed)
    return replace(config, train=train)


def train(task: Task, config: RunConfig, device: str, report: Callable[[int, float], None]) -> Transformer:
    """Train a model and return the average of its last checkpoints. `report` receives the step and the loss per token
    at each checkpoint."""
    torch.manual_seed(config.train.seed)
    rng = random.Random(config.train.seed)
    model = Transformer(config.model).to(device)
    optimiser = adam(model.parameters(), config.train)
    checkpoints: list[dict[str, torch.Tensor]] = []
    for step in range(1, config.train.max_steps + 1):
        batch = make_batch([pair(task, draw(rng, held_out=False)) for _ in range(BATCH_SIZE)], config.model)
        optimiser.param_groups[0]["lr"] = learning_rate(step, config.model.d_model, config.train.warmup_steps)
        loss_per_token = _loss(model, batch, config, device) / batch.n_target_tokens
        optimiser.zero_grad()
        loss_per_token.backward()
        # Not in the paper. Without clipping, one string in a thousand stayed wrong in some runs.
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step()
        if step % CHECKPOINT_STEPS == 0 or step == config.train.max_steps:
            checkpoints.append({name: W.clone() for name, W in model.weights().items()})
            checkpoints = checkpoints[-config.train.average_last :]
            report(step, loss_per_token.item())
    model.load_weights({name: torch.stack([c[name] for c in checkpoints]).mean(0) for name in checkpoints[0]})
    return model.eval()


def _loss(model: Transformer, batch: Batch, config: RunConfig, device: str) -> torch.Tensor:
    source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(device) for ids in batch[:3])
    logits_BTV = model(source_BS, target_in_BT).logits_BTV
    loss_sum, _ = loss(logits_BTV, target_out_BT, config.train.label_smoothing, config.model.pad_id)
    return loss_sum


def draw(rng: random.Random, held_out: bool) -> list[int]:
    """A random string. A hash of the string decides whether it is held out: training uses no held-out string."""
    while True:
        n = rng.randint(1, LONGEST)
        ids = [rng.randrange(FIRST_LETTER_ID, FIRST_LETTER_ID + len(LETTERS)) for _ in range(n)]
        if (zlib.crc32(bytes(ids)) % 10 == 0) == held_out:
            return ids


def pair(task: Task, ids: list[int]) -> tuple[list[int], list[int]]:
    return ids, task.answer(ids)


def evaluate(model: Transformer, task: Task, config: RunConfig, device: str, n_strings: int = 1000) -> Score:
    """The score of greedy search on distinct held-out strings."""
    rng = random.Random(0)
    strings: set[tuple[int, ...]] = set()
    while len(strings) < n_strings:
        strings.add(tuple(draw(rng, held_out=True)))
    pairs = [pair(task, list(ids)) for ids in sorted(strings)]
    source_BS = torch.from_numpy(make_batch(pairs, config.model).source_BS).to(device)
    outputs = greedy(model, config.model, source_BS, config.decode.max_extra_tokens)
    return Score(sum(ids == target for ids, (_, target) in zip(outputs, pairs, strict=True)), n_strings)


def text(ids: list[int]) -> str:
    return "".join(LETTERS[i - FIRST_LETTER_ID] if i >= FIRST_LETTER_ID else "?" for i in ids)


def show(console: Console, model: Transformer, task: Task, config: RunConfig) -> None:
    """Print the outputs of the PyTorch model and of the NumPy model for a few strings, then the attention weights of
    the last layer. The NumPy model reads the saved model folder."""
    model = model.cpu()
    pairs = [pair(task, draw(random.Random(seed), held_out=True)) for seed in range(5)]
    source_BS = make_batch(pairs, config.model).source_BS
    by_torch = greedy(model, config.model, torch.from_numpy(source_BS), config.decode.max_extra_tokens)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        save_model(folder, model, config)
        weights = reference.load_weights(folder / "weights.safetensors")
        by_numpy = reference.greedy(weights, config.model, source_BS, config.decode.max_extra_tokens)
        model, _ = load_model(folder)
    console.print(f"\n{'input':14}{'PyTorch':14}{'NumPy, from the saved weights':14}")
    for (source, target), a, b in zip(pairs, by_torch, by_numpy, strict=True):
        console.print(f"{text(source):14}{text(a):14}{text(b):14}{'' if a == b == target else '  wrong'}")
    source, target = max(pairs, key=lambda p: len(p[0]))
    console.print("\nmemory attention of the last decoder layer (rows: output, columns: input)")
    for line in attention_picture(model, config, source, target):
        console.print(line)


def attention_picture(model: Transformer, config: RunConfig, source: list[int], target: list[int]) -> Iterator[str]:
    batch = make_batch([(source, target)], config.model)
    source_BS, target_in_BT = torch.from_numpy(batch.source_BS), torch.from_numpy(batch.target_in_BT)
    with torch.no_grad():
        attention = model(source_BS, target_in_BT, with_attention=True).attention
    weight_TS = attention.memory_LBHTS[-1, 0].mean(0)
    yield "    " + " ".join(text(source)) + " ."
    for letter, weight_S in zip([*text(target), "."], weight_TS.tolist(), strict=True):
        yield f"  {letter} " + " ".join(" ░▒▓█"[min(4, int(weight * 5))] for weight in weight_S)


def train_with_progress(task: Task, config: RunConfig, device: str) -> tuple[Transformer, list[tuple[int, float]]]:
    """Returns the model and its learning curve. Shows a progress bar on a terminal and plain lines elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    curve: list[tuple[int, float]] = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        job = bar.add_task("loss ...", total=config.train.max_steps)

        def report(step: int, loss_per_token: float) -> None:
            curve.append((step, round(loss_per_token, 4)))
            bar.update(job, completed=step, description=f"loss {loss_per_token:.3f}")
            if not console.is_terminal and (step % 250 == 0 or step == config.train.max_steps):
                print(f"step {step}/{config.train.max_steps}  loss {loss_per_token:.3f}", file=sys.stderr)

        return train(task, config, device, report), curve


def run_task(console: Console, task: Task, config: RunConfig, device: str, out: Path | None) -> Score:
    """Train on one task, score the model, print examples and write the result to `out`."""
    n_parameters, steps = sum(p.numel() for p in Transformer(config.model).parameters()), config.train.max_steps
    console.print(f"Learning to {task} strings of 1 to {LONGEST} letters: {n_parameters:,} parameters, {steps} steps")
    began = time.monotonic()
    model, curve = train_with_progress(task, config, device)
    seconds = round(time.monotonic() - began, 1)
    score = evaluate(model, task, config, device)
    show(console, model, task, config)
    console.print(f"\n{score}, after {steps} steps ({seconds:.0f} s)")
    if out is not None:
        result: dict[str, Any] = {
            "experiment": "copy_task",
            "task": task.value,
            **score._asdict(),
            "steps": steps,
            "batch_size": BATCH_SIZE,
            "longest": LONGEST,
            "checkpoint_steps": CHECKPOINT_STEPS,
            "clip_norm": CLIP_NORM,
            "seconds": seconds,
        }
        write_result(out, result | passport(config, device) | {"loss": curve})
    return score


def tasks_named(task: str) -> list[Task]:
    if task not in (*Task, ALL):
        raise typer.BadParameter(f"unknown task {task}: choose one of {', '.join(Task)}, or {ALL}")
    return list(Task) if task == ALL else [Task(task)]


def main(
    task: Annotated[str, typer.Option(help=f"The task: {', '.join(Task)}, or {ALL}.")] = Task.copy.value,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = copy_task().train.max_steps,
    seed: int = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help=f"Write the result to this JSON file; with {ALL}, to this folder.")
    ] = None,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device: omit --device")
    tasks = tasks_named(task)
    if task == ALL and out is not None and out.suffix:
        raise typer.BadParameter(f"--out {out} is a file, but {ALL} writes several files: name a folder")
    torch.set_num_threads(1)  # so small a model gains little from a second thread, and loses much on a busy machine
    config = copy_task(steps, seed)
    console = Console(highlight=False)
    perfect = True
    for one_task in tasks:
        file = out / f"copy_task_{one_task}.json" if task == ALL and out is not None else out
        score = run_task(console, one_task, config, device, file)
        perfect = perfect and score.n_right == score.n_strings
    if not perfect:
        console.print(f"not perfect: increase --steps ({copy_task().train.max_steps} steps are enough)")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
