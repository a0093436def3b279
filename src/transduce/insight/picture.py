"""Heat maps of heads for papers, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transduce.data.subword import SPACE_MARK
from transduce.errors import ConfigError
from transduce.insight.attention import AttentionRecord
from transduce.insight.drawing import draw_in_style, new_figure, write_figure
from transduce.insight.heads import KINDS, Head, Kind, clearest_head

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_HEADS_PER_ROW = 4
INCHES_PER_TOKEN, MAX_INCHES, MIN_INCHES = 0.24, 16.0, 1.6
MAX_LABELS = 80


def choose_heads(record: AttentionRecord, kind: str, layer: int | None, head: int | None) -> list[Head]:
    """`layer` and `head` count from 1. Default: the clearest memory head, else all heads of the last layer."""
    if layer is None and kind == "memory":
        return [record.heads[clearest_head(record.heads)]]
    n_layers, n_heads = record.weights[cast(Kind, kind)].shape[:2]
    for name, number, n_existing in (("layer", layer, n_layers), ("head", head, n_heads)):
        if number is not None and not 1 <= number <= n_existing:
            raise ConfigError(f"--{name} is {number}, this model has {n_existing}: choose from 1 to {n_existing}")
    layer_index = (layer or n_layers) - 1
    layer_heads = [one for one in record.heads if (one.kind, one.layer) == (kind, layer_index)]
    return layer_heads if head is None else [layer_heads[head - 1]]


def draw(record: AttentionRecord, heads: Sequence[Head], path: Path, file_format: str) -> None:
    write_figure(draw_in_style(lambda: _figure(record, heads)), path, file_format)


def _figure(record: AttentionRecord, heads: Sequence[Head]) -> Figure:
    kind = heads[0].kind
    rows = record.source if kind == "encoder" else record.target
    columns = record.target if kind == "decoder" else record.source
    n_columns = min(MAX_HEADS_PER_ROW, len(heads))
    n_rows = math.ceil(len(heads) / n_columns)
    width, height = (
        min(MAX_INCHES, n * max(MIN_INCHES, INCHES_PER_TOKEN * len(pieces)) + 1)
        for n, pieces in ((n_columns, columns), (n_rows, rows))
    )
    figure = new_figure(width, height + 0.4 * n_rows)
    figure.suptitle(f"{KINDS[kind]}, layer {heads[0].layer + 1}", fontsize=10)
    for number, head in enumerate(heads, 1):
        axes = figure.add_subplot(n_rows, n_columns, number)
        axes.imshow(record.weights[kind][head.layer, head.head], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"head {head.head + 1}", fontsize=9)
        if len(columns) <= MAX_LABELS and len(rows) <= MAX_LABELS:
            # Tokens may contain dollar signs, which matplotlib would parse as formulas.
            axes.set_xticks(range(len(columns)), map(_label, columns), rotation=90, fontsize=8, parse_math=False)
            axes.set_yticks(range(len(rows)), map(_label, rows), fontsize=8, parse_math=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return figure


def _label(piece: str) -> str:
    return piece.removeprefix(SPACE_MARK) or "\u2423"
