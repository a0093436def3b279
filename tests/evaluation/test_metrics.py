"""Scores equal those of sacrebleu; bracket scores equal those computed by hand and by a second implementation."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from transduce.data.trees import ROOT, Tree, parse
from transduce.errors import ConfigError, DataError
from transduce.evaluation.metrics import (
    TOKENISERS,
    Score,
    bleu,
    bracket_f1,
    by_length,
    chrf,
    compound_split_bleu,
    exact_match,
    length_ratio,
    paired,
    scores,
    sentence_scores,
    split_compounds,
    ter,
)


def corpus(seed: int, n_lines: int = 60, error_rate: float = 0.3) -> tuple[list[str], list[str]]:
    """Translations and references that share much but not all, with marks that tokenisers treat differently."""
    rng = random.Random(seed)
    words = ["the", "Haus", "3,5", "isn't", "rich-text", "&amp;", "über-all", ",", ".", "(so)", "Ärger's", "1990-95"]
    references = [" ".join(rng.choices(words, k=rng.randint(1, 25))) for _ in range(n_lines)]
    hypotheses = [
        " ".join(rng.choice(words) if rng.random() < error_rate else word for word in line.split())
        for line in references
    ]
    return hypotheses, references


HYPOTHESES, REFERENCES = corpus(seed=1)
OTHERS, _ = corpus(seed=1, error_rate=0.35)
ALTERNATIVES = [" ".join(reversed(line.split())) for line in REFERENCES]


def command_line(folder: Path, systems: list[list[str]], references: list[list[str]], *options: str) -> str:
    """The output of the program `sacrebleu`."""
    files = {f"{kind}{i}": lines for kind, sets in (("h", systems), ("r", references)) for i, lines in enumerate(sets)}
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    names = [*(name for name in files if name[0] == "r"), "-i", *(name for name in files if name[0] == "h")]
    metrics = ["-m", "bleu", "chrf", "ter", "--chrf-word-order", "2"]
    command = [sys.executable, "-m", "sacrebleu", *names, *metrics, "--width", "20", "--no-color", *options]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, encoding="utf-8", env=environment)
    return done.stdout


@pytest.mark.parametrize("references", [[REFERENCES], [REFERENCES, ALTERNATIVES]], ids=["one", "two"])
def test_values_intervals_and_signatures_equal_those_of_sacrebleu(tmp_path: Path, references: list[list[str]]) -> None:
    options = "--format", "json", "--confidence", "--confidence-n", "100"
    printed = json.loads(command_line(tmp_path, [HYPOTHESES], references, *options))
    ours = scores(HYPOTHESES, references, n_bootstrap=100)
    assert [score.name for score in ours] == ["BLEU", "chrF++", "TER"]
    for score, theirs in zip(ours, printed, strict=True):
        assert score.value == theirs["score"]
        assert score.signature == theirs["signature"]
        assert score.interval is not None
        low, high = score.interval
        assert low < score.value < high
        assert (high - low) / 2 == pytest.approx(theirs["confidence_var"], abs=1e-12)


@pytest.mark.parametrize("tokenise", TOKENISERS)
def test_bleu_with_each_tokeniser_equals_that_of_sacrebleu(tmp_path: Path, tokenise: str) -> None:
    options = "--format", "json", "--tokenize", tokenise
    printed = json.loads(command_line(tmp_path, [HYPOTHESES], [REFERENCES], *options))[0]
    ours = bleu(HYPOTHESES, REFERENCES, n_bootstrap=0, tokenise=tokenise)
    assert (ours.value, ours.signature) == (printed["score"], printed["signature"])
    assert scores(HYPOTHESES, REFERENCES, 0, tokenise)[0] == ours
    assert paired(HYPOTHESES, OTHERS, REFERENCES, 10, ["BLEU"], tokenise)[0].system == ours.value


def test_an_unknown_tokeniser_is_refused() -> None:
    with pytest.raises(ConfigError, match="'moses', must be one of 13a, none"):
        bleu(HYPOTHESES, REFERENCES, tokenise="moses")


def test_without_bootstrap_there_is_no_interval_and_none_in_the_signature() -> None:
    without, with_interval = (bleu(HYPOTHESES, REFERENCES, n_bootstrap=n) for n in (0, 40))
    assert without.interval is None
    assert with_interval.interval is not None
    assert without.value == with_interval.value
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", without.signature)
    assert "bs:40|seed:12345" in with_interval.signature


def test_scores_are_reproducible_and_can_be_written_as_json() -> None:
    score = chrf(HYPOTHESES, REFERENCES, n_bootstrap=50)
    assert chrf(HYPOTHESES, REFERENCES, n_bootstrap=50) == score
    assert score.interval is not None
    assert json.loads(json.dumps(asdict(score))) == {**asdict(score), "interval": list(score.interval)}


def test_references_may_be_one_list_or_a_list_of_lists() -> None:
    assert scores(HYPOTHESES, REFERENCES, 0) == scores(HYPOTHESES, [REFERENCES], 0)


def test_an_interval_narrows_with_more_sentences() -> None:
    def width(n_lines: int) -> float:
        interval = bleu(*corpus(seed=2, n_lines=n_lines), n_bootstrap=200).interval
        assert interval is not None
        return interval[1] - interval[0]

    assert width(400) < width(25) / 2


def test_only_ter_is_better_when_lower() -> None:
    assert [score.lower_is_better for score in scores(HYPOTHESES, REFERENCES, 0)] == [False, False, True]
    assert ter(REFERENCES, REFERENCES, 0).value == 0 < ter(HYPOTHESES, REFERENCES, 0).value


def test_repeated_words_match_at_most_as_often_as_in_the_reference() -> None:
    # 2 of 7 words match. No longer n-gram matches: smoothing counts 1/2, 1/4 and 1/8 of a match for n = 2, 3 and 4.
    value = bleu(["the the the the the the the"], ["the cat is on the mat"], 0).value
    assert value == pytest.approx(100 * (2 / 7 * 1 / (2 * 6) * 1 / (4 * 5) * 1 / (8 * 4)) ** (1 / 4), rel=1e-12)


def test_short_translations_have_a_brevity_penalty_and_long_ones_do_not() -> None:
    # Every n-gram matches, so BLEU is the brevity penalty: first for 4 words instead of 6, then for 10 instead of 12.
    assert bleu(["the cat is on"], ["the cat is on the mat"], 0).value == pytest.approx(100 * math.exp(1 - 6 / 4))
    both = bleu(["the cat is on", "a b c d e f"], ["the cat is on the mat", "a b c d e f"], 0).value
    assert both == pytest.approx(100 * math.exp(1 - 12 / 10))
    # 6 of 7, 5 of 6, 4 of 5 and 3 of 4 n-grams match. Their product is 3 / 7, and there is no brevity penalty.
    assert bleu(["a b c d e f g"], ["a b c d e f"], 0).value == pytest.approx(100 * (3 / 7) ** (1 / 4))


def test_ter_counts_a_move_of_several_words_as_one_edit() -> None:
    assert ter(["a b c"], ["a b c d"], 0).value == pytest.approx(100 * 1 / 4)
    assert ter(["d e a b c"], ["a b c d e"], 0).value == pytest.approx(100 * 1 / 5)


tokens = st.sampled_from(["ab,", "The", "cat-s", "x.y", "ü", "12", "-"])
sentences = st.lists(tokens, min_size=4, max_size=12).map(" ".join)


@settings(deadline=None)  # the first example imports sacrebleu
@given(st.lists(sentences, min_size=1, max_size=4))
def test_a_text_compared_with_itself_has_the_best_scores(lines: list[str]) -> None:
    best = {"BLEU": 100, "chrF++": 100, "TER": 0}
    for score in scores(lines, lines, 0):
        assert score.value == pytest.approx(best[score.name])
    assert compound_split_bleu(lines, lines, 0).value == pytest.approx(100)
    assert sentence_scores(lines, lines) == pytest.approx([100] * len(lines))
    assert exact_match(lines, lines) == 1
    assert length_ratio(lines, lines) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), st.randoms())
def test_the_order_of_sentences_does_not_change_scores(pairs: list[tuple[str, str]], rng: random.Random) -> None:
    shuffled = rng.sample(pairs, len(pairs))

    def values_of(rows: list[tuple[str, str]]) -> list[float]:
        sides = [row[0] for row in rows], [row[1] for row in rows]
        return [*(score.value for score in scores(*sides, 0)), exact_match(*sides), length_ratio(*sides)]

    assert values_of(shuffled) == pytest.approx(values_of(pairs))


Metric = Callable[[list[str], Any], object]


@pytest.mark.parametrize(
    "metric",
    [bleu, chrf, ter, scores, compound_split_bleu, sentence_scores, exact_match, length_ratio],
    ids=lambda metric: metric.__name__,
)
def test_different_numbers_of_lines_are_refused(metric: Metric) -> None:
    message = "there are 3 translations and 4 references: give files with the same number of lines"
    with pytest.raises(DataError, match=message):
        metric(["a"] * 3, ["a"] * 4)
    with pytest.raises(DataError, match=message):
        metric(["a"] * 3, [["a"] * 3, ["a"] * 4])
    with pytest.raises(DataError, match="there are 3 translations and 0 references"):
        metric(["a"] * 3, [])
    with pytest.raises(DataError, match="there are 0 translations: give at least one line"):
        metric([], [])


@pytest.mark.parametrize("n_bootstrap", [-1, 1, 39])
def test_too_few_samples_for_an_interval_are_refused(n_bootstrap: int) -> None:
    with pytest.raises(ConfigError, match=rf"0 \(no interval\) or at least 40, got {n_bootstrap}: 1000 is usual"):
        bleu(HYPOTHESES, REFERENCES, n_bootstrap)


def test_comparisons_equal_those_of_sacrebleu(tmp_path: Path) -> None:
    options = "--format", "latex", "--paired-bs", "--paired-bs-n", "100"  # its JSON fails on TER in sacrebleu 2.6
    printed = command_line(tmp_path, [OTHERS, HYPOTHESES], [REFERENCES], *options)
    others, systems = (
        re.findall(r"& +([\d.]+) \(", line) for line in printed.splitlines() if re.search("h[01] &", line)
    )
    p_values = re.findall(r"\(p = ([\d.]+)\)", printed)
    signatures = re.findall(r"^ - \S+ +(nrefs:.*)$", printed, re.MULTILINE)
    ours = paired(HYPOTHESES, OTHERS, REFERENCES, n_samples=100)
    assert [comparison.name for comparison in ours] == ["BLEU", "chrF++", "TER"]
    assert [comparison.system for comparison in ours] == [float(value) for value in systems]
    assert [comparison.other for comparison in ours] == [float(value) for value in others]
    assert [f"{comparison.p_value:.4f}" for comparison in ours] == p_values
    assert [comparison.signature for comparison in ours] == signatures
    assert len(set(p_values)) == 3, "different, so that the test can tell them apart"
    assert all(comparison.difference == comparison.system - comparison.other for comparison in ours)


def test_a_large_difference_is_significant_in_both_directions() -> None:
    worse, _ = corpus(seed=1, error_rate=0.8)
    forward, backward = (
        paired(*pair, REFERENCES, n_samples=200) for pair in ((HYPOTHESES, worse), (worse, HYPOTHESES))
    )
    assert [comparison.system_is_better for comparison in forward] == [True] * 3
    assert [comparison.system_is_better for comparison in backward] == [False] * 3
    assert [comparison.difference > 0 for comparison in forward] == [True, True, False]
    assert all(comparison.p_value < 0.05 for comparison in forward + backward)


def test_a_system_does_not_differ_from_itself() -> None:
    for comparison in paired(HYPOTHESES, list(HYPOTHESES), REFERENCES, n_samples=50):
        assert (comparison.difference, comparison.p_value) == (0, 1)
        assert not comparison.system_is_better
    lower_case = [line.lower() for line in HYPOTHESES]  # TER ignores case
    (same,) = paired(HYPOTHESES, lower_case, REFERENCES, n_samples=50, names=["TER"])
    assert (same.difference, same.p_value) == (0, 1)


def test_only_bleu_warns_of_text_that_looks_tokenised(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenised = ["so it is ."] * 100
    paired(tokenised, tokenised, tokenised, n_samples=1)
    by_length(tokenised, tokenised, [4] * 100)
    length_ratio(tokenised, tokenised)
    compound_split_bleu(tokenised, tokenised, 0)
    assert caplog.text == ""
    bleu(tokenised, tokenised, 0)
    assert "you forgot to detokenize" in caplog.text
    assert capfd.readouterr() == ("", ""), "nothing else is printed"


def test_invalid_comparisons_are_refused() -> None:
    with pytest.raises(DataError, match="there are 1 translations and 2 references"):
        paired(["a", "b"], ["a"], ["a", "b"])
    with pytest.raises(ConfigError, match="there is no metric 'bleu': choose from BLEU, chrF"):
        paired(["a"], ["a"], ["a"], names=["bleu"])
    with pytest.raises(ConfigError, match="n_samples must be at least 1, got 0"):
        paired(["a"], ["a"], ["a"], n_samples=0)


def test_the_score_of_a_sentence_does_not_depend_on_other_sentences() -> None:
    together = sentence_scores(HYPOTHESES, [REFERENCES, ALTERNATIVES])
    alone = [
        chrf([line], [[reference], [alternative]], 0).value
        for line, reference, alternative in zip(HYPOTHESES, REFERENCES, ALTERNATIVES, strict=True)
    ]
    assert together == alone
    good, bad = sentence_scores(["a black cat", "quite wrong"], ["a black cat", "ziemlich falsch"])
    assert good > bad


def test_an_exact_match_equals_any_reference_apart_from_outer_spaces() -> None:
    assert exact_match(["a ", "b", "c", "D"], ["a", "b.", "c", "d"]) == 1 / 2
    assert exact_match(["a ", "b", "c", "D"], [["a", "b.", "c", "d"], ["", "b", "", ""]]) == 3 / 4


def test_the_length_ratio_counts_tokens_of_bleu() -> None:
    assert length_ratio(["a, b"], ["a b c d"]) == 3 / 4  # the comma is a token
    with pytest.raises(DataError, match="2 references have 0 words: give references with text"):
        length_ratio(["a", "b"], ["", " "])


def test_each_length_group_has_the_scores_of_its_own_sentences() -> None:
    lengths = [0, 10, 11, 20, 51, 1000]
    hypotheses, references = HYPOTHESES[:6], [REFERENCES[:6], ALTERNATIVES[:6]]
    groups = by_length(hypotheses, references, lengths)
    bounds = [(group.shortest, group.longest, group.n_sentences) for group in groups]
    assert bounds == [(0, 10, 2), (11, 20, 2), (51, None, 2)], "no sentence has 21 to 50 words"
    for place, group in enumerate(groups):
        rows = slice(2 * place, 2 * place + 2)
        group_lines = hypotheses[rows], [lines[rows] for lines in references]
        assert [group.bleu, group.chrf] == [bleu(*group_lines, 0), chrf(*group_lines, 0)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.sets(st.integers(0, 60), max_size=5))
def test_each_sentence_is_in_exactly_one_length_group(lengths: list[int], bounds: set[int]) -> None:
    texts = ["x"] * len(lengths)
    groups = by_length(texts, texts, lengths, sorted(bounds))
    assert sum(group.n_sentences for group in groups) == len(lengths)
    for group in groups:
        longest = math.inf if group.longest is None else group.longest
        assert group.n_sentences == sum(group.shortest <= n <= longest for n in lengths)


def test_invalid_length_groups_are_refused() -> None:
    with pytest.raises(DataError, match="there are 2 translations and 1 lengths: give one length per translation"):
        by_length(["a", "b"], ["a", "b"], [1])
    for bounds in [(20, 10), (10, 10), (-1, 5)]:
        with pytest.raises(
            ConfigError, match=f"must be at least 0 and increase, got {re.escape(str(bounds))}: sort them"
        ):
            by_length(["a"], ["a"], [1], bounds)


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # the first match consumes b
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("a-ä-c", "a ##AT##-##AT## ä ##AT##-##AT## c"),  # ä has two bytes: each match consumes one
        ("a - b -c d-", "a - b -c d-"),
        ("x--y", "x ##AT##-##AT## -y"),
    ],
)
def test_compounds_are_split_as_by_perl(line: str, split: str) -> None:
    """The expected output is that of perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g'."""
    assert split_compounds(line) == split


