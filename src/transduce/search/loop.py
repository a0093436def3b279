"""Search over a model through three methods: start, step and select.

Many sentences are searched together. Each has K hypotheses, all in the same few tensors. When a sentence is over, the
next one takes its place, so that rows stay full. The result does not depend on which sentences share a batch.

Of hypotheses with equal scores, the one whose parent comes first is preferred, then the one with the lower token id.
`Hypothesis.margin` says how close the closest choice was: rounding errors, which depend on the batch, can change only
very close choices.
"""

# Axes: B sentences, K hypotheses of each, R = B K rows, V vocabulary, T tokens, S source positions.

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transduce.config import DecodeConfig, ModelConfig
from transduce.search.candidates import Rules, SearchSettings, best, best_from_peaks, free, restrict, sampler
from transduce.search.hypotheses import Beams, Hypothesis, Sentence, harvest, length_penalty
from transduce.search.peaks import Conditions, Peaks
from transduce.search.protocols import Cancelled, HasEnter, HasMaxRows, HasPut, HasTurn, Queue, S, Stepper


@torch.no_grad()
def search(
    stepper: Stepper[S],
    config: ModelConfig,
    sentences: Iterable[Sentence] | Queue,
    decode: DecodeConfig,
    rules: Rules | None = None,
    *,
    batch_size: int = 64,
    batch_tokens: int = 4096,
    longest: int | None = None,
    device: torch.device | str = "cpu",
    cancelled: Cancelled | None = None,
) -> Iterator[tuple[Sentence, list[Hypothesis]]]:
    """Yields each sentence with its hypotheses, the best first, as soon as it is done: in no fixed order.

    At most `batch_size` sentences are searched at a time; fewer if they would hold more than `batch_tokens` source
    positions, padding included, or if the stepper is no faster with so many. `longest` limits the tokens of every
    translation. Cancelled sentences leave the search and are not yielded.
    """
    device = torch.device(device)
    rules = (rules or free(config)).to(device)
    settings = SearchSettings(decode, rules, config.eos_id, best if decode.method == "beam" else sampler(decode))
    take_turn = stepper.turn if isinstance(stepper, HasTurn) else functools.partial(turn, stepper)
    n_kept = decode.n_hypotheses
    take_in = functools.partial(_take_in, stepper, config, decode, longest, device)
    waiting = _Waiting(sentences, sentences_at_a_time(stepper, batch_size, n_kept), batch_tokens)
    running: list[Sentence] = []
    beams: Beams | None = None
    state: S | None = None
    free_places: list[int] = []
    """Places of sentences that are over, until new ones take them."""
    while True:
        if new := waiting.take(running, free_places):
            running, beams, state, free_places = take_in(running, beams, state, free_places, new)
        if beams is None or state is None or not running:
            return
        beams, state, is_over = take_turn(beams, state, settings)
        beams = beams.without_used_prefix()
        were_free = set(free_places)
        if finished := [i for i, sentence_is_over in enumerate(is_over) if sentence_is_over and i not in were_free]:
            hypotheses = harvest(beams, finished, decode)
            yield from zip([running[i] for i in finished], hypotheses, strict=True)
            # New sentences take the first places first, so that no finished row grows for long.
            free_places = [*free_places, *finished]
        if cancelled is not None:
            free_places = [*free_places, *sorted(set(cancelled(running)).difference(free_places))]
        # If positions end, a row that is over must not run past them, so finished rows leave at once.
        if len(free_places) > (len(running) // 2 if longest is None else 0):
            kept = sorted(set(range(len(running))).difference(free_places))
            kept_B = torch.tensor(kept, dtype=torch.long, device=device)
            running, free_places = [running[i] for i in kept], []
            beams, state = beams.select(kept_B), state.select(rows_of_sentences(kept_B, n_kept), kept_B)


def sentences_at_a_time(stepper: Stepper[S], batch_size: int, n_kept: int) -> int:
    max_rows = stepper.max_rows if isinstance(stepper, HasMaxRows) else None
    return batch_size if max_rows is None else max(1, min(batch_size, max_rows // n_kept))


def turn(stepper: Stepper[S], beams: Beams, state: S, settings: SearchSettings) -> tuple[Beams, S, list[bool]]:
    """Adds one token to each hypothesis. Returns the hypotheses, the state for them, and which sentences are over."""
    scores, state = stepper.step(beams.last_BK.flatten(), state)
    beams, parent_BK = advance(beams, scores if isinstance(scores, Peaks) else Peaks.of(scores), settings)
    is_over = beams.is_over_B(settings.decode).tolist()
    if parent_BK.shape[1] > 1:
        state = state.select(rows_of(parent_BK))
    return beams, state, is_over


def advance(
    beams: Beams, peaks: Peaks, settings: SearchSettings, conditions: Conditions | None = None
) -> tuple[Beams, Tensor]:
    """Adds one token to each hypothesis. Returns the hypotheses and the parent of each, parent_BK."""
    n_kept, (decode, rules, eos_id, choose) = beams.log_prob_BK.shape[1], settings
    conditions = conditions or Conditions()
    chosen = best_from_peaks(beams, peaks, settings, conditions) if settings.is_plain(beams) else None
    if chosen is None:
        log_prob_RV = peaks.logits().float() - peaks.log_sum_R1.float()
        allowed_RV = restrict(beams, log_prob_RV, decode, rules, eos_id)
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
    if conditions.deferred is None and not bool(has_ended_BK.any()):
        return after, chosen.parent_BK
    score_BK = chosen.log_prob_BK / length_penalty(length_B, decode)[:, None]
    # Each hypothesis that ends takes the next free slot. The others are written to one more slot, which is cut off.
    slot_BK = beams.n_ended_B[:, None] + has_ended_BK.cumsum(1) - 1
    slot_BK = torch.where(has_ended_BK, slot_BK, n_kept)

    def with_ended(old_BK: Tensor, new_BK: Tensor) -> Tensor:
        spare = torch.cat([old_BK, old_BK[:, :1]], dim=1)
        slots = slot_BK if old_BK.ndim == 2 else slot_BK[..., None].expand_as(new_BK)
        return spare.scatter(1, slots, new_BK)[:, :-1]

    after = replace(
        after,
        n_ended_B=beams.n_ended_B + has_ended_BK.sum(1),
        log_prob_BK=chosen.log_prob_BK.masked_fill(has_ended_BK, -torch.inf),
        ended_token_BKT=with_ended(beams.ended_token_BKT, token_BKT),
        ended_log_prob_BK=with_ended(beams.ended_log_prob_BK, chosen.log_prob_BK),
        ended_score_BK=with_ended(beams.ended_score_BK, score_BK),
        ended_length_BK=with_ended(beams.ended_length_BK, length_B[:, None].expand_as(slot_BK)),
    )
    return after, chosen.parent_BK


def rows_of(parent_BK: Tensor) -> Tensor:
    """The row of each hypothesis's parent among all rows."""
    n, n_kept = parent_BK.shape
    return (torch.arange(0, n * n_kept, n_kept, device=parent_BK.device)[:, None] + parent_BK).flatten()


def rows_of_sentences(sentences_B: Tensor, n_kept: int) -> Tensor:
    """All rows of some sentences."""
    return (sentences_B[:, None] * n_kept + torch.arange(n_kept, device=sentences_B.device)).flatten()


def limit_of(sentence: Sentence, decode: DecodeConfig, longest: int | None) -> int:
    """The highest number of tokens, end mark included. A prefix does not count against `max_extra_tokens`."""
    limit = len(sentence.source) + len(sentence.prefix) + decode.max_extra_tokens
    return limit if longest is None else min(limit, longest)


# New sentences


def _take_in(
    stepper: Stepper[S],
    config: ModelConfig,
    decode: DecodeConfig,
    longest: int | None,
    device: torch.device,
    running: list[Sentence],
    beams: Beams | None,
    state: S | None,
    free_places: list[int],
    new: list[Sentence],
) -> tuple[list[Sentence], Beams, S, list[int]]:
    """Adds new sentences, by the stepper's `enter` if it has one and all of them fit into free places."""
    limits, n_kept, n = [limit_of(sentence, decode, longest) for sentence in new], decode.n_hypotheses, len(new)
    if beams is not None and isinstance(stepper, HasEnter) and decode.method == "beam" and n <= len(free_places):
        entered = stepper.enter(beams, state, free_places[:n], new, limits)
        if entered is not None:
            return _in_places(running, free_places[:n], new), *entered, free_places[n:]
    new_state = stepper.start(padded([s.source for s in new], config.pad_id, device))
    if n_kept > 1:
        new_state = new_state.select(torch.arange(n, device=device).repeat_interleave(n_kept))
    new_beams = Beams.start(new, decode, limits, config.bos_id, device)
    if beams is None or state is None:
        return new, new_beams, new_state, []
    return enter(running, beams, state, free_places, new, new_beams, new_state, n_kept)


def enter(
    running: list[Sentence],
    beams: Beams,
    state: S,
    free_places: list[int],
    new: list[Sentence],
    new_beams: Beams,
    new_state: S,
    n_kept: int,
) -> tuple[list[Sentence], Beams, S, list[int]]:
    """New sentences take free places first; the rest are appended."""
    device = beams.number_B.device
    n, n_put = len(new), min(len(new), len(free_places))
    if n_put:
        places, first = torch.tensor(free_places[:n_put], device=device), torch.arange(n_put, device=device)
        rows_R = torch.arange(n_put * n_kept, device=device)
        beams = beams.put(places, new_beams if n_put == n else new_beams.select(first))
        state = put(state, places, new_state if n_put == n else new_state.select(rows_R, first), len(running), n_kept)
        running = _in_places(running, free_places[:n_put], new)
    if n_put < n:
        rest = torch.arange(n_put, n, device=device)
        rows_R = torch.arange(n_put * n_kept, n * n_kept, device=device)
        beams = beams.join(new_beams if n_put == 0 else new_beams.select(rest))
        state = state.join(new_state if n_put == 0 else new_state.select(rows_R, rest))
        running = [*running, *new[n_put:]]
    return running, beams, state, free_places[n_put:]


def _in_places(running: list[Sentence], places: Sequence[int], new: Sequence[Sentence]) -> list[Sentence]:
    running = [*running]
    for place, sentence in zip(places, new, strict=False):
        running[place] = sentence
    return running


def put(state: S, places: Tensor, other: S, n: int, n_kept: int) -> S:
    """Replaces some of the n sentences of `state` by those of `other`; by the state's `put` if it has one."""
    if isinstance(state, HasPut):
        return state.put(places, other)
    sentences_B = torch.arange(n, device=places.device)
    sentences_B[places] = n + torch.arange(len(places), device=places.device)  # `join` appends the other's
    return state.join(other).select(rows_of_sentences(sentences_B, n_kept), sentences_B)


class _Waiting:
    """Chooses the sentences that enter next. New sentences are encoded together, so none enters before a quarter of the
    places is free."""

    def __init__(self, sentences: Iterable[Sentence] | Queue, batch_size: int, batch_tokens: int) -> None:
        self.queue = _Listed(sentences) if isinstance(sentences, Iterable) else sentences
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.first: Sentence | None = None
        """A sentence taken from the queue that was too long for the batch."""

    def take(self, running: Sequence[Sentence], free_places: Sequence[int]) -> list[Sentence]:
        taken: list[Sentence] = []
        n, are_free = len(running) - len(free_places), set(free_places)
        longest = max((len(sentence.source) for i, sentence in enumerate(running) if i not in are_free), default=0)
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


def padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows], device=device)


@torch.no_grad()
def greedy(stepper: Stepper[S], config: ModelConfig, source_BS: Tensor, max_extra_tokens: int) -> list[list[int]]:
    """Takes the most probable token at each step. Returns translations without end marks.

    >>> import torch
    >>> from transduce import Transformer, greedy, tiny
    >>> config = tiny().model
    >>> _ = torch.manual_seed(0)
    >>> ids = greedy(Transformer(config).eval(), config, torch.tensor([[5, 6, config.eos_id]]), max_extra_tokens=2)
    >>> len(ids), len(ids[0]) <= 3 + 2  # one sentence, at most two tokens longer than its source
    (1, True)
    """
    limit_B = (source_BS != config.pad_id).sum(1) + max_extra_tokens
    last_B = torch.full_like(limit_B, config.bos_id)
    is_running_B = limit_B > 0
    state = stepper.start(source_BS)
    steps: list[Tensor] = []
    while bool(is_running_B.any()):
        scores, state = stepper.step(last_B, state)
        last_B = (scores.logits() if isinstance(scores, Peaks) else scores).argmax(-1)
        steps.append(last_B)  # rows that have ended are computed too, and cut below
        is_running_B = is_running_B & (last_B != config.eos_id) & (len(steps) < limit_B)
    rows = torch.stack(steps, dim=1).tolist() if steps else [[] for _ in source_BS]
    return [_before_end(row[:limit], config.eos_id) for row, limit in zip(rows, limit_B.tolist(), strict=True)]


def _before_end(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids
