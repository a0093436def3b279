"""Records of attention: the exact weights of every head, from one forward pass over a finished translation.

A document of several records is JSON, and the data of the inspector's page:

    {"format": "transduce attention", "format_version": 1, "model": …, "records": [
      {"text": …, "translation": …, "part": [1, 1], "flags": [], "n_tags": 0, "window": null,
       "source": [pieces], "target": [pieces], "source_words": [index or null], "target_words": …,
       "tokens": [{"piece": …, "probability": …, "runners_up": [[piece, probability]]}],
       "alignment": [[source word, target word]] or null,
       "heads": [{"kind": …, "layer": 0, "head": 0, "distance": …, "label": …}], "most_telling": index,
       "weights": {"encoder" | "decoder" | "memory":
                   {"shape": [layers, heads, rows, columns], "layers": [base64 of float16, little-endian]}}}]}

Rows of `weights` are queries and columns are attended positions. `source` ends with the end mark, `target` begins with
the start mark. Row t of "decoder" and "memory" belongs to `target[t]`; the token predicted there is `tokens[t]`.
"""

# Axes: L layers, H heads, Q queries, M attended positions.

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from transduce.data.subword import check_several
from transduce.errors import DataError
from transduce.insight.heads import (
    KINDS,
    Array,
    Head,
    Kind,
    clearest_head,
    memory_places,
    self_places,
    tendencies,
    visibility,
)
from transduce.translation.alignment import Link
from transduce.translation.explain import Explained, Token
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

__all__ = ["AttentionRecord", "inspect"]

FORMAT, FORMAT_VERSION = "transduce attention", 1
NO_RECORD = "is not a record of attention: give a file that transduce inspect wrote"


