"""Figures of what the paper states as formulas, and of what a model has learnt. All values come from the package's own
functions: `reference`, which is the paper in NumPy, and `Visible`, by which the model decides who may look at whom."""

# Axes: T positions, D = d_model, I examples, B = 1, H = 1, Q queries, M attended positions, K = d_k, U = d_v,
# V vocabulary, N words asked for.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from transduce.insight.drawing import COLOURS, FAINT, FORMATS, INK, Drawn, drawn, new_figure, row_of_axes, write_figure
from transduce.reference import attend, learning_rate, loss, sinusoid, smoothed_targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Array = NDArray[np.float64]
N_POSITIONS, FEW_ENTRIES = 100, 128
"""Of positional encodings. The paper has 512 entries, more than columns of a figure that one could tell apart."""
WAVES = (16, 24, 32, 48)
"""Entries that are drawn as waves: each slower than the one before."""
PLACES = (10, 40, 70)
WIDTHS, WARM_UPS = (256, 512, 1024), (1000, 4000, 16_000)
SMOOTHINGS = (0.0, 0.1, 0.3)
FEW_WORDS = 10
KEY_WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
N_ATTENDED, N_EXAMPLES = 16, 400
N_NEAREST = 6
GERMAN_WORDS = ("Mutter", "zwei", "Montag", "gehen", "Haus", "gestern", "house", "water")


# 3.5 Positional encoding


def positions() -> Drawn:
    encoding_TD = sinusoid(np.arange(N_POSITIONS), FEW_ENTRIES)
    figure = new_figure(9, 3.4)
    left, right = row_of_axes(figure, 2, (1.15, 1))
    image = _heat_map(left, encoding_TD, "coolwarm", -1, 1)
    left.set(title="positional encodings", xlabel="entry of the encoding", ylabel="position")
    figure.colorbar(image, ax=left, shrink=0.8, label="value")
    for entry, colour in zip(WAVES, COLOURS, strict=False):
        right.plot(np.arange(N_POSITIONS), encoding_TD[:, entry], color=colour, label=f"entry {entry}")
    right.set(title="some of their entries, as waves", xlabel="position", ylim=(-1.05, 1.05))
    right.legend(ncols=len(WAVES), loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=1, columnspacing=1)
    words = (
        f"{N_POSITIONS} positions for d_model {FEW_ENTRIES}: sines and cosines, each pair slower than the one before"
    )
    return Drawn(figure, words)


def similarity() -> Drawn:
    d_model = ModelConfig().d_model
    encoding_TD = sinusoid(np.arange(N_POSITIONS), d_model)
    product_TT = encoding_TD @ encoding_TD.T / (d_model / 2)  # a position with itself: half of D times sin2 + cos2
    figure = new_figure(9, 3.6)
    left, right = row_of_axes(figure, 2, (1, 1.15))
    image = _heat_map(left, product_TT, "viridis", float(product_TT.min()), 1)
    left.set(title="likeness of positions", xlabel="position", ylabel="position")
    figure.colorbar(image, ax=left, shrink=0.8)
    for place, colour, width in zip(PLACES, COLOURS, (7, 4, 1.5), strict=False):  # one lies upon the other
        distance_T = np.arange(N_POSITIONS) - place
        right.plot(distance_T, product_TT[place], color=colour, linewidth=width, label=f"of position {place}")
    right.set(title="it depends on the distance alone", xlabel="distance", ylabel="scalar product, over d_model / 2")
    right.legend()
    return Drawn(figure, "scalar products of positional encodings: the same for the same distance, wherever it begins")


# 3.2.3 Who may look at whom


def visibility() -> Drawn:
    n, n_tokens, window = 12, 9, 6
    token_B1M = (torch.arange(n) < n_tokens)[None, None]
    patterns = {
        "padding: the encoder": Visible(token_B1M),
        "no look ahead: the decoder": Visible(look_ahead=False),
        "both together": Visible(token_B1M, look_ahead=False),
        f"a window of {window}": Visible(window=window),
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
        axes.set(xticks=[], yticks=[], xlabel="is looked at")
        axes.spines[:].set_visible(False)
    figure.axes[0].set_ylabel("looks")
    return Drawn(
        figure, f"blue: may look; {n} positions, of which the last {n - n_tokens} are padding where it says so"
    )


def _two_colours() -> object:
    from matplotlib.colors import ListedColormap

    return ListedColormap(["#e8e8e8", COLOURS[0]])


# 5.3 Optimizer


def schedule() -> Drawn:
    d_model, warmup_steps = ModelConfig().d_model, TrainConfig().warmup_steps
    steps = np.arange(1, 20_001, 50)
    figure = new_figure(9, 3.2)
    by_width, by_warm_up = row_of_axes(figure, 2)
    for width, colour in zip(WIDTHS, COLOURS, strict=False):
        rates = [learning_rate(int(step), width, warmup_steps) for step in steps]
        by_width.plot(steps, rates, color=colour, label=f"d_model {width}")
    for warm_up, colour in zip(WARM_UPS, COLOURS, strict=False):
        rates = [learning_rate(int(step), d_model, warm_up) for step in steps]
        by_warm_up.plot(steps, rates, color=colour, label=f"{warm_up:,} steps of warm-up")
    by_width.set(title=f"learning rate, {warmup_steps:,} steps of warm-up", xlabel="step")
    by_warm_up.set(title=f"learning rate, d_model {d_model}", xlabel="step")
    for axes in (by_width, by_warm_up):
        axes.yaxis.set_major_formatter("{x:.4f}")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xticks(range(0, 20_001, 5000))
        axes.set_ylim(bottom=0)
        axes.legend()
    return Drawn(figure, "equation 3: up in a line, down with the root of the step")


# 5.4 Regularization


def smoothing() -> Drawn:
    figure = new_figure(9, 3.4)
    left, right = row_of_axes(figure, 2, (1, 1.25))
    target, pad_id, width = 3, ModelConfig().pad_id, 0.8 / len(SMOOTHINGS)
    for i, (label_smoothing, colour) in enumerate(zip(SMOOTHINGS, COLOURS, strict=False)):
        target_V = smoothed_targets(np.array([[target]]), FEW_WORDS, label_smoothing)[0, 0]
        left.bar(np.arange(FEW_WORDS) + (i - 1) * width, target_V, width, color=colour, label=f"{label_smoothing:g}")
    left.set(title=f"what training aims at, of {FEW_WORDS} words", xlabel="word", ylabel="probability")
    left.set_xticks(np.arange(FEW_WORDS))
    left.legend(title="label smoothing")
    confidence = np.linspace(0.01, 0.9999, 400)
    for label_smoothing, colour in zip(SMOOTHINGS, COLOURS, strict=False):
        losses = [_loss_at(float(share), target, label_smoothing, pad_id) for share in confidence]
        right.plot(confidence, losses, color=colour, label=f"{label_smoothing:g}")
        best = int(np.argmin(losses))
        right.plot(confidence[best], losses[best], "o", color=colour, markersize=5, clip_on=False)
    right.set(title="the loss, and where it is least", xlabel="probability given to the right word", ylim=(0, 4))
    right.set_xlim(0, 1)
    words = f"the loss is least at 1 - e + e / V (V is {FEW_WORDS}): above that, who is surer pays for it"
    return Drawn(figure, words)


def _loss_at(confidence: float, target: int, label_smoothing: float, pad_id: int) -> float:
    """Of one token, when the other words share evenly what the right one leaves."""
    prob_V = np.full(FEW_WORDS, (1 - confidence) / (FEW_WORDS - 1))
    prob_V[target] = confidence
    return loss(np.log(prob_V)[None, None], np.array([[target]]), label_smoothing, pad_id)[0]


# 3.2.1 Why 1 / sqrt(d_k)


def weights_of_random_queries(d_k: int, scaled: bool) -> Array:
    """weight_IM of queries and keys whose entries have mean 0 and variance 1."""
    rng = np.random.default_rng(d_k)
    query_BHQK = rng.standard_normal((N_EXAMPLES, 1, 1, d_k))
    key_BHMK = rng.standard_normal((N_EXAMPLES, 1, N_ATTENDED, d_k))
    # `attend` divides by the root of d_k: queries that many times as large undo it.
    factor = 1.0 if scaled else math.sqrt(d_k)
    visible_BQM = np.ones((N_EXAMPLES, 1, N_ATTENDED), dtype=bool)
    weight_IM: Array = attend(query_BHQK * factor, key_BHMK, key_BHMK, visible_BQM)[1][:, 0, 0]
    return weight_IM


def saturation() -> Drawn:
    ways = {"with 1 / √d_k": True, "without": False}
    figure = new_figure(9, 3.2)
    left, middle, right = row_of_axes(figure, 3)
    for i, ((name, scaled), colour) in enumerate(zip(ways.items(), COLOURS, strict=False)):
        by_width = {d_k: weights_of_random_queries(d_k, scaled) for d_k in KEY_WIDTHS}
        one_M = np.sort(by_width[512][0])[::-1]
        left.bar(np.arange(N_ATTENDED) + (i - 0.5) * 0.4, one_M, 0.4, color=colour, label=name)
        middle.plot(KEY_WIDTHS, [weight_IM.max(1).mean() for weight_IM in by_width.values()], "o-", color=colour)
        # The trace of softmax's derivative: the sum of p (1 - p).
        slopes = [(1 - (weight_IM**2).sum(1)).mean() for weight_IM in by_width.values()]
        right.plot(KEY_WIDTHS, slopes, "o-", color=colour)
    left.set(title="weights of one query, d_k 512", xlabel="position, by weight", ylim=(0, 1))
    left.legend()
    middle.set(title="the largest weight", xlabel="d_k", ylim=(0, 1))
    right.set(title="what the gradient keeps: Σ p (1 - p)", xlabel="d_k", ylim=(0, 1))
    for axes in (middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([4, 16, 64, 256, 1024], ["4", "16", "64", "256", "1024"])
        axes.minorticks_off()
    words = (
        f"means over {N_EXAMPLES} random queries at {N_ATTENDED} positions: unscaled, wide keys leave softmax no slope"
    )
    return Drawn(figure, words)


# 3.4 Embeddings


def embeddings(subject: Subject) -> Drawn:
    words = list(subject.words or _usual_words(subject))
    found = {word: nearest(subject, word) for word in words}
    n_columns = min(4, len(words))
    n_rows = math.ceil(len(words) / n_columns)
    figure = new_figure(9, 0.5 + 1.55 * n_rows)
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True)
    for axes in grid.flat[len(words) :]:
        axes.set_visible(False)
    for axes, (word, near) in zip(grid.flat, found.items(), strict=False):
        others, values = zip(*near, strict=True)
        axes.barh(range(len(near)), values, color=COLOURS[4], height=0.85)
        for y, other in enumerate(others):
            axes.text(0.015, y, other, va="center", ha="left", fontsize=8, color=INK)
        axes.set(title=word, yticks=[], xlim=(0, 1), ylim=(len(near) - 0.4, -0.6))
        axes.spines["left"].set_visible(False)
    figure.supxlabel("cosine similarity of embeddings", fontsize=9, color=FAINT)
    return Drawn(figure, "of the tokens that begin a word, those whose embeddings are nearest")


def nearest(subject: Subject, word: str) -> list[tuple[str, float]]:
    """Tokens that begin a word, by the angle between their embeddings and that of `word`."""
    pieces, begins, unit_VD = _beginnings(subject)
    if SPACE_MARK + word not in pieces:
        raise ConfigError(f"--words has {word!r}, which is no token of this model: give whole words that are frequent")
    own = pieces.index(SPACE_MARK + word)
    likeness_V = unit_VD @ unit_VD[own]
    order = [int(i) for i in np.argsort(-likeness_V) if begins[i] and i != own][:N_NEAREST]
    return [(pieces[i].removeprefix(SPACE_MARK), float(likeness_V[i])) for i in order]


def _beginnings(subject: Subject) -> tuple[list[str], list[bool], Array]:
    translator = subject.translator
    pieces = translator.subwords.pieces(range(len(translator.subwords)))
    begins = [piece.startswith(SPACE_MARK) and piece[1:].isalpha() for piece in pieces]
    table_VD = translator.model.embedding.source_embedding.detach().float().cpu().numpy()[: len(pieces)]
    return pieces, begins, table_VD / np.linalg.norm(table_VD, axis=1, keepdims=True)


def _usual_words(subject: Subject) -> Sequence[str]:
    pieces, begins, _ = _beginnings(subject)
    known = [word for word in GERMAN_WORDS if SPACE_MARK + word in pieces]
    if subject.is_german and known:
        return known
    # Those that were joined first are the most frequent.
    long = [piece[1:] for piece, is_one in zip(pieces, begins, strict=True) if is_one and len(piece) > 4]
    if not long:
        raise ConfigError("this model has no token that begins a word: leave out the figure embeddings")
    return long[: 40 * 8 : 40]


def _heat_map(axes: Axes, values: Array, colours: object, low: float, high: float, aspect: str = "auto") -> AxesImage:
    return axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect=aspect, interpolation="nearest")  # type: ignore[arg-type]


class Kind(NamedTuple):
    about: str
    draw: Callable[[], Drawn] | None = None
    draw_of: Callable[[Subject], Drawn] | None = None
    """Of a model."""


FIGURES = {
    "positions": Kind("positional encodings, as a heat map and as waves (3.5)", positions),
    "similarity": Kind("how alike positions are to each other (3.5)", similarity),
    "visibility": Kind("who may look at whom: padding, look-ahead, both, a window (3.2.3, 4)", visibility),
    "schedule": Kind("the learning rate for several widths and warm-ups (5.3)", schedule),
    "smoothing": Kind("smoothed targets, and the loss against confidence (5.4)", smoothing),
    "saturation": Kind("softmax with and without 1 / sqrt(d_k) (3.2.1)", saturation),
    "embeddings": Kind("a model: the nearest embeddings of some words (3.4)", draw_of=embeddings),
    "dependency": Kind("a model: a head that looks at a word far away (figure 3)", draw_of=dependency),
    "anaphora": Kind("a model: heads that look from a pronoun at whom it means (figure 4)", draw_of=anaphora),
    "heads": Kind("a model: two heads that do different work (figure 5)", draw_of=two_heads),
}
APPENDIX = ("dependency", "anaphora", "heads")
OF_A_MODEL = tuple(name for name, kind in FIGURES.items() if kind.draw_of is not None)
READERS = {"--sentence": APPENDIX, "--link": ("anaphora",), "--words": ("embeddings",)}


