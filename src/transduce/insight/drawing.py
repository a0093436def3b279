"""The style of figures and their files. Other modules draw with matplotlib through this one."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from transduce.errors import ConfigError, DataError
from transduce.extras import missing
from transduce.files import convert_write_errors, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = TypeVar("Result")
FORMATS = ("svg", "png")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195", "#555555")
"""Distinguishable for colour-blind people. The first six are by Okabe and Ito."""
INK, FAINT = "#222222", "#9a9a9a"
DOTS_PER_INCH = 144

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "svg.hashsalt": "transduce",  # without it, ids inside the file differ from run to run
    "svg.fonttype": "path",  # the reader's system may lack our fonts
}


class DrawnFigure(NamedTuple):
    figure: Figure
    caption: str


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing("a figure", "matplotlib", "figures") from None


def draw_in_style(draw: Callable[[], Result]) -> Result:
    """Applies our style during the call only: matplotlib's global state belongs to the caller."""
    with _style():
        return draw()


def _style() -> AbstractContextManager[None]:
    check_matplotlib()
    import matplotlib

    return matplotlib.rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def row_of_axes(figure: Figure, n: int, widths: Sequence[float] | None = None) -> list[Axes]:
    axes = figure.subplots(1, n, width_ratios=widths, squeeze=False)
    return list(axes[0])


def check_figure_file(path: Path) -> None:
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"{path} must end in .svg or .png: rename it")


def write_figure(figure: Figure, path: Path, kind: str | None = None) -> None:
    """Writes the same bytes each time. `kind`: one of `FORMATS`, by default the suffix of the path."""
    content, kind = io.BytesIO(), kind or path.suffix.removeprefix(".")
    with _style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # no font has all scripts; matplotlib draws a box
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    write_atomically(path, content.getvalue())


def folder_for_figures(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: give a folder for the figures")
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder
