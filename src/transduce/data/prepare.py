"""Turn text files into a folder for training: read, clean, hold out validation pairs, learn subwords, encode.

report.json    counts of pairs that were read, dropped (by rule) and kept, and checksums
subwords.model
train.tokens   the stores (see `store`)
valid.tokens
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transduce.config import DataConfig
from transduce.data.batches import Examples
from transduce.data.cleaning import CHUNK, HashSet, Kept, Tally, chunks, clean, keep_all
from transduce.data.corpora import COMPRESSED_SUFFIXES, Corpus, Digest, RawPair
from transduce.data.parallel import ordered_map
from transduce.data.store import Encoded, Store, StoredCorpus, StoreWriter, id_type
from transduce.data.subword import SUBWORDS, Subwords, vocab_size_for
from transduce.errors import DataError
from transduce.files import atomic_folder, convert_write_errors
from transduce.runtime import n_cores

__all__ = ["Prepared", "prepare"]

FORMAT_VERSION = 1
REPORT, TRAIN, VALID = "report.json", "train.tokens", "valid.tokens"
HASH_BLOCK = 1_000_000
MAX_LEARNING_PAIRS = 1_000_000
"""Subwords are learnt from at most this many randomly chosen pairs; more only take longer."""
BYTES_PER_PROCESS = 4_000_000
"""One process handles this much text before another one has started."""

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the number of pairs that are done, and their total if it is known."""


@dataclass
class CorpusReport:
    name: str
    files: dict[str, str]
    """SHA-256 of the decompressed text, by file name."""
    source_language: str
    target_language: str
    both_ways: bool
    n_read: int
    dropped: dict[str, int]
    examples: dict[str, list[Any]]
    """The first pair that each rule dropped: line, source, target."""
    n_kept: int
    n_shared: int
    """Pairs that were dropped because one of their sides occurs in the validation pairs."""
    n_held_out: int


@dataclass
class SplitReport:
    n_pairs: int
    n_source_tokens: int
    n_target_tokens: int
    """Without tags and end marks."""
    sha256: str


@dataclass
class Report:
    corpora: list[CorpusReport]
    valid_corpora: list[CorpusReport]
    """Empty if the validation pairs were held out of `corpora`."""
    held_out_share: float
    cleaned: bool
    tagged_languages: list[str]
    vocab_size: int
    vocab_size_given: bool
    subwords_sha256: str
    train: SplitReport
    valid: SplitReport
    config: dict[str, Any]
    seconds: dict[str, float]
    format_version: int = FORMAT_VERSION

    def directions(self) -> list[tuple[str, str]]:
        forward = [(corpus.source_language, corpus.target_language) for corpus in self.corpora]
        backward = [(corpus.target_language, corpus.source_language) for corpus in self.corpora if corpus.both_ways]
        return list(dict.fromkeys(forward + backward))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        values = json.loads(text)
        for name in ("corpora", "valid_corpora"):
            values[name] = [CorpusReport(**corpus) for corpus in values[name]]
        for name in ("train", "valid"):
            values[name] = SplitReport(**values[name])
        return cls(**values)


@dataclass
class Spool:
    """The kept pairs of a corpus in temporary files: source ("s"), target ("t") and the hashes of both sides ("h")."""

    corpus: Corpus
    folder: Path
    tally: Tally = field(default_factory=Tally)
    digests: list[Digest] = field(default_factory=list)
    n_pairs: int = 0

    def fill(self, kept: Iterator[Kept], progress: Progress) -> None:
        with ExitStack() as stack:
            source, target, hashes = (stack.enter_context((self.folder / name).open("xb")) for name in "sth")
            for pairs, hash_P2 in kept:
                source.writelines(pair[0] + b"\n" for pair in pairs)
                target.writelines(pair[1] + b"\n" for pair in pairs)
                hashes.write(hash_P2.data)
                self.n_pairs += len(pairs)
                progress(f"reading {self.corpus.name}", self.tally.n_read, None)

    def hash_N2(self) -> NDArray[np.uint64]:
        if self.n_pairs == 0:
            return np.zeros((0, 2), dtype=np.uint64)
        return np.memmap(self.folder / "h", dtype=np.uint64, mode="r").reshape(-1, 2)

    def pairs(self, chosen_N: NDArray[np.bool_]) -> Iterator[list[RawPair]]:
        """Yield the chosen pairs in parts."""
        lines = zip(*(_plain_lines(self.folder / name) for name in "st"), strict=True)
        for chunk in chunks(itertools.compress(lines, chosen_N)):
            yield chunk.pairs

    def report(self, n_kept: int, n_shared: int = 0, n_held_out: int = 0) -> CorpusReport:
        return CorpusReport(
            name=self.corpus.name.encode(errors="backslashreplace").decode(),
            files={
                _name(path): digest.hexdigest() for path, digest in zip(self.corpus.files, self.digests, strict=True)
            },
            source_language=self.corpus.languages[0],
            target_language=self.corpus.languages[1],
            both_ways=self.corpus.both_ways,
            n_read=self.tally.n_read,
            dropped=dict(self.tally.dropped.most_common()),
            examples={rule: list(example) for rule, example in self.tally.examples.items()},
            n_shared=n_shared,
            n_held_out=n_held_out,
            n_kept=n_kept,
        )


