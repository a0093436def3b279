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
    "same": "same word",
    "previous": "previous word",
    "next": "next word",
    "first": "first token",
    "last": "end mark",
    "punctuation": "punctuation",
}
MEMORY_PLACES = PLACES | {"same": "just translated", "previous": "translated before", "next": "translated next"}
"""Memory attention looks at source words. These names say which target word they are aligned with."""
EVENLY, NEARBY, MIXED = "all evenly", "nearby words", "mixed"
"""The labels of heads that attend to no single place."""

MIN_SHARE, MIN_LIFT = 0.33, 1.5
"""A place names a head if it gets at least this share of attention and at least this multiple of the uniform share."""
NEARLY_ALL = 0.9
"""Above this share, a place names a head even if uniform attention would give it a similar share."""
MIN_EVENNESS = 0.85
"""Attention with at least this fraction of the maximal entropy counts as even."""
MAX_NEARBY_DISTANCE = 2.5


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


RULE = (
    "A label says what a head mostly attends to in this sentence. For each of these places, its share of the attention "
    "is averaged over all attending tokens. The place with the largest average gives the label, if the average is at "
    f"least {_percent(MIN_SHARE)} and at least {MIN_LIFT:g} times what equal attention to all tokens would give (or "
    f"above {_percent(NEARLY_ALL)}). The number next to the label is this average."
)
MEANINGS: dict[str, str] = {
    PLACES["same"]: "the attending token itself, and the other tokens of its word",
    PLACES["previous"]: "the tokens of the word before it",
    PLACES["next"]: "the tokens of the word after it",
    MEMORY_PLACES["same"]: "the source words of the word that was written last (memory attention)",
    MEMORY_PLACES["previous"]: "the source words of the word that was written before that (memory attention)",
    MEMORY_PLACES["next"]: "the source words of the word that is about to be written (memory attention)",
    PLACES["first"]: "the first token; in decoder self-attention, the start mark",
    PLACES["last"]: "the mark after the last source token",
    PLACES["punctuation"]: "commas, full stops and similar tokens",
    EVENLY: "no such place; the attention is spread almost equally over all tokens. The number is the mean "
    f"entropy as a share of the largest possible entropy: at least {_percent(MIN_EVENNESS)}",
    NEARBY: "no such place, but tokens near the attending one (self-attention). The number is the mean distance: at "
    f"most {MAX_NEARBY_DISTANCE:g} tokens",
    MIXED: "none of these. The number is the largest average of a place",
}
"""What each label means. The page shows `RULE` and these."""


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
    """A token can be at several places, such as the next word and punctuation, so the sum can be above 1."""
    label: str
    number: str
    """The measurement that gave the head its label."""
    parts: dict[Place, float]
    """The shares with each token counted once: at the place of the label, or else at its place with the largest share.
    The sum is at most 1."""


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
            label, number = describe(kind, shares, uniform_shares, distance, evenness)
            names = names_of_places(kind)
            order = sorted(shares, key=lambda place: (names[place] != label, -shares[place]))
            parts = _count_once(weight_NM, {place: places[place][has_choice_Q] for place in order})
            summary = (distance, float(entropy_N.mean()), evenness, shares, label, number, parts)
            heads.append(Head(kind, layer, head, *summary))
    return heads


def _mean_share(weight_NM: Array, at_NM: Array) -> float:
    return float((weight_NM * at_NM).sum(1).mean())


def _count_once(weight_NM: Array, places: Mapping[Place, Array]) -> dict[Place, float]:
    """The share of each place, without the tokens of the places before it."""
    parts, uncounted_NM = dict[Place, float](), np.ones_like(weight_NM, dtype=bool)
    for place, at_NM in places.items():
        parts[place] = round(_mean_share(weight_NM, at_NM & uncounted_NM), 4)
        uncounted_NM &= ~at_NM
    return parts


def names_of_places(kind: Kind) -> dict[Place, str]:
    return MEMORY_PLACES if kind == "memory" else PLACES


def describe(
    kind: Kind, shares: Mapping[Place, float], uniform_shares: Mapping[Place, float], distance: float, evenness: float
) -> tuple[str, str]:
    """Returns the label of a head, and the number that gave it this label."""
    clear = [
        place
        for place, share in shares.items()
        if share >= MIN_SHARE and (share >= MIN_LIFT * uniform_shares[place] or share > NEARLY_ALL)
    ]
    if clear:
        place = max(clear, key=lambda place: shares[place])
        return names_of_places(kind)[place], _percent(shares[place])
    if evenness >= MIN_EVENNESS:
        return EVENLY, _percent(evenness)
    if kind != "memory" and distance <= MAX_NEARBY_DISTANCE:
        return NEARBY, f"{distance:.1f} tokens"
    return MIXED, _percent(max(shares.values()))


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
