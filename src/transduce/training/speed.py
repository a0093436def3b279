"""What a run will take of time and memory, measured before it begins, in a limited time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from transduce.data.batches import prefetch
from transduce.training.pace import Speed
from transduce.training.passes.written import GraphPasses
from transduce.training.share import Part, Share, split_rows
from transduce.training.trainer import Trainer
from transduce.training.window import memory_bytes

DISK_BYTES_PER_SECOND = 3e8
"""An estimate, for the time that a checkpoint takes."""
PART_POSITIONS = 1024
"""On a CPU, speed is measured in passes of at most this size."""
FORWARD_SHARE, TRANSLATION_FACTOR = 2 / 3, 4
"""The time of a validation, and of translating a sentence greedily, in training passes over its tokens. Both are about
twice what is usual, so that the first milestone comes in time; then they are measured."""


class Rates(NamedTuple):
    tokens_per_second: float
    """Target tokens of all ranks, forward and backward."""
    seconds_of_optimiser: float


def measure_rates(trainer: Trainer, seconds: float, n_ranks: int = 1) -> Rates:
    """Takes about this many seconds, and resets the trainer. On several ranks, one process takes the first one's share.

    On a GPU whole steps are measured, the optimiser included. On a CPU small passes are, because a step of a large
    model may take minutes.
    """
    if trainer.group.device.type == "cuda":
        rates = Rates(_tokens_per_step(trainer) / _seconds_per_step(trainer, seconds, n_ranks), 0.0)
    else:
        rates = Rates(_tokens_per_second(trainer, seconds, n_ranks) * n_ranks, _seconds_of_optimiser(trainer))
    trainer.begin(trainer.config, trainer.group)
    return rates


def speed_of(trainer: Trainer, rates: Rates) -> Speed:
    """What the steps and milestones of this trainer cost."""
    tokens_per_step = _tokens_per_step(trainer)
    seconds_per_step = tokens_per_step / rates.tokens_per_second + rates.seconds_of_optimiser
    tokens_per_sentence = tokens_per_step * trainer.layout.n_steps / len(trainer.examples)
    return Speed(
        seconds_per_step=seconds_per_step,
        seconds_per_validation=trainer.validation.n_target_tokens * FORWARD_SHARE / rates.tokens_per_second,
        seconds_per_translation=TRANSLATION_FACTOR * tokens_per_sentence / rates.tokens_per_second,
        seconds_per_save=16 * sum(p.numel() for p in trainer.parameters) / DISK_BYTES_PER_SECOND,
        tokens_per_second=tokens_per_step / seconds_per_step,
        memory_bytes=memory_bytes(trainer.group.device),
    )


def _tokens_per_step(trainer: Trainer) -> float:
    """Target tokens of all ranks."""
    return int(trainer.examples.lengths()[1].sum()) / trainer.layout.n_steps


def _seconds_per_step(trainer: Trainer, seconds: float, n_ranks: int) -> float:
    """Of whole steps, after two to warm up, without those that recorded a graph: recording costs time only once."""
    shares = prefetch(trainer.shares(0, 0, n_ranks))
    n_steps, spent, began = 0, 0.0, time.perf_counter()
    while n_steps < 3 + 2 or time.perf_counter() - began < seconds:
        share = next(shares)
        n_before, since = _n_recorded(trainer), time.perf_counter()
        trainer.take_step(n_steps + 1, share)
        trainer.window.loss.item()  # waits for the device
        if _n_recorded(trainer) == n_before:
            n_steps += 1
            spent += time.perf_counter() - since if n_steps > 2 else 0.0
    shares.close()  # type: ignore[attr-defined]  # a generator has it
    return spent / (n_steps - 2)


def _tokens_per_second(trainer: Trainer, seconds: float, n_ranks: int) -> float:
    """Of small passes. The first one, which is slower, counts only if there is no time for another."""
    n_tokens, spent, warm_up = 0, 0.0, 0.0
    began, pad_id = time.perf_counter(), trainer.config.model.pad_id
    for source_BS, target_in_BT, target_out_BT in _parts(trainer, n_ranks):
        since, n = time.perf_counter(), int((target_out_BT != pad_id).sum())
        trainer.gradients.fill(1, Share([0], [(source_BS, target_in_BT, target_out_BT)], n), trainer.state)
        took = time.perf_counter() - since
        if not warm_up:
            warm_up = n / took
        else:
            n_tokens, spent = n_tokens + n, spent + took
        if time.perf_counter() - began >= seconds:
            break
    return n_tokens / spent if n_tokens else warm_up


def _parts(trainer: Trainer, n_ranks: int) -> Iterator[Part]:
    for share in trainer.shares(0, 0, n_ranks):
        for batch in share.batches:
            yield from split_rows(batch, PART_POSITIONS)


def _seconds_of_optimiser(trainer: Trainer) -> float:
    """Of its second step: the first one allocates the moments."""
    for _ in range(2):
        since = time.perf_counter()
        trainer.apply_gradients(1)
        took = time.perf_counter() - since
    return took


def _n_recorded(trainer: Trainer) -> int:
    return len(trainer.passes.recorded) if isinstance(trainer.passes, GraphPasses) else 0


def micro_tokens_that_fit(trainer: Trainer) -> int:
    """Positions of one pass: as many as chosen, or fewer if the largest batches run out of memory."""
    layout, eos_id = trainer.layout, trainer.config.model.eos_id
    width_M = layout.shape_K2[layout.shape_M].max(axis=1)
    n_positions_M = layout.n_rows_M * width_M
    for m in {int(n_positions_M.argmax()), int(width_M.argmax())}:
        n_rows, (n_source, n_target) = int(layout.n_rows_M[m]), layout.shape_K2[layout.shape_M[m]]
        source_BS = torch.full((n_rows, int(n_source)), eos_id)
        target_BT = torch.full((n_rows, int(n_target)), eos_id)
        share = Share([0], [(source_BS, target_BT, target_BT)], target_BT.numel())
        trainer.gradients.fill(1, share, trainer.state)
    limit = trainer.state.micro_limit
    trainer.begin(trainer.config, trainer.group)
    return trainer.choices.micro_tokens if limit is None else limit
