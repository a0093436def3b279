"""Search over a model that is known only as start and step.

Many sentences are searched side by side. Each has K hypotheses, all in the same few tensors; one that has ended leaves,
and the next enters in its place, so that rows stay full. What comes out does not depend on who is beside whom.

Among hypotheses of equal score the one whose parent comes first, then the one of the lower token id, is preferred. How
close the closest choice was, `Hypothesis.margin` says: rounding, and with it the batch, can turn the closest ones.
"""

# Axes: B sentences, K hypotheses of each, R = B K rows, V vocabulary, T tokens, S source positions.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor

from transduce.config import DecodeConfig, ModelConfig
from transduce.search.candidates import How, Rules, best, best_of_few, free, restrict, sampler
from transduce.search.hypotheses import Beams, Hypothesis, Sentence, harvest, length_penalty
from transduce.search.peaks import Doubts, Peaks


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


Withdrawn = Callable[[Sequence[Sentence]], Iterable[int]]
"""Asked once a turn: the places, among those that run or are over, of those that nobody wants any more."""


# What a stepper, or its state, may have beside these. Each way of its own has its slow twin below.


@runtime_checkable
class OwnTurn(Protocol[S]):
    def turn(self, beams: Beams, state: S, how: How) -> tuple[Beams, S, list[bool]]: ...


@runtime_checkable
class OwnEntrance(Protocol[S]):
    def enter(
        self, beams: Beams, state: S, places: Sequence[int], new: Sequence[Sentence], limits: Sequence[int]
    ) -> tuple[Beams, S] | None:
        """New sentences in the places of others; None where these cannot enter so."""


@runtime_checkable
class InPlace(Protocol):
    def put(self, places: Tensor, other: Self) -> Self:
        """The sentences at these places give way to the other's, in order."""


@runtime_checkable
class Bounded(Protocol):
    most_rows: int | None
    """Hypotheses of all sentences: more at a time take it longer for each."""


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
    positions, padding counted, or where the stepper has no use for as many. `longest`: no translation has more tokens,
    however long its source. What is `withdrawn` leaves without a word.
    """
    device = torch.device(device)
    rules = (rules or free(config)).to(device)
    how = How(settings, rules, config.eos_id, best if settings.method == "beam" else sampler(settings))
    take_turn = stepper.turn if isinstance(stepper, OwnTurn) else functools.partial(turn, stepper)
    n_kept = settings.n_hypotheses
    take_in = functools.partial(_take_in, stepper, config, settings, longest, device)
    waiting = _Waiting(sentences, side_by_side(stepper, batch_size, n_kept), batch_tokens)
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


def side_by_side(stepper: Stepper[S], batch_size: int, n_kept: int) -> int:
    """Sentences at a time."""
    most_rows = stepper.most_rows if isinstance(stepper, Bounded) else None
    return batch_size if most_rows is None else max(1, min(batch_size, most_rows // n_kept))


def turn(stepper: Stepper[S], beams: Beams, state: S, how: How) -> tuple[Beams, S, list[bool]]:
    """One token on: the hypotheses, what the stepper remembers of them, and which sentences are over."""
    scores, state = stepper.step(beams.last_BK.flatten(), state)
    beams, parent_BK = advance(beams, scores if isinstance(scores, Peaks) else Peaks.of(scores), how)
    is_over = beams.is_over_B(how.settings).tolist()
    if parent_BK.shape[1] > 1:
        state = state.select(rows_of(parent_BK))
    return beams, state, is_over


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
        beams,
        length_B=length_B,
        margin_B=torch.minimum(beams.margin_B, chosen.margin_B),
        token_BKT=token_BKT,
        last_BK=chosen.token_BK,
        log_prob_BK=chosen.log_prob_BK,
        state_BK=state_BK,
    )
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


def rows_of(parent_BK: Tensor) -> Tensor:
    """Where each hypothesis's parent stands among all rows."""
    n, n_kept = parent_BK.shape
    return (torch.arange(0, n * n_kept, n_kept, device=parent_BK.device)[:, None] + parent_BK).flatten()


def rows_of_sentences(sentences_B: Tensor, n_kept: int) -> Tensor:
    """All rows of some sentences."""
    return (sentences_B[:, None] * n_kept + torch.arange(n_kept, device=sentences_B.device)).flatten()


def limit_of(sentence: Sentence, settings: DecodeConfig, longest: int | None) -> int:
    """Tokens, the end mark counted. A prefix comes on top: it was asked for."""
    limit = len(sentence.source) + len(sentence.prefix) + settings.max_extra_tokens
    return limit if longest is None else min(limit, longest)


def _take_in(
    stepper: Stepper[S],
    config: ModelConfig,
    settings: DecodeConfig,
    longest: int | None,
    device: torch.device,
    running: list[Sentence],
    beams: Beams | None,
    state: S | None,
    gone: list[int],
    new: list[Sentence],
) -> tuple[list[Sentence], Beams, S, list[int]]:
    """Beside those that run. By the stepper's own way where it has one, and all take the places of others."""
    limits, n_kept, n = [limit_of(sentence, settings, longest) for sentence in new], settings.n_hypotheses, len(new)
    if beams is not None and isinstance(stepper, OwnEntrance) and settings.method == "beam" and n <= len(gone):
        entered = stepper.enter(beams, state, gone[:n], new, limits)
        if entered is not None:
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
    running: list[Sentence],
    beams: Beams,
    state: S,
    gone: list[int],
    new: list[Sentence],
    new_beams: Beams,
    fresh: S,
    n_kept: int,
) -> tuple[list[Sentence], Beams, S, list[int]]:
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
    if isinstance(state, InPlace):
        return state.put(places, other)
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
