"""The command line: parse, build a config, one call, print. Results on stdout, messages on stderr.

Exit 0; 1 when a check fails; 2 with one line that says what to do.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from typer.core import TyperCommand

from transduce import __version__
from transduce.config import PRESETS, RunConfig, override
from transduce.errors import ConfigError, DataError, TransduceError

if TYPE_CHECKING:
    from transduce.translate import Translator

app = typer.Typer(
    help="The Transformer of “Attention Is All You Need” as real software.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Typer carries click under one name or another; its own exception is a child of what we are after.
USAGE_ERRORS: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

INTERRUPTED = 130

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Change one setting. Repeatable.")
]


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command("check-paper")
def check_paper_command(
    config: Annotated[
        str | None, typer.Option(help=f"{', '.join(PRESETS)}, or a JSON file. Both base and big when not given.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Which of the paper's models to compare with: base or big.", metavar="base|big")
    ] = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare each setting with the paper: same, differs, or not stated. Exits with 1 when one differs.

    Examples:

      transduce check-paper

      transduce check-paper --config small

      transduce check-paper --config base --set train.adam_beta2=0.997
    """
    from transduce.paper import check_paper, count_parameters, parameter_counts
    from transduce.show import console_for_stdout, paper_table

    if against not in (None, "base", "big"):
        raise ConfigError(f"--against is {against!r}, must be base or big: the paper has no other")
    names = ["base", "big"] if config is None else [config]
    configs = {name: override(read_config(name), settings or []) for name in names}
    tables = {}
    for name, checked in configs.items():
        size: Literal["base", "big"] = "big" if (against or name) == "big" else "base"
        tables[name] = size, check_paper(checked, size)
    counts = list(parameter_counts())
    papers_own = (PRESETS["base"](), PRESETS["big"]())
    for name, checked in configs.items():
        if checked not in papers_own:
            counts.append((f"{name}, as checked", None, count_parameters(checked)))
    all_rows = [row for _, rows in tables.values() for row in rows]
    different = list(dict.fromkeys(row.setting for row in all_rows if row.verdict == "differs"))  # in order, once each
    if as_json:
        checks = [
            {"config": name, "against": size, "rows": [asdict(row) for row in rows]}
            for name, (size, rows) in tables.items()
        ]
        parameters = [{"size": size, "paper": stated, "ours": ours} for size, stated, ours in counts]
        print(json.dumps({"checks": checks, "parameters": parameters}, indent=2))
    else:
        console = console_for_stdout()
        for name, (size, rows) in tables.items():
            console.print(paper_table(escape(f"{name} beside the paper's {size}"), rows))
        for of, stated, ours in counts:
            beside = "" if stated is None else f"; the paper prints {stated / 1e6:.0f} M"
            console.print(escape(f"parameters of {of}: {ours:,} ({ours / 1e6:.1f} M){beside}"))
        console.print("(each trained number once; base and big at exactly 37,000 shared entries: the paper says about)")
        verdict = f"differing from the paper: {', '.join(different)}" if different else "nothing differs from the paper"
        console.print(verdict)
    if different:
        raise typer.Exit(1)


class _ThreeValues(TyperCommand):
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
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="A GPU where there is one.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


@app.command("prepare", cls=_ThreeValues)
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
    from transduce.data import corpora
    from transduce.data.prepare import Prepared, prepare
    from transduce.data.stats import measure
    from transduce.show import console_for_stdout, progress_on_stderr, show_corpora, show_report, show_stats

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
            files or [], pairs or [], valid, valid_pairs or [],
            languages=languages, columns=columns, fields=fields, both_ways=both_ways, data_root=data_root,
        )  # fmt: skip
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


