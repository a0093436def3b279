"""Several processes that train one model. A world of one is the same object, so that there is one loop.

Gradients are summed by one collective after the last micro-batch, and not by DistributedDataParallel, which wants every
rank to run the same number of passes: here a rank's share of a step may hold fewer micro-batches, or none.
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
"""A rank that dies or hangs ends the run within this."""


class Group:
    def __init__(self, rank: int, n_ranks: int, device: torch.device) -> None:
        self.rank, self.n_ranks, self.device = rank, n_ranks, device

    @classmethod
    def start(cls, device: str, timeout: timedelta = TIMEOUT) -> Group:
        """Of the processes that torchrun started, or of this one alone."""
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
        """The rank that writes and speaks."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """In place, over all ranks, in one message."""
        if self.n_ranks == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether one of the ranks says so; all must ask."""
        if self.n_ranks == 1:
            return flag
        count = torch.tensor(float(flag), device=self.device)
        self._all_reduce(count)
        return bool(count.item() > 0)

    def wait(self) -> None:
        self.any(False)

    def _all_reduce(self, tensor: Tensor) -> None:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if self.device.type == "cpu":  # gloo's threads, still holding the lost message, abort a process that exits
                self.close()
            raise RankError(
                f"rank {self.rank} lost touch with another ({reason}): see what that one said; the same command resumes"
            ) from None


class RankError(TransduceError):
    """Another process of the run is gone."""
