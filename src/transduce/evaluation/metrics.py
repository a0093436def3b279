"""Scores of translations and trees by the rules of sacrebleu and EVALB, each with a signature of all its settings.

References are the lines of one file, or a list with the lines of several files: several references for each sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transduce.data.trees import Tree
from transduce.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

__all__ = ["Comparison", "Score", "bleu", "chrf", "paired", "ter"]

# Axes: N sentences, X bootstrap samples of them.

References = Sequence[str] | Sequence[Sequence[str]]

BLEU, CHRF, TER = "BLEU", "chrF++", "TER"
NAMES = (BLEU, CHRF, TER)
LOWER_IS_BETTER = frozenset({TER})
COMPOUND_SPLIT = "tokenised, compound-split BLEU"

TOKENISERS = ("13a", "none", "char", "intl", "zh")
"""The tokenisers of sacrebleu that need no other package: "none" is for tokenised text, "zh" for Chinese, "char" for
Japanese and other scripts without spaces."""

SEED = 12345
"""The default seed of sacrebleu, used for the samples that we draw too."""
TAIL = 40
"""A 95 % interval excludes 1 / 40 of the samples at each end."""


@dataclass(frozen=True)
class Score:
    """The score of a whole file.

    >>> from transduce.evaluation.metrics import ter
    >>> score = ter(["the cat sat on a mat"], ["the cat sat on the mat"], n_bootstrap=0)
    >>> print(score.name, round(score.value, 1), score.lower_is_better, score.interval)
    TER 16.7 True None
    """

    name: str
    value: float
    signature: str
    """Everything that affects the score. Only scores with equal signatures can be compared."""
    interval: tuple[float, float] | None
    """Contains 95 % of the bootstrap samples. None if none were drawn."""

    @property
    def lower_is_better(self) -> bool:
        return self.name in LOWER_IS_BETTER


@dataclass(frozen=True)
class ResampledScore:
    """A score of all sentences and of bootstrap samples. Scores of equally many sentences use the same samples."""

    name: str
    value: float
    samples: NDArray[np.float64]
    signature: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """Contains 95 % of the samples."""
        ordered, n_tail = np.sort(self.samples), len(self.samples) // TAIL
        return (float(ordered[n_tail]), float(ordered[-1 - n_tail])) if len(ordered) else None

    def minus(self, other: ResampledScore) -> ResampledScore:
        """The difference, sample by sample: sentences that are hard for both systems do not widen the interval."""
        assert self.signature == other.signature
        return ResampledScore(self.name, self.value - other.value, self.samples - other.samples, self.signature)


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same sentences.

    >>> from transduce.evaluation.metrics import paired
    >>> references = ["the cat sat on the mat", "it is raining"]
    >>> system, other = ["the cat sat on a mat", "it is raining"], ["a cat is on mat", "it rains"]
    >>> (comparison,) = paired(system, other, references, n_samples=100, names=["chrF++"])
    >>> print(round(comparison.difference, 1), comparison.p_value < 0.05, comparison.system_is_better)
    57.3 True True
    """

    name: str
    system: float
    other: float
    difference: float
    """`system` minus `other`. For TER, a positive difference is worse."""
    p_value: float
    """The probability of such a difference, in either direction, by chance alone."""
    signature: str

    @property
    def system_is_better(self) -> bool:
        return self.difference < 0 if self.name in LOWER_IS_BETTER else self.difference > 0


@dataclass(frozen=True)
class LengthGroup:
    shortest: int
    longest: int | None
    """Both bounds are inclusive. None: no upper bound."""
    n_sentences: int
    bleu: Score
    chrf: Score


@dataclass(frozen=True)
class BracketScore:
    """All values except the counts are in percent."""

    precision: float
    recall: float
    f1: float
    complete_match: float
    """The share of scored sentences whose brackets are all correct."""
    n_sentences: int
    n_skipped: int
    """Sentences that are not scored: trees without words, or with different words."""
    signature: str = "brackets:labelled|rules:EVALB,COLLINS.prm|sums:corpus"