@app.command("train", cls=_ThreeValues)
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
    from transduce.show import console_for_stdout, show_result, show_training
    from transduce.training.run import LOG, Request, read_log, start_ranks, train

    if out is None:
        raise ConfigError("no folder for the run: add --out RUN")
    if not files and not pairs:
        raise ConfigError("nothing to train on: give two files, or the name of a corpus (see prepare --list)")
    data = {
        "files": files or [], "pairs": pairs or [], "valid": valid, "valid_pairs": valid_pairs or [],
        "languages": languages, "columns": columns, "fields": fields, "both_ways": both_ways, "data_root": data_root,
    }  # fmt: skip
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


# What translate, evaluate and inspect take.
Beam = Annotated[
    int | None, typer.Option(min=1, help="Hypotheses kept; 1 is greedy search. The model's when not given.")
]
To = Annotated[str | None, typer.Option(metavar="LANGUAGE", help="Into which, where a model knows several.")]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="Sentences side by side; 64, in int8 32, when not given. Changes speed, not text."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Of the CPU. All cores when not given.")]
Precision = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16|int8", help="Of the model's numbers; int8 is for CPUs.")
]

Prefix = Annotated[str, typer.Option(help="How every translation must begin.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching the best.")]
Temperature = Annotated[float | None, typer.Option(help="Of sampling.")]
TopK = Annotated[int | None, typer.Option(help="Of sampling: from so many tokens.")]
TopP = Annotated[float | None, typer.Option(help="Of sampling: from the fewest tokens of this probability.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling.")]


@app.command("translate")
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
    from transduce.records import Form, translate_files
    from transduce.show import show_summary, translation_progress

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


def bundled_model(quiet: bool) -> Path:
    from transduce.checkpoint import BUNDLED, BUNDLED_MODEL

    if not quiet:
        print(f"by {BUNDLED_MODEL}, which comes along and knows short German sentences", file=sys.stderr)
    return BUNDLED


def decoding_flags(beam: int | None, sample: bool, **of_sampling: Any) -> dict[str, Any]:
    refuse_together({"--beam": beam, "--sample": sample or None})
    for name, value in of_sampling.items():
        if value is not None and not sample:
            raise ConfigError(f"--{name.replace('_', '-')} means something to sampling alone: add --sample")
    return {"beam_size": beam, "method": "sample" if sample else None, **of_sampling}