def test_compound_split_bleu_is_bleu_of_split_words_without_smoothing() -> None:
    # The second of seven tokens is wrong: 6 of 7 unigrams, 4 of 6 bigrams, 3 of 5 trigrams and 2 of 4 4-grams match.
    score = compound_split_bleu(["the rich-text tool-kit"], ["the poor-text tool-kit"], 0)
    assert score.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** (1 / 4))
    assert score.name == "tokenised, compound-split BLEU"
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a+compound-split|smooth:none|version:")
    no_bigram = ["the the the the"], ["the cat is here"]
    assert compound_split_bleu(*no_bigram, 0).value == 0 < bleu(*no_bigram, 0).value
    assert compound_split_bleu(["a b c d."], ["a b c d ."], 0).value == pytest.approx(100), (
        "the text is tokenised first"
    )
    assert compound_split_bleu(["a rich - text x"], ["a rich-text x"], 0).value < 90, "a dash is not a hyphen"


def test_every_metric_has_an_interval() -> None:
    for metric in (bleu, chrf, ter, compound_split_bleu):
        score: Score = metric(HYPOTHESES, REFERENCES, n_bootstrap=40)
        assert score.interval is not None
        assert "bs:40|seed:12345" in score.signature


def f1_of(gold: str, predicted: str) -> tuple[float, float, float, float]:
    result = bracket_f1([parse(gold)], [parse(predicted)])
    assert (result.n_sentences, result.n_skipped) == (1, 0)
    return result.precision, result.recall, result.f1, result.complete_match


