"""Who looked at what while a sentence was translated: exact weights of every head, from one pass along the translation.

A record is written as JSON; so is a document of several, which is also what the page shows:

    {"format": "transduce attention", "format_version": 1, "model": …, "records": [
      {"text": …, "translation": …, "part": [1, 1], "flags": [], "n_tags": 0, "window": null,
       "source": [pieces], "target": [pieces], "source_words": [index or null], "target_words": …,
       "tokens": [{"piece": …, "probability": …, "runners_up": [[piece, probability]]}],
       "alignment": [[source word, target word]] or null,
       "heads": [{"kind": …, "layer": 0, "head": 0, "distance": …, "label": …}], "most_telling": index,
       "weights": {"encoder" | "decoder" | "memory":
                   {"shape": [layers, heads, rows, columns], "layers": [base64 of float16, little-endian]}}}]}

Rows of `weights` ask and columns are looked at. `source` ends with the end mark, `target` begins with the start mark:
what stands at row t of "decoder" and "memory" is `target[t]`, and what it says next is `tokens[t]`.
"""

# Axes: L layers, H heads, Q rows that ask, M positions that are looked at.

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from transduce.errors import DataError
from transduce.insight.heads import (
    KINDS,
    Array,
    Head,
    Kind,
    memory_places,
    most_telling,
    self_places,
    tendencies,
    visibility,
)
from transduce.translation.alignment import Link
from transduce.translation.explain import Explained, Token
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

FORMAT, FORMAT_VERSION = "transduce attention", 1
NOT_OURS = "is no record of attention: give one that transduce inspect wrote"


