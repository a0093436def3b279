"""The training report: what it says about logs, settings and data, also if files are missing or damaged."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.command import refusal, run_here
from tests.support.inspector import HOSTILE
from tests.support.report import (
    ATTENTION,
    CARD,
    EVERY_KIND,
    SAMPLE,
    SCORE,
    end_line,
    log_lines,
    step_line,
    valid_line,
    write_log,
    write_result,
    write_run,
)
from transduce.config import base, override, tiny
from transduce.data.prepare import Prepared
from transduce.errors import ConfigError
from transduce.insight import page as pages
from transduce.insight.report import log as logs
from transduce.insight.report import report_of, with_report, write_report
from transduce.insight.report.log import MAX_MARKS, MAX_POINTS
from transduce.insight.report.page import compare_settings, plain
from transduce.insight.report.run import about_run, settings_of
from transduce.training.journal import LOG, Event, SavedEvent, ValidationEvent, event_from_json


def data_of(html: str) -> dict[str, Any]:
    """The data of a page, by a JSON parser that accepts no NaN and no infinity."""

    def refuse(text: str) -> None:
        raise AssertionError(text)

    (text,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.DOTALL)
    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data


def run_of(folder: Path) -> dict[str, Any]:
    run: dict[str, Any] = data_of(report_of([folder]))["runs"][0]
    return run


def missing(folder: Path) -> str:
    return " ".join(run_of(folder)["missing"])


# Reading the log


def as_another_version(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same events with their fields in another order."""
    return [{name: line[name] for name in sorted(line)} for line in lines]


def test_lines_in_the_usual_form_and_in_another_form_give_the_same(tmp_path: Path) -> None:
    lines = log_lines(4000, validate_every=500)
    lines[100] |= {"loss": math.nan, "gradient_norm": math.inf, "learning_rate": 1e-05}
    fast = logs.read(write_log(tmp_path / "fast", lines))
    slow = logs.read(write_log(tmp_path / "slow", as_another_version(lines)))
    for name, column_N in fast.step_columns.items():
        np.testing.assert_array_equal(column_N, slow.step_columns[name])
    assert len(fast.tokens_N) == 200
    assert fast.events == slow.events
    assert fast.n_unreadable == slow.n_unreadable == 0
    assert [type(event) for event in fast.events].count(ValidationEvent) == 8


def test_the_usual_form_is_read_without_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_log(tmp_path, log_lines(4000, validate_every=500))
    parsed = set()

    def parse(text: str) -> Any:
        values = json.loads(text)
        parsed.add(values["event"])
        return values

    monkeypatch.setattr(logs, "json", SimpleNamespace(loads=parse))
    assert len(logs.read(path).tokens_N) == 200
    assert parsed == {"forecast", "saved", "valid"}


def test_tokens_follow_from_the_speed_and_the_time_of_each_line(tmp_path: Path) -> None:
    lines = [
        step_line(20, tokens_per_second=100.0, seconds_per_step=0.5),  # 20 steps of 50 tokens
        step_line(30, tokens_per_second=70.0, seconds_per_step=2.0),  # 10 steps of 140 tokens
        step_line(50, tokens_per_second=math.nan, seconds_per_step=2.0),
    ]
    log = logs.read(write_log(tmp_path, lines))
    assert log.tokens_N.tolist() == [1000.0, 2400.0, 2400.0]
    assert log.n_tokens == 2400
    assert log.at([20, 25, 30])["tokens"] == [1000, 1700, 2400]


def test_a_cut_line_is_left_out_and_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(100))
    whole = (run / LOG).read_text()
    (run / LOG).write_text(whole + json.dumps(step_line(120))[:60])
    assert run_of(run)["curves"]["step"] == [20, 40, 60, 80, 100]
    assert "1 line of log.jsonl cannot be read" in missing(run)
    (run / LOG).write_text(whole.replace('"step": 60, "loss": ', '"step": 60, "loss": x'))
    assert run_of(run)["curves"]["step"] == [20, 40, 80, 100]
    assert "1 line of log.jsonl cannot be read" in missing(run)
    (run / LOG).write_text(whole)
    assert "log.jsonl" not in missing(run)


