"""The command line: parse, build a config, one call, print. Results on stdout, messages on stderr.

Exit 0; 1 when a check fails; 2 with one line that says what to do.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce import __version__
from transduce.config import PRESETS, RunConfig, override
from transduce.errors import ConfigError, TransduceError

if TYPE_CHECKING:
    from transduce.paper import Row

app = typer.Typer(
    help="The Transformer of “Attention Is All You Need” as real software.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer carries click under one name or another; its own exception is a child of what we are after.
USAGE_ERRORS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one setting. Repeatable.")
]


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("check-paper")
def check_paper_command(
    config: Annotated[
        str | None, typer.Option(help=f"{', '.join(PRESETS)}, or a JSON file. Both base and big when not given.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Which of the paper's models to compare with: base or big.", metavar="base|big")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare each setting with the paper: same, differs, or not stated. Exits with 1 when one differs.

    Examples:

      transduce check-paper

      transduce check-paper --config small

      transduce check-paper --config base --set train.adam_beta2=0.997
    """
    from transduce.paper import check_paper, count_parameters, parameter_counts

    if against not in (None, "base", "big"):
        raise ConfigError(f"--against is {against!r}, must be base or big: the paper has no other")
    names = ["base", "big"] if config is None else [config]
    configs = {name: override(read_config(name), settings or []) for name in names}
    tables = {}
    for name, checked in configs.items():
        size: Literal["base", "big"] = "big" if (against or name) == "big" else "base"
        tables[name] = size, check_paper(checked, size)
    counts = list(parameter_counts())
    papers_own = (PRESETS["base"](), PRESETS["big"]())
    for name, checked in configs.items():
        if checked not in papers_own:
            counts.append((f"{name}, as checked", None, count_parameters(checked)))
    all_rows = [row for _, rows in tables.values() for row in rows]
    different = list(dict.fromkeys(row.setting for row in all_rows if row.verdict == "differs"))  # in order, once each
    if as_json:
        checks = [
            {"config": name, "against": size, "rows": [asdict(row) for row in rows]}
            for name, (size, rows) in tables.items()
        ]
        parameters = [{"size": size, "paper": stated, "ours": ours} for size, stated, ours in counts]
        print(json.dumps({"checks": checks, "parameters": parameters}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        for name, (size, rows) in tables.items():
            console.print(_paper_table(escape(f"{name} beside the paper's {size}"), rows))
        for of, stated, ours in counts:
            beside = "" if stated is None else f"; the paper prints {stated / 1e6:.0f} M"
            console.print(escape(f"parameters of {of}: {ours:,} ({ours / 1e6:.1f} M){beside}"))
        console.print("(each trained number once; base and big at exactly 37,000 shared entries: the paper says about)")
        verdict = f"differing from the paper: {', '.join(different)}" if different else "nothing differs from the paper"
        console.print(verdict)
    if different:
        raise typer.Exit(1)


def _paper_table(title: str, rows: list[Row]) -> Table:
    table = Table("section", title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("setting", min_width=max(len(row.setting) for row in rows if ":" not in row.setting))
    for name in ("paper", "ours", "verdict"):
        table.add_column(name)
    colours = {"same": "green", "differs": "bold red", "not stated": "dim"}
    for row in rows:
        colour = colours[row.verdict]
        cells = (row.section, row.setting, _show(row.paper), _show(row.ours), f"[{colour}]{row.verdict}[/]")
        table.add_row(*cells)
    return table


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def read_config(name: str) -> RunConfig:
    """A preset by name, or a JSON file."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return RunConfig.from_json(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        known = ", ".join(PRESETS)
        raise ConfigError(f"{name} cannot be read ({reason}): give {known}, or a JSON file") from None


def main() -> None:
    try:
        sys.exit(app(standalone_mode=False))
    except TransduceError as error:
        message = str(error)
    except USAGE_ERRORS as error:
        if not error.format_message():  # no command was given, and help has been shown
            sys.exit(2)
        message = f"{error.format_message()} Try --help."
    except typer.Abort:
        message = "interrupted"
    print(f"transduce: {message}", file=sys.stderr)
    sys.exit(2)
