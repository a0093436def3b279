"""What is drawn is what the package's functions give; all that is listed is drawn; heads are chosen by what they do."""

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
    FAINTEST,
    FAR,
    FAR_SENTENCE,
    PRONOUN_SENTENCE,
    WIDEST,
    Look,
    Subject,
    look,
    most_different,
    strongest,
)
from transduce.insight.drawing import write_figure
from transduce.insight.figures import FIGURES, draw, nearest, weights_of_random_queries
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


# The drawing takes its values from the reference; it is held to what trains and translates.


def test_positions_are_the_models_sinusoids() -> None:
    left, right, *_ = draw("positions").figure.axes
    expected_TD = sinusoid(torch.arange(100), 128).numpy()
    np.testing.assert_allclose(image(left), expected_TD, atol=1e-12)
    assert len(right.lines) == 4
    for name, (x, y) in curves(right).items():
        np.testing.assert_allclose(y, expected_TD[x, int(name.removeprefix("entry "))], atol=1e-12)


def test_similarity_depends_on_the_distance_alone() -> None:
    left, right, *_ = draw("similarity").figure.axes
    encoding_TD = sinusoid(torch.arange(100), 512).numpy()
    product_TT = encoding_TD @ encoding_TD.T / 256
    np.testing.assert_allclose(image(left), product_TT, atol=1e-12)
    assert len(right.lines) == 3
    for x, y in curves(right).values():
        np.testing.assert_allclose(y, product_TT[0, abs(x)], atol=1e-9)


def test_visibility_is_by_the_models_own_rule() -> None:
    padding, ahead, both, window = (image(axes).astype(bool) for axes in draw("visibility").figure.axes)
    place = np.arange(12)
    assert (padding == (place < 9)[None]).all()
    assert (ahead == np.tri(12, dtype=bool)).all()
    assert (both == (padding & ahead)).all()
    assert (window == Visible(window=6).matrix(12, 12, torch.device("cpu"))[0].numpy()).all()


def test_the_schedule_is_what_training_uses() -> None:
    by_width, by_warm_up = draw("schedule").figure.axes
    for name, (x, y) in curves(by_width).items():
        assert list(y) == [learning_rate(int(step), int(name.removeprefix("d_model ")), 4000) for step in x]
    for name, (x, y) in curves(by_warm_up).items():
        warm_up = int(name.split()[0].replace(",", ""))
        assert list(y) == [learning_rate(int(step), 512, warm_up) for step in x]
    assert len(by_width.lines) == len(by_warm_up.lines) == 3


def test_the_smoothed_loss_is_what_training_uses() -> None:
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


def test_saturation_is_attention_with_and_without_its_scale() -> None:
    d_k = 64
    rng = np.random.default_rng(d_k)
    query_BHQK, key_BHMK = (torch.from_numpy(rng.standard_normal((400, 1, n, d_k))) for n in (1, 16))
    expected_IM = attend(query_BHQK, key_BHMK, key_BHMK, Visible(), 0.0)[1][:, 0, 0].numpy()
    np.testing.assert_allclose(weights_of_random_queries(d_k, True), expected_IM, atol=1e-12)
    unscaled_IM = (query_BHQK @ key_BHMK.transpose(-1, -2)).softmax(-1)[:, 0, 0].numpy()
    np.testing.assert_allclose(weights_of_random_queries(d_k, False), unscaled_IM, atol=1e-12)
    left, middle, right = draw("saturation").figure.axes
    assert bars(left)[0] == pytest.approx(sorted(weights_of_random_queries(512, True)[0], reverse=True))
    for line, slope, weight_IM in zip(middle.lines, right.lines, (expected_IM, unscaled_IM), strict=True):
        here = list(np.asarray(line.get_xdata())).index(d_k)
        assert np.asarray(line.get_ydata())[here] == pytest.approx(weight_IM.max(1).mean())
        assert np.asarray(slope.get_ydata())[here] == pytest.approx((weight_IM * (1 - weight_IM)).sum(1).mean())


