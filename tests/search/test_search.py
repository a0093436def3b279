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
from transduce.search.candidates import Rules, SearchSettings, best, best_from_peaks, narrow, repeats, restrict, uniform
from transduce.search.hypotheses import Beams, Hypothesis, Sentence
from transduce.search.loop import limit_of, search
from transduce.search.peaks import Conditions, Peaks, stable_topk

CONFIG = prime_config()
A, B, C, END = 5, 7, 11, CONFIG.eos_id


@dataclass(frozen=True)
class Script:
    """The state of a scripted model: the tokens of each row so far."""

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
    endless = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    assert greedy(endless, CONFIG, source(1, 3), 2) == [[A] * 3, [A] * 5]
    assert greedy(endless, CONFIG, source(1, 0), 0) == [[A], []]
    assert greedy(endless, CONFIG, source(0), 0) == [[]]


def test_greedy_drops_the_end_mark_and_all_tokens_after_it() -> None:
    model = ScriptedModel({(): {END: 0.9, A: 0.1}, (END,): {A: 1.0}})
    assert greedy(model, CONFIG, source(4, 2), 50) == [[], []]


def find(
    model: Any,
    *sources: int,
    prefixes: Sequence[Sequence[int]] | None = None,
    rules: Rules | None = None,
    **changes: Any,
) -> list[list[Hypothesis]]:
    """The hypotheses of each sentence. `sources`: the number of tokens of each source."""
    prefixes = prefixes or [()] * len(sources)
    sentences = [Sentence(i, [9] * n, prefix) for i, (n, prefix) in enumerate(zip(sources, prefixes, strict=True))]
    batch_size = changes.pop("batch_size", 64)
    results = search(model, CONFIG, sentences, DecodeConfig(**changes), rules, batch_size=batch_size)
    return [hypotheses for _, hypotheses in sorted(by_number(results).items())]


# A is more probable than B at first. After B the next token is certain, after A it is not.
GARDEN = ScriptedModel(
    {(): {A: 0.6, B: 0.4}, (A,): {A: 0.35, B: 0.35, END: 0.3}, (B,): {C: 1.0}, (A, A): {END: 1.0}, (A, B): {END: 1.0}}
)


def test_a_beam_finds_what_greedy_search_misses() -> None:
    """By hand: A A and A B have 0.6 * 0.35 = 0.21, A has 0.18, B C has 0.4."""
    ((best_greedy,),) = find(GARDEN, 3, beam_size=1)
    assert best_greedy.ids in ([A, A], [A, B])
    ((hypothesis,),) = find(GARDEN, 3, beam_size=2, length_alpha=0.0)
    assert hypothesis.ids == [B, C]
    assert hypothesis.log_prob == pytest.approx(math.log(0.4))
    assert hypothesis.score == pytest.approx(math.log(0.4))
    assert hypothesis.has_ended


def test_the_length_penalty_divides_the_log_probability_and_can_change_the_order() -> None:
    """By hand: A ends after 2 tokens with 0.5, B C C after 4 with 0.4."""
    model = ScriptedModel({(): {A: 0.5, B: 0.4, C: 0.1}, (B,): {C: 1.0}, (B, C): {C: 1.0}})
    for alpha, penalty, first in ((0.0, "gnmt", [A]), (1.5, "gnmt", [B, C, C]), (1.0, "length", [B, C, C])):
        (hypotheses,) = find(model, 3, beam_size=2, n_best=2, length_alpha=alpha, length_penalty=penalty)
        assert hypotheses[0].ids == first, (alpha, penalty)
    (by_gnmt,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.6)
    scores = {tuple(h.ids): h.score for h in by_gnmt}
    assert scores[A,] == pytest.approx(math.log(0.5) / ((5 + 2) / 6) ** 0.6)
    assert scores[B, C, C] == pytest.approx(math.log(0.4) / ((5 + 4) / 6) ** 0.6)
    (by_length,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.6, length_penalty="length")
    assert [h.score for h in by_length] == pytest.approx([math.log(0.4) / 4**0.6, math.log(0.5) / 2**0.6])


