"""What is translated stands in lines: alone, in a column of a table, or in a field of a JSON object."""

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
    """As it was read."""


@dataclass(frozen=True)
class Form:
    """How lines are read, and how their translations are written."""

    column: int | None = None
    """Of a table, counted from 1; the translation becomes a last column."""
    key: str | None = None
    """Of a JSON object; the translation becomes the field `into`."""
    into: str = "translation"
    as_json: bool = False
    n_best: int = 1
    with_scores: bool = False

    def read(self, files: Sequence[str], damaged: Callable[[str], None] = lambda where: None) -> Iterator[Record]:
        """All lines of all files. What is no UTF-8 is replaced, and `damaged` is told where that was."""
        for name in files or [STDIN]:
            for number, raw in enumerate(_lines_of(name), 1):
                where = f"{'standard input' if name == STDIN else name}, line {number}"
                try:
                    line = raw.decode()
                except UnicodeDecodeError:
                    line = raw.decode("utf-8", "replace")
                    damaged(where)
                text = self._text(line, where)
                if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON can spell halves
                    damaged(where)
                yield Record(text, line)

    def _text(self, line: str, where: str) -> str:
        if not line.strip("\t "):
            return ""
        if self.column is not None:
            cells = line.split("\t")
            if len(cells) < self.column:
                raise DataError(f"{where}: has {len(cells)} columns, must have {self.column}: mend the line")
            return cells[self.column - 1]
        if self.key is not None:
            try:
                record = json.loads(line)
                text = look_up(record, self.key)
            except (ValueError, TypeError, RecursionError):
                raise DataError(f"{where}: is no JSON object: mend the line") from None
            except KeyError as error:
                raise DataError(f"{where}: has no field {error}: mend the line, or name another by --field") from None
            if not isinstance(text, str):
                raise DataError(f"{where}: field {self.key!r} is {text!r}, must be text: mend the line")
            if taken := {self.into, *(["score"] if self.with_scores else [])} & record.keys():
                raise DataError(f"{where}: has a field {min(taken)!r} already: name another for ours by --into")
            return " ".join(text.splitlines())
        return line

    def write(self, number: int, record: Record, translation: Translation) -> str:
        """Lines of output, without the last line end."""
        if self.as_json:
            return json.dumps(_details(record, translation), ensure_ascii=False)
        if self.n_best > 1:
            # Moses' form, which others read too: number, text, log-probability, score.
            best = translation.alternatives or (Alternative("", 0.0, 0.0),)
            return "\n".join(f"{number} ||| {one.text} ||| {one.log_prob:.4f} ||| {one.score:.4f}" for one in best)
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
    if not path.is_fifo():  # what comes from a pipe comes once
        next(read_lines(path), None)


def _lines_of(name: str) -> Iterable[bytes]:
    # Not sys.stdin.buffer: a thread that waits in it holds its lock, and Python cannot end then.
    return read_lines(Path(name) if name != STDIN else sys.stdin.fileno())


@dataclass
class Summary:
    n_lines: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    n_damaged: int = 0
    first_damaged: str = ""
    seconds: float = 0.0

    def damaged(self, where: str) -> None:
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
    """Lines in, lines out, in order and in bounded memory. `write` is given each line with its end."""
    began, summary = time.monotonic(), Summary()
    for name in files:
        if name != STDIN:
            check_readable(Path(name))  # all of them, before the first is translated
    waiting: deque[Record] = deque()

    def texts() -> Iterator[str]:
        for record in form.read(files, summary.damaged):
            waiting.append(record)
            yield record.text

    with_details = form.as_json or write_alignment is not None
    for translation in translator.stream(texts(), to, with_details=with_details, prefix=prefix):
        write(form.write(summary.n_lines, waiting.popleft(), translation) + "\n")
        if write_alignment is not None:
            write_alignment(pharaoh(translation) + "\n")
        summary.n_lines += 1
        summary.flags.update(translation.flags)
        progress(summary.n_lines)
    summary.seconds = time.monotonic() - began
    return summary


def pharaoh(translation: Translation) -> str:
    """Word alignment as others read it: 0-0 1-2 2-1."""
    return " ".join(f"{source}-{target}" for source, target in translation.alignment or ())
