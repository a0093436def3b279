"""transduce inspect."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import bundled_model, decoding_flags, load_translator
from transduce.cli.options import (
    Beam,
    Device,
    Prefix,
    Quiet,
    Sample,
    Seed,
    Settings,
    Temperature,
    Threads,
    To,
    TopK,
    TopP,
)


def inspect_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|SENTENCE",
            help="A model folder or a run folder (default: the bundled model), then sentences, each in quotes.",
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read sentences from a file, one per line. - is standard input.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens in any browser, offline.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all weights and numbers as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw one head, or all heads of a layer, for one sentence.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the heads that --png draws, as a vector graphic.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    kind: Annotated[
        str, typer.Option(metavar="encoder|decoder|memory", help="Which attention --png and --svg draw.")
    ] = "memory",
    layer: Annotated[int | None, typer.Option(min=1, help="Which layer they draw, counted from 1.")] = None,
    head: Annotated[
        int | None, typer.Option(min=1, help="Which head they draw, counted from 1. Default: all of the layer.")
    ] = None,
    beam: Beam = None,
    to: To = None,
    prefix: Prefix = "",
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    device: Device = None,
    threads: Threads = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Show what each head attends to, the probability of each token, and the word alignment.

    Examples:

      transduce inspect "Das ist nicht gut."

      transduce inspect "Das ist nicht gut." --html out.html --open

      transduce inspect run "Das ist gut." "Wo ist mein Buch?" --html out.html

      transduce inspect run --source test.de --json attention.json

      transduce inspect "Das ist gut." --svg head.svg --kind encoder --layer 2
    """
    from transduce.cli.show.tables import console_for_stdout
    from transduce.insight.attention import inspect
    from transduce.insight.output import OutputOptions, direction_of, sentences_of, split_arguments, write

    outputs = OutputOptions(
        html=html, json=json_path, png=png, svg=svg, kind=kind, layer=layer, head=head, opens_page=open_page
    )
    flags = decoding_flags(beam, sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model, sentences = split_arguments(arguments or [])
    sentences = sentences_of(sentences, source)
    model = bundled_model(quiet) if model is None else model
    translator = load_translator(model, flags, settings or [], device, "float32", threads)
    records = list(inspect(translator, sentences, to, prefix=prefix))
    messages = write(records, outputs, console_for_stdout(), model.resolve().name, direction_of(translator, to))
    if not quiet:
        for line in messages:
            print(line, file=sys.stderr)
