"""Sentences and records for tests of the inspector."""

from __future__ import annotations

from typing import Any

import numpy as np

from transduce.insight.attention import AttentionRecord
from transduce.translation.explain import Token

SENTENCE = "Tom hat gestern ein neues Auto gekauft, weil das alte kaputt war."


LONG = "Das ist nicht gut, aber ich kann es nicht ändern. " * 12


HOSTILE = [
    "</script><script>window.ran=1</script>",
    "<!--<script>",
    "<img src=x onerror=window.ran=1>",
    "\u202eabc",
    "🙂",
]


def record_of(pieces: list[str], **changes: Any) -> AttentionRecord:
    """A record with three source tokens and an end mark, these target pieces, and random attention."""
    source, target = ("▁Das", "▁ist", ".", "</s>"), ("<s>", *pieces)
    rng = np.random.default_rng(0)

    def rows(n: int, m: int) -> np.ndarray[Any, Any]:
        weight_LHQM = rng.random((2, 3, n, m)).astype(np.float32)
        weight_LHQM /= weight_LHQM.sum(-1, keepdims=True)
        return weight_LHQM

    n = len(target)
    values: dict[str, Any] = {
        "text": "Das ist.",
        "translation": "".join(pieces),
        "source": source,
        "target": target,
        "source_words": (0, 1, 1, None),
        "target_words": (None, *range(n - 1)),
        "tokens": tuple(Token(piece, 0.5, [("▁a", 0.25)]) for piece in pieces),
        "weights": {"encoder": rows(4, 4), "decoder": rows(n, n) * np.tri(n), "memory": rows(n, 4)},
        "alignment": ((0, 0), (1, 1)),
    }
    return AttentionRecord(**(values | changes))
