"""Scores are sacrebleu's and EVALB's: to the last digit where the program can be asked, and by hand where not."""

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
    """What the program `sacrebleu` prints."""
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
def test_values_intervals_and_signatures_are_those_of_the_command_line(
    tmp_path: Path, references: list[list[str]]
) -> None:
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
def test_bleu_by_any_tokeniser_is_that_of_the_command_line(tmp_path: Path, tokenise: str) -> None:
    options = "--format", "json", "--tokenize", tokenise
    printed = json.loads(command_line(tmp_path, [HYPOTHESES], [REFERENCES], *options))[0]
    ours = bleu(HYPOTHESES, REFERENCES, n_bootstrap=0, tokenise=tokenise)
    assert (ours.value, ours.signature) == (printed["score"], printed["signature"])
    assert scores(HYPOTHESES, REFERENCES, 0, tokenise)[0] == ours
    assert paired(HYPOTHESES, OTHERS, REFERENCES, 10, ["BLEU"], tokenise)[0].system == ours.value


def test_an_unknown_tokeniser_is_refused() -> None:
    with pytest.raises(ConfigError, match="'moses', must be one of 13a, none"):
        bleu(HYPOTHESES, REFERENCES, tokenise="moses")


def test_without_bootstrap_there_is_no_interval_and_the_signature_says_so() -> None:
    without, with_interval = (bleu(HYPOTHESES, REFERENCES, n_bootstrap=n) for n in (0, 40))
    assert without.interval is None
    assert with_interval.interval is not None
    assert without.value == with_interval.value
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", without.signature)
    assert "bs:40|seed:12345" in with_interval.signature


def test_scores_repeat_and_are_written_as_json() -> None:
    score = chrf(HYPOTHESES, REFERENCES, n_bootstrap=50)
    assert chrf(HYPOTHESES, REFERENCES, n_bootstrap=50) == score
    assert score.interval is not None
    assert json.loads(json.dumps(asdict(score))) == {**asdict(score), "interval": list(score.interval)}


def test_one_list_of_references_is_a_set_of_one() -> None:
    assert scores(HYPOTHESES, REFERENCES, 0) == scores(HYPOTHESES, [REFERENCES], 0)


def test_an_interval_narrows_with_more_sentences() -> None:
    def width(n_lines: int) -> float:
        interval = bleu(*corpus(seed=2, n_lines=n_lines), n_bootstrap=200).interval
        assert interval is not None
        return interval[1] - interval[0]

    assert width(400) < width(25) / 2


def test_ter_alone_is_better_when_lower() -> None:
    assert [score.lower_is_better for score in scores(HYPOTHESES, REFERENCES, 0)] == [False, False, True]
    assert ter(REFERENCES, REFERENCES, 0).value == 0 < ter(HYPOTHESES, REFERENCES, 0).value


def test_a_word_counts_no_more_often_than_in_the_reference() -> None:
    # 2 of 7 words. No pair, triple or four matches: smoothing halves one match for each, then again, and again.
    value = bleu(["the the the the the the the"], ["the cat is on the mat"], 0).value
    assert value == pytest.approx(100 * (2 / 7 * 1 / (2 * 6) * 1 / (4 * 5) * 1 / (8 * 4)) ** (1 / 4), rel=1e-12)


def test_translations_too_short_pay_for_it_and_too_long_do_not() -> None:
    # Every n-gram matches, so that of BLEU the brevity penalty is left: 4 words for 6, then 10 for 12 in all.
    assert bleu(["the cat is on"], ["the cat is on the mat"], 0).value == pytest.approx(100 * math.exp(1 - 6 / 4))
    both = bleu(["the cat is on", "a b c d e f"], ["the cat is on the mat", "a b c d e f"], 0).value
    assert both == pytest.approx(100 * math.exp(1 - 12 / 10))
    # 6 of 7, 5 of 6, 4 of 5 and 3 of 4 match: their product is 3 / 7, and nothing else is taken off.
    assert bleu(["a b c d e f g"], ["a b c d e f"], 0).value == pytest.approx(100 * (3 / 7) ** (1 / 4))


def test_edits_are_counted_and_a_move_is_one_edit() -> None:
    assert ter(["a b c"], ["a b c d"], 0).value == pytest.approx(100 * 1 / 4)
    assert ter(["d e a b c"], ["a b c d e"], 0).value == pytest.approx(100 * 1 / 5)


