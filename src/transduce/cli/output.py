"""Lines out, and what is said where they cannot be written."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from transduce.errors import DataError


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
    from transduce.files import told_of

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
