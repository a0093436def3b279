"""Figures of the paper's formulas and of what a model has learnt. All values come from the package: from `reference`,
which is the paper in NumPy, and from `Visible`, which computes the model's attention masks."""

# Axes: T positions, D = d_model, I examples, B = 1, H = 1, Q queries, M attended positions, K = d_k, U = d_v,
# V vocabulary.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from transduce.attention import Visible
from transduce.config import ModelConfig, TrainConfig
from transduce.data.subword import SPACE_MARK
from transduce.errors import ConfigError
from transduce.insight.appendix import Subject, anaphora, dependency, two_heads
from transduce.insight.drawing import (
    COLOURS,
    FAINT,
    FORMATS,
    INK,
    DrawnFigure,
    draw_in_style,
    new_figure,
    row_of_axes,
    write_figure,
)
from transduce.reference import attend, learning_rate, loss, sinusoid, smoothed_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Array = NDArray[np.float64]
N_POSITIONS, N_ENTRIES = 100, 128
"""The size of the drawn positional encoding. The 512 entries of the paper would be too many columns to distinguish."""
WAVE_ENTRIES = (16, 24, 32, 48)
"""Entries drawn as waves, each slower than the one before."""
POSITIONS = (10, 40, 70)
D_MODELS, WARM_UPS = (256, 512, 1024), (1000, 4000, 16_000)
SMOOTHINGS = (0.0, 0.1, 0.3)
N_WORDS = 10
KEY_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
N_ATTENDED, N_EXAMPLES = 16, 400
N_NEIGHBOURS = 6
GERMAN_WORDS = ("Mutter", "zwei", "Montag", "gehen", "Haus", "gestern", "house", "water")


# 3.5 Positional encoding


def positions() -> DrawnFigure:
    encoding_TD = sinusoid(np.arange(N_POSITIONS), N_ENTRIES)
    figure = new_figure(9, 3.4)
    left, right = row_of_axes(figure, 2, (1.15, 1))
    image = _heat_map(left, encoding_TD, "coolwarm", -1, 1)
    left.set(title="positional encodings", xlabel="entry of the encoding", ylabel="position")
    figure.colorbar(image, ax=left, shrink=0.8, label="value")
    for entry, colour in zip(WAVE_ENTRIES, COLOURS, strict=False):
        right.plot(np.arange(N_POSITIONS), encoding_TD[:, entry], color=colour, label=f"entry {entry}")
    right.set(title="some entries as waves", xlabel="position", ylim=(-1.05, 1.05))
    right.legend(
        ncols=len(WAVE_ENTRIES), loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=1, columnspacing=1
    )
    caption = (
        f"{N_POSITIONS} positions for d_model {N_ENTRIES}: sines and cosines, each pair slower than the one before"
    )
    return DrawnFigure(figure, caption)


def similarity() -> DrawnFigure:
    d_model = ModelConfig().d_model
    encoding_TD = sinusoid(np.arange(N_POSITIONS), d_model)
    product_TT = encoding_TD @ encoding_TD.T / (d_model / 2)  # 1 for equal positions, since sin² + cos² = 1
    figure = new_figure(9, 3.6)
    left, right = row_of_axes(figure, 2, (1, 1.15))
    image = _heat_map(left, product_TT, "viridis", float(product_TT.min()), 1)
    left.set(title="similarity of positions", xlabel="position", ylabel="position")
    figure.colorbar(image, ax=left, shrink=0.8)
    for place, colour, width in zip(POSITIONS, COLOURS, (7, 4, 1.5), strict=False):  # the curves overlap
        distance_T = np.arange(N_POSITIONS) - place
        right.plot(distance_T, product_TT[place], color=colour, linewidth=width, label=f"to position {place}")
    right.set(title="depends only on the distance", xlabel="distance", ylabel="scalar product / (d_model / 2)")
    right.legend()
    return DrawnFigure(figure, "scalar products of positional encodings depend only on the distance between positions")


# 3.2.3 Masks


