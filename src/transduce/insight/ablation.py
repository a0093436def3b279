"""Measures what each part of a model contributes: removes the part without retraining and scores the translations.

A head is removed by zeroing its rows of W_O, an attention by zeroing all of W_O and its bias, a layer by deleting it
from its stack. The original model does not change; the reduced model shares all unchanged weights with it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from transduce import __version__
from transduce.config import ModelConfig
from transduce.evaluation.evaluate import pair_losses, read_references, read_sources, sha256_of
from transduce.evaluation.metrics import BLEU, CHRF, ResampledScore, check_bootstrap, resampled, resampled_mean
from transduce.model import Transformer
from transduce.translation.translator import Translator

LOSS = "loss per token"
Stack = Literal["encoder", "decoder"]
Attention = Literal["self_attention", "memory_attention"]
ATTENTIONS: dict[Stack, tuple[Attention, ...]] = {
    "encoder": ("self_attention",),
    "decoder": ("self_attention", "memory_attention"),
}


class Part(NamedTuple):
    stack: Stack
    layer: int
    attention: Attention | None = None
    """None: the whole layer."""
    head: int | None = None
    """None: all heads."""

    @property
    def name(self) -> str:
        """The name in tables. Layers and heads are counted from 1."""
        attention = "" if self.attention is None else f", {self.attention.replace('_', '-')}"
        head = "" if self.head is None else f", head {self.head + 1}"
        return f"{self.stack} layer {self.layer + 1}{attention}{head}".replace("memory-", "memory ")


def removable_parts(config: ModelConfig) -> list[Part]:
    """Each head, each attention and each layer. The only layer of a stack is not removable."""
    parts = []
    for stack, n_layers in _stacks(config):
        for layer in range(n_layers):
            for attention in ATTENTIONS[stack]:
                parts += [Part(stack, layer, attention, head) for head in range(config.n_heads)]
                parts.append(Part(stack, layer, attention))
            if n_layers > 1:
                parts.append(Part(stack, layer))
    return parts


def _stacks(config: ModelConfig) -> tuple[tuple[Stack, int], ...]:
    return ("encoder", config.n_encoder_layers), ("decoder", config.n_decoder_layers)


def without_part(model: Transformer, part: Part) -> Transformer:
    """A copy of the model that lacks the part. Both share all other weights, so neither may be trained."""
    # deepcopy does not copy objects that are in its memo, so the weights are shared.
    reduced = copy.deepcopy(model, {id(W): W for W in model.parameters()})
    layers: Any = getattr(reduced, part.stack)
    if part.attention is None:
        del layers[part.layer]
        n_layers: dict[str, Any] = {f"n_{part.stack}_layers": len(layers)}
        reduced.config = replace(model.config, **n_layers)
        return reduced
    W_O = getattr(layers[part.layer], part.attention).W_O
    W, d_v = W_O.W.detach().clone(), model.config.d_v
    if part.head is None:
        W.zero_()
        W_O.b = None if W_O.b is None else nn.Parameter(torch.zeros_like(W_O.b), requires_grad=False)
    else:
        W[part.head * d_v : (part.head + 1) * d_v] = 0
    W_O.W = nn.Parameter(W, requires_grad=False)
    return reduced


class Change(NamedTuple):
    """The change of a score after removing a part. Worse is below zero for BLEU and chrF++, above zero for the loss."""

    value: float
    interval: tuple[float, float] | None
    """Contains 95 % of the paired bootstrap samples."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


class Removal(NamedTuple):
    part: Part
    changes: dict[str, Change]


@dataclass(frozen=True)
class Ablation:
    n_sentences: int
    n_without_loss: int
    """Pairs longer than the model was trained on. The loss does not include them."""
    whole: dict[str, ResampledScore]
    """Scores of the complete model."""
    removals: list[Removal]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        whole = {
            name: {"value": score.value, "interval": score.interval, "signature": score.signature}
            for name, score in self.whole.items()
        }
        parts = [
            {**part._asdict(), "changes": {name: change._asdict() for name, change in changes.items()}}
            for part, changes in self.removals
        ]
        return {
            "n_sentences": self.n_sentences,
            "n_without_loss": self.n_without_loss,
            "seconds": round(self.seconds, 1),
            "whole": whole,
            "parts": parts,
        }


