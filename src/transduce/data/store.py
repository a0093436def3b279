"""Token ids on disk: one file for each split. It is memory-mapped, so a corpus of any size needs little memory.

    tokens            for each pair the source ids, then the target ids; 2 bytes each (4 if the vocabulary has more
                      than 65,536 entries)
    starts            index of each pair's first token, 8 bytes
    source lengths    4 bytes
    target lengths    4 bytes
    header            JSON: counts, corpora and their languages, and the SHA-256 of everything before the header
    length of header  8 bytes
    MAGIC

The header comes last because the counts are known only at the end. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.errors import DataError

FORMAT_VERSION = 1
MAGIC = b"TOKENS\r\n"  # a transfer in text mode would change the line end
START, LENGTH = np.dtype("<u8"), np.dtype("<u4")
BLOCK = 1 << 20
LARGE_STORE = 1 << 28
"""Pages of a store below this size are never released, since reading them again takes time."""


class Encoded(NamedTuple):
    """Encoded pairs, with `ids` in the order of the store."""

    ids: NDArray[Any]
    source_length_P: NDArray[np.uint32]
    target_length_P: NDArray[np.uint32]


@dataclass(frozen=True)
class StoredCorpus:
    source_language: str
    target_language: str
    both_ways: bool
    n_pairs: int


def id_type(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class StoreWriter:
    """A writer of encoded pairs. Lengths go into temporary files, which are appended at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        self.n_pairs = self.n_source_tokens = self.n_target_tokens = 0
        self._hash = hashlib.sha256()
        self._files = ExitStack()
        self._tokens = self._files.enter_context(path.open("xb"))
        self._lengths = [self._files.enter_context(TemporaryFile(dir=path.parent)) for _ in range(2)]  # noqa: SIM115

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    def add(self, pairs: Encoded) -> None:
        self._write(np.ascontiguousarray(pairs.ids, dtype=self.dtype).data)
        for file, length_P in zip(self._lengths, pairs[1:], strict=True):
            file.write(np.ascontiguousarray(length_P, dtype=LENGTH).data)
        self.n_pairs += len(pairs.source_length_P)
        self.n_source_tokens += int(pairs.source_length_P.sum())
        self.n_target_tokens += int(pairs.target_length_P.sum())

    def finish(self, corpora: Sequence[StoredCorpus], subwords: str) -> str:
        """Append the index and the header, and return the file's checksum. `subwords` is the vocabulary's hash."""
        assert sum(corpus.n_pairs for corpus in corpora) == self.n_pairs
        self._write(b"\0" * (-self._tokens.tell() % START.itemsize))  # align the numbers that follow
        self._write_starts()
        for file in self._lengths:
            file.seek(0)
            while block := file.read(BLOCK):
                self._write(block)
        header = {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype.str,
            "n_pairs": self.n_pairs,
            "n_source_tokens": self.n_source_tokens,
            "n_target_tokens": self.n_target_tokens,
            "corpora": [asdict(corpus) for corpus in corpora],
            "subwords": subwords,
            "sha256": self._hash.hexdigest(),
        }
        text = json.dumps(header).encode()
        self._write(text + len(text).to_bytes(8, "little") + MAGIC)
        return str(header["sha256"])

    def _write(self, data: bytes | memoryview) -> None:
        self._tokens.write(data)
        self._hash.update(data)

    def _write_starts(self) -> None:
        for file in self._lengths:
            file.seek(0)
        start = 0
        while source := self._lengths[0].read(BLOCK):
            length_P = np.frombuffer(source, LENGTH).astype(START) + np.frombuffer(self._lengths[1].read(BLOCK), LENGTH)
            end_P = start + np.cumsum(length_P, dtype=START)
            self._write((end_P - length_P).data)
            start = int(end_P[-1])


class Store:
    """A memory-mapped split with constant-time access to each pair."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DataError(f"{self.path} cannot be read ({error}): run transduce prepare again") from None
        header, n_before = self._header()
        try:
            self.corpora = [StoredCorpus(**corpus) for corpus in header["corpora"]]
            self.n_pairs, self.subwords, self.sha256 = header["n_pairs"], header["subwords"], header["sha256"]
            self.n_source_tokens, self.n_target_tokens = header["n_source_tokens"], header["n_target_tokens"]
            dtype = np.dtype(header["dtype"])
            n_tokens = self.n_source_tokens + self.n_target_tokens
        except (KeyError, TypeError):
            raise self._damaged("its header lacks a field") from None
        n_bytes = n_tokens * dtype.itemsize
        n_bytes += -n_bytes % START.itemsize
        if n_before != n_bytes + self.n_pairs * (START.itemsize + 2 * LENGTH.itemsize):
            raise self._damaged("its size does not match its header")
        self.ids = np.frombuffer(self._data, dtype, n_tokens)
        self.start_N = np.frombuffer(self._data, START, self.n_pairs, n_bytes)
        n_bytes += self.start_N.nbytes
        self.source_length_N = np.frombuffer(self._data, LENGTH, self.n_pairs, n_bytes)
        n_bytes += self.source_length_N.nbytes
        self.target_length_N = np.frombuffer(self._data, LENGTH, self.n_pairs, n_bytes)

    def __len__(self) -> int:
        return int(self.n_pairs)

    def __getitem__(self, pair: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The ids of source and target of a pair."""
        start = int(self.start_N[pair])
        middle = start + int(self.source_length_N[pair])
        return self.ids[start:middle], self.ids[middle : middle + int(self.target_length_N[pair])]

    def release(self) -> None:
        """Release the resident pages of a large store. The system's cache keeps them."""
        if len(self._data) > LARGE_STORE and hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)

    def verify(self) -> None:
        """Check the checksum, at about one gigabyte per second."""
        header, n_before = self._header()
        digest = hashlib.sha256()
        for first in range(0, n_before, BLOCK):
            digest.update(self._data[first : min(first + BLOCK, n_before)])
        if digest.hexdigest() != header["sha256"]:
            raise self._damaged("its checksum does not match its header")
        self.release()

    def _header(self) -> tuple[dict[str, Any], int]:
        """The header, and the number of bytes before it."""
        size, tail = len(self._data), 8 + len(MAGIC)
        if size < tail or self._data[size - len(MAGIC) :] != MAGIC:
            raise self._damaged("its end is missing")
        n_header = int.from_bytes(self._data[size - tail : size - len(MAGIC)], "little")
        try:
            header = json.loads(self._data[max(size - tail - n_header, 0) : size - tail])
            version = header["format_version"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._damaged("its header cannot be read") from None
        if version != FORMAT_VERSION:
            raise DataError(
                f"{self.path} has format_version {version!r}, this program reads {FORMAT_VERSION}: prepare it again"
            )
        return header, size - tail - n_header

    def _damaged(self, reason: str) -> DataError:
        return DataError(f"{self.path} is damaged ({reason}): run transduce prepare again")
