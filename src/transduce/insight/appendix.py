"""The figures of the paper's appendix for any model. Measurements choose the heads, and the captions report them."""

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
from transduce.insight.drawing import COLOURS, FAINT, INK, DrawnFigure, new_figure
from transduce.translation.alignment import words_of
from transduce.translation.translator import Translator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
MIN_DISTANCE = 4
"""Minimum number of words between the two ends of a long-distance dependency."""
DEPENDENCY_SENTENCE = "Tom hat gestern in der Stadt ein neues Auto gekauft."
PRONOUN_SENTENCE, PRONOUN_LINK = "Tom sagte mir, er würde sein Zimmer aufräumen.", ("sein", "Tom")
"""Chosen because it shows the effect most clearly: of the bundled model's held-out sentences with a name and a pronoun,
the one with the largest weight. It is not typical."""
MAX_LINE_WIDTH = 5.0
"""In points: the width of a line that carries all attention of a token."""
MIN_DRAWN_WEIGHT = 0.01
"""Lines of smaller weights are not drawn: they would be less than a tenth of a point wide."""
END = "end"


@dataclass(frozen=True)
class Subject:
    """The model and the text that figures of a model show."""

    translator: Translator
    sentence: str | None = None
    link: tuple[str, str] | None = None
    """A pronoun and the word that it refers to."""
    words: tuple[str, ...] = ()
    to: str | None = None

    @property
    def is_german(self) -> bool:
        sources = {source for source, _ in self.translator.origin.directions}
        return sources == {"de"}

    def sentence_or(self, german: str) -> str:
        if self.sentence is None and not self.is_german:
            raise ConfigError(
                "the default sentence is German, this model does not translate from German only: add --sentence TEXT"
            )
        return self.sentence if self.sentence is not None else german


def read_link(link: str | None, sentence: str | None) -> tuple[str, str] | None:
    if link is None:
        return None
    pronoun, equals, word = link.partition("=")
    if not (pronoun and equals and word):
        raise ConfigError(f"--link is {link!r}, must have the form PRONOUN=WORD: for example sein=Tom")
    if sentence is None:
        raise ConfigError(f"--link {link} needs a sentence with these words: add --sentence TEXT")
    return pronoun, word


class SentenceAttention(NamedTuple):
    """The encoder's self-attention in one sentence."""

    tokens: list[str]
    """As drawn in figures. The last is the end mark."""
    words: list[str]
    word_S: list[int | None]
    """The word of each token. None for marks."""
    weight_LHSS: Array

    def tokens_of(self, word: int) -> list[int]:
        return [place for place, token_word in enumerate(self.word_S) if token_word == word]

    def between_words(self) -> Array:
        """weight_LHWW: the attention from one word to another, averaged over the tokens of the first word."""
        n_words = len(self.words)
        member_WS = np.array(
            [[token_word == word for token_word in self.word_S] for word in range(n_words)], dtype=np.float64
        )
        mean_WS = member_WS / np.maximum(member_WS.sum(1, keepdims=True), 1)
        weight_LHWW: Array = mean_WS @ self.weight_LHSS @ member_WS.T
        return weight_LHWW

    def index_of(self, word: str) -> int:
        if word not in self.words:
            raise ConfigError(f"--link names {word!r}, the sentence has {', '.join(self.words)}: choose from them")
        return self.words.index(word)


@torch.no_grad()
def encoder_attention(translator: Translator, sentence: str, to: str | None = None) -> SentenceAttention:
    tag, eos_id = translator.tag_for(to), translator.config.model.eos_id
    line = translator.prepare(sentence, tag, [])
    if len(line.ids) != 1:
        problem = "is blank" if not line.ids else f"has more than {translator.longest_source} tokens, the limit"
        raise DataError(f"--sentence {problem}: give one sentence")
    ids = [*tag, *line.ids[0], eos_id]
    source_BS = torch.tensor([ids], device=translator.device)
    attention_LBHSS = translator.model.encode(source_BS, with_attention=True).attention_LBHSS
    assert attention_LBHSS is not None
    pieces = translator.subwords.pieces(line.ids[0])
    piece_words = [
        word if any(map(str.isalnum, piece)) else None for word, piece in zip(words_of(pieces), pieces, strict=True)
    ]
    kept = list(dict.fromkeys(word for word in piece_words if word is not None))
    word_S = [None] * len(tag) + [None if word is None else kept.index(word) for word in piece_words] + [None]
    texts = [
        "".join(piece for piece, piece_word in zip(pieces, piece_words, strict=True) if piece_word == word)
        for word in kept
    ]
    tokens = [_label(piece, is_first=place == 0) for place, piece in enumerate(pieces)]
    return SentenceAttention(
        [*translator.subwords.pieces(tag), *tokens, END],
        [text.replace(SPACE_MARK, "") for text in texts],
        word_S,
        attention_LBHSS[:, 0].double().cpu().numpy(),
    )


