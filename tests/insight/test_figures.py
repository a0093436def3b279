"""Figures: they show the values of the package's functions, and heads are chosen by measurements."""

from __future__ import annotations

import io
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.image import imread

from tests.support.command import refusal, run_here
from transduce import Translator
from transduce.attention import Visible, attend
from transduce.errors import ConfigError, DataError
from transduce.insight import appendix, figures
from transduce.insight.appendix import (
    DEPENDENCY_SENTENCE,
    MAX_LINE_WIDTH,
    MIN_DISTANCE,
    MIN_DRAWN_WEIGHT,
    PRONOUN_SENTENCE,
    SentenceAttention,
    Subject,
    encoder_attention,
    most_different,
    strongest,
)
from transduce.insight.drawing import write_figure
from transduce.insight.figures import FIGURES, draw, nearest, random_query_weights
from transduce.model import sinusoid
from transduce.training.recipe import learning_rate, loss


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(Translator.load(device="cpu"))


def curves(axes: Axes) -> dict[str, tuple[Any, Any]]:
    return {str(line.get_label()): (line.get_xdata(), line.get_ydata()) for line in axes.lines}


def image(axes: Axes) -> Any:
    return np.asarray(axes.images[0].get_array())


def bars(axes: Axes) -> list[list[float]]:
    return [[bar.get_height() for bar in container] for container in axes.containers]


# Figures take their values from the reference. These tests compare them with the code that trains and translates.


def test_positions_show_the_sinusoids_of_the_model() -> None:
    left, right, *_ = draw("positions").figure.axes
    expected_TD = sinusoid(torch.arange(100), 128).numpy()
    np.testing.assert_allclose(image(left), expected_TD, atol=1e-12)
    assert len(right.lines) == 4
    for name, (x, y) in curves(right).items():
        np.testing.assert_allclose(y, expected_TD[x, int(name.removeprefix("entry "))], atol=1e-12)


def test_similarity_depends_only_on_the_distance() -> None:
    left, right, *_ = draw("similarity").figure.axes
    encoding_TD = sinusoid(torch.arange(100), 512).numpy()
    product_TT = encoding_TD @ encoding_TD.T / 256
    np.testing.assert_allclose(image(left), product_TT, atol=1e-12)
    assert len(right.lines) == 3
    for x, y in curves(right).values():
        np.testing.assert_allclose(y, product_TT[0, abs(x)], atol=1e-9)


def test_visibility_shows_the_masks_of_the_model() -> None:
    padding, ahead, both, window = (image(axes).astype(bool) for axes in draw("visibility").figure.axes)
    place = np.arange(12)
    assert (padding == (place < 9)[None]).all()
    assert (ahead == np.tri(12, dtype=bool)).all()
    assert (both == (padding & ahead)).all()
    assert (window == Visible(window=6).matrix(12, 12, torch.device("cpu"))[0].numpy()).all()


def test_the_schedule_shows_the_learning_rates_of_training() -> None:
    by_width, by_warm_up = draw("schedule").figure.axes
    for name, (x, y) in curves(by_width).items():
        assert list(y) == [learning_rate(int(step), int(name.removeprefix("d_model ")), 4000) for step in x]
    for name, (x, y) in curves(by_warm_up).items():
        warm_up = int(name.split()[0].replace(",", ""))
        assert list(y) == [learning_rate(int(step), 512, warm_up) for step in x]
    assert len(by_width.lines) == len(by_warm_up.lines) == 3


def test_the_smoothed_loss_is_the_loss_of_training() -> None:
    left, right = draw("smoothing").figure.axes
    targets = bars(left)
    lines = [line for line in right.lines if len(np.asarray(line.get_xdata())) > 1]
    for line, target_V, smoothing in zip(lines, targets, (0.0, 0.1, 0.3), strict=True):
        assert sum(target_V) == pytest.approx(1)
        assert target_V[3] == pytest.approx(1 - smoothing + smoothing / 10)
        confidence, drawn = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
        prob_BTV = np.repeat((1 - confidence)[:, None, None] / 9, 10, axis=2)
        prob_BTV[:, 0, 3] = confidence
        logits_BTV, target_out_BT = torch.from_numpy(prob_BTV).log(), torch.tensor([[3]])
        expected = [float(loss(logits_BTV[i : i + 1], target_out_BT, smoothing, 0)[0]) for i in range(len(drawn))]
        np.testing.assert_allclose(drawn, expected, rtol=1e-9)
        assert confidence[drawn.argmin()] == pytest.approx(1 - smoothing + smoothing / 10, abs=3e-3)


