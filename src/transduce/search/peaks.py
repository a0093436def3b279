"""The logits of a step in groups, with the highest logit of each group: a search reads only the few groups that can
hold a best continuation, and never computes the probabilities of all tokens."""

# Axes: B sentences, K hypotheses of each, R = B K rows, A states of an automaton, C candidates, V vocabulary, N groups
# of a row, W tokens of a group; J blocks of G groups each, one after another.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
"""Tokens in a group. Choosing among groups of 16 takes longer, and reading groups of 64 takes longer."""
SPARE = 3
"""Groups read in addition to those that would be enough if every token were allowed."""


@dataclass
class Conditions:
    """Conditions that decide how a step continues. A recorded step cannot branch: it continues as if no condition held,
    and defers the conditions to the code that replays it."""

    deferred: list[Tensor] | None = None
    """None evaluates each condition immediately."""

    def any(self, is_true: Tensor) -> bool:
        if self.deferred is None:
            return bool(is_true.any())
        self.deferred.append(is_true.any())
        return False


@dataclass(frozen=True)
class Peaks:
    peak_RN: Tensor
    log_sum_R1: Tensor
    """log(sum(exp(logits))) over all tokens. A logit minus this is a log-probability."""
    read_groups: Callable[[Tensor, Tensor], Tensor]
    """Takes rows and groups of equal shape. Returns the logits of each group in a new last axis."""
    logits: Callable[[], Tensor]
    """Returns all logits, (R, V)."""

    @classmethod
    def of(cls, logits_RV: Tensor) -> Peaks:
        exact_RV = logits_RV.float() if logits_RV.dtype.itemsize < 4 else logits_RV
        return cls.of_blocks(in_groups(exact_RV, -torch.inf).flatten(1)[None], logits_RV.shape[1])

    @classmethod
    def of_blocks(cls, logits_JRV: Tensor, n_vocabulary: int, blocks: Iterable[int] = (0,)) -> Peaks:
        """`blocks` yields the number of each block after writing it, so that it is read while it is in the cache.
        Logits past the vocabulary are -inf."""
        peaks, sums = [], []
        for j in blocks:
            peak_RG = torch.unflatten(logits_JRV[j], 1, (-1, GROUP)).amax(2)
            highest_R1 = peak_RG.amax(1, keepdim=True)
            peaks.append(peak_RG)
            sums.append((logits_JRV[j] - highest_R1).exp_().sum(1, keepdim=True).log_().add_(highest_R1))
        n_rows, n_groups = logits_JRV.shape[1], logits_JRV.shape[2] // GROUP

        def read_groups(row: Tensor, group: Tensor) -> Tensor:
            place = ((group // n_groups) * n_rows + row) * n_groups + group % n_groups
            return logits_JRV.view(-1, GROUP).index_select(0, place.flatten()).view(*place.shape, GROUP)

        def logits() -> Tensor:
            return logits_JRV.transpose(0, 1).flatten(1)[:, :n_vocabulary]

        log_sum_R1 = sums[0] if len(sums) == 1 else torch.cat(sums, 1).logsumexp(1, keepdim=True)
        peak_RN = torch.cat(peaks, 1)[:, : -(-n_vocabulary // GROUP)]  # without the groups past the vocabulary
        return cls(peak_RN, log_sum_R1, read_groups, logits)

    def best(
        self,
        so_far_BK: Tensor,
        state_BK: Tensor,
        penalty_AV: Tensor,
        n_open_B1: Tensor,
        may_end_B: Tensor | None,
        eos_id: int,
        conditions: Conditions,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The K + 1 best continuations of each sentence's hypotheses, the best first: log-probability, parent, token.

        None if the groups with the highest peaks are not enough: too many tokens are forbidden, or a token with an
        equal score may be in another group. `so_far`: the log-probability of each hypothesis; `state` and `penalty`:
        see `Rules`; `may_end`: whether the end mark is already allowed.
        """
        n_sentences, n_kept = so_far_BK.shape
        n_groups, n_read = self.peak_RN.shape[1], n_kept + 1 + SPARE
        if n_kept * n_groups < n_read:  # see `has_enough_groups`
            return None
        so_far_R1, log_sum_R1 = so_far_BK.reshape(-1, 1), self.log_sum_R1.float()
        total_BN = (self.peak_RN.float() - log_sum_R1).add_(so_far_R1).view(n_sentences, -1)
        highest_BN, place_BN = total_BN.topk(n_read)
        place_BN = place_BN.sort().values  # parents, then tokens: the order that decides between equals
        parent_BN, group_BN = place_BN // n_groups, place_BN % n_groups
        row_BN = torch.arange(0, n_sentences * n_kept, n_kept, device=place_BN.device)[:, None] + parent_BN
        log_prob_BNW = self.read_groups(row_BN, group_BN).float() - log_sum_R1[row_BN]
        penalty_ANW = in_groups(penalty_AV, -torch.inf)
        allowed_BNW = log_prob_BNW.add_(penalty_ANW[state_BK.gather(1, parent_BN), group_BN])
        if may_end_B is not None:
            W = torch.arange(GROUP, device=place_BN.device)
            is_end_BNW = (group_BN == eos_id // GROUP)[..., None] & (eos_id % GROUP == W)
            allowed_BNW.masked_fill_(is_end_BNW & ~may_end_B[:, None, None], -torch.inf)
        candidate_BC = allowed_BNW.add_(so_far_R1[row_BN]).flatten(1)
        value_BC, place_BC = stable_topk(candidate_BC, n_kept + 1, n_open_B1, conditions)
        is_enough_B = (value_BC[:, -1] > highest_BN[:, -1]) | (highest_BN[:, 0] == -torch.inf)
        if conditions.any(~is_enough_B):
            return None
        group_BC = place_BC // GROUP
        # If there are too few candidates, some are the padding of the last group, at -inf.
        token_BC = (group_BN.gather(1, group_BC) * GROUP + place_BC % GROUP).clamp_(max=penalty_AV.shape[1] - 1)
        return value_BC, parent_BN.gather(1, group_BC), token_BC


def has_enough_groups(n_kept: int, n_vocabulary: int) -> bool:
    """Whether there are as many groups as `Peaks.best` reads."""
    return n_kept * -(-n_vocabulary // GROUP) >= n_kept + 1 + SPARE


def in_groups(x: Tensor, fill: float) -> Tensor:
    """Splits the last axis, the vocabulary, into groups."""
    if n_more := -x.shape[-1] % GROUP:
        x = F.pad(x, (0, n_more), value=fill)
    return torch.unflatten(x, -1, (-1, GROUP))


def stable_topk(
    candidate_BC: Tensor, n: int, n_open_B1: Tensor, conditions: Conditions | None = None
) -> tuple[Tensor, Tensor]:
    """The n highest values and their places. Of equal values the first are taken, in their order. This holds for the
    first `n_open_B1` of the n."""
    value_BC, place_BC = candidate_BC.topk(n)
    place_BC, order_BC = place_BC.sort()
    value_BC, rank_BC = value_BC.gather(1, order_BC).sort(descending=True, stable=True)
    place_BC = place_BC.gather(1, rank_BC)
    # topk returns any of equal values. If the last guaranteed value equals the last value returned, an earlier place
    # with the same value may be missing.
    last_in_B1 = value_BC.gather(1, (n_open_B1 - 1).clamp(0, n - 1))
    is_tied_B = ((last_in_B1 == value_BC[:, -1:]) & (last_in_B1 > -torch.inf))[:, 0]
    if (conditions or Conditions()).any(is_tied_B):
        tied_B = is_tied_B.nonzero()[:, 0]
        sorted_BC = candidate_BC[tied_B].sort(descending=True, stable=True)
        value_BC[tied_B], place_BC[tied_B] = sorted_BC.values[:, :n], sorted_BC.indices[:, :n]
    return value_BC, place_BC
