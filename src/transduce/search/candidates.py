"""The continuations of hypotheses: the tokens that are allowed, and the choice among them."""

# Axes: B sentences, K hypotheses of each, R = B K rows, V vocabulary, T tokens, A states of an automaton, C candidates.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import DecodeConfig, ModelConfig
from transduce.search.hypotheses import NONE, Beams
from transduce.search.peaks import Conditions, Peaks, stable_topk


class Rules(NamedTuple):
    """The tokens that are allowed, as a finite automaton. A hypothesis starts in state 0, and may end only there."""

    penalty_AV: Tensor
    """0 if the token is allowed, else -inf."""
    next_AV: Tensor
    """The state after the token."""

    def to(self, device: torch.device | str) -> Rules:
        return Rules(self.penalty_AV.to(device), self.next_AV.to(device))


def free(config: ModelConfig) -> Rules:
    """Allows everything except padding and the start mark."""
    penalty_AV = torch.zeros(1, config.target_vocab_size)
    penalty_AV[0, [i for i in (config.pad_id, config.bos_id) if i != config.eos_id]] = -torch.inf
    return Rules(penalty_AV, torch.zeros(1, config.target_vocab_size, dtype=torch.long))


def restrict(beams: Beams, log_prob_RV: Tensor, settings: DecodeConfig, rules: Rules, eos_id: int) -> Tensor:
    """The log-probabilities, with -inf for tokens that are not allowed."""
    n_kept = beams.log_prob_BK.shape[1]
    state_R = beams.state_BK.flatten()
    # Usually all hypotheses are in state 0, so that one row serves them all.
    allowed_RV = log_prob_RV + (rules.penalty_AV[state_R] if bool(state_R.any()) else rules.penalty_AV[0])
    length_R = beams.length_B.repeat_interleave(n_kept)
    if settings.min_length > 0:
        allowed_RV[:, eos_id] = allowed_RV[:, eos_id].masked_fill(length_R < settings.min_length, -torch.inf)
    if settings.no_repeat_ngram > 0:
        token_RT = beams.token_BKT.flatten(0, 1)
        forbidden_RV = repeats(token_RT, length_R, settings.no_repeat_ngram, log_prob_RV.shape[1])
        allowed_RV = allowed_RV.masked_fill(forbidden_RV, -torch.inf)
    if (n_forced := beams.forced_BT.shape[1]) > 0:
        place_B = beams.length_B.clamp(max=n_forced - 1)
        forced_B = torch.where(beams.length_B < n_forced, beams.forced_BT.gather(1, place_B[:, None])[:, 0], NONE)
        forced_R1 = forced_B.repeat_interleave(n_kept)[:, None]
        is_forced_RV = forced_R1 == torch.arange(log_prob_RV.shape[1], device=log_prob_RV.device)
        # A prefix is forced even where the rules forbid it.
        forced_RV = log_prob_RV.masked_fill(~is_forced_RV, -torch.inf)
        allowed_RV = torch.where(forced_R1 == NONE, allowed_RV, forced_RV)
    return allowed_RV


class Chosen(NamedTuple):
    """For each new hypothesis: its parent and its token. An unused place has log-probability -inf."""

    log_prob_BK: Tensor
    parent_BK: Tensor
    token_BK: Tensor
    margin_B: Tensor


Choose = Callable[[Beams, Tensor, Tensor], Chosen]
"""Takes hypotheses, all log-probabilities, and the same with -inf for tokens that are not allowed."""


class SearchSettings(NamedTuple):
    """The arguments of a turn besides hypotheses and state."""

    decode: DecodeConfig
    rules: Rules
    eos_id: int
    choose: Choose

    def is_plain(self, beams: Beams) -> bool:
        """Whether the best continuations can be chosen from the peaks of few groups of tokens."""
        return self.choose is best and not (self.decode.no_repeat_ngram or beams.forced_BT.shape[1])


