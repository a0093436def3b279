"""transduce translate."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import bundled_model, decoding_flags, load_translator
from transduce.cli.options import (
    BatchSize,
    Beam,
    Device,
    Precision,
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
    refuse_together,
)
from transduce.cli.output import open_to_write, write_to_stdout
from transduce.errors import ConfigError


def translate_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|FILE|SENTENCE",
            help="A model folder or a run folder (default: the bundled model), then text files, one sentence per line "
            "(.gz and .xz too; - is standard input), or sentences, each in quotes. Default: standard input.",
        ),
    ] = None,
    beam: Beam = None,
    nbest: Annotated[
        int | None, typer.Option(min=1, help="Print the N best translations of each line. The beam is at least N.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Add a tab and the score to each translation.")] = False,
    alignments: Annotated[
        Path | None, typer.Option(help="Write word alignments to this file, one line per sentence: 0-0 1-2.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line: tokens, probabilities, flags, alignment.")
    ] = False,
    to: To = None,
    prefix: Prefix = "",
    column: Annotated[
        int | None, typer.Option(min=1, help="Translate this column of a table; the translation becomes the last one.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--field", help="Translate this field of JSON lines, such as text or text.de.")
    ] = None,
    into: Annotated[str, typer.Option(help="With --field: the field to write the translation to.")] = "translation",
    sample: Sample = False,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Precision = "float32",
    threads: Threads = None,
    settings: Settings = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print which engine translates, and why.")] = False,
    quiet: Quiet = False,
) -> None:
    """Translate text, line by line: line i of the output is line i of the input.

    Examples:

      transduce translate 'Das ist ein Haus.'

      transduce translate run < in.de > out.en

      transduce translate run in.de.gz --nbest 5 --scores

      transduce translate run table.tsv --column 2

      transduce translate run in.de --alignments out.align > out.en
    """
    from transduce.cli.show.progress import translation_progress
    from transduce.cli.show.tables import show_summary
    from transduce.translation.arguments import SentenceForm, split_arguments
    from transduce.translation.records import Form, translate_files

    flags = decoding_flags(beam, sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    refuse_together({"--column": column, "--field": key, "--json": as_json or None})
    refuse_together({"--nbest": nbest, "--column": column})
    refuse_together({"--nbest": nbest, "--field": key})
    flags["n_best"] = nbest
    model, files, sentences = split_arguments(arguments or [])
    model = bundled_model(quiet) if model is None else model
    translator = load_translator(model, flags, settings or [], device, precision, threads, batch_size, verbose=verbose)
    if alignments is not None and translator.heads is None:
        raise ConfigError(f"{model} does not name its alignment heads: train it again, or leave out --alignments")
    options = (column, key, into, as_json, translator.settings.n_best, scores)
    form = SentenceForm(*options, tuple(sentences)) if sentences else Form(*options)
    with ExitStack() as stack:
        write_alignment = stack.enter_context(open_to_write(alignments)) if alignments is not None else None
        progress = stack.enter_context(translation_progress(quiet))
        summary = translate_files(
            translator,
            files,
            form,
            write_to_stdout,
            to=to,
            prefix=prefix,
            write_alignment=write_alignment,
            progress=progress,
        )
    show_summary(summary, quiet)
