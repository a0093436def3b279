"""The command line: parse, build a config, one call, print. Results on stdout, messages on stderr.

Exit 0; 1 when a check fails; 2 with one line that says what to do.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from transduce import __version__
from transduce.cli.check_paper import check_paper_command
from transduce.cli.looking import ablate_command, embed_command, figures_command, inspect_command
from transduce.cli.training import ThreeValues, prepare_command, runs_command, train_command
from transduce.cli.translating import evaluate_command, serve_command, translate_command
from transduce.errors import TransduceError

app = typer.Typer(
    help="The Transformer of “Attention Is All You Need” as real software.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer carries click under one name or another; its own exception is a child of what we are after.
USAGE_ERRORS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# In the order of the help.
app.command("check-paper")(check_paper_command)
app.command("prepare", cls=ThreeValues)(prepare_command)
app.command("train", cls=ThreeValues)(train_command)
app.command("translate")(translate_command)
app.command("inspect")(inspect_command)
app.command("evaluate")(evaluate_command)
app.command("serve")(serve_command)
app.command("runs")(runs_command)
app.command("embed")(embed_command)
app.command("ablate")(ablate_command)
app.command("figures")(figures_command)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end a run
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # typer's answer to Ctrl-C, and every shell's
            print("transduce: interrupted", file=sys.stderr)
        sys.exit(code)
    except TransduceError as error:
        message = str(error)
    except USAGE_ERRORS as error:
        if not error.format_message():  # no command was given, and help has been shown
            sys.exit(2)
        message = f"{error.format_message()} Try --help."
    print(f"transduce: {message}", file=sys.stderr)
    sys.exit(2)