def best(beams: Beams, log_prob_BKV: Tensor, allowed_BKV: Tensor) -> Chosen:
    """The most probable continuations of each sentence: one for each open place."""
    n_kept, n_vocabulary = log_prob_BKV.shape[1:]
    candidate_BC = (allowed_BKV + beams.log_prob_BK[..., None]).flatten(1)
    n_candidates = min(n_kept + 1, candidate_BC.shape[1])  # one more than stays, for the margin
    n_open_B1 = (n_kept - beams.n_ended_B)[:, None]
    value_BC, place_BC = stable_topk(candidate_BC, n_candidates, n_open_B1)
    if n_candidates <= n_kept:
        fill = n_kept + 1 - n_candidates
        value_BC = F.pad(value_BC, (0, fill), value=-torch.inf)
        place_BC = F.pad(place_BC, (0, fill))
    return _keep_open(value_BC, place_BC // n_vocabulary, place_BC % n_vocabulary, n_open_B1)


def _keep_open(value_BC: Tensor, parent_BC: Tensor, token_BC: Tensor, n_open_B1: Tensor) -> Chosen:
    """Keeps the best candidates, one for each open place. The input has one candidate more than there are places."""
    last_in_B, first_out_B = value_BC.gather(1, (n_open_B1 - 1).clamp(min=0))[:, 0], value_BC.gather(1, n_open_B1)[:, 0]
    rank_C = torch.arange(value_BC.shape[1], device=value_BC.device)
    return Chosen(
        log_prob_BK=value_BC.masked_fill(rank_C >= n_open_B1, -torch.inf)[:, :-1],
        parent_BK=parent_BC[:, :-1],
        token_BK=token_BC[:, :-1],
        margin_B=torch.where(first_out_B > -torch.inf, last_in_B - first_out_B, torch.inf),
    )


def best_from_peaks(beams: Beams, peaks: Peaks, settings: SearchSettings, conditions: Conditions) -> Chosen | None:
    """The result of `best`, bit for bit, from few groups of tokens. None if these groups are not enough."""
    n_open_B1, min_length = (beams.log_prob_BK.shape[1] - beams.n_ended_B)[:, None], settings.decode.min_length
    may_end_B = beams.length_B >= min_length if min_length > 0 else None
    candidates = peaks.best(
        beams.log_prob_BK, beams.state_BK, settings.rules.penalty_AV, n_open_B1, may_end_B, settings.eos_id, conditions
    )
    return None if candidates is None else _keep_open(*candidates, n_open_B1)


def sampler(settings: DecodeConfig) -> Choose:
    """Continues each hypothesis by a random token. The draw depends only on seed, sentence, place and step."""

    def draw(beams: Beams, log_prob_BKV: Tensor, allowed_BKV: Tensor) -> Chosen:
        highest_BK1 = allowed_BKV.max(-1, keepdim=True).values
        is_stuck_BK1 = highest_BK1 == -torch.inf  # no token is allowed
        scaled_BKV = narrow((allowed_BKV - highest_BK1) / settings.temperature, settings.top_k, settings.top_p)
        sorted_BKV, token_BKV = scaled_BKV.sort(descending=True, stable=True)
        mass_BKV = sorted_BKV.softmax(-1).cumsum(-1)
        K = torch.arange(mass_BKV.shape[1], device=mass_BKV.device)
        point_BK = uniform(settings.seed, beams.number_B[:, None], K, beams.length_B[:, None]) * mass_BKV[..., -1]
        place_BK1 = torch.searchsorted(mass_BKV.contiguous(), point_BK[..., None], right=True)
        place_BK1 = place_BK1.clamp(max=mass_BKV.shape[-1] - 1)
        token_BK1 = token_BKV.gather(2, place_BK1)
        log_prob_BK = (
            beams.log_prob_BK + log_prob_BKV.gather(2, token_BK1).masked_fill(is_stuck_BK1, -torch.inf)[..., 0]
        )
        no_margin_B = torch.full_like(beams.margin_B, torch.inf)
        return Chosen(log_prob_BK, K.expand_as(log_prob_BK), token_BK1[..., 0], no_margin_B)

    return draw


def narrow(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets to -inf all but the `top_k` most probable tokens, and of these all but the fewest whose probabilities add up
    to `top_p`."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        sorted_logits, place = logits.sort(descending=True, stable=True)
        probability = sorted_logits.softmax(-1)
        is_dropped = probability.cumsum(-1) - probability >= top_p  # the tokens before it already reach top_p
        logits = logits.masked_fill(torch.zeros_like(is_dropped).scatter(-1, place, is_dropped), -torch.inf)
    return logits


def uniform(seed: int, number: Tensor, place: Tensor, step: Tensor) -> Tensor:
    """A number from 0 to 1, exclusive: a hash of the arguments (SplitMix64), so no draw depends on earlier draws."""
    x = torch.full_like(number, seed)
    for part in (number, place, step):
        x = x * 0x2545F4914F6CDD1D + part + 0x1E3779B97F4A7C15
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & ((1 << 24) - 1)).to(torch.float32) / (1 << 24)


def repeats(token_RT: Tensor, length_R: Tensor, n: int, n_vocabulary: int) -> Tensor:
    """The tokens that would complete an n-gram that the row already contains."""
    forbidden_RV = torch.zeros(len(token_RT), n_vocabulary + 1, dtype=torch.bool, device=token_RT.device)
    if token_RT.shape[1] < n:
        return forbidden_RV[:, :-1]
    window_RWn = token_RT.unfold(1, n, 1)
    place_Rm = length_R[:, None] - n + 1 + torch.arange(n - 1, device=token_RT.device)
    last_Rm = token_RT.gather(1, place_Rm.clamp(0, token_RT.shape[1] - 1))  # a finished row may be past the last
    is_same_RW = (window_RWn[..., :-1] == last_Rm[:, None]).all(-1)
    end_W = torch.arange(n - 1, token_RT.shape[1], device=token_RT.device)
    is_same_RW &= (end_W < length_R[:, None]) & (length_R[:, None] >= n - 1)
    # Windows that differ write to one column past the vocabulary, which is cut off.
    forbidden_RV.scatter_(1, torch.where(is_same_RW, window_RWn[..., -1], n_vocabulary), True)
    return forbidden_RV[:, :-1]
