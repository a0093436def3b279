"""Evaluation of a model or of a file: scores by sacrebleu, the card of a model, and refused input."""

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
def held_out_files(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    prepared = Prepared(trained / "prepared")
    pairs = [prepared.valid.pair(row) for row in range(60)]
    folder = tmp_path_factory.mktemp("test")
    for side, name in enumerate(("de", "en")):
        lines = prepared.subwords.decode([pair[side].tolist() for pair in pairs])
        (folder / f"test.{name}").write_text("".join(f"{line}\n" for line in lines))
    return folder / "test.de", folder / "test.en"


def test_the_scores_of_a_model_are_printed_and_stored_in_its_card(
    trained: Path, held_out_files: tuple[Path, Path]
) -> None:
    source, reference = held_out_files
    card = trained / "model" / "card.json"
    card.unlink(missing_ok=True)
    options = ["--source", str(source), "--reference", str(reference), "--beam", "1", "--device", "cpu"]
    result = transduce(str(trained), *options, "--json")
    assert result.returncode == 0, result.stderr
    evaluation = json.loads(result.stdout)
    hypotheses = [line["hypothesis"] for line in evaluation["lines"]]
    score = bleu(hypotheses, reference.read_text().splitlines(), 1000)
    assert evaluation["scores"][0] == {
        "name": "BLEU",
        "value": score.value,
        "signature": score.signature,
        "interval": list(score.interval or ()),
    }
    assert [score["name"] for score in evaluation["scores"]] == ["BLEU", "chrF++", "TER"]
    assert evaluation["n_sentences"] == 60
    (stored,) = json.loads(card.read_text())["scores"]
    assert stored["passport"]["files"] == ["test.de", "test.en"]
    assert stored["passport"]["dtype"] == "torch.float32"
    assert stored["scores"] == evaluation["scores"]
    assert stored["passport"]["decode"]["beam_size"] == 1
    assert "lines" not in stored
    transduce(str(trained), *options)  # the same measurement again replaces the first
    assert len(json.loads(card.read_text())["scores"]) == 1
    with_beam_2 = transduce(str(trained), *[a if a != "1" else "2" for a in options], "--bootstrap", "0")
    assert len(json.loads(card.read_text())["scores"]) == 2
    assert "BLEU" in with_beam_2.stdout
    assert "perplexity" in with_beam_2.stdout
    assert "worst sentences by chrF++" in with_beam_2.stdout


def test_a_file_of_translations_is_scored_and_compared(tmp_path: Path) -> None:
    for name, lines in (("out", HYPOTHESES), ("ref", REFERENCES), ("other", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = [str(tmp_path / "out"), "--reference", str(tmp_path / "ref")]
    result = transduce(*files, "--against", str(tmp_path / "other"), "--compound-split")
    assert result.returncode == 0, result.stderr
    assert "tokenised, compound-split BLEU" in " ".join(result.stdout.split())
    assert "paired bootstrap" in result.stdout
    evaluation = json.loads(transduce(*files, "--json", "--bootstrap", "0", "--compound-split").stdout)
    assert evaluation["perplexity"] is None
    assert evaluation["by_length"] == []
    assert evaluation["passport"]["source"] is None
    assert [score["interval"] for score in evaluation["scores"]] == [None] * 4
    assert evaluation["exact_match"] == 0.5


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
    value, n_excluded = perplexity_of(translator, sources, references, None)
    assert value == pytest.approx(math.exp(total / n), rel=1e-4)
    assert n_excluded == 0


def test_perplexity_excludes_pairs_longer_than_the_training_data(trained: Path) -> None:
    translator = Translator.load(trained, device="cpu")
    short, n_excluded = perplexity_of(translator, ["Das ist gut."], ["That is good."], None)
    assert n_excluded == 0
    both, n_excluded = perplexity_of(translator, ["Das ist gut.", "Das ist gut. " * 500], ["That is good."] * 2, None)
    assert both == pytest.approx(short)
    assert n_excluded == 1
    assert perplexity_of(translator, ["Das ist gut. " * 500], ["That is good."], None) == (None, 1)


def test_an_evaluation_reports_flags_worst_lines_and_comparisons() -> None:
    flags = [("split", "close"), (), ("split",), ()]
    translations = [Translation(text, 0.0, 0.0, f) for text, f in zip(HYPOTHESES, flags, strict=True)]  # type: ignore[arg-type]
    evaluation = evaluate(["a b"] * 4, REFERENCES, translations, other=REFERENCES, n_bootstrap=0)
    assert evaluation.flags == {"split": 2, "close": 1}
    assert evaluation.worst[0].hypothesis == "we are here"
    assert evaluation.scores[0].interval is None
    assert [row.name for row in evaluation.comparison] == ["BLEU", "chrF++", "TER"]
    assert evaluation.comparison[0].other == pytest.approx(100)


def test_a_card_that_cannot_be_written_is_not_an_error(tmp_path: Path) -> None:
    evaluation = evaluate(["a"] * 4, REFERENCES, [Translation(text, 0.0, 0.0) for text in HYPOTHESES], n_bootstrap=0)
    passport = {"source": "a", "reference": "b", "decode": None}
    assert not add_to_card(tmp_path / "missing", evaluation, passport)
    assert add_to_card(tmp_path, evaluation, passport)
    (tmp_path / "card.json").write_text("[]")
    with pytest.raises(DataError, match="is damaged: remove it, and the next evaluation writes a new one"):
        add_to_card(tmp_path, evaluation, passport)


def test_trees_are_scored_by_their_brackets(tmp_path: Path) -> None:
    (tmp_path / "gold").write_text("(TOP (S (NP (NNP John)) (VP (VBZ sees) (NP (NNP Mary)))))\n")
    (tmp_path / "predicted").write_text("(TOP (S (NP (NNP John)) (VP (VBZ sees)) (NP (NNP Mary))))\n")
    result = transduce(str(tmp_path / "predicted"), "--reference", str(tmp_path / "gold"), "--trees", "--json")
    assert result.returncode == 0, result.stderr
    score = json.loads(result.stdout)
    assert (score["precision"], score["recall"]) == (75.0, 75.0), "one of four brackets, the VP, differs"
    table = transduce(str(tmp_path / "predicted"), "--reference", str(tmp_path / "gold"), "--trees")
    assert "75.00" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "--reference", "SHORT"], "has 4 lines, SHORT has 3: give files with corresponding lines"),
        (["RUN", "--reference", "REF"], "is a model and needs sentences to translate: add --source FILE"),
        (["RUN", "--source", "OUT", "--reference", "NONE"], "NONE cannot be read (No such file or directory)"),
        (["NONE", "--source", "OUT", "--reference", "REF"], "NONE cannot be read (No such file or directory)"),
        ([".", "--source", "OUT", "--reference", "REF"], "config.json cannot be read"),
        (["OUT", "--reference", "BAD"], "BAD, line 2: is not valid UTF-8: correct the line"),
        (
            ["OUT", "--reference", "REF", "--bootstrap", "3"],
            "n_bootstrap must be 0 (no interval) or at least 40, got 3",
        ),
        (
            ["RUN", "--source", "EMPTY", "--reference", "EMPTY"],
            "EMPTY is empty: give a file with one sentence per line",
        ),
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
def test_bad_input_gives_a_one_line_message_and_exit_code_2(
    trained: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "OUT").write_text("".join(f"{line}\n" for line in HYPOTHESES))
    (tmp_path / "REF").write_text("".join(f"{line}\n" for line in REFERENCES))
    (tmp_path / "SHORT").write_text("a\nb\nc\n")
    (tmp_path / "BAD").write_bytes(b"a\n\xff\nc\nd\n")
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "TREE").write_text("(S (X a))\n(S (X a)\n")
    names = ("OUT", "REF", "SHORT", "BAD", "NONE", "EMPTY", "TREE")
    paths = {name: str(tmp_path / name) for name in names} | {"RUN": str(trained)}
    result = transduce(*[paths.get(argument, argument) for argument in arguments])
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith(("translating", "scoring"))]
    assert line.startswith("transduce: ")
    for name, path in paths.items():
        message = message.replace(name, path)
    assert message in line
