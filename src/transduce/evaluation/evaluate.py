"""Evaluates translations: scores, a passport that records how they were measured, and the worst lines."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from transduce import __version__
from transduce.data.batches import batches_within_tokens, make_batch
from transduce.data.corpora import read_lines
from transduce.data.trees import Tree, parse
from transduce.errors import DataError
from transduce.evaluation.metrics import (
    BracketScore,
    Comparison,
    LengthGroup,
    Score,
    bracket_f1,
    by_length,
    check_bootstrap,
    check_tokeniser,
    compound_split_bleu,
    exact_match,
    length_ratio,
    paired,
    scores,
    sentence_scores,
)
from transduce.files import write_atomically
from transduce.model_folder.format import CARD
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

N_WORST = 5
BATCH_TOKENS = 2000


@dataclass(frozen=True)
class Line:
    source: str
    reference: str
    hypothesis: str
    chrf: float
    flags: tuple[str, ...] = ()


class Loss(NamedTuple):
    """The loss of one reference, given its source."""

    total: float
    n_tokens: int
    """Includes the end mark."""


@dataclass(frozen=True)
class Evaluation:
    n_sentences: int
    scores: list[Score]
    length_ratio: float
    exact_match: float
    perplexity: float | None
    """Per subword of the references. None if the translations come from a file."""
    n_without_perplexity: int
    """Sentences longer than the model was trained on. The perplexity does not include them."""
    flags: dict[str, int]
    """The number of translations with each flag."""
    by_length: list[LengthGroup]
    """Grouped by the number of words in the source."""
    worst: list[Line]
    comparison: list[Comparison]
    lines: list[Line]

    def to_json(self, with_lines: bool = True) -> dict[str, Any]:
        values = asdict(self)
        return values if with_lines else {name: value for name, value in values.items() if name != "lines"}


def evaluate(
    sources: Sequence[str] | None,
    references: Sequence[str],
    translations: Sequence[Translation],
    *,
    other: Sequence[str] | None = None,
    perplexity: tuple[float | None, int] = (None, 0),
    n_bootstrap: int = 1000,
    with_compound_split: bool = False,
    tokenise: str = "13a",
) -> Evaluation:
    """`other`: translations of the same sources by another system. `perplexity`: the result of `perplexity_of`."""
    hypotheses = [translation.text for translation in translations]
    all_scores = scores(hypotheses, references, n_bootstrap, tokenise)
    if with_compound_split:
        all_scores.append(compound_split_bleu(hypotheses, references, n_bootstrap))
    chrf, lengths = sentence_scores(hypotheses, references), [len(source.split()) for source in sources or []]
    lines = [
        Line(source, reference, translation.text, value, translation.flags)
        for source, reference, translation, value in zip(
            sources or [""] * len(references), references, translations, chrf, strict=True
        )
    ]
    return Evaluation(
        n_sentences=len(lines),
        scores=all_scores,
        length_ratio=length_ratio(hypotheses, references, tokenise),
        exact_match=exact_match(hypotheses, references),
        perplexity=perplexity[0],
        n_without_perplexity=perplexity[1],
        flags=dict(Counter(flag for translation in translations for flag in translation.flags)),
        by_length=by_length(hypotheses, references, lengths, tokenise=tokenise) if sources else [],
        worst=sorted(lines, key=lambda line: line.chrf)[:N_WORST],
        comparison=[]
        if other is None
        else paired(hypotheses, other, references, n_bootstrap or 1000, tokenise=tokenise),
        lines=lines,
    )


def evaluate_files(
    model: Path,
    source: Path | None,
    reference: Path,
    load: Callable[[Path], Translator],
    *,
    against: Path | None = None,
    to: str | None = None,
    n_bootstrap: int = 1000,
    with_compound_split: bool = False,
    tokenise: str = "13a",
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Evaluates a model folder or a file of translations, and returns a passport that records data and settings."""
    check_bootstrap(n_bootstrap)
    check_tokeniser(tokenise)
    references = read_references(reference)
    sources = None if source is None else read_sources(source, reference, references)
    loaded: dict[Path, Translator] = {}

    def translations_of(path: Path) -> list[Translation]:
        if not path.is_dir():
            lines = read_text(path)
            check_same_length(path, lines, reference, references)
            return [Translation(line, 0.0, 0.0) for line in lines]
        if sources is None:
            raise DataError(f"{path} is a model and needs sentences to translate: add --source FILE")
        translations = []
        loaded[path] = load(path)
        for translation in loaded[path].stream(sources, to):
            translations.append(translation)
            progress(f"translating with {path}", len(translations), len(sources))
        return translations

    # Read a file before translating with a model: errors in it should appear before the slow part.
    other = [t.text for t in translations_of(against)] if against is not None and not against.is_dir() else None
    translations = translations_of(model)
    if against is not None and other is None:
        other = [t.text for t in translations_of(against)]
    progress("scoring", 0, None)
    passport: dict[str, Any] = {
        # Names without folders: the folders of this machine mean nothing to readers of the card.
        "model": model.name,
        "against": against.name if against else None,
        "to": to,
        "files": [path.name if path is not None else None for path in (source, reference)],
        "source": sha256_of(sources) if sources is not None else None,
        "reference": sha256_of(references),
        **_search_passport(loaded.get(model)),
    }
    perplexity: tuple[float | None, int] = (None, 0)
    if (translator := loaded.get(model)) is not None and sources is not None:
        perplexity = perplexity_of(translator, sources, references, to)
    evaluation = evaluate(
        sources,
        references,
        translations,
        other=other,
        perplexity=perplexity,
        n_bootstrap=n_bootstrap,
        with_compound_split=with_compound_split,
        tokenise=tokenise,
    )
    return evaluation, passport