def read_names(option: str, text: str | None) -> tuple[str, ...]:
    """Of "a,b": a and b, each once."""
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"{option} is {text!r}, must name something: for example a,b")
    return names


def choose(only: str | None, appendix: bool) -> list[str]:
    if only is None:
        return list(APPENDIX if appendix else FIGURES)
    names = read_names("--only", only)
    for name in names:
        if name not in FIGURES:
            raise ConfigError(f"{name!r} is no figure: choose from {', '.join(FIGURES)}")
    return list(names)


def refuse_unread(names: Sequence[str], given: Mapping[str, object]) -> None:
    """An option that none of these figures would read."""
    for option, value in given.items():
        readers = READERS.get(option, OF_A_MODEL)
        if value is not None and not set(readers) & set(names):
            raise ConfigError(f"{option} means nothing to {', '.join(names)}: leave it out, or add {readers[0]}")


def needs_model(names: Iterable[str]) -> bool:
    return not set(names).isdisjoint(OF_A_MODEL)


def draw(name: str, subject: Subject | None = None) -> Drawn:
    kind = FIGURES[name]
    if kind.draw is not None:
        return drawn(kind.draw)
    assert kind.draw_of is not None
    assert subject is not None
    of, what = kind.draw_of, subject
    return drawn(lambda: of(what))


def check_formats(formats: str) -> list[str]:
    found = list(read_names("--format", formats))
    if set(found) - set(FORMATS):
        raise ConfigError(f"--format is {formats!r}, must be {' or '.join(FORMATS)}, or both: svg,png")
    return found


def write_figures(
    folder: Path, names: Sequence[str], formats: Sequence[str], subject: Subject | None = None
) -> list[tuple[Path, str]]:
    """Each file, and what it shows in words."""
    drawings = {name: draw(name, subject) for name in names}  # all, before the first is written
    written = []
    for name, (figure, words) in drawings.items():
        for kind in formats:
            path = folder / f"{name}.{kind}"
            write_figure(figure, path)
            written.append((path, words))
    return written
