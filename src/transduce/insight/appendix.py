"""The figures of the paper's appendix, of one's own model: which head shows it best is measured, and said."""

# Axes: L layers, H heads, S tokens of the sentence, W its words.

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from transduce.data.subword import SPACE_MARK
from transduce.errors import ConfigError, DataError
from transduce.insight.drawing import COLOURS, FAINT, INK, Drawn, new_figure
from transduce.translation.alignment import words_of
from transduce.translation.translator import Translator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
FAR = 4
"""Words from one to the other of a long-distance dependency, at least."""
FAR_SENTENCE = "Tom hat gestern in der Stadt ein neues Auto gekauft."
PRONOUN_SENTENCE, PRONOUN_LINK = "Tom sagte mir, er würde sein Zimmer aufräumen.", ("sein", "Tom")
"""Not typical of the bundled model: of its held-out sentences with a name and a pronoun, the one that shows it most."""
WIDEST = 5.0
"""Points of a line that carries all of a token's attention."""
FAINTEST = 0.01
"""Lines of less are not drawn: they would be a tenth of a point wide."""
END = "end"


@dataclass(frozen=True)
class Subject:
    """Of what figures of a model are drawn."""

    translator: Translator
    sentence: str | None = None
    link: tuple[str, str] | None = None
    """A pronoun, and the word that it means."""
    words: tuple[str, ...] = ()
    to: str | None = None

    @property
    def is_german(self) -> bool:
        sources = {source for source, _ in self.translator.origin.directions}
        return sources == {"de"}

    def sentence_or(self, german: str) -> str:
        if self.sentence is None and not self.is_german:
            raise ConfigError("the sentences known here are German, this model is not of German alone: add --sentence")
        return self.sentence if self.sentence is not None else german


def read_link(link: str | None, sentence: str | None) -> tuple[str, str] | None:
    if link is None:
        return None
    pronoun, equals, word = link.partition("=")
    if not (pronoun and equals and word):
        raise ConfigError(f"--link is {link!r}, must read PRONOUN=WORD: for example sein=Tom")
    if sentence is None:
        raise ConfigError(f"--link {link} is of a sentence: add --sentence TEXT")
    return pronoun, word


class Look(NamedTuple):
    """How the tokens of a sentence look at each other in the encoder."""

    tokens: list[str]
    """As they are drawn; the last is the end mark."""
    words: list[str]
    word_S: list[int | None]
    """To which word a token belongs; None for marks."""
    weight_LHSS: Array

    def tokens_of(self, word: int) -> list[int]:
        return [place for place, own in enumerate(self.word_S) if own == word]

    def between_words(self) -> Array:
        """weight_LHWW: what the tokens of a word, on average, give to those of another."""
        n = len(self.words)
        member_WS = np.array([[own == word for own in self.word_S] for word in range(n)], dtype=np.float64)
        mean_WS = member_WS / np.maximum(member_WS.sum(1, keepdims=True), 1)
        weight_LHWW: Array = mean_WS @ self.weight_LHSS @ member_WS.T
        return weight_LHWW

    def place_of(self, word: str) -> int:
        if word not in self.words:
            raise ConfigError(f"--link names {word!r}, the sentence has {', '.join(self.words)}: choose from them")
        return self.words.index(word)


@torch.no_grad()
def look(translator: Translator, sentence: str, to: str | None = None) -> Look:
    tag, eos_id = translator.tag_for(to), translator.config.model.eos_id
    line = translator.prepare(sentence, tag, [])
    if len(line.ids) != 1:
        what = "is blank" if not line.ids else f"is longer than the {translator.longest_source} tokens of training"
        raise DataError(f"--sentence {what}: give one sentence")
    ids = [*tag, *line.ids[0], eos_id]
    source_BS = torch.tensor([ids], device=translator.device)
    attention_LBHSS = translator.model.encode(source_BS, with_attention=True).attention_LBHSS
    assert attention_LBHSS is not None
    pieces = translator.subwords.pieces(line.ids[0])
    own = [word if any(map(str.isalnum, piece)) else None for word, piece in zip(words_of(pieces), pieces, strict=True)]
    kept = list(dict.fromkeys(word for word in own if word is not None))
    word_S = [None] * len(tag) + [None if word is None else kept.index(word) for word in own] + [None]
    texts = ["".join(p for p, of in zip(pieces, own, strict=True) if of == word) for word in kept]
    tokens = [_shown(piece, first=place == 0) for place, piece in enumerate(pieces)]
    return Look(
        [*translator.subwords.pieces(tag), *tokens, END],
        [text.replace(SPACE_MARK, "") for text in texts],
        word_S,
        attention_LBHSS[:, 0].double().cpu().numpy(),
    )