def test_neighbours_are_by_the_cosine_of_embeddings(subject: Subject) -> None:
    translator = subject.translator
    found = nearest(subject, "Mutter")
    assert "Vater" in [word for word, _ in found]
    pieces = translator.subwords.pieces(range(len(translator.subwords)))
    table_VD = translator.model.embedding.source_embedding.detach()
    for word, value in found:
        one_D, other_D = (table_VD[pieces.index(f"▁{text}")] for text in ("Mutter", word))
        assert float(torch.cosine_similarity(one_D, other_D, dim=0)) == pytest.approx(value, abs=1e-5)
    assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
    axes = draw("embeddings", Subject(translator, words=("Mutter",))).figure.axes[0]
    assert [text.get_text() for text in axes.texts] == [word for word, _ in found]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([value for _, value in found])  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--words has 'Xyz', which is no token of this model"):
        nearest(subject, "Xyz")


# The appendix


def scripted_look(weight_LHSS: Any, words: list[str]) -> Look:
    return Look([*words, "end"], words, [*range(len(words)), None], np.asarray(weight_LHSS, dtype=np.float64))


def test_attention_is_the_encoders_and_words_are_those_of_the_sentence(subject: Subject) -> None:
    found = look(subject.translator, "Er ruft seine Mutter an.")
    assert found.tokens == ["Er", "r", "·uft", "seine", "Mutter", "an", ".", "end"]
    assert found.words == ["Er", "ruft", "seine", "Mutter", "an"]
    assert found.word_S == [0, 1, 1, 2, 3, 4, None, None]
    np.testing.assert_allclose(found.weight_LHSS.sum(-1), 1, atol=1e-6)
    ids = [*subject.translator.subwords.encode(["Er ruft seine Mutter an."])[0], 2]
    with torch.no_grad():
        expected = subject.translator.model.encode(torch.tensor([ids]), with_attention=True).attention_LBHSS
    assert expected is not None
    np.testing.assert_allclose(found.weight_LHSS, expected[:, 0].numpy(), atol=1e-6)
    weight_LHWW = found.between_words()
    by_hand = found.weight_LHSS[0, 0, 1:3, 4].mean(), found.weight_LHSS[0, 0, 4, 1:3].sum()
    assert (weight_LHWW[0, 0, 1, 3], weight_LHWW[0, 0, 3, 1]) == pytest.approx(by_hand)


def test_the_head_that_looks_far_is_found_and_near_ones_do_not_count() -> None:
    weight_LHWW = np.full((2, 3, 7, 7), 0.05)
    weight_LHWW[0, 1, 2, 3] = 0.9  # near
    weight_LHWW[1, 2, 6, 1] = 0.6
    place = np.arange(7)
    choice = strongest(weight_LHWW, np.abs(place[:, None] - place) >= FAR)
    assert choice == (1, 2, 6, 1, 0.6)
    words = choice.in_words(scripted_look(np.zeros((2, 3, 8, 8)), list("abcdefg")), weight_LHWW)
    assert "layer 2, head 3: “g” gives 0.60 of its attention to “b”, 5 words away" in words
    assert "mean of all heads is 0.14, all tokens alike would be 0.12" in words


def test_heads_that_differ_most_are_found_and_the_end_mark_is_no_work() -> None:
    eye = np.eye(4)
    next_one, end = np.roll(eye, 1, axis=1), np.tile(eye[3], (4, 1))
    # Layer 0: itself, and the end mark. Layer 1: the next, itself and itself again.
    weight_LHSS = np.stack([np.stack([eye, eye, end]), np.stack([next_one, eye, eye])])
    layer, one, other, apart = most_different(weight_LHSS)
    assert (layer, one, other) == (1, 0, 1)
    assert apart == pytest.approx((1 + 1 + 0.5) / 3), "of the last word, the half that goes to the end does not count"
    with pytest.raises(ConfigError, match="one head in a layer"):
        most_different(weight_LHSS[:, :1])


