"""How good translations are: scores with their passports, and where the worst of them are."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from transduce import __version__
from transduce.checkpoint import CARD
from transduce.data.batches import make_batch
from transduce.data.corpora import read_lines
from transduce.data.trees import parse
from transduce.errors import DataError
from transduce.folders import write_whole
from transduce.metrics import (
    BracketScore,
    Comparison,
    LengthGroup,
    Score,
    bracket_f1,
    by_length,
    compound_split_bleu,
    exact_match,
    length_ratio,
    paired,
    scores,
    sentence_scores,
)
from transduce.translate import Translation, Translator

N_WORST = 5
BATCH = 32


@dataclass(frozen=True)
class Line:
    source: str
    reference: str
    hypothesis: str
    chrf: float
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    n_sentences: int
    scores: list[Score]
    length_ratio: float
    exact_match: float
    perplexity: float | None
    """Per token of the references, as the model's own subwords divide them. None where there is no model."""
    flags: dict[str, int]
    """How many translations are less than they should be, and in what way."""
    by_length: list[LengthGroup]
    """By words of the source."""
    worst: list[Line]
    comparison: list[Comparison]
    lines: list[Line]

    def to_json(self, with_lines: bool = True) -> dict[str, Any]:
        values = asdict(self)
        return values if with_lines else {name: value for name, value in values.items() if name != "lines"}


def evaluate(
    sources: Sequence[str],
    references: Sequence[str],
    translations: Sequence[Translation],
    *,
    other: Sequence[str] | None = None,
    perplexity: float | None = None,
    n_bootstrap: int = 1000,
    with_compound_split: bool = False,
) -> Evaluation:
    """`other`: translations of the same by someone else, to compare with."""
    hypotheses = [translation.text for translation in translations]
    found = scores(hypotheses, references, n_bootstrap)
    if with_compound_split:
        found.append(compound_split_bleu(hypotheses, references))
    chrf = sentence_scores(hypotheses, references)
    lines = [
        Line(source, reference, translation.text, value, translation.flags)
        for source, reference, translation, value in zip(sources, references, translations, chrf, strict=True)
    ]
    flags: dict[str, int] = {}
    for translation in translations:
        for flag in translation.flags:
            flags[flag] = flags.get(flag, 0) + 1
    return Evaluation(
        n_sentences=len(lines),
        scores=found,
        length_ratio=length_ratio(hypotheses, references),
        exact_match=exact_match(hypotheses, references),
        perplexity=perplexity,
        flags=flags,
        by_length=by_length(hypotheses, references, [len(source.split()) for source in sources]),
        worst=sorted(lines, key=lambda line: line.chrf)[:N_WORST],
        comparison=paired(hypotheses, other, references) if other is not None else [],
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
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Of a model folder or a file of translations. The second part says what was scored, and how."""
    references = read_text(reference)
    sources = read_text(source) if source is not None else [""] * len(references)
    _same_number(source or reference, sources, reference, references)
    passport = {
        "reference": sha256_of(references),
        "source": sha256_of(sources),
        "files": [str(source), str(reference)],
    }

    def translations_of(path: Path) -> tuple[list[Translation], Translator | None]:
        if path.is_file():
            lines = read_text(path)
            _same_number(path, lines, reference, references)
            return [Translation(line, 0.0, 0.0) for line in lines], None
        if source is None:
            raise DataError(f"{path} is a model, and there is nothing to translate: add --source FILE")
        translator = load(path)
        found = []
        for translation in translator.stream(sources, to):
            found.append(translation)
            progress(f"translating by {path}", len(found), len(sources))
        return found, translator

    translations, translator = translations_of(model)
    perplexity, decode = None, None
    if translator is not None:
        perplexity = perplexity_of(translator, sources, references, to)
        decode = asdict(translator.settings)
        passport |= {"device": str(translator.device), "dtype": str(next(translator.model.parameters()).dtype)}
    other = [translation.text for translation in translations_of(against)[0]] if against is not None else None
    progress("scoring", 0, None)
    evaluation = evaluate(
        sources, references, translations, other=other, perplexity=perplexity, n_bootstrap=n_bootstrap,
        with_compound_split=with_compound_split,
    )  # fmt: skip
    return evaluation, passport | {"model": model.name, "against": against.name if against else None, "decode": decode}


def evaluate_trees(predicted: Path, gold: Path) -> BracketScore:
    both = [[parse(line) for line in read_text(path)] for path in (gold, predicted)]
    _same_number(predicted, both[1], gold, both[0])
    return bracket_f1(*both)


def read_text(path: Path) -> list[str]:
    """Lines as they are: the contract is that line i is line i."""
    lines = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is no UTF-8: mend the line") from None
    return lines


def _same_number(one: Path, lines: Sequence[Any], other: Path, others: Sequence[Any]) -> None:
    if len(lines) != len(others):
        raise DataError(
            f"{one} has {len(lines):,} lines, {other} has {len(others):,}: give files whose lines belong together"
        )


def sha256_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


@torch.no_grad()
def perplexity_of(translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None) -> float:
    """Of the references, given the sources: e to the mean loss of a token, end marks counted, without smoothing."""
    config, tag = translator.config.model, translator.tag_for(to)
    pairs = [
        ([*tag, *source], target)
        for source, target in zip(*(translator.subwords.encode(side) for side in (sources, references)), strict=True)
    ]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    total, n_tokens = 0.0, 0
    for some in _some(pairs):
        batch = make_batch(some, config)
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(translator.device) for ids in batch[:3])
        logits_BTV = translator.model(source_BS, target_in_BT).logits_BTV.float()
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), target_out_BT.flatten(), ignore_index=config.pad_id, reduction="sum"
        )
        total, n_tokens = total + float(loss), n_tokens + batch.n_target_tokens
    return math.exp(min(total / n_tokens, 700.0))


def _some(pairs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for first in range(0, len(pairs), BATCH):
        yield pairs[first : first + BATCH]


def add_to_card(folder: Path, evaluation: Evaluation, passport: dict[str, Any]) -> bool:
    """False where the folder cannot be written, which is no fault of the scores."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"scores": []}
        known = [entry for entry in card["scores"] if not _is_same(entry["passport"], passport)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise DataError(f"{path} cannot be read: remove it to begin another") from None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"passport": passport | {"when": when, "version": __version__}, **evaluation.to_json(with_lines=False)}
    try:
        write_whole(path, json.dumps({"scores": [*known, entry]}, indent=2, ensure_ascii=False) + "\n")
    except DataError:
        return False
    return True


def _is_same(known: dict[str, Any], new: dict[str, Any]) -> bool:
    """The same data by the same search: the older score gives way."""
    return all(known.get(name) == new[name] for name in ("source", "reference", "decode"))
