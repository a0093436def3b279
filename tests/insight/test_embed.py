"""Sentence vectors: they depend only on the tokens of the sentence, and row i is the vector of line i."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import refusal, run_here
from transduce import Translator
from transduce.errors import ConfigError, DataError
from transduce.insight import embed as embed_module
from transduce.insight.attention import inspect
from transduce.insight.embed import POOLS, Pool, embed, embed_stream, similarity
from transduce.reference import encode, load_weights

TEXTS = ["Das ist gut.", "", "Ich habe gestern ein sehr altes Haus am See gesehen.", "  ", "Ja.", "Wo ist Tom? " * 9]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


@pytest.mark.parametrize("pool", POOLS)
def test_a_vector_is_the_pooled_encoder_output_of_the_reference(translator: Translator, pool: Pool) -> None:
    from transduce.model_folder.format import BUNDLED, WEIGHTS

    config = translator.config.model
    weights = {name: W.astype(np.float64) for name, W in load_weights(BUNDLED / WEIGHTS).items()}
    for text, vector_D in zip(TEXTS[:3], embed(translator, TEXTS[:3], pool), strict=True):
        (ids,) = translator.subwords.encode([text])
        memory_SD = encode(weights, config, np.array([[*ids, config.eos_id]]))[0][0]
        expected = {"mean": memory_SD.mean(0), "max": memory_SD.max(0), "first": memory_SD[0]}[pool]
        np.testing.assert_allclose(vector_D, expected if text else np.zeros(config.d_model), atol=2e-5)


@pytest.mark.parametrize("pool", POOLS)
def test_a_vector_does_not_depend_on_the_batch(
    translator: Translator, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    together_ND = embed(translator, TEXTS, pool)
    alone_ND = np.concatenate([embed(translator, [text], pool) for text in TEXTS])
    np.testing.assert_allclose(together_ND, alone_ND, atol=1e-5)
    np.testing.assert_allclose(embed(translator, TEXTS[::-1], pool)[::-1], alone_ND, atol=1e-5)
    monkeypatch.setattr(embed_module, "BATCH_TOKENS", 30)
    monkeypatch.setattr(embed_module, "WINDOW_TEXTS", 2)
    windows = [np.zeros(256) if row is None else row for row in embed_stream(translator, iter(TEXTS), pool)]
    np.testing.assert_allclose(windows, alone_ND, atol=1e-5)


def test_parts_of_a_long_text_are_weighted_by_their_number_of_tokens(translator: Translator) -> None:
    text = "Ich habe ein Haus und einen Hund. " * 12 + "Ja."
    line = translator.prepare(text, [], [])
    assert len(line.ids) > 1
    parts_ND = embed(translator, [segment.text for segment in line.segments])
    length_N = np.array([len(ids) + 1 for ids in line.ids])
    np.testing.assert_allclose(embed(translator, [text])[0], length_N @ parts_ND / length_N.sum(), atol=1e-5)
    largest_D = embed(translator, [segment.text for segment in line.segments], "max").max(0)
    np.testing.assert_allclose(embed(translator, [text], "max")[0], largest_D, atol=1e-5)


def test_sentences_with_the_same_meaning_are_more_similar(translator: Translator) -> None:
    same_meaning = similarity(translator, "Das Auto ist schnell.", "Der Wagen ist schnell.")
    other_meaning = similarity(translator, "Das Auto ist schnell.", "Ich lese gern Bücher.")
    assert other_meaning < same_meaning < 1
    assert similarity(translator, "Ja.", "Ja.") == pytest.approx(1)


def test_an_unknown_pool_and_a_blank_sentence_are_refused(translator: Translator) -> None:
    with pytest.raises(ConfigError, match="--pool is 'last', must be one of mean, max, first"):
        embed(translator, ["a"], "last")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="one of them is blank"):
        similarity(translator, "a", " ")


def test_the_command_prints_one_line_per_line_or_writes_a_file(
    translator: Translator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, expected_ND = "".join(f"{text}\n" for text in TEXTS), embed(translator, TEXTS)
    command = [sys.executable, "-m", "transduce", "embed", "--device", "cpu", "-q"]
    result = subprocess.run(command, input=lines, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row is None for row in rows] == [not text.strip() for text in TEXTS]
    np.testing.assert_allclose([row or [0.0] * 256 for row in rows], expected_ND, atol=1e-5)

    def stdout_of(*arguments: str) -> str:
        code, out, err = run_here(monkeypatch, capsys, "embed", *arguments, "--device", "cpu", "-q")
        assert (code or 0, err) == (0, "")
        return out

    (tmp_path / "in.de").write_text(lines)
    assert stdout_of(str(tmp_path / "in.de"), "--out", str(tmp_path / "vectors.npy")) == ""
    written_ND = np.load(io.BytesIO((tmp_path / "vectors.npy").read_bytes()))
    assert written_ND.dtype == np.float32
    np.testing.assert_allclose(written_ND, expected_ND, atol=1e-5)
    expected = similarity(translator, "Das ist gut.", "Das ist gut!")
    assert float(stdout_of("tatoeba-de-en", "--similarity", "Das ist gut.", "Das ist gut!")) == pytest.approx(
        expected, abs=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NONE"], "NONE/config.json cannot be read"),
        (["tatoeba-de-en", "NONE"], "NONE cannot be read (No such file or directory)"),
        (["--pool", "last"], "--pool is 'last', must be one of mean, max, first: mean is the default"),
        (
            ["--similarity", "a", ""],
            "--similarity compares two sentences, and one of them is blank: give two sentences with text",
        ),
        (["--similarity", "a", "b", "--out", "x.npy"], "--similarity and --out exclude each other: keep one"),
        (["IN", "--out", "NONE/x.npy"], "cannot be written (No such file or directory)"),
        (["IN", "--out", "x.txt"], "--out is x.txt, must end in .npy: it is a NumPy array"),
        (["BAD"], "BAD, line 2 is not UTF-8: correct the line"),
    ],
)
def test_bad_input_gives_a_one_line_message_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "IN").write_text("Ja.\n")
    (tmp_path / "BAD").write_bytes(b"Ja.\n\xff\n")
    for name, path in {name: str(tmp_path / name) for name in ("NONE", "IN", "BAD")}.items():
        arguments = [argument.replace(name, path) for argument in arguments]
        message = message.replace(name, path)
    assert message in refusal(monkeypatch, capsys, "embed", *arguments, "-q", "--device", "cpu")


def test_one_string_is_not_a_list_of_its_letters(translator: Translator) -> None:
    message = r"texts is one string, must be a list of strings: write \[text\]"
    with pytest.raises(TypeError, match=message):
        embed(translator, "Das ist gut.")
    with pytest.raises(TypeError, match=message):
        next(inspect(translator, "Das ist gut."))
