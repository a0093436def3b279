"""What `transduce runs` prints: a table as wide as the terminal, and what is wrong with some runs."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.cli.show.tables import seconds_text

Summary = Mapping[str, Any]
"""A result of `runs.summary_of`."""


class Column(NamedTuple):
    name: str
    show: Callable[[Summary], str]
    priority: int
    """Of columns that do not fit, those with the highest numbers are left out. 0: never left out."""
    is_number: bool = True


def _formatted(name: str, template: str) -> Callable[[Summary], str]:
    return lambda summary: "" if summary[name] is None else template.format(summary[name])


def _test_bleu(summary: Summary) -> str:
    """The newest one, with the search if it was not beam search."""
    if not summary["test"]:
        return ""
    newest = summary["test"][-1]
    search = "sampled" if newest["method"] == "sample" else "greedy" if newest["beam"] == 1 else ""
    return f"{newest['bleu']:.1f} {search}".rstrip()


def _test_set(summary: Summary) -> str:
    if not summary["test"]:
        return ""
    newest = summary["test"][-1]
    target = f" to {newest['to']}" if newest["to"] else ""
    return f"{newest['source']}{target}, {newest['n_sentences']:,} lines, beam {newest['beam']}"


COLUMNS = [
    Column("run", lambda summary: str(summary["run"]), 0, is_number=False),
    Column("state", lambda summary: str(summary["state"]), 0, is_number=False),
    Column("size", _formatted("size", "{}"), 6, is_number=False),
    Column("parameters", lambda summary: f"{summary['parameters'] / 1e6:.1f} M" if summary["parameters"] else "", 7),
    Column("steps", _formatted("steps", "{:,}"), 4),
    Column("batch", _formatted("batch_tokens", "{:,}"), 10),
    Column("dropout", _formatted("dropout", "{:g}"), 9),
    Column("seed", _formatted("seed", "{}"), 8),
    Column("perplexity", _formatted("perplexity", "{:.2f}"), 3),
    Column("accuracy", _formatted("accuracy", "{:.1%}"), 11),
    Column("valid\nBLEU", _formatted("valid_bleu", "{:.1f}"), 2),
    Column("test\nBLEU", _test_bleu, 1),
    Column("test set", _test_set, 12, is_number=False),
    Column("time", lambda summary: "" if summary["seconds"] is None else seconds_text(summary["seconds"]), 5),
    Column("config", _formatted("config_hash", "{}"), 13, is_number=False),
    Column("data", _formatted("data", "{}"), 14, is_number=False),
]
CORE, MIN_NAME = 4, 24
"""Names of runs are shortened, but not below this width, if otherwise columns up to this priority do not fit."""
LEGEND = {
    "valid\nBLEU": "valid BLEU: of greedy translations of validation sentences, during training.",
    "test\nBLEU": "test BLEU: of beam search unless it says otherwise, measured last by transduce evaluate.",
}


def show_runs(console: Console, summaries: Sequence[Summary], width: int | None) -> None:
    """`width`: of the terminal; None: any width, so all columns are shown."""
    rows = {column.name: [column.show(summary) for summary in summaries] for column in COLUMNS}
    columns, folder = [column for column in COLUMNS if column.priority == 0 or any(rows[column.name])], ""
    if width is not None:
        others = _width([column for column in columns if column.priority <= CORE], {**rows, "run": [""]})
        rows["run"], folder = shorten_names(rows["run"], max(width - others, MIN_NAME))
        columns = _columns_that_fit(columns, rows, width)
    console.width = max(console.width, _width(columns, rows))  # otherwise Rich would shorten cells
    console.print(_table(columns, rows))
    hidden = [column.name.replace("\n", " ") for column in COLUMNS if column not in columns and any(rows[column.name])]
    notes = [f"The runs are in {folder}."] if folder else []
    notes += [LEGEND[column.name] for column in columns if column.name in LEGEND]
    notes += [f"Not shown: {', '.join(hidden)}. --wide shows all columns, and --json all values."] if hidden else []
    notes += [f"{summary['run']}: {problem}." for summary in summaries for problem in summary["problems"]]
    for note in notes:
        shown = textwrap.fill(note, width or 10_000, break_long_words=False, break_on_hyphens=False)
        console.print(escape(shown), soft_wrap=True)


def _table(columns: Sequence[Column], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="right" if column.is_number else "left", no_wrap=True)
    for cells in zip_longest(*(rows[column.name] for column in columns), fillvalue=""):
        table.add_row(*map(escape, cells))
    return table


def _width(columns: Sequence[Column], rows: Mapping[str, Sequence[str]]) -> int:
    """Of a table with these columns."""
    console = Console(width=100_000)
    return console.measure(_table(columns, rows)).maximum


def _columns_that_fit(columns: Sequence[Column], rows: Mapping[str, Sequence[str]], width: int) -> list[Column]:
    chosen = [column for column in columns if column.priority == 0]
    for column in sorted(columns, key=lambda column: column.priority):
        if column not in chosen and _width([*chosen, column], rows) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def shorten_names(names: Sequence[str], width: int) -> tuple[list[str], str]:
    """Names of at most this width if that leaves them different: without the folder that all are in, then with … in
    place of some words in the middle. Also returns that folder, if names are without it."""
    folder = ""
    if max(map(cell_len, names)) > width and len({os.path.isabs(name) for name in names}) == 1:
        folder = os.path.commonpath([os.path.dirname(name) for name in names])
        names = [os.path.relpath(name, folder) if folder else name for name in names]
    short = [_without_middle(name, width) for name in names]
    return (short if len(set(short)) == len(set(names)) else list(names)), folder


def _without_middle(name: str, width: int) -> str:
    """Keeps as many words of both ends as fit."""
    words, first, last = re.findall(r"[^-_./ ]*[-_./ ]+|[^-_./ ]+", name), "", ""
    while cell_len(name) > width and words:
        is_first = len(first) <= len(last)
        word = words.pop(0 if is_first else -1)
        if cell_len(f"{first}…{word}{last}") > width:
            break
        first, last = (first + word, last) if is_first else (first, word + last)
    return f"{first}…{last}" if first or last else name
