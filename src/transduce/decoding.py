"""Search over a model that is known only as start and step.

Many sentences are searched side by side. Each has K hypotheses, all in the same few tensors; one that has ended leaves,
and the next enters in its place, so that rows stay full. What comes out does not depend on who is beside whom.

Among hypotheses of equal score the one whose parent comes first, then the one of the lower token id, is preferred. How
close the closest choice was, `Hypothesis.margin` says: rounding, and with it the batch, can turn the closest ones.
"""

# Axes: B sentences, K hypotheses of each, R = B K rows, V vocabulary, T tokens, S source positions, A states of an
# automaton, C candidates.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import DecodeConfig, ModelConfig
from transduce.peaks import Doubts, Peaks, first_of_equals

NONE = -1
"""Where there is no token."""


class State(Protocol):
    """What a stepper remembers. Rows stand sentence by sentence, equally many for each."""

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Self: ...

    def join(self, other: Self) -> Self: ...


S = TypeVar("S", bound=State)


class Stepper(Protocol[S]):
    """A model, or anything that answers like one. A state that is passed in is consumed."""

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> S: ...

    def step(self, last_R: Tensor, state: S) -> tuple[Tensor | Peaks, S]:
        """The logits of what comes after `last_R`."""


class Queue(Protocol):
    """Where sentences come from, when not all are known yet."""

    def get(self, wait: bool) -> Sentence | None:
        """The next; None where there is none now, and when it was waited for: where there will be none."""


Withdrawn = Callable[[Sequence["Sentence"]], Iterable[int]]
"""Asked once a turn: the places, among those that run or are over, of those that nobody wants any more."""


class Sentence(NamedTuple):
    """What is to be translated."""

    number: int
    """Among all: with the seed, it settles what is drawn in sampling."""
    source: Sequence[int]
    """With its end mark."""
    prefix: Sequence[int] = ()
    """The translation must begin so."""


@dataclass(frozen=True)
class Hypothesis:
    ids: list[int]
    """Without the end mark."""
    log_prob: float
    """Of all tokens, and of the end mark where there is one, as the model gives it."""
    score: float
    """`log_prob` over the length penalty, by which hypotheses are ranked."""
    has_ended: bool
    """By itself, and not at the limit."""
    margin: float
    """How far, in log-probability, the closest choice on the way was from being another."""


class Rules(NamedTuple):
    """What may be said: a finite automaton over tokens. State 0 is where a hypothesis starts and where it may end."""

    penalty_AV: Tensor
    """0 where the token may follow, -inf where not."""
    next_AV: Tensor
    """The state after it."""

    def to(self, device: torch.device | str) -> Rules:
        return Rules(self.penalty_AV.to(device), self.next_AV.to(device))


def free(config: ModelConfig) -> Rules:
    """Everything may be said but padding and the start mark."""
    penalty_AV = torch.zeros(1, config.target_vocab_size)
    penalty_AV[0, [i for i in (config.pad_id, config.bos_id) if i != config.eos_id]] = -torch.inf
    return Rules(penalty_AV, torch.zeros(1, config.target_vocab_size, dtype=torch.long))


# The parts of a step, each of which knows nothing of the others


def length_penalty(length: Tensor, settings: DecodeConfig) -> Tensor:
    """Divides a log-probability. The end mark counts."""
    length = length.to(torch.float32)
    if settings.length_penalty == "gnmt":  # Wu et al. 2016, equation 14
        return ((5 + length) / 6) ** settings.length_alpha
    return length**settings.length_alpha


class Chosen(NamedTuple):
    """How each hypothesis goes on: which one before it, by which token. Those that do not have -inf."""

    log_prob_BK: Tensor
    parent_BK: Tensor
    token_BK: Tensor
    margin_B: Tensor


Choose = Callable[["Beams", Tensor, Tensor], Chosen]
"""From hypotheses, log-probabilities and which of them are allowed."""