def bleu(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a") -> Score:
    """The same value as the command `sacrebleu`. Like the command, it warns if the text looks tokenised.

    >>> from transduce.evaluation.metrics import bleu
    >>> score = bleu(["the cat sat on a mat"], ["the cat sat on the mat"], n_bootstrap=0)
    >>> print(round(score.value, 1), score.signature)
    53.7 nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0
    """
    return _score(BLEU, _metric(BLEU, tokenise, force=False), hypotheses, references, n_bootstrap)


def chrf(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """chrF++: n-grams of characters, and unigrams and bigrams of words.

    >>> from transduce.evaluation.metrics import chrf
    >>> print(round(chrf(["the cat sat on a mat"], ["the cat sat on the mat"], n_bootstrap=0).value, 1))
    67.4
    """
    return _score(CHRF, _metric(CHRF), hypotheses, references, n_bootstrap)


def ter(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """Translation edit rate: edits per word of the reference in percent. 0 is best.

    >>> from transduce.evaluation.metrics import ter
    >>> print(round(ter(["the cat sat on a mat"], ["the cat sat on the mat"], n_bootstrap=0).value, 1))
    16.7
    """
    return _score(TER, _metric(TER), hypotheses, references, n_bootstrap)


def resampled(
    name: str, hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a"
) -> ResampledScore:
    """The score `name` (one of `NAMES`) with its samples, to compare it with other systems."""
    return _resampled(name, _metric(name, tokenise), hypotheses, references, n_bootstrap)


def resampled_mean(
    name: str, totals: Sequence[float], counts: Sequence[int], n_bootstrap: int = 1000
) -> ResampledScore:
    """The sum of all totals divided by the sum of all counts, such as the loss per token."""
    check_bootstrap(n_bootstrap)
    total_N, count_N = np.array(totals, dtype=np.float64), np.array(counts, dtype=np.float64)
    rows_XN = np.random.default_rng(SEED).choice(len(total_N), size=(n_bootstrap, len(total_N)))
    samples_X = total_N[rows_XN].sum(1) / count_N[rows_XN].sum(1)
    signature = f"bs:{n_bootstrap}|seed:{SEED}" if n_bootstrap else ""
    return ResampledScore(name, float(total_N.sum() / count_N.sum()), samples_X, signature)


def scores(
    hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a"
) -> list[Score]:
    """BLEU, chrF++ and TER. `tokenise` (one of `TOKENISERS`) applies to BLEU only."""
    return [
        bleu(hypotheses, references, n_bootstrap, tokenise),
        chrf(hypotheses, references, n_bootstrap),
        ter(hypotheses, references, n_bootstrap),
    ]


def compound_split_bleu(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """BLEU as papers on English-German reported it before sacrebleu. Use it only to compare with those papers.

    It is an approximation: they used the tokeniser of Moses, which is not a dependency of this package. 13a is the most
    similar one, since it also keeps hyphens between letters.
    """
    from sacrebleu.metrics.bleu import BLEU as Bleu

    tokenise = Bleu(tokenize="13a")._preprocess_segment

    def split(lines: Sequence[str]) -> list[str]:
        return [split_compounds(tokenise(line)) for line in lines]

    sets = [split(lines) for lines in _reference_sets(hypotheses, references)]
    metric = Bleu(tokenize="none", smooth_method="none", force=True)
    metric.tokenizer_signature = "13a+compound-split"
    return _score(COMPOUND_SPLIT, metric, split(hypotheses), sets, n_bootstrap)


def split_compounds(line: str) -> str:
    """The same as get_ende_bleu.sh of tensor2tensor: "rich-text" becomes "rich ##AT##-##AT## text".

    A match consumes one byte on each side, as in Perl. The second hyphen of "a-b-c" therefore stays, but "a-ä-c" is
    split twice.
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", line.encode()).decode()


def paired(
    system: Sequence[str],
    other: Sequence[str],
    references: References,
    n_samples: int = 1000,
    names: Sequence[str] = NAMES,
    tokenise: str = "13a",
) -> list[Comparison]:
    """Tests by paired bootstrap resampling whether two systems differ by more than chance.

    >>> from transduce.evaluation.metrics import paired
    >>> references = ["the cat sat on the mat", "it is raining"]
    >>> system, other = ["the cat sat on a mat", "it is raining"], ["a cat is on mat", "it rains"]
    >>> for comparison in paired(system, other, references, n_samples=100):
    ...     print(comparison.name, round(comparison.system, 1), round(comparison.other, 1))
    BLEU 59.7 9.9
    chrF++ 78.9 21.6
    TER 11.1 55.6
    """
    if n_samples < 1:
        raise ConfigError(f"n_samples must be at least 1, got {n_samples}: 1000 is usual")
    sets = _reference_sets(system, references)
    _reference_sets(other, references)
    metrics = [_metric(name, tokenise) for name in names]
    return [_compare(name, metric, system, other, sets, n_samples) for name, metric in zip(names, metrics, strict=True)]


def _compare(
    name: str, metric: Metric, system: Sequence[str], other: Sequence[str], sets: list[Sequence[str]], n_samples: int
) -> Comparison:
    from sacrebleu.significance import PairedTest, Result

    systems = [("other", other), ("system", system)]
    test = PairedTest(systems, {name: metric}, sets, test_type="bs", n_samples=n_samples, n_jobs=1)
    signatures, columns = test()
    _, (other_result, system_result) = columns.values()
    (signature,) = signatures.values()
    assert isinstance(system_result, Result)
    assert isinstance(other_result, Result)
    assert system_result.p_value is not None
    difference, p_value = float(system_result.score - other_result.score), system_result.p_value
    if difference == 0 and p_value <= 1 / (n_samples + 1):
        p_value = 1.0  # Not as in sacrebleu, which gives the smallest possible p-value to two equal systems.
    return Comparison(name, float(system_result.score), float(other_result.score), difference, p_value, str(signature))


def sentence_scores(hypotheses: Sequence[str], references: References) -> list[float]:
    """chrF++ of each sentence. Not BLEU: without smoothing it would be zero for most sentences."""
    sets = _reference_sets(hypotheses, references)
    metric = _metric(CHRF)
    rows = zip(hypotheses, *sets, strict=True)
    return [float(metric.sentence_score(hypothesis, row_references).score) for hypothesis, *row_references in rows]


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """The share of translations that equal a reference, apart from white space at both ends."""
    sets = _reference_sets(hypotheses, references)
    rows = zip(hypotheses, *sets, strict=True)
    n_equal = sum(
        hypothesis.strip() in [reference.strip() for reference in row_references]
        for hypothesis, *row_references in rows
    )
    return n_equal / len(hypotheses)


def length_ratio(hypotheses: Sequence[str], references: References, tokenise: str = "13a") -> float:
    """The number of tokens in translations divided by that in references, as in the brevity penalty of BLEU."""
    result = _metric(BLEU, tokenise).corpus_score(hypotheses, _reference_sets(hypotheses, references))
    if not result.ref_len:
        raise DataError(f"{len(hypotheses)} references have 0 words: give references with text")
    return float(result.sys_len / result.ref_len)


def by_length(
    hypotheses: Sequence[str],
    references: References,
    lengths: Sequence[int],
    bounds: Sequence[int] = (10, 20, 30, 50),
    tokenise: str = "13a",
) -> list[LengthGroup]:
    """Scores of groups of sentences: up to each bound, and beyond the last. Omits groups without sentences."""
    sets = _reference_sets(hypotheses, references)
    if len(lengths) != len(hypotheses):
        raise DataError(
            f"there are {len(hypotheses)} translations and {len(lengths)} lengths: give one length per translation"
        )
    if list(bounds) != sorted(set(bounds)) or min(bounds, default=0) < 0:
        raise ConfigError(f"bounds of lengths must be at least 0 and increase, got {tuple(bounds)}: sort them")
    groups, shortest = list[LengthGroup](), 0
    for longest in (*bounds, None):
        rows = [row for row, n in enumerate(lengths) if shortest <= n and (longest is None or n <= longest)]
        if rows:
            group_hypotheses = [hypotheses[row] for row in rows]
            group_references = [[lines[row] for row in rows] for lines in sets]
            group_bleu = _score(BLEU, _metric(BLEU, tokenise), group_hypotheses, group_references, n_bootstrap=0)
            group_chrf = chrf(group_hypotheses, group_references, n_bootstrap=0)
            groups.append(LengthGroup(shortest, longest, len(rows), group_bleu, group_chrf))
        shortest = 0 if longest is None else longest + 1
    return groups


def _metric(name: str, tokenise: str = "13a", force: bool = True) -> Metric:
    # Imported here: importing sacrebleu takes time, and few commands need it.
    from sacrebleu.metrics.bleu import BLEU as Bleu
    from sacrebleu.metrics.chrf import CHRF as Chrf
    from sacrebleu.metrics.ter import TER as Ter

    if name == BLEU:
        check_tokeniser(tokenise)
        return Bleu(tokenize=tokenise, force=force or tokenise == "none")
    if name == CHRF:
        return Chrf(word_order=2)
    if name == TER:
        return Ter()
    raise ConfigError(f"there is no metric {name!r}: choose from {', '.join(NAMES)}")


def check_tokeniser(tokenise: str) -> None:
    if tokenise not in TOKENISERS:
        raise ConfigError(f"--tokenise is {tokenise!r}, must be one of {', '.join(TOKENISERS)}: 13a is usual")


def check_bootstrap(n_bootstrap: int) -> None:
    if n_bootstrap != 0 and n_bootstrap < TAIL:
        raise ConfigError(f"n_bootstrap must be 0 (no interval) or at least {TAIL}, got {n_bootstrap}: 1000 is usual")


def _score(name: str, metric: Metric, hypotheses: Sequence[str], references: References, n_bootstrap: int) -> Score:
    score = _resampled(name, metric, hypotheses, references, n_bootstrap)
    return Score(name, score.value, score.signature, score.interval)


def _resampled(
    name: str, metric: Metric, hypotheses: Sequence[str], references: References, n_bootstrap: int
) -> ResampledScore:
    """The samples need memory for n_bootstrap times all statistics: 300 MB for chrF++ of 3000 sentences."""
    from sacrebleu.significance import _bootstrap_resample

    check_bootstrap(n_bootstrap)
    # The steps of `corpus_score`, which itself returns only the mean of its samples and half the interval.
    stats = metric._extract_corpus_statistics(hypotheses, _reference_sets(hypotheses, references))
    value, samples = float(metric._aggregate_and_compute(stats).score), list[Any]()
    if n_bootstrap:
        metric.n_bootstrap = n_bootstrap
        metric.seed, samples = _bootstrap_resample(stats, metric, n_bootstrap)
    return ResampledScore(name, value, np.array([sample.score for sample in samples]), str(metric.get_signature()))


def _reference_sets(hypotheses: Sequence[str], references: References) -> list[Sequence[str]]:
    """One list of lines per file of references. Raises if a list is not as long as the translations."""
    assert not isinstance(hypotheses, str), "a list of lines"
    assert not isinstance(references, str), "a list of lines"
    if not len(hypotheses):
        raise DataError("there are 0 translations: give at least one line")
    several = len(references) > 0 and not isinstance(references[0], str)
    sets: list[Any] = list(references) if several else [references]
    for lines in sets:
        if len(lines) != len(hypotheses):
            counts = f"there are {len(hypotheses)} translations and {len(lines)} references"
            raise DataError(f"{counts}: give files with the same number of lines")
    return sets


DELETED = frozenset({"TOP", "-NONE-", ",", ":", "``", "''", "."})
SAME = {"PRT": "ADVP"}


def bracket_f1(gold: Sequence[Tree], predicted: Sequence[Tree]) -> BracketScore:
    """Precision, recall and F1 of labelled brackets, by the rules of EVALB with COLLINS.prm.

    The tag of a word in its tree decides whether it is punctuation: give the tags to `repair`. Only TOP is ignored as a
    root: remove other roots with `strip` first.
    """
    if not gold or len(gold) != len(predicted):
        raise DataError(f"there are {len(predicted)} trees and {len(gold)} gold trees: give one per sentence in each")
    n_gold = n_predicted = n_matched = n_complete = n_skipped = 0
    for gold_tree, predicted_tree in zip(gold, predicted, strict=True):
        gold_words, gold_brackets = _brackets(gold_tree)
        words, brackets = _brackets(predicted_tree)
        if not words or words != gold_words:
            n_skipped += 1
            continue
        n_gold += gold_brackets.total()
        n_predicted += brackets.total()
        n_matched += (gold_brackets & brackets).total()
        n_complete += gold_brackets == brackets
    n_scored = len(gold) - n_skipped
    if not n_scored:
        raise DataError(
            f"none of {len(gold)} sentences has the same words in both trees: give trees with the tags of the treebank"
        )
    return BracketScore(
        precision=100 * n_matched / n_predicted if n_predicted else 0.0,
        recall=100 * n_matched / n_gold if n_gold else 0.0,
        f1=200 * n_matched / (n_gold + n_predicted) if n_matched else 0.0,
        complete_match=100 * n_complete / n_scored,
        n_sentences=len(gold),
        n_skipped=n_skipped,
    )


def _brackets(tree: Tree) -> tuple[list[str], Counter[tuple[str, int, int]]]:
    """The words except punctuation and traces, and the brackets over at least one of them. Tags are not brackets."""
    words, brackets = list[str](), Counter[tuple[str, int, int]]()

    def visit(node: Tree) -> None:
        if node.word is not None:
            if node.label not in DELETED:
                words.append(node.word)
            return
        start = len(words)
        for child in node.children:
            visit(child)
        label = re.split("[-=]", node.label, maxsplit=1)[0]  # as EVALB's modify_label: brackets only, not tags
        if len(words) > start and label not in DELETED:
            brackets[SAME.get(label, label), start, len(words)] += 1

    visit(tree)
    return words, brackets
