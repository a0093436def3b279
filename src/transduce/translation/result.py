"""The translation of a line: text, scores, and flags for known problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from transduce.translation.alignment import Link
from transduce.translation.explain import Token

Flag = Literal["split", "limit", "loop", "empty", "close"]
FLAGS: dict[Flag, str] = {
    "split": "the line was longer than any line of the training data, and was translated in parts",
    "limit": "the translation reached the highest length allowed and was cut there",
    "loop": "the translation repeats itself, and the source does not",
    "empty": "the translation is empty, and the line is not",
    "close": "another translation scored as high: another batch size or machine may choose it",
}


class Alternative(NamedTuple):
    text: str
    score: float
    log_prob: float


@dataclass(frozen=True, repr=False)
class Translation:
    """One line, translated. As a string it is the text of the translation.

    >>> from transduce import Translator
    >>> translation = Translator.load(device="cpu").translate("Das ist gut.")
    >>> print(translation)
    That's good.
    >>> translation
    Translation("That's good.", score=-0.71)
    >>> translation.text, translation.flags
    ("That's good.", ())
    """

    text: str
    score: float
    """Log-probability divided by the length penalty, summed over the parts of a line. Alternatives are ranked by it."""
    log_prob: float
    flags: tuple[Flag, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    """The best of the beam, this translation first."""
    tokens: tuple[Token, ...] | None = None
    alignment: tuple[Link, ...] | None = None
    """(source word, target word), counted from 0. Words are separated by white space."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The text, the score and the flags, and how many of the rest there are."""
        parts = [repr(self.text), f"score={self.score:.2f}"]
        parts += [f"flags={self.flags}"] if self.flags else []
        counts = {"alternatives": len(self.alternatives), "tokens": len(self.tokens or ())}
        parts += [f"{n} {name}" for name, n in counts.items() if n > 1]
        return f"{type(self).__name__}({', '.join(parts)})"
