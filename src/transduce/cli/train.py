"""transduce train."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.corpus_options import (
    BothWays,
    Columns,
    DataRoot,
    Fields,
    KeepAll,
    Languages,
    Pairs,
    ValidFiles,
    ValidPairs,
    VocabSize,
)
from transduce.cli.options import Device, Quiet, Settings
from transduce.errors import ConfigError


def train_command(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Two text files, one .tsv or .jsonl file, the name of a corpus, or a prepared folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. The same command resumes it.")] = None,
    languages: Languages = None,
    pairs: Pairs = None,
    valid: ValidFiles = None,
    valid_pairs: ValidPairs = None,
    both_ways: BothWays = False,
    columns: Columns = "1,2",
    fields: Fields = None,
    data_root: DataRoot = None,
    vocab_size: VocabSize = None,
    keep_all: KeepAll = False,
    size: Annotated[
        str | None,
        typer.Option(metavar="tiny|small|base|big", help="Default: chosen by the size of the corpus and the machine."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="A time such as 20m. The number of steps is chosen to fill it.")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="How often to read the training text. Default: chosen by its size.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="paper|inverse-root|cosine|linear", help="The learning rate over time. Default: paper."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A JSON or TOML file with settings, such as run.json of another run.")
    ] = None,
    from_model: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="A model or a run whose weights to begin with.")
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|CORPUS",
            help="Older text to mix in, of which nothing is held out: a corpus, or two files by giving this twice.",
        ),
    ] = None,
    device: Device = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Number of processes: one for each GPU, or several on the cores of a CPU.")
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of each process. Default: OMP_NUM_THREADS, else one per core."),
    ] = None,
    batch_tokens: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Tokens of a step. auto: split it into the largest passes that fit."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a GPU: every run gives the same bits, but is slower.")
    ] = False,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="written|plain", help="Hand-written backward pass, or autograd. Default: the fastest supported."
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write curves for TensorBoard.")] = False,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Train a translator: from two text files to a model folder. The same command resumes a run that was stopped.

    Examples:

      transduce train train.de train.en --out run

      transduce train train.de train.en --valid dev.de dev.en --out run --budget 20m

      transduce train prepared --size base --devices 8 --out run

      transduce train more.de more.en --from run --out tuned --mix train.de --mix train.en

      transduce train train.de train.en --out again --config run/run.json --set train.seed=2

      torchrun --nnodes 2 --nproc-per-node 8 ... -m transduce train prepared --size big --out /shared/run
    """
    from transduce.cli.show.tables import console_for_stdout
    from transduce.cli.show.training import show_result, show_training
    from transduce.insight.report import REPORT, with_report
    from transduce.runtime import process_age
    from transduce.training.journal import LOG, read_events
    from transduce.training.request import Request, settings_from_file
    from transduce.training.run import start_ranks, train

    if valid is not None and any(value.startswith("--") for value in valid):
        raise ConfigError(f"--valid needs two files, but got {' and '.join(valid)}: give source and target")
    if out is None:
        raise ConfigError("no folder for the run: add --out RUN")
    if not files and not pairs:
        raise ConfigError("nothing to train on: give two files, or the name of a corpus (see prepare --list)")
    data = {
        "files": files or [],
        "pairs": pairs or [],
        "valid": valid,
        "valid_pairs": valid_pairs or [],
        "languages": languages,
        "columns": columns,
        "fields": fields,
        "both_ways": both_ways,
        "data_root": data_root,
    }
    if mix:
        data["mix"] = mix
    is_prepared = files is not None and len(files) == 1 and Path(files[0]).is_dir()
    request = Request(
        data={} if is_prepared else data,
        prepared=files[0] if is_prepared and files else None,
        keep_all=keep_all,
        vocab_size=vocab_size,
        size=size,
        budget=budget,
        epochs=epochs,
        from_model=from_model,
        settings=[
            *(settings_from_file(config, with_steps=budget is None and epochs is None) if config is not None else []),
            *([f"train.schedule={schedule}"] if schedule is not None else []),
            *(settings or []),
        ],
        device=device,
        batch_tokens=batch_tokens,
        deterministic=deterministic,
        threads=threads,
        passes=passes,
    )
    if devices > 1 and "RANK" not in os.environ:
        raise typer.Exit(start_ranks(devices, sys.argv[1:]))
    with show_training(out, quiet, tensorboard) as (on_event, progress):
        result = train(out, request, with_report(out, on_event), progress, process_age())
    if os.environ.get("RANK", "0") == "0" and not quiet:
        show_result(console_for_stdout(), out, result, read_events(out / LOG))
        print(f"report: {out / REPORT}")