def test_each_ended_hypothesis_leaves_one_place_fewer() -> None:
    """One of two ends at once. The other continues alone: after A A only the better continuation is kept."""
    model = ScriptedModel({(): {END: 0.5, A: 0.5}, (A,): {A: 0.6, B: 0.4}, (A, A): {B: 0.6, C: 0.4}})
    (hypotheses,) = find(model, 3, beam_size=2, n_best=2, length_alpha=0.0, stop_early=False)
    assert [h.ids for h in hypotheses] == [[], [A, A, B]]
    assert hypotheses[1].log_prob == pytest.approx(math.log(0.5 * 0.6 * 0.6))


class Counting:
    """Counts the steps and rows of another stepper."""

    def __init__(self, model: Any) -> None:
        self.model, self.n_steps, self.n_rows = model, 0, 0

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Any:
        return self.model.start(source_BS, prefix_BT)

    def step(self, last_R: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.n_steps, self.n_rows = self.n_steps + 1, self.n_rows + len(last_R)
        result: tuple[Tensor, Any] = self.model.step(last_R, state)
        return result


def test_a_search_stops_when_no_live_hypothesis_can_win() -> None:
    """A ends with 0.9. The other hypothesis has 0.1 and cannot reach that score at the limit of 3 + 2 tokens."""
    table: dict[tuple[int, ...], dict[int, float]] = {(): {A: 0.9, B: 0.1}}
    table |= {(B,) * n: {B: 1.0} for n in range(1, 99)}
    eager, patient = Counting(ScriptedModel(table)), Counting(ScriptedModel(table))
    first = find(eager, 3, beam_size=2, max_extra_tokens=2)
    second = find(patient, 3, beam_size=2, max_extra_tokens=2, stop_early=False)
    assert first == second
    assert first[0][0].ids == [A]
    assert (eager.n_steps, patient.n_steps) == (2, 5)
    # With a strong penalty the long one can still win. By hand, at the limit of 53: -2.3 / 903 is more than -0.1 / 1.6.
    assert math.log(0.1) / ((5 + 53) / 6) ** 3 > math.log(0.9) / ((5 + 2) / 6) ** 3
    longer = Counting(ScriptedModel(table))
    find(longer, 3, beam_size=2, length_alpha=3.0)
    assert longer.n_steps > 2


def test_a_hypothesis_is_cut_at_the_limit_and_has_not_ended() -> None:
    endless = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    ((short,), (long,)) = find(endless, 1, 3, max_extra_tokens=2)
    assert (short.ids, long.ids) == ([A] * 3, [A] * 5)
    assert not short.has_ended
    # An ended hypothesis ranks before a better one that was cut.
    model = ScriptedModel({(): {END: 0.01, A: 0.99}} | {(A,) * n: {A: 1.0} for n in range(1, 99)})
    (hypotheses,) = find(model, 1, beam_size=2, n_best=2, max_extra_tokens=2, stop_early=False)
    assert [(h.ids, h.has_ended) for h in hypotheses] == [([], True), ([A] * 3, False)]


def test_a_beam_of_one_is_greedy_search() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG).eval()
    with torch.no_grad():
        model.embedding.output_projection[END] *= 4  # an untrained model would never end
    source_BS = torch.randint(3, CONFIG.source_vocab_size, (23, 6))
    expected = greedy(model, CONFIG, source_BS, 5)
    rules = Rules(torch.zeros(1, CONFIG.target_vocab_size), torch.zeros(1, CONFIG.target_vocab_size, dtype=torch.long))
    sentences = [Sentence(i, row) for i, row in enumerate(source_BS.tolist())]
    settings = DecodeConfig(beam_size=1, max_extra_tokens=5)
    results = by_number(search(model, CONFIG, sentences, settings, rules, batch_size=7))
    assert [results[i][0].ids for i in range(23)] == expected
    assert len({len(ids) for ids in expected}) > 2, "some end before the limit"