class How(NamedTuple):
    """A search goes on."""

    settings: DecodeConfig
    rules: Rules
    eos_id: int
    choose: Choose

    def is_plain(self, beams: Beams) -> bool:
        """Whether few groups of tokens can be enough to choose from."""
        return self.choose is best and not (self.settings.no_repeat_ngram or beams.forced_BT.shape[1])


def best(beams: Beams, log_prob_BKV: Tensor, allowed_BKV: Tensor) -> Chosen:
    """The most probable continuations of a sentence, as many as it has places open."""
    n_kept, n_vocabulary = log_prob_BKV.shape[1:]
    candidate_BC = (allowed_BKV + beams.log_prob_BK[..., None]).flatten(1)
    n_candidates = min(n_kept + 1, candidate_BC.shape[1])  # one more than can stay, to see how close it was
    n_open_B1 = (n_kept - beams.n_ended_B)[:, None]
    value_BC, place_BC = first_of_equals(candidate_BC, n_candidates, n_open_B1)
    if n_candidates <= n_kept:
        fill = n_kept + 1 - n_candidates
        value_BC = F.pad(value_BC, (0, fill), value=-torch.inf)
        place_BC = F.pad(place_BC, (0, fill))
    return _open(value_BC, place_BC // n_vocabulary, place_BC % n_vocabulary, n_open_B1)


def _open(value_BC: Tensor, parent_BC: Tensor, token_BC: Tensor, n_open_B1: Tensor) -> Chosen:
    """Of the best, in their order, as many as there are places open. There is one more than can stay."""
    last_in_B, first_out_B = value_BC.gather(1, (n_open_B1 - 1).clamp(min=0))[:, 0], value_BC.gather(1, n_open_B1)[:, 0]
    rank_C = torch.arange(value_BC.shape[1], device=value_BC.device)
    return Chosen(
        log_prob_BK=value_BC.masked_fill(rank_C >= n_open_B1, -torch.inf)[:, :-1],
        parent_BK=parent_BC[:, :-1],
        token_BK=token_BC[:, :-1],
        margin_B=torch.where(first_out_B > -torch.inf, last_in_B - first_out_B, torch.inf),
    )


def best_of_few(beams: Beams, peaks: Peaks, how: How, doubts: Doubts) -> Chosen | None:
    """What `best` finds, to the bit, from few groups of tokens; None where they are not enough."""
    n_open_B1, least = (beams.log_prob_BK.shape[1] - beams.n_ended_B)[:, None], how.settings.min_length
    may_end_B = beams.length_B >= least if least > 0 else None
    found = peaks.best(
        beams.log_prob_BK, beams.state_BK, how.rules.penalty_AV, n_open_B1, may_end_B, how.eos_id, doubts
    )
    return None if found is None else _open(*found, n_open_B1)


def sampler(settings: DecodeConfig) -> Choose:
    """Each hypothesis goes on by a token that is drawn. The draw follows from seed, sentence, place and step alone."""

    def draw(beams: Beams, log_prob_BKV: Tensor, allowed_BKV: Tensor) -> Chosen:
        most_BK1 = allowed_BKV.max(-1, keepdim=True).values
        is_stuck_BK1 = most_BK1 == -torch.inf  # nothing may follow
        scaled_BKV = narrow((allowed_BKV - most_BK1) / settings.temperature, settings.top_k, settings.top_p)
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
        nothing_B = torch.full_like(beams.margin_B, torch.inf)
        return Chosen(log_prob_BK, K.expand_as(log_prob_BK), token_BK1[..., 0], nothing_B)

    return draw


def narrow(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf for all but the `top_k` most probable, and the fewest of them that hold `top_p` of the probability."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1:
        sorted_logits, place = logits.sort(descending=True, stable=True)
        probability = sorted_logits.softmax(-1)
        is_out = probability.cumsum(-1) - probability >= top_p  # what stands before it is enough without it
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter(-1, place, is_out), -torch.inf)
    return logits


def uniform(seed: int, number: Tensor, place: Tensor, step: Tensor) -> Tensor:
    """From 0 up to 1: a hash of its arguments (SplitMix64's), so that a draw does not depend on the draws before."""
    x = torch.full_like(number, seed)
    for part in (number, place, step):
        x = x * 0x2545F4914F6CDD1D + part + 0x1E3779B97F4A7C15
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 40) & ((1 << 24) - 1)).to(torch.float32) / (1 << 24)


