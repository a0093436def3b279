"""transduce report."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders that transduce train wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Default: RUN/report.html, or report.html here for several runs."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a page about training runs: curves, sample translations, data, settings, scores. It works offline.

    A run may be finished, training, stopped or failed. Several runs are shown side by side.

    Examples:

      transduce report run --open

      transduce report run-1 run-2 run-3 --out compare.html
    """
    from transduce.insight.report.page import REPORT, write_report

    path = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    write_report(runs, path)
    print(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