def widths(axes: Axes) -> list[Any]:
    return [np.asarray(lines.get_linewidth()) for lines in axes.collections if isinstance(lines, LineCollection)]


def test_lines_are_as_wide_as_attention_is_strong(subject: Subject) -> None:
    weight_LHSS = look(subject.translator, FAR_SENTENCE).weight_LHSS
    (axes,) = draw("dependency", subject).figure.axes
    np.testing.assert_allclose(widths(axes), WIDEST * weight_LHSS[1, :, 1], rtol=1e-6)
    alpha, weight_S = np.asarray(axes.collections[2].get_alpha()), weight_LHSS[1, 2, 1]
    assert ((alpha > 0) == (weight_S > FAINTEST)).all()
    tokens = [text.get_text() for text in axes.texts]
    assert tokens[::2] == tokens[1::2] == look(subject.translator, FAR_SENTENCE).tokens

    layer, *heads, _ = most_different(weight_LHSS)
    for axes, head in zip(draw("heads", subject).figure.axes, heads, strict=True):
        np.testing.assert_allclose(widths(axes), [WIDEST / 2 * weight_LHSS[layer, head].ravel()], rtol=1e-6)
        assert axes.get_title(loc="left") == f"layer {layer + 1} of the encoder, head {head + 1}"

    found = look(subject.translator, PRONOUN_SENTENCE)
    pronoun, meant = found.place_of("sein"), found.place_of("Tom")
    (token,) = found.tokens_of(pronoun)
    order = np.argsort(-found.between_words()[:, :, pronoun, meant], axis=None)[:2]
    weight_HSS = found.weight_LHSS.reshape(-1, len(found.tokens), len(found.tokens))[order]
    above, below = draw("anaphora", subject).figure.axes
    np.testing.assert_allclose(widths(above), [WIDEST / 2 * weight_HSS[0].ravel()], rtol=1e-6)
    np.testing.assert_allclose(widths(below), WIDEST * weight_HSS[:, token], rtol=1e-6)


def test_the_bundled_model_shows_a_verb_and_its_far_half(subject: Subject) -> None:
    words = draw("dependency", subject).words
    assert words.startswith("encoder layer 2, head 3: “hat” gives 1.00 of its attention to “gekauft”, 8 words away")


def test_sentences_that_cannot_be_drawn_are_refused(subject: Subject) -> None:
    translator = subject.translator
    with pytest.raises(DataError, match="--sentence is blank"):
        look(translator, " ")
    with pytest.raises(DataError, match="--sentence is longer than the 61 tokens of training"):
        look(translator, "Das ist gut. " * 40)
    with pytest.raises(DataError, match="--sentence has 2 words, must have more than 4"):
        draw("dependency", Subject(translator, "Ja, ja."))
    with pytest.raises(ConfigError, match="anaphora needs to know whom the pronoun means"):
        draw("anaphora", Subject(translator, "Tom sagte, er komme."))
    with pytest.raises(ConfigError, match="--link names 'sie', the sentence has Tom, sagte, er, komme: choose"):
        draw("anaphora", Subject(translator, "Tom sagte, er komme.", ("sie", "Tom")))
    unknown = Translator(translator.model, translator.config, translator.subwords)
    with pytest.raises(ConfigError, match="add --sentence"):
        draw("heads", Subject(unknown))
    assert len(draw("embeddings", Subject(unknown)).figure.axes) == 8, "frequent words, whatever the language"


# Files