def repeats(token_RT: Tensor, length_R: Tensor, n: int, n_vocabulary: int) -> Tensor:
    """Which tokens would end an n-gram that the row already has."""
    banned_RV = torch.zeros(len(token_RT), n_vocabulary + 1, dtype=torch.bool, device=token_RT.device)
    if token_RT.shape[1] < n:
        return banned_RV[:, :-1]
    window_RWn = token_RT.unfold(1, n, 1)
    place_Rm = length_R[:, None] - n + 1 + torch.arange(n - 1, device=token_RT.device)
    last_Rm = token_RT.gather(1, place_Rm.clamp(0, token_RT.shape[1] - 1))  # who is over may be past the last
    is_same_RW = (window_RWn[..., :-1] == last_Rm[:, None]).all(-1)
    end_W = torch.arange(n - 1, token_RT.shape[1], device=token_RT.device)
    is_same_RW &= (end_W < length_R[:, None]) & (length_R[:, None] >= n - 1)
    # What is not the same goes to one place past the vocabulary, which is cut off.
    banned_RV.scatter_(1, torch.where(is_same_RW, window_RWn[..., -1], n_vocabulary), True)
    return banned_RV[:, :-1]


# The hypotheses of all sentences that are being searched


@dataclass(frozen=True)
class Beams:
    """Hypotheses that go on, and those that have ended. A hypothesis that ends closes its place among the first."""

    number_B: Tensor
    length_B: Tensor
    """Tokens so far: all hypotheses of a sentence that go on are equally long."""
    limit_B: Tensor
    forced_BT: Tensor
    """What a translation must begin with."""
    margin_B: Tensor
    n_ended_B: Tensor
    token_BKT: Tensor
    last_BK: Tensor
    """The tokens to go on from; those that have ended go on from anything, for nothing."""
    log_prob_BK: Tensor
    """-inf where none goes on."""
    state_BK: Tensor
    """In the automaton of the rules."""
    ended_token_BKT: Tensor
    ended_log_prob_BK: Tensor
    ended_score_BK: Tensor
    ended_length_BK: Tensor

    @classmethod
    def start(
        cls, sentences: Sequence[Sentence], settings: DecodeConfig, limits: Sequence[int], bos_id: int,
        device: torch.device,
    ) -> Beams:  # fmt: skip
        n, n_kept, longest = len(sentences), settings.n_hypotheses, max(limits)
        n_forced = max(len(sentence.prefix) for sentence in sentences)
        forced = [[*sentence.prefix, *[NONE] * (n_forced - len(sentence.prefix))] for sentence in sentences]
        log_prob_BK = torch.zeros(n, n_kept, device=device)
        if settings.method == "beam":
            log_prob_BK[:, 1:] = -torch.inf  # all rows are alike before the first token

        def whole(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, device=device)

        def none() -> Tensor:
            return torch.full((n, n_kept), -torch.inf, device=device)

        return cls(
            number_B=torch.tensor([sentence.number for sentence in sentences], device=device),
            length_B=whole(n),
            limit_B=torch.tensor(limits, device=device),
            forced_BT=torch.tensor(forced, dtype=torch.long, device=device).view(n, n_forced),
            margin_B=torch.full((n,), torch.inf, device=device),
            n_ended_B=whole(n),
            token_BKT=whole(n, n_kept, longest, value=NONE),
            last_BK=whole(n, n_kept, value=bos_id),
            log_prob_BK=log_prob_BK,
            state_BK=whole(n, n_kept),
            ended_token_BKT=whole(n, n_kept, longest, value=NONE),
            ended_log_prob_BK=none(),
            ended_score_BK=none(),
            ended_length_BK=whole(n, n_kept),
        )

    def select(self, sentences_B: Tensor) -> Beams:
        """No wider than those that stay need."""
        kept = {f.name: getattr(self, f.name)[sentences_B] for f in fields(self)}
        n = int(kept["limit_B"].max()) if len(sentences_B) else 0
        for name in ("token_BKT", "ended_token_BKT"):
            kept[name] = kept[name][..., :n]
        return Beams(**kept)

    def join(self, other: Beams) -> Beams:
        wide, other = self._as_wide_as(other), other._as_wide_as(self)
        return Beams(**{f.name: torch.cat([getattr(wide, f.name), getattr(other, f.name)]) for f in fields(self)})

    def put(self, places: Tensor, other: Beams) -> Beams:
        """The sentences at these places give way to the other's, in order. Nothing else is copied."""
        wide, other = self._as_wide_as(other), other._as_wide_as(self)
        for f in fields(self):
            own = getattr(wide, f.name)
            own.index_copy_(0, places, getattr(other, f.name).to(own.dtype))  # steppers may be of float64
        return wide

    def _as_wide_as(self, other: Beams) -> Beams:
        """With room for as many tokens."""
        widths = {name: getattr(other, name).shape[-1] for name in ("forced_BT", "token_BKT", "ended_token_BKT")}
        more = {name: n - getattr(self, name).shape[-1] for name, n in widths.items()}
        wider = {name: F.pad(getattr(self, name), (0, n), value=NONE) for name, n in more.items() if n > 0}
        return replace(self, **wider) if wider else self

    def without_what_was_said(self) -> Beams:
        """Nothing is forced any more once all have said it."""
        if (n := self.forced_BT.shape[1]) == 0:
            return self
        T = torch.arange(n, device=self.forced_BT.device)
        is_left = ((self.forced_BT != NONE) & (self.length_B[:, None] <= T)).any()
        return self if bool(is_left) else replace(self, forced_BT=self.forced_BT[:, :0])

    def place_BK1(self, length_B: Tensor) -> Tensor:
        """Among the tokens. Those that are over may be past their end: what they say there does not count."""
        n_kept, n = self.token_BKT.shape[1:]
        return length_B.clamp(0, max(n - 1, 0))[:, None, None].expand(-1, n_kept, 1)

    def is_over_B(self, settings: DecodeConfig) -> Tensor:
        """Whether nothing that a search could still find would change what it returns."""
        best_log_prob_B = self.log_prob_BK.max(1).values
        is_over_B = (best_log_prob_B == -torch.inf) | (self.length_B >= self.limit_B)
        if settings.method == "beam" and settings.stop_early:
            # A log-probability only falls, and nothing is divided by more than at the limit.
            bound_B = best_log_prob_B / length_penalty(self.limit_B, settings)
            worst_B = self.ended_score_BK.topk(settings.n_best).values[:, -1]
            is_over_B = is_over_B | (worst_B >= bound_B)
        return is_over_B


