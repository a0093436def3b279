"""Summarises each head: how far it looks, how widely it spreads its attention, and a short label for its pattern."""

# Axes: L layers, H heads, Q queries, M attended positions, N queries that can attend to more than one position.

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
KINDS: dict[Kind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "memory": "memory attention",
}

Place = Literal["same", "previous", "next", "first", "last", "punctuation"]
PLACES: dict[Place, str] = {
    "same": "the same word",
    "previous": "the previous word",
    "next": "the next word",
    "first": "the first token",
    "last": "the end mark",
    "punctuation": "punctuation",
}
MEMORY_PLACES = PLACES | {
    "same": "the word just translated",
    "previous": "the word translated before that",
    "next": "the next word to translate",
}
"""Memory attention looks at source words. These names say which target word they are aligned with."""

MIN_SHARE, MIN_LIFT = 0.33, 1.5
"""A place names a head if it gets at least this share of attention and at least this multiple of the uniform share."""
MIN_EVENNESS = 0.85
"""Attention with at least this fraction of the maximal entropy counts as even."""
MAX_NEARBY_DISTANCE = 2.5


class Head(NamedTuple):
    kind: Kind
    layer: int
    head: int
    distance: float
    """The mean number of tokens between a query and the attended positions."""
    entropy: float
    """In bits, the mean over queries."""
    evenness: float
    """Entropy as a fraction of its maximum: 0 for a single position, 1 for uniform attention."""
    shares: dict[Place, float]
    label: str


def visibility(kind: Kind, n_queries: int, n_attended: int, window: int | None) -> Array:
    """The positions that each query may attend to in the model: sections 3.2.3 and 4 of the paper."""
    offset_QM = np.arange(n_attended) - np.arange(n_queries)[:, None]
    visible_QM = offset_QM <= 0 if kind == "decoder" else np.ones_like(offset_QM, dtype=bool)
    return visible_QM if kind == "memory" or window is None else visible_QM & (2 * np.abs(offset_QM) <= window)


def tendencies(kind: Kind, weight_LHQM: Array, visible_QM: Array, places: Mapping[Place, Array]) -> list[Head]:
    """Summarises all heads of one kind.

    Excluded are queries that see a single position, because all heads are equal there, and places that no query can
    see, such as the next word in a decoder.
    """
    n_layers, n_heads, n_queries, n_attended = weight_LHQM.shape
    places = {place: at_QM for place, at_QM in places.items() if (at_QM & visible_QM).any()}
    has_choice_Q = visible_QM.sum(1) > 1
    if not has_choice_Q.any():
        has_choice_Q = np.ones(n_queries, dtype=bool)
    weight_LHNM, visible_NM = weight_LHQM[:, :, has_choice_Q].astype(np.float64), visible_QM[has_choice_Q]
    uniform_NM = visible_NM / np.maximum(visible_NM.sum(1, keepdims=True), 1)
    distance_NM = np.abs(np.arange(n_queries)[:, None] - np.arange(n_attended))[has_choice_Q]
    entropy_LHN = -(weight_LHNM * np.log2(np.maximum(weight_LHNM, 1e-30))).sum(-1)
    max_entropy_N = np.log2(np.maximum(visible_NM.sum(1), 2))
    uniform_shares = {place: _mean_share(uniform_NM, at_QM[has_choice_Q]) for place, at_QM in places.items()}
    heads = []
    for layer in range(n_layers):
        for head in range(n_heads):
            weight_NM, entropy_N = weight_LHNM[layer, head], entropy_LHN[layer, head]
            shares = {place: _mean_share(weight_NM, at_QM[has_choice_Q]) for place, at_QM in places.items()}
            distance = float((weight_NM * distance_NM).sum(1).mean())
            evenness = float((entropy_N / max_entropy_N).mean())
            label = describe(kind, shares, uniform_shares, distance, evenness)
            heads.append(Head(kind, layer, head, distance, float(entropy_N.mean()), evenness, shares, label))
    return heads


