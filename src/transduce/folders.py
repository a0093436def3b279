"""A folder appears whole or not at all: it is written beside its place under another name, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Write into the path that this gives. An error leaves nothing; what a kill leaves, the next call removes."""
    assert not folder.exists(), "the caller refuses this in its own words"
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.*{UNFINISHED}"):
        if not _is_running(left.name.removesuffix(UNFINISHED).rpartition(".")[2]):
            shutil.rmtree(left, ignore_errors=True)
    unfinished = folder.parent / f".{folder.name}.{os.getpid()}{UNFINISHED}"
    unfinished.mkdir()
    try:
        yield unfinished
        for path in [*unfinished.rglob("*"), unfinished]:
            _to_disk(path)  # before the name, or a power cut could leave a whole name on empty files
        os.rename(unfinished, folder)
        _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _is_running(pid: str) -> bool:
    """On this machine. A process of another user counts; one that we cannot ask about too."""
    if os.name != "posix" or not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _to_disk(path: Path) -> None:
    if os.name != "posix" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
