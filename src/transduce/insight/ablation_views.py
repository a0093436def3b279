"""What ablation found, for people: on a terminal and as a heat map."""

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
from transduce.insight.drawing import FAINT, INK, drawn, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

SHADES = 20.0
"""BLEU lost from which on a cell is as dark as it gets: what is beyond is broken, however much."""


def show_ablation(console: Console, found: Ablation, config: ModelConfig) -> None:
    whole = ", ".join(
        f"{name} {score.value:.{_digits(name)}f}" + _between(score.interval, _digits(name), "")
        for name, score in found.whole.items()
    )
    console.print(f"{found.n_sentences:,} sentences; with all parts: {whole}")
    changes = {removal.part: removal.changes for removal in found.removals}
    for grid in grids(config):
        table = Table(grid.title, *grid.columns, box=box.SIMPLE_HEAD, padding=0)
        for column in table.columns[1:]:
            column.justify = "right"
        for row, parts in zip(grid.rows, grid.parts, strict=True):
            table.add_row(row, *(_cell(changes, part) for part in parts))
        console.print(table)
    names = list(found.whole)
    table = Table("without", box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("95 % interval", justify="right")
    for part, change in sorted(changes.items(), key=lambda item: item[1][BLEU].value):
        table.add_row(part.name, *(cell for name in names for cell in _cells(name, change[name])))
    console.print(table)
    n = len(changes)
    console.print(
        f"* marks intervals that leave out zero, as of {n} about {n / 20:.0f} would by chance alone; "
        "what is taken out the others were not trained to do without"
    )
    if found.n_without_loss:
        console.print(f"{found.n_without_loss:,} pairs are longer than the model was trained on and have no loss")


def _digits(name: str) -> int:
    return 3 if name == LOSS else 1


def _between(interval: tuple[float, float] | None, digits: int, sign: str) -> str:
    return "" if interval is None else f" ({interval[0]:{sign}.{digits}f} to {interval[1]:{sign}.{digits}f})"


def _cells(name: str, change: Change) -> tuple[str, str]:
    between = _between(change.interval, _digits(name), "+").strip(" ()")
    return f"{change.value:+.{_digits(name)}f}{'*' if change.is_sure else ' '}", between


def _cell(changes: Mapping[Part, Mapping[str, Change]], part: Part | None) -> Text:
    if part is None:
        return Text("")
    value = changes[part][BLEU].value
    red, green, blue = _shade(value)
    ink = "white" if _is_dark(value) else "black"
    return Text(f" {value:+6.1f} ", style=f"{ink} on rgb({red},{green},{blue})")


def _shade(value: float) -> tuple[int, int, int]:
    """White, and darker red the more is lost; what is won is blue."""
    share = min(abs(value) / SHADES, 1.0) ** 0.5
    far = (165, 15, 21) if value < 0 else (8, 81, 156)
    red, green, blue = (round(255 + (end - 255) * share) for end in far)
    return red, green, blue


def _is_dark(value: float) -> bool:
    return abs(value) > SHADES / 4


def ablation_figure(found: Ablation, config: ModelConfig) -> Figure:
    return drawn(lambda: _draw(found, config))


def _draw(found: Ablation, config: ModelConfig) -> Figure:
    changes = {removal.part: removal.changes for removal in found.removals}
    some = grids(config)
    n_columns, n_rows = sum(len(grid.columns) for grid in some), max(len(grid.rows) for grid in some)
    figure = new_figure(2.2 + 0.52 * n_columns, 1.5 + 0.42 * n_rows)
    figure.suptitle("change of BLEU when a part is taken out", x=0.01, ha="left", fontsize=11)
    axes = figure.subplots(1, len(some), width_ratios=[len(grid.columns) for grid in some])
    for here, grid in zip(axes, some, strict=True):
        here.set_title(grid.title)
        here.set_xlim(0, len(grid.columns))
        here.set_ylim(len(grid.rows), 0)
        here.set_xticks([x + 0.5 for x in range(len(grid.columns))], grid.columns)
        here.set_yticks([y + 0.5 for y in range(len(grid.rows))], grid.rows if here is axes[0] else [])
        here.tick_params(length=0)
        here.spines[:].set_visible(False)
        if grid.columns[-1] == "all":
            here.set_xlabel("head", color=FAINT)
        for y, parts in enumerate(grid.parts):
            for x, part in enumerate(parts):
                if part is not None:
                    change = changes[part][BLEU]
                    colour = tuple(level / 255 for level in _shade(change.value))
                    here.add_patch(_square(x, y, colour))
                    ink, weight = ("white" if _is_dark(change.value) else INK), ("bold" if change.is_sure else "normal")
                    words = f"{change.value:+.1f}"
                    here.text(x + 0.5, y + 0.5, words, ha="center", va="center", size=8, color=ink, weight=weight)
    figure.supxlabel("bold: the 95 % interval (paired bootstrap) leaves out zero", fontsize=8, color=FAINT)
    return figure


def _square(x: float, y: float, colour: tuple[float, ...]) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, edgecolor="#eeeeee", linewidth=0.6)