GOLD = "(TOP (S (NP (NNP John)) (VP (VBZ has) (NP (DT a) (NN dog))) (. .)))"
PERFECT = (100, 100, 100, 100)


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        pytest.param(GOLD, GOLD, PERFECT, id="the same"),
        # One of four brackets (S, NP, VP, NP) has the wrong label.
        pytest.param(GOLD, GOLD.replace("(VP", "(PP"), (75, 75, 75, 0), id="a wrong label"),
        # Without the last NP, three brackets remain, and all are correct: F1 is 2 * 3 / (3 + 4).
        pytest.param(
            GOLD,
            "(TOP (S (NP (NNP John)) (VP (VBZ has) (DT a) (NN dog)) (. .)))",
            (100, 75, 600 / 7, 0),
            id="a missing bracket",
        ),
        # Three equal brackets are predicted, and two of them have a partner.
        pytest.param(
            "(TOP (NP (NP (NN a) (NN b))))",
            "(TOP (NP (NP (NP (NN a) (NN b)))))",
            (100 * 2 / 3, 100, 80, 0),
            id="a duplicate bracket",
        ),
        # S over NP and NP over S give the same brackets.
        pytest.param("(TOP (S (NP (NN a))))", "(TOP (NP (S (NN a))))", PERFECT, id="a chain in another order"),
        # Punctuation inside the VP, before the sentence, and alone in a bracket, which then has no words.
        pytest.param(
            GOLD,
            "(TOP (PRN (. .)) (S (NP (NNP John) (, ,)) (VP (VBZ has) (NP (`` ``) (DT a) (NN dog) ('' '')) (: ;))))",
            PERFECT,
            id="punctuation elsewhere",
        ),
        # Round brackets in the text are words, not punctuation.
        pytest.param(
            "(TOP (S (NP (NN a) (-LRB- -LRB-)) (VP (VB b))))",
            "(TOP (S (NP (NN a)) (VP (-LRB- -LRB-) (VB b))))",
            (100 / 3, 100 / 3, 100 / 3, 0),
            id="round brackets count",
        ),
        pytest.param("(TOP (VP (VB a) (PRT (RP up))))", "(TOP (VP (VB a) (ADVP (RB up))))", PERFECT, id="PRT is ADVP"),
        pytest.param("(TOP (VP (VB a) (PRT (RP up))))", "(TOP (VP (VB a) (PP (RP up))))", (50, 50, 50, 0), id="not PP"),
        pytest.param(GOLD, GOLD.replace("NN ", "VB ").replace("DT", "XX"), PERFECT, id="tags are not brackets"),
        pytest.param(
            "(TOP (S-IMP (NP-SBJ-1 (-NONE- *)) (NP=2 (NN a)) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))))",
            "(S (NP (NN a)))",
            PERFECT,
            id="no root, functional tags or traces",
        ),
        pytest.param("(TOP (S (NN a)))", "(TOP (NN a))", (0, 0, 0, 0), id="no brackets"),
    ],
)
def test_bracket_scores_equal_those_computed_by_hand(gold: str, predicted: str, expected: tuple[float, ...]) -> None:
    assert f1_of(gold, predicted) == pytest.approx(expected, rel=1e-12)


