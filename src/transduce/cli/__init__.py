"""The command line: parse, build a config, call one function, print. Results on stdout, messages on stderr.

Exit code 0; 1 if a check fails; 2 for an error that the user can fix, with one line that says how.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from transduce import __version__
from transduce.cli.ablate import ablate_command
from transduce.cli.check_paper import check_paper_command
from transduce.cli.corpus_options import ThreeValues
from transduce.cli.embed import embed_command
from transduce.cli.evaluate import evaluate_command
from transduce.cli.figures import figures_command
from transduce.cli.inspect import inspect_command
from transduce.cli.prepare import prepare_command
from transduce.cli.report import report_command
from transduce.cli.runs import runs_command
from transduce.cli.serve import serve_command
from transduce.cli.train import train_command
from transduce.cli.translate import translate_command
from transduce.errors import TransduceError

app = typer.Typer(
    help="The Transformer of “Attention Is All You Need”: train a translator from two text files, use it, inspect it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer may import click under another name, so its exception is found through a class that inherits from it.
USAGE_ERRORS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130


@app.callback(invoke_without_command=True)
def root_command(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# Groups and commands appear in this order in the help.
TRAIN, USE, INSPECT = "Train a translator", "Use a translator", "Look inside"
app.command("prepare", cls=ThreeValues, rich_help_panel=TRAIN)(prepare_command)
app.command("train", cls=ThreeValues, rich_help_panel=TRAIN)(train_command)
app.command("runs", rich_help_panel=TRAIN)(runs_command)
app.command("report", rich_help_panel=TRAIN)(report_command)
app.command("translate", rich_help_panel=USE)(translate_command)
app.command("evaluate", rich_help_panel=USE)(evaluate_command)
app.command("serve", rich_help_panel=USE)(serve_command)
app.command("embed", rich_help_panel=USE)(embed_command)
app.command("inspect", rich_help_panel=INSPECT)(inspect_command)
app.command("ablate", rich_help_panel=INSPECT)(ablate_command)
app.command("figures", rich_help_panel=INSPECT)(figures_command)
app.command("check-paper", rich_help_panel=INSPECT)(check_paper_command)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end a run
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # the value that typer returns after Ctrl-C
            print("transduce: interrupted", file=sys.stderr)
        sys.exit(code)
    except TransduceError as error:
        message = str(error)
    except USAGE_ERRORS as error:
        if not error.format_message():  # no command was named, and the help has been printed
            sys.exit(2)
        message = f"{error.format_message()} Try --help."
    print(f"transduce: {message}", file=sys.stderr)
    sys.exit(2)
