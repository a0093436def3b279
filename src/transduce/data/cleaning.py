"""Which pairs are worth learning from. Each rule has a name, and what it drops is counted under that name."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from transduce.config import DataConfig
from transduce.data.corpora import RawPair

Pair = tuple[str, str]
"""Source and target, as text."""

INVALID = "not valid UTF-8"
DUPLICATE = "duplicate pair"
CHUNK = 10_000

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
        "mostly non-letters": lambda pair: any(letter_share(text) < config.min_letter_share for text in pair),
        "wrong script": lambda pair: any(map(in_wrong_script, pair, languages)),
    }


def unlike_in_length(pair: Pair, max_length_ratio: float) -> bool:
    """In bytes, which lie nearer to each other than characters between Chinese and English, say."""
    shorter, longer = sorted(len(text.encode()) for text in pair)
    return longer > max_length_ratio * shorter + 20  # 20: "Yes." and "Yes, I will come." are a fine pair


def letter_share(text: str) -> float:
    """Of what is not white space; marks count as the letters that they stand on."""
    seen = [character for character in text if not character.isspace()]
    return sum(unicodedata.category(character)[0] in "LM" for character in seen) / max(len(seen), 1)


def in_wrong_script(text: str, language: str) -> bool:
    """More than half of the letters are of another script than the language is written in."""
    wanted = scripts_of(language)
    if not wanted:
        return False
    scripts = [script(character) for character in text if character.isalpha()]
    return 2 * sum(found not in wanted for found in scripts) > len(scripts)


@cache
def scripts_of(language: str) -> set[str]:
    code = re.split("[-_]", language)[0].lower()
    return {name for name, languages in WRITTEN_IN.items() if code in languages.split()}


@lru_cache(maxsize=100_000)
def script(letter: str) -> str:
    """The first word of a letter's name in Unicode, which is its script for all that we ask about."""
    return unicodedata.name(letter, "?").split()[0]


def clean(
    pairs: Iterable[RawPair], config: DataConfig, source_language: str, target_language: str, dropped: Counter[str]
) -> Iterator[Pair]:
    """The pairs that no rule drops, in their order. `dropped` counts the others, each under the first rule it meets."""
    tests = rules(config, source_language, target_language)
    seen = Seen()
    kept: list[Pair] = []
    for raw in pairs:
        try:
            pair = raw[0].decode(), raw[1].decode()
        except UnicodeDecodeError:
            dropped[INVALID] += 1
            continue
        broken = next((name for name, test in tests.items() if test(pair)), None)
        if broken is not None:
            dropped[broken] += 1
            continue
        kept.append(pair)
        if len(kept) == CHUNK:
            yield from _first_of_each(kept, seen, dropped)
            kept = []
    yield from _first_of_each(kept, seen, dropped)


def _first_of_each(pairs: list[Pair], seen: Seen, dropped: Counter[str]) -> Iterator[Pair]:
    for pair, new in zip(pairs, seen.add([_hash(pair) for pair in pairs]), strict=True):
        if new:
            yield pair
        else:
            dropped[DUPLICATE] += 1


def _hash(pair: Pair) -> int:
    # The length keeps ("ab", "c") from ("a", "bc").
    text = f"{len(pair[0])} {pair[0]}{pair[1]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Seen:
    """A set of 64-bit numbers in 8 bytes each, where Python's own takes some 60.

    Sorted runs, each at least twice as long as the next: few to search, and each number is copied seldom.
    """

    def __init__(self) -> None:
        self.runs: list[NDArray[np.uint64]] = []

    def add(self, numbers: list[int]) -> list[bool]:
        """Which of them are new, the first of equals alone; all are in the set from now on."""
        sorted_numbers, first = np.unique(np.array(numbers, dtype=np.uint64), return_index=True)
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
        return [bool(is_new) for is_new in answer]
