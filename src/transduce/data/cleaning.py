"""Which pairs are worth learning from. Each rule has a name, and what it drops is counted under that name."""

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

CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufffd]")  # all but the tab; and the mark of lost text

WRITTEN_IN = {
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
"""Codes without region. A language that stands under two scripts may use both; one that is not here is not checked."""


def rules(config: DataConfig, source_language: str, target_language: str) -> dict[str, Callable[[Pair], bool]]:
    """Name to test, in the order in which they are asked. True = drop."""
    languages = (source_language, target_language)
    return {
        "control characters": lambda pair: any(CONTROL.search(text) for text in pair),
        "empty": lambda pair: not all(text.strip() for text in pair),
        "too long": lambda pair: max(map(len, pair)) > config.max_characters,
        "length ratio": lambda pair: unlike_in_length(pair, config.max_length_ratio),
        "source equals target": lambda pair: pair[0].strip().casefold() == pair[1].strip().casefold(),
        "mostly non-letters": lambda pair: any(mostly_non_letters(text, config.min_letter_share) for text in pair),
        "wrong script": lambda pair: any(map(in_wrong_script, pair, languages)),
    }


def unlike_in_length(pair: Pair, max_length_ratio: float) -> bool:
    """In characters and in bytes: Chinese has few characters for much, Tamil many bytes for little."""
    for shorter, longer in (sorted(map(len, pair)), sorted(len(text.encode()) for text in pair)):
        if longer <= max_length_ratio * shorter + 20:  # 20: "Yes." and "Yes, I will come." are a fine pair
            return False
    return True


def mostly_non_letters(text: str, min_letter_share: float) -> bool:
    # a to z alone settle it for most texts in Latin script, in a thirtieth of the time.
    return n_ascii_letters(text) < min_letter_share * len(text) and letter_share(text) < min_letter_share


def in_wrong_script(text: str, language: str) -> bool:
    """More than half of the letters are of another script than the language is written in."""
    wanted = scripts_of(language)
    if not wanted or ("LATIN" in wanted and 3 * n_ascii_letters(text) >= 2 * len(text)):
        return False
    return share_of_other_scripts(text, wanted) > 0.5


def n_ascii_letters(text: str) -> int:
    data = text.encode()
    return len(data) - len(data.translate(None, ASCII_LETTERS))


def letter_share(text: str) -> float:
    """Of what is not white space; marks count as the letters that they stand on."""
    seen = [character for character in text if not character.isspace()]
    return sum(unicodedata.category(character)[0] in "LM" for character in seen) / max(len(seen), 1)


def share_of_other_scripts(text: str, wanted: set[str]) -> float:
    scripts = [script(character) for character in text if character.isalpha()]
    return sum(found not in wanted for found in scripts) / max(len(scripts), 1)


@cache
def scripts_of(language: str) -> set[str]:
    code = re.split("[-_]", language)[0].lower()
    return {name for name, languages in WRITTEN_IN.items() if code in languages.split()}


@lru_cache(maxsize=100_000)
def script(letter: str) -> str:
    """The first word of a letter's name in Unicode, which is its script for all that we ask about."""
    return unicodedata.name(letter, "?").split()[0]


class Dropped(NamedTuple):
    """The first pair that a rule took, to show what the rule does."""

    line: int
    source: str
    target: str


@dataclass
class Tally:
    """What became of the pairs that went in."""

    n_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Each pair under the first rule that it meets."""
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
    """Of source and of target: what later asks whether two texts are the same asks these."""


class Chunk(NamedTuple):
    first_line: int
    pairs: list[RawPair]


def clean(
    pairs: Iterable[RawPair],
    config: DataConfig,
    languages: tuple[str, str],
    tally: Tally,
    seen: Seen | None = None,
    n_processes: int = 1,
) -> Iterator[Kept]:
    """The pairs that no rule drops, in their order. `tally` is brought up to date with each part.

    `seen` knows the pairs of corpora that came before, and learns these.
    """
    seen = Seen() if seen is None else seen
    work = partial(apply_rules, config=config, languages=languages)
    for kept, lines, found in ordered_map(work, chunks(pairs), n_processes):
        tally.add(found)
        new = seen.add(hash_of_pair(kept.hash_P2, languages))
        for place in np.flatnonzero(~new):
            tally.drop(DUPLICATE, lines[place], kept.pairs[place])
        yield Kept([pair for pair, is_new in zip(kept.pairs, new, strict=True) if is_new], kept.hash_P2[new])


def apply_rules(chunk: Chunk, config: DataConfig, languages: tuple[str, str]) -> tuple[Kept, list[int], Tally]:
    """What is left of a chunk, in which lines it stood, and what was dropped. Duplicates stay: they take all chunks."""
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
    """Every pair as it is. What is no line of text is refused, since nothing may be dropped."""
    for kept in ordered_map(partial(refuse_what_is_no_text, files=files), chunks(pairs), n_processes):
        tally.n_read += len(kept.pairs)
        yield kept


def refuse_what_is_no_text(chunk: Chunk, files: tuple[Path, Path]) -> Kept:
    for line, pair in enumerate(chunk.pairs, chunk.first_line):
        for text, file in zip(pair, files, strict=True):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                where = f"{file}, line {line}, byte {error.start + 1}"
                raise DataError(f"{where}: not valid UTF-8: mend it; cleaning drops such lines of training") from None
            if b"\n" in text:  # JSON can spell one
                where = f"{file}, line {line}"
                raise DataError(
                    f"{where}: a line break inside a sentence: mend it; cleaning drops such pairs of training"
                )
    return Kept(chunk.pairs, hash_sides(chunk.pairs))


def chunks(pairs: Iterable[RawPair]) -> Iterator[Chunk]:
    """Of so many pairs, or fewer where they are long: memory must not follow the length of lines."""
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
    """Blanks around a sentence do not make it another."""
    digests = b"".join(hashlib.blake2b(text.strip(), digest_size=8).digest() for pair in pairs for text in pair)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def hash_of_pair(hash_P2: NDArray[np.uint64], languages: tuple[str, str]) -> NDArray[np.uint64]:
    """One number for both sides and what they are. The odd factor keeps (a, b) from (b, a)."""
    direction = hashlib.blake2b("-".join(languages).encode(), digest_size=8).digest()
    mixed = hash_P2[:, 0] * np.uint64(0x9E3779B97F4A7C15) + hash_P2[:, 1]
    return mixed ^ np.uint64(int.from_bytes(direction, "little"))


class Seen:
    """The pairs there were, by hash: a set of 64-bit numbers in 8 bytes each, where Python's own takes some 60.

    Sorted runs, each at least twice as long as the next: few to search, and each number is copied seldom.
    """

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def add(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of them are new, the first of equals alone; all are in the set from now on."""
        sorted_numbers, first = np.unique(numbers, return_index=True)
        new = np.ones(len(sorted_numbers), dtype=bool)
        for run in self.runs:
            place = np.searchsorted(run, sorted_numbers).clip(max=len(run) - 1)
            new &= run[place] != sorted_numbers
        answer = np.zeros(len(numbers), dtype=bool)
        answer[first[new]] = True
        if new.any():
            self.runs.append(sorted_numbers[new])
        while len(self.runs) > 1 and len(self.runs[-2]) < 2 * len(self.runs[-1]):
            last = self.runs.pop()
            self.runs[-1] = np.sort(np.concatenate([self.runs[-1], last]), kind="stable")
        return answer