@pytest.mark.parametrize("line", EVERY_KIND, ids=lambda line: line["event"])
def test_no_value_of_another_type_breaks_the_report(line: dict[str, Any], tmp_path: Path) -> None:
    def read(changed: dict[str, Any]) -> None:
        log = logs.read(write_log(tmp_path, [*log_lines(40), changed]))
        values = [logs.curves(log), logs.validations(log), logs.marks(log), logs.translations(log)]
        json.dumps(plain(values), allow_nan=False)

    read(line)
    for name in line:
        for value in (None, "x", -1, 10**400, math.nan, [], [1], ["x"], {}, {"a": None}, True):
            read({**line, name: value})
        read({key: value for key, value in line.items() if key != name})


def test_steps_that_were_logged_twice_count_once(tmp_path: Path) -> None:
    lines = [step_line(20, loss=1.0), step_line(40, loss=2.0), step_line(20, loss=3.0), step_line(60, loss=4.0)]
    log = logs.read(write_log(tmp_path, lines))
    assert log.step_columns["step"].tolist() == [20, 40, 60]
    assert log.step_columns["loss"].tolist() == [3.0, 2.0, 4.0]


# Curves


def test_a_short_curve_keeps_every_point(tmp_path: Path) -> None:
    lines = log_lines(20 * MAX_POINTS)
    curves = logs.curves(logs.read(write_log(tmp_path, lines)))
    steps = [line for line in lines if line["event"] == "step"]
    for name in ("step", "seconds", "loss", "gradient_norm", "learning_rate", "tokens_per_second", "memory_bytes"):
        assert curves[name] == pytest.approx([line[name] for line in steps], rel=1e-4), name
    assert "loss_low" not in curves


def test_a_long_curve_is_thinned_to_means_and_keeps_its_extremes(tmp_path: Path) -> None:
    losses = 3 + np.random.default_rng(0).random(10 * MAX_POINTS)
    losses[[4321, 7000]] = 99.0, 0.5
    lines = [step_line(20 * i, loss=float(loss)) for i, loss in enumerate(losses, 1)]
    curves = logs.curves(logs.read(write_log(tmp_path, lines)))
    assert {len(values) for values in curves.values()} == {MAX_POINTS}
    np.testing.assert_allclose(curves["loss"], losses.reshape(-1, 10).mean(1), rtol=1e-4)
    np.testing.assert_allclose(curves["loss_low"], losses.reshape(-1, 10).min(1), rtol=1e-4)
    np.testing.assert_allclose(curves["loss_high"], losses.reshape(-1, 10).max(1), rtol=1e-4)
    assert (max(curves["loss_high"]), min(curves["loss_low"])) == (99.0, 0.5)
    assert curves["step"] == list(range(200, 20 * len(losses) + 1, 200))


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    lines = [step_line(20), step_line(40, loss=math.nan, gradient_norm=math.inf), step_line(60)]
    run = write_run(tmp_path / "run", [*lines, valid_line(60, math.nan), valid_line(80, 700.0, perplexity=math.inf)])
    curves, validations = run_of(run)["curves"], run_of(run)["validations"]
    assert [value is None for value in curves["loss"]] == [False, True, False]
    assert [value is None for value in curves["gradient_norm"]] == [False, True, False]
    assert validations["loss"] == [None, 700.0]
    assert validations["best"] == 1


