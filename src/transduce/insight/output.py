"""Reads the arguments of `transduce inspect` and writes its results: a page, JSON, a picture, or a summary."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from transduce.errors import ConfigError, DataError, ModelFolderError
from transduce.files import write_atomically
from transduce.insight.attention import AttentionRecord, to_document
from transduce.insight.heads import KINDS
from transduce.insight.page import to_page
from transduce.insight.picture import choose_heads, draw
from transduce.insight.summary import show_record
from transduce.model_folder.format import BUNDLED_MODEL
from transduce.translation.arguments import is_sentence, split_model
from transduce.translation.records import STDIN, Form, check_readable
from transduce.translation.translator import Translator


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    html: Path | None = None
    json: Path | None = None
    png: Path | None = None
    svg: Path | None = None
    kind: str = "memory"
    layer: int | None = None
    head: int | None = None
    """`kind`, `layer` and `head` select what a picture shows. Layers and heads count from 1."""
    opens_page: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind is {self.kind!r}, must be {', '.join(KINDS)}: choose one")
        if self.opens_page and self.html is None:
            raise ConfigError("--open needs a page to open: add --html FILE")
        if self.head is not None and self.layer is None:
            raise ConfigError("--head needs the number of its layer: add --layer N")
        if not self.pictures and (self.layer is not None or self.kind != "memory"):
            raise ConfigError("--kind, --layer and --head select what a picture shows: add --png FILE or --svg FILE")

    @property
    def pictures(self) -> list[Path]:
        return [path for path in (self.png, self.svg) if path is not None]


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separates the model (None if the first argument does not name one) from the sentences."""
    model, sentences = split_model(arguments)
    if model is None and sentences and sentences[0] and not is_sentence(sentences[0]):
        first = sentences[0]
        if os.path.isfile(first):
            raise DataError(f"{first} is a file: give sentences in quotes, or read the file with --source {first}")
        if len(sentences) > 1 or os.sep in first:
            raise ModelFolderError(
                f"{first} is not a model folder: give one, or write {BUNDLED_MODEL} before the sentence"
            )
    return model, sentences


def sentences_of(sentences: Sequence[str], source: str | None) -> list[str]:
    """The sentences of the command line, else the lines of a file that are not blank."""
    if sentences and source is not None:
        raise ConfigError("sentences and --source exclude each other: give only one of them")
    for number, sentence in enumerate(sentences, 1):
        if not sentence.strip():
            raise DataError(f"sentence {number} is empty: remove it, or write a sentence")
    if sentences:
        return [" ".join(sentence.splitlines()) for sentence in sentences]
    if source is None and sys.stdin.isatty():
        raise DataError("there is no sentence to inspect: give one in quotes, or a file with --source FILE")
    name = STDIN if source is None else source
    if name != STDIN:
        check_readable(Path(name))
    texts = [record.text for record in Form().read([name]) if record.text.strip()]
    if not texts:
        input_name = "standard input" if name == STDIN else name
        raise DataError(f"{input_name} contains no sentence: give one in quotes, or a file with --source FILE")
    return texts


def direction_of(translator: Translator, to: str | None) -> str:
    """The direction in the title of a page, empty if the model has several."""
    directions = [f"{source}-{target}" for source, target in translator.origin.directions if to in (None, target)]
    return directions[0] if len(directions) == 1 else ""


def write(
    records: Sequence[AttentionRecord], options: OutputOptions, console: Console, model: str, direction: str
) -> list[str]:
    """Writes all outputs and returns one message per file. Without any file, prints a summary on the console."""
    if options.pictures and len(records) > 1:
        raise ConfigError(
            f"a picture shows one sentence, got {len(records)} sentences or parts of a long sentence: give a single one"
        )
    messages = []
    for path in options.pictures:
        heads = choose_heads(records[0], options.kind, options.layer, options.head)
        draw(records[0], heads, path, "png" if path is options.png else "svg")
        messages.append(f"{path}: {len(heads)} head{'s' * (len(heads) > 1)}")
    if options.json is not None:
        document = to_document(records, model, direction)
        write_atomically(options.json, json.dumps(document, ensure_ascii=False) + "\n")
        messages.append(_file_message(options.json, records))
    if options.html is not None:
        write_atomically(options.html, to_page(records, model, direction))
        messages.append(f"{_file_message(options.html, records)}; open it in a browser")
        if options.opens_page:
            webbrowser.open(options.html.resolve().as_uri())
    if not messages:
        for record in records:
            show_record(console, record)
    return messages


def _file_message(path: Path, records: Sequence[AttentionRecord]) -> str:
    n_heads, n_bytes = len(records[0].heads), path.stat().st_size
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
    return f"{path}: {len(records)} sentence{'s' * (len(records) > 1)}, {n_heads} heads, {size}"
