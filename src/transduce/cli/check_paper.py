"""transduce check-paper."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from transduce.cli.options import Settings
from transduce.config import PRESETS, RunConfig, override
from transduce.errors import ConfigError


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
    from transduce.cli.show.tables import console_for_stdout, paper_table
    from transduce.paper_check import check_paper, count_parameters, parameter_counts

    if against not in (None, "base", "big"):
        raise ConfigError(f"--against is {against!r}, must be base or big: the paper has no other")
    names = ["base", "big"] if config is None else [config]
    configs = {name: override(read_config(name), settings or []) for name in names}
    tables = {}
    for name, checked in configs.items():
        size: Literal["base", "big"] = "big" if (against or name) == "big" else "base"
        tables[name] = size, check_paper(checked, size)
    counts = list(parameter_counts())
    paper_configs = (PRESETS["base"](), PRESETS["big"]())
    for name, checked in configs.items():
        if checked not in paper_configs:
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
        console = console_for_stdout()
        for name, (size, rows) in tables.items():
            console.print(paper_table(escape(f"{name} beside the paper's {size}"), rows))
        for of, stated, ours in counts:
            beside = "" if stated is None else f"; the paper prints {stated / 1e6:.0f} M"
            console.print(escape(f"parameters of {of}: {ours:,} ({ours / 1e6:.1f} M){beside}"))
        console.print("(each trained number once; base and big at exactly 37,000 shared entries: the paper says about)")
        verdict = f"differing from the paper: {', '.join(different)}" if different else "nothing differs from the paper"
        console.print(verdict)
    if different:
        raise typer.Exit(1)


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
