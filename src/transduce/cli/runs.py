"""transduce runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from transduce.errors import DataError


def runs_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that contain runs.")],
    wide: Annotated[
        bool, typer.Option("--wide", help="Show all columns and whole names, also if the terminal is narrower.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare training runs: their settings, their progress and their scores. Also runs that failed or did not begin.

    Examples:

      transduce runs run-1 run-2

      transduce runs experiments --wide
    """
    from transduce.cli.show.runs import show_runs
    from transduce.cli.show.tables import console_for_stdout
    from transduce.training.runs import find_runs, summary_of

    runs = find_runs(folders)
    if not runs:
        raise DataError(f"there is no run in {', '.join(map(str, folders))}: give folders that transduce train wrote")
    summaries = [summary_of(run) for run in runs]
    if as_json:
        print(json.dumps(summaries, indent=2))
    else:
        show_runs(console_for_stdout(), summaries, None if wide else shutil.get_terminal_size().columns)