tokens = st.sampled_from(["ab,", "The", "cat-s", "x.y", "ü", "12", "-"])
sentences = st.lists(tokens, min_size=4, max_size=12).map(" ".join)


@settings(deadline=None)  # the first example imports sacrebleu
@given(st.lists(sentences, min_size=1, max_size=4))
def test_a_text_is_its_own_perfect_translation(lines: list[str]) -> None:
    best = {"BLEU": 100, "chrF++": 100, "TER": 0}
    for score in scores(lines, lines, 0):
        assert score.value == pytest.approx(best[score.name])
    assert compound_split_bleu(lines, lines, 0).value == pytest.approx(100)
    assert sentence_scores(lines, lines) == pytest.approx([100] * len(lines))
    assert exact_match(lines, lines) == 1
    assert length_ratio(lines, lines) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), st.randoms())
def test_the_order_of_sentences_changes_no_score(pairs: list[tuple[str, str]], rng: random.Random) -> None:
    shuffled = rng.sample(pairs, len(pairs))

    def of(rows: list[tuple[str, str]]) -> list[float]:
        sides = [row[0] for row in rows], [row[1] for row in rows]
        return [*(score.value for score in scores(*sides, 0)), exact_match(*sides), length_ratio(*sides)]

    assert of(shuffled) == pytest.approx(of(pairs))


Metric = Callable[[list[str], Any], object]


@pytest.mark.parametrize(
    "metric",
    [bleu, chrf, ter, scores, compound_split_bleu, sentence_scores, exact_match, length_ratio],
    ids=lambda metric: metric.__name__,
)
def test_lines_that_do_not_pair_are_refused(metric: Metric) -> None:
    message = "there are 3 translations and 4 references: give files of the same lines"
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
    with pytest.raises(ConfigError, match=f"0, for no interval, or at least 40, got {n_bootstrap}: 1000 is usual"):
        bleu(HYPOTHESES, REFERENCES, n_bootstrap)


def test_comparisons_are_those_of_the_command_line(tmp_path: Path) -> None:
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
    assert len(set(p_values)) == 3, "so that one cannot stand for another"
    assert all(comparison.difference == comparison.system - comparison.other for comparison in ours)


def test_a_clear_difference_is_told_from_chance_and_from_the_other_side() -> None:
    worse, _ = corpus(seed=1, error_rate=0.8)
    there, back = (paired(*pair, REFERENCES, n_samples=200) for pair in ((HYPOTHESES, worse), (worse, HYPOTHESES)))
    assert [comparison.system_is_better for comparison in there] == [True] * 3
    assert [comparison.system_is_better for comparison in back] == [False] * 3
    assert [comparison.difference > 0 for comparison in there] == [True, True, False]
    assert all(comparison.p_value < 0.05 for comparison in there + back)


def test_a_system_does_not_differ_from_itself() -> None:
    for comparison in paired(HYPOTHESES, list(HYPOTHESES), REFERENCES, n_samples=50):
        assert (comparison.difference, comparison.p_value) == (0, 1)
        assert not comparison.system_is_better
    small = [line.lower() for line in HYPOTHESES]  # the same to TER, which ignores case
    (same,) = paired(HYPOTHESES, small, REFERENCES, n_samples=50, names=["TER"])
    assert (same.difference, same.p_value) == (0, 1)


def test_text_that_looks_tokenised_is_warned_of_once(
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


def test_comparisons_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="there are 1 translations and 2 references"):
        paired(["a", "b"], ["a"], ["a", "b"])
    with pytest.raises(ConfigError, match="'bleu' is no metric that we know: choose from BLEU, chrF"):
        paired(["a"], ["a"], ["a"], names=["bleu"])
    with pytest.raises(ConfigError, match="n_samples must be at least 1, got 0"):
        paired(["a"], ["a"], ["a"], n_samples=0)


def test_sentences_are_scored_each_for_itself() -> None:
    each = sentence_scores(HYPOTHESES, [REFERENCES, ALTERNATIVES])
    alone = [
        chrf([line], [[one], [two]], 0).value
        for line, one, two in zip(HYPOTHESES, REFERENCES, ALTERNATIVES, strict=True)
    ]
    assert each == alone
    good, bad = sentence_scores(["a black cat", "quite wrong"], ["a black cat", "ziemlich falsch"])
    assert good > bad