def _search_passport(translator: Translator | None) -> dict[str, Any]:
    """All None for translations from a file."""
    if translator is None:
        return {"decode": None, "device": None, "dtype": None}
    dtype = next(translator.model.parameters()).dtype
    dtype_name = str(dtype) if translator.precision == "float32" else translator.precision
    return {"decode": asdict(translator.settings), "device": str(translator.device), "dtype": dtype_name}


def evaluate_trees(predicted: Path, gold: Path) -> BracketScore:
    def read(path: Path) -> list[Tree]:
        trees = []
        for number, line in enumerate(read_text(path), 1):
            try:
                trees.append(parse(line))
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
        return trees

    gold_trees, predicted_trees = read(gold), read(predicted)
    check_same_length(predicted, predicted_trees, gold, gold_trees)
    return bracket_f1(gold_trees, predicted_trees)


def read_text(path: Path) -> list[str]:
    """All lines unchanged, blank ones too: line i of one file belongs to line i of the other."""
    lines = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is not valid UTF-8: correct the line") from None
    return lines


def read_references(reference: Path) -> list[str]:
    references = read_text(reference)
    if not references:
        raise DataError(f"{reference} is empty: give a file with one sentence per line")
    return references


def read_sources(source: Path, reference: Path, references: Sequence[str]) -> list[str]:
    sources = read_text(source)
    check_same_length(source, sources, reference, references)
    return sources


def check_same_length(path: Path, lines: Sequence[Any], other_path: Path, other_lines: Sequence[Any]) -> None:
    if len(lines) != len(other_lines):
        counts = f"{path} has {len(lines):,} lines, {other_path} has {len(other_lines):,}"
        raise DataError(f"{counts}: give files with corresponding lines")


def sha256_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def perplexity_of(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None
) -> tuple[float | None, int]:
    """The perplexity of the references, given the sources, and the number of pairs that it excludes.

    It is e to the mean loss per token, with end marks and without label smoothing. Pairs with a side longer than the
    model was trained on are excluded.
    """
    losses = [loss for loss in pair_losses(translator, sources, references, to) if loss is not None]
    n_tokens = sum(loss.n_tokens for loss in losses)
    mean = sum(loss.total for loss in losses) / max(n_tokens, 1)
    return (math.exp(min(mean, 700.0)) if n_tokens else None), len(sources) - len(losses)


@torch.no_grad()
def pair_losses(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None
) -> list[Loss | None]:
    """The loss of each pair; None if a side is longer than the model was trained on."""
    config, tag = translator.config.model, translator.tag_for(to)
    encoded = [translator.subwords.encode(side) for side in (sources, references)]
    longest_target = translator.longest_target
    pairs = [
        (row, [*tag, *source], target)
        for row, (source, target) in enumerate(zip(*encoded, strict=True))
        if not (translator.longest_source is not None and len(source) > translator.longest_source)
        and not (longest_target is not None and len(target) > longest_target)
    ]

    def length(pair: tuple[int, list[int], list[int]]) -> int:
        return max(len(pair[1]), len(pair[2])) + 1

    losses: list[Loss | None] = [None] * len(sources)
    for items in batches_within_tokens(sorted(pairs, key=length), length, BATCH_TOKENS):
        batch = make_batch([(source, target) for _, source, target in items], config)
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(translator.device) for ids in batch[:3])
        logits_BTV = translator.model(source_BS, target_in_BT).logits_BTV.float()
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), target_out_BT.flatten(), ignore_index=config.pad_id, reduction="none"
        ).view_as(target_out_BT)
        for (row, _, target), total in zip(items, loss_BT.double().sum(1).tolist(), strict=True):
            losses[row] = Loss(total, len(target) + 1)
    return losses


def add_to_card(folder: Path, evaluation: Evaluation, passport: dict[str, Any]) -> bool:
    """Returns False if the folder is read-only: the scores are valid without the card."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"scores": []}
        kept = [entry for entry in card["scores"] if not _is_same_measurement(entry["passport"], passport)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged: remove it, and the next evaluation writes a new one") from None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"passport": passport | {"when": when, "version": __version__}, **evaluation.to_json(with_lines=False)}
    try:
        write_atomically(path, json.dumps({"scores": [*kept, entry]}, indent=2, ensure_ascii=False) + "\n")
    except DataError:
        return False
    return True


def _is_same_measurement(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether data and settings are equal, so that the new score replaces the old one."""
    return all(old.get(name) == new.get(name) for name in ("source", "reference", "to", "decode", "device", "dtype"))
