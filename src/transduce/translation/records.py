"""Translation of files. The text of a line is the whole line, a column of a table, or a field of a JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from transduce.data.corpora import look_up, read_lines
from transduce.errors import DataError
from transduce.translation.result import Alternative, Translation
from transduce.translation.translator import Translator

STDIN = "-"


class Record(NamedTuple):
    text: str
    line: str
    """The line that contains the text."""


@dataclass(frozen=True)
class Form:
    """The form of lines: how they are read, and how their translations are written."""

    column: int | None = None
    """Lines are rows of a table with tabs. The text is in this column, counted from 1; the translation is appended."""
    key: str | None = None
    """Lines are JSON objects. The text is in the field `key`, the translation is added as the field `into`."""
    into: str = "translation"
    as_json: bool = False
    n_best: int = 1
    with_scores: bool = False

    def read(self, files: Sequence[str], on_damaged: Callable[[str], None] = lambda where: None) -> Iterator[Record]:
        """Reads all lines of all files. Replaces bytes that are not valid UTF-8, and calls `on_damaged` with the place.

        Without files, or for the file "-", reads standard input.
        """
        for name in files or [STDIN]:
            for number, raw in enumerate(_lines_of(name), 1):
                where = f"{'standard input' if name == STDIN else name}, line {number}"
                try:
                    line = raw.decode()
                except UnicodeDecodeError:
                    line = raw.decode("utf-8", "replace")
                    on_damaged(where)
                text = self._text(line, where)
                # JSON escapes can contain half of a surrogate pair.
                if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                    on_damaged(where)
                yield Record(text, line)

    def _text(self, line: str, where: str) -> str:
        """The text to translate: empty for a blank line."""
        if not line.strip("\t "):
            return ""
        if self.column is not None:
            cells = line.split("\t")
            if len(cells) < self.column:
                raise DataError(f"{where}: has {len(cells)} columns, must have {self.column}: correct the line")
            return cells[self.column - 1]
        if self.key is not None:
            try:
                record = json.loads(line)
                text = look_up(record, self.key)
            except (ValueError, TypeError, RecursionError):
                raise DataError(f"{where}: is not a JSON object: correct the line") from None
            except KeyError as error:
                remedy = "correct the line, or name another with --field"
                raise DataError(f"{where}: has no field {error}: {remedy}") from None
            if not isinstance(text, str):
                raise DataError(f"{where}: field {self.key!r} is {text!r}, must be text: correct the line")
            if taken := {self.into, *(["score"] if self.with_scores else [])} & record.keys():
                remedy = "name another field for the translation with --into"
                raise DataError(f"{where}: already has a field {min(taken)!r}: {remedy}")
            return " ".join(text.splitlines())
        return line

    def write(self, number: int, record: Record, translation: Translation) -> str:
        """The output for one line: one or more lines, without the end of the last."""
        if self.as_json:
            return json.dumps(_details(record, translation), ensure_ascii=False)
        if self.n_best > 1:
            # The n-best format of Moses, which other tools read too: number, text, log-probability, score.
            alternatives = translation.alternatives or (Alternative("", 0.0, 0.0),)
            return "\n".join(f"{number} ||| {a.text} ||| {a.log_prob:.4f} ||| {a.score:.4f}" for a in alternatives)
        score, text = f"{translation.score:.4f}", translation.text.replace("\t", " ")
        if self.column is not None:
            cells = [record.line, text, *([score] if self.with_scores else [])]
            return "\t".join(cells) if record.line.strip() else record.line
        if self.key is not None:
            if not record.line.strip():
                return ""
            scored = {"score": translation.score} if self.with_scores else {}
            return json.dumps(json.loads(record.line) | {self.into: translation.text} | scored, ensure_ascii=False)
        return f"{text}\t{score}" if self.with_scores else translation.text


def _details(record: Record, translation: Translation) -> dict[str, Any]:
    values = asdict(translation)
    for name in ("tokens", "alternatives"):
        values[name] = [item._asdict() for item in getattr(translation, name) or ()]
    return {"source": record.text, **values}


def check_readable(path: Path) -> None:
    """Raises an error if the file cannot be read. Pipes are not checked, because their data can be read only once."""
    if not path.is_fifo():
        next(read_lines(path), None)


def _lines_of(name: str) -> Iterable[bytes]:
    # Not sys.stdin.buffer: a thread that waits for input holds its lock, and then Python cannot exit.
    return read_lines(Path(name) if name != STDIN else sys.stdin.fileno())


@dataclass
class Summary:
    """Counts of a translation of files."""

    n_lines: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    n_damaged: int = 0
    """Lines that were not valid UTF-8."""
    first_damaged: str = ""
    seconds: float = 0.0

    def add_damaged(self, where: str) -> None:
        self.n_damaged += 1
        self.first_damaged = self.first_damaged or where


def translate_files(
    translator: Translator,
    files: Sequence[str],
    form: Form,
    write: Callable[[str], object],
    *,
    to: str | None = None,
    prefix: str = "",
    write_alignment: Callable[[str], object] | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> Summary:
    """Translates all lines, in order and in bounded memory. `write` gets the output for each line, with a line end."""
    start, summary = time.monotonic(), Summary()
    for name in files:  # all files are checked before the first is translated
        if name != STDIN:
            check_readable(Path(name))
    untranslated: deque[Record] = deque()

    def texts() -> Iterator[str]:
        for record in form.read(files, summary.add_damaged):
            untranslated.append(record)
            yield record.text

    with_details = form.as_json or write_alignment is not None
    for translation in translator.stream(texts(), to, with_details=with_details, prefix=prefix):
        write(form.write(summary.n_lines, untranslated.popleft(), translation) + "\n")
        if write_alignment is not None:
            write_alignment(pharaoh(translation) + "\n")
        summary.n_lines += 1
        summary.flags.update(translation.flags)
        progress(summary.n_lines)
    summary.seconds = time.monotonic() - start
    return summary


def pharaoh(translation: Translation) -> str:
    """The word alignment in the Pharaoh format: 0-0 1-2 2-1."""
    return " ".join(f"{source}-{target}" for source, target in translation.alignment or ())