def test_a_gap_in_a_long_curve_is_left_out_of_the_mean(tmp_path: Path) -> None:
    lines = [step_line(20 * i, loss=math.nan if i % 10 else 2.0) for i in range(1, 10 * MAX_POINTS + 1)]
    lines[:20] = [line | {"loss": math.inf} for line in lines[:20]]
    curves = logs.curves(logs.read(write_log(tmp_path, lines)))
    assert curves["loss"] == [None, None, *[2.0] * (MAX_POINTS - 2)]
    assert curves["loss_high"] == curves["loss"]


def test_a_log_of_100_000_lines_takes_little_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(2_000_000, validate_every=100_000, samples=[SAMPLE]))
    assert (run / LOG).read_text().count("\n") > 100_000
    report_of([run])  # opens files and fills caches
    seconds = []
    for _ in range(5):
        began = time.process_time()
        html = report_of([run])
        seconds.append(time.process_time() - began)
        if seconds[-1] < 0.3:
            break
    assert len(html) < 600_000
    assert min(seconds) < 1.0, "about 0.25 on a machine that is not busy"


# Marks and translations


def test_events_are_marked_with_words(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        step_line(20),
        step_line(40),
        step_line(60, max_steps=500),
        *EVERY_KIND[3:7],
        end_line(60),
    ]
    marks = logs.marks(logs.read(write_log(tmp_path, lines)))
    texts = {mark["kind"]: (mark["step"], mark["text"]) for mark in marks}
    assert texts == {
        "resumed": (20, "resumed from the checkpoint of step 20"),
        "damaged": (
            20,
            "the checkpoint of step 20 was damaged (weights.safetensors has changed): the one before it was used",
        ),
        "out of memory": (20, "out of memory: passes have at most 2,048 positions from here on"),
        "bad step": (20, "loss or gradient was NaN or infinite: the weights did not change"),
        "plan": (40, "the number of steps was changed from 1,000 to 500"),
        "end": (60, "final model: average of the last, steps 20, 40"),
    }
    assert [mark["seconds"] for mark in marks] == [2.0] * 4 + [4.0, 6.0]


def test_many_events_of_one_kind_are_combined(tmp_path: Path) -> None:
    bad = [{"event": "bad step", "step": step, "in_a_row": 1} for step in range(1, 10_001)]
    marks = logs.marks(logs.read(write_log(tmp_path, bad)))
    assert 30 < len(marks) <= MAX_MARKS
    assert marks[0]["text"].endswith("; 167 times to step 167")


def test_translations_carry_their_attention_in_thousandths(tmp_path: Path) -> None:
    lines = [step_line(20), valid_line(20, 3.0, samples=[SAMPLE | {"attention": ATTENTION}, SAMPLE])]
    (translated,) = logs.translations(logs.read(write_log(tmp_path, lines)))
    first, second = translated["samples"]
    assert first["attention"] == {
        "source": ["▁Ja", ".", "</s>"],
        "target": ["▁Yes", "."],
        "weights": [[900, 50, 50], [0, 333, 667]],
    }
    assert second == SAMPLE


@pytest.mark.parametrize(
    "attention",
    [
        None,
        "x",
        {},
        ATTENTION | {"weights": [[1.0, 0.0, 0.0]]},
        ATTENTION | {"weights": [[1.0], [0.0, 1.0]]},
        ATTENTION | {"weights": [["a", "b", "c"], [0, 0, 1]]},
        ATTENTION | {"source": []},
        {"source": [], "target": [], "weights": []},
    ],
)
def test_attention_of_another_shape_is_left_out(attention: Any, tmp_path: Path) -> None:
    lines = [step_line(20), valid_line(20, 3.0, samples=[SAMPLE | {"attention": attention}])]
    assert logs.translations(logs.read(write_log(tmp_path, lines)))[0]["samples"] == [SAMPLE]


def test_of_many_validations_the_first_the_last_and_the_best_stay() -> None:
    chosen = logs.evenly(list(range(1000)), 10, keep=[123, None])
    assert len(chosen) == 11
    assert {0, 123, 999} <= set(chosen)
    assert logs.evenly([1, 2, 3], 10) == [1, 2, 3]


