"""transduce evaluate."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from transduce.cli.model import load_translator
from transduce.cli.options import (
    BatchSize,
    Beam,
    Bootstrap,
    Device,
    Precision,
    Quiet,
    Settings,
    Threads,
    To,
    refuse_together,
)

if TYPE_CHECKING:
    from transduce.translation.translator import Translator


def evaluate_command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a file of finished translations.")
    ],
    reference: Annotated[Path, typer.Option(help="The reference translations, one per line.")],
    source: Annotated[
        Path | None, typer.Option(help="The sentences to translate. Not needed for a file of translations.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Another model or file of translations to compare with.")
    ] = None,
    trees: Annotated[
        bool, typer.Option("--trees", help="Compare files of bracketed trees: labelled F1 by the rules of EVALB.")
    ] = False,
    compound_split: Annotated[
        bool, typer.Option("--compound-split", help="Add the tokenised, compound-split BLEU of older papers.")
    ] = False,
    tokenise: Annotated[
        str, typer.Option(metavar="13a|none|char|intl|zh", help="BLEU's tokeniser; none if text is tokenised already.")
    ] = "13a",
    beam: Beam = None,
    to: To = None,
    bootstrap: Bootstrap = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every sentence.")] = False,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Precision = "float32",
    threads: Threads = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Score translations with sacrebleu: BLEU, chrF++ and TER, with signatures and confidence intervals.

    The scores of a model are also stored in its folder, in card.json.

    Examples:

      transduce evaluate run --source test.de --reference test.en

      transduce evaluate run --source test.de --reference test.en --against other-run

      transduce evaluate output.en --reference test.en --json
    """
    from transduce.cli.show.progress import progress_on_stderr
    from transduce.cli.show.tables import console_for_stdout, show_brackets, show_evaluation
    from transduce.evaluation.evaluate import add_to_card, evaluate_files, evaluate_trees
    from transduce.model_folder.format import find_model, model_folder

    if trees:
        refuse_together({"--trees": trees, "--source": source, "--against": against})
        score = evaluate_trees(model, reference)
        if as_json:
            print(json.dumps(asdict(score), indent=2))
        else:
            show_brackets(console_for_stdout(), score)
        return

    def load(path: Path) -> Translator:
        return load_translator(path, {"beam": beam}, settings or [], device, precision, threads, batch_size)

    with progress_on_stderr(quiet) as progress:
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
            progress=progress,
        )
    if as_json:
        print(json.dumps({"passport": passport, **evaluation.to_json()}, indent=2, ensure_ascii=False))
    else:
        show_evaluation(console_for_stdout(), evaluation)
    if model.is_dir() and not add_to_card(model_folder(model), evaluation, passport):
        print(f"transduce: {model} cannot be written, so these scores are not added to its card", file=sys.stderr)