def _mean_share(weight_NM: Array, at_NM: Array) -> float:
    return float((weight_NM * at_NM).sum(1).mean())


def describe(
    kind: Kind, shares: Mapping[Place, float], uniform_shares: Mapping[Place, float], distance: float, evenness: float
) -> str:
    names = MEMORY_PLACES if kind == "memory" else PLACES
    clear = [
        place
        for place, share in shares.items()
        if share >= MIN_SHARE and (share >= MIN_LIFT * uniform_shares[place] or share > 0.9)
    ]
    if clear:
        return names[max(clear, key=lambda place: shares[place])]
    if evenness >= MIN_EVENNESS:
        return "all tokens evenly"
    return "nearby words" if kind != "memory" and distance <= MAX_NEARBY_DISTANCE else "no clear pattern"


def self_places(pieces: Sequence[str], is_mark: Sequence[bool]) -> dict[Place, Array]:
    """For self-attention: a matrix per place that is True where the attended position is at that place."""
    unit_Q = np.array(units(pieces, is_mark))
    offset_QM = unit_Q[None, :] - unit_Q[:, None]
    places = {"same": offset_QM == 0, "previous": offset_QM == -1, "next": offset_QM == 1}
    return places | _fixed_places(pieces, is_mark, len(pieces))  # type: ignore[return-value]


def memory_places(
    source: Sequence[str],
    is_mark: Sequence[bool],
    source_words: Sequence[int | None],
    target_words: Sequence[int | None],
    links: Sequence[Link] | None,
) -> dict[Place, Array]:
    """For memory attention, like `self_places`. Words are indices, None for marks. Without links, no word places."""
    linked: dict[int, set[int]] = {}
    for source_word, target_word in links or ():
        linked.setdefault(target_word, set()).add(source_word)
    last_word, last_words = -1, []  # at each position: the last target word so far
    for word in target_words:
        last_word = last_word if word is None else word
        last_words.append(last_word)

    def aligned(offset: int) -> Array:
        return np.array([[word in linked.get(last + offset, ()) for word in source_words] for last in last_words])

    places = {"same": aligned(0), "previous": aligned(-1), "next": aligned(1)} if links is not None else {}
    return places | _fixed_places(source, is_mark, len(target_words))  # type: ignore[return-value]


def _fixed_places(pieces: Sequence[str], is_mark: Sequence[bool], n_queries: int) -> dict[str, Array]:
    position_M = np.arange(len(pieces))
    last_M = (position_M == len(pieces) - 1) & bool(is_mark[-1]) & (position_M > 0)
    punctuation_M = np.array([is_punctuation(p) and not mark for p, mark in zip(pieces, is_mark, strict=True)])
    places = {"first": position_M == 0, "last": last_M, "punctuation": punctuation_M}
    return {place: np.broadcast_to(at_M, (n_queries, len(pieces))) for place, at_M in places.items()}


def units(pieces: Sequence[str], is_mark: Sequence[bool]) -> list[int]:
    """The number of each piece's unit: a word, a run of punctuation, or a single mark."""
    unit, unit_numbers, previous_type = -1, list[int](), ""
    for piece, mark in zip(pieces, is_mark, strict=True):
        unit_type = "mark" if mark else "punctuation" if is_punctuation(piece) else "word"
        unit += unit_type == "mark" or unit_type != previous_type or piece.startswith(SPACE_MARK)
        unit_numbers.append(unit)
        previous_type = unit_type
    return unit_numbers


def is_punctuation(piece: str) -> bool:
    text = piece.removeprefix(SPACE_MARK)
    return bool(text) and all(unicodedata.category(c)[0] in "PS" for c in text)


def clearest_head(heads: Sequence[Head]) -> int:
    """The index of the memory head that follows the alignment most closely: the first one to show."""
    memory_heads = [i for i, head in enumerate(heads) if head.kind == "memory"]
    return max(
        memory_heads,
        key=lambda i: (max(heads[i].shares.get(place, 0.0) for place in ("same", "next")), -heads[i].evenness),
    )
