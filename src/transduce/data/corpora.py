"""Files to pairs of lines. A line ends at a line feed and nowhere else, so that line i stays line i on both sides."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from transduce.errors import DataError

RawPair = tuple[bytes, bytes]
"""Source and target as they stand in the files: whether they are text is for `cleaning` to find out."""


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Without line ends (LF or CR LF) and without a byte order mark; .gz and .xz are unpacked."""
    path = Path(path)
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines):
                if number == 0:
                    _refuse_utf_16(path, line)
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield line.removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        if error.errno is None:  # gzip says so of its own files
            raise DataError(f"{path} is damaged ({error}): copy it again") from None
        raise DataError(f"{path} cannot be read ({error.strerror}): give a file of text") from None
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): copy it again") from None


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return open(path, "rb")


def _refuse_utf_16(path: Path, line: bytes) -> None:
    """Each of its lines would be dropped as no UTF-8, and the reader left to wonder."""
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}, line 1: the file is UTF-16, must be UTF-8: iconv -f UTF-16 -t UTF-8 {path}")


def read_pairs(source: str | Path, target: str | Path) -> Iterator[RawPair]:
    """Two files, line i of one for line i of the other."""
    for n, (source_line, target_line) in enumerate(itertools.zip_longest(read_lines(source), read_lines(target))):
        if source_line is None or target_line is None:
            short, long = (source, target) if source_line is None else (target, source)
            raise DataError(
                f"{short} ends after line {n}, but {long} goes on: give files in which each line has its partner"
            )
        yield source_line, target_line


def read_tsv(path: str | Path, columns: tuple[int, int] = (1, 2)) -> Iterator[RawPair]:
    """Columns, counted from 1, between tabs."""
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split(b"\t")
        if len(cells) < max(columns):
            raise DataError(f"{path}, line {number}: has {len(cells)} columns, must have {max(columns)}: mend the line")
        yield cells[columns[0] - 1], cells[columns[1] - 1]


def read_jsonl(path: str | Path, fields: tuple[str, str]) -> Iterator[RawPair]:
    """Fields of one JSON object a line."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            found = json.loads(line)
            pair = tuple(found[field] for field in fields)
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{path}, line {number}: is no JSON object: mend the line") from None
        except KeyError as error:
            raise DataError(
                f"{path}, line {number}: has no field {error}: mend the line, or name other fields"
            ) from None
        for field, text in zip(fields, pair, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{path}, line {number}: field {field!r} is {text!r}, must be text: mend the line")
        # JSON can spell half a surrogate pair, which no UTF-8 can: cleaning will find it.
        yield pair[0].encode("utf-8", "surrogatepass"), pair[1].encode("utf-8", "surrogatepass")
