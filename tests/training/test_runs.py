"""The table of runs: each run has a row, whatever state it is in, and the table fits the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.support.training import ignore, request_for
from transduce import tiny
from transduce.cli.show.runs import shorten_names, show_runs
from transduce.training.journal import BadStepEvent, Event, StepEvent, TranslationScore, ValidationEvent
from transduce.training.run import train
from transduce.training.runs import find_runs, summary_of


@pytest.mark.usefixtures("quick_choice")
def test_runs_can_be_compared(tmp_path: Path, prepared_folder: Path) -> None:
    for name, dropout in (("a", 0.1), ("b", 0.5)):
        train(tmp_path / name, request_for(prepared_folder, f"model.dropout={dropout}"), ignore, ignore)
    (tmp_path / "b" / "result.json").unlink()
    assert [path.name for path in find_runs([tmp_path])] == ["a", "b"]
    first, second = (summary_of(path) for path in find_runs([tmp_path / "a", tmp_path / "b"]))
    assert (first["state"], second["state"]) == ("done", "at step 12")
    assert (first["dropout"], second["dropout"]) == (0.1, 0.5)
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert first["perplexity"] == result["candidates"][result["taken"]]["perplexity"]
    assert first["data"] == second["data"]
    assert first["config_hash"] != second["config_hash"]
    done = subprocess.run([sys.executable, "-m", "transduce", "runs", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{first['perplexity']:.2f}" in done.stdout
    assert "at step 12" in done.stdout
    none = subprocess.run(
        [sys.executable, "-m", "transduce", "runs", str(prepared_folder)], capture_output=True, text=True
    )
    assert (none.returncode, "there is no run in" in none.stderr) == (2, True)


# Runs in every state, written by hand

FORECAST = {"size": "tiny", "parameters": 5_300_000}
ABOUT = {"forecast": FORECAST, "device": "a processor, 2 threads", "data": {"train": "0123456789abcdef"}}
SETTLED = {"config": asdict(tiny()), "choices": {}, "about": ABOUT}
CANDIDATES = {"best": {"steps": [40], "loss": 1.1, "perplexity": 3.01, "accuracy": 0.61}}
RESULT = {"taken": "best", "candidates": CANDIDATES, "bleu": 31.4}


def step_event(step: int) -> StepEvent:
    return StepEvent(
        step=step,
        loss=3.0,
        gradient_norm=1.0,
        learning_rate=1e-3,
        tokens_per_second=1e4,
        memory_bytes=1,
        seconds=2.0 * step,
        epoch=0.1,
        seconds_per_step=2.0,
        max_steps=1234,
    )


def validation(step: int, perplexity: float, *, is_best: bool) -> ValidationEvent:
    score = TranslationScore(bleu=10.0 * perplexity)
    return ValidationEvent(step=step, loss=1, perplexity=perplexity, accuracy=0.5, is_best=is_best, translations=score)


def score_entry(bleu: float, beam: int, when: str, **passport: Any) -> dict[str, Any]:
    decode = {"method": "beam", "beam_size": beam}
    return {
        "passport": {"decode": decode, "files": ["test.de", "test.en"], "to": None, "when": when} | passport,
        "n_sentences": 1000,
        "scores": [
            {"name": "BLEU", "value": bleu, "signature": "nrefs:1", "interval": None},
            {"name": "chrF++", "value": 50.0, "signature": "nrefs:1", "interval": None},
        ],
    }


def write_run(folder: Path, **files: Any) -> Path:
    """`files`: contents by name; text is written as it is, a list is a log of events."""
    folder.mkdir(parents=True)
    for name, content in {"request": {"size": "tiny"}, **files}.items():
        path = folder / {"log": "log.jsonl", "card": "model/card.json"}.get(name, f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, list):
            content = "".join(
                json.dumps(event.to_json() if isinstance(event, Event) else event) + "\n" for event in content
            )
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


LOG: list[Event] = [
    step_event(20),
    validation(20, 4.0, is_best=True),
    step_event(40),
    validation(40, 5.0, is_best=False),
]


def test_a_run_has_the_scores_of_its_validation_and_of_its_tests(tmp_path: Path) -> None:
    card = {
        "scores": [
            score_entry(40.4, 4, "2026-02-02"),
            score_entry(39.2, 1, "2026-03-03", files=["other.de", "other.en"], to="en"),
            score_entry(38.0, 4, "2026-01-01"),
        ]
    }
    summary = summary_of(write_run(tmp_path / "run", run=SETTLED, log=LOG, result=RESULT, card=card))
    assert (summary["state"], summary["problems"]) == ("done", [])
    assert (summary["perplexity"], summary["valid_bleu"], summary["accuracy"]) == (3.01, 31.4, 0.61)
    assert [score["bleu"] for score in summary["test"]] == [38.0, 40.4, 39.2], "the newest is the last"
    assert summary["test"][-1] | {"bleu_signature": "", "chrf": 0} == {
        "bleu": 39.2,
        "bleu_signature": "",
        "chrf": 0,
        "method": "beam",
        "beam": 1,
        "source": "other.de",
        "to": "en",
        "n_sentences": 1000,
        "when": "2026-03-03",
    }
    shown = table([summary], None)
    assert "39.2 greedy" in shown
    assert "other.de to en, 1,000 lines, beam 1" in shown
    running = summary_of(write_run(tmp_path / "running", run=SETTLED, log=LOG))
    assert (running["state"], running["steps"], running["seconds"]) == ("at step 40", 1234, 80.0)
    assert (running["perplexity"], running["valid_bleu"]) == (4.0, 40.0), "those of the best step so far"


def test_runs_that_failed_or_did_not_begin_are_listed_with_the_reason(tmp_path: Path) -> None:
    bad = [step_event(40), BadStepEvent(step=50, in_a_row=10), step_event(50)]
    failed = write_run(tmp_path / "failed", run=SETTLED, log=bad)
    recovered = write_run(tmp_path / "recovered", run=SETTLED, log=[BadStepEvent(step=4, in_a_row=3), step_event(20)])
    new = write_run(tmp_path / "new")
    settled = write_run(tmp_path / "settled", run=SETTLED)
    (tmp_path / "no-run").mkdir()
    assert find_runs([tmp_path]) == [failed, new, recovered, settled]
    summaries = {path.name: summary_of(path) for path in find_runs([tmp_path])}
    states = {name: summary["state"] for name, summary in summaries.items()}
    assert states == {
        "failed": "failed at step 50",
        "new": "before step 1",
        "recovered": "at step 20",
        "settled": "before step 1",
    }
    shown = " ".join(table(list(summaries.values()), 80).split())
    assert "failed: 10 steps in a row had a loss or gradient that is NaN or infinite: raise train.warmup_steps" in shown
    assert "new: no step is taken yet: the run is being prepared, or it was interrupted or refused." in shown
    assert summaries["recovered"]["problems"] == summaries["settled"]["problems"] == []


DAMAGED: list[tuple[dict[str, Any], str, str]] = [
    ({"run": "{"}, "damaged", "run.json is damaged (Expecting property name"),
    ({"run": {"config": {}}}, "damaged", "run.json is damaged (it lacks 'about')"),
    ({"run": SETTLED | {"config": {"model": {"n_heads": 0}}}}, "damaged", "run.json is damaged (model.n_heads is 0"),
    ({"run": SETTLED, "result": "[1]", "log": LOG}, "at step 40", "result.json is damaged (it is not a JSON object)"),
    (
        {"run": SETTLED, "log": LOG, "result": {**RESULT, "bleu": "high"}},
        "at step 40",
        "result.json is damaged (could not convert string to float: 'high')",
    ),
    ({"run": SETTLED, "log": "\\\n[]\n3\n"}, "before step 1", "log.jsonl has 2 damaged lines, which are ignored"),
    ({"run": SETTLED, "log": [{"event": "step"}, *LOG]}, "at step 40", "log.jsonl has 1 damaged lines"),
    (
        {"run": SETTLED, "log": [*LOG, {"event": "saved", "step": "x"}]},
        "before step 1",
        "log.jsonl is damaged (invalid",
    ),
    (
        {"run": SETTLED, "result": RESULT, "card": {"scores": [{}]}},
        "done",
        "model/card.json is damaged (it lacks 'pass",
    ),
    ({"request": ""}, "before step 1", "request.json is damaged (Expecting value"),
]


@pytest.mark.parametrize(("files", "state", "problem"), DAMAGED, ids=[problem for _, _, problem in DAMAGED])
def test_a_damaged_file_is_reported_and_the_others_are_shown(
    tmp_path: Path, files: dict[str, Any], state: str, problem: str
) -> None:
    write_run(tmp_path / "broken", **files)
    write_run(tmp_path / "whole", run=SETTLED, log=LOG, result=RESULT)
    done = run_command(str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    broken = summary_of(tmp_path / "broken")
    assert broken["state"] == state
    assert any(text.startswith(problem) for text in broken["problems"]), broken["problems"]
    assert f"broken: {problem}"[:40] in " ".join(done.stdout.split())
    assert "3.01" in done.stdout
    as_json = json.loads(run_command(str(tmp_path), "--json").stdout)
    assert [Path(summary["run"]).name for summary in as_json] == ["broken", "whole"]


# The table


def run_command(*arguments: str, columns: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": str(columns)}
    command = [sys.executable, "-m", "transduce", "runs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def table(summaries: Sequence[dict[str, Any]], width: int | None) -> str:
    out = io.StringIO()
    show_runs(Console(file=out, width=width or 80, highlight=False), summaries, width)
    return out.getvalue()


NAMES = ["multi30k-small-h200-seed-17", "multi30k-base-with-label-smoothing-0.1-and-dropout-0.3", "a"]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_the_terminal_and_breaks_no_name(tmp_path: Path, width: int) -> None:
    card = {"scores": [score_entry(40.4, 1, "2026-02-02")]}
    for name in NAMES:
        write_run(tmp_path / "experiments" / "german to english" / name, run=SETTLED, log=LOG, result=RESULT, card=card)
    write_run(tmp_path / "experiments" / "german to english" / "new")
    summaries = [summary_of(path) for path in find_runs([tmp_path / "experiments" / "german to english"])]
    lines = table(summaries, width).splitlines()
    assert max(cell_len(line) for line in lines if str(tmp_path) not in line) <= width
    shown = [line.split("  ")[0].strip() for line in lines if "done" in line]
    for name, short in zip(sorted(NAMES), shown, strict=True):
        first, cut, last = short.partition("…")
        assert name == short or (cut and re.fullmatch(rf"{first}.+{last}", name))
        assert not cut or first.endswith("-")
    header = " ".join(" ".join(lines[:4]).split())
    for name in ("run", "state", "valid", "test", "BLEU"):
        assert name in header
    assert ("time" in header) == (width == 160)
    assert "config" not in header
    text = " ".join(" ".join(lines).split())
    assert "valid BLEU: of greedy translations of validation sentences, during training." in text
    assert "test BLEU: of beam search unless it says otherwise, measured last by transduce evaluate." in text
    assert re.search(r"Not shown: (size, parameters, .*)?accuracy, test set, .*config, data\. --wide shows all", text)
    wide = table(summaries, None)
    assert all(str(summary["run"]) in wide for summary in summaries)
    assert {len(line.rstrip()) > 160 for line in wide.splitlines() if "done" in line} == {True}


def test_the_command_fits_80_columns_if_there_is_no_terminal(tmp_path: Path) -> None:
    for name in NAMES:
        write_run(tmp_path / name, run=SETTLED, log=LOG, result=RESULT)
    names = [str(tmp_path / name) for name in NAMES]
    narrow, wide = run_command(*names), run_command(*names, columns=260)
    assert max(map(len, narrow.stdout.splitlines())) <= max(80, len(f"The runs are in {tmp_path}."))
    assert max(len(line) for line in narrow.stdout.splitlines() if "done" in line) <= 80
    assert "config" not in narrow.stdout.partition("Not shown")[0]
    assert "config" in wide.stdout
    assert "Not shown" not in wide.stdout
    assert str(tmp_path / NAMES[1]) in run_command(*names, "--wide").stdout


def test_names_are_shortened_without_breaking_words() -> None:
    assert shorten_names(["run-1", "run-2"], 5) == (["run-1", "run-2"], "")
    assert shorten_names(["all/of/run-1", "all/of/run-2"], 8) == (["run-1", "run-2"], "all/of")
    assert shorten_names(["all/of/run-1", "all/run-2"], 8) == (["of/run-1", "run-2"], "all")
    assert shorten_names(["german-to-english-with-17-heads"], 20) == (["german-to-…17-heads"], "")
    assert shorten_names(["a-first-long-z", "a-second-long-z"], 9) == (["a-first-long-z", "a-second-long-z"], ""), (
        "names that would be the same are kept"
    )
    assert shorten_names(["unbreakable"], 5) == (["unbreakable"], "")
    assert shorten_names(["/a/b/run", "c/run"], 7) == (["/a/…run", "c/run"], "")
    assert shorten_names(["/a/b/x", "/a/b/y"], 3) == (["x", "y"], "/a/b")