# The state of a run


def age_log(run: Path, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(run / LOG, (when, when))


def test_the_state_is_told_by_the_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(400))
    training = run_of(run)
    assert (training["state"], training["step"], training["max_steps"]) == ("training", 400, 1000)
    assert training["seconds_left"] == pytest.approx(training["seconds"] / 400 * 600)
    age_log(run, 3600)
    assert run_of(run)["state"] == "stopped"
    with (run / LOG).open("a") as log:
        log.write(json.dumps({"event": "bad step", "step": 400, "in_a_row": 10}) + "\n")
    assert run_of(run)["state"] == "failed"
    with (run / LOG).open("a") as log:
        log.write(json.dumps({"event": "resumed", "step": 400}) + "\n")
    assert run_of(run)["state"] == "training"
    write_result(run, steps=400, seconds=50.0, target_tokens=12_345)
    finished = run_of(run)
    assert (finished["state"], finished["tokens"], finished["seconds"]) == ("finished", 12_345, 50.0)
    assert finished["seconds_left"] is None
    assert "before step 1,000" in finished["note"]


def test_a_slow_run_is_not_taken_for_a_stopped_one(tmp_path: Path) -> None:
    lines = [step_line(20 * i, seconds=600.0 * i) for i in range(1, 5)]
    run = write_run(tmp_path / "run", lines)
    age_log(run, 1800)
    assert run_of(run)["state"] == "training"
    age_log(run, 3001)
    assert run_of(run)["state"] == "stopped"


def test_the_final_model_and_its_scores_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [*log_lines(1000), end_line(1000)])
    write_result(run, steps=1000)
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "card.json").write_text(json.dumps(CARD))
    about = run_of(run)
    assert about["choice"]["taken"] == "average of the last"
    assert about["choice"]["candidates"]["average of the last"]["steps"] == [20, 40]
    assert about["scores"][0]["scores"] == [SCORE]
    assert about["scores"][0]["search"] == "beam 4"
    assert [command["command"].split()[1] for command in about["commands"]] == [
        "translate",
        "inspect",
        "evaluate",
        "serve",
        "report",
    ]
    (run / "model" / "card.json").write_text(json.dumps({"scores": [{"passport": None}]}))
    assert "card.json cannot be read" in missing(run)


def test_commands_quote_the_path(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a run; rm", log_lines(20))
    assert run_of(run)["commands"][0]["command"] == f"transduce report '{run}'"


# What is missing


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("run.json", "run.json is missing: the run has not chosen its settings yet"),
        ("request.json", ""),
        ("log.jsonl", "log.jsonl has no event yet"),
    ],
)
def test_a_run_without_a_file_has_a_report_that_says_so(name: str, says: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(100, validate_every=50))
    (run / name).unlink()
    assert says in missing(run)
    (run / name).write_bytes(b"\xff{")
    assert missing(run)


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "request.json").write_text("{}")
    about = run_of(tmp_path / "run")
    assert (about["state"], about["step"], about["max_steps"]) == ("waiting", 0, None)
    assert "The prepared data is not at" in missing(tmp_path / "run")
    assert data_of(report_of([tmp_path / "run"]))["settings"] == []


def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", log_lines(20))
    for folder in (tmp_path, tmp_path / "nowhere", run / LOG):
        with pytest.raises(ConfigError, match="is not a training run: give a folder that transduce train wrote"):
            report_of([run, folder])
        assert "is not a training run" in refusal(monkeypatch, capsys, "report", str(folder))
    assert not (tmp_path / "report.html").exists()


def changed(value: Any) -> Iterator[Any]:
    """The value with one of its parts replaced by something else, in all ways."""
    yield from (None, "x", -1, [], {}, [{}], math.inf)
    for name in list(value) if isinstance(value, dict) else []:
        yield {key: part for key, part in value.items() if key != name}
        for part in changed(value[name]):
            yield value | {name: part}
    for i in range(len(value)) if isinstance(value, list) else []:
        for part in changed(value[i]):
            yield [*value[:i], part, *value[i + 1 :]]