def test_brackets_are_summed_over_sentences_before_the_division() -> None:
    # First 4 of 4 brackets match, then none of 1 and 2: a mean over sentences would give 50.
    gold = [parse(GOLD), parse("(TOP (NP (NN a) (NN b)))")]
    predicted = [parse(GOLD), parse("(TOP (VP (PP (NN a) (NN b))))")]
    result = bracket_f1(gold, predicted)
    assert (result.precision, result.recall, result.f1) == pytest.approx((100 * 4 / 6, 100 * 4 / 5, 100 * 8 / 11))
    assert (result.complete_match, result.n_sentences, result.n_skipped) == (50, 2, 0)


@pytest.mark.parametrize(
    ("gold", "predicted"),
    [
        ("(TOP (NP (NN a) (NN b)))", "(TOP (NP (NN a)))"),  # a missing word
        ("(TOP (NP (NN a) (NN b)))", "(TOP (NP (NN a) (NN c)))"),  # a different word
        ("(TOP (NP (NN a) (. .)))", "(TOP (NP (NN a) (XX .)))"),  # punctuation without its tag
        ("(TOP (NP (. .)))", "(TOP (NP (. .)))"),  # no words
        ("(TOP)", "(TOP)"),
    ],
)
def test_sentences_with_different_words_are_skipped_and_counted(gold: str, predicted: str) -> None:
    result = bracket_f1([parse(GOLD), parse(gold)], [parse(GOLD), parse(predicted)])
    assert (result.precision, result.recall, result.f1, result.complete_match) == PERFECT
    assert (result.n_sentences, result.n_skipped) == (2, 1)
    with pytest.raises(DataError, match="none of 1 sentences has the same words in both trees: give trees with"):
        bracket_f1([parse(gold)], [parse(predicted)])