def test_every_figure_that_is_listed_is_drawn_and_not_blank(subject: Subject, tmp_path: Path) -> None:
    written = figures.write_figures(tmp_path, list(FIGURES), ["svg", "png"], subject)
    assert {path.name for path, _ in written} == {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    for path, words in written:
        assert words
        if path.suffix == ".png":
            pixels = imread(io.BytesIO(path.read_bytes()), format="png")[..., :3]
            share = float((np.abs(pixels - 1).max(-1) > 0.1).mean())
            assert 0.005 < share < 0.95, f"{path.name}: {share:.3f} of it is drawn on"
        else:
            assert len(list(ET.parse(path).getroot().iter())) > 50
            assert path.stat().st_size < 200_000


def test_a_token_may_be_a_formula_or_of_a_script_that_no_font_has(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["$x_2$", "$", "$", "漢字", "\U00012000"]
    weight_LHSS = np.stack([np.eye(6), np.eye(6)[::-1]])[None]
    monkeypatch.setattr(appendix, "look", lambda *arguments: scripted_look(weight_LHSS, words))
    figure, _ = draw("heads", subject)
    write_figure(figure, tmp_path / "a.png")
    assert [text.get_text() for text in figure.axes[0].texts][::2] == [*words, "end"]
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)


def test_a_figure_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    for kind in ("svg", "png"):
        for name in ("one", "two"):
            write_figure(draw("schedule").figure, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_the_command_lists_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, listed, _ = run_here(monkeypatch, capsys, "figures", "--list")
    assert [line.split()[0] for line in listed.splitlines()] == list(FIGURES)
    assert not code
    out = tmp_path / "a" / "b"
    given = ["--appendix", "--sentence", "Tom hat gestern in der Stadt sein Auto verkauft.", "--device", "cpu"]
    code, shown, told = run_here(monkeypatch, capsys, "figures", *given, "--out", str(out))
    assert not code, told
    assert told.splitlines()[0] == "anaphora is left out: it needs --link PRONOUN=WORD"
    assert [line.split()[0] for line in shown.splitlines()] == [
        str(out / f"{name}.svg") for name in ("dependency", "heads")
    ]
    assert "“hat” gives" in shown
    assert {path.name for path in out.iterdir()} == {"dependency.svg", "heads.svg"}
    with_link = ["--only", "anaphora", "--link", "sein=Tom", *given[1:], "-q", "--out", str(out)]
    code, shown, told = run_here(monkeypatch, capsys, "figures", *with_link)
    assert (code or 0, told) == (0, "")
    assert "“sein” gives" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no folder to write: add --out DIR"),
        (["--out", "OUT", "--only", "position"], "'position' is no figure: choose from positions, similarity"),
        (["--out", "OUT", "--only", " , "], "--only is ' , ', must name something"),
        (["--out", "OUT", "--only", "positions", "--appendix"], "--only and --appendix exclude each other: keep one"),
        (["--out", "OUT", "--format", "pdf"], "--format is 'pdf', must be svg or png, or both: svg,png"),
        (["--out", "FILE", "--only", "schedule"], "FILE is a file: name a folder to write figures into"),
        (["--out", "FILE/x", "--only", "schedule"], "FILE/x cannot be written (Not a directory)"),
        (["OUT", "--out", "OUT", "--only", "schedule"], "MODEL means nothing to schedule: leave it out"),
        (
            ["--out", "OUT", "--only", "heads", "--words", "Haus"],
            "--words means nothing to heads: leave it out, or add",
        ),
        (["--out", "OUT", "--only", "embeddings", "--sentence", "a"], "--sentence means nothing to embeddings"),
        (["--out", "OUT", "--only", "schedule,heads", "--link", "a=b"], "--link means nothing to schedule, heads"),
        (["--out", "OUT", "--sentence", "Ja.", "--only", "schedule,heads,dependency"], "--sentence has 1 words"),
        (["OUT", "--out", "OUT", "--only", "heads"], "OUT/config.json cannot be read"),
        (["--out", "OUT", "--only", "anaphora", "--link", "er"], "--link is 'er', must read PRONOUN=WORD"),
        (["--out", "OUT", "--only", "anaphora", "--link", "er=Tom"], "--link er=Tom is of a sentence: add --sentence"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
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
    assert not list(tmp_path.rglob("*.svg")), "nothing is half done"


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refusal(monkeypatch, capsys, "figures", "--out", str(tmp_path))
    assert message == "figures need the package matplotlib: pip install 'transduce[figures]'"