def test_exact_matches_are_those_of_any_reference_but_for_blanks() -> None:
    assert exact_match(["a ", "b", "c", "D"], ["a", "b.", "c", "d"]) == 1 / 2
    assert exact_match(["a ", "b", "c", "D"], [["a", "b.", "c", "d"], ["", "b", "", ""]]) == 3 / 4


def test_lengths_are_compared_in_tokens_of_bleu() -> None:
    assert length_ratio(["a, b"], ["a b c d"]) == 3 / 4  # the comma is one
    with pytest.raises(DataError, match="2 references have 0 words: give references with text"):
        length_ratio(["a", "b"], ["", " "])


def test_groups_by_length_are_scored_each_for_itself() -> None:
    lengths = [0, 10, 11, 20, 51, 1000]
    hypotheses, references = HYPOTHESES[:6], [REFERENCES[:6], ALTERNATIVES[:6]]
    groups = by_length(hypotheses, references, lengths)
    bounds = [(group.shortest, group.longest, group.n_sentences) for group in groups]
    assert bounds == [(0, 10, 2), (11, 20, 2), (51, None, 2)], "no sentence has 21 to 50"
    for place, group in enumerate(groups):
        own = slice(2 * place, 2 * place + 2)
        inside = hypotheses[own], [lines[own] for lines in references]
        assert [group.bleu, group.chrf] == [bleu(*inside, 0), chrf(*inside, 0)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=60), st.sets(st.integers(0, 60), max_size=5))
def test_each_sentence_is_in_the_one_group_of_its_length(lengths: list[int], bounds: set[int]) -> None:
    texts = ["x"] * len(lengths)
    groups = by_length(texts, texts, lengths, sorted(bounds))
    assert sum(group.n_sentences for group in groups) == len(lengths)
    for group in groups:
        longest = math.inf if group.longest is None else group.longest
        assert group.n_sentences == sum(group.shortest <= n <= longest for n in lengths)


def test_groups_that_cannot_be_are_refused() -> None:
    with pytest.raises(DataError, match="there are 2 translations and 1 lengths: give one for each"):
        by_length(["a", "b"], ["a", "b"], [1])
    for bounds in [(20, 10), (10, 10), (-1, 5)]:
        with pytest.raises(ConfigError, match=f"must rise from 0 or more, got {re.escape(str(bounds))}: sort them"):
            by_length(["a"], ["a"], [1], bounds)


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # b is taken by the first match
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("a-ä-c", "a ##AT##-##AT## ä ##AT##-##AT## c"),  # ä is two bytes: one for either match
        ("a - b -c d-", "a - b -c d-"),
        ("x--y", "x ##AT##-##AT## -y"),
    ],
)
def test_compounds_are_split_as_perl_did(line: str, split: str) -> None:
    """The right side is what perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g' prints."""
    assert split_compounds(line) == split


def test_compound_split_bleu_is_bleu_of_the_parts_without_smoothing() -> None:
    # Seven parts, of which the second is wrong: 6 of 7, 4 of 6 pairs, 3 of 5 triples and 2 of 4 fours are without it.
    score = compound_split_bleu(["the rich-text tool-kit"], ["the poor-text tool-kit"], 0)
    assert score.value == pytest.approx(100 * (6 / 7 * 4 / 6 * 3 / 5 * 2 / 4) ** (1 / 4))
    assert score.name == "tokenised, compound-split BLEU"
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a+compound-split|smooth:none|version:")
    no_pair = ["the the the the"], ["the cat is here"]
    assert compound_split_bleu(*no_pair, 0).value == 0 < bleu(*no_pair, 0).value
    assert compound_split_bleu(["a b c d."], ["a b c d ."], 0).value == pytest.approx(100), "it is tokenised first"
    assert compound_split_bleu(["a rich - text x"], ["a rich-text x"], 0).value < 90, "a dash is no hyphen"


