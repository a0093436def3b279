"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from transduce.errors import ConfigError

Model = Annotated[
    Path | None, typer.Argument(metavar="MODEL", help="A model folder or a run folder. Default: the bundled model.")
]
Files = Annotated[
    list[str] | None,
    typer.Argument(metavar="FILE", help="Text files, one sentence per line; .gz and .xz too. - is standard input."),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one setting. Repeatable.")
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Default: a GPU if there is one.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: one per core.")]
To = Annotated[
    str | None, typer.Option(metavar="LANGUAGE", help="The target language, if the model has more than one.")
]
Beam = Annotated[
    int | None, typer.Option(min=1, help="Hypotheses kept per sentence; 1 is greedy search. Default: the model's.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="The highest number of sentences per batch. It changes speed, not the text.")
]
Precision = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16|int8", help="Number format of the model. int8 needs a CPU.")
]
Prefix = Annotated[str, typer.Option(help="Force every translation to begin with this text.")]
Sample = Annotated[
    bool, typer.Option("--sample", help="Draw translations at random instead of searching for the best.")
]
Temperature = Annotated[float | None, typer.Option(help="With --sample: below 1 draws likely tokens more often.")]
TopK = Annotated[int | None, typer.Option(help="With --sample: draw from the K most probable tokens.")]
TopP = Annotated[
    float | None,
    typer.Option(
        help="With --sample: draw from the smallest set of most probable tokens whose probabilities add up to P."
    ),
]
Seed = Annotated[int | None, typer.Option(help="With --sample: the seed.")]
Bootstrap = Annotated[int, typer.Option(min=0, help="Bootstrap samples for the intervals; 0 disables them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def refuse_together(options: dict[str, Any]) -> None:
    """Refuses options that exclude each other, by name; None stands for an option that was left out."""
    if len(both := [name for name, value in options.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(both)} exclude each other: keep one")
