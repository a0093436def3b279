"""The logits of a step in groups, of each of which the highest is known: a search looks into the few groups that can
matter, and never writes a probability for every token."""

# Axes: B sentences, K hypotheses of each, R = B K rows, A states of an automaton, C candidates, V vocabulary, N groups
# of a row, W tokens of a group; J blocks of G groups each, one after another.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Tokens of a group. Sixteen take longer to choose among, and sixty-four to look into."""


SPARE = 3
"""Groups looked at beside as many as can be needed: some tokens are forbidden."""


@dataclass
class Doubts:
    """What a step would decide by what it finds. While it is recorded nothing can be: it goes on as if nothing were in
    doubt, and whoever replays it must look."""

    noted: list[Tensor] | None = None
    """None: all are looked at at once."""

    def any(self, is_so: Tensor) -> bool:
        if self.noted is None:
            return bool(is_so.any())
        self.noted.append(is_so.any())
        return False


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

    def best(
        self,
        so_far_BK: Tensor,
        state_BK: Tensor,
        penalty_AV: Tensor,
        n_open_B1: Tensor,
        may_end_B: Tensor | None,
        eos_id: int,
        doubts: Doubts,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Of all continuations of a sentence's hypotheses the K + 1 best, the best first: their log-probability, whose
        they are, by which token. None where the groups with the highest peaks are not enough to tell: too many tokens
        are forbidden, or one as good was not looked at.

        `so_far`: of each hypothesis; `state` and `penalty`: what may follow, as `Rules` has it; `may_end`: whether it
        may end yet.
        """
        n_sentences, n_kept = so_far_BK.shape
        n_groups, n_looked_at = self.peak_RN.shape[1], n_kept + 1 + SPARE
        if n_kept * n_groups < n_looked_at:  # as `can_tell` says beforehand
            return None
        so_far_R1, log_sum_R1 = so_far_BK.reshape(-1, 1), self.log_sum_R1.float()
        total_BN = (self.peak_RN.float() - log_sum_R1).add_(so_far_R1).view(n_sentences, -1)
        highest_BN, place_BN = total_BN.topk(n_looked_at)
        place_BN = place_BN.sort().values  # in the order of parents and tokens, by which equals are told apart
        parent_BN, group_BN = place_BN // n_groups, place_BN % n_groups
        row_BN = torch.arange(0, n_sentences * n_kept, n_kept, device=place_BN.device)[:, None] + parent_BN
        log_prob_BNW = self.look(row_BN, group_BN).float() - log_sum_R1[row_BN]
        penalty_ANW = in_groups(penalty_AV, -torch.inf)
        allowed_BNW = log_prob_BNW.add_(penalty_ANW[state_BK.gather(1, parent_BN), group_BN])
        if may_end_B is not None:
            W = torch.arange(GROUP, device=place_BN.device)
            is_end_BNW = (group_BN == eos_id // GROUP)[..., None] & (eos_id % GROUP == W)
            allowed_BNW.masked_fill_(is_end_BNW & ~may_end_B[:, None, None], -torch.inf)
        candidate_BC = allowed_BNW.add_(so_far_R1[row_BN]).flatten(1)
        value_BC, place_BC = first_of_equals(candidate_BC, n_kept + 1, n_open_B1, doubts)
        is_enough_B = (value_BC[:, -1] > highest_BN[:, -1]) | (highest_BN[:, 0] == -torch.inf)
        if doubts.any(~is_enough_B):
            return None
        group_BC = place_BC // GROUP
        # What fills the last group up may stand where there are too few, at -inf.
        token_BC = (group_BN.gather(1, group_BC) * GROUP + place_BC % GROUP).clamp_(max=penalty_AV.shape[1] - 1)
        return value_BC, parent_BN.gather(1, group_BC), token_BC


def can_tell(n_kept: int, n_vocabulary: int) -> bool:
    """Whether there are as many groups as `Peaks.best` looks at."""
    return n_kept * -(-n_vocabulary // GROUP) >= n_kept + 1 + SPARE


def in_groups(x: Tensor, fill: float) -> Tensor:
    """The last axis, of the vocabulary, as groups."""
    if n_more := -x.shape[-1] % GROUP:
        x = F.pad(x, (0, n_more), value=fill)
    return torch.unflatten(x, -1, (-1, GROUP))


def first_of_equals(
    candidate_BC: Tensor, n: int, n_open_B1: Tensor, doubts: Doubts | None = None
) -> tuple[Tensor, Tensor]:
    """The n highest and where they stand; of equals, among those that stay, the first first."""
    value_BC, place_BC = candidate_BC.topk(n)
    place_BC, order_BC = place_BC.sort()
    value_BC, rank_BC = value_BC.gather(1, order_BC).sort(descending=True, stable=True)
    place_BC = place_BC.gather(1, rank_BC)
    # topk takes any of equals. Where they reach from the last that stays to the end, it may have left out the first.
    last_in_B1 = value_BC.gather(1, (n_open_B1 - 1).clamp(0, n - 1))
    is_tied_B = ((last_in_B1 == value_BC[:, -1:]) & (last_in_B1 > -torch.inf))[:, 0]
    if (doubts or Doubts()).any(is_tied_B):
        tied_B = is_tied_B.nonzero()[:, 0]
        sorted_BC = candidate_BC[tied_B].sort(descending=True, stable=True)
        value_BC[tied_B], place_BC[tied_B] = sorted_BC.values[:, :n], sorted_BC.indices[:, :n]
    return value_BC, place_BC