def test_different_numbers_of_trees_are_refused() -> None:
    with pytest.raises(DataError, match="there are 1 trees and 2 gold trees: give one per sentence"):
        bracket_f1([parse(GOLD)] * 2, [parse(GOLD)])
    with pytest.raises(DataError, match="there are 0 trees and 0 gold trees"):
        bracket_f1([], [])


labels = st.sampled_from(["S", "NP", "NP-SBJ", "NP=2", "ADVP", "PRT", "TOP"])


def grow(tokens: list[tuple[str, str]]) -> st.SearchStrategy[Tree]:
    """Trees over exactly these words: brackets are put around parts of the list repeatedly."""

    def bracket(nodes: list[Tree], cuts: list[tuple[int, int, str]]) -> Tree:
        for start, length, label in cuts:
            start %= len(nodes)
            nodes = [*nodes[:start], Tree(label, tuple(nodes[start : start + length])), *nodes[start + length :]]
        return Tree(ROOT, tuple(nodes))

    cuts = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), labels), min_size=1, max_size=9)
    return cuts.map(lambda drawn: bracket([Tree(tag, word=word) for tag, word in tokens], drawn))


words = st.lists(st.sampled_from([("NN", "a"), ("-NONE-", "0"), (".", "."), (",", ",")]), min_size=1, max_size=8)
two_trees = words.flatmap(lambda tokens: st.tuples(grow(tokens), grow(tokens)))


