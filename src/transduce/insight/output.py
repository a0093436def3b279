"""What is looked into, and where that is written: a page, JSON, a picture, or words on the screen."""

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
from transduce.files import write_whole
from transduce.insight.attention import AttentionRecord, to_document
from transduce.insight.heads import KINDS
from transduce.insight.page import to_page
from transduce.insight.picture import choose_heads, draw
from transduce.insight.summary import show_record
from transduce.model_folder.format import BUNDLED_MODEL
from transduce.translation.records import STDIN, Form, check_readable
from transduce.translation.translator import Translator


@dataclass(frozen=True, kw_only=True)
class Wanted:
    html: Path | None = None
    json: Path | None = None
    png: Path | None = None
    svg: Path | None = None
    kind: str = "memory"
    layer: int | None = None
    head: int | None = None
    """Of a picture, counted from 1."""
    is_opened: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind is {self.kind!r}, must be {', '.join(KINDS)}: choose one")
        if self.is_opened and self.html is None:
            raise ConfigError("--open shows a page, and none is written: add --html FILE")
        if self.head is not None and self.layer is None:
            raise ConfigError("--head says nothing without its layer: add --layer N")
        if not self.pictures and (self.layer is not None or self.kind != "memory"):
            raise ConfigError("--kind, --layer and --head choose what a picture shows: add --png FILE or --svg FILE")

    @property
    def pictures(self) -> list[Path]:
        return [path for path in (self.png, self.svg) if path is not None]


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The model, where the first names one, and sentences."""
    first, *others = arguments or [""]
    if first == BUNDLED_MODEL or os.path.isdir(first):
        return Path(first), others
    is_one_word = first != "" and not any(map(str.isspace, first))
    if is_one_word and os.path.isfile(first):
        raise DataError(f"{first} is a file: give sentences in quotes, or the file by --source {first}")
    if is_one_word and (others or os.sep in first):
        raise ModelFolderError(f"{first} is no model folder: give one, or {BUNDLED_MODEL} before sentences of one word")
    return None, list(arguments)


def sentences_of(sentences: Sequence[str], source: str | None) -> list[str]:
    """Those that were given, else the lines of a file that are not blank."""
    if sentences and source is not None:
        raise ConfigError("sentences and --source exclude each other: keep one")
    for number, sentence in enumerate(sentences, 1):
        if not sentence.strip():
            raise DataError(f"sentence {number} is empty: leave it out, or give one")
    if sentences:
        return [" ".join(sentence.splitlines()) for sentence in sentences]
    if source is None and sys.stdin.isatty():
        raise DataError("nothing to look into: give a sentence in quotes, or a file by --source")
    name = STDIN if source is None else source
    if name != STDIN:
        check_readable(Path(name))
    found = [record.text for record in Form().read([name]) if record.text.strip()]
    if not found:
        where = "standard input" if name == STDIN else name
        raise DataError(f"{where} holds no sentence: give one in quotes, or a file by --source")
    return found


def direction_of(translator: Translator, to: str | None) -> str:
    found = [f"{source}-{target}" for source, target in translator.origin.directions if to in (None, target)]
    return found[0] if len(found) == 1 else ""


def write(
    records: Sequence[AttentionRecord], wanted: Wanted, console: Console, model: str, direction: str
) -> list[str]:
    """Says what was written. Nothing asked for: a summary, on the console."""
    if wanted.pictures and len(records) > 1:
        what = "sentences, or parts of one that is long"
        raise ConfigError(f"a picture shows one sentence, these are {len(records)} {what}: give one")
    told = []
    for path in wanted.pictures:
        heads = choose_heads(records[0], wanted.kind, wanted.layer, wanted.head)
        draw(records[0], heads, path, "png" if path is wanted.png else "svg")
        told.append(f"{path}: {len(heads)} head{'s' * (len(heads) > 1)}")
    if wanted.json is not None:
        document = to_document(records, model, direction)
        write_whole(wanted.json, json.dumps(document, ensure_ascii=False) + "\n")
        told.append(_told(wanted.json, records))
    if wanted.html is not None:
        write_whole(wanted.html, to_page(records, model, direction))
        told.append(f"{_told(wanted.html, records)}; open it in a browser")
        if wanted.is_opened:
            webbrowser.open(wanted.html.resolve().as_uri())
    if not told:
        for record in records:
            show_record(console, record)
    return told


def _told(path: Path, records: Sequence[AttentionRecord]) -> str:
    n_heads, n_bytes = len(records[0].heads), path.stat().st_size
    size = f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
    return f"{path}: {len(records)} sentence{'s' * (len(records) > 1)}, {n_heads} heads, {size}"
