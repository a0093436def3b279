"""What each head tends to do: how far it looks, how widely, at what; and that in a few plain words."""

# Axes: L layers, H heads, Q rows that ask, M positions that are looked at, N rows that have a choice.

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.data.subword import SPACE_MARK
from transduce.translation.alignment import Link

Array = NDArray[Any]
Kind = Literal["encoder", "decoder", "memory"]
KINDS: dict[Kind, str] = {"encoder": "encoder self", "decoder": "decoder self", "memory": "decoder to source"}

Place = Literal["same", "previous", "next", "first", "last", "punctuation"]
WORDS: dict[Place, str] = {
    "same": "the same word",
    "previous": "the word before",
    "next": "the word after",
    "first": "the first token",
    "last": "the end mark",
    "punctuation": "punctuation",
}
MEMORY_WORDS = WORDS | {"same": "the word just said", "previous": "the word before that", "next": "the word to come"}
"""Of a decoder that looks at the source: at what is aligned with its own words."""

LEAST_SHARE, LEAST_LIFT = 0.33, 1.5
"""A head is named for a place that has this share of its attention, and so many times what chance would give it."""
EVEN = 0.85
"""Entropy, as a share of the most there can be, from which on attention is spread evenly."""
NEAR = 2.5


class Head(NamedTuple):
    kind: Kind
    layer: int
    head: int
    distance: float
    """Tokens between who asks and what is looked at, on average."""
    entropy: float
    """In bits, on average."""
    evenness: float
    """The same as a share of the most there can be: 0 looks at one place, 1 at all alike."""
    shares: dict[Place, float]
    label: str


def visibility(kind: Kind, n_asking: int, n_looked_at: int, window: int | None) -> Array:
    """Who may look at whom, as the model has it: sections 3.2.3 and 4 of the paper."""
    offset_QM = np.arange(n_looked_at) - np.arange(n_asking)[:, None]
    visible_QM = offset_QM <= 0 if kind == "decoder" else np.ones_like(offset_QM, dtype=bool)
    return visible_QM if kind == "memory" or window is None else visible_QM & (2 * np.abs(offset_QM) <= window)


def tendencies(kind: Kind, weight_LHQM: Array, visible_QM: Array, places: Mapping[Place, Array]) -> list[Head]:
    """Of all heads of a kind. Rows that may look at one position alone say nothing of a head and are left out; so are
    places that nobody may look at, such as the word after in a decoder."""
    n_layers, n_heads, n_asking, n_looked_at = weight_LHQM.shape
    places = {place: at_QM for place, at_QM in places.items() if (at_QM & visible_QM).any()}
    has_choice_Q = visible_QM.sum(1) > 1
    if not has_choice_Q.any():
        has_choice_Q = np.ones(n_asking, dtype=bool)
    weight_LHNM, visible_NM = weight_LHQM[:, :, has_choice_Q].astype(np.float64), visible_QM[has_choice_Q]
    chance_NM = visible_NM / np.maximum(visible_NM.sum(1, keepdims=True), 1)
    distance_NM = np.abs(np.arange(n_asking)[:, None] - np.arange(n_looked_at))[has_choice_Q]
    entropy_LHN = -(weight_LHNM * np.log2(np.maximum(weight_LHNM, 1e-30))).sum(-1)
    most_N = np.log2(np.maximum(visible_NM.sum(1), 2))
    found = []
    for layer in range(n_layers):
        for head in range(n_heads):
            weight_NM = weight_LHNM[layer, head]
            shares = {place: _mean(weight_NM, at_QM[has_choice_Q]) for place, at_QM in places.items()}
            chances = {place: _mean(chance_NM, at_QM[has_choice_Q]) for place, at_QM in places.items()}
            entropy_N = entropy_LHN[layer, head]
            distance, evenness = float((weight_NM * distance_NM).sum(1).mean()), float((entropy_N / most_N).mean())
            label = describe(kind, shares, chances, distance, evenness)
            found.append(Head(kind, layer, head, distance, float(entropy_N.mean()), evenness, shares, label))
    return found