def exhaustive(
    model: ScriptedModel, limit: int, settings: DecodeConfig, tokens: Sequence[int]
) -> list[tuple[float, list[int]]]:
    """The score and the tokens of every sequence that ends within the limit, the best first."""
    results = []
    for n in range(limit):
        for ids in itertools.product(tokens, repeat=n):
            log_prob = 0.0
            for place, token in enumerate([*ids, END]):
                row = model.table.get(ids[:place], {END: 1.0})
                log_prob += math.log(row[token]) if token in row else -math.inf
            if log_prob > -math.inf:
                results.append((log_prob / ((5 + n + 1) / 6) ** settings.length_alpha, list(ids)))
    return sorted(results, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_beam_of_full_width_is_exhaustive_search(seed: int) -> None:
    """Three tokens and four positions: at most 3 + 9 + 27 prefixes and their ends."""
    generator = random.Random(seed)
    tokens = (A, B, C)
    table = {}
    for n in range(4):
        for past in itertools.product(tokens, repeat=n):
            weights = [generator.random() ** 3 for _ in range(4)]
            table[past] = {t: w / sum(weights) for t, w in zip((END, *tokens), weights, strict=True)}
    model = ScriptedModel(table)
    settings = DecodeConfig(beam_size=100, n_best=8, max_extra_tokens=2, length_alpha=generator.choice([0.0, 0.6, 1.5]))
    sentences = [Sentence(0, [9, 9])]
    ((_, hypotheses),) = search(model, CONFIG, sentences, settings)
    expected = exhaustive(model, 4, settings, tokens)
    assert [h.ids for h in hypotheses if h.has_ended] == [ids for _, ids in expected[:8]]
    assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in expected[:8]], abs=1e-5)
    assert [h.ids for h in hypotheses] == [
        h.ids for h in next(search(model, CONFIG, sentences, replace(settings, stop_early=False)))[1]
    ]


def test_results_do_not_depend_on_batch_size_and_order() -> None:
    """With a random model: batches of 1, 2, 7 and all sentences, shuffled, give equal hypotheses and scores."""
    torch.manual_seed(5)
    model = Transformer(CONFIG).eval()
    generator = random.Random(5)
    sentences = [
        Sentence(i, [generator.randrange(3, CONFIG.source_vocab_size) for _ in range(generator.randrange(1, 12))])
        for i in range(40)
    ]
    settings = DecodeConfig(beam_size=3, n_best=3, max_extra_tokens=4)
    alone = by_number(search(model, CONFIG, sentences, settings, batch_size=1))
    for batch_size in (2, 7, 64):
        shuffled = generator.sample(sentences, len(sentences))
        results = by_number(search(model, CONFIG, shuffled, settings, batch_size=batch_size))
        for sentence in sentences:
            batched, single = results[sentence.number], alone[sentence.number]
            assert [h.ids for h in batched] == [h.ids for h in single]
            assert [h.score for h in batched] == pytest.approx([h.score for h in single], abs=1e-4)


def test_scores_are_those_of_the_model() -> None:
    torch.manual_seed(7)
    model = Transformer(CONFIG).eval()
    sentence = Sentence(0, [5, 7, 11, 13])
    settings = DecodeConfig(beam_size=4, n_best=4, max_extra_tokens=3)
    ((_, hypotheses),) = search(model, CONFIG, [sentence], settings)
    assert len(hypotheses) == 4
    for hypothesis in hypotheses:
        tokens = [*hypothesis.ids, *([END] if hypothesis.has_ended else [])]
        target_in = torch.tensor([[CONFIG.bos_id, *tokens[:-1]]])
        log_prob_TV = model(torch.tensor([sentence.source]), target_in).logits_BTV[0].log_softmax(-1)
        expected = log_prob_TV[range(len(tokens)), tokens].sum().item()
        assert hypothesis.log_prob == pytest.approx(expected, abs=1e-4)
        assert hypothesis.score == pytest.approx(expected / ((5 + len(tokens)) / 6) ** 0.6, abs=1e-4)