def advance(beams: Beams, peaks: Peaks, how: How, doubts: Doubts | None = None) -> tuple[Beams, Tensor]:
    """The hypotheses one token on, and of which before it each is a continuation, parent_BK."""
    n_kept, (settings, rules, eos_id, choose), doubts = beams.log_prob_BK.shape[1], how, doubts or Doubts()
    chosen = best_of_few(beams, peaks, how, doubts) if how.is_plain(beams) else None
    if chosen is None:
        log_prob_RV = peaks.logits().float() - peaks.log_sum_R1.float()
        allowed_RV = restrict(beams, log_prob_RV, settings, rules, eos_id)
        shape = (-1, n_kept, log_prob_RV.shape[1])
        chosen = choose(beams, log_prob_RV.view(shape), allowed_RV.view(shape))

    length_B = beams.length_B + 1
    token_BKT = beams.token_BKT.gather(1, chosen.parent_BK[..., None].expand_as(beams.token_BKT))
    token_BKT = token_BKT.scatter(2, beams.place_BK1(beams.length_B), chosen.token_BK[..., None])
    state_BK = rules.next_AV[beams.state_BK.gather(1, chosen.parent_BK), chosen.token_BK]

    after = replace(
        beams, length_B=length_B, margin_B=torch.minimum(beams.margin_B, chosen.margin_B), token_BKT=token_BKT,
        last_BK=chosen.token_BK, log_prob_BK=chosen.log_prob_BK, state_BK=state_BK,
    )  # fmt: skip
    has_ended_BK = (chosen.token_BK == eos_id) & (chosen.log_prob_BK > -torch.inf)
    if doubts.noted is None and not bool(has_ended_BK.any()):
        return after, chosen.parent_BK
    score_BK = chosen.log_prob_BK / length_penalty(length_B, settings)[:, None]
    # Each that ends takes the next free slot; the others are written to a slot past the last, which is cut off.
    slot_BK = beams.n_ended_B[:, None] + has_ended_BK.cumsum(1) - 1
    slot_BK = torch.where(has_ended_BK, slot_BK, n_kept)

    def kept(old_BK: Tensor, new_BK: Tensor) -> Tensor:
        spare = torch.cat([old_BK, old_BK[:, :1]], dim=1)
        slots = slot_BK if old_BK.ndim == 2 else slot_BK[..., None].expand_as(new_BK)
        return spare.scatter(1, slots, new_BK)[:, :-1]

    after = replace(
        after,
        n_ended_B=beams.n_ended_B + has_ended_BK.sum(1),
        log_prob_BK=chosen.log_prob_BK.masked_fill(has_ended_BK, -torch.inf),
        ended_token_BKT=kept(beams.ended_token_BKT, token_BKT),
        ended_log_prob_BK=kept(beams.ended_log_prob_BK, chosen.log_prob_BK),
        ended_score_BK=kept(beams.ended_score_BK, score_BK),
        ended_length_BK=kept(beams.ended_length_BK, length_B[:, None].expand_as(slot_BK)),
    )
    return after, chosen.parent_BK