def _label(piece: str, is_first: bool) -> str:
    """A piece that continues a word starts with a dot; punctuation does not."""
    text = piece.replace(SPACE_MARK, "")
    return text if is_first or piece.startswith(SPACE_MARK) or not text[:1].isalnum() else f"·{text}"


class Choice(NamedTuple):
    """A head and a pair of words. Layers and heads are counted from 0 here and from 1 in captions."""

    layer: int
    head: int
    word: int
    other: int
    weight: float

    def caption(self, attention: SentenceAttention, weight_LHWW: Array) -> str:
        mean = float(weight_LHWW[:, :, self.word, self.other].mean())
        word, other = attention.words[self.word], attention.words[self.other]
        return (
            f"encoder layer {self.layer + 1}, head {self.head + 1}: “{word}” gives {self.weight:.2f} "
            f"of its attention to “{other}”, {abs(self.word - self.other)} words away; "
            f"the mean of all heads is {mean:.2f}, uniform attention would give {1 / len(attention.tokens):.2f}"
        )


def strongest(weight_LHWW: Array, allowed_WW: NDArray[np.bool_]) -> Choice:
    """The head and the allowed pair of words with the largest weight."""
    score_LHWW = np.where(allowed_WW, weight_LHWW, -1.0)
    layer, head, word, other = (int(i) for i in np.unravel_index(score_LHWW.argmax(), score_LHWW.shape))
    return Choice(layer, head, word, other, float(weight_LHWW[layer, head, word, other]))


def allowed_pairs(attention: SentenceAttention, link: tuple[str, str] | None, min_distance: int) -> NDArray[np.bool_]:
    """The linked pair if there is a link, else all pairs of words at least `min_distance` apart."""
    n_words = len(attention.words)
    allowed_WW: NDArray[np.bool_] = np.zeros((n_words, n_words), dtype=bool)
    if link is not None:
        allowed_WW[attention.index_of(link[0]), attention.index_of(link[1])] = True
        return allowed_WW
    place_W = np.arange(n_words)
    allowed_WW = np.abs(place_W[:, None] - place_W) >= min_distance
    if not allowed_WW.any():
        raise DataError(f"--sentence has {n_words} words, must have more than {min_distance}: give a longer one")
    return allowed_WW


def most_different(weight_LHSS: Array) -> tuple[int, int, int, float]:
    """The layer, the two of its heads that differ most, and their difference (total variation, mean over tokens).

    The end mark is excluded on both sides: a head attends to it if its pattern does not occur in the sentence.
    """
    n_layers, n_heads = weight_LHSS.shape[:2]
    if n_heads < 2:
        raise ConfigError("the figure heads compares two heads of a layer, this model has one: leave out heads")
    text_LHSS = weight_LHSS[:, :, :-1, :-1]
    pairs = list(itertools.combinations(range(n_heads), 2))
    differences = {
        (layer, one, other): float(np.abs(text_LHSS[layer, one] - text_LHSS[layer, other]).sum(-1).mean() / 2)
        for layer in range(n_layers)
        for one, other in pairs
    }
    largest = max(differences, key=lambda key: differences[key])
    return *largest, differences[largest]


# Figures 3 to 5


def dependency(subject: Subject) -> DrawnFigure:
    """One word in all heads of the layer whose head has the strongest long-distance attention."""
    attention = encoder_attention(subject.translator, subject.sentence_or(DEPENDENCY_SENTENCE), subject.to)
    weight_LHWW = attention.between_words()
    choice = strongest(weight_LHWW, allowed_pairs(attention, None, MIN_DISTANCE))
    query_tokens, attended_tokens = attention.tokens_of(choice.word), attention.tokens_of(choice.other)
    figure = new_figure(_width(attention), 3.8)
    axes = figure.subplots()
    weight_HSS = attention.weight_LHSS[choice.layer]
    for head, weight_SS in enumerate(weight_HSS):
        _lines(axes, weight_SS, query_tokens, f"head {head + 1}", head, len(weight_HSS))
    title = f"“{attention.words[choice.word]}” in layer {choice.layer + 1} of the encoder"
    _tokens(axes, attention, title, query_tokens, attended_tokens)
    figure.legend(loc="outside lower center", ncols=min(len(weight_HSS), 8), handlelength=1.2, columnspacing=1.2)
    return DrawnFigure(figure, choice.caption(attention, weight_LHWW))


