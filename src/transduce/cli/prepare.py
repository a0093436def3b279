"""transduce prepare."""

from __future__ import annotations

import json
from dataclasses import asdict
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
from transduce.cli.options import Quiet, Settings
from transduce.config import RunConfig, override
from transduce.errors import ConfigError


def prepare_command(
    files: Annotated[
        list[str] | None, typer.Argument(help="Two text files, one .tsv or .jsonl file, or the name of a corpus.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write. With --stats and no files: the folder to describe.")
    ] = None,
    languages: Languages = None,
    pairs: Pairs = None,
    valid: ValidFiles = None,
    valid_pairs: ValidPairs = None,
    both_ways: BothWays = False,
    columns: Columns = "1,2",
    fields: Fields = None,
    data_root: DataRoot = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the corpora that have a name, and exit.")] = False,
    vocab_size: VocabSize = None,
    keep_all: KeepAll = False,
    processes: Annotated[int | None, typer.Option(min=1, help="Worker processes. Default: one per core.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Also show lengths, batches and padding.")] = False,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Quiet = False,
) -> None:
    """Turn text files into a folder of training data: clean them, hold out validation pairs, learn subwords, encode.

    Examples:

      transduce prepare train.de train.en --out prepared

      transduce prepare train.de.gz train.en.gz --valid dev.de dev.en --out prepared --stats

      transduce prepare pairs.tsv --languages de-en --columns 2,1 --out prepared

      transduce prepare pairs.jsonl --out prepared        (lines such as {"translation": {"de": "...", "en": "..."}})

      transduce prepare --pair de-en a.de a.en --pair fr-en b.fr b.en --both-ways --out prepared

      transduce prepare tatoeba-40k --out prepared        (part of the package)
    """
    from transduce.cli.show.progress import progress_on_stderr
    from transduce.cli.show.tables import console_for_stdout, show_corpora, show_report, show_stats
    from transduce.data import corpora
    from transduce.data.prepare import Prepared, prepare
    from transduce.data.stats import measure

    console = console_for_stdout()
    if list_names:
        names = corpora.corpus_names()  # others have only trees, or only text for tests
        show_corpora(console, {name: facts for name, facts in corpora.registry().items() if name in names}, data_root)
        return
    for setting in settings or []:
        if not setting.strip().startswith("data."):
            raise ConfigError(f"--set {setting} has no effect on prepare: only data.* settings do")
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
        print(json.dumps(asdict(report) | ({"stats": asdict(measured)} if measured else {}), indent=2))
    elif measured:
        show_stats(console, measured)