def restrict(beams: Beams, log_prob_RV: Tensor, settings: DecodeConfig, rules: Rules, eos_id: int) -> Tensor:
    """-inf for what may not follow."""
    n_kept = beams.log_prob_BK.shape[1]
    state_R = beams.state_BK.flatten()
    # Most of the time all are in state 0, and one row serves all.
    allowed_RV = log_prob_RV + (rules.penalty_AV[state_R] if bool(state_R.any()) else rules.penalty_AV[0])
    length_R = beams.length_B.repeat_interleave(n_kept)
    if settings.min_length > 0:
        allowed_RV[:, eos_id] = allowed_RV[:, eos_id].masked_fill(length_R < settings.min_length, -torch.inf)
    if settings.no_repeat_ngram > 0:
        token_RT = beams.token_BKT.flatten(0, 1)
        banned_RV = repeats(token_RT, length_R, settings.no_repeat_ngram, log_prob_RV.shape[1])
        allowed_RV = allowed_RV.masked_fill(banned_RV, -torch.inf)
    if (n_forced := beams.forced_BT.shape[1]) > 0:
        place_B = beams.length_B.clamp(max=n_forced - 1)
        forced_B = torch.where(beams.length_B < n_forced, beams.forced_BT.gather(1, place_B[:, None])[:, 0], NONE)
        forced_R1 = forced_B.repeat_interleave(n_kept)[:, None]
        is_forced_RV = forced_R1 == torch.arange(log_prob_RV.shape[1], device=log_prob_RV.device)
        # A prefix that the rules forbid is still a prefix that was asked for.
        only_it_RV = log_prob_RV.masked_fill(~is_forced_RV, -torch.inf)
        allowed_RV = torch.where(forced_R1 == NONE, allowed_RV, only_it_RV)
    return allowed_RV