def test_scores_carry_an_interval_whatever_the_metric() -> None:
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
        # S, NP, VP and NP, of which one has the wrong label.
        pytest.param(GOLD, GOLD.replace("(VP", "(PP"), (75, 75, 75, 0), id="a wrong label"),
        # Without the last NP three are left, and all are right: 2 * 3 / (3 + 4).
        pytest.param(
            GOLD,
            "(TOP (S (NP (NNP John)) (VP (VBZ has) (DT a) (NN dog)) (. .)))",
            (100, 75, 600 / 7, 0),
            id="a bracket too few",
        ),
        # NP over all of it three times, of which two find a partner.
        pytest.param(
            "(TOP (NP (NP (NN a) (NN b))))",
            "(TOP (NP (NP (NP (NN a) (NN b)))))",
            (100 * 2 / 3, 100, 80, 0),
            id="one bracket too often",
        ),
        # S over NP and NP over S are the same brackets.
        pytest.param("(TOP (S (NP (NN a))))", "(TOP (NP (S (NN a))))", PERFECT, id="a chain in another order"),
        # The mark inside the VP, in front of all, or in a bracket of its own, which has no words then.
        pytest.param(
            GOLD,
            "(TOP (PRN (. .)) (S (NP (NNP John) (, ,)) (VP (VBZ has) (NP (`` ``) (DT a) (NN dog) ('' '')) (: ;))))",
            PERFECT,
            id="punctuation elsewhere",
        ),
        # Brackets in text are words.
        pytest.param(
            "(TOP (S (NP (NN a) (-LRB- -LRB-)) (VP (VB b))))",
            "(TOP (S (NP (NN a)) (VP (-LRB- -LRB-) (VB b))))",
            (100 / 3, 100 / 3, 100 / 3, 0),
            id="round brackets count",
        ),
        pytest.param("(TOP (VP (VB a) (PRT (RP up))))", "(TOP (VP (VB a) (ADVP (RB up))))", PERFECT, id="PRT is ADVP"),
        pytest.param("(TOP (VP (VB a) (PRT (RP up))))", "(TOP (VP (VB a) (PP (RP up))))", (50, 50, 50, 0), id="not PP"),
        pytest.param(GOLD, GOLD.replace("NN ", "VB ").replace("DT", "XX"), PERFECT, id="tags are no brackets"),
        pytest.param(
            "(TOP (S-IMP (NP-SBJ-1 (-NONE- *)) (NP=2 (NN a)) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))))",
            "(S (NP (NN a)))",
            PERFECT,
            id="no root, functional tags or traces",
        ),
        pytest.param("(TOP (S (NN a)))", "(TOP (NN a))", (0, 0, 0, 0), id="no bracket at all"),
    ],
)
def test_brackets_worked_out_by_hand(gold: str, predicted: str, expected: tuple[float, ...]) -> None:
    assert f1_of(gold, predicted) == pytest.approx(expected, rel=1e-12)


def test_brackets_are_summed_over_sentences_before_they_are_divided() -> None:
    # 4 of 4, and none of 1 and 2: a mean of sentences would give 50.
    gold = [parse(GOLD), parse("(TOP (NP (NN a) (NN b)))")]
    predicted = [parse(GOLD), parse("(TOP (VP (PP (NN a) (NN b))))")]
    result = bracket_f1(gold, predicted)
    assert (result.precision, result.recall, result.f1) == pytest.approx((100 * 4 / 6, 100 * 4 / 5, 100 * 8 / 11))
    assert (result.complete_match, result.n_sentences, result.n_skipped) == (50, 2, 0)


@pytest.mark.parametrize(
    ("gold", "predicted"),
    [
        ("(TOP (NP (NN a) (NN b)))", "(TOP (NP (NN a)))"),  # a word too few
        ("(TOP (NP (NN a) (NN b)))", "(TOP (NP (NN a) (NN c)))"),  # another word
        ("(TOP (NP (NN a) (. .)))", "(TOP (NP (NN a) (XX .)))"),  # a mark that its tag does not tell
        ("(TOP (NP (. .)))", "(TOP (NP (. .)))"),  # no words
        ("(TOP)", "(TOP)"),
    ],
)
def test_sentences_of_other_words_are_skipped_and_counted(gold: str, predicted: str) -> None:
    result = bracket_f1([parse(GOLD), parse(gold)], [parse(GOLD), parse(predicted)])
    assert (result.precision, result.recall, result.f1, result.complete_match) == PERFECT
    assert (result.n_sentences, result.n_skipped) == (2, 1)
    with pytest.raises(DataError, match="of 1 sentences no two trees have the same words: give trees with"):
        bracket_f1([parse(gold)], [parse(predicted)])