def _name(path: Path) -> str:
    """The path as text. Bytes that are not valid UTF-8 are escaped, so that the report can be written."""
    return str(path).encode(errors="backslashreplace").decode()


def _plain_lines(path: Path) -> Iterator[bytes]:
    """The lines of a `Spool` file. Only the line feed is removed, since the text may contain other line ends."""
    with path.open("rb") as file:
        for line in file:
            yield line[:-1]


def prepare(
    corpora: Sequence[Corpus],
    out: str | Path,
    config: DataConfig,
    *,
    valid: Sequence[Corpus] = (),
    vocab_size: int | None = None,
    subwords: Subwords | None = None,
    with_cleaning: bool = True,
    n_processes: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Clean and encode corpora for training. Write the folder `out` atomically, and report the counts of all pairs.

    The pairs of `valid` are kept unchanged, since dropping some would change the meaning of scores on them. If
    `subwords` of an existing model are given, none are learnt.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from transduce import DataConfig
    >>> from transduce.data.corpora import Corpus
    >>> from transduce.data.prepare import prepare
    >>> folder = Path(tempfile.mkdtemp())
    >>> text = "".join(f"Haus {n} ist neu.\\tHouse {n} is new.\\n" for n in range(100))
    >>> _ = (folder / "text.tsv").write_text(text + "\\tNo source.\\n")
    >>> corpus = Corpus("text", (folder / "text.tsv",), ("de", "en"))
    >>> report = prepare([corpus], folder / "prepared", DataConfig(valid_pairs=0))
    >>> report.train.n_pairs, report.corpora[0].dropped
    (100, {'empty': 1})
    """
    out = Path(out)
    if os.path.lexists(out):
        raise DataError(f"{out} exists: choose another name, or remove it first")
    _refuse_untrained_directions(corpora, valid)
    n_processes = n_processes or n_processes_for([*corpora, *valid])
    seconds: dict[str, float] = {}
    with convert_write_errors(out), atomic_folder(out) as folder, TemporaryDirectory(dir=folder) as scratch:
        with _timed(seconds, "read and clean"):
            unchanged = partial(_read_unchanged, n_processes=n_processes)
            cleaned = partial(_read_cleaned, config=config, seen=HashSet(), n_processes=n_processes)
            spools = _fill(corpora, scratch, cleaned if with_cleaning else unchanged, progress)
            valid_spools = _fill(valid, scratch, unchanged, progress)
            split = hold_out(spools, valid_spools, config.valid_pairs)
        if not split.n_train:
            raise DataError(_no_pairs_message(spools))
        if subwords is not None:
            languages = subwords.languages()  # a model with tags needs one in every source
            for _, target in directions(corpora) if languages or tagged_languages(corpora) else []:
                subwords.tag(target)  # refuses a language that the model does not support
        else:
            languages = tagged_languages(corpora)
            with _timed(seconds, "learn subwords"):
                progress("learning subwords", 0, None)
                size = vocab_size or vocab_size_for(split.n_train)
                lines = _sample_lines(spools, split.is_train)
                subwords = Subwords.train(lines, size, languages, is_exact=vocab_size is not None)
        subwords.save(folder / SUBWORDS)
        with _timed(seconds, "encode"):
            encode = partial(_encode_split, subwords=subwords, n_processes=n_processes, progress=progress)
            train = encode(folder / TRAIN, spools, split.is_train)
            held_out = encode(folder / VALID, valid_spools or spools, split.is_valid)
        report = Report(
            corpora=[spool.report(*counts) for spool, *counts in zip(spools, *split.counts(), strict=True)],
            valid_corpora=[spool.report(spool.n_pairs) for spool in valid_spools],
            held_out_share=split.share,
            cleaned=with_cleaning,
            tagged_languages=languages,
            vocab_size=len(subwords),
            vocab_size_given=vocab_size is not None,
            subwords_sha256=subwords.sha256,
            train=train,
            valid=held_out,
            config=asdict(config),
            seconds=seconds,
        )
        (folder / REPORT).write_text(report.to_json() + "\n", encoding="utf-8")
    return report


def _fill(
    corpora: Sequence[Corpus], scratch: str, read: Callable[[Spool], Iterator[Kept]], progress: Progress
) -> list[Spool]:
    spools = [Spool(corpus, Path(mkdtemp(dir=scratch))) for corpus in corpora]
    for spool in spools:
        spool.fill(read(spool), progress)
    return spools


def _read_cleaned(spool: Spool, config: DataConfig, seen: HashSet, n_processes: int) -> Iterator[Kept]:
    raw = spool.corpus.read(spool.digests)
    return clean(raw, config, spool.corpus.languages, spool.tally, seen, n_processes)


def _read_unchanged(spool: Spool, n_processes: int) -> Iterator[Kept]:
    return keep_all(spool.corpus.read(spool.digests), spool.corpus.sides, spool.tally, n_processes)


@dataclass
class Split:
    """The pairs of each spool that are for training and for validation."""

    share: float
    is_train: list[NDArray[np.bool_]]
    is_valid: list[NDArray[np.bool_]]
    """One array for each validation spool, or for each training spool if there are no validation files."""
    n_shared: list[int]

    @property
    def n_train(self) -> int:
        return sum(int(is_train_N.sum()) for is_train_N in self.is_train)

    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """For each spool, the pairs kept, shared with validation, and held out."""
        n_kept = [int(is_train_N.sum()) for is_train_N in self.is_train]
        n_held_out = [
            len(is_train_N) - kept - shared
            for is_train_N, kept, shared in zip(self.is_train, n_kept, self.n_shared, strict=True)
        ]
        return n_kept, self.n_shared, n_held_out


def hold_out(spools: Sequence[Spool], valid_spools: Sequence[Spool], valid_pairs: int) -> Split:
    """Choose the validation pairs: those of `valid_spools` or, if there are none, a share of the training pairs.

    The choice depends only on the hash of the source, so not on order, machine or other pairs. All training pairs with
    a side that occurs in validation are dropped: a sentence may have several translations, also in several corpora.
    """
    n_pairs = sum(spool.n_pairs for spool in spools if not spool.corpus.train_only)
    share = 0.0 if valid_spools else held_out_share(n_pairs, valid_pairs)
    bound = np.uint64(share * 2**64)
    is_held = [(spool.hash_N2()[:, 0] < bound) & (not spool.corpus.train_only) for spool in spools]
    held_hashes = [spool.hash_N2() for spool in valid_spools] or [
        spool.hash_N2()[is_held_N] for spool, is_held_N in zip(spools, is_held, strict=True)
    ]
    known = np.unique(np.concatenate([*held_hashes, np.zeros((0, 2), dtype=np.uint64)]))
    is_shared = [_has_a_side_in(spool.hash_N2(), known) for spool in spools]
    return Split(
        share=share,
        is_train=[~held_N & ~shared_N for held_N, shared_N in zip(is_held, is_shared, strict=True)],
        is_valid=[np.ones(spool.n_pairs, dtype=bool) for spool in valid_spools] or is_held,
        n_shared=[int((shared_N & ~held_N).sum()) for held_N, shared_N in zip(is_held, is_shared, strict=True)],
    )


def held_out_share(n_pairs: int, valid_pairs: int) -> float:
    """The share to hold out, a power of two.

    So it rarely changes as a corpus grows, and then the sentences it holds out are among those of the larger share.
    """
    if valid_pairs == 0 or n_pairs == 0:
        return 0.0
    return min(2.0 ** math.floor(math.log2(valid_pairs / n_pairs)), 1 / 16)


def _has_a_side_in(hash_N2: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    is_known_N = np.zeros(len(hash_N2), dtype=bool)
    for first in range(0, len(hash_N2) if len(known) else 0, HASH_BLOCK):
        block = hash_N2[first : first + HASH_BLOCK]
        position = np.searchsorted(known, block).clip(max=len(known) - 1)
        is_known_N[first : first + HASH_BLOCK] = (known[position] == block).any(axis=1)
    return is_known_N


def _no_pairs_message(spools: Sequence[Spool]) -> str:
    n_read = sum(spool.tally.n_read for spool in spools)
    if n_read == 0:
        return "the files are empty: give files of text"
    dropped = sum((spool.tally.dropped for spool in spools), Counter())
    reasons = "; ".join(f"{rule}: {n:,}" for rule, n in dropped.most_common(3)) or "all share a side with validation"
    return f"no pair is left of {n_read:,} ({reasons}): check the files, their languages and the validation files"


def _sample_lines(spools: Sequence[Spool], is_train: Sequence[NDArray[np.bool_]]) -> Iterator[str]:
    """Both sides of the training pairs, or of a random sample of `MAX_LEARNING_PAIRS`."""
    n_train = sum(int(chosen_N.sum()) for chosen_N in is_train)
    share, rng = min(1.0, MAX_LEARNING_PAIRS / n_train), np.random.default_rng(1)
    for spool, chosen_N in zip(spools, is_train, strict=True):
        if share < 1:
            chosen_N = chosen_N & (rng.random(len(chosen_N)) < share)
        for part in spool.pairs(chosen_N):
            for source, target in part:
                yield source.decode()
                yield target.decode()


def _encode_split(
    path: Path,
    spools: Sequence[Spool],
    chosen: Sequence[NDArray[np.bool_]],
    *,
    subwords: Subwords,
    n_processes: int,
    progress: Progress,
) -> SplitReport:
    n_chosen = [int(chosen_N.sum()) for chosen_N in chosen]
    parts = itertools.chain.from_iterable(map(Spool.pairs, spools, chosen))
    encode = partial(encode_pairs, subwords=subwords)
    with StoreWriter(path, id_type(len(subwords))) as store:
        for encoded in ordered_map(encode, parts, n_processes if sum(n_chosen) > CHUNK else 1):
            store.add(encoded)
            progress(f"encoding {path.stem}", store.n_pairs, sum(n_chosen))
        corpora = [
            StoredCorpus(*spool.corpus.languages, spool.corpus.both_ways, n)
            for spool, n in zip(spools, n_chosen, strict=True)
        ]
        sha256 = store.finish(corpora, subwords.sha256)
    return SplitReport(store.n_pairs, store.n_source_tokens, store.n_target_tokens, sha256)


def encode_pairs(pairs: list[RawPair], subwords: Subwords) -> Encoded:
    rows = subwords.encode([text.decode() for pair in pairs for text in pair])
    length_P2 = np.fromiter(map(len, rows), dtype=np.uint32, count=len(rows)).reshape(-1, 2)
    ids = np.fromiter(itertools.chain.from_iterable(rows), id_type(len(subwords)), count=int(length_P2.sum()))
    return Encoded(ids, length_P2[:, 0], length_P2[:, 1])


def directions(corpora: Sequence[Corpus]) -> list[tuple[str, str]]:
    return [c.languages for c in corpora] + [(c.languages[1], c.languages[0]) for c in corpora if c.both_ways]


def tagged_languages(corpora: Sequence[Corpus]) -> list[str]:
    """The target languages if there are several, in which case each source starts with a language tag."""
    languages = list(dict.fromkeys(target for _, target in directions(corpora)))
    return languages if len(languages) > 1 else []


def _refuse_untrained_directions(corpora: Sequence[Corpus], valid: Sequence[Corpus]) -> None:
    known = directions(corpora)
    for source, target in directions(valid):
        if (source, target) not in known:
            names = ", ".join("-".join(direction) for direction in dict.fromkeys(known))
            raise DataError(f"validation is {source}-{target}, training {names}: give pairs of a trained direction")


def n_processes_for(corpora: Sequence[Corpus]) -> int:
    """The number of available cores, or fewer if there is little text."""
    n_bytes = sum(
        path.stat().st_size * (4 if path.suffix in COMPRESSED_SUFFIXES else 1) for c in corpora for path in c.files
    )
    return min(n_cores(), 1 + n_bytes // BYTES_PER_PROCESS)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 2)


class Prepared:
    """A folder that `prepare` wrote. Its checksums are verified, at about one gigabyte per second.

    `train` and `valid` are `Examples`, `subwords` is the vocabulary, and `report` has the counts.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from transduce import DataConfig
    >>> from transduce.data.corpora import Corpus
    >>> from transduce.data.prepare import Prepared, prepare
    >>> folder = Path(tempfile.mkdtemp())
    >>> text = "".join(f"Haus {n} ist neu.\\tHouse {n} is new.\\n" for n in range(100))
    >>> _ = (folder / "text.tsv").write_text(text)
    >>> corpus = Corpus("text", (folder / "text.tsv",), ("de", "en"))
    >>> _ = prepare([corpus], folder / "prepared", DataConfig(valid_pairs=0))
    >>> prepared = Prepared(folder / "prepared")
    >>> len(prepared.train), prepared.report.directions()
    (100, [('de', 'en')])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / REPORT
        try:
            self.report = Report.from_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): give a folder of transduce prepare") from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{path} is damaged or of another version: run transduce prepare again") from None
        self.subwords = Subwords.load(self.folder / SUBWORDS)
        self.train, self.valid = self._examples(TRAIN), self._examples(VALID)

    def _examples(self, name: str) -> Examples:
        store = Store(self.folder / name)
        store.verify()
        if store.subwords != self.subwords.sha256:
            raise DataError(
                f"{store.path} was encoded with other subwords than {SUBWORDS}: run transduce prepare again"
            )
        return Examples(store, {language: self.subwords.tag(language) for language in self.languages})

    @property
    def languages(self) -> list[str]:
        """The target languages if sources start with a language tag, otherwise empty."""
        return self.report.tagged_languages
