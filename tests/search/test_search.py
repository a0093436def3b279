"""Search on scripted models, whose answers are worked out by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.primes import prime_config, random_model
from tests.support.search import by_number
from transduce import DecodeConfig, Transformer, greedy
from transduce.engines.cached import CachedStepper
from transduce.search.candidates import Rules, SearchSettings, best, best_of_few, narrow, repeats, restrict, uniform
from transduce.search.hypotheses import Beams, Hypothesis, Sentence
from transduce.search.loop import limit_of, search
from transduce.search.peaks import Doubts, Peaks, first_of_equals

CONFIG = prime_config()
A, B, C, END = 5, 7, 11, CONFIG.eos_id


@dataclass(frozen=True)
class Script:
    """What each row has seen so far."""

    past: list[tuple[int, ...]]

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Script:
        return Script([self.past[i] for i in rows_R.tolist()])

    def join(self, other: Script) -> Script:
        return Script(self.past + other.past)


class ScriptedModel:
    """Next-token probabilities by prefix; an unlisted prefix ends."""

    def __init__(self, table: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.table = table

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Script:
        return Script([()] * len(source_BS))

    def step(self, last_R: Tensor, state: Script) -> tuple[Tensor, Script]:
        state = Script([(*past, int(i)) for past, i in zip(state.past, last_R, strict=True)])
        logits_RV = torch.full((len(state.past), CONFIG.target_vocab_size), -torch.inf)
        for row, past in enumerate(state.past):
            for token, probability in self.table.get(past[1:], {END: 1.0}).items():
                logits_RV[row, token] = torch.tensor(probability).log()
        return logits_RV, state


def source(*lengths: int) -> Tensor:
    ids_BS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, n in zip(ids_BS, lengths, strict=True):
        row[:n] = 9
    return ids_BS


def test_greedy_takes_the_most_probable_token_each_time() -> None:
    model = ScriptedModel({(): {A: 0.6, B: 0.4}, (A,): {END: 0.1, A: 0.5, B: 0.4}, (A, A): {END: 0.3, C: 0.7}})
    assert greedy(model, CONFIG, source(3), 50) == [[A, A, C]]


def test_greedy_stops_at_source_length_plus_extra_for_each_sentence() -> None:
    for_ever = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    assert greedy(for_ever, CONFIG, source(1, 3), 2) == [[A] * 3, [A] * 5]
    assert greedy(for_ever, CONFIG, source(1, 0), 0) == [[A], []]
    assert greedy(for_ever, CONFIG, source(0), 0) == [[]]


def test_greedy_leaves_out_the_end_and_all_that_follows() -> None:
    model = ScriptedModel({(): {END: 0.9, A: 0.1}, (END,): {A: 1.0}})
    assert greedy(model, CONFIG, source(4, 2), 50) == [[], []]


def find(
    model: Any, *sources: int, prefixes: Sequence[Sequence[int]] | None = None, rules: Rules | None = None, **how: Any
) -> list[list[Hypothesis]]:
    """By sentence, each of so many tokens."""
    given = prefixes or [()] * len(sources)
    sentences = [Sentence(i, [9] * n, prefix) for i, (n, prefix) in enumerate(zip(sources, given, strict=True))]
    batch_size = how.pop("batch_size", 64)
    found = search(model, CONFIG, sentences, DecodeConfig(**how), rules, batch_size=batch_size)
    return [hypotheses for _, hypotheses in sorted(by_number(found).items())]


# A beats B at first; what follows B is certain, what follows A is not.
GARDEN = ScriptedModel(
    {(): {A: 0.6, B: 0.4}, (A,): {A: 0.35, B: 0.35, END: 0.3}, (B,): {C: 1.0}, (A, A): {END: 1.0}, (A, B): {END: 1.0}}
)


def test_a_beam_finds_what_greedy_search_walks_past() -> None:
    """By hand: A A and A B have 0.6 * 0.35 = 0.21, A has 0.18, B C has 0.4."""
    ((best_greedy,),) = find(GARDEN, 3, beam_size=1)
    assert best_greedy.ids in ([A, A], [A, B])
    ((found,),) = find(GARDEN, 3, beam_size=2, length_alpha=0.0)
    assert found.ids == [B, C]
    assert found.log_prob == pytest.approx(math.log(0.4))
    assert found.score == pytest.approx(math.log(0.4))
    assert found.has_ended


def test_the_length_penalty_divides_and_can_turn_the_order() -> None:
    """By hand: A ends after 2 tokens with 0.5, B C C after 4 with 0.4."""
    model = ScriptedModel({(): {A: 0.5, B: 0.4, C: 0.1}, (B,): {C: 1.0}, (B, C): {C: 1.0}})
    for alpha, penalty, first in ((0.0, "gnmt", [A]), (1.5, "gnmt", [B, C, C]), (1.0, "length", [B, C, C])):
        (found,) = find(model, 3, beam_size=2, n_best=2, length_alpha=alpha, length_penalty=penalty)
        assert found[0].ids == first, (alpha, penalty)
    (by_gnmt,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.6)
    scores = {tuple(h.ids): h.score for h in by_gnmt}
    assert scores[A,] == pytest.approx(math.log(0.5) / ((5 + 2) / 6) ** 0.6)
    assert scores[B, C, C] == pytest.approx(math.log(0.4) / ((5 + 4) / 6) ** 0.6)
    (by_length,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.6, length_penalty="length")
    assert [h.score for h in by_length] == pytest.approx([math.log(0.4) / 4**0.6, math.log(0.5) / 2**0.6])


def test_one_that_has_ended_leaves_fewer_to_go_on() -> None:
    """Of two, one ends at once. The other goes on alone and cannot fork: after A A only the better of two stays."""
    model = ScriptedModel({(): {END: 0.5, A: 0.5}, (A,): {A: 0.6, B: 0.4}, (A, A): {B: 0.6, C: 0.4}})
    (found,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.0, stop_early=False)
    assert [h.ids for h in found] == [[], [A, A, B]]
    assert found[1].log_prob == pytest.approx(math.log(0.5 * 0.6 * 0.6))


class Counting:
    """Counts steps and rows of the model that it holds."""

    def __init__(self, model: Any) -> None:
        self.model, self.n_steps, self.n_rows = model, 0, 0

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Any:
        return self.model.start(source_BS, prefix_BT)

    def step(self, last_R: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.n_steps, self.n_rows = self.n_steps + 1, self.n_rows + len(last_R)
        result: tuple[Tensor, Any] = self.model.step(last_R, state)
        return result


def test_a_search_stops_when_nobody_can_win_any_more() -> None:
    """A ends with 0.9; what goes on has 0.1, and at the limit of 3 + 2 tokens could not reach it."""
    table: dict[tuple[int, ...], dict[int, float]] = {(): {A: 0.9, B: 0.1}}
    table |= {(B,) * n: {B: 1.0} for n in range(1, 99)}
    eager, patient = Counting(ScriptedModel(table)), Counting(ScriptedModel(table))
    first = find(eager, 3, beam_size=2, max_extra_tokens=2)
    second = find(patient, 3, beam_size=2, max_extra_tokens=2, stop_early=False)
    assert first == second
    assert first[0][0].ids == [A]
    assert (eager.n_steps, patient.n_steps) == (2, 5)
    # A strong penalty lets the long one win still, by hand at the limit of 53: -2.3 / 903 is more than -0.1 / 1.6.
    assert math.log(0.1) / ((5 + 53) / 6) ** 3 > math.log(0.9) / ((5 + 2) / 6) ** 3
    longer = Counting(ScriptedModel(table))
    find(longer, 3, beam_size=2, length_alpha=3.0)
    assert longer.n_steps > 2


def test_what_reaches_the_limit_is_cut_and_says_so() -> None:
    for_ever = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    ((one,), (two,)) = find(for_ever, 1, 3, max_extra_tokens=2)
    assert (one.ids, two.ids) == ([A] * 3, [A] * 5)
    assert not one.has_ended
    # One that has ended comes before a better one that has not.
    model = ScriptedModel({(): {END: 0.01, A: 0.99}} | {(A,) * n: {A: 1.0} for n in range(1, 99)})
    (found,) = find(model, 1, beam_size=2, n_best=2, max_extra_tokens=2, stop_early=False)
    assert [(h.ids, h.has_ended) for h in found] == [([], True), ([A] * 3, False)]


def test_a_beam_of_one_is_greedy_search() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG).eval()
    with torch.no_grad():
        model.embedding.output_projection[END] *= 4  # or a model that learnt nothing would never end
    source_BS = torch.randint(3, CONFIG.source_vocab_size, (23, 6))
    slowly = greedy(model, CONFIG, source_BS, 5)
    rules = Rules(torch.zeros(1, CONFIG.target_vocab_size), torch.zeros(1, CONFIG.target_vocab_size, dtype=torch.long))
    sentences = [Sentence(i, row) for i, row in enumerate(source_BS.tolist())]
    settings = DecodeConfig(beam_size=1, max_extra_tokens=5)
    found = by_number(search(model, CONFIG, sentences, settings, rules, batch_size=7))
    assert [found[i][0].ids for i in range(23)] == slowly
    assert len({len(ids) for ids in slowly}) > 2, "some end before the limit"


def exhaustive(
    model: ScriptedModel, limit: int, settings: DecodeConfig, tokens: Sequence[int]
) -> list[tuple[float, list[int]]]:
    """Every sequence that ends within the limit."""
    found = []
    for n in range(limit):
        for ids in itertools.product(tokens, repeat=n):
            log_prob = 0.0
            for place, token in enumerate([*ids, END]):
                row = model.table.get(ids[:place], {END: 1.0})
                log_prob += math.log(row[token]) if token in row else -math.inf
            if log_prob > -math.inf:
                found.append((log_prob / ((5 + n + 1) / 6) ** settings.length_alpha, list(ids)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_beam_of_full_width_is_exhaustive_search(seed: int) -> None:
    """Three tokens, four places: 3 + 9 + 27 prefixes and their ends at most."""
    numbers = random.Random(seed)
    tokens = (A, B, C)
    table = {}
    for n in range(4):
        for past in itertools.product(tokens, repeat=n):
            weights = [numbers.random() ** 3 for _ in range(4)]
            table[past] = {t: w / sum(weights) for t, w in zip((END, *tokens), weights, strict=True)}
    model = ScriptedModel(table)
    settings = DecodeConfig(beam_size=100, n_best=8, max_extra_tokens=2, length_alpha=numbers.choice([0.0, 0.6, 1.5]))
    sentences = [Sentence(0, [9, 9])]
    ((_, found),) = search(model, CONFIG, sentences, settings)
    wanted = exhaustive(model, 4, settings, tokens)
    assert [h.ids for h in found if h.has_ended] == [ids for _, ids in wanted[:8]]
    assert [h.score for h in found] == pytest.approx([score for score, _ in wanted[:8]], abs=1e-5)
    assert [h.ids for h in found] == [
        h.ids for h in next(search(model, CONFIG, sentences, replace(settings, stop_early=False)))[1]
    ]


def test_sentences_come_and_go_and_none_minds() -> None:
    """A real model: alone, in twos, sevens, all at once and shuffled, the same hypotheses and the same scores."""
    torch.manual_seed(5)
    model = Transformer(CONFIG).eval()
    numbers = random.Random(5)
    sentences = [
        Sentence(i, [numbers.randrange(3, CONFIG.source_vocab_size) for _ in range(numbers.randrange(1, 12))])
        for i in range(40)
    ]
    settings = DecodeConfig(beam_size=3, n_best=3, max_extra_tokens=4)
    alone = by_number(search(model, CONFIG, sentences, settings, batch_size=1))
    for batch_size in (2, 7, 64):
        shuffled = numbers.sample(sentences, len(sentences))
        found = by_number(search(model, CONFIG, shuffled, settings, batch_size=batch_size))
        for sentence in sentences:
            ours, others = found[sentence.number], alone[sentence.number]
            assert [h.ids for h in ours] == [h.ids for h in others]
            assert [h.score for h in ours] == pytest.approx([h.score for h in others], abs=1e-4)


def test_scores_are_what_the_model_gives() -> None:
    torch.manual_seed(7)
    model = Transformer(CONFIG).eval()
    sentence = Sentence(0, [5, 7, 11, 13])
    settings = DecodeConfig(beam_size=4, n_best=4, max_extra_tokens=3)
    ((_, found),) = search(model, CONFIG, [sentence], settings)
    assert len(found) == 4
    for hypothesis in found:
        tokens = [*hypothesis.ids, *([END] if hypothesis.has_ended else [])]
        target_in = torch.tensor([[CONFIG.bos_id, *tokens[:-1]]])
        log_prob_TV = model(torch.tensor([sentence.source]), target_in).logits_BTV[0].log_softmax(-1)
        expected = log_prob_TV[range(len(tokens)), tokens].sum().item()
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
        assert hypothesis.score == pytest.approx(expected / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_rows_stay_full() -> None:
    """Ten sentences of very different lengths in four places: as one leaves another enters."""
    for_ever = Counting(ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)}))
    lengths = [40, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    find(for_ever, *lengths, beam_size=1, max_extra_tokens=0, batch_size=4)
    assert for_ever.n_steps == 40, "the short ones pass while the long one is at work"
    assert for_ever.n_rows == sum(lengths)


def test_a_batch_holds_no_more_tokens_than_it_may() -> None:
    class Widths(ScriptedModel):
        largest = 0

        def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Script:
            self.largest = max(self.largest, source_BS.numel())
            return super().start(source_BS, prefix_BT)

    model = Widths({})
    sentences = [Sentence(i, [9] * n) for i, n in enumerate([3, 50, 3, 3, 20, 20, 20, 3])]
    found = list(search(model, CONFIG, sentences, DecodeConfig(beam_size=1), batch_size=8, batch_tokens=40))
    assert len(found) == 8
    assert model.largest == 50, "one that is too long is searched alone"


def test_a_forced_prefix_is_kept_with_the_models_own_probability() -> None:
    free, forced = find(GARDEN, 3, 3, beam_size=2, prefixes=[(), (A, B)], length_alpha=0.0)
    assert free[0].ids == [B, C]
    assert forced[0].ids == [A, B]
    assert forced[0].log_prob == pytest.approx(math.log(0.6 * 0.35))
    ((only,),) = find(GARDEN, 3, prefixes=[(B,)])
    assert only.ids == [B, C]


def test_no_ngram_comes_twice() -> None:
    loop = ScriptedModel(
        {past: {A: 0.6, B: 0.3, END: 0.1} for n in range(12) for past in itertools.product((A, B), repeat=n)}
    )
    ((found,),) = find(loop, 3, beam_size=1, no_repeat_ngram=2, max_extra_tokens=7)
    pairs = list(itertools.pairwise(found.ids))
    assert found.ids[:3] == [A, A, B]
    assert len(pairs) == len(set(pairs))
    banned_RV = repeats(torch.tensor([[A, B, C, A, B, -1], [A, A, -1, -1, -1, -1]]), torch.tensor([5, 2]), 3, 20)
    assert banned_RV.nonzero().tolist() == [[0, C]]
    banned_RV = repeats(torch.tensor([[A, B, A, -1], [A, A, -1, -1]]), torch.tensor([3, 2]), 1, 20)
    assert banned_RV.nonzero().tolist() == [[0, A], [0, B], [1, A]]


def test_ngrams_are_watched_while_some_are_over_already() -> None:
    """The first is over at ten tokens and waits, while those that took the places of short ones go on."""
    everything = ScriptedModel({})
    everything.step = lambda last_R, state: (  # type: ignore[method-assign]
        torch.arange(float(CONFIG.target_vocab_size))
        .repeat(len(last_R), 1)
        .index_fill(1, torch.tensor([END]), -torch.inf),
        state,
    )
    settings = DecodeConfig(beam_size=1, max_extra_tokens=0, no_repeat_ngram=2)
    sources = [[3] * (n - 1) + [END] for n in (10, 2, 2, 2, 10, 10, 10)]
    found = search(everything, CONFIG, [Sentence(i, s) for i, s in enumerate(sources)], settings, batch_size=4)
    assert sorted((sentence.number, len(of[0].ids)) for sentence, of in found) == [
        (i, len(source)) for i, source in enumerate(sources)
    ]


def test_no_translation_is_shorter_than_asked() -> None:
    model = ScriptedModel({(): {END: 0.9, A: 0.1}, (A,): {END: 0.9, B: 0.1}, (A, B): {END: 0.9, C: 0.1}})
    ((found,),) = find(model, 3, min_length=2)
    assert found.ids == [A, B]


def test_rules_say_what_may_follow() -> None:
    """After A only B, and it may not end in between; C never."""
    penalty_AV, next_AV = torch.zeros(2, CONFIG.target_vocab_size), torch.zeros(2, CONFIG.target_vocab_size).long()
    penalty_AV[0, C] = -torch.inf
    next_AV[0, A] = 1
    penalty_AV[1] = -torch.inf
    penalty_AV[1, B] = 0
    model = ScriptedModel({(): {C: 0.7, A: 0.2, B: 0.1}, (A,): {END: 0.8, B: 0.2}, (A, B): {C: 0.9, END: 0.1}})
    (found,) = find(model, 3, beam_size=3, n_best=2, rules=Rules(penalty_AV, next_AV), length_alpha=0.0)
    assert [h.ids for h in found] == [[B], [A, B]]
    assert found[1].log_prob == pytest.approx(math.log(0.2 * 0.2 * 0.1)), "what is forbidden keeps its probability"


def test_equal_scores_have_an_order_and_no_margin() -> None:
    model = ScriptedModel({(): {B: 0.3, C: 0.3, A: 0.3, END: 0.1}})
    ((found,),) = find(model, 3, beam_size=2)
    assert found.ids == [A]
    assert found.margin == pytest.approx(0.0, abs=1e-7)
    clear = ScriptedModel({(): {A: 0.9, B: 0.06, C: 0.04}})
    ((found,),) = find(clear, 3, beam_size=1)
    assert found.margin == pytest.approx(math.log(0.9 / 0.06), rel=1e-5)


def test_of_any_number_of_equals_the_first_are_taken() -> None:
    everything = ScriptedModel({(): dict.fromkeys(range(3, CONFIG.target_vocab_size), 1.0)})
    first = next(i for i in range(3, CONFIG.target_vocab_size) if i != END)
    ((found,),) = find(everything, 3, beam_size=1)
    assert (found.ids, found.margin) == ([first], 0.0)
    (several,) = find(everything, 3, beam_size=3, n_best=3, length_alpha=0.0)
    assert all(h.margin == 0.0 for h in several)
    # Beside a sentence with equals, one without: it keeps its own order.
    value_BC, place_BC = first_of_equals(
        torch.tensor([[1.0, 5.0, 5.0, 5.0, 5.0, 0.0], [1.0, 9.0, 3.0, 7.0, 3.0, 3.0]]), 3, torch.tensor([[2], [2]])
    )
    assert place_BC[:, :2].tolist() == [[1, 2], [1, 3]]
    assert value_BC.tolist() == [[5, 5, 5], [9, 7, 3]]


def test_the_best_of_few_are_the_best_of_all_or_are_not_told() -> None:
    """Logits of few values, so that there are many equals; some tokens forbidden; some hypotheses ended."""
    n_vocabulary, n_kept, n_told = 300, 4, 0
    sentences = [Sentence(i, [3, END]) for i in range(3)]
    for seed in range(200):
        torch.manual_seed(seed)
        settings = DecodeConfig(beam_size=n_kept, min_length=seed % 3)
        steps = 2.0 ** (seed % 12 - 4)
        logits_RV = (torch.randn(3 * n_kept, n_vocabulary) * 3 * steps).round() / steps
        penalty_AV = torch.zeros(2, n_vocabulary).masked_fill(torch.rand(2, n_vocabulary) < seed % 5 / 10, -torch.inf)
        rules = Rules(penalty_AV, torch.zeros_like(penalty_AV).long())
        n_ended_B = torch.randint(0, n_kept, (3,))
        is_open_BK = torch.arange(n_kept) < (n_kept - n_ended_B)[:, None]
        beams = replace(
            Beams.start(sentences, settings, [9] * 3, 1, torch.device("cpu")),
            log_prob_BK=torch.where(is_open_BK, -(torch.rand(3, n_kept) * steps).round() / steps, -torch.inf),
            n_ended_B=n_ended_B,
            state_BK=torch.randint(0, 2, (3, n_kept)),
            length_B=torch.tensor([0, 1, 2]),
        )
        how = SearchSettings(settings, rules, END, best)
        if (found := best_of_few(beams, Peaks.of(logits_RV), how, Doubts())) is None:
            continue
        n_told += 1
        log_prob_RV = logits_RV - Peaks.of(logits_RV).log_sum_R1
        allowed_RV = restrict(beams, log_prob_RV, settings, rules, END)
        expected = best(beams, *(of.view(3, n_kept, n_vocabulary) for of in (log_prob_RV, allowed_RV)))
        goes_on_BK = expected.log_prob_BK > -torch.inf
        assert torch.equal(found.log_prob_BK, expected.log_prob_BK), seed
        assert torch.equal(found.margin_B, expected.margin_B), seed
        for name in ("parent_BK", "token_BK"):
            assert torch.equal(getattr(found, name)[goes_on_BK], getattr(expected, name)[goes_on_BK]), (seed, name)
    assert 60 < n_told < 180


@pytest.mark.parametrize("longest", [None, 20], ids=["no longest", "a longest"])
def test_what_is_withdrawn_leaves_and_changes_nothing_for_the_others(longest: int | None) -> None:
    """Of 40, every third is withdrawn after as many turns as its number: the last of them are over by then."""
    model, chance = random_model(CONFIG), random.Random(3)
    sentences = [Sentence(i, [*chance.choices(range(3, 37), k=chance.randint(1, 15)), END]) for i in range(40)]
    settings = DecodeConfig(beam_size=3, n_best=2, max_extra_tokens=4)
    undisturbed = by_number(search(model, CONFIG, sentences, settings, batch_size=8, longest=longest))
    n_turns, in_turn = dict.fromkeys(range(40), 0), []

    def withdrawn(running: Sequence[Sentence]) -> list[int]:
        in_turn.append(len(running))
        for sentence in running:
            n_turns[sentence.number] += 1
        return [place for place, s in enumerate(running) if s.number % 3 == 0 and n_turns[s.number] >= s.number]

    found = by_number(search(model, CONFIG, sentences, settings, batch_size=8, longest=longest, cancelled=withdrawn))
    left = undisturbed.keys() - found.keys()
    assert {i % 3 for i in left} == {0}
    assert 3 < len(left) < 14, "some withdrew too late"
    for number, hypotheses in found.items():
        assert [h.ids for h in hypotheses] == [h.ids for h in undisturbed[number]]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in undisturbed[number]])
    assert max(in_turn) <= 8
    assert not list(search(model, CONFIG, sentences, settings, batch_size=8, cancelled=lambda of: range(len(of))))


@pytest.mark.parametrize(("n_vocabulary", "n_kept"), [(37, 4), (300, 7)])
def test_nothing_past_the_vocabulary_is_said(n_vocabulary: int, n_kept: int) -> None:
    """Not even of those that are over, who go on for nothing: groups of tokens are filled up past the last."""
    config = prime_config(target_vocab_size=n_vocabulary, tied_embeddings="none", output_bias=True)
    model, chance = random_model(config, torch.float32).eval(), random.Random(1)
    assert model.embedding.output_bias is not None
    with torch.no_grad():
        model.embedding.output_bias[config.eos_id] += 7
    sentences = [Sentence(i, chance.choices(range(3, 30), k=chance.randint(1, 14))) for i in range(60)]
    found = search(CachedStepper(model), config, sentences, DecodeConfig(beam_size=n_kept), batch_size=11)
    assert len(by_number(found)) == 60


def test_where_nothing_may_be_said_nothing_is() -> None:
    nothing = Rules(
        torch.full((1, CONFIG.target_vocab_size), -torch.inf), torch.zeros(1, CONFIG.target_vocab_size).long()
    )
    for how in ({"beam_size": 2}, {"method": "sample"}):
        ((found,),) = find(GARDEN, 3, rules=nothing, **how)
        assert (found.ids, found.has_ended, found.log_prob) == ([], False, -math.inf)
    ((cold,),) = find(GARDEN, 3, method="sample", temperature=1e-42)
    assert cold.ids[0] == A, "the most probable"


def test_a_prefix_comes_on_top_of_the_limit() -> None:
    for_ever = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    ((found,),) = find(for_ever, 2, prefixes=[(A,) * 9], max_extra_tokens=1, beam_size=1)
    assert found.ids == [A] * 12


def test_a_search_gets_no_wider_than_those_in_it() -> None:
    settings = DecodeConfig(beam_size=2)
    sentences = [Sentence(0, [9] * 3), Sentence(1, [9] * 300)]
    beams = Beams.start(sentences, settings, [limit_of(s, settings, None) for s in sentences], 1, torch.device("cpu"))
    assert beams.token_BKT.shape == (2, 2, 350)
    assert beams.select(torch.tensor([0])).token_BKT.shape == (1, 2, 53)
    assert beams.select(torch.tensor([], dtype=torch.long)).token_BKT.shape == (0, 2, 0)


@pytest.mark.slow
def test_draws_have_the_models_probabilities_and_depend_on_seed_and_sentence_alone() -> None:
    model = ScriptedModel({(): {A: 0.5, B: 0.3, C: 0.2}})
    n = 4000
    draws = [h[0].ids[0] for h in find(model, *[3] * n, method="sample")]
    for token, probability in ((A, 0.5), (B, 0.3), (C, 0.2)):
        spread = 4 * math.sqrt(probability * (1 - probability) / n)
        assert draws.count(token) / n == pytest.approx(probability, abs=spread)
    assert draws == [h[0].ids[0] for h in find(model, *[3] * n, method="sample", batch_size=1)]
    assert draws != [h[0].ids[0] for h in find(model, *[3] * n, method="sample", seed=2)]
    colder = [h[0].ids[0] for h in find(model, *[3] * n, method="sample", temperature=0.5)]
    assert colder.count(A) / n == pytest.approx(0.25 / 0.38, abs=0.04)
    assert {h[0].ids[0] for h in find(model, *[3] * 200, method="sample", top_k=2)} == {A, B}
    (several,) = find(model, 3, method="sample", n_best=5)
    assert len(several) == 5
    assert all(h.log_prob == pytest.approx(math.log({A: 0.5, B: 0.3, C: 0.2}[h.ids[0]])) for h in several)


def test_narrowing_keeps_the_fewest_that_hold_enough() -> None:
    logits = torch.tensor([0.2, 0.5, 0.2, 0.1]).log()
    assert narrow(logits, 0, 1.0).isfinite().tolist() == [True, True, True, True]
    assert narrow(logits, 2, 1.0).isfinite().tolist() == [True, True, True, False], "equals are not told apart"
    assert narrow(logits, 0, 0.6).isfinite().tolist() == [True, True, False, False]
    assert narrow(logits, 0, 0.71).isfinite().tolist() == [True, True, True, False]
    assert narrow(logits, 0, 0.01).isfinite().tolist() == [False, True, False, False]


def test_uniform_numbers_are_uniform() -> None:
    number, place = torch.arange(200)[:, None, None], torch.arange(10)[:, None]
    x = uniform(1, number, place, torch.arange(50)).flatten()
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    counts = torch.histc(x, 20, 0, 1)
    assert (counts - 5000).abs().max() < 5 * math.sqrt(5000)
    assert len(x.unique()) > 0.98 * len(x) * (1 - len(x) / 2**25)
    assert abs(float(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1])) < 0.02