def refuse_together(given: dict[str, Any]) -> None:
    if len(both := [name for name, value in given.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(both)} exclude each other: keep one")


def load_translator(
    model: Path,
    flags: dict[str, Any],
    settings: list[str],
    device: str | None,
    precision: str,
    threads: int | None,
    batch_size: int | None = None,
) -> Translator:
    """With the model's own way of decoding, changed by flags and then by `--set`."""
    import torch

    from transduce.checkpoint import load_config, model_folder
    from transduce.training.choices import check_device
    from transduce.translate import Translator

    for setting in settings:
        if not setting.strip().startswith("decode."):
            raise ConfigError(f"--set {setting} means nothing to a trained model, only the section decode does")
    if precision not in ("float32", "bfloat16", "int8"):
        raise ConfigError(f"--dtype is {precision!r}, must be float32, bfloat16 or int8: leave it out for float32")
    check_device(device)
    config = load_config(model_folder(model))
    if (n_best := flags.get("n_best")) is not None and flags.get("beam_size") is None and not flags.get("method"):
        flags = flags | {"beam_size": max(n_best, config.decode.beam_size)}
    given = [f"decode.{name}={value}" for name, value in flags.items() if value is not None]
    config = override(config, [*given, *settings])
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    translator = Translator.load(
        model, device=device, dtype=dtype, settings=config.decode, batch_size=batch_size,
        precision="int8" if precision == "int8" else "float32",
    )  # fmt: skip
    if precision == "int8" and (reason := translator.why_slow) is not None:
        print(f"int8 is slow here: {reason}", file=sys.stderr)
    return translator


@app.command("inspect")
def inspect_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL SENTENCE",
            help="A model folder, or a run, else what comes along; then sentences, each in quotes.",
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file of sentences, a line for each. Standard input: -")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens in any browser, offline.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all weights and numbers.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw one head, or all of a layer, of one sentence.")] = None,
    svg: Annotated[Path | None, typer.Option(help="The same, for print.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    kind: Annotated[
        str, typer.Option(metavar="encoder|decoder|memory", help="For pictures: which attention.")
    ] = "memory",
    layer: Annotated[int | None, typer.Option(min=1, help="For pictures, counted from 1.")] = None,
    head: Annotated[
        int | None, typer.Option(min=1, help="For pictures, counted from 1. Else all of the layer.")
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
    """Look inside a translation: what each head looks at, how sure each token is, which words belong together.

    Examples:

      transduce inspect "Das ist nicht gut." --html out.html --open

      transduce inspect run "Das ist gut." "Wo ist mein Buch?" --html out.html

      transduce inspect run --source test.de --json attention.json

      transduce inspect "Das ist nicht gut."                        (a summary in words)

      transduce inspect "Das ist nicht gut." --svg head.svg --kind encoder --layer 2 --head 3
    """
    from transduce.insight.attention import inspect
    from transduce.insight.output import Wanted, direction_of, sentences_of, split_arguments, write
    from transduce.show import console_for_stdout

    wanted = Wanted(html=html, json=json_path, png=png, svg=svg, kind=kind, layer=layer, head=head, is_opened=open_page)
    flags = decoding_flags(beam, sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    named, sentences = split_arguments(arguments or [])
    sentences = sentences_of(sentences, source)
    model = bundled_model(quiet) if named is None else named
    translator = load_translator(model, flags, settings or [], device, "float32", threads)
    records = list(inspect(translator, sentences, to, prefix=prefix))
    told = write(records, wanted, console_for_stdout(), model.resolve().name, direction_of(translator, to))
    if not quiet:
        for line in told:
            print(line, file=sys.stderr)


def write_to_stdout(line: str) -> None:
    """As it comes: who reads may be waiting."""
    out = sys.stdout.buffer
    try:
        out.write(line.encode("utf-8", "surrogatepass"))
        out.flush()
    except BrokenPipeError:  # who reads has had enough: as a program ends that SIGPIPE ends, without a word
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise DataError(f"standard output cannot be written ({error.strerror}): make room there") from None


@contextmanager
def open_to_write(path: Path) -> Iterator[Callable[[str], None]]:
    from transduce.folders import told_of

    with told_of(path):
        file = path.open("w", encoding="utf-8")

    def write(line: str) -> None:
        with told_of(path):
            file.write(line)

    try:
        yield write
    finally:
        with told_of(path):
            file.close()


@app.command("evaluate")
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
    from transduce.checkpoint import find_model, model_folder
    from transduce.evaluate import add_to_card, evaluate_files, evaluate_trees
    from transduce.show import console_for_stdout, progress_on_stderr, show_brackets, show_evaluation

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
            find_model(model), source, reference, load, against=against and find_model(against), to=to,
            n_bootstrap=bootstrap, with_compound_split=compound_split, tokenise=tokenise, progress=told,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"passport": passport, **evaluation.to_json()}, indent=2, ensure_ascii=False))
    else:
        show_evaluation(console_for_stdout(), evaluation)
    if model.is_dir() and not add_to_card(model_folder(model), evaluation, passport):
        print(f"transduce: {model} cannot be written, so its card does not have these scores", file=sys.stderr)


@app.command("serve")
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
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Believe this proxy's X-Forwarded-For. Repeatable."),
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

    from transduce.checkpoint import BUNDLED
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