def test_saturation_shows_attention_with_and_without_its_scale() -> None:
    d_k = 64
    rng = np.random.default_rng(d_k)
    query_BHQK, key_BHMK = (torch.from_numpy(rng.standard_normal((400, 1, n, d_k))) for n in (1, 16))
    expected_IM = attend(query_BHQK, key_BHMK, key_BHMK, Visible(), 0.0)[1][:, 0, 0].numpy()
    np.testing.assert_allclose(random_query_weights(d_k, True), expected_IM, atol=1e-12)
    unscaled_IM = (query_BHQK @ key_BHMK.transpose(-1, -2)).softmax(-1)[:, 0, 0].numpy()
    np.testing.assert_allclose(random_query_weights(d_k, False), unscaled_IM, atol=1e-12)
    left, middle, right = draw("saturation").figure.axes
    assert bars(left)[0] == pytest.approx(sorted(random_query_weights(512, True)[0], reverse=True))
    for line, slope, weight_IM in zip(middle.lines, right.lines, (expected_IM, unscaled_IM), strict=True):
        place = list(np.asarray(line.get_xdata())).index(d_k)
        assert np.asarray(line.get_ydata())[place] == pytest.approx(weight_IM.max(1).mean())
        assert np.asarray(slope.get_ydata())[place] == pytest.approx((weight_IM * (1 - weight_IM)).sum(1).mean())


def test_neighbours_have_the_largest_cosine_similarity_of_embeddings(subject: Subject) -> None:
    translator = subject.translator
    neighbours = nearest(subject, "Mutter")
    assert "Vater" in [word for word, _ in neighbours]
    pieces = translator.subwords.pieces(range(len(translator.subwords)))
    table_VD = translator.model.embedding.source_embedding.detach()
    for word, value in neighbours:
        one_D, other_D = (table_VD[pieces.index(f"▁{text}")] for text in ("Mutter", word))
        assert float(torch.cosine_similarity(one_D, other_D, dim=0)) == pytest.approx(value, abs=1e-5)
    assert [value for _, value in neighbours] == sorted((value for _, value in neighbours), reverse=True)
    axes = draw("embeddings", Subject(translator, words=("Mutter",))).figure.axes[0]
    assert [text.get_text() for text in axes.texts] == [word for word, _ in neighbours]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([value for _, value in neighbours])  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--words has 'Xyz', which is not a token of this model"):
        nearest(subject, "Xyz")


# The appendix


def scripted_attention(weight_LHSS: Any, words: list[str]) -> SentenceAttention:
    return SentenceAttention(
        [*words, "end"], words, [*range(len(words)), None], np.asarray(weight_LHSS, dtype=np.float64)
    )


def test_sentence_attention_has_the_weights_of_the_encoder_and_the_words_of_the_sentence(subject: Subject) -> None:
    attention = encoder_attention(subject.translator, "Er ruft seine Mutter an.")
    assert attention.tokens == ["Er", "r", "·uft", "seine", "Mutter", "an", ".", "end"]
    assert attention.words == ["Er", "ruft", "seine", "Mutter", "an"]
    assert attention.word_S == [0, 1, 1, 2, 3, 4, None, None]
    np.testing.assert_allclose(attention.weight_LHSS.sum(-1), 1, atol=1e-6)
    ids = [*subject.translator.subwords.encode(["Er ruft seine Mutter an."])[0], 2]
    with torch.no_grad():
        expected = subject.translator.model.encode(torch.tensor([ids]), with_attention=True).attention_LBHSS
    assert expected is not None
    np.testing.assert_allclose(attention.weight_LHSS, expected[:, 0].numpy(), atol=1e-6)
    weight_LHWW = attention.between_words()
    by_hand = attention.weight_LHSS[0, 0, 1:3, 4].mean(), attention.weight_LHSS[0, 0, 4, 1:3].sum()
    assert (weight_LHWW[0, 0, 1, 3], weight_LHWW[0, 0, 3, 1]) == pytest.approx(by_hand)


def test_strongest_ignores_pairs_that_are_not_allowed() -> None:
    weight_LHWW = np.full((2, 3, 7, 7), 0.05)
    weight_LHWW[0, 1, 2, 3] = 0.9  # too near
    weight_LHWW[1, 2, 6, 1] = 0.6
    place = np.arange(7)
    choice = strongest(weight_LHWW, np.abs(place[:, None] - place) >= MIN_DISTANCE)
    assert choice == (1, 2, 6, 1, 0.6)
    caption = choice.caption(scripted_attention(np.zeros((2, 3, 8, 8)), list("abcdefg")), weight_LHWW)
    assert "layer 2, head 3: “g” gives 0.60 of its attention to “b”, 5 words away" in caption
    assert "the mean of all heads is 0.14, uniform attention would give 0.12" in caption


