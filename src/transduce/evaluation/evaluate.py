"""How good translations are: scores with their passports, and where the worst of them are."""

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
from transduce.data.batches import make_batch, within_tokens
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
from transduce.files import write_whole
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
    """Of one reference."""

    total: float
    n_tokens: int
    """Its end mark counted."""


@dataclass(frozen=True)
class Evaluation:
    n_sentences: int
    scores: list[Score]
    length_ratio: float
    exact_match: float
    perplexity: float | None
    """Per token of the references, as the model's own subwords divide them. None where there is no model."""
    n_without_perplexity: int
    """Sentences longer than the model was trained on, which do not count for it."""
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
    """`other`: translations of the same by someone else, to compare with. `perplexity`: as `perplexity_of` gives it."""
    hypotheses = [translation.text for translation in translations]
    found = scores(hypotheses, references, n_bootstrap, tokenise)
    if with_compound_split:
        found.append(compound_split_bleu(hypotheses, references, n_bootstrap))
    chrf, lengths = sentence_scores(hypotheses, references), [len(source.split()) for source in sources or []]
    lines = [
        Line(source, reference, translation.text, value, translation.flags)
        for source, reference, translation, value in zip(
            sources or [""] * len(references), references, translations, chrf, strict=True
        )
    ]
    return Evaluation(
        n_sentences=len(lines),
        scores=found,
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
    """Of a model folder or a file of translations. The second part says what was scored, and how."""
    check_bootstrap(n_bootstrap)
    check_tokeniser(tokenise)
    references = read_text(reference)
    sources = read_text(source) if source is not None else None
    if not references:
        raise DataError(f"{reference} is empty: give a file of lines")
    if source is not None and sources is not None:
        check_same_number(source, sources, reference, references)

    loaded: dict[Path, Translator] = {}

    def translations_of(path: Path) -> list[Translation]:
        if not path.is_dir():
            lines = read_text(path)
            check_same_number(path, lines, reference, references)
            return [Translation(line, 0.0, 0.0) for line in lines]
        if sources is None:
            raise DataError(f"{path} is a model, and there is nothing to translate: add --source FILE")
        found = []
        loaded[path] = load(path)
        for translation in loaded[path].stream(sources, to):
            found.append(translation)
            progress(f"translating by {path}", len(found), len(sources))
        return found

    # The one that is no model first: if it is wrong, better to hear of it before the long part.
    other = [t.text for t in translations_of(against)] if against is not None and not against.is_dir() else None
    translations = translations_of(model)
    if against is not None and other is None:
        other = [t.text for t in translations_of(against)]
    progress("scoring", 0, None)
    names = [path.name if path is not None else None for path in (source, reference)]  # not where they lie here
    passport: dict[str, Any] = {
        "model": model.name,
        "against": against.name if against else None,
        "to": to,
        "files": names,
        "source": sha256_of(sources) if sources is not None else None,
        "reference": sha256_of(references),
        "decode": None,
        "device": None,
        "dtype": None,
    }
    perplexity: tuple[float | None, int] = (None, 0)
    if (translator := loaded.get(model)) is not None and sources is not None:
        perplexity = perplexity_of(translator, sources, references, to)
        dtype = next(translator.model.parameters()).dtype
        named = str(dtype) if translator.precision == "float32" else translator.precision
        passport |= {"decode": asdict(translator.settings), "device": str(translator.device), "dtype": named}
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


def evaluate_trees(predicted: Path, gold: Path) -> BracketScore:
    def read(path: Path) -> list[Tree]:
        trees = []
        for number, line in enumerate(read_text(path), 1):
            try:
                trees.append(parse(line))
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
        return trees

    of_gold, of_predicted = read(gold), read(predicted)
    check_same_number(predicted, of_predicted, gold, of_gold)
    return bracket_f1(of_gold, of_predicted)


def read_text(path: Path) -> list[str]:
    """Lines as they are: the contract is that line i is line i."""
    lines = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is no UTF-8: mend the line") from None
    return lines


def check_same_number(one: Path, lines: Sequence[Any], other: Path, others: Sequence[Any]) -> None:
    if len(lines) != len(others):
        raise DataError(
            f"{one} has {len(lines):,} lines, {other} has {len(others):,}: give files whose lines belong together"
        )


def sha256_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def perplexity_of(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None
) -> tuple[float | None, int]:
    """Of the references, given the sources: e to the mean loss of a token, end marks counted, without smoothing.

    Pairs with a side longer than the model was trained on are left out; their number comes second.
    """
    losses = [loss for loss in losses_of(translator, sources, references, to) if loss is not None]
    n_tokens = sum(loss.n_tokens for loss in losses)
    mean = sum(loss.total for loss in losses) / max(n_tokens, 1)
    return (math.exp(min(mean, 700.0)) if n_tokens else None), len(sources) - len(losses)


@torch.no_grad()
def losses_of(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None
) -> list[Loss | None]:
    """Of each pair; None where a side is longer than the model was trained on."""
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

    found: list[Loss | None] = [None] * len(sources)
    for some in within_tokens(sorted(pairs, key=length), length, BATCH_TOKENS):
        batch = make_batch([(source, target) for _, source, target in some], config)
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids).to(translator.device) for ids in batch[:3])
        logits_BTV = translator.model(source_BS, target_in_BT).logits_BTV.float()
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), target_out_BT.flatten(), ignore_index=config.pad_id, reduction="none"
        ).view_as(target_out_BT)
        for (row, _, target), total in zip(some, loss_BT.double().sum(1).tolist(), strict=True):
            found[row] = Loss(total, len(target) + 1)
    return found


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
    return all(known.get(name) == new.get(name) for name in ("source", "reference", "to", "decode", "device", "dtype"))