def _mean(weight_NM: Array, at_NM: Array) -> float:
    return float((weight_NM * at_NM).sum(1).mean())


def describe(
    kind: Kind, shares: Mapping[Place, float], chances: Mapping[Place, float], distance: float, evenness: float
) -> str:
    words = MEMORY_WORDS if kind == "memory" else WORDS
    clear = [
        place
        for place, share in shares.items()
        if share >= LEAST_SHARE and (share >= LEAST_LIFT * chances[place] or share > 0.9)
    ]
    if clear:
        return words[max(clear, key=lambda place: shares[place])]
    if evenness >= EVEN:
        return "everything, evenly"
    return "words nearby" if kind != "memory" and distance <= NEAR else "here and there"


def self_places(pieces: Sequence[str], is_mark: Sequence[bool]) -> dict[Place, Array]:
    """Which position stands where, seen from each; for a side that looks at itself."""
    unit_Q = np.array(units(pieces, is_mark))
    offset_QM = unit_Q[None, :] - unit_Q[:, None]
    at = {"same": offset_QM == 0, "previous": offset_QM == -1, "next": offset_QM == 1}
    return at | _fixed_places(pieces, is_mark, len(pieces))  # type: ignore[return-value]


def memory_places(
    source: Sequence[str],
    is_mark: Sequence[bool],
    source_words: Sequence[int | None],
    target_words: Sequence[int | None],
    links: Sequence[Link] | None,
) -> dict[Place, Array]:
    """For the target, which looks at the source; words by their index, None for marks. Without links, no words."""
    linked: dict[int, set[int]] = {}
    for s, t in links or ():
        linked.setdefault(t, set()).add(s)
    last, known = -1, []  # the word that was said last, at each position: none at the start mark
    for word in target_words:
        last = last if word is None else word
        known.append(last)

    def aligned(offset: int) -> Array:
        return np.array([[word in linked.get(said + offset, ()) for word in source_words] for said in known])

    at = {"same": aligned(0), "previous": aligned(-1), "next": aligned(1)} if links is not None else {}
    return at | _fixed_places(source, is_mark, len(target_words))  # type: ignore[return-value]


def _fixed_places(pieces: Sequence[str], is_mark: Sequence[bool], n_asking: int) -> dict[str, Array]:
    position_M = np.arange(len(pieces))
    last_M = (position_M == len(pieces) - 1) & bool(is_mark[-1]) & (position_M > 0)
    punctuation_M = np.array([is_punctuation(p) and not mark for p, mark in zip(pieces, is_mark, strict=True)])
    at = {"first": position_M == 0, "last": last_M, "punctuation": punctuation_M}
    return {place: np.broadcast_to(at_M, (n_asking, len(pieces))) for place, at_M in at.items()}


def units(pieces: Sequence[str], is_mark: Sequence[bool]) -> list[int]:
    """Words, but that punctuation and each mark is one of its own."""
    unit, found, before = -1, list[int](), ""
    for piece, mark in zip(pieces, is_mark, strict=True):
        what = "mark" if mark else "punctuation" if is_punctuation(piece) else "word"
        unit += what == "mark" or what != before or piece.startswith(SPACE_MARK)
        found.append(unit)
        before = what
    return found


def is_punctuation(piece: str) -> bool:
    text = piece.removeprefix(SPACE_MARK)
    return bool(text) and all(unicodedata.category(c)[0] in "PS" for c in text)


def most_telling(heads: Sequence[Head]) -> int:
    """Which of them says most plainly what goes where: the one to show first."""
    asked = [i for i, head in enumerate(heads) if head.kind == "memory"]
    return max(
        asked, key=lambda i: (max(heads[i].shares.get(place, 0.0) for place in ("same", "next")), -heads[i].evenness)
    )