@app.command("runs")
def runs_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold them.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare runs: what they are, how far they came, how good they are.

    Examples:

      transduce runs run-1 run-2

      transduce runs experiments/*
    """
    from transduce.show import console_for_stdout, show_runs
    from transduce.training.run import find_runs, summary_of

    found = find_runs(folders)
    if not found:
        raise DataError(f"there is no run in {', '.join(map(str, folders))}: give folders that transduce train wrote")
    summaries = [summary_of(folder) for folder in found]
    if as_json:
        print(json.dumps(summaries, indent=2))
    else:
        show_runs(console_for_stdout(), summaries)


# Looking inside: what these take.
Model = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="A model folder, or a run. The one that comes along when not given."),
]


@app.command("embed")
def embed_command(
    model: Model = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files of lines, .gz and .xz too. Standard input: -")
    ] = None,
    pool: Annotated[str, typer.Option(metavar="mean|max|first", help="Over the tokens of a sentence.")] = "mean",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Write a NumPy array there. JSON lines when not given.")
    ] = None,
    two: Annotated[
        tuple[str, str] | None, typer.Option("--similarity", help="Print the cosine similarity of two sentences.")
    ] = None,
    to: To = None,
    device: Device = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Turn sentences into vectors: what the encoder makes of each, one line out for each one in.

    A blank line is null, and zeros in a NumPy array.

    Examples:

      transduce embed run in.de > vectors.jsonl

      transduce embed run in.de --pool max --out vectors.npy

      transduce embed --similarity 'Das Auto ist schnell.' 'Der Wagen ist schnell.'
    """
    from transduce.folders import check_writable, write_whole
    from transduce.insight.embed import as_npy, check_pool, embed, embed_stream, similarity
    from transduce.records import Form

    refuse_together({"--similarity": two, "--out": out})
    way = check_pool(pool)
    if model is not None and (str(model) == "-" or model.is_file()):
        model, files = None, [str(model), *(files or [])]
    if out is not None:
        if out.suffix != ".npy":
            raise ConfigError(f"--out is {out}, must end in .npy: it is a NumPy array")
        check_writable(out)
    translator = load_to_look_inside(model, [], device, threads, quiet)
    if two is not None:
        print(f"{similarity(translator, *two, way, to):.4f}")
        return

    def refuse(where: str) -> None:
        raise DataError(f"{where}: is no UTF-8: mend the line")

    texts = (record.text for record in Form().read(files or [], refuse))
    if out is not None:
        write_whole(out, as_npy(embed(translator, list(texts), way, to)))
        return
    for vector in embed_stream(translator, texts, way, to):
        write_to_stdout(json.dumps(None if vector is None else [float(str(x)) for x in vector]) + "\n")


@app.command("ablate")
def ablate_command(
    model: Model = None,
    source: Annotated[
        Path | None, typer.Option(help="What is translated. Of the model that comes along: what it never saw.")
    ] = None,
    reference: Annotated[Path | None, typer.Option(help="What translations should say, a line for each.")] = None,
    sentences: Annotated[int, typer.Option(min=1, help="The first so many lines of both.")] = 500,
    beam: Annotated[int, typer.Option(min=1, help="Hypotheses kept; 1 is greedy search.")] = 1,
    to: To = None,
    bootstrap: Annotated[int, typer.Option(min=0, help="Samples for the intervals; 0: none.")] = 1000,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a heat map there.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Write a heat map there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    device: Device = None,
    threads: Threads = None,
    settings: Settings = None,
    quiet: Quiet = False,
) -> None:
    """Take out each head, each attention and each layer in turn, and see what becomes of BLEU, chrF++ and the loss.

    Nothing is trained again, and the model stays as it is.

    Examples:

      transduce ablate run --source test.de --reference test.en

      transduce ablate run --source test.de --reference test.en --sentences 200 --svg heads.svg

      transduce ablate --json > heads.json                  (the model that comes along, on what it never saw)
    """
    from transduce.checkpoint import BUNDLED, find_model
    from transduce.folders import check_writable
    from transduce.insight.ablation import ablate_files
    from transduce.insight.ablation_views import ablation_figure, show_ablation
    from transduce.insight.drawing import check_figure_file, check_matplotlib, write_figure
    from transduce.show import console_for_stdout, progress_on_stderr

    pictures = [path for path in (svg, png) if path is not None]
    for path in pictures:
        check_matplotlib()
        check_figure_file(path)
        check_writable(path)
    if source is None and reference is None and find_model(model or BUNDLED) == BUNDLED:
        source, reference = BUNDLED / "heldout.de.xz", BUNDLED / "heldout.en.xz"
    if source is None or reference is None:
        raise ConfigError("there is nothing to translate or to compare with: add --source FILE --reference FILE")
    translator = load_to_look_inside(model, settings or [], device, threads, quiet, beam_size=beam)
    with progress_on_stderr(quiet) as told:
        found, passport = ablate_files(
            translator, source, reference, n_sentences=sentences, to=to, n_bootstrap=bootstrap, progress=told
        )
    if as_json:
        print(json.dumps({"passport": {"model": (model or BUNDLED).name, **passport}, **found.to_json()}, indent=2))
    else:
        show_ablation(console_for_stdout(), found, translator.config.model)
    for path in pictures:
        write_figure(ablation_figure(found, translator.config.model), path)


@app.command("figures")
def figures_command(
    model: Model = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to write into.")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAME,NAME", help="These alone; see --list.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the figures, and exit.")] = False,
    appendix: Annotated[
        bool, typer.Option("--appendix", help="The figures of the paper's appendix alone, of this model.")
    ] = False,
    sentence: Annotated[str | None, typer.Option(help="For the appendix. A German one when not given.")] = None,
    link: Annotated[
        str | None, typer.Option(metavar="PRONOUN=WORD", help="Whom a pronoun of the sentence means, for anaphora.")
    ] = None,
    words: Annotated[str | None, typer.Option(metavar="WORD,WORD", help="Whose nearest embeddings are drawn.")] = None,
    formats: Annotated[str, typer.Option("--format", metavar="svg|png|svg,png", help="Of the files.")] = "svg",
    to: To = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Draw the paper's formulas, and what a model has learnt, each value by the package's own functions.

    Examples:

      transduce figures --out figures

      transduce figures --only positions,schedule --format png --out figures

      transduce figures --appendix --out figures            (which heads show it best is measured, and said)

      transduce figures run --appendix --sentence 'Tom sagte, er komme.' --link er=Tom --out figures
    """
    from transduce.insight import figures
    from transduce.insight.appendix import Subject, read_link
    from transduce.insight.drawing import check_matplotlib, folder_for_figures

    if list_names:
        for name, kind in figures.FIGURES.items():
            print(f"{name:<12} {kind.about}")
        return
    if out is None:
        raise ConfigError("no folder to write: add --out DIR")
    check_matplotlib()
    refuse_together({"--only": only, "--appendix": appendix or None})
    names, kinds = figures.choose(only, appendix), figures.check_formats(formats)
    if "anaphora" in names and only is None and sentence is not None and link is None:
        names.remove("anaphora")
        print("anaphora is left out: it needs --link PRONOUN=WORD", file=sys.stderr)
    given = {"MODEL": model, "--sentence": sentence, "--link": link, "--words": words, "--to": to}
    figures.refuse_unread(names, given)
    subject = None
    if figures.needs_model(names):
        pronoun = read_link(link, sentence)
        translator = load_to_look_inside(model, [], device, None, quiet)
        subject = Subject(translator, sentence, pronoun, figures.read_names("--words", words), to)
    for path, about in figures.write_figures(folder_for_figures(out), names, kinds, subject):
        print(f"{path}  {about}")


def load_to_look_inside(
    model: Path | None, settings: list[str], device: str | None, threads: int | None, quiet: bool, **flags: Any
) -> Translator:
    path = bundled_model(quiet) if model is None else model
    return load_translator(path, flags, settings, device, "float32", threads, 64)


def read_config(name: str) -> RunConfig:
    """A preset by name, or a JSON file."""
    if name in PRESETS:
        return PRESETS[name]()
    try:
        return RunConfig.from_json(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        known = ", ".join(PRESETS)
        raise ConfigError(f"{name} cannot be read ({reason}): give {known}, or a JSON file") from None


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
