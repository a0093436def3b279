"""How good translations and trees are: what sacrebleu and EVALB say of them, with all that affects a score beside it.

References are the lines of one file, or a list of such files' lines: many references for each sentence.
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

# Axes: N sentences, X bootstrap samples of them.

References = Sequence[str] | Sequence[Sequence[str]]

BLEU, CHRF, TER = "BLEU", "chrF++", "TER"
NAMES = (BLEU, CHRF, TER)
LOWER_IS_BETTER = frozenset({TER})
COMPOUND_SPLIT = "tokenised, compound-split BLEU"

TOKENISERS = ("13a", "none", "char", "intl", "zh")
"""Those of sacrebleu that need nothing more: "none" is for text that is tokenised already, "zh" for Chinese, "char" for
Japanese and other scripts without spaces."""

SEED = 12345
"""Of samples that sacrebleu does not draw: its own."""
TAIL = 40
"""A 95 % interval leaves out one sample in so many at either end."""


@dataclass(frozen=True)
class Score:
    name: str
    value: float
    signature: str
    interval: tuple[float, float] | None
    """Where 95 % of the bootstrap samples lie."""

    @property
    def lower_is_better(self) -> bool:
        return self.name in LOWER_IS_BETTER


@dataclass(frozen=True)
class Resampled:
    """A score, and the same on bootstrap samples of the sentences: of equally many sentences, the same samples."""

    name: str
    value: float
    samples: NDArray[np.float64]
    signature: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where 95 % of the samples lie."""
        ordered, left_out = np.sort(self.samples), len(self.samples) // TAIL
        return (float(ordered[left_out]), float(ordered[-1 - left_out])) if len(ordered) else None

    def less(self, other: Resampled) -> Resampled:
        """How far this is above another, sample by sample: what is hard for both then widens no interval."""
        assert self.signature == other.signature
        return Resampled(self.name, self.value - other.value, self.samples - other.samples, self.signature)


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same sentences."""

    name: str
    system: float
    other: float
    difference: float
    """`system` less `other`: of TER, above zero is worse."""
    p_value: float
    """How often chance alone gives such a difference, in either direction."""
    signature: str

    @property
    def system_is_better(self) -> bool:
        return self.difference < 0 if self.name in LOWER_IS_BETTER else self.difference > 0


@dataclass(frozen=True)
class LengthGroup:
    shortest: int
    longest: int | None
    """Both inclusive; None: no bound."""
    n_sentences: int
    bleu: Score
    chrf: Score


@dataclass(frozen=True)
class BracketScore:
    """In percent, all but the counts."""

    precision: float
    recall: float
    f1: float
    complete_match: float
    """Of the sentences that were scored."""
    n_sentences: int
    n_skipped: int
    """Of these, not scored: without words, or not the same words in both trees."""
    signature: str = "brackets:labelled|rules:EVALB,COLLINS.prm|sums:corpus"


def bleu(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a") -> Score:
    """As the command `sacrebleu` has it, which also warns of text that looks tokenised."""
    return _score(BLEU, _metric(BLEU, tokenise, force=False), hypotheses, references, n_bootstrap)


def chrf(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """chrF++: character n-grams, and words and their pairs."""
    return _score(CHRF, _metric(CHRF), hypotheses, references, n_bootstrap)


def ter(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """Edits a word of the reference, in percent: 0 is best."""
    return _score(TER, _metric(TER), hypotheses, references, n_bootstrap)


def resampled(
    name: str, hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a"
) -> Resampled:
    """One of `NAMES`, to be compared with that of others."""
    return _resampled(name, _metric(name, tokenise), hypotheses, references, n_bootstrap)


def resampled_mean(name: str, totals: Sequence[float], counts: Sequence[int], n_bootstrap: int = 1000) -> Resampled:
    """The sum of all totals over the sum of all counts, such as loss per token."""
    check_bootstrap(n_bootstrap)
    total_N, count_N = np.array(totals, dtype=np.float64), np.array(counts, dtype=np.float64)
    rows_XN = np.random.default_rng(SEED).choice(len(total_N), size=(n_bootstrap, len(total_N)))
    samples_X = total_N[rows_XN].sum(1) / count_N[rows_XN].sum(1)
    signature = f"bs:{n_bootstrap}|seed:{SEED}" if n_bootstrap else ""
    return Resampled(name, float(total_N.sum() / count_N.sum()), samples_X, signature)


def scores(
    hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000, tokenise: str = "13a"
) -> list[Score]:
    """`tokenise`: for BLEU, one of `TOKENISERS`."""
    own = bleu(hypotheses, references, n_bootstrap, tokenise)
    return [own, *(metric(hypotheses, references, n_bootstrap) for metric in (chrf, ter))]


def compound_split_bleu(hypotheses: Sequence[str], references: References, n_bootstrap: int = 1000) -> Score:
    """What papers on En-De reported before sacrebleu. For comparison with those alone: it is not their tokeniser.

    They took Moses', which we do not depend on; 13a comes nearest, since it too leaves hyphens between letters.
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
    """As tensor2tensor's get_ende_bleu.sh: "rich-text" becomes "rich ##AT##-##AT## text".

    A match takes the characters at its sides, so that the second hyphen of "a-b-c" stays. It takes them as bytes, as
    Perl read them: "a-ä-c" is split twice.
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
    """Whether two systems differ by more than chance: paired bootstrap resampling."""
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
    _, (theirs, ours) = columns.values()
    (signature,) = signatures.values()
    assert isinstance(ours, Result)
    assert isinstance(theirs, Result)
    assert ours.p_value is not None
    difference, p_value = float(ours.score - theirs.score), ours.p_value
    if difference == 0 and p_value <= 1 / (n_samples + 1):
        p_value = 1.0  # Not as sacrebleu, by which a system differs from itself with the least p-value there is.
    return Comparison(name, float(ours.score), float(theirs.score), difference, p_value, str(signature))


def sentence_scores(hypotheses: Sequence[str], references: References) -> list[float]:
    """chrF++ of each sentence. BLEU of a sentence is mostly zero, or smoothing."""
    sets = _reference_sets(hypotheses, references)
    metric = _metric(CHRF)
    return [float(metric.sentence_score(line, own).score) for line, *own in zip(hypotheses, *sets, strict=True)]


def exact_match(hypotheses: Sequence[str], references: References) -> float:
    """The share of translations that are a reference, but for blanks around it."""
    sets = _reference_sets(hypotheses, references)
    rows = zip(hypotheses, *sets, strict=True)
    return sum(line.strip() in [text.strip() for text in own] for line, *own in rows) / len(hypotheses)


def length_ratio(hypotheses: Sequence[str], references: References, tokenise: str = "13a") -> float:
    """Tokens of the translations to tokens of the references, as BLEU counts them for its brevity penalty."""
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
    """Scores of the sentences up to each bound and beyond the last. Groups without sentences are left out."""
    sets = _reference_sets(hypotheses, references)
    if len(lengths) != len(hypotheses):
        raise DataError(f"there are {len(hypotheses)} translations and {len(lengths)} lengths: give one for each")
    if list(bounds) != sorted(set(bounds)) or min(bounds, default=0) < 0:
        raise ConfigError(f"bounds of lengths must rise from 0 or more, got {tuple(bounds)}: sort them")
    groups, shortest = list[LengthGroup](), 0
    for longest in (*bounds, None):
        rows = [row for row, n in enumerate(lengths) if shortest <= n and (longest is None or n <= longest)]
        if rows:
            lines, own = [hypotheses[row] for row in rows], [[lines[row] for row in rows] for lines in sets]
            score_bleu = _score(BLEU, _metric(BLEU, tokenise), lines, own, n_bootstrap=0)
            groups.append(LengthGroup(shortest, longest, len(rows), score_bleu, chrf(lines, own, n_bootstrap=0)))
        shortest = 0 if longest is None else longest + 1
    return groups


def _metric(name: str, tokenise: str = "13a", force: bool = True) -> Metric:
    """Imported when used: sacrebleu takes a moment."""
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
    raise ConfigError(f"{name!r} is no metric that we know: choose from {', '.join(NAMES)}")


def check_tokeniser(tokenise: str) -> None:
    if tokenise not in TOKENISERS:
        raise ConfigError(f"--tokenise is {tokenise!r}, must be one of {', '.join(TOKENISERS)}: 13a is usual")


def check_bootstrap(n_bootstrap: int) -> None:
    if n_bootstrap != 0 and n_bootstrap < TAIL:
        raise ConfigError(
            f"n_bootstrap must be 0, for no interval, or at least {TAIL}, got {n_bootstrap}: 1000 is usual"
        )


def _score(name: str, metric: Metric, hypotheses: Sequence[str], references: References, n_bootstrap: int) -> Score:
    found = _resampled(name, metric, hypotheses, references, n_bootstrap)
    return Score(name, found.value, found.signature, found.interval)


def _resampled(
    name: str, metric: Metric, hypotheses: Sequence[str], references: References, n_bootstrap: int
) -> Resampled:
    """Price of the samples: memory for n_bootstrap times all statistics, 300 MB for chrF++ of 3000 sentences."""
    from sacrebleu.significance import _bootstrap_resample

    check_bootstrap(n_bootstrap)
    # The steps of `corpus_score`, which keeps of its samples only their mean and half the interval.
    stats = metric._extract_corpus_statistics(hypotheses, _reference_sets(hypotheses, references))
    value, samples = float(metric._aggregate_and_compute(stats).score), list[Any]()
    if n_bootstrap:
        metric.n_bootstrap = n_bootstrap
        metric.seed, samples = _bootstrap_resample(stats, metric, n_bootstrap)
    return Resampled(name, value, np.array([one.score for one in samples]), str(metric.get_signature()))


def _reference_sets(hypotheses: Sequence[str], references: References) -> list[Sequence[str]]:
    """One list of lines for each file of references, each as long as the translations."""
    assert not isinstance(hypotheses, str), "a list of lines"
    assert not isinstance(references, str), "a list of lines"
    if not len(hypotheses):
        raise DataError("there are 0 translations: give at least one line")
    several = len(references) > 0 and not isinstance(references[0], str)
    sets: list[Any] = list(references) if several else [references]
    for lines in sets:
        if len(lines) != len(hypotheses):
            have = f"there are {len(hypotheses)} translations and {len(lines)} references"
            raise DataError(f"{have}: give files of the same lines")
    return sets


DELETED = frozenset({"TOP", "-NONE-", ",", ":", "``", "''", "."})
SAME = {"PRT": "ADVP"}


def bracket_f1(gold: Sequence[Tree], predicted: Sequence[Tree]) -> BracketScore:
    """Labelled brackets that both trees have, by the rules of EVALB under COLLINS.prm.

    Punctuation is known by its tag, in either tree: give `repair` the tags. Only TOP is a root: `strip` first.
    """
    if not gold or len(gold) != len(predicted):
        raise DataError(f"there are {len(predicted)} trees and {len(gold)} gold trees: give one for each sentence")
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
            f"of {len(gold)} sentences no two trees have the same words: give trees with the treebank's tags"
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
    """The words that count, and the brackets over at least one of them. A word's tag is no bracket."""
    words, brackets = list[str](), Counter[tuple[str, int, int]]()

    def visit(node: Tree) -> None:
        if node.word is not None:
            if node.label not in DELETED:
                words.append(node.word)
            return
        start = len(words)
        for child in node.children:
            visit(child)
        label = re.split("[-=]", node.label, maxsplit=1)[0]  # EVALB's modify_label: brackets alone, tags stay whole
        if len(words) > start and label not in DELETED:
            brackets[SAME.get(label, label), start, len(words)] += 1

    visit(tree)
    return words, brackets
