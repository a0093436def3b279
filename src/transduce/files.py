"""Atomic writes: a folder or file is written next to its destination under a temporary name, then renamed."""

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
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write into, and rename it to `folder` at the end.

    An error removes the temporary folder. One that a killed process left is removed by the next call.
    """
    assert not folder.exists(), "the caller must refuse this with a message that suits it"
    with convert_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=_prefix(folder), suffix=UNFINISHED, dir=folder.parent))
    lock = _lock(unfinished)
    try:
        yield unfinished
        with convert_write_errors(folder):
            unfinished.chmod(0o777 & ~_umask())  # mkdtemp lets only the owner read
            for path in [*unfinished.rglob("*"), unfinished]:
                _flush_to_disk(path)  # before renaming, or a power failure could leave the name with empty files
            os.rename(unfinished, folder)
            _flush_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Turn a failed write into a `DataError`, since the user can make room or choose another place."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> DataError:
    if error.errno == errno.ENOTEMPTY:
        return DataError(f"{path} was written by another process meanwhile: use that one, or choose another name")
    return DataError(f"{path} cannot be written ({error.strerror}): free some space, or choose another place")


def _prefix(folder: Path) -> str:
    return f".{folder.name}."


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of processes that have ended.

    Such a folder is no longer locked, even if its process ran in another container or on another machine.
    """
    for path in folder.parent.iterdir():
        middle = path.name.removeprefix(_prefix(folder)).removesuffix(UNFINISHED)
        if path.name == f"{_prefix(folder)}{middle}{UNFINISHED}" and "." not in middle:
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the handle is closed or the process ends.

    None: another process holds the lock, or the system has no such locks.
    """
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
    """Refuse a path that cannot be written, before the long computation of its content."""
    with convert_write_errors(path), tempfile.TemporaryFile(dir=path.parent):
        pass


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, or replace an existing one."""
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")  # the next write reuses one that a killed process left
    try:
        with convert_write_errors(path):
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
            _flush_to_disk(unfinished)
            os.replace(unfinished, path)
            _flush_to_disk(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _flush_to_disk(path: Path) -> None:
    if os.name != "posix" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
