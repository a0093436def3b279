"""The results of an ablation as tables for a terminal and as a heat map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transduce.config import ModelConfig
from transduce.evaluation.metrics import BLEU
from transduce.insight.ablation import LOSS, Ablation, Change, Part, grids
from transduce.insight.drawing import FAINT, INK, draw_in_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

MAX_SHADED_CHANGE = 20.0
"""Changes of BLEU of at least this size have the darkest colour. Beyond it, translations are useless anyway."""


def show_ablation(console: Console, ablation: Ablation, config: ModelConfig) -> None:
    whole = ", ".join(
        f"{name} {score.value:.{_digits(name)}f}" + _format_interval(score.interval, _digits(name), "")
        for name, score in ablation.whole.items()
    )
    console.print(f"{ablation.n_sentences:,} sentences; complete model: {whole}")
    changes = {removal.part: removal.changes for removal in ablation.removals}
    for grid in grids(config):
        table = Table(grid.title, *grid.columns, box=box.SIMPLE_HEAD, padding=0)
        for column in table.columns[1:]:
            column.justify = "right"
        for row, parts in zip(grid.rows, grid.parts, strict=True):
            table.add_row(row, *(_cell(changes, part) for part in parts))
        console.print(table)
    names = list(ablation.whole)
    table = Table("removed part", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("95 % interval", justify="right")
    for part, change in sorted(changes.items(), key=lambda item: item[1][BLEU].value):
        table.add_row(part.name, *(cell for name in names for cell in _value_and_interval(name, change[name])))
    console.print(table)
    n = len(changes)
    console.print(
        f"* the interval excludes zero. By chance alone, about {n / 20:.0f} of {n} intervals would. "
        "The model was not retrained, so the other parts did not learn to compensate."
    )
    if ablation.n_without_loss:
        console.print(f"The loss excludes {ablation.n_without_loss:,} pairs longer than the model was trained on.")


def _digits(name: str) -> int:
    return 3 if name == LOSS else 1


def _format_interval(interval: tuple[float, float] | None, digits: int, sign: str) -> str:
    return "" if interval is None else f" ({interval[0]:{sign}.{digits}f} to {interval[1]:{sign}.{digits}f})"


def _value_and_interval(name: str, change: Change) -> tuple[str, str]:
    interval = _format_interval(change.interval, _digits(name), "+").strip(" ()")
    return f"{change.value:+.{_digits(name)}f}{'*' if change.is_significant else ' '}", interval


def _cell(changes: Mapping[Part, Mapping[str, Change]], part: Part | None) -> Text:
    if part is None:
        return Text("")
    value = changes[part][BLEU].value
    red, green, blue = _shade(value)
    ink = "white" if _is_dark(value) else "black"
    return Text(f" {value:+6.1f} ", style=f"{ink} on rgb({red},{green},{blue})")


def _shade(value: float) -> tuple[int, int, int]:
    """White for no change, red for a loss, blue for a gain; darker for a larger change."""
    share = min(abs(value) / MAX_SHADED_CHANGE, 1.0) ** 0.5
    darkest = (165, 15, 21) if value < 0 else (8, 81, 156)
    red, green, blue = (round(255 + (end - 255) * share) for end in darkest)
    return red, green, blue


def _is_dark(value: float) -> bool:
    return abs(value) > MAX_SHADED_CHANGE / 4


def ablation_figure(ablation: Ablation, config: ModelConfig) -> Figure:
    return draw_in_style(lambda: _draw(ablation, config))


def _draw(ablation: Ablation, config: ModelConfig) -> Figure:
    changes = {removal.part: removal.changes for removal in ablation.removals}
    tables = grids(config)
    n_columns, n_rows = sum(len(grid.columns) for grid in tables), max(len(grid.rows) for grid in tables)
    figure = new_figure(2.2 + 0.52 * n_columns, 1.5 + 0.42 * n_rows)
    figure.suptitle("change of BLEU after removing one part", x=0.01, ha="left", fontsize=11)
    all_axes = figure.subplots(1, len(tables), width_ratios=[len(grid.columns) for grid in tables])
    for axes, grid in zip(all_axes, tables, strict=True):
        axes.set_title(grid.title)
        axes.set_xlim(0, len(grid.columns))
        axes.set_ylim(len(grid.rows), 0)
        axes.set_xticks([x + 0.5 for x in range(len(grid.columns))], grid.columns)
        axes.set_yticks([y + 0.5 for y in range(len(grid.rows))], grid.rows if axes is all_axes[0] else [])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if grid.columns[-1] == "all":
            axes.set_xlabel("head", color=FAINT)
        for y, parts in enumerate(grid.parts):
            for x, part in enumerate(parts):
                if part is not None:
                    change = changes[part][BLEU]
                    colour = tuple(level / 255 for level in _shade(change.value))
                    axes.add_patch(_square(x, y, colour))
                    ink = "white" if _is_dark(change.value) else INK
                    weight = "bold" if change.is_significant else "normal"
                    label = f"{change.value:+.1f}"
                    axes.text(x + 0.5, y + 0.5, label, ha="center", va="center", size=8, color=ink, weight=weight)
    figure.supxlabel("bold: the 95 % interval (paired bootstrap) excludes zero", fontsize=8, color=FAINT)
    return figure


def _square(x: float, y: float, colour: tuple[float, ...]) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="#eeeeee", linewidth=0.6)
