"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one setting. Repeatable.")
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="A GPU where there is one.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the CPU. All cores when not given.")]
To = Annotated[str | None, typer.Option(metavar="LANGUAGE", help="Into which, where a model knows several.")]
Beam = Annotated[
    int | None, typer.Option(min=1, help="Hypotheses kept; 1 is greedy search. The model's when not given.")
]