def test_most_different_heads_are_compared_without_the_end_mark() -> None:
    eye = np.eye(4)
    following, end = np.roll(eye, 1, axis=1), np.tile(eye[3], (4, 1))
    # Layer 0: itself, itself, and the end mark. Layer 1: the following token, itself, and itself.
    weight_LHSS = np.stack([np.stack([eye, eye, end]), np.stack([following, eye, eye])])
    layer, one, other, difference = most_different(weight_LHSS)
    assert (layer, one, other) == (1, 0, 1)
    assert difference == pytest.approx((1 + 1 + 0.5) / 3), "attention to the end mark does not count"
    with pytest.raises(ConfigError, match="compares two heads of a layer, this model has one"):
        most_different(weight_LHSS[:, :1])


def widths(axes: Axes) -> list[Any]:
    return [np.asarray(lines.get_linewidth()) for lines in axes.collections if isinstance(lines, LineCollection)]


def test_the_width_of_a_line_is_proportional_to_its_weight(subject: Subject) -> None:
    weight_LHSS = encoder_attention(subject.translator, DEPENDENCY_SENTENCE).weight_LHSS
    (axes,) = draw("dependency", subject).figure.axes
    np.testing.assert_allclose(widths(axes), MAX_LINE_WIDTH * weight_LHSS[1, :, 1], rtol=1e-6)
    alpha, weight_S = np.asarray(axes.collections[2].get_alpha()), weight_LHSS[1, 2, 1]
    assert ((alpha > 0) == (weight_S > MIN_DRAWN_WEIGHT)).all()
    tokens = [text.get_text() for text in axes.texts]
    assert tokens[::2] == tokens[1::2] == encoder_attention(subject.translator, DEPENDENCY_SENTENCE).tokens

    layer, *heads, _ = most_different(weight_LHSS)
    for axes, head in zip(draw("heads", subject).figure.axes, heads, strict=True):
        np.testing.assert_allclose(widths(axes), [MAX_LINE_WIDTH / 2 * weight_LHSS[layer, head].ravel()], rtol=1e-6)
        assert axes.get_title(loc="left") == f"layer {layer + 1} of the encoder, head {head + 1}"

    attention = encoder_attention(subject.translator, PRONOUN_SENTENCE)
    pronoun, referent = attention.index_of("sein"), attention.index_of("Tom")
    (token,) = attention.tokens_of(pronoun)
    order = np.argsort(-attention.between_words()[:, :, pronoun, referent], axis=None)[:2]
    weight_HSS = attention.weight_LHSS.reshape(-1, len(attention.tokens), len(attention.tokens))[order]
    above, below = draw("anaphora", subject).figure.axes
    np.testing.assert_allclose(widths(above), [MAX_LINE_WIDTH / 2 * weight_HSS[0].ravel()], rtol=1e-6)
    np.testing.assert_allclose(widths(below), MAX_LINE_WIDTH * weight_HSS[:, token], rtol=1e-6)


def test_the_bundled_model_links_an_auxiliary_to_its_distant_participle(subject: Subject) -> None:
    caption = draw("dependency", subject).caption
    assert caption.startswith("encoder layer 2, head 3: “hat” gives 1.00 of its attention to “gekauft”, 8 words away")


def test_unsuitable_sentences_are_refused(subject: Subject) -> None:
    translator = subject.translator
    with pytest.raises(DataError, match="--sentence is blank"):
        encoder_attention(translator, " ")
    with pytest.raises(DataError, match="--sentence has more than 61 tokens, the limit: give one sentence"):
        encoder_attention(translator, "Das ist gut. " * 40)
    with pytest.raises(DataError, match="--sentence has 2 words, must have more than 4"):
        draw("dependency", Subject(translator, "Ja, ja."))
    with pytest.raises(ConfigError, match="anaphora needs the pronoun and the word that it refers to"):
        draw("anaphora", Subject(translator, "Tom sagte, er komme."))
    with pytest.raises(ConfigError, match="--link names 'sie', the sentence has Tom, sagte, er, komme: choose"):
        draw("anaphora", Subject(translator, "Tom sagte, er komme.", ("sie", "Tom")))
    unknown = Translator(translator.model, translator.config, translator.subwords)
    with pytest.raises(ConfigError, match="add --sentence"):
        draw("heads", Subject(unknown))
    assert len(draw("embeddings", Subject(unknown)).figure.axes) == 8, "frequent words if the language is unknown"


# Files