@dataclass(frozen=True)
class AttentionRecord:
    text: str
    translation: str
    source: tuple[str, ...]
    """Pieces, the tag before them and the end mark."""
    target: tuple[str, ...]
    """The start mark, and pieces: what the decoder was given."""
    source_words: tuple[int | None, ...]
    target_words: tuple[int | None, ...]
    """To which word, as spaces divide the text, each of them belongs. None for marks and white space."""
    tokens: tuple[Token, ...]
    """What was said: token t at position t of `target`."""
    weights: dict[Kind, Array] = field(repr=False)
    """Of each kind, weight_LHQM in float32."""
    alignment: tuple[Link, ...] | None = None
    """(source word, target word). None where the model does not say which heads align words."""
    flags: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)
    """A line that was translated in parts gives a record for each: this one, of how many."""

    n_tags: int = 0
    """How many of `source` say which language is wanted."""
    window: int | None = None
    """Of restricted self-attention."""

    @cached_property
    def heads(self) -> list[Head]:
        """What each tends to do in this sentence."""
        n_source = len(self.source)
        source_marks = [i < self.n_tags or i == n_source - 1 for i in range(n_source)]
        target_marks = [i == 0 for i in range(len(self.target))]
        places = {
            "encoder": self_places(self.source, source_marks),
            "decoder": self_places(self.target, target_marks),
            "memory": memory_places(self.source, source_marks, self.source_words, self.target_words, self.alignment),
        }
        found: list[Head] = []
        for kind in KINDS:
            _, _, n_asking, n_looked_at = self.weights[kind].shape
            visible_QM = visibility(kind, n_asking, n_looked_at, self.window)
            found += tendencies(kind, self.weights[kind], visible_QM, places[kind])
        return found

    @property
    def words(self) -> tuple[list[str], list[str]]:
        """Of text and translation, as `alignment` counts them."""
        return tuple(re.findall(r"[^ \t]+", side) for side in (self.text, self.translation))  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "translation": self.translation,
            "part": list(self.part),
            "flags": list(self.flags),
            "n_tags": self.n_tags,
            "window": self.window,
            "source": list(self.source),
            "target": list(self.target),
            "source_words": list(self.source_words),
            "target_words": list(self.target_words),
            "tokens": [
                {
                    "piece": token.piece,
                    "probability": _short(token.probability),
                    "runners_up": [[piece, _short(probability)] for piece, probability in token.runners_up],
                }
                for token in self.tokens
            ],
            "alignment": None if self.alignment is None else [list(link) for link in self.alignment],
            "heads": [_head_to_json(head) for head in self.heads],
            "most_telling": most_telling(self.heads),
            "weights": {kind: _pack(weight_LHQM) for kind, weight_LHQM in self.weights.items()},
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> AttentionRecord:
        """What heads tend to do is not read but worked out again."""
        try:
            record = cls(
                text=str(given["text"]),
                translation=str(given["translation"]),
                source=tuple(map(str, given["source"])),
                target=tuple(map(str, given["target"])),
                source_words=tuple(_number(word) for word in given["source_words"]),
                target_words=tuple(_number(word) for word in given["target_words"]),
                tokens=tuple(
                    Token(str(t["piece"]), float(t["probability"]), [(str(p), float(x)) for p, x in t["runners_up"]])
                    for t in given["tokens"]
                ),
                weights={kind: _unpack(given["weights"][kind]) for kind in KINDS},
                alignment=None
                if given["alignment"] is None
                else tuple((int(s), int(t)) for s, t in given["alignment"]),
                flags=tuple(map(str, given["flags"])),
                part=(int(given["part"][0]), int(given["part"][1])),
                n_tags=int(given["n_tags"]),
                window=_number(given["window"]),
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(f"this {NOT_OURS}") from None
        record.check()
        return record

    def check(self) -> None:
        n_source, n_target = len(self.source), len(self.target)
        shapes = {"encoder": (n_source, n_source), "decoder": (n_target, n_target), "memory": (n_target, n_source)}
        lengths = (len(self.source_words), len(self.target_words))
        if lengths != (n_source, n_target) or not n_target - 1 <= len(self.tokens) <= n_target:
            raise DataError(f"this {NOT_OURS}: its tokens do not fit each other")
        for kind in KINDS:
            if self.weights[kind].shape[2:] != shapes[kind]:
                raise DataError(f"this {NOT_OURS}: its {kind} weights do not fit its tokens")


def inspect(
    translator: Translator, texts: Sequence[str], to: str | None = None, *, prefix: str = ""
) -> Iterator[AttentionRecord]:
    """A record for each text that is not blank; several for one that is too long to be translated at once."""
    found = translator.explain(list(texts), to, prefix=prefix)
    for text, (translation, parts) in zip(texts, found, strict=True):
        yield from records_of(translator, text, translation, parts, to)


def records_of(
    translator: Translator, text: str, translation: Translation, parts: Sequence[Explained], to: str | None
) -> Iterator[AttentionRecord]:
    """Of a text that was translated and explained already."""
    n_tags = len(translator.tag_for(to))
    for number, part in enumerate(parts, 1):
        yield _record(translator, text, translation, part, (number, len(parts)), n_tags)


def _record(
    translator: Translator, text: str, translation: Translation, part: Explained, number: tuple[int, int], n_tags: int
) -> AttentionRecord:
    subwords, is_whole = translator.subwords, number[1] == 1
    texts = (text.strip(), translation.text.strip()) if is_whole else subwords.decode([part.source, part.target_in])
    return AttentionRecord(
        text=texts[0],
        translation=texts[1],
        source=tuple(subwords.pieces(part.source)),
        target=tuple(subwords.pieces(part.target_in)),
        source_words=(*[None] * n_tags, *part.source_words, None),
        target_words=(None, *part.target_words),
        tokens=tuple(part.tokens),
        weights=dict(zip(KINDS, (kind.numpy() for kind in part.weights), strict=True)),
        alignment=None if part.links is None else tuple(part.links),
        flags=translation.flags,
        part=number,
        n_tags=n_tags,
        window=translator.config.model.attention_window,
    )


def to_document(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> dict[str, Any]:
    about = {"format": FORMAT, "format_version": FORMAT_VERSION, "model": model, "direction": direction}
    return about | {"records": [record.to_json() for record in records]}


def from_document(document: Any) -> list[AttentionRecord]:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"this {NOT_OURS}")
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise DataError(f"a record of attention has format_version {version!r}, this program reads {FORMAT_VERSION}")
    if not isinstance(records := document.get("records"), list):
        raise DataError(f"this {NOT_OURS}")
    return [AttentionRecord.from_json(record) for record in records]


def _short(x: float) -> float:
    return float(f"{x:.6g}")


def _number(given: Any) -> int | None:
    return None if given is None else int(given)


def _head_to_json(head: Head) -> dict[str, Any]:
    numbers = {name: round(getattr(head, name), 4) for name in ("distance", "entropy", "evenness")}
    shares = {place: round(share, 4) for place, share in head.shares.items()}
    return head._asdict() | numbers | {"shares": shares}


def _pack(weight_LHQM: Array) -> dict[str, Any]:
    # Half precision: what a person can see of a weight, in half the bytes. A page unpacks one layer at a time.
    packed = [base64.b64encode(weight_HQM.astype("<f2").tobytes()).decode() for weight_HQM in weight_LHQM]
    return {"shape": list(weight_LHQM.shape), "layers": packed}


def _unpack(packed: Mapping[str, Any]) -> Array:
    n_layers, *shape = (int(n) for n in packed["shape"])
    if n_layers != len(packed["layers"]) or len(shape) != 3:
        raise ValueError
    layers = [np.frombuffer(base64.b64decode(layer, validate=True), "<f2").reshape(shape) for layer in packed["layers"]]
    return np.stack(layers).astype(np.float32)