def ablate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    *,
    to: str | None = None,
    n_bootstrap: int = 1000,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> Ablation:
    """Translates and scores all sources with the complete model, then once more for each removed part."""
    check_bootstrap(n_bootstrap)
    began, parts = time.monotonic(), removable_parts(translator.config.model)

    def report(n_done: int) -> None:
        progress("removing one part at a time", n_done, len(parts) + 1)

    report(0)
    whole, n_without_loss = _scores(translator, sources, references, to, n_bootstrap)
    removals = []
    for n_done, part in enumerate(parts, 1):
        report(n_done)
        reduced = _with_model(without_part(translator.model, part), translator)
        scores, _ = _scores(reduced, sources, references, to, n_bootstrap)
        differences = {name: score.minus(whole[name]) for name, score in scores.items()}
        changes = {name: Change(difference.value, difference.interval) for name, difference in differences.items()}
        removals.append(Removal(part, changes))
    report(len(parts) + 1)
    return Ablation(len(sources), n_without_loss, whole, removals, time.monotonic() - began)


def _scores(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None, n_bootstrap: int
) -> tuple[dict[str, ResampledScore], int]:
    """The scores by name, and the number of pairs that have no loss."""
    hypotheses = [translation.text for translation in translator.translate(sources, to)]
    scores = {name: resampled(name, hypotheses, references, n_bootstrap) for name in (BLEU, CHRF)}
    losses = [loss for loss in pair_losses(translator, sources, references, to) if loss is not None]
    if losses:
        totals, counts = zip(*losses, strict=True)
        scores[LOSS] = resampled_mean(LOSS, totals, counts, n_bootstrap)
    return scores, len(sources) - len(losses)


def _with_model(model: Transformer, translator: Translator) -> Translator:
    return Translator(
        model,
        replace(translator.config, model=model.config),
        translator.subwords,
        translator.origin,
        settings=translator.settings,
        batch_size=translator.batch_size,
        precision=translator.precision,
    )


def ablate_files(
    translator: Translator,
    source: Path,
    reference: Path,
    *,
    n_sentences: int | None = None,
    to: str | None = None,
    n_bootstrap: int = 1000,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> tuple[Ablation, dict[str, Any]]:
    """Ablation on the first `n_sentences` lines of two files, and a passport that records the data and settings."""
    references = read_references(reference)
    sources = read_sources(source, reference, references)
    sources, references = sources[:n_sentences], references[:n_sentences]
    ablation = ablate(translator, sources, references, to=to, n_bootstrap=n_bootstrap, progress=progress)
    passport = {
        "files": [source.name, reference.name],
        "source": sha256_of(sources),
        "reference": sha256_of(references),
        "to": to,
        "decode": asdict(translator.settings),
        "device": str(translator.device),
        "n_threads": torch.get_num_threads(),
        "version": __version__,
    }
    return ablation, passport


class Grid(NamedTuple):
    """Parts as a table: one row per layer, one column per head. None: the part does not exist."""

    title: str
    rows: list[str]
    columns: list[str]
    parts: list[list[Part | None]]


def grids(config: ModelConfig) -> list[Grid]:
    removable, tables = set(removable_parts(config)), []

    def cell(part: Part) -> Part | None:
        return part if part in removable else None

    for stack, n_layers in _stacks(config):
        heads: list[int | None] = [*range(config.n_heads), None]
        rows = [f"layer {layer + 1}" for layer in range(n_layers)]
        columns = [*(str(head + 1) for head in range(config.n_heads)), "all"]
        for attention in ATTENTIONS[stack]:
            title = "memory attention" if attention == "memory_attention" else f"{stack} self-attention"
            parts = [[cell(Part(stack, layer, attention, head)) for head in heads] for layer in range(n_layers)]
            tables.append(Grid(title, rows, columns, parts))
    max_layers = max(n_layers for _, n_layers in _stacks(config))
    layers = [[cell(Part(stack, layer)) for stack, _ in _stacks(config)] for layer in range(max_layers)]
    rows = [f"layer {layer + 1}" for layer in range(max_layers)]
    tables.append(Grid("whole layers", rows, ["encoder", "decoder"], layers))
    return tables
