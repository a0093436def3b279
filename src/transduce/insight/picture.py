"""Heads as pictures for papers, by matplotlib."""

# Axes: L layers, H heads, Q rows that ask, M positions that are looked at.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transduce.data.subword import SPACE_MARK
from transduce.errors import ConfigError
from transduce.insight.attention import AttentionRecord
from transduce.insight.drawing import drawn, new_figure, write_figure
from transduce.insight.heads import KINDS, Head, Kind, most_telling

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_A_ROW = 4
INCHES_A_TOKEN, MOST_INCHES, LEAST_INCHES = 0.24, 16.0, 1.6
MOST_LABELS = 80


def choose_heads(record: AttentionRecord, kind: str, layer: int | None, head: int | None) -> list[Head]:
    """`layer` and `head` are counted from 1. Neither: the most telling one of the memory, else the last layer."""
    if layer is None and kind == "memory":
        return [record.heads[most_telling(record.heads)]]
    n_layers, n_heads = record.weights[cast(Kind, kind)].shape[:2]
    for name, number, most in (("layer", layer, n_layers), ("head", head, n_heads)):
        if number is not None and not 1 <= number <= most:
            raise ConfigError(f"--{name} is {number}, this model has {most}: choose from 1 to {most}")
    chosen = (layer or n_layers) - 1
    of_layer = [one for one in record.heads if (one.kind, one.layer) == (kind, chosen)]
    return of_layer if head is None else [of_layer[head - 1]]


def draw(record: AttentionRecord, heads: Sequence[Head], path: Path, form: str) -> None:
    write_figure(drawn(lambda: _figure(record, heads)), path, form)


def _figure(record: AttentionRecord, heads: Sequence[Head]) -> Figure:
    kind = heads[0].kind
    rows = record.source if kind == "encoder" else record.target
    columns = record.target if kind == "decoder" else record.source
    n_columns = min(MOST_IN_A_ROW, len(heads))
    n_rows = math.ceil(len(heads) / n_columns)
    width, height = (
        min(MOST_INCHES, n * max(LEAST_INCHES, INCHES_A_TOKEN * len(pieces)) + 1)
        for n, pieces in ((n_columns, columns), (n_rows, rows))
    )
    figure = new_figure(width, height + 0.4 * n_rows)
    figure.suptitle(f"{KINDS[kind]}, layer {heads[0].layer + 1}", fontsize=10)
    for number, head in enumerate(heads, 1):
        axes = figure.add_subplot(n_rows, n_columns, number)
        axes.imshow(record.weights[kind][head.layer, head.head], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"head {head.head + 1}", fontsize=9)
        if len(columns) <= MOST_LABELS and len(rows) <= MOST_LABELS:
            # Tokens are text, whatever they hold: dollar signs are no formulas.
            axes.set_xticks(range(len(columns)), map(_shown, columns), rotation=90, fontsize=8, parse_math=False)
            axes.set_yticks(range(len(rows)), map(_shown, rows), fontsize=8, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def _shown(piece: str) -> str:
    return piece.removeprefix(SPACE_MARK) or "\u2423"
