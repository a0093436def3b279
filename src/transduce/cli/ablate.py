"""transduce ablate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import load_to_inspect
from transduce.cli.options import AsJson, Bootstrap, Device, Model, Quiet, Settings, Threads, To
from transduce.errors import ConfigError


def ablate_command(
    model: Model = None,
    source: Annotated[
        Path | None,
        typer.Option(help="The sentences to translate. Default, for the bundled model: its held-out sentences."),
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="The reference translations, one per line.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="Use the first N lines.")] = 500,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept per sentence; 1 is greedy search.")] = 1,
    to: To = None,
    bootstrap: Bootstrap = 1000,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a heat map.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a heat map.")] = None,
    as_json: AsJson = False,
    device: Device = None,
    threads: Threads = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Remove each head, each attention and each layer in turn, and measure the change in BLEU, chrF++ and loss.

    Nothing is trained again, and the model is not changed.

    Examples:

      transduce ablate run --source test.de --reference test.en

      transduce ablate run --source test.de --reference test.en --sentences 200 --svg heads.svg

      transduce ablate --json > heads.json
    """
    from transduce.cli.show.progress import progress_on_stderr
    from transduce.cli.show.tables import console_for_stdout
    from transduce.files import check_writable
    from transduce.insight.ablation import ablate_files
    from transduce.insight.ablation_views import ablation_figure, show_ablation
    from transduce.insight.drawing import check_figure_file, check_matplotlib, write_figure
    from transduce.model_folder.format import BUNDLED, find_model

    pictures = [path for path in (svg, png) if path is not None]
    for path in pictures:
        check_matplotlib()
        check_figure_file(path)
        check_writable(path)
    if source is None and reference is None and find_model(model or BUNDLED) == BUNDLED:
        source, reference = BUNDLED / "heldout.de.xz", BUNDLED / "heldout.en.xz"
    if source is None or reference is None:
        raise ConfigError("--source and --reference are both needed: add --source FILE --reference FILE")
    translator = load_to_inspect(model, settings or [], device, threads, quiet, beam_size=beam)
    with progress_on_stderr(quiet) as progress:
        ablation, passport = ablate_files(
            translator, source, reference, n_sentences=sentences, to=to, n_bootstrap=bootstrap, progress=progress
        )
    if as_json:
        print(json.dumps({"passport": {"model": (model or BUNDLED).name, **passport}, **ablation.to_json()}, indent=2))
    else:
        show_ablation(console_for_stdout(), ablation, translator.config.model)
    for path in pictures:
        write_figure(ablation_figure(ablation, translator.config.model), path)
