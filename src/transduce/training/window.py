"""Sums over the steps between two lines of the log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.training.distributed import Group


class Averages(NamedTuple):
    loss: float
    gradient_norm: float
    n_bad: int
    bad_in_a_row: int
    """Bad steps since the last good one."""
    last_bad_step: int
    tokens_per_second: float
    seconds_per_step: float
    n_steps: int


class Window:
    """The sums stay on the device. Only `read` waits for the device."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.bad_in_a_row = torch.zeros((), device=group.device)
        self.last_bad_step = torch.zeros((), device=group.device)
        self._begin()

    def _begin(self) -> None:
        self.loss = torch.zeros((), device=self.group.device)
        self.norm = torch.zeros((), device=self.group.device)
        self.n_bad = torch.zeros((), device=self.group.device)
        self.n_tokens, self.n_steps, self.since = 0, 0, time.perf_counter()

    def add(self, step: int, loss_sum: Tensor, norm: Tensor, is_bad: Tensor, n_tokens: int) -> None:
        self.loss += loss_sum
        self.norm += norm
        self.n_bad += is_bad
        self.bad_in_a_row = (self.bad_in_a_row + 1) * is_bad
        self.last_bad_step = torch.where(is_bad > 0, float(step), self.last_bad_step)
        self.n_tokens += n_tokens
        self.n_steps += 1

    def restart_clock(self) -> None:
        self.since = time.perf_counter()

    def read(self) -> Averages:
        """Averages since the last call. All ranks must call this."""
        self.group.sum([self.loss])
        values = torch.stack([self.loss, self.norm, self.n_bad, self.bad_in_a_row, self.last_bad_step]).tolist()
        loss_sum, norm, n_bad, in_a_row, last_bad_step = values
        spent = time.perf_counter() - self.since
        averages = Averages(
            loss=loss_sum / self.n_tokens,
            gradient_norm=norm / self.n_steps,
            n_bad=int(n_bad),
            bad_in_a_row=int(in_a_row),
            last_bad_step=int(last_bad_step),
            tokens_per_second=self.n_tokens / spent,
            seconds_per_step=spent / self.n_steps,
            n_steps=self.n_steps,
        )
        self._begin()
        return averages


def memory_bytes(device: torch.device) -> int:
    """The peak memory of a GPU; on a CPU, the memory of the process now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated())
    try:
        import resource  # POSIX only

        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ImportError):
        return 0
