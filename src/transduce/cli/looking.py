"""Looking inside: transduce inspect, embed, ablate, figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.cli.options import Beam, Device, Quiet, Settings, Threads, To
from transduce.cli.output import write_to_stdout
from transduce.cli.translator import (
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
from transduce.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transduce.translation.translator import Translator


Model = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="A model folder, or a run. The one that comes along when not given."),
]


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
    from transduce.cli.show.tables import console_for_stdout
    from transduce.insight.attention import inspect
    from transduce.insight.output import Wanted, direction_of, sentences_of, split_arguments, write

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
    from transduce.files import check_writable, write_whole
    from transduce.insight.embed import as_npy, check_pool, embed, embed_stream, similarity
    from transduce.translation.records import Form

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
    from transduce.cli.show.tables import console_for_stdout, progress_on_stderr
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
    return load_translator(path, flags, settings, device, "float32", threads)
