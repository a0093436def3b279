"""Splits text that is too long for a model: at the ends of sentences if possible, else of clauses, else of words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

CLOSING = "[\"'”’»)\\]]*"  # noqa: RUF001
"""Closing quotes and brackets belong to the sentence before them."""
BOUNDARIES = [
    re.compile(rf"[.!?…]+{CLOSING}(?P<gap>\s+)|[。！？]+[」』）]*(?P<none>)"),  # noqa: RUF001
    re.compile(rf"[,;:–—]{CLOSING}(?P<gap>\s+)|[、，；：](?P<none>)"),  # noqa: RUF001
    re.compile(r"(?P<gap>\s+)(?P<none>)?"),
]


class Segment(NamedTuple):
    text: str
    gap: str
    """The white space between this segment and the next."""


def split(text: str, count: Callable[[str], int], max_tokens: int) -> list[Segment]:
    """Splits text into segments of at most `max_tokens` tokens. `count` counts the tokens of a text.

    Each segment takes as much text as fits, from left to right. The segments with their gaps joined are the text. Text
    without a boundary is cut between characters. A character with its combining marks is never cut.
    """
    return _pack(Segment(text, ""), count, max_tokens, 0)


def _pack(whole: Segment, count: Callable[[str], int], max_tokens: int, level: int) -> list[Segment]:
    """Cuts at the boundaries of this level, joins neighbours that fit, and cuts parts that do not at the next level."""
    if count(whole.text) <= max_tokens or len(whole.text) <= 1:
        return [whole]
    if level == len(BOUNDARIES):
        parts = list(_halves(whole))
        if len(parts) == 1:
            return parts
    else:
        parts = list(_cut(whole, BOUNDARIES[level]))
    packed: list[Segment] = []
    for part in parts:
        joined = Segment(packed[-1].text + packed[-1].gap + part.text, part.gap) if packed else part
        if packed and count(joined.text) <= max_tokens:
            packed[-1] = joined
        else:
            packed += _pack(part, count, max_tokens, level + (level < len(BOUNDARIES)))
    return packed


def _cut(whole: Segment, boundary: re.Pattern[str]) -> Iterator[Segment]:
    start = 0
    for match in boundary.finditer(whole.text):
        gap_start, gap_end = match.span("gap") if match["gap"] else (match.end(), match.end())
        if start < gap_start and gap_end < len(whole.text):
            yield Segment(whole.text[start:gap_start], whole.text[gap_start:gap_end])
            start = gap_end
    yield Segment(whole.text[start:], whole.gap)


def _halves(whole: Segment) -> Iterator[Segment]:
    """Cuts as close to the middle as possible, but not between a character and its combining marks."""
    text, middle = whole.text, len(whole.text) // 2
    cuts = [i for i in range(1, len(text)) if not _is_one_character(text[i - 1], text[i])]
    if cuts:
        cut = min(cuts, key=lambda i: abs(i - middle))
        yield Segment(text[:cut], "")
        yield Segment(text[cut:], whole.gap)
    else:
        yield whole


def _is_one_character(before: str, after: str) -> bool:
    """Whether two code points are shown as one: combining marks, zero-width joiners, variation selectors."""
    return bool(unicodedata.combining(after)) or "\u200d" in (before, after) or "\ufe00" <= after <= "\ufe0f"


def longest_repeat(ids: list[int], longest_unit: int = 10) -> int:
    """The number of tokens in the longest repetition: a unit of up to `longest_unit` tokens, at least four times."""
    longest = 0
    for n_unit in range(1, min(longest_unit, len(ids) // 4) + 1):
        n_equal = 0
        for i in range(n_unit, len(ids)):
            n_equal = n_equal + 1 if ids[i] == ids[i - n_unit] else 0
            if n_equal >= 3 * n_unit:  # three copies of the first unit
                longest = max(longest, n_equal + n_unit)
    return longest