@dataclass(frozen=True)
class AttentionRecord:
    """The attention of every head while a text is translated.

    >>> from transduce import Translator
    >>> from transduce.insight.attention import AttentionRecord, inspect
    >>> record = next(inspect(Translator.load(device="cpu"), ["Das ist gut."]))
    >>> weight_LHQM = record.weights["memory"]  # layers, heads, positions of the target and of the source
    >>> weight_LHQM.shape[2:] == (len(record.target), len(record.source))
    True
    >>> AttentionRecord.from_json(record.to_json()).tokens[0].piece == record.tokens[0].piece
    True
    """

    text: str
    translation: str
    source: tuple[str, ...]
    """The pieces, with the language tag before them and the end mark after them."""
    target: tuple[str, ...]
    """The input of the decoder: the start mark and the pieces."""
    source_words: tuple[int | None, ...]
    target_words: tuple[int | None, ...]
    """The index of each piece's word; words are separated by spaces. None for marks and white space."""
    tokens: tuple[Token, ...]
    """The output: token t is predicted at position t of `target`."""
    weights: dict[Kind, Array] = field(repr=False)
    """weight_LHQM in float32 for each kind of attention."""
    alignment: tuple[Link, ...] | None = None
    """Pairs (source word, target word). None if the model folder does not name the heads that align words."""
    flags: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)
    """The number of this part and the number of parts. A line translated in parts has one record for each."""

    n_tags: int = 0
    """The number of language tags at the start of `source`."""
    window: int | None = None
    """The width of restricted self-attention. None: not restricted."""

    @cached_property
    def heads(self) -> list[Head]:
        """What each head mostly attends to in this sentence."""
        n_source = len(self.source)
        source_marks = [i < self.n_tags or i == n_source - 1 for i in range(n_source)]
        target_marks = [i == 0 for i in range(len(self.target))]
        places = {
            "encoder": self_places(self.source, source_marks),
            "decoder": self_places(self.target, target_marks),
            "memory": memory_places(self.source, source_marks, self.source_words, self.target_words, self.alignment),
        }
        heads: list[Head] = []
        for kind in KINDS:
            _, _, n_queries, n_attended = self.weights[kind].shape
            visible_QM = visibility(kind, n_queries, n_attended, self.window)
            heads += tendencies(kind, self.weights[kind], visible_QM, places[kind])
        return heads

    @property
    def words(self) -> tuple[list[str], list[str]]:
        """The words of text and translation that the indices in `alignment` refer to."""
        return tuple(re.findall(r"[^ \t]+", side) for side in (self.text, self.translation))  # type: ignore[return-value]

    def to_json(self) -> dict[str, Any]:
        """The record as values for JSON. The weights are rounded to float16."""
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
                    "probability": _rounded(token.probability),
                    "runners_up": [[piece, _rounded(probability)] for piece, probability in token.runners_up],
                }
                for token in self.tokens
            ],
            "alignment": None if self.alignment is None else [list(link) for link in self.alignment],
            "heads": [_head_to_json(head) for head in self.heads],
            "most_telling": clearest_head(self.heads),
            "weights": {kind: _pack(weight_LHQM) for kind, weight_LHQM in self.weights.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AttentionRecord:
        """A record from the values of `to_json`. `heads` and `most_telling` are ignored: the weights give them."""
        try:
            record = cls(
                text=str(values["text"]),
                translation=str(values["translation"]),
                source=tuple(map(str, values["source"])),
                target=tuple(map(str, values["target"])),
                source_words=tuple(_optional_int(word) for word in values["source_words"]),
                target_words=tuple(_optional_int(word) for word in values["target_words"]),
                tokens=tuple(
                    Token(str(t["piece"]), float(t["probability"]), [(str(p), float(x)) for p, x in t["runners_up"]])
                    for t in values["tokens"]
                ),
                weights={kind: _unpack(values["weights"][kind]) for kind in KINDS},
                alignment=None
                if values["alignment"] is None
                else tuple((int(s), int(t)) for s, t in values["alignment"]),
                flags=tuple(map(str, values["flags"])),
                part=(int(values["part"][0]), int(values["part"][1])),
                n_tags=int(values["n_tags"]),
                window=_optional_int(values["window"]),
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            raise DataError(f"this {NO_RECORD}") from None
        record.check()
        return record

    def check(self) -> None:
        """Refuse a record whose parts do not match each other."""
        n_source, n_target = len(self.source), len(self.target)
        shapes = {"encoder": (n_source, n_source), "decoder": (n_target, n_target), "memory": (n_target, n_source)}
        lengths = (len(self.source_words), len(self.target_words))
        if lengths != (n_source, n_target) or not n_target - 1 <= len(self.tokens) <= n_target:
            raise DataError(f"this {NO_RECORD} (the lengths of its lists do not match)")
        for kind in KINDS:
            if self.weights[kind].shape[2:] != shapes[kind]:
                raise DataError(f"this {NO_RECORD} (the shape of its {kind} weights does not match its tokens)")


def inspect(
    translator: Translator, texts: Sequence[str], to: str | None = None, *, prefix: str = ""
) -> Iterator[AttentionRecord]:
    """Translate texts and yield the attention weights of each.

    There is one record per text, several for a text that is translated in parts, none for a blank text. `to` is the
    target language, if the model has several. `prefix` is a forced beginning of every translation.

    >>> from transduce import Translator
    >>> from transduce.insight.attention import inspect
    >>> for record in inspect(Translator.load(device="cpu"), ["Das ist gut."]):
    ...     print(record.source, record.translation)
    ('▁Das', '▁ist', '▁gut', '.', '</s>') That's good.
    """
    check_several(texts, "texts", "[text]")
    explained = translator.explain(list(texts), to, prefix=prefix)
    for text, (translation, parts) in zip(texts, explained, strict=True):
        yield from records_of(translator, text, translation, parts, to)


def records_of(
    translator: Translator, text: str, translation: Translation, parts: Sequence[Explained], to: str | None
) -> Iterator[AttentionRecord]:
    """The records of a text that is already translated and explained."""
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
        raise DataError(f"this {NO_RECORD}")
    if (version := document.get("format_version")) != FORMAT_VERSION:
        raise DataError(
            f"a record of attention has format_version {version!r}, this version reads {FORMAT_VERSION}: "
            "write it again with transduce inspect"
        )
    if not isinstance(records := document.get("records"), list):
        raise DataError(f"this {NO_RECORD}")
    return [AttentionRecord.from_json(record) for record in records]


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _head_to_json(head: Head) -> dict[str, Any]:
    numbers = {name: round(getattr(head, name), 4) for name in ("distance", "entropy", "evenness")}
    shares = {place: round(share, 4) for place, share in head.shares.items()}
    return head._asdict() | numbers | {"shares": shares}


def _pack(weight_LHQM: Array) -> dict[str, Any]:
    # Half precision halves the size and is precise enough to display. Separate layers, so that the page can unpack one.
    packed = [base64.b64encode(weight_HQM.astype("<f2").tobytes()).decode() for weight_HQM in weight_LHQM]
    return {"shape": list(weight_LHQM.shape), "layers": packed}


def _unpack(packed: Mapping[str, Any]) -> Array:
    n_layers, *shape = (int(n) for n in packed["shape"])
    if n_layers != len(packed["layers"]) or len(shape) != 3:
        raise ValueError
    layers = [np.frombuffer(base64.b64decode(layer, validate=True), "<f2").reshape(shape) for layer in packed["layers"]]
    return np.stack(layers).astype(np.float32)