def _shown(piece: str, first: bool) -> str:
    """A piece that goes on with a word is marked as such, punctuation is not."""
    text = piece.replace(SPACE_MARK, "")
    return text if first or piece.startswith(SPACE_MARK) or not text[:1].isalnum() else f"·{text}"


class Choice(NamedTuple):
    """Counted from 0, as weights are; in words from 1, as people do."""

    layer: int
    head: int
    word: int
    other: int
    weight: float

    def in_words(self, found: Look, weight_LHWW: Array) -> str:
        mean = float(weight_LHWW[:, :, self.word, self.other].mean())
        return (
            f"encoder layer {self.layer + 1}, head {self.head + 1}: “{found.words[self.word]}” gives {self.weight:.2f} "
            f"of its attention to “{found.words[self.other]}”, {abs(self.word - self.other)} words away; "
            f"the mean of all heads is {mean:.2f}, all tokens alike would be {1 / len(found.tokens):.2f}"
        )


def strongest(weight_LHWW: Array, allowed_WW: NDArray[np.bool_]) -> Choice:
    """The head and the pair of words, of those allowed, with the most attention."""
    score_LHWW = np.where(allowed_WW, weight_LHWW, -1.0)
    layer, head, word, other = (int(i) for i in np.unravel_index(score_LHWW.argmax(), score_LHWW.shape))
    return Choice(layer, head, word, other, float(weight_LHWW[layer, head, word, other]))


def allowed_pairs(found: Look, link: tuple[str, str] | None, least_distance: int) -> NDArray[np.bool_]:
    n = len(found.words)
    allowed_WW: NDArray[np.bool_] = np.zeros((n, n), dtype=bool)
    if link is not None:
        allowed_WW[found.place_of(link[0]), found.place_of(link[1])] = True
        return allowed_WW
    place_W = np.arange(n)
    allowed_WW = np.abs(place_W[:, None] - place_W) >= least_distance
    if not allowed_WW.any():
        raise DataError(f"--sentence has {n} words, must have more than {least_distance}: give a longer one")
    return allowed_WW


def most_different(weight_LHSS: Array) -> tuple[int, int, int, float]:
    """Layer, two of its heads, and how far apart they are: half the sum of differences, the mean over tokens.

    What goes to the end mark is no work, so it does not count, nor does how the end mark looks.
    """
    n_layers, n_heads = weight_LHSS.shape[:2]
    if n_heads < 2:
        raise ConfigError("this model has one head in a layer, and no two to compare: leave out the figure heads")
    text_LHSS = weight_LHSS[:, :, :-1, :-1]
    pairs = list(itertools.combinations(range(n_heads), 2))
    apart = {
        (layer, one, other): float(np.abs(text_LHSS[layer, one] - text_LHSS[layer, other]).sum(-1).mean() / 2)
        for layer in range(n_layers)
        for one, other in pairs
    }
    best = max(apart, key=lambda key: apart[key])
    return *best, apart[best]


# Figures 3 to 5


def dependency(subject: Subject) -> Drawn:
    """One word, in all heads of the layer whose head looks the furthest."""
    found = look(subject.translator, subject.sentence_or(FAR_SENTENCE), subject.to)
    weight_LHWW = found.between_words()
    choice = strongest(weight_LHWW, allowed_pairs(found, None, FAR))
    only, to = found.tokens_of(choice.word), found.tokens_of(choice.other)
    figure = new_figure(_width(found), 3.8)
    axes = figure.subplots()
    weight_HSS = found.weight_LHSS[choice.layer]
    for head, weight_SS in enumerate(weight_HSS):
        _lines(axes, weight_SS, only, f"head {head + 1}", head, len(weight_HSS))
    _tokens(axes, found, f"“{found.words[choice.word]}” in layer {choice.layer + 1} of the encoder", only, to)
    figure.legend(loc="outside lower center", ncols=min(len(weight_HSS), 8), handlelength=1.2, columnspacing=1.2)
    return Drawn(figure, choice.in_words(found, weight_LHWW))


