"""A folder appears whole or not at all: it is written beside its place under another name, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transduce.errors import DataError

UNFINISHED = ".unfinished"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Write into the path that this gives. An error leaves nothing; what a kill leaves, the next call removes."""
    assert not folder.exists(), "the caller refuses this in its own words"
    with told_of(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=_prefix(folder), suffix=UNFINISHED, dir=folder.parent))
    lock = _lock(unfinished)
    try:
        yield unfinished
        with told_of(folder):
            unfinished.chmod(0o777 & ~_umask())  # a temporary folder is for its owner alone, this one is not
            for path in [*unfinished.rglob("*"), unfinished]:
                _to_disk(path)  # before the name, or a power cut could leave a whole name on empty files
            os.rename(unfinished, folder)
            _to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """A disk that is full or may not be written is for the user to put right."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> DataError:
    if error.errno == errno.ENOTEMPTY:
        return DataError(f"{path} was written by another process meanwhile: look at that one, or choose another name")
    return DataError(f"{path} cannot be written ({error.strerror}): make room there, or choose another place")


def _prefix(folder: Path) -> str:
    return f".{folder.name}."


def _remove_leftovers(folder: Path) -> None:
    """Of processes that are no more: their lock went with them, in whatever container or on whatever machine."""
    for left in folder.parent.iterdir():
        middle = left.name.removeprefix(_prefix(folder)).removesuffix(UNFINISHED)
        if left.name == f"{_prefix(folder)}{middle}{UNFINISHED}" and "." not in middle:
            lock = _lock(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Held until it is closed or the process ends. None: another has it, or there are no locks here."""
    try:
        import fcntl
    except ImportError:  # Windows: leftovers stay
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_writable(path: Path) -> None:
    """Before the long part whose result is to be written there."""
    with told_of(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_whole(path: Path, content: str | bytes) -> None:
    """A file, in the same way; it may replace one."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")  # what a kill leaves, the next write takes
    try:
        with told_of(path):
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
            _to_disk(unfinished)
            os.replace(unfinished, path)
            _to_disk(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _to_disk(path: Path) -> None:
    if os.name != "posix" and path.is_dir():  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
