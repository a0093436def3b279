"""From text to a model: transduce prepare, train, runs."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from transduce.cli.options import Device, Quiet, Settings
from transduce.config import RunConfig, override
from transduce.errors import ConfigError, DataError


class ThreeValues(TyperCommand):
    """Typer knows no option that takes three values and may come again; click does."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for parameter in self.params:
            if parameter.name in ("pairs", "valid_pairs"):
                parameter.nargs = 3


def _as_given(value: Any) -> Any:
    return value


THREE = {"parser": _as_given, "metavar": "LANGUAGES SOURCE TARGET"}


# What prepare and train both take.
Files = Annotated[
    list[str] | None, typer.Argument(help="Two files of lines, one .tsv or .jsonl file, or the name of a corpus.")
]
Languages = Annotated[
    str | None, typer.Option(metavar="SOURCE-TARGET", help="Such as de-en. From file suffixes when not given.")
]
Pairs = Annotated[
    list[Any] | None, typer.Option("--pair", help="More files, such as: de-en A.txt B.txt. Repeatable.", **THREE)
]
ValidFiles = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="SOURCE TARGET", help="Validation files. Held out of the text when not given."),
]
ValidPairs = Annotated[
    list[Any] | None, typer.Option("--valid-pair", help="Validation files of one direction. Repeatable.", **THREE)
]
BothWays = Annotated[bool, typer.Option("--both-ways", help="Use every pair in both directions.")]
Columns = Annotated[
    str, typer.Option(metavar="N,M", help="Columns of source and target in a .tsv file, counted from 1.")
]
Fields = Annotated[
    str | None, typer.Option(metavar="A,B", help="Fields in a .jsonl file. The language codes when not given.")
]
DataRoot = Annotated[str | None, typer.Option(envvar="TRANSDUCE_DATA", help="Where the files of named corpora are.")]
VocabSize = Annotated[
    int | None, typer.Option(min=1, help="Subword entries. From the size of the corpus when not given.")
]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="Do not clean: keep every pair as it is.")]


def prepare_command(
    files: Files = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; with --stats alone, one to look at.")] = None,
    languages: Languages = None,
    pairs: Pairs = None,
    valid: ValidFiles = None,
    valid_pairs: ValidPairs = None,
    both_ways: BothWays = False,
    columns: Columns = "1,2",
    fields: Fields = None,
    data_root: DataRoot = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the corpora that have names, and exit.")] = False,
    vocab_size: VocabSize = None,
    keep_all: KeepAll = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Working processes. As many as there are cores when not given.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show lengths, batches and padding too.")] = False,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Turn text files into a folder to train from: read, clean, hold out, learn subwords, encode.

    Examples:

      transduce prepare train.de train.en --out prepared

      transduce prepare train.de.gz train.en.gz --valid dev.de dev.en --out prepared --stats

      transduce prepare pairs.tsv --languages de-en --columns 2,1 --out prepared

      transduce prepare --pair de-en a.de a.en --pair fr-en b.fr b.en --both-ways --out prepared

      transduce prepare tatoeba-40k --out prepared        (comes with the package)
    """
    from transduce.cli.show.tables import console_for_stdout, progress_on_stderr, show_corpora, show_report, show_stats
    from transduce.data import corpora
    from transduce.data.prepare import Prepared, prepare
    from transduce.data.stats import measure

    console = console_for_stdout()
    if list_names:
        show_corpora(console, corpora.registry(), data_root)
        return
    for setting in settings or []:
        if not setting.strip().startswith("data."):
            raise ConfigError(f"--set {setting} means nothing to prepare, only the section data does: leave it out")
    config = override(RunConfig(), settings or [])
    if out is None:
        raise ConfigError("no folder to write: add --out DIR")
    if files or pairs:
        train, valid_corpora = corpora.choose(
            files or [],
            pairs or [],
            valid,
            valid_pairs or [],
            languages=languages,
            columns=columns,
            fields=fields,
            both_ways=both_ways,
            data_root=data_root,
        )
        with progress_on_stderr(quiet) as progress:
            report = prepare(
                train,
                out,
                config.data,
                valid=valid_corpora,
                vocab_size=vocab_size,
                with_cleaning=not keep_all,
                n_processes=processes,
                progress=progress,
            )
    elif stats:
        report = Prepared(out).report
    else:
        raise ConfigError("nothing to prepare: give two files, or the name of a corpus (see --list)")
    if not as_json:
        show_report(console, report, out)
    measured = measure(Prepared(out), config.data, config.train.seed) if stats else None
    if as_json:
        found = asdict(report) | ({"stats": asdict(measured)} if measured else {})
        print(json.dumps(found, indent=2))
    elif measured:
        show_stats(console, measured)


def train_command(
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Two files of lines, one .tsv or .jsonl file, the name of a corpus, or a prepared folder."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run. The same command goes on with it.")] = None,
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
        str | None, typer.Option(metavar="tiny|small|base|big", help="By corpus and machine when not given.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Such as 20m: steps are chosen to fill it.")
    ] = None,
    from_model: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="A model or a run to begin from.")
    ] = None,
    device: Device = None,
    devices: Annotated[int, typer.Option(min=1, help="Processes, one for each GPU, or on the cores of a CPU.")] = 1,
    batch_tokens: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Tokens of a step; auto: in passes as large as fit.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits each time on a GPU too.")
    ] = False,
    passes: Annotated[
        str | None,
        typer.Option(
            metavar="written|plain", help="Written out, or as model.py and autograd have them; else the best."
        ),
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write curves for TensorBoard as well.")] = False,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Train a translator: two files in, a model folder out. Killed at any moment, the same command goes on.

    Examples:

      transduce train train.de train.en --out run

      transduce train train.de train.en --valid dev.de dev.en --out run --budget 20m

      transduce train prepared --size base --devices 8 --out run

      transduce train more.de more.en --from run --out tuned --set train.max_steps=500

      torchrun --nnodes 2 --nproc-per-node 8 ... -m transduce train prepared --size big --out /shared/run
    """
    from transduce.cli.show.tables import console_for_stdout, show_result, show_training
    from transduce.training.run import LOG, Request, read_log, start_ranks, train

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
    is_prepared = files is not None and len(files) == 1 and Path(files[0]).is_dir()
    request = Request(
        data={} if is_prepared else data,
        prepared=files[0] if is_prepared and files else None,
        keep_all=keep_all,
        vocab_size=vocab_size,
        size=size,
        budget=budget,
        from_model=from_model,
        settings=settings or [],
        device=device,
        batch_tokens=batch_tokens,
        deterministic=deterministic,
        passes=passes,
    )
    if devices > 1 and "RANK" not in os.environ:
        raise typer.Exit(start_ranks(devices, sys.argv[1:]))
    with show_training(out, quiet, tensorboard) as (tell, progress):
        result = train(out, request, tell, progress)
    if os.environ.get("RANK", "0") == "0":
        show_result(console_for_stdout(), out, result, read_log(out / LOG))


def runs_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare runs: what they are, how far they came, how good they are.

    Examples:

      transduce runs run-1 run-2

      transduce runs experiments/*
    """
    from transduce.cli.show.tables import console_for_stdout, show_runs
    from transduce.training.run import find_runs, summary_of

    found = find_runs(folders)
    if not found:
        raise DataError(f"there is no run in {', '.join(map(str, folders))}: give folders that transduce train wrote")
    summaries = [summary_of(folder) for folder in found]
    if as_json:
        print(json.dumps(summaries, indent=2))
    else:
        show_runs(console_for_stdout(), summaries)
