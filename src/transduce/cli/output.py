"""Writing results, and the errors when they cannot be written."""

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
    """Writes at once, because the reader may be waiting for this line."""
    out = sys.stdout.buffer
    try:
        out.write(line.encode("utf-8", "surrogatepass"))
        out.flush()
    except BrokenPipeError:  # the reader closed the pipe: exit silently, like a program that SIGPIPE ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise DataError(f"standard output cannot be written ({error.strerror}): free some space") from None


@contextmanager
def open_to_write(path: Path) -> Iterator[Callable[[str], None]]:
    from transduce.files import convert_write_errors

    with convert_write_errors(path):
        file = path.open("w", encoding="utf-8")

    def write(line: str) -> None:
        with convert_write_errors(path):
            file.write(line)

    try:
        yield write
    finally:
        with convert_write_errors(path):
            file.close()
