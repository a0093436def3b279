"""The logits of a step in groups, of each of which the highest is known: a search looks into the few groups that can
matter, and never writes a probability for every token."""

# Axes: R rows, V vocabulary, N groups of a row, W tokens of a group; J blocks of G groups each, one after another.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Tokens of a group. Sixteen take longer to choose among, and sixty-four to look into."""


@dataclass(frozen=True)
class Peaks:
    peak_RN: Tensor
    log_sum_R1: Tensor
    """Over all tokens, of exp: a logit less it is a log-probability."""
    look: Callable[[Tensor, Tensor], Tensor]
    """Rows and groups, of any one shape: the logits of each group, in a new last axis."""
    logits: Callable[[], Tensor]
    """All of them, (R, V)."""

    @classmethod
    def of(cls, logits_RV: Tensor) -> Peaks:
        exact_RV = logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV
        return cls.of_blocks(in_groups(exact_RV, -torch.inf).flatten(1)[None], logits_RV.shape[1])

    @classmethod
    def of_blocks(cls, logits_JRV: Tensor, n_vocabulary: int, made: Iterable[int] = (0,)) -> Peaks:
        """`made` says, one by one, which blocks have been written: each is read while it is still in the cache. -inf
        past the last of the vocabulary."""
        peaks, sums = [], []
        for j in made:
            peak_RG = torch.unflatten(logits_JRV[j], 1, (-1, GROUP)).amax(2)
            most_R1 = peak_RG.amax(1, keepdim=True)
            peaks.append(peak_RG)
            sums.append((logits_JRV[j] - most_R1).exp_().sum(1, keepdim=True).log_().add_(most_R1))
        n_rows, n_groups = logits_JRV.shape[1], logits_JRV.shape[2] // GROUP

        def look(row: Tensor, group: Tensor) -> Tensor:
            place = ((group // n_groups) * n_rows + row) * n_groups + group % n_groups
            return logits_JRV.view(-1, GROUP).index_select(0, place.flatten()).view(*place.shape, GROUP)

        def logits() -> Tensor:
            return logits_JRV.transpose(0, 1).flatten(1)[:, :n_vocabulary]

        log_sum_R1 = sums[0] if len(sums) == 1 else torch.cat(sums, 1).logsumexp(1, keepdim=True)
        peak_RN = torch.cat(peaks, 1)[:, : -(-n_vocabulary // GROUP)]  # groups past the last are none
        return cls(peak_RN, log_sum_R1, look, logits)


def in_groups(x: Tensor, fill: float) -> Tensor:
    """The last axis, of the vocabulary, as groups."""
    if n_more := -x.shape[-1] % GROUP:
        x = F.pad(x, (0, n_more), value=fill)
    return torch.unflatten(x, -1, (-1, GROUP))
