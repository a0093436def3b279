"""transduce figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import load_to_inspect
from transduce.cli.options import Device, Model, Quiet, To, refuse_together
from transduce.errors import ConfigError


def figures_command(
    model: Model = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to write to.")] = None,
    only: Annotated[str | None, typer.Option(metavar="NAME,NAME", help="Draw only these figures; see --list.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    appendix: Annotated[
        bool, typer.Option("--appendix", help="Draw only the figures of the paper's appendix, for this model.")
    ] = False,
    sentence: Annotated[
        str | None, typer.Option(help="The sentence for the appendix. Default: a German sentence.")
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="PRONOUN=WORD", help="For anaphora: the word that a pronoun refers to.")
    ] = None,
    words: Annotated[
        str | None, typer.Option(metavar="WORD,WORD", help="Draw the nearest embeddings of these words.")
    ] = None,
    formats: Annotated[str, typer.Option("--format", metavar="svg|png|svg,png", help="File formats.")] = "svg",
    to: To = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Draw the paper's formulas and what a model has learnt, computed by the package's own functions.

    Examples:

      transduce figures --out figures

      transduce figures --only positions,schedule --format png --out figures

      transduce figures --appendix --out figures

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
        raise ConfigError("the folder to write to is missing: add --out DIR")
    check_matplotlib()
    refuse_together({"--only": only, "--appendix": appendix or None})
    names, kinds = figures.choose(only, appendix), figures.check_formats(formats)
    if "anaphora" in names and only is None and sentence is not None and link is None:
        names.remove("anaphora")
        print("anaphora is left out: it needs --link PRONOUN=WORD", file=sys.stderr)
    options = {"MODEL": model, "--sentence": sentence, "--link": link, "--words": words, "--to": to}
    figures.refuse_unused_options(names, options)
    subject = None
    if figures.needs_model(names):
        pronoun = read_link(link, sentence)
        translator = load_to_inspect(model, [], device, None, quiet)
        subject = Subject(translator, sentence, pronoun, figures.read_names("--words", words), to)
    for path, about in figures.write_figures(folder_for_figures(out), names, kinds, subject):
        print(f"{path}  {about}")
