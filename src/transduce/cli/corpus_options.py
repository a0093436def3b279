"""Options that describe training text. `prepare` and `train` share them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class ThreeValues(TyperCommand):
    """A command with options of three values that may be repeated. Click supports them, Typer does not."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            if parameter.name in ("pairs", "valid_pairs"):
                parameter.nargs = 3


def _unchanged(value: Any) -> Any:
    return value


THREE = {"parser": _unchanged, "metavar": "LANGUAGES SOURCE TARGET"}

Languages = Annotated[
    str | None, typer.Option(metavar="SOURCE-TARGET", help="Language codes, such as de-en. Default: the file suffixes.")
]
Pairs = Annotated[
    list[Any] | None, typer.Option("--pair", help="More files, such as: de-en A.txt B.txt. Repeatable.", **THREE)
]
ValidFiles = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="SOURCE TARGET", help="Validation files. Default: some pairs of the text are held out."),
]
ValidPairs = Annotated[
    list[Any] | None, typer.Option("--valid-pair", help="Validation files of one direction. Repeatable.", **THREE)
]
BothWays = Annotated[bool, typer.Option("--both-ways", help="Use every pair in both directions.")]
Columns = Annotated[
    str, typer.Option(metavar="N,M", help="Columns of source and target in a .tsv file, counted from 1.")
]
Fields = Annotated[
    str | None, typer.Option(metavar="A,B", help="Fields in a .jsonl file. Default: the language codes.")
]
DataRoot = Annotated[str | None, typer.Option(envvar="TRANSDUCE_DATA", help="The folder of the named corpora.")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="Number of subword entries. Default: chosen by the size of the corpus.")
]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="Disable cleaning: keep every pair unchanged.")]