@pytest.mark.parametrize("name", ["run.json", "request.json", "result.json", "model/card.json", "prepared/report.json"])
def test_a_damaged_file_does_not_break_the_report(name: str, prepared_folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [*log_lines(40, validate_every=20), *EVERY_KIND])
    write_result(run, steps=40, bleu=20.0, samples=[])
    (run / "model").mkdir()
    (run / "model" / "card.json").write_text(json.dumps(CARD))
    shutil.copytree(prepared_folder, run / "prepared")
    settled = json.loads((run / "run.json").read_text())
    settled["config"] = {section: dict(list(part.items())[:2]) for section, part in settled["config"].items()}
    settled["config"]["train"] |= {"max_bad_steps": 10}
    (run / "run.json").write_text(json.dumps(settled))
    content = (run / name).read_text()
    report_of([run])
    for text in ("", "{", "[" * 100_000, "\ud83d", *map(json.dumps, changed(json.loads(content)))):
        (run / name).write_text(text, errors="surrogatepass")
        data_of(report_of([run]))


# The data


def test_the_data_report_is_that_of_the_prepared_folder(prepared_folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(20), prepared=str(prepared_folder))
    data, prepared = run_of(run)["data"], Prepared(prepared_folder)
    assert data["corpora"][0]["n_read"] == prepared.report.corpora[0].n_read == 400
    assert data["train"]["n_pairs"] == len(prepared.train)
    bars = data["lengths"]["bars"]
    for side, length_N in zip(("source", "target"), prepared.train.lengths(), strict=True):
        expected = [int(((length_N - 1 >= bar["first"]) & (length_N - 1 <= bar["last"])).sum()) for bar in bars]
        assert [bar[side] for bar in bars] == expected
        assert sum(expected) == len(prepared.train)
    assert "prepared" not in missing(run)


def test_prepared_data_that_is_gone_or_damaged_is_reported(prepared_folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(20), prepared=str(tmp_path / "gone"))
    assert "gone" in missing(run)
    data = tmp_path / "run" / "prepared"
    data.mkdir()
    write_run(tmp_path / "run", log_lines(20), prepared=None)
    (data / "report.json").write_text("{}")
    assert "report.json cannot be read" in missing(run)
    (data / "report.json").write_text((prepared_folder / "report.json").read_text())
    assert "train.tokens cannot be read" in missing(run)
    assert run_of(run)["data"]["lengths"] is None


# Settings


