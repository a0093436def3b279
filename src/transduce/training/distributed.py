"""Several processes that train one model. A single process uses the same class, so there is one training loop.

One collective after the last micro-batch sums the gradients. DistributedDataParallel is not used: it needs the same
number of passes on every rank, but a rank's share of a step may hold fewer micro-batches, or none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from transduce.errors import TransduceError

TIMEOUT = timedelta(minutes=10)
"""If a rank dies or hangs, the run ends within this time."""


class Group:
    def __init__(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self.rank, self.n_ranks, self.device = rank, n_ranks, device

    @classmethod
    def start(cls, device: str, timeout: timedelta = TIMEOUT) -> Group:
        """The group of all processes that torchrun started, or of this process alone."""
        n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        if n_ranks > 1:
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timeout)
        return cls(rank, n_ranks, torch.device(device))

    def close(self) -> None:
        if self.n_ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """The first rank is the only one that writes files and reports events."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sums over all ranks, in place, in one message."""
        if self.n_ranks == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. All ranks must call this."""
        if self.n_ranks == 1:
            return flag
        count = torch.tensor(float(flag), device=self.device)
        self._all_reduce(count)
        return bool(count.item() > 0)

    def from_first(self, values: Sequence[float]) -> list[float]:
        """The values of the first rank. All ranks must call this, with equally many values."""
        if self.n_ranks == 1:
            return list(values)
        total = torch.tensor(values if self.is_first else [0.0] * len(values), dtype=torch.float64, device=self.device)
        self._all_reduce(total)
        return [float(value) for value in total.tolist()]

    def wait(self) -> None:
        """Returns when all ranks have called it."""
        self.any(False)

    def _all_reduce(self, tensor: Tensor) -> None:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if self.device.type == "cpu":  # otherwise gloo's threads, which still hold the message, abort at exit
                self.close()
            raise RankError(
                f"rank {self.rank} lost the connection to another rank ({reason}): see the error of that rank, then "
                "run the same command to resume"
            ) from None


class RankError(TransduceError):
    """Another process of the run has ended or does not answer."""
