"""The bundled model: it is small, it is the default, and its scores are those of its card."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments.bundled_model import LANGUAGES, groups
from tests.support.bundled import FOLDER, heldout, transduce
from transduce import Translator, load_model, save_model
from transduce.engines.layers import Precision
from transduce.evaluation.metrics import bleu
from transduce.model_folder.format import BUNDLED_MODEL, CARD, CONFIG, WEIGHTS

PRECISIONS: tuple[Precision, ...] = ("float32", "int8")


def scores() -> dict[str, tuple[float, list[float]]]:
    (entry,) = json.loads((FOLDER / CARD).read_text())["scores"]
    return {score["name"]: (score["value"], score["interval"]) for score in entry["scores"]}


def test_the_bundled_model_is_small_and_its_card_has_scores_with_intervals() -> None:
    assert (FOLDER / WEIGHTS).stat().st_size < 20e6
    assert {W.dtype for W in load_file(FOLDER / WEIGHTS).values()} == {torch.float16}
    for name in ("BLEU", "chrF++"):
        value, (low, high) = scores()[name]
        assert low < value < high
        assert f"{name} {value:.1f} ({low:.1f} to {high:.1f})" in (FOLDER / "CARD.md").read_text()
    assert "CC-BY" in (FOLDER / "CARD.md").read_text()


def test_the_bundled_model_translates_held_out_sentences() -> None:
    sources, references = (lines[:100] for lines in heldout())
    translations = Translator.load(device="cpu").translate(sources)
    assert bleu([translation.text for translation in translations], references, n_bootstrap=0).value > 45


@pytest.mark.slow
def test_the_score_on_the_card_is_reproducible() -> None:
    sources, references = heldout()
    translations = Translator.load(device="cpu").translate(sources)
    score = bleu([translation.text for translation in translations], references, n_bootstrap=0)
    assert abs(score.value - scores()["BLEU"][0]) < 0.1


@pytest.mark.parametrize("arguments", [[], ["-"], ["in.de"], [BUNDLED_MODEL], [BUNDLED_MODEL, "in.de"]], ids=str)
def test_the_bundled_model_is_the_default_and_can_be_named(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.de").write_text("Ich bin müde.\n")
    done = transduce("translate", *arguments, "--device", "cpu", stdin="Ich bin müde.\n", cwd=tmp_path)
    assert done.stdout == "I'm tired.\n"
    assert (BUNDLED_MODEL in done.stderr) == (BUNDLED_MODEL not in arguments)


def test_int8_translates_nearly_as_well_as_float32(tmp_path: Path) -> None:
    done = transduce("translate", "--dtype", "int8", "--device", "cpu", "-q", stdin="Ich bin müde.\n", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("I'm tired.\n", "")
    sources, references = (lines[:100] for lines in heldout())
    values = [
        bleu(
            [translation.text for translation in Translator.load(device="cpu", precision=precision).translate(sources)],
            references,
            n_bootstrap=0,
        ).value
        for precision in PRECISIONS
    ]
    assert abs(values[0] - values[1]) < 2
    assert values[0] != values[1]


def test_a_folder_named_like_the_bundled_model_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / BUNDLED_MODEL).mkdir()
    done = transduce("translate", BUNDLED_MODEL, stdin="Ja.\n", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"transduce: .* cannot be read \(.*\): give a model folder\n", done.stderr)


def test_an_argument_that_is_neither_a_model_nor_a_file_gives_a_one_line_message(tmp_path: Path) -> None:
    done = transduce("translate", "run", stdin="Ja.\n", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_evaluating_the_bundled_model_does_not_change_its_card(tmp_path: Path) -> None:
    for side, lines in zip(LANGUAGES, heldout(), strict=True):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in lines[:20]))
    before = (FOLDER / CARD).read_bytes()
    done = transduce("evaluate", BUNDLED_MODEL, "--source", "de", "--reference", "en", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["n_sentences"] == 20
    assert (FOLDER / CARD).read_bytes() == before


def test_float16_weights_load_as_float32_and_their_file_is_as_readable_as_the_others(tmp_path: Path) -> None:
    original, config = load_model(FOLDER)
    save_model(tmp_path / "copy", original, config, dtype=torch.float16)
    loaded, _ = load_model(tmp_path / "copy")
    for p, q in zip(original.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)
        assert q.dtype == torch.float32
    assert (tmp_path / "copy" / WEIGHTS).stat().st_mode == (tmp_path / "copy" / CONFIG).stat().st_mode


def test_pairs_connected_by_equal_sentences_are_in_one_group() -> None:
    pairs = [(b"a", b"1"), (b"b", b"2"), (b"b", b"3"), (b"c", b"3"), (b"a", b"4"), (b"d", b"5")]
    assert groups(pairs) == [0, 1, 1, 1, 0, 5]
