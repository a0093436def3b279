"""Scores of a model or of anybody's file: sacrebleu's own, kept in the card, and refused where lines do not match."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transduce import DataError, make_batch
from transduce.data.prepare import Prepared
from transduce.evaluation.evaluate import add_to_card, evaluate, perplexity_of
from transduce.evaluation.metrics import bleu
from transduce.translation.result import Translation
from transduce.translation.translator import Translator

HYPOTHESES = ["the cat sat on the mat", "it is raining", "we are here", "a dog"]
REFERENCES = ["the cat sat on the mat", "it is raining hard today", "they are there", "a dog"]


def transduce(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "transduce", "evaluate", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="session")
def both_files(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    prepared = Prepared(trained / "prepared")
    pairs = [prepared.valid.pair(row) for row in range(60)]
    folder = tmp_path_factory.mktemp("test")
    for side, name in enumerate(("de", "en")):
        lines = prepared.subwords.decode([pair[side].tolist() for pair in pairs])
        (folder / f"test.{name}").write_text("".join(f"{line}\n" for line in lines))
    return folder / "test.de", folder / "test.en"


def test_a_model_is_scored_and_its_card_keeps_it(trained: Path, both_files: tuple[Path, Path]) -> None:
    source, reference = both_files
    card = trained / "model" / "card.json"
    card.unlink(missing_ok=True)
    both = ["--source", str(source), "--reference", str(reference), "--beam", "1", "--device", "cpu"]
    done = transduce(str(trained), *both, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    hypotheses = [line["hypothesis"] for line in found["lines"]]
    score = bleu(hypotheses, reference.read_text().splitlines(), 1000)
    assert found["scores"][0] == {
        "name": "BLEU",
        "value": score.value,
        "signature": score.signature,
        "interval": list(score.interval or ()),
    }
    assert [score["name"] for score in found["scores"]] == ["BLEU", "chrF++", "TER"]
    assert found["n_sentences"] == 60
    (kept,) = json.loads(card.read_text())["scores"]
    assert kept["passport"]["files"] == ["test.de", "test.en"]
    assert kept["passport"]["dtype"] == "torch.float32"
    assert kept["scores"] == found["scores"]
    assert kept["passport"]["decode"]["beam_size"] == 1
    assert "lines" not in kept
    transduce(str(trained), *both)  # the same again takes the place of the first
    assert len(json.loads(card.read_text())["scores"]) == 1
    other = transduce(str(trained), *[a if a != "1" else "2" for a in both], "--bootstrap", "0")
    assert len(json.loads(card.read_text())["scores"]) == 2
    assert "BLEU" in other.stdout
    assert "perplexity" in other.stdout
    assert "the worst by chrF++" in other.stdout


def test_a_file_of_anybody_is_scored_and_compared(tmp_path: Path) -> None:
    for name, lines in (("out", HYPOTHESES), ("ref", REFERENCES), ("other", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = [str(tmp_path / "out"), "--reference", str(tmp_path / "ref")]
    done = transduce(*files, "--against", str(tmp_path / "other"), "--compound-split")
    assert done.returncode == 0, done.stderr
    assert "tokenised, compound-split BLEU" in " ".join(done.stdout.split())
    assert "paired bootstrap" in done.stdout
    found = json.loads(transduce(*files, "--json", "--bootstrap", "0", "--compound-split").stdout)
    assert found["perplexity"] is None
    assert found["by_length"] == []
    assert found["passport"]["source"] is None
    assert [score["interval"] for score in found["scores"]] == [None] * 4
    assert found["exact_match"] == 0.5


def test_perplexity_is_e_to_the_mean_loss(trained: Path) -> None:
    translator = Translator.load(trained, device="cpu")
    sources, references = ["Das ist gut.", "Ich habe ein Haus."], ["That is good.", "I have a house."]
    total, n = 0.0, 0
    for source, reference in zip(sources, references, strict=True):
        (source_ids,), (target_ids,) = translator.subwords.encode([source]), translator.subwords.encode([reference])
        batch = make_batch([(source_ids, target_ids)], translator.config.model)
        with torch.no_grad():
            logits = translator.model(*(torch.from_numpy(ids) for ids in batch[:2])).logits_BTV[0]
        total -= sum(float(row.log_softmax(-1)[i]) for row, i in zip(logits, batch.target_out_BT[0], strict=True))
        n += len(target_ids) + 1
    value, n_left_out = perplexity_of(translator, sources, references, None)
    assert value == pytest.approx(math.exp(total / n), rel=1e-4)
    assert n_left_out == 0


def test_perplexity_leaves_out_what_the_model_cannot_take_whole(trained: Path) -> None:
    translator = Translator.load(trained, device="cpu")
    short, n_left_out = perplexity_of(translator, ["Das ist gut."], ["That is good."], None)
    assert n_left_out == 0
    both, n_left_out = perplexity_of(translator, ["Das ist gut.", "Das ist gut. " * 500], ["That is good."] * 2, None)
    assert both == pytest.approx(short)
    assert n_left_out == 1
    assert perplexity_of(translator, ["Das ist gut. " * 500], ["That is good."], None) == (None, 1)


def test_an_evaluation_says_what_is_less_than_it_should_be() -> None:
    flags = [("split", "close"), (), ("split",), ()]
    translations = [Translation(text, 0.0, 0.0, f) for text, f in zip(HYPOTHESES, flags, strict=True)]  # type: ignore[arg-type]
    found = evaluate(["a b"] * 4, REFERENCES, translations, other=REFERENCES, n_bootstrap=0)
    assert found.flags == {"split": 2, "close": 1}
    assert found.worst[0].hypothesis == "we are here"
    assert found.scores[0].interval is None
    assert [row.name for row in found.comparison] == ["BLEU", "chrF++", "TER"]
    assert found.comparison[0].other == pytest.approx(100)


def test_a_folder_that_cannot_be_written_loses_nothing_but_the_card(tmp_path: Path) -> None:
    found = evaluate(["a"] * 4, REFERENCES, [Translation(text, 0.0, 0.0) for text in HYPOTHESES], n_bootstrap=0)
    passport = {"source": "a", "reference": "b", "decode": None}
    assert not add_to_card(tmp_path / "nowhere", found, passport)
    assert add_to_card(tmp_path, found, passport)
    (tmp_path / "card.json").write_text("[]")
    with pytest.raises(DataError, match="cannot be read: remove it to begin another"):
        add_to_card(tmp_path, found, passport)


def test_trees_are_scored_by_their_brackets(tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("(TOP (S (NP (NNP John)) (VP (VBZ sees) (NP (NNP Mary)))))\n")
    (tmp_path / "found").write_text("(TOP (S (NP (NNP John)) (VP (VBZ sees)) (NP (NNP Mary))))\n")
    done = transduce(str(tmp_path / "found"), "--reference", str(tmp_path / "gold"), "--trees", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["precision"], found["recall"]) == (75.0, 75.0), "by hand: the VP has another span"
    shown = transduce(str(tmp_path / "found"), "--reference", str(tmp_path / "gold"), "--trees")
    assert "75.00" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "--reference", "SHORT"], "has 4 lines, SHORT has 3: give files whose lines belong together"),
        (["RUN", "--reference", "REF"], "is a model, and there is nothing to translate: add --source FILE"),
        (["RUN", "--source", "OUT", "--reference", "NONE"], "NONE cannot be read (No such file or directory)"),
        (["NONE", "--source", "OUT", "--reference", "REF"], "NONE cannot be read (No such file or directory)"),
        ([".", "--source", "OUT", "--reference", "REF"], "config.json cannot be read"),
        (["OUT", "--reference", "BAD"], "BAD, line 2: is no UTF-8: mend the line"),
        (
            ["OUT", "--reference", "REF", "--bootstrap", "3"],
            "n_bootstrap must be 0, for no interval, or at least 40, got 3",
        ),
        (["RUN", "--source", "EMPTY", "--reference", "EMPTY"], "EMPTY is empty: give a file of lines"),
        (["NONE", "--reference", "REF"], "NONE cannot be read (No such file or directory)"),
        (["OUT", "--reference", "REF", "--against", "SHORT"], "SHORT has 3 lines, REF has 4"),
        (["TREE", "--reference", "TREE", "--trees"], "TREE, line 2: "),
        (
            ["TREE", "--reference", "TREE", "--trees", "--source", "REF"],
            "--trees and --source exclude each other: keep one",
        ),
        (["OUT"], "Missing option '--reference'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(trained: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "OUT").write_text("".join(f"{line}\n" for line in HYPOTHESES))
    (tmp_path / "REF").write_text("".join(f"{line}\n" for line in REFERENCES))
    (tmp_path / "SHORT").write_text("a\nb\nc\n")
    (tmp_path / "BAD").write_bytes(b"a\n\xff\nc\nd\n")
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "TREE").write_text("(S (X a))\n(S (X a)\n")
    names = ("OUT", "REF", "SHORT", "BAD", "NONE", "EMPTY", "TREE")
    paths = {name: str(tmp_path / name) for name in names} | {"RUN": str(trained)}
    done = transduce(*[paths.get(argument, argument) for argument in arguments])
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith(("translating", "scoring"))]
    assert line.startswith("transduce: ")
    for name, path in paths.items():
        message = message.replace(name, path)
    assert message in line