def count_as_evalb(gold: Tree, predicted: Tree) -> tuple[int, int, int]:
    """The numbers of matching, gold and predicted brackets, counted as by EVALB: each match removes one bracket."""

    def read(tree: Tree) -> list[tuple[str, int, int]]:
        brackets, stack, n_words = list[tuple[str, int, int]](), list[tuple[str, int]](), 0
        for token in re.findall(r"\(\S+ [^\s()]+\)|\(\S+|\)", str(tree)):
            if token == ")":
                label, start = stack.pop()
                label = re.sub("[-=].*", "", label)
                if start < n_words and label != "TOP":
                    brackets.append((label, start, n_words))
            elif token.endswith(")"):
                n_words += token.startswith("(NN ")
            else:
                stack.append((token[1:], n_words))
        return brackets

    remaining, gold_brackets = read(predicted), read(gold)
    n_predicted, n_gold, n_matched = len(remaining), len(gold_brackets), 0
    for label, *span in gold_brackets:
        for candidate in remaining:
            is_same_label = label == candidate[0] or {label, candidate[0]} == {"ADVP", "PRT"}
            if is_same_label and span == list(candidate[1:]):
                remaining.remove(candidate)
                n_matched += 1
                break
    return n_matched, n_gold, n_predicted


@given(two_trees)
def test_bracket_scores_equal_those_of_a_second_implementation(pair: tuple[Tree, Tree]) -> None:
    gold, predicted = pair
    assume("a" in gold.words())
    n_matched, n_gold, n_predicted = count_as_evalb(gold, predicted)
    result = bracket_f1([gold], [predicted])
    assert result.recall == pytest.approx(100 * n_matched / n_gold if n_gold else 0)
    assert result.precision == pytest.approx(100 * n_matched / n_predicted if n_predicted else 0)
    assert result.f1 == pytest.approx(200 * n_matched / (n_gold + n_predicted) if n_matched else 0)
    assert (result.complete_match == 100) == (n_matched == n_gold == n_predicted)


@given(two_trees)
def test_a_tree_matches_itself_and_f1_is_symmetric(pair: tuple[Tree, Tree]) -> None:
    first, second = (Tree(ROOT, (Tree("S", tree.children),)) for tree in pair)
    assume("a" in first.words())
    same = bracket_f1([first], [first])
    assert (same.precision, same.recall, same.f1, same.complete_match) == PERFECT
    forward, backward = bracket_f1([first], [second]), bracket_f1([second], [first])
    assert (forward.precision, forward.recall, forward.f1) == (backward.recall, backward.precision, backward.f1)


def test_importing_metrics_does_not_import_sacrebleu() -> None:
    code = "import sys, transduce.evaluation.metrics; print({'sacrebleu', 'torch'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
