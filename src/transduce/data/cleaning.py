"""Cleaning: named rules drop pairs that are unsuitable for training, and drops are counted by rule."""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.config import DataConfig
from transduce.data.corpora import RawPair
from transduce.data.parallel import ordered_map
from transduce.errors import DataError

Pair = tuple[str, str]
"""Source and target, as text."""

INVALID = "not valid UTF-8"
DUPLICATE = "duplicate pair"
CHUNK, CHUNK_BYTES = 10_000, 8_000_000
ASCII_LETTERS = string.ascii_letters.encode()

# The tab is allowed. U+FFFD marks text that was lost.
CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufffd]")

LANGUAGES_BY_SCRIPT = {
    "LATIN": "af az bs ca cs cy da de en eo es et eu fi fr ga gl hr hu id is it la lt lv ms mt nl no pl pt ro sk sl sq "
    "sr sv sw tl tr uz vi",
    "CYRILLIC": "be bg kk ky mk mn ru sr tg uk uz",
    "ARABIC": "ar fa ps ug ur",
    "HEBREW": "he yi",
    "DEVANAGARI": "hi mr ne sa",
    "CJK": "ja ko zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "KATAKANA-HIRAGANA": "ja",
    "HANGUL": "ko",
    "ARMENIAN": "hy",
    "BENGALI": "bn",
    "ETHIOPIC": "am",
    "GEORGIAN": "ka",
    "GREEK": "el",
    "KHMER": "km",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
}
"""Language codes without region. A language under several scripts may use each. Other languages are not checked."""


def rules(config: DataConfig, source_language: str, target_language: str) -> dict[str, Callable[[Pair], bool]]:
    """Tests by name, in the order of their application. A pair is dropped if a test is True."""
    languages = (source_language, target_language)
    return {
        "control characters": lambda pair: any(CONTROL.search(text) for text in pair),
        "empty": lambda pair: not all(text.strip() for text in pair),
        "too long": lambda pair: max(map(len, pair)) > config.max_characters,
        "length ratio": lambda pair: differ_in_length(pair, config.max_length_ratio),
        "source equals target": lambda pair: pair[0].strip().casefold() == pair[1].strip().casefold(),
        "mostly non-letters": lambda pair: any(mostly_non_letters(text, config.min_letter_share) for text in pair),
        "wrong script": lambda pair: any(map(in_wrong_script, pair, languages)),
    }


def differ_in_length(pair: Pair, max_length_ratio: float) -> bool:
    """Compare characters and bytes: Chinese needs few characters, Tamil many bytes for the same content."""
    for shorter, longer in (sorted(map(len, pair)), sorted(len(text.encode()) for text in pair)):
        if longer <= max_length_ratio * shorter + 20:  # 20: "Yes." and "Yes, I will come." may be a pair
            return False
    return True


def mostly_non_letters(text: str, min_letter_share: float) -> bool:
    # For most texts in Latin script counting only a to z is enough, and takes a thirtieth of the time.
    return n_ascii_letters(text) < min_letter_share * len(text) and letter_share(text) < min_letter_share


def in_wrong_script(text: str, language: str) -> bool:
    """Whether more than half of the letters belong to a script that the language does not use."""
    scripts = scripts_of(language)
    if not scripts or ("LATIN" in scripts and 3 * n_ascii_letters(text) >= 2 * len(text)):
        return False
    return share_of_other_scripts(text, scripts) > 0.5


def n_ascii_letters(text: str) -> int:
    data = text.encode()
    return len(data) - len(data.translate(None, ASCII_LETTERS))


def letter_share(text: str) -> float:
    """The share of letters among the characters that are not white space. Combining marks count as letters."""
    characters = [character for character in text if not character.isspace()]
    return sum(unicodedata.category(character)[0] in "LM" for character in characters) / max(len(characters), 1)


def share_of_other_scripts(text: str, expected: set[str]) -> float:
    scripts = [script(character) for character in text if character.isalpha()]
    return sum(name not in expected for name in scripts) / max(len(scripts), 1)


@cache
def scripts_of(language: str) -> set[str]:
    code = re.split("[-_]", language)[0].lower()
    return {name for name, languages in LANGUAGES_BY_SCRIPT.items() if code in languages.split()}


@lru_cache(maxsize=100_000)
def script(letter: str) -> str:
    """The first word of a letter's Unicode name, which is the name of its script for the scripts used here."""
    return unicodedata.name(letter, "?").split()[0]


class Dropped(NamedTuple):
    """The first pair that a rule dropped, to show in the report what the rule does."""

    line: int
    source: str
    target: str