def test_every_listed_figure_is_drawn_and_not_blank(subject: Subject, tmp_path: Path) -> None:
    written = figures.write_figures(tmp_path, list(FIGURES), ["svg", "png"], subject)
    assert {path.name for path, _ in written} == {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for path, caption in written:
        assert caption
        if path.suffix == ".png":
            pixels = imread(io.BytesIO(path.read_bytes()), format="png")[..., :3]
            share = float((np.abs(pixels - 1).max(-1) > 0.1).mean())
            assert 0.005 < share < 0.95, f"{path.name}: {share:.3f} of the pixels are not white"
        else:
            assert len(list(ET.parse(path).getroot().iter())) > 50
            assert path.stat().st_size < 200_000


def test_a_token_may_look_like_a_formula_or_have_no_glyph_in_the_font(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["$x_2$", "$", "$", "漢字", "\U00012000"]
    weight_LHSS = np.stack([np.eye(6), np.eye(6)[::-1]])[None]
    monkeypatch.setattr(appendix, "encoder_attention", lambda *arguments: scripted_attention(weight_LHSS, words))
    figure, _ = draw("heads", subject)
    write_figure(figure, tmp_path / "a.png")
    assert [text.get_text() for text in figure.axes[0].texts][::2] == [*words, "end"]
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)


def test_a_figure_is_written_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    for kind in ("svg", "png"):
        for name in ("one", "two"):
            write_figure(draw("schedule").figure, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_the_command_lists_and_draws_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = run_here(monkeypatch, capsys, "figures", "--list")
    assert [line.split()[0] for line in output.splitlines()] == list(FIGURES)
    assert not code
    out = tmp_path / "a" / "b"
    options = ["--appendix", "--sentence", "Tom hat gestern in der Stadt sein Auto verkauft.", "--device", "cpu"]
    code, output, errors = run_here(monkeypatch, capsys, "figures", *options, "--out", str(out))
    assert not code, errors
    assert errors.splitlines()[0] == "anaphora is left out: it needs --link PRONOUN=WORD"
    assert [line.split()[0] for line in output.splitlines()] == [
        str(out / f"{name}.svg") for name in ("dependency", "heads")
    ]
    assert "“hat” gives" in output
    assert {path.name for path in out.iterdir()} == {"dependency.svg", "heads.svg"}
    with_link = ["--only", "anaphora", "--link", "sein=Tom", *options[1:], "-q", "--out", str(out)]
    code, output, errors = run_here(monkeypatch, capsys, "figures", *with_link)
    assert (code or 0, errors) == (0, "")
    assert "“sein” gives" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the folder to write to is missing: add --out DIR"),
        (["--out", "OUT", "--only", "position"], "there is no figure 'position': choose from positions, similarity"),
        (["--out", "OUT", "--only", " , "], "--only is ' , ', must have at least one name"),
        (["--out", "OUT", "--only", "positions", "--appendix"], "--only and --appendix exclude each other: keep one"),
        (["--out", "OUT", "--format", "pdf"], "--format is 'pdf', must be svg or png, or both: svg,png"),
        (["--out", "FILE", "--only", "schedule"], "FILE is a file: give a folder for the figures"),
        (["--out", "FILE/x", "--only", "schedule"], "FILE/x cannot be written (Not a directory)"),
        (["OUT", "--out", "OUT", "--only", "schedule"], "MODEL has no effect on schedule: leave it out"),
        (
            ["--out", "OUT", "--only", "heads", "--words", "Haus"],
            "--words has no effect on heads: leave it out, or add",
        ),
        (["--out", "OUT", "--only", "embeddings", "--sentence", "a"], "--sentence has no effect on embeddings"),
        (["--out", "OUT", "--only", "schedule,heads", "--link", "a=b"], "--link has no effect on schedule, heads"),
        (["--out", "OUT", "--sentence", "Ja.", "--only", "schedule,heads,dependency"], "--sentence has 1 words"),
        (["OUT", "--out", "OUT", "--only", "heads"], "OUT/config.json cannot be read"),
        (["--out", "OUT", "--only", "anaphora", "--link", "er"], "--link is 'er', must have the form PRONOUN=WORD"),
        (
            ["--out", "OUT", "--only", "anaphora", "--link", "er=Tom"],
            "--link er=Tom needs a sentence with these words: add --sentence",
        ),
    ],
)
def test_bad_input_gives_a_one_line_message_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "FILE").write_text("")
    for name in ("OUT", "FILE"):
        arguments = [argument.replace(name, str(tmp_path / name)) for argument in arguments]
        message = message.replace(name, str(tmp_path / name))
    assert message in refusal(monkeypatch, capsys, "figures", *arguments, "-q")
    assert not list(tmp_path.rglob("*.svg")), "no figure is written if one fails"


def test_without_matplotlib_the_message_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(monkeypatch, capsys, "figures", "--out", str(tmp_path))
    assert message.startswith("a figure needs the package matplotlib: ")
    assert "pip install " in message
