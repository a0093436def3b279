"""Text that is too long for a model, in parts that are not: cut at ends of sentences, else clauses, else words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple

CLOSING = "[\"'”’»)\\]]*"  # noqa: RUF001
"""Quotes and brackets stay with the sentence that they close."""
BOUNDARIES = [
    re.compile(rf"[.!?…]+{CLOSING}(?P<gap>\s+)|[。！？]+[」』）]*(?P<none>)"),  # noqa: RUF001
    re.compile(rf"[,;:–—]{CLOSING}(?P<gap>\s+)|[、，；：](?P<none>)"),  # noqa: RUF001
    re.compile(r"(?P<gap>\s+)(?P<none>)?"),
]


class Segment(NamedTuple):
    text: str
    gap: str
    """What stood between it and the next."""


def split(text: str, count: Callable[[str], int], most: int) -> list[Segment]:
    """Segments of at most `most` tokens, as `count` has them, and as few as come of taking them in order.

    Joined with their gaps they are the text. What holds no boundary at all is cut between characters; one character
    is never cut.
    """
    return _pack(Segment(text, ""), count, most, 0)


def _pack(whole: Segment, count: Callable[[str], int], most: int, level: int) -> list[Segment]:
    if count(whole.text) <= most or len(whole.text) <= 1:
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
        if packed and count(joined.text) <= most:
            packed[-1] = joined
        else:
            packed += _pack(part, count, most, level + (level < len(BOUNDARIES)))
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
    """Cut as near the middle as may be: not before a mark that belongs to the character before it."""
    text, middle = whole.text, len(whole.text) // 2
    places = [place for place in range(1, len(text)) if not _goes_on(text[place - 1], text[place])]
    if places:
        place = min(places, key=lambda place: abs(place - middle))
        yield Segment(text[:place], "")
        yield Segment(text[place:], whole.gap)
    else:
        yield whole


def _goes_on(before: str, after: str) -> bool:
    return bool(unicodedata.combining(after)) or "\u200d" in (before, after) or "\ufe00" <= after <= "\ufe0f"


def longest_repeat(ids: list[int], longest_unit: int = 10) -> int:
    """Tokens in the longest stretch that says the same, of one to `longest_unit` tokens, over and over."""
    longest = 0
    for unit in range(1, min(longest_unit, len(ids) // 4) + 1):
        run = 0
        for place in range(unit, len(ids)):
            run = run + 1 if ids[place] == ids[place - unit] else 0
            if run >= 3 * unit:  # four times
                longest = max(longest, run + unit)
    return longest
