"""From a model to translations: transduce translate, evaluate, serve."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.options import Beam, Device, Quiet, Settings, Threads, To
from transduce.cli.output import open_to_write, write_to_stdout
from transduce.cli.translator import (
    BatchSize,
    Precision,
    Prefix,
    Sample,
    Seed,
    Temperature,
    TopK,
    TopP,
    bundled_model,
    decoding_flags,
    load_translator,
    refuse_together,
)
from transduce.errors import ConfigError

if TYPE_CHECKING:
    from transduce.translation.translator import Translator


def translate_command(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="A model folder, or a run. When not given: German to English, by what comes along."
        ),
    ] = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files of lines, .gz and .xz too. Standard input: -")
    ] = None,
    beam: Beam = None,
    nbest: Annotated[
        int | None, typer.Option(min=1, help="Print so many translations of each line. The beam is at least as wide.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Add a tab and the score.")] = False,
    alignments: Annotated[
        Path | None, typer.Option(help="Write which words belong together to this file, a line for each: 0-0 1-2.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="An object a line: tokens, probabilities, runners-up, flags, alignment.")
    ] = False,
    to: To = None,
    prefix: Prefix = "",
    column: Annotated[
        int | None, typer.Option(min=1, help="Translate this column of a table; the translation is added as the last.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--field", help="Translate this field of JSON lines, such as text or text.de.")
    ] = None,
    into: Annotated[str, typer.Option(help="The field that the translation becomes, with --field.")] = "translation",
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
    quiet: Quiet = False,
) -> None:
    """Translate lines: one out for each one in, in order, as they come.

    Examples:

      transduce translate run < in.de > out.en

      transduce translate run in.de.gz --nbest 5

      echo 'Das ist ein Haus.' | transduce translate run --json

      transduce translate run table.tsv --column 2 --scores

      transduce translate run in.de --alignments out.align > out.en

      echo 'Das ist ein Haus.' | transduce translate              (by the model that comes along)
    """
    from transduce.cli.show.tables import show_summary, translation_progress
    from transduce.translation.records import Form, translate_files

    flags = decoding_flags(beam, sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    refuse_together({"--column": column, "--field": key, "--json": as_json or None})
    refuse_together({"--nbest": nbest, "--column": column})
    refuse_together({"--nbest": nbest, "--field": key})
    flags["n_best"] = nbest
    if model is None or str(model) == "-" or (model.exists() and not model.is_dir()):
        model, files = bundled_model(quiet), [str(model)] * (model is not None) + (files or [])
    translator = load_translator(model, flags, settings or [], device, precision, threads, batch_size)
    if alignments is not None and translator.heads is None:
        raise ConfigError(f"{model} does not say which heads align words: train it again, or leave out --alignments")
    form = Form(column, key, into, as_json, translator.settings.n_best, scores)
    with ExitStack() as stack:
        aligned = stack.enter_context(open_to_write(alignments)) if alignments is not None else None
        told = stack.enter_context(translation_progress(quiet))
        summary = translate_files(
            translator, files or [], form, write_to_stdout, to=to, prefix=prefix, write_alignment=aligned, progress=told
        )
    show_summary(summary, quiet)


def evaluate_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, a run, or a file of translations by anybody.")
    ],
    reference: Annotated[Path, typer.Option(help="What translations should say, a line for each.")],
    source: Annotated[Path | None, typer.Option(help="What is translated. A file of translations needs none.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Another model or file of translations to compare with.")
    ] = None,
    trees: Annotated[
        bool, typer.Option("--trees", help="Files of bracketed trees: labelled-bracket F1 by the rules of EVALB.")
    ] = False,
    compound_split: Annotated[
        bool, typer.Option("--compound-split", help="Add the tokenised, compound-split BLEU of old papers.")
    ] = False,
    tokenise: Annotated[
        str, typer.Option(metavar="13a|none|char|intl|zh", help="For BLEU; none: the text is tokenised already.")
    ] = "13a",
    beam: Beam = None,
    to: To = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Samples for the intervals; 0: none.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every sentence.")] = False,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Precision = "float32",
    threads: Threads = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Score translations: BLEU, chrF++ and TER as sacrebleu has them, with signatures and intervals.

    A model's scores are also kept in its folder, in card.json.

    Examples:

      transduce evaluate run --source test.de --reference test.en

      transduce evaluate run --source test.de --reference test.en --against other-run

      transduce evaluate output.en --reference test.en --json
    """
    from transduce.cli.show.tables import console_for_stdout, progress_on_stderr, show_brackets, show_evaluation
    from transduce.evaluation.evaluate import add_to_card, evaluate_files, evaluate_trees
    from transduce.model_folder.format import find_model, model_folder

    if trees:
        refuse_together({"--trees": trees, "--source": source, "--against": against})
        found = evaluate_trees(model, reference)
        if as_json:
            print(json.dumps(asdict(found), indent=2))
        else:
            show_brackets(console_for_stdout(), found)
        return

    def load(path: Path) -> Translator:
        return load_translator(path, {"beam_size": beam}, settings or [], device, precision, threads, batch_size)

    with progress_on_stderr(quiet) as told:
        evaluation, passport = evaluate_files(
            find_model(model),
            source,
            reference,
            load,
            against=against and find_model(against),
            to=to,
            n_bootstrap=bootstrap,
            with_compound_split=compound_split,
            tokenise=tokenise,
            progress=told,
        )
    if as_json:
        print(json.dumps({"passport": passport, **evaluation.to_json()}, indent=2, ensure_ascii=False))
    else:
        show_evaluation(console_for_stdout(), evaluation)
    if model.is_dir() and not add_to_card(model_folder(model), evaluation, passport):
        print(f"transduce: {model} cannot be written, so its card does not have these scores", file=sys.stderr)