def anaphora(subject: Subject) -> Drawn:
    """Above, all of the head that shows it best; below, the pronoun alone, in that head and the next best."""
    if subject.sentence is not None and subject.link is None:
        raise ConfigError("anaphora needs to know whom the pronoun means: add --link PRONOUN=WORD")
    found = look(subject.translator, subject.sentence_or(PRONOUN_SENTENCE), subject.to)
    weight_LHWW = found.between_words()
    choice = strongest(weight_LHWW, allowed_pairs(found, subject.link or PRONOUN_LINK, 1))
    only, to = found.tokens_of(choice.word), found.tokens_of(choice.other)
    figure = new_figure(_width(found), 6.6)
    above, below = figure.subplots(2, 1)
    _lines(above, found.weight_LHSS[choice.layer, choice.head], None, "")
    score_LH = weight_LHWW[:, :, choice.word, choice.other]
    order = np.argsort(-score_LH, axis=None, kind="stable")[:2]
    for i, (layer, head) in enumerate(zip(*np.unravel_index(order, score_LH.shape), strict=True)):
        name = f"layer {layer + 1}, head {head + 1}: {score_LH[layer, head]:.2f}"
        _lines(below, found.weight_LHSS[layer, head], only, name, i, len(order))
    _tokens(above, found, f"layer {choice.layer + 1} of the encoder, head {choice.head + 1}", only, to)
    word, other = (found.words[place] for place in (choice.word, choice.other))
    _tokens(below, found, f"“{word}” alone, in the two heads that look most at “{other}”", only, to)
    figure.legend(loc="outside lower center", ncols=2, handlelength=1.2)
    return Drawn(figure, choice.in_words(found, weight_LHWW))


def two_heads(subject: Subject) -> Drawn:
    found = look(subject.translator, subject.sentence_or(FAR_SENTENCE), subject.to)
    layer, one, other, apart = most_different(found.weight_LHSS)
    figure = new_figure(_width(found), 6.4)
    for i, (axes, head) in enumerate(zip(figure.subplots(2, 1), (one, other), strict=True)):
        _lines(axes, found.weight_LHSS[layer, head], None, "", i)
        _tokens(axes, found, f"layer {layer + 1} of the encoder, head {head + 1}", [], [])
    words = (
        f"encoder layer {layer + 1}, heads {one + 1} and {other + 1}: of any two heads of a layer "
        f"their attention differs most, by {apart:.2f} of what a token gives"
    )
    return Drawn(figure, words)


def _width(found: Look) -> float:
    return float(min(max(4.5, 0.5 * len(found.tokens) + 0.5), 24))


def _lines(axes: Axes, weight_SS: Array, only: list[int] | None, name: str, place: int = 0, n_beside: int = 1) -> None:
    """From tokens above to those that they look at below; a line is as wide as its weight.

    `only`: from these tokens alone. `place`: which of `n_beside` heads, that stand side by side, this is.
    """
    from matplotlib.collections import LineCollection

    rows = range(len(weight_SS)) if only is None else only
    pairs = [(q, m) for q in rows for m in range(len(weight_SS))]
    weights = np.array([weight_SS[q, m] for q, m in pairs])
    colour, widest = COLOURS[place % len(COLOURS)], WIDEST if only is not None else WIDEST / 2
    aside = 0.0 if only is None else (place - (n_beside - 1) / 2) * min(0.16, 0.8 / n_beside)
    segments = [[(q + aside, 1.0), (m + aside, 0.0)] for q, m in pairs]
    alpha: Any = np.clip(0.15 + weights, 0, 1) * (weights > FAINTEST)
    axes.add_collection(LineCollection(segments, linewidths=widest * weights, colors=colour, alpha=alpha))
    if name:
        axes.plot([], [], color=colour, linewidth=3, label=name)  # a line of the legend, all of one strength


def _tokens(axes: Axes, found: Look, title: str, above: list[int], below: list[int]) -> None:
    """Words that a figure is about are bold."""
    axes.set(xlim=(-0.6, len(found.tokens) - 0.4), ylim=(-0.02, 1.02), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    for place, token in enumerate(found.tokens):
        colour = FAINT if found.word_S[place] is None else INK
        for y, side, bold in ((1.04, "bottom", above), (-0.04, "top", below)):
            weight = "bold" if place in bold else "normal"
            text = axes.text(place, y, token, rotation=90, ha="center", va=side, color=colour, weight=weight)
            text.set_parse_math(False)  # a token may be a dollar sign
    axes.set_title(title, pad=16 + 5.6 * max(map(len, found.tokens)))