def harvest(beams: Beams, sentences: Sequence[int], settings: DecodeConfig) -> list[list[Hypothesis]]:
    """For each of these sentences, the best first. Those cut off at the limit come after all that have ended.

    Where the rules left nothing to say, there is one hypothesis of nothing, which has not ended.
    """
    found = []
    columns = here(
        [
            beams.margin_B, beams.n_ended_B, beams.ended_token_BKT, beams.ended_log_prob_BK, beams.ended_score_BK,
            beams.ended_length_BK, beams.token_BKT, beams.log_prob_BK, beams.length_B,
        ], sentences,
    )  # fmt: skip
    for margins, n_ended, tokens, log_probs, scores, lengths, live, live_log_probs, length in zip(
        *columns, strict=True
    ):
        margin, order = float(margins), sorted(range(int(n_ended)), key=lambda i: -scores[i])
        if len(order) > 1:  # by which of them wins, too, it may have been close
            margin = min(margin, float(scores[order[0]]) - float(scores[order[1]]))
        ended = [
            Hypothesis(tokens[i, : lengths[i] - 1].tolist(), float(log_probs[i]), float(scores[i]), True, margin)
            for i in order[: settings.n_best]
        ]
        cut = []
        if len(ended) < settings.n_best:
            penalty = length_penalty(torch.tensor([max(1, int(length))]), settings)
            live_scores = (torch.from_numpy(live_log_probs) / penalty).tolist()
            cut = [
                Hypothesis(live[i, :length].tolist(), float(live_log_probs[i]), live_scores[i], False, float(margins))
                for i in sorted(range(len(live)), key=lambda i: -live_scores[i]) if live_log_probs[i] > -torch.inf
            ]  # fmt: skip
        nothing = Hypothesis([], -math.inf, -math.inf, False, margin)
        found.append(([*ended, *cut] or [nothing])[: settings.n_best])
    return found


def here(tensors: Sequence[Tensor], sentences: Sequence[int]) -> list[list[Any]]:
    """Some sentences' part of each, as NumPy has it, which makes small things sooner. From a GPU by one copy for all of
    a dtype: it is waited for at each."""
    if tensors[0].device.type == "cpu":
        return [[array[i] for i in sentences] for array in (tensor.numpy() for tensor in tensors)]
    sentences_B = torch.tensor(sentences, device=tensors[0].device)
    tensors = [tensor[sentences_B] for tensor in tensors]
    found = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        together = torch.cat([tensors[i].flatten() for i in places]).cpu()
        for i, part in zip(places, together.split([tensors[i].numel() for i in places]), strict=True):
            found[i] = part.view(tensors[i].shape)
    return [list(tensor.numpy()) for tensor in found]


def limit_of(sentence: Sentence, settings: DecodeConfig, longest: int | None) -> int:
    """Tokens, the end mark counted. A prefix comes on top: it was asked for."""
    limit = len(sentence.source) + len(sentence.prefix) + settings.max_extra_tokens
    return limit if longest is None else min(limit, longest)


# The loop