def test_settings_are_compared_with_the_base_model_and_between_runs(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", [], config=tiny())
    other = write_run(tmp_path / "other", [], config=override(tiny(), ["train.seed=7"]))
    without = write_run(tmp_path / "without", [])
    (without / "run.json").unlink()
    rows = {row["name"]: row for row in compare_settings([settings_of(run) for run in (one, other, without)])}
    assert rows["model.d_model"] == {
        "name": "model.d_model",
        "values": [128, 128, None],
        "is_known": [True, True, False],
        "differ": False,
        "base": 512,
        "departs": True,
    }
    assert rows["train.seed"]["values"] == [1, 7, None]
    assert {name for name, row in rows.items() if row["differ"]} == {"train.seed"}
    assert not rows["train.adam_beta2"]["departs"]
    assert rows["machine.dtype"]["values"] == ["float32", "float32", None]
    assert "base" not in rows["machine.dtype"]


def test_the_base_model_departs_from_itself_nowhere(tmp_path: Path) -> None:
    rows = compare_settings([settings_of(write_run(tmp_path / "run", [], config=base()))])
    assert len(rows) > 60
    assert not any(row.get("departs") for row in rows)


def test_a_setting_that_an_older_version_did_not_write_has_its_default(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    settled = json.loads((run / "run.json").read_text())
    del settled["config"]["train"]["patience"]
    (run / "run.json").write_text(json.dumps(settled))
    assert settings_of(run)["train.patience"] is None


# The page


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page(tmp_path: Path) -> None:
    html = report_of([write_run(tmp_path / "run", log_lines(20))])
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', html)
    styles, scripts = (
        re.findall("<style>(.*?)</style>", html, re.DOTALL),
        re.findall("<script>(.*?)</script>", html, re.DOTALL),
    )
    assert (len(styles), len(scripts)) == (2, 1)
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src {pages._hash(scripts[0])}",
        f"style-src {' '.join(map(pages._hash, styles))}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert not re.search(r"<(?:link|img|iframe)|\bsrc=|https?://(?!www\.w3\.org/2000/svg)", html)


def test_text_cannot_leave_the_data_and_odd_text_is_shown(tmp_path: Path) -> None:
    samples = [{"source": text, "reference": text, "translation": text} for text in [*HOSTILE, "half \ud83d"]]
    run = write_run(tmp_path / "<b>run<img>", [step_line(20), valid_line(20, 3.0, samples=samples)])
    html = report_of([run])
    html.encode()
    assert html.count("<script") == 2
    assert "<b>" not in html
    assert "<img" not in html
    data = data_of(html)
    shown = [sample["translation"] for sample in data["runs"][0]["translations"][0]["samples"]]
    assert shown == [*HOSTILE, "half ?"]
    assert data["runs"][0]["name"] == "<b>run<img>"


def test_runs_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", log_lines(20)) for name in "ab"]
    data = data_of(report_of([*runs, runs[0]]))
    assert [run["name"] for run in data["runs"]] == list(map(str, runs))


def test_about_a_run_is_plain_data(tmp_path: Path) -> None:
    about = about_run(write_run(tmp_path / "run", log_lines(20)), "run")
    assert about["name"] == "run"
    assert about["hashes"]["train"] == "1234"
    assert about["parameters"] == 2_342_912


# Writing it


def test_the_command_prints_the_path_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / name, log_lines(20)) for name in ("one", "two")]
    monkeypatch.chdir(tmp_path)
    for arguments, path in (
        ([str(runs[0])], runs[0] / "report.html"),
        (["one", "two"], Path("report.html")),
        (["one", "--out", "page.html"], Path("page.html")),
    ):
        code, out, err = run_here(monkeypatch, capsys, "report", *arguments)
        assert (code or 0, out, err) == (0, f"{path}\n", "")
        assert path.read_text().startswith("<!doctype html>")
    assert "free some space, or choose another place" in refusal(
        monkeypatch, capsys, "report", "one", "--out", "nowhere/page.html"
    )


def test_training_writes_the_report_after_validations_and_at_the_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(40))
    seen: list[Event] = []
    record = with_report(run, seen.append)
    saved, valid, end = SavedEvent(step=40), event_from_json(valid_line(40, 3.0)), event_from_json(end_line(40))
    record(saved)
    assert not (run / "report.html").exists()
    for event in (valid, end):
        record(event)
        assert (run / "report.html").exists()
        (run / "report.html").unlink()
    assert seen == [saved, valid, end]


def test_training_goes_on_if_the_report_cannot_be_written(tmp_path: Path) -> None:
    seen: list[Event] = []
    valid = event_from_json(valid_line(40, 3.0))
    with pytest.warns(RuntimeWarning, match="the report was not written: .* is not a training run"):
        with_report(tmp_path / "gone", seen.append)(valid)
    assert seen == [valid]


def test_a_page_replaces_an_older_one(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run", log_lines(20)), tmp_path / "page.html"
    write_report([run], out)
    write_run(run, log_lines(60))
    write_report([run], out)
    assert data_of(out.read_text())["runs"][0]["step"] == 60