def serve_command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL]...", help="Model folders, or runs. When not given: what comes along."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 5000,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that clients must send.")] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Let all who reach another address than loopback ask.")
    ] = False,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change one limit, such as characters. Repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A name of this server, beside localhost. Repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Let pages from there ask, by CORS. Repeatable.")
    ] = None,
    trust_proxy: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="Believe this proxy's X-Forwarded-For. Repeatable.")
    ] = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Write texts and translations into the log.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Requests never share a batch: slower, to see what sharing is worth.")
    ] = False,
    beam: Beam = None,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Precision = "float32",
    threads: Threads = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No line for each request.")] = False,
) -> None:
    """Serve translations over HTTP, by LibreTranslate's API. Ctrl-C or SIGTERM: what was accepted is answered first.

    Examples:

      transduce serve                                             (by the model that comes along)

      transduce serve run-de-en run-en-de --port 8080 --dtype int8

      transduce serve run --host 0.0.0.0 --token-file token --limit characters=20000
    """
    try:
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'transduce[serve]'") from None
    import torch

    from transduce.model_folder.format import BUNDLED
    from transduce.serving.guard import Access
    from transduce.serving.limits import Limits
    from transduce.serving.server import check_address, read_token, serve
    from transduce.serving.service import Service

    limits = Limits().changed(limit or [])
    refuse_together({"--token-file": token_file, "--without-token": without_token or None})
    token = read_token(token_file) if token_file is not None else None
    check_address(host, token, without_token=without_token)
    translators = {
        str(path): load_translator(path, {"beam_size": beam}, settings or [], device, precision, threads, batch_size)
        for path in models or [BUNDLED]
    }
    is_cpu = all(translator.device.type == "cpu" for translator in translators.values())
    service = Service(translators, limits, n_workers=torch.get_num_threads() if is_cpu else 1, alone=alone)
    access = Access(token, tuple(allow_host or ()), tuple(allow_origin or ()))
    serve(service, access, host, port, proxies=trust_proxy or [], log_text=log_text, quiet=quiet)