def test_rows_stay_full() -> None:
    """Ten sentences of very different lengths in four places: when one leaves, another enters."""
    endless = Counting(ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)}))
    lengths = [40, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    find(endless, *lengths, beam_size=1, max_extra_tokens=0, batch_size=4)
    assert endless.n_steps == 40, "the short sentences must be done while the long one runs"
    assert endless.n_rows == sum(lengths)


def test_a_batch_holds_at_most_batch_tokens() -> None:
    class Widths(ScriptedModel):
        largest = 0

        def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Script:
            self.largest = max(self.largest, source_BS.numel())
            return super().start(source_BS, prefix_BT)

    model = Widths({})
    sentences = [Sentence(i, [9] * n) for i, n in enumerate([3, 50, 3, 3, 20, 20, 20, 3])]
    results = list(search(model, CONFIG, sentences, DecodeConfig(beam_size=1), batch_size=8, batch_tokens=40))
    assert len(results) == 8
    assert model.largest == 50, "a sentence that is too long is searched alone"


def test_a_forced_prefix_counts_with_the_probability_that_the_model_gives_it() -> None:
    free, forced = find(GARDEN, 3, 3, beam_size=2, prefixes=[(), (A, B)], length_alpha=0.0)
    assert free[0].ids == [B, C]
    assert forced[0].ids == [A, B]
    assert forced[0].log_prob == pytest.approx(math.log(0.6 * 0.35))
    ((only,),) = find(GARDEN, 3, prefixes=[(B,)])
    assert only.ids == [B, C]


def test_no_ngram_is_repeated() -> None:
    loop = ScriptedModel(
        {past: {A: 0.6, B: 0.3, END: 0.1} for n in range(12) for past in itertools.product((A, B), repeat=n)}
    )
    ((hypothesis,),) = find(loop, 3, beam_size=1, no_repeat_ngram=2, max_extra_tokens=7)
    pairs = list(itertools.pairwise(hypothesis.ids))
    assert hypothesis.ids[:3] == [A, A, B]
    assert len(pairs) == len(set(pairs))
    banned_RV = repeats(torch.tensor([[A, B, C, A, B, -1], [A, A, -1, -1, -1, -1]]), torch.tensor([5, 2]), 3, 20)
    assert banned_RV.nonzero().tolist() == [[0, C]]
    banned_RV = repeats(torch.tensor([[A, B, A, -1], [A, A, -1, -1]]), torch.tensor([3, 2]), 1, 20)
    assert banned_RV.nonzero().tolist() == [[0, A], [0, B], [1, A]]


def test_no_ngram_is_repeated_while_finished_sentences_are_still_in_the_batch() -> None:
    """The first is over at ten tokens and stays, while sentences that replaced short ones continue."""
    always_equal = ScriptedModel({})
    always_equal.step = lambda last_R, state: (  # type: ignore[method-assign]
        torch.arange(float(CONFIG.target_vocab_size))
        .repeat(len(last_R), 1)
        .index_fill(1, torch.tensor([END]), -torch.inf),
        state,
    )
    settings = DecodeConfig(beam_size=1, max_extra_tokens=0, no_repeat_ngram=2)
    sources = [[3] * (n - 1) + [END] for n in (10, 2, 2, 2, 10, 10, 10)]
    results = search(always_equal, CONFIG, [Sentence(i, s) for i, s in enumerate(sources)], settings, batch_size=4)
    assert sorted((sentence.number, len(hypotheses[0].ids)) for sentence, hypotheses in results) == [
        (i, len(source)) for i, source in enumerate(sources)
    ]


def test_no_translation_is_shorter_than_min_length() -> None:
    model = ScriptedModel({(): {END: 0.9, A: 0.1}, (A,): {END: 0.9, B: 0.1}, (A, B): {END: 0.9, C: 0.1}})
    ((hypothesis,),) = find(model, 3, min_length=2)
    assert hypothesis.ids == [A, B]


def test_rules_restrict_the_next_token() -> None:
    """After A only B is allowed, not even the end; C is never allowed."""
    penalty_AV, next_AV = torch.zeros(2, CONFIG.target_vocab_size), torch.zeros(2, CONFIG.target_vocab_size).long()
    penalty_AV[0, C] = -torch.inf
    next_AV[0, A] = 1
    penalty_AV[1] = -torch.inf
    penalty_AV[1, B] = 0
    model = ScriptedModel({(): {C: 0.7, A: 0.2, B: 0.1}, (A,): {END: 0.8, B: 0.2}, (A, B): {C: 0.9, END: 0.1}})
    (hypotheses,) = find(model, 3, beam_size=3, n_best=2, rules=Rules(penalty_AV, next_AV), length_alpha=0.0)
    assert [h.ids for h in hypotheses] == [[B], [A, B]]
    assert hypotheses[1].log_prob == pytest.approx(math.log(0.2 * 0.2 * 0.1)), (
        "probabilities are not renormalised over the allowed tokens"
    )


def test_equal_scores_have_a_fixed_order_and_margin_zero() -> None:
    model = ScriptedModel({(): {B: 0.3, C: 0.3, A: 0.3, END: 0.1}})
    ((hypothesis,),) = find(model, 3, beam_size=2)
    assert hypothesis.ids == [A]
    assert hypothesis.margin == pytest.approx(0.0, abs=1e-7)
    clear = ScriptedModel({(): {A: 0.9, B: 0.06, C: 0.04}})
    ((hypothesis,),) = find(clear, 3, beam_size=1)
    assert hypothesis.margin == pytest.approx(math.log(0.9 / 0.06), rel=1e-5)


def test_of_any_number_of_equal_tokens_the_first_are_chosen() -> None:
    all_equal = ScriptedModel({(): dict.fromkeys(range(3, CONFIG.target_vocab_size), 1.0)})
    first = next(i for i in range(3, CONFIG.target_vocab_size) if i != END)
    ((hypothesis,),) = find(all_equal, 3, beam_size=1)
    assert (hypothesis.ids, hypothesis.margin) == ([first], 0.0)
    (hypotheses,) = find(all_equal, 3, beam_size=3, n_best=3, length_alpha=0.0)
    assert all(h.margin == 0.0 for h in hypotheses)
    # A sentence without equal values in the same batch keeps its order.
    value_BC, place_BC = stable_topk(
        torch.tensor([[1.0, 5.0, 5.0, 5.0, 5.0, 0.0], [1.0, 9.0, 3.0, 7.0, 3.0, 3.0]]), 3, torch.tensor([[2], [2]])
    )
    assert place_BC[:, :2].tolist() == [[1, 2], [1, 3]]
    assert value_BC.tolist() == [[5, 5, 5], [9, 7, 3]]


def test_the_best_from_peaks_equal_the_best_of_all_or_are_none() -> None:
    """Logits with few values, so that many are equal. Some tokens are forbidden, some hypotheses have ended."""
    n_vocabulary, n_kept, n_compared = 300, 4, 0
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
        search_settings = SearchSettings(settings, rules, END, best)
        if (chosen := best_from_peaks(beams, Peaks.of(logits_RV), search_settings, Conditions())) is None:
            continue
        n_compared += 1
        log_prob_RV = logits_RV - Peaks.of(logits_RV).log_sum_R1
        allowed_RV = restrict(beams, log_prob_RV, settings, rules, END)
        expected = best(beams, *(x.view(3, n_kept, n_vocabulary) for x in (log_prob_RV, allowed_RV)))
        is_live_BK = expected.log_prob_BK > -torch.inf
        assert torch.equal(chosen.log_prob_BK, expected.log_prob_BK), seed
        assert torch.equal(chosen.margin_B, expected.margin_B), seed
        for name in ("parent_BK", "token_BK"):
            assert torch.equal(getattr(chosen, name)[is_live_BK], getattr(expected, name)[is_live_BK]), (seed, name)
    assert 60 < n_compared < 180


@pytest.mark.parametrize("longest", [None, 20], ids=["no limit", "a limit"])
def test_cancelled_sentences_leave_and_do_not_change_the_others(longest: int | None) -> None:
    """Every third of 40 sentences is cancelled after as many turns as its number; the last of them are done by then."""
    model, generator = random_model(CONFIG), random.Random(3)
    sentences = [Sentence(i, [*generator.choices(range(3, 37), k=generator.randint(1, 15)), END]) for i in range(40)]
    settings = DecodeConfig(beam_size=3, n_best=2, max_extra_tokens=4)
    expected = by_number(search(model, CONFIG, sentences, settings, batch_size=8, longest=longest))
    n_turns, batch_sizes = dict.fromkeys(range(40), 0), []

    def cancelled(running: Sequence[Sentence]) -> list[int]:
        batch_sizes.append(len(running))
        for sentence in running:
            n_turns[sentence.number] += 1
        return [place for place, s in enumerate(running) if s.number % 3 == 0 and n_turns[s.number] >= s.number]

    results = by_number(search(model, CONFIG, sentences, settings, batch_size=8, longest=longest, cancelled=cancelled))
    missing = expected.keys() - results.keys()
    assert {i % 3 for i in missing} == {0}
    assert 3 < len(missing) < 14, "some must be cancelled and some must be done before"
    for number, hypotheses in results.items():
        assert [h.ids for h in hypotheses] == [h.ids for h in expected[number]]
        assert [h.score for h in hypotheses] == pytest.approx([h.score for h in expected[number]])
    assert max(batch_sizes) <= 8
    assert not list(
        search(model, CONFIG, sentences, settings, batch_size=8, cancelled=lambda running: range(len(running)))
    )


@pytest.mark.parametrize(("n_vocabulary", "n_kept"), [(37, 4), (300, 7)])
def test_no_token_past_the_vocabulary_is_chosen(n_vocabulary: int, n_kept: int) -> None:
    """Not even for finished sentences, whose rows are still computed. The last group of tokens is padded."""
    config = prime_config(target_vocab_size=n_vocabulary, tied_embeddings="none", output_bias=True)
    model, generator = random_model(config, torch.float32).eval(), random.Random(1)
    assert model.embedding.output_bias is not None
    with torch.no_grad():
        model.embedding.output_bias[config.eos_id] += 7
    sentences = [Sentence(i, generator.choices(range(3, 30), k=generator.randint(1, 14))) for i in range(60)]
    results = search(CachedStepper(model), config, sentences, DecodeConfig(beam_size=n_kept), batch_size=11)
    assert len(by_number(results)) == 60


def test_if_no_token_is_allowed_the_result_is_one_empty_hypothesis() -> None:
    no_tokens = Rules(
        torch.full((1, CONFIG.target_vocab_size), -torch.inf), torch.zeros(1, CONFIG.target_vocab_size).long()
    )
    for changes in ({"beam_size": 2}, {"method": "sample"}):
        ((hypothesis,),) = find(GARDEN, 3, rules=no_tokens, **changes)
        assert (hypothesis.ids, hypothesis.has_ended, hypothesis.log_prob) == ([], False, -math.inf)
    ((cold,),) = find(GARDEN, 3, method="sample", temperature=1e-42)
    assert cold.ids[0] == A, "the most probable"


def test_a_prefix_does_not_count_against_the_limit() -> None:
    endless = ScriptedModel({(A,) * n: {A: 1.0} for n in range(99)})
    ((hypothesis,),) = find(endless, 2, prefixes=[(A,) * 9], max_extra_tokens=1, beam_size=1)
    assert hypothesis.ids == [A] * 12


def test_tensors_are_as_wide_as_the_longest_limit_of_their_sentences() -> None:
    settings = DecodeConfig(beam_size=2)
    sentences = [Sentence(0, [9] * 3), Sentence(1, [9] * 300)]
    beams = Beams.start(sentences, settings, [limit_of(s, settings, None) for s in sentences], 1, torch.device("cpu"))
    assert beams.token_BKT.shape == (2, 2, 350)
    assert beams.select(torch.tensor([0])).token_BKT.shape == (1, 2, 53)
    assert beams.select(torch.tensor([], dtype=torch.long)).token_BKT.shape == (0, 2, 0)


@pytest.mark.slow
def test_samples_have_the_probabilities_of_the_model_and_depend_only_on_seed_and_sentence() -> None:
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
    (hypotheses,) = find(model, 3, method="sample", n_best=5)
    assert len(hypotheses) == 5
    assert all(h.log_prob == pytest.approx(math.log({A: 0.5, B: 0.3, C: 0.2}[h.ids[0]])) for h in hypotheses)


def test_narrowing_keeps_the_fewest_tokens_that_reach_top_p() -> None:
    logits = torch.tensor([0.2, 0.5, 0.2, 0.1]).log()
    assert narrow(logits, 0, 1.0).isfinite().tolist() == [True, True, True, True]
    assert narrow(logits, 2, 1.0).isfinite().tolist() == [True, True, True, False], "of equal tokens, all are kept"
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
