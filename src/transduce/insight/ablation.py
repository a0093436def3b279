"""What each part of a model is worth: it is taken out, nothing is trained again, and the scores tell.

A head is taken out by zeros in its rows of W_O, an attention by zeros in all of W_O and its bias, a layer by leaving it
out of its stack. The model itself stays as it is; what stays the same is shared with it.
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
from transduce.errors import DataError
from transduce.evaluation.evaluate import check_same_number, losses_of, read_text, sha256_of
from transduce.evaluation.metrics import BLEU, CHRF, Resampled, check_bootstrap, resampled, resampled_mean
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
        """For people, who count from 1."""
        attention = "" if self.attention is None else f", {self.attention.replace('_', '-')}"
        head = "" if self.head is None else f", head {self.head + 1}"
        return f"{self.stack} layer {self.layer + 1}{attention}{head}".replace("memory-", "memory ")


def parts_of(config: ModelConfig) -> list[Part]:
    """Each head, each attention, each layer; but no stack is left without any layer."""
    found = []
    for stack, n_layers in _stacks(config):
        for layer in range(n_layers):
            for attention in ATTENTIONS[stack]:
                found += [Part(stack, layer, attention, head) for head in range(config.n_heads)]
                found.append(Part(stack, layer, attention))
            if n_layers > 1:
                found.append(Part(stack, layer))
    return found


def _stacks(config: ModelConfig) -> tuple[tuple[Stack, int], ...]:
    return ("encoder", config.n_encoder_layers), ("decoder", config.n_decoder_layers)


def without(model: Transformer, part: Part) -> Transformer:
    """Another model that lacks the part. It shares all other weights, so neither may be trained."""
    # deepcopy takes what is in its memo for copied already.
    found = copy.deepcopy(model, {id(W): W for W in model.parameters()})
    layers: Any = getattr(found, part.stack)
    if part.attention is None:
        del layers[part.layer]
        fewer: dict[str, Any] = {f"n_{part.stack}_layers": len(layers)}
        found.config = replace(model.config, **fewer)
        return found
    W_O = getattr(layers[part.layer], part.attention).W_O
    W, d_v = W_O.W.detach().clone(), model.config.d_v
    if part.head is None:
        W.zero_()
        W_O.b = None if W_O.b is None else nn.Parameter(torch.zeros_like(W_O.b), requires_grad=False)
    else:
        W[part.head * d_v : (part.head + 1) * d_v] = 0
    W_O.W = nn.Parameter(W, requires_grad=False)
    return found


class Change(NamedTuple):
    """Of a score when a part is taken out: of BLEU and chrF++ below zero is worse, of the loss above."""

    value: float
    interval: tuple[float, float] | None
    """Where 95 % of the paired bootstrap samples lie."""

    @property
    def is_sure(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


class Removal(NamedTuple):
    part: Part
    changes: dict[str, Change]


@dataclass(frozen=True)
class Ablation:
    n_sentences: int
    n_without_loss: int
    """Pairs longer than the model was trained on, which do not count for it."""
    whole: dict[str, Resampled]
    """Scores of the model with all its parts."""
    removals: list[Removal]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        whole = {
            name: {"value": score.value, "interval": score.interval, "signature": score.signature}
            for name, score in self.whole.items()
        }
        parts = [
            {**part._asdict(), "changes": {name: one._asdict() for name, one in changes.items()}}
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
    """Translates all sources once for each part, and scores what comes of it."""
    check_bootstrap(n_bootstrap)
    began, parts = time.monotonic(), parts_of(translator.config.model)

    def told(done: int) -> None:
        progress("taking out one part after another", done, len(parts) + 1)

    told(0)
    whole, n_without_loss = _scores(translator, sources, references, to, n_bootstrap)
    removals = []
    for n, part in enumerate(parts, 1):
        told(n)
        rest = _translator_of(without(translator.model, part), translator)
        scores, _ = _scores(rest, sources, references, to, n_bootstrap)
        less = {name: score.less(whole[name]) for name, score in scores.items()}
        removals.append(Removal(part, {name: Change(one.value, one.interval) for name, one in less.items()}))
    told(len(parts) + 1)
    return Ablation(len(sources), n_without_loss, whole, removals, time.monotonic() - began)


def _scores(
    translator: Translator, sources: Sequence[str], references: Sequence[str], to: str | None, n_bootstrap: int
) -> tuple[dict[str, Resampled], int]:
    """And how many pairs do not count for the loss."""
    hypotheses = [translation.text for translation in translator.translate(sources, to)]
    found = {name: resampled(name, hypotheses, references, n_bootstrap) for name in (BLEU, CHRF)}
    losses = [loss for loss in losses_of(translator, sources, references, to) if loss is not None]
    if losses:
        totals, counts = zip(*losses, strict=True)
        found[LOSS] = resampled_mean(LOSS, totals, counts, n_bootstrap)
    return found, len(sources) - len(losses)


def _translator_of(model: Transformer, like: Translator) -> Translator:
    return Translator(
        model,
        replace(like.config, model=model.config),
        like.subwords,
        like.origin,
        settings=like.settings,
        batch_size=like.batch_size,
        precision=like.precision,
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
    """On the first so many lines of two files. The second part says what was measured, and how."""
    sources, references = read_text(source), read_text(reference)
    if not references:
        raise DataError(f"{reference} is empty: give a file of lines")
    check_same_number(source, sources, reference, references)
    sources, references = sources[:n_sentences], references[:n_sentences]
    found = ablate(translator, sources, references, to=to, n_bootstrap=n_bootstrap, progress=progress)
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
    return found, passport


class Grid(NamedTuple):
    """Removals as rows of layers and columns of heads, for people to look at. None: there is no such part."""

    title: str
    rows: list[str]
    columns: list[str]
    parts: list[list[Part | None]]


def grids(config: ModelConfig) -> list[Grid]:
    known, found = set(parts_of(config)), []

    def cell(part: Part) -> Part | None:
        return part if part in known else None

    for stack, n_layers in _stacks(config):
        heads: list[int | None] = [*range(config.n_heads), None]
        rows = [f"layer {layer + 1}" for layer in range(n_layers)]
        columns = [*(str(head + 1) for head in range(config.n_heads)), "all"]
        for attention in ATTENTIONS[stack]:
            title = "memory attention" if attention == "memory_attention" else f"{stack} self-attention"
            parts = [[cell(Part(stack, layer, attention, head)) for head in heads] for layer in range(n_layers)]
            found.append(Grid(title, rows, columns, parts))
    n_most = max(n for _, n in _stacks(config))
    layers = [[cell(Part(stack, layer)) for stack, _ in _stacks(config)] for layer in range(n_most)]
    rows = [f"layer {layer + 1}" for layer in range(n_most)]
    found.append(Grid("whole layers", rows, ["encoder", "decoder"], layers))
    return found