def test_trees_that_do_not_pair_are_refused() -> None:
    with pytest.raises(DataError, match="there are 1 trees and 2 gold trees: give one for each sentence"):
        bracket_f1([parse(GOLD)] * 2, [parse(GOLD)])
    with pytest.raises(DataError, match="there are 0 trees and 0 gold trees"):
        bracket_f1([], [])


labels = st.sampled_from(["S", "NP", "NP-SBJ", "NP=2", "ADVP", "PRT", "TOP"])


def grow(tokens: list[tuple[str, str]]) -> st.SearchStrategy[Tree]:
    """Trees over exactly these words: a list of them, in which stretches are put in brackets again and again."""

    def bracket(nodes: list[Tree], cuts: list[tuple[int, int, str]]) -> Tree:
        for start, length, label in cuts:
            start %= len(nodes)
            nodes = [*nodes[:start], Tree(label, tuple(nodes[start : start + length])), *nodes[start + length :]]
        return Tree(ROOT, tuple(nodes))

    cuts = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), labels), min_size=1, max_size=9)
    return cuts.map(lambda found: bracket([Tree(tag, word=word) for tag, word in tokens], found))


words = st.lists(st.sampled_from([("NN", "a"), ("-NONE-", "0"), (".", "."), (",", ",")]), min_size=1, max_size=8)
two_trees = words.flatmap(lambda tokens: st.tuples(grow(tokens), grow(tokens)))


def by_evalb(gold: Tree, predicted: Tree) -> tuple[int, int, int]:
    """Brackets that match, of gold, and predicted: read from the text and crossed off one by one, as EVALB does."""

    def read(tree: Tree) -> list[tuple[str, int, int]]:
        found, stack, n_words = list[tuple[str, int, int]](), list[tuple[str, int]](), 0
        for token in re.findall(r"\(\S+ [^\s()]+\)|\(\S+|\)", str(tree)):
            if token == ")":
                label, start = stack.pop()
                label = re.sub("[-=].*", "", label)
                if start < n_words and label != "TOP":
                    found.append((label, start, n_words))
            elif token.endswith(")"):
                n_words += token.startswith("(NN ")
            else:
                stack.append((token[1:], n_words))
        return found

    ours, theirs = read(predicted), read(gold)
    n_ours, n_theirs, n_matched = len(ours), len(theirs), 0
    for label, *span in theirs:
        for candidate in ours:
            alike = label == candidate[0] or {label, candidate[0]} == {"ADVP", "PRT"}
            if alike and span == list(candidate[1:]):
                ours.remove(candidate)
                n_matched += 1
                break
    return n_matched, n_theirs, n_ours


@given(two_trees)
def test_brackets_equal_those_crossed_off_one_by_one(pair: tuple[Tree, Tree]) -> None:
    gold, predicted = pair
    assume("a" in gold.words())
    n_matched, n_gold, n_predicted = by_evalb(gold, predicted)
    result = bracket_f1([gold], [predicted])
    assert result.recall == pytest.approx(100 * n_matched / n_gold if n_gold else 0)
    assert result.precision == pytest.approx(100 * n_matched / n_predicted if n_predicted else 0)
    assert result.f1 == pytest.approx(200 * n_matched / (n_gold + n_predicted) if n_matched else 0)
    assert (result.complete_match == 100) == (n_matched == n_gold == n_predicted)


@given(two_trees)
def test_a_tree_is_its_own_perfect_prediction_and_f1_has_no_sides(pair: tuple[Tree, Tree]) -> None:
    one, two = (Tree(ROOT, (Tree("S", tree.children),)) for tree in pair)
    assume("a" in one.words())
    itself = bracket_f1([one], [one])
    assert (itself.precision, itself.recall, itself.f1, itself.complete_match) == PERFECT
    there, back = bracket_f1([one], [two]), bracket_f1([two], [one])
    assert (there.precision, there.recall, there.f1) == (back.recall, back.precision, back.f1)


def test_importing_metrics_leaves_sacrebleu_alone() -> None:
    code = "import sys, transduce.evaluation.metrics; print({'sacrebleu', 'torch'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