@dataclass
class Tally:
    """Counts of the pairs that were read and dropped."""

    n_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Pairs by rule. A pair counts for the first rule that drops it."""
    examples: dict[str, Dropped] = field(default_factory=dict)

    def drop(self, rule: str, line: int, pair: RawPair) -> None:
        self.dropped[rule] += 1
        if rule not in self.examples:
            source, target = (side[:200].decode(errors="backslashreplace") for side in pair)
            self.examples[rule] = Dropped(line, source, target)

    def add(self, other: Tally) -> None:
        self.n_read += other.n_read
        self.dropped += other.dropped
        self.examples = other.examples | self.examples


class Kept(NamedTuple):
    pairs: list[RawPair]
    hash_P2: NDArray[np.uint64]
    """Hashes of source and target, by which texts are compared later."""


class Chunk(NamedTuple):
    first_line: int
    pairs: list[RawPair]


def clean(
    pairs: Iterable[RawPair],
    config: DataConfig,
    languages: tuple[str, str],
    tally: Tally,
    seen: HashSet | None = None,
    n_processes: int = 1,
) -> Iterator[Kept]:
    """Yield the pairs that no rule drops, in their order. `tally` is updated with each part.

    `seen` holds the hashes of pairs of earlier corpora, which count as duplicates; those of these pairs are added.
    """
    seen = HashSet() if seen is None else seen
    apply = partial(apply_rules, config=config, languages=languages)
    for kept, lines, chunk_tally in ordered_map(apply, chunks(pairs), n_processes):
        tally.add(chunk_tally)
        is_new_P = seen.add(hash_of_pair(kept.hash_P2, languages))
        for i in np.flatnonzero(~is_new_P):
            tally.drop(DUPLICATE, lines[i], kept.pairs[i])
        yield Kept([pair for pair, is_new in zip(kept.pairs, is_new_P, strict=True) if is_new], kept.hash_P2[is_new_P])


def apply_rules(chunk: Chunk, config: DataConfig, languages: tuple[str, str]) -> tuple[Kept, list[int], Tally]:
    """The kept pairs of a chunk, their lines, and the counts. Duplicates stay, since finding them needs all chunks."""
    tests = rules(config, *languages)
    tally = Tally(n_read=len(chunk.pairs))
    kept, lines = list[RawPair](), list[int]()
    for line, raw in enumerate(chunk.pairs, chunk.first_line):
        try:
            pair = raw[0].decode(), raw[1].decode()
        except UnicodeDecodeError:
            tally.drop(INVALID, line, raw)
            continue
        for name, test in tests.items():
            if test(pair):
                tally.drop(name, line, raw)
                break
        else:
            kept.append(raw)
            lines.append(line)
    return Kept(kept, hash_sides(kept)), lines, tally


def keep_all(pairs: Iterable[RawPair], files: tuple[Path, Path], tally: Tally, n_processes: int = 1) -> Iterator[Kept]:
    """Yield every pair unchanged. A line that is not valid text is refused, since no pair may be dropped."""
    for kept in ordered_map(partial(require_valid_text, files=files), chunks(pairs), n_processes):
        tally.n_read += len(kept.pairs)
        yield kept


def require_valid_text(chunk: Chunk, files: tuple[Path, Path]) -> Kept:
    for line, pair in enumerate(chunk.pairs, chunk.first_line):
        for text, file in zip(pair, files, strict=True):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                where = f"{file}, line {line}, byte {error.start + 1}"
                raise DataError(f"{where}: not valid UTF-8: correct it; cleaning drops such training pairs") from None
            if b"\n" in text:  # JSON can contain one
                problem = f"{file}, line {line}: a line break inside a sentence"
                raise DataError(f"{problem}: correct it; cleaning drops such training pairs")
    return Kept(chunk.pairs, hash_sides(chunk.pairs))


def chunks(pairs: Iterable[RawPair]) -> Iterator[Chunk]:
    """Chunks of `CHUNK` pairs, or fewer if they are long, so that memory does not grow with the length of lines."""
    part, n_bytes, first_line = list[RawPair](), 0, 1
    for pair in pairs:
        part.append(pair)
        n_bytes += len(pair[0]) + len(pair[1])
        if len(part) == CHUNK or n_bytes > CHUNK_BYTES:
            yield Chunk(first_line, part)
            first_line += len(part)
            part, n_bytes = [], 0
    if part:
        yield Chunk(first_line, part)


def hash_sides(pairs: list[RawPair]) -> NDArray[np.uint64]:
    """Hashes of source and target. White space around a sentence is ignored."""
    digests = b"".join(hashlib.blake2b(text.strip(), digest_size=8).digest() for pair in pairs for text in pair)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def hash_of_pair(hash_P2: NDArray[np.uint64], languages: tuple[str, str]) -> NDArray[np.uint64]:
    """One hash for both sides and their languages. The odd factor makes (a, b) differ from (b, a)."""
    direction = hashlib.blake2b("-".join(languages).encode(), digest_size=8).digest()
    mixed = hash_P2[:, 0] * np.uint64(0x9E3779B97F4A7C15) + hash_P2[:, 1]
    return mixed ^ np.uint64(int.from_bytes(direction, "little"))


class HashSet:
    """A set of 64-bit hashes that takes 8 bytes for each, where Python's `set` takes about 60.

    The hashes are stored in sorted runs, each at least twice as long as the next. So there are few runs to search, and
    each hash is rarely copied.
    """

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def add(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Add the hashes, and return which of them are new. Of equal new hashes only the first counts as new."""
        sorted_hashes, first = np.unique(hashes, return_index=True)
        absent = np.ones(len(sorted_hashes), dtype=bool)
        for run in self.runs:
            position = np.searchsorted(run, sorted_hashes).clip(max=len(run) - 1)
            absent &= run[position] != sorted_hashes
        is_new = np.zeros(len(hashes), dtype=bool)
        is_new[first[absent]] = True
        if absent.any():
            self.runs.append(sorted_hashes[absent])
        while len(self.runs) > 1 and len(self.runs[-2]) < 2 * len(self.runs[-1]):
            last = self.runs.pop()
            self.runs[-1] = np.sort(np.concatenate([self.runs[-1], last]), kind="stable")
        return is_new