def visibility() -> DrawnFigure:
    n, n_tokens, window = 12, 9, 6
    token_B1M = (torch.arange(n) < n_tokens)[None, None]
    patterns = {
        "padding (encoder)": Visible(token_B1M),
        "no look-ahead (decoder)": Visible(look_ahead=False),
        "both": Visible(token_B1M, look_ahead=False),
        f"window of {window}": Visible(window=window),
    }
    figure = new_figure(9, 2.9)
    for axes, (name, visible) in zip(row_of_axes(figure, len(patterns)), patterns.items(), strict=True):
        visible_QM = visible.matrix(n, n, torch.device("cpu")).expand(1, n, n)[0].numpy()
        _heat_map(axes, visible_QM.astype(float), _two_colours(), 0, 1, aspect="equal")
        axes.set_title(name, fontsize=9)
        axes.set_xticks(np.arange(-0.5, n), minor=True)
        axes.set_yticks(np.arange(-0.5, n), minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
        axes.set(xticks=[], yticks=[], xlabel="attended position")
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("query position")
    caption = f"blue: visible; {n} positions, the last {n - n_tokens} are padding in the first and third picture"
    return DrawnFigure(figure, caption)


def _two_colours() -> object:
    from matplotlib.colors import ListedColormap

    return ListedColormap(["#e8e8e8", COLOURS[0]])


# 5.3 Optimizer


def schedule() -> DrawnFigure:
    d_model, warmup_steps = ModelConfig().d_model, TrainConfig().warmup_steps
    steps = np.arange(1, 20_001, 50)
    figure = new_figure(9, 3.2)
    by_width, by_warm_up = row_of_axes(figure, 2)
    for width, colour in zip(D_MODELS, COLOURS, strict=False):
        rates = [learning_rate(int(step), width, warmup_steps) for step in steps]
        by_width.plot(steps, rates, color=colour, label=f"d_model {width}")
    for warm_up, colour in zip(WARM_UPS, COLOURS, strict=False):
        rates = [learning_rate(int(step), d_model, warm_up) for step in steps]
        by_warm_up.plot(steps, rates, color=colour, label=f"{warm_up:,} warm-up steps")
    by_width.set(title=f"learning rate, {warmup_steps:,} warm-up steps", xlabel="step")
    by_warm_up.set(title=f"learning rate, d_model {d_model}", xlabel="step")
    for axes in (by_width, by_warm_up):
        axes.yaxis.set_major_formatter("{x:.4f}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks(range(0, 20_001, 5000))
        axes.set_ylim(bottom=0)
        axes.legend()
    return DrawnFigure(figure, "equation 3: linear increase, then decrease with the inverse square root of the step")


# 5.4 Regularization


def smoothing() -> DrawnFigure:
    figure = new_figure(9, 3.4)
    left, right = row_of_axes(figure, 2, (1, 1.25))
    target, pad_id, width = 3, ModelConfig().pad_id, 0.8 / len(SMOOTHINGS)
    for i, (label_smoothing, colour) in enumerate(zip(SMOOTHINGS, COLOURS, strict=False)):
        target_V = smoothed_targets(np.array([[target]]), N_WORDS, label_smoothing)[0, 0]
        left.bar(np.arange(N_WORDS) + (i - 1) * width, target_V, width, color=colour, label=f"{label_smoothing:g}")
    left.set(title=f"target distribution over {N_WORDS} words", xlabel="word", ylabel="probability")
    left.set_xticks(np.arange(N_WORDS))
    left.legend(title="label smoothing")
    confidence = np.linspace(0.01, 0.9999, 400)
    for label_smoothing, colour in zip(SMOOTHINGS, COLOURS, strict=False):
        losses = [_loss_at(float(share), target, label_smoothing, pad_id) for share in confidence]
        right.plot(confidence, losses, color=colour, label=f"{label_smoothing:g}")
        best = int(np.argmin(losses))
        right.plot(confidence[best], losses[best], "o", color=colour, markersize=5, clip_on=False)
    right.set(title="loss and its minimum", xlabel="predicted probability of the correct word", ylim=(0, 4))
    right.set_xlim(0, 1)
    caption = f"the minimum of the loss is at probability 1 - e + e / V (smoothing e, V = {N_WORDS}), not at 1"
    return DrawnFigure(figure, caption)


def _loss_at(confidence: float, target: int, label_smoothing: float, pad_id: int) -> float:
    """The loss of one token if all other words have equal probability."""
    prob_V = np.full(N_WORDS, (1 - confidence) / (N_WORDS - 1))
    prob_V[target] = confidence
    return loss(np.log(prob_V)[None, None], np.array([[target]]), label_smoothing, pad_id)[0]


# 3.2.1 Why 1 / sqrt(d_k)


def random_query_weights(d_k: int, scaled: bool) -> Array:
    """weight_IM for random queries and keys with entries of mean 0 and variance 1."""
    rng = np.random.default_rng(d_k)
    query_BHQK = rng.standard_normal((N_EXAMPLES, 1, 1, d_k))
    key_BHMK = rng.standard_normal((N_EXAMPLES, 1, N_ATTENDED, d_k))
    # `attend` divides by the square root of d_k. Larger queries cancel the division.
    factor = 1.0 if scaled else math.sqrt(d_k)
    visible_BQM = np.ones((N_EXAMPLES, 1, N_ATTENDED), dtype=bool)
    weight_IM: Array = attend(query_BHQK * factor, key_BHMK, key_BHMK, visible_BQM)[1][:, 0, 0]
    return weight_IM


def saturation() -> DrawnFigure:
    variants = {"with 1 / √d_k": True, "without": False}
    figure = new_figure(9, 3.2)
    left, middle, right = row_of_axes(figure, 3)
    for i, ((name, scaled), colour) in enumerate(zip(variants.items(), COLOURS, strict=False)):
        by_size = {d_k: random_query_weights(d_k, scaled) for d_k in KEY_SIZES}
        sorted_M = np.sort(by_size[512][0])[::-1]
        left.bar(np.arange(N_ATTENDED) + (i - 0.5) * 0.4, sorted_M, 0.4, color=colour, label=name)
        middle.plot(KEY_SIZES, [weight_IM.max(1).mean() for weight_IM in by_size.values()], "o-", color=colour)
        # The trace of the Jacobian of softmax is the sum of p (1 - p).
        slopes = [(1 - (weight_IM**2).sum(1)).mean() for weight_IM in by_size.values()]
        right.plot(KEY_SIZES, slopes, "o-", color=colour)
    left.set(title="weights of one query, d_k 512", xlabel="positions sorted by weight", ylim=(0, 1))
    left.legend()
    middle.set(title="largest weight", xlabel="d_k", ylim=(0, 1))
    right.set(title="slope of softmax: Σ p (1 - p)", xlabel="d_k", ylim=(0, 1))
    for axes in (middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
        axes.minorticks_off()
    caption = (
        f"means over {N_EXAMPLES} random queries and {N_ATTENDED} positions: "
        "without the scale, softmax has almost no gradient for large d_k"
    )
    return DrawnFigure(figure, caption)


# 3.4 Embeddings


def embeddings(subject: Subject) -> DrawnFigure:
    words = list(subject.words or _frequent_words(subject))
    neighbours = {word: nearest(subject, word) for word in words}
    n_columns = min(4, len(words))
    n_rows = math.ceil(len(words) / n_columns)
    figure = new_figure(9, 0.5 + 1.55 * n_rows)
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True)
    for axes in grid.flat[len(words) :]:
        axes.set_visible(False)
    for axes, (word, nearest_words) in zip(grid.flat, neighbours.items(), strict=False):
        labels, values = zip(*nearest_words, strict=True)
        axes.barh(range(len(labels)), values, color=COLOURS[4], height=0.85)
        for y, label in enumerate(labels):
            axes.text(0.015, y, label, va="center", ha="left", fontsize=8, color=INK)
        axes.set(title=word, yticks=[], xlim=(0, 1), ylim=(len(labels) - 0.4, -0.6))
        axes.spines["left"].set_visible(False)
    figure.supxlabel("cosine similarity of embeddings", fontsize=9, color=FAINT)
    return DrawnFigure(figure, "the nearest embeddings of some words, among tokens that begin a word")


def nearest(subject: Subject, word: str) -> list[tuple[str, float]]:
    """The tokens that begin a word with the largest cosine similarity to `word`, and that similarity."""
    pieces, is_start, unit_VD = _word_starts(subject)
    if SPACE_MARK + word not in pieces:
        raise ConfigError(f"--words has {word!r}, which is not a token of this model: give frequent whole words")
    row = pieces.index(SPACE_MARK + word)
    similarity_V = unit_VD @ unit_VD[row]
    order = [int(i) for i in np.argsort(-similarity_V) if is_start[i] and i != row][:N_NEIGHBOURS]
    return [(pieces[i].removeprefix(SPACE_MARK), float(similarity_V[i])) for i in order]


def _word_starts(subject: Subject) -> tuple[list[str], list[bool], Array]:
    translator = subject.translator
    pieces = translator.subwords.pieces(range(len(translator.subwords)))
    is_start = [piece.startswith(SPACE_MARK) and piece[1:].isalpha() for piece in pieces]
    table_VD = translator.model.embedding.source_embedding.detach().float().cpu().numpy()[: len(pieces)]
    return pieces, is_start, table_VD / np.linalg.norm(table_VD, axis=1, keepdims=True)


def _frequent_words(subject: Subject) -> Sequence[str]:
    pieces, is_start, _ = _word_starts(subject)
    german = [word for word in GERMAN_WORDS if SPACE_MARK + word in pieces]
    if subject.is_german and german:
        return german
    # A BPE vocabulary lists frequent pieces first.
    long_words = [piece[1:] for piece, starts in zip(pieces, is_start, strict=True) if starts and len(piece) > 4]
    if not long_words:
        raise ConfigError("this model has no token that begins a word: leave out the figure embeddings")
    return long_words[: 40 * 8 : 40]


def _heat_map(axes: Axes, values: Array, colours: object, low: float, high: float, aspect: str = "auto") -> AxesImage:
    return axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect=aspect, interpolation="nearest")  # type: ignore[arg-type]


class FigureEntry(NamedTuple):
    about: str
    draw: Callable[[], DrawnFigure] | None = None
    draw_model: Callable[[Subject], DrawnFigure] | None = None


FIGURES = {
    "positions": FigureEntry("positional encodings, as a heat map and as waves (3.5)", positions),
    "similarity": FigureEntry("similarity of positions to each other (3.5)", similarity),
    "visibility": FigureEntry("attention masks: padding, no look-ahead, both, a window (3.2.3, 4)", visibility),
    "schedule": FigureEntry("learning rate for several values of d_model and warm-up (5.3)", schedule),
    "smoothing": FigureEntry("smoothed targets, and the loss against confidence (5.4)", smoothing),
    "saturation": FigureEntry("softmax with and without 1 / sqrt(d_k) (3.2.1)", saturation),
    "embeddings": FigureEntry("of a model: the nearest embeddings of some words (3.4)", draw_model=embeddings),
    "dependency": FigureEntry("of a model: a head with long-distance attention (figure 3)", draw_model=dependency),
    "anaphora": FigureEntry("of a model: heads that resolve a pronoun (figure 4)", draw_model=anaphora),
    "heads": FigureEntry("of a model: two heads with different patterns (figure 5)", draw_model=two_heads),
}
APPENDIX = ("dependency", "anaphora", "heads")
MODEL_FIGURES = tuple(name for name, entry in FIGURES.items() if entry.draw_model is not None)
OPTION_FIGURES = {"--sentence": APPENDIX, "--link": ("anaphora",), "--words": ("embeddings",)}


def read_names(option: str, text: str | None) -> tuple[str, ...]:
    """Splits "a,b" into its names, without repetitions."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option} is {text!r}, must have at least one name: for example a,b")
    return names


def choose(only: str | None, appendix: bool) -> list[str]:
    if only is None:
        return list(APPENDIX if appendix else FIGURES)
    names = read_names("--only", only)
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"there is no figure {name!r}: choose from {', '.join(FIGURES)}")
    return list(names)


def refuse_unused_options(names: Sequence[str], options: Mapping[str, object]) -> None:
    """Raises for an option that none of the named figures uses."""
    for option, value in options.items():
        users = OPTION_FIGURES.get(option, MODEL_FIGURES)
        if value is not None and not set(users) & set(names):
            raise ConfigError(f"{option} has no effect on {', '.join(names)}: leave it out, or add {users[0]}")


def needs_model(names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(MODEL_FIGURES)


def draw(name: str, subject: Subject | None = None) -> DrawnFigure:
    entry = FIGURES[name]
    if entry.draw is not None:
        return draw_in_style(entry.draw)
    assert entry.draw_model is not None
    assert subject is not None
    return draw_in_style(partial(entry.draw_model, subject))


def check_formats(formats: str) -> list[str]:
    names = list(read_names("--format", formats))
    if set(names) - set(FORMATS):
        raise ConfigError(f"--format is {formats!r}, must be {' or '.join(FORMATS)}, or both: svg,png")
    return names


def write_figures(
    folder: Path, names: Sequence[str], formats: Sequence[str], subject: Subject | None = None
) -> list[tuple[Path, str]]:
    """Returns each written file with its caption."""
    drawings = {name: draw(name, subject) for name in names}  # an error in any figure leaves no file behind
    written = []
    for name, (figure, caption) in drawings.items():
        for file_format in formats:
            path = folder / f"{name}.{file_format}"
            write_figure(figure, path)
            written.append((path, caption))
    return written