def anaphora(subject: Subject) -> DrawnFigure:
    """Above: the whole sentence in the strongest head. Below: the pronoun alone in the two strongest heads."""
    if subject.sentence is not None and subject.link is None:
        raise ConfigError("anaphora needs the pronoun and the word that it refers to: add --link PRONOUN=WORD")
    attention = encoder_attention(subject.translator, subject.sentence_or(PRONOUN_SENTENCE), subject.to)
    weight_LHWW = attention.between_words()
    choice = strongest(weight_LHWW, allowed_pairs(attention, subject.link or PRONOUN_LINK, 1))
    query_tokens, attended_tokens = attention.tokens_of(choice.word), attention.tokens_of(choice.other)
    figure = new_figure(_width(attention), 6.6)
    above, below = figure.subplots(2, 1)
    _lines(above, attention.weight_LHSS[choice.layer, choice.head], None, "")
    score_LH = weight_LHWW[:, :, choice.word, choice.other]
    order = np.argsort(-score_LH, axis=None, kind="stable")[:2]
    for i, (layer, head) in enumerate(zip(*np.unravel_index(order, score_LH.shape), strict=True)):
        name = f"layer {layer + 1}, head {head + 1}: {score_LH[layer, head]:.2f}"
        _lines(below, attention.weight_LHSS[layer, head], query_tokens, name, i, len(order))
    title = f"layer {choice.layer + 1} of the encoder, head {choice.head + 1}"
    _tokens(above, attention, title, query_tokens, attended_tokens)
    word, other = (attention.words[place] for place in (choice.word, choice.other))
    title = f"“{word}” alone, in the two heads that attend most to “{other}”"
    _tokens(below, attention, title, query_tokens, attended_tokens)
    figure.legend(loc="outside lower center", ncols=2, handlelength=1.2)
    return DrawnFigure(figure, choice.caption(attention, weight_LHWW))


def two_heads(subject: Subject) -> DrawnFigure:
    attention = encoder_attention(subject.translator, subject.sentence_or(DEPENDENCY_SENTENCE), subject.to)
    layer, one, other, difference = most_different(attention.weight_LHSS)
    figure = new_figure(_width(attention), 6.4)
    for i, (axes, head) in enumerate(zip(figure.subplots(2, 1), (one, other), strict=True)):
        _lines(axes, attention.weight_LHSS[layer, head], None, "", i)
        _tokens(axes, attention, f"layer {layer + 1} of the encoder, head {head + 1}", [], [])
    caption = (
        f"encoder layer {layer + 1}, heads {one + 1} and {other + 1}: the two heads of one layer that differ most, "
        f"by {difference:.2f} of a token's attention on average"
    )
    return DrawnFigure(figure, caption)


def _width(attention: SentenceAttention) -> float:
    return float(min(max(4.5, 0.5 * len(attention.tokens) + 0.5), 24))


def _lines(
    axes: Axes, weight_SS: Array, query_tokens: list[int] | None, name: str, place: int = 0, n_beside: int = 1
) -> None:
    """Draws lines from query tokens (above) to attended tokens (below). The width of a line is its weight.

    `query_tokens`: None for all. `place`: the position of this head among `n_beside` heads drawn side by side.
    """
    from matplotlib.collections import LineCollection

    rows = range(len(weight_SS)) if query_tokens is None else query_tokens
    pairs = [(q, m) for q in rows for m in range(len(weight_SS))]
    weights = np.array([weight_SS[q, m] for q, m in pairs])
    colour = COLOURS[place % len(COLOURS)]
    max_width = MAX_LINE_WIDTH if query_tokens is not None else MAX_LINE_WIDTH / 2
    shift = 0.0 if query_tokens is None else (place - (n_beside - 1) / 2) * min(0.16, 0.8 / n_beside)
    segments = [[(q + shift, 1.0), (m + shift, 0.0)] for q, m in pairs]
    alpha: Any = np.clip(0.15 + weights, 0, 1) * (weights > MIN_DRAWN_WEIGHT)
    axes.add_collection(LineCollection(segments, linewidths=max_width * weights, colors=colour, alpha=alpha))
    if name:
        axes.plot([], [], color=colour, linewidth=3, label=name)  # for the legend, where all lines are equally strong


def _tokens(
    axes: Axes, attention: SentenceAttention, title: str, query_tokens: list[int], attended_tokens: list[int]
) -> None:
    """Writes all tokens above and below the lines; `query_tokens` and `attended_tokens` are bold."""
    axes.set(xlim=(-0.6, len(attention.tokens) - 0.4), ylim=(-0.02, 1.02), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    for place, token in enumerate(attention.tokens):
        colour = FAINT if attention.word_S[place] is None else INK
        for y, side, bold in ((1.04, "bottom", query_tokens), (-0.04, "top", attended_tokens)):
            weight = "bold" if place in bold else "normal"
            text = axes.text(place, y, token, rotation=90, ha="center", va=side, color=colour, weight=weight)
            text.set_parse_math(False)  # a token may be a dollar sign
    axes.set_title(title, pad=16 + 5.6 * max(map(len, attention.tokens)))
