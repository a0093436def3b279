"""What a run will take of time and memory, measured with real steps before it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from transduce.data.batches import prefetch
from transduce.training.passes.written import GraphPasses
from transduce.training.share import Share
from transduce.training.trainer import Trainer
from transduce.training.window import memory_bytes

DISK_BYTES_PER_SECOND = 3e8
"""An estimate, for the time that a checkpoint takes."""
CALIBRATE_TRANSLATIONS = 32
"""Validation sentences that are translated to measure the time of one."""


class Speed(NamedTuple):
    seconds_per_step: float
    seconds_per_validation: float
    """Of the loss alone."""
    seconds_per_translation: float
    """By an untrained model. Later translations are shorter."""
    seconds_per_save: float
    tokens_per_second: float
    memory_bytes: int


def measure_speed(trainer: Trainer, seconds: float, n_ranks: int = 1) -> Speed:
    """Takes steps for this many seconds, after two to warm up, validates once, and resets the trainer.

    For a run on several ranks, one process takes the share of the first rank.
    """
    shares = prefetch(trainer.shares(0, 0, n_ranks))
    _take_steps(trainer, shares, 0.0, 2)
    n_steps, n_tokens, spent = _take_steps(trainer, shares, seconds, 3)
    shares.close()  # type: ignore[attr-defined]  # a generator has it
    began = time.perf_counter()
    trainer.validation_loss()
    seconds_per_validation, began = time.perf_counter() - began, time.perf_counter()
    n_translations = min(CALIBRATE_TRANSLATIONS, trainer.config.train.valid_translations)
    trainer.validation.translations(trainer.group, n_translations)
    speed = Speed(
        seconds_per_step=spent / n_steps,
        seconds_per_validation=seconds_per_validation,
        seconds_per_translation=(time.perf_counter() - began) / max(1, n_translations),
        seconds_per_save=16 * sum(p.numel() for p in trainer.parameters) / DISK_BYTES_PER_SECOND,
        tokens_per_second=n_tokens / spent,
        memory_bytes=memory_bytes(trainer.group.device),
    )
    trainer.begin(trainer.config, trainer.group)
    return speed


def _take_steps(trainer: Trainer, shares: Iterator[Share], seconds: float, min_steps: int) -> tuple[int, int, float]:
    """The numbers of steps and of target tokens, and the seconds they took, without steps that recorded a graph."""
    n_steps, n_tokens, began = 0, 0, time.perf_counter()
    while n_steps < min_steps or time.perf_counter() - began < seconds:
        share = next(shares)
        n_before, since = _n_recorded(trainer), time.perf_counter()
        trainer.take_step(n_steps + 1, share)
        trainer.window.loss.item()  # waits for the device
        if _n_recorded(trainer) > n_before:  # recording costs time once for each shape, not at each step
            began += time.perf_counter() - since
            continue
        n_steps, n_tokens = n_steps + 1, n_tokens + share.n_target_tokens
    return n_steps, n_tokens, time.perf_counter() - began


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