@torch.no_grad()
def search(
    stepper: Stepper[S],
    config: ModelConfig,
    sentences: Iterable[Sentence] | Queue,
    settings: DecodeConfig,
    rules: Rules | None = None,
    *,
    batch_size: int = 64,
    batch_tokens: int = 4096,
    longest: int | None = None,
    device: torch.device | str = "cpu",
    withdrawn: Withdrawn | None = None,
) -> Iterator[tuple[Sentence, list[Hypothesis]]]:
    """Each sentence with its hypotheses, the best first, as they are found: in no order.

    At most `batch_size` are searched at a time, and fewer where they would hold more than `batch_tokens` source
    positions, padding counted. `longest`: no translation has more tokens, however long its source. What is `withdrawn`
    leaves without a word.
    """
    device = torch.device(device)
    rules = (rules or free(config)).to(device)
    how = How(settings, rules, config.eos_id, best if settings.method == "beam" else sampler(settings))
    take_turn: Callable[[Beams, S, How], tuple[Beams, S, list[bool]]]
    take_turn = getattr(stepper, "turn", None) or functools.partial(turn, stepper)
    n_kept = settings.n_hypotheses
    take_in = functools.partial(_take_in, stepper, config, settings, longest, device)
    waiting = _Waiting(sentences, batch_size, batch_tokens)
    running: list[Sentence] = []
    beams: Beams | None = None
    state: S | None = None
    gone: list[int] = []
    """Places of those that are over, until others take them."""
    while True:
        if new := waiting.take(running, gone):
            running, beams, state, gone = take_in(running, beams, state, gone, new)
        if beams is None or state is None or not running:
            return
        beams, state, is_over = take_turn(beams, state, how)
        beams = beams.without_what_was_said()
        were_gone = set(gone)
        if over := [i for i, is_it in enumerate(is_over) if is_it and i not in were_gone]:
            found = harvest(beams, over, settings)
            yield from zip([running[i] for i in over], found, strict=True)
            gone = [*gone, *over]  # the first of them is the first to be followed: none grows for long
        if withdrawn is not None:
            gone = [*gone, *sorted(set(withdrawn(running)).difference(gone))]
        # Where positions end, nobody may go on past their own.
        if len(gone) > (len(running) // 2 if longest is None else 0):
            stay = sorted(set(range(len(running))).difference(gone))
            left = torch.tensor(stay, dtype=torch.long, device=device)
            running, gone = [running[i] for i in stay], []
            beams, state = beams.select(left), state.select(rows_of_sentences(left, n_kept), left)


def turn(stepper: Stepper[S], beams: Beams, state: S, how: How) -> tuple[Beams, S, list[bool]]:
    """One token on: the hypotheses, what the stepper remembers of them, and which sentences are over."""
    scores, state = stepper.step(beams.last_BK.flatten(), state)
    beams, parent_BK = advance(beams, scores if isinstance(scores, Peaks) else Peaks.of(scores), how)
    is_over = beams.is_over_B(how.settings).tolist()
    if parent_BK.shape[1] > 1:
        state = state.select(rows_of(parent_BK))
    return beams, state, is_over


def rows_of(parent_BK: Tensor) -> Tensor:
    """Where each hypothesis's parent stands among all rows."""
    n, n_kept = parent_BK.shape
    return (torch.arange(0, n * n_kept, n_kept, device=parent_BK.device)[:, None] + parent_BK).flatten()


def rows_of_sentences(sentences_B: Tensor, n_kept: int) -> Tensor:
    """All rows of some sentences."""
    return (sentences_B[:, None] * n_kept + torch.arange(n_kept, device=sentences_B.device)).flatten()


def _take_in(
    stepper: Stepper[S], config: ModelConfig, settings: DecodeConfig, longest: int | None, device: torch.device,
    running: list[Sentence], beams: Beams | None, state: S | None, gone: list[int], new: list[Sentence],
) -> tuple[list[Sentence], Beams, S, list[int]]:  # fmt: skip
    """Beside those that run. By the stepper's own way where it has one, and all take the places of others."""
    limits, n_kept, n = [limit_of(sentence, settings, longest) for sentence in new], settings.n_hypotheses, len(new)
    enter = getattr(stepper, "enter", None) if settings.method == "beam" and n <= len(gone) else None
    if enter is not None and (entered := enter(beams, state, gone[:n], new, limits)) is not None:
        return _in_places(running, gone[:n], new), *entered, gone[n:]
    fresh = stepper.start(_padded([s.source for s in new], config.pad_id, device))
    if n_kept > 1:
        fresh = fresh.select(torch.arange(n, device=device).repeat_interleave(n_kept))
    fresh_beams = Beams.start(new, settings, limits, config.bos_id, device)
    if beams is None or state is None:
        return new, fresh_beams, fresh, []
    return _enter(running, beams, state, gone, new, fresh_beams, fresh, n_kept)


def _in_places(running: list[Sentence], places: Sequence[int], new: Sequence[Sentence]) -> list[Sentence]:
    running = [*running]
    for place, sentence in zip(places, new, strict=False):
        running[place] = sentence
    return running


def _enter(
    running: list[Sentence], beams: Beams, state: S, gone: list[int],
    new: list[Sentence], new_beams: Beams, fresh: S, n_kept: int,
) -> tuple[list[Sentence], Beams, S, list[int]]:  # fmt: skip
    """New sentences take the places of those that are gone, and the others places behind."""
    device = beams.number_B.device
    n, n_put = len(new), min(len(new), len(gone))
    if n_put:
        places, first = torch.tensor(gone[:n_put], device=device), torch.arange(n_put, device=device)
        rows_R = torch.arange(n_put * n_kept, device=device)
        beams = beams.put(places, new_beams if n_put == n else new_beams.select(first))
        state = put(state, places, fresh if n_put == n else fresh.select(rows_R, first), len(running), n_kept)
        running = _in_places(running, gone[:n_put], new)
    if n_put < n:
        rest = torch.arange(n_put, n, device=device)
        rows_R = torch.arange(n_put * n_kept, n * n_kept, device=device)
        beams = beams.join(new_beams if n_put == 0 else new_beams.select(rest))
        state = state.join(fresh if n_put == 0 else fresh.select(rows_R, rest))
        running = [*running, *new[n_put:]]
    return running, beams, state, gone[n_put:]


def _after_them(n: int, places: Tensor) -> Tensor:
    """The numbers of n sentences, in whose places some stand that come after all of them."""
    sentences_B = torch.arange(n, device=places.device)
    sentences_B[places] = n + torch.arange(len(places), device=places.device)
    return sentences_B


def put(state: S, places: Tensor, other: S, n: int, n_kept: int) -> S:
    """`state`, of n sentences, with those at some places given way to another's. By its own way where it has one."""
    if (own := getattr(state, "put", None)) is not None:
        return own(places, other)  # type: ignore[no-any-return]
    sentences_B = _after_them(n, places)
    return state.join(other).select(rows_of_sentences(sentences_B, n_kept), sentences_B)


class _Waiting:
    """Who enters next. New sentences are encoded together, so they wait until a quarter of the places is free."""

    def __init__(self, sentences: Iterable[Sentence] | Queue, batch_size: int, batch_tokens: int) -> None:
        self.queue = _Listed(sentences) if isinstance(sentences, Iterable) else sentences
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.first: Sentence | None = None
        """That did not fit beside those who were there."""

    def take(self, running: Sequence[Sentence], gone: Sequence[int]) -> list[Sentence]:
        """Beside those that run, but for some who are over."""
        taken: list[Sentence] = []
        n, are_gone = len(running) - len(gone), set(gone)
        longest = max((len(sentence.source) for i, sentence in enumerate(running) if i not in are_gone), default=0)
        n_places = min(self.batch_size, self.batch_tokens // max(longest, 1))
        if n and n_places - n < max(1, n_places // 4):
            return taken
        while n < self.batch_size:
            self.first = self.first or self.queue.get(wait=n == 0)
            if self.first is None:
                break
            longest = max(longest, len(self.first.source))
            if n and (n + 1) * longest > self.batch_tokens:
                break
            taken.append(self.first)
            self.first, n = None, n + 1
        return taken


class _Listed:
    def __init__(self, sentences: Iterable[Sentence]) -> None:
        self.sentences = iter(sentences)

    def get(self, wait: bool) -> Sentence | None:
        return next(self.sentences, None)


def _padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows], device=device)


@torch.no_grad()
def greedy(stepper: Stepper[S], config: ModelConfig, source_BS: Tensor, max_extra_tokens: int) -> list[list[int]]:
    """The most probable next token, again and again, of whatever is most probable. Translations without end marks."""
    limit_B = (source_BS != config.pad_id).sum(1) + max_extra_tokens
    last_B = torch.full_like(limit_B, config.bos_id)
    live_B = limit_B > 0
    state = stepper.start(source_BS)
    steps: list[Tensor] = []
    while bool(live_B.any()):
        scores, state = stepper.step(last_B, state)
        last_B = (scores.logits() if isinstance(scores, Peaks) else scores).argmax(-1)
        steps.append(last_B)  # rows that have ended go on, for nothing, until all have
        live_B = live_B & (last_B != config.eos_id) & (len(steps) < limit_B)
    rows = torch.stack(steps, dim=1).tolist() if steps else [[] for _ in source_BS]
    return [_before_end(row[:limit], config.eos_id) for row, limit in zip(rows, limit_B.tolist(), strict=True)]


def _before_end(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids
