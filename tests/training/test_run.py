"""Whole runs through files: what they leave, what they print, and which requests are refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.support.pairs import sentences, write_pairs
from tests.support.training import SETTINGS, assert_same_bits, corpus_of, ignore, request_for
from transduce import ConfigError, Translator, base, load_model, override, small, with_model
from transduce.cli.show.training import TrainingDisplay, show_training, sparkline
from transduce.data.prepare import Prepared
from transduce.model_folder.format import load_checkpoint, model_folder
from transduce.training.journal import (
    LOG,
    BadStepEvent,
    DamagedEvent,
    Event,
    Journal,
    OutOfMemoryEvent,
    ResumedEvent,
    SavedEvent,
    StepEvent,
    ValidationEvent,
    read_events,
    read_log,
)
from transduce.training.recipe import scheduled_rate
from transduce.training.request import REQUEST, Request, claim, settings_from_file
from transduce.training.run import train
from transduce.training.settle import Settled


@pytest.mark.usefixtures("quick_choice")
def test_a_run_leaves_a_model_and_a_log(tmp_path: Path, prepared_folder: Path) -> None:
    events: list[Event] = []
    result = train(tmp_path / "run", request_for(prepared_folder), events.append, ignore)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "log.jsonl",
        "model",
        "request.json",
        "result.json",
        "run.json",
        "snapshots",
    ]
    model, config = load_model(tmp_path / "run" / "model")
    assert config == Settled.from_json((tmp_path / "run" / "run.json").read_text()).config
    assert result["steps"] == 12
    log = read_log(tmp_path / "run" / LOG)
    assert log == [json.loads(json.dumps(event.to_json())) for event in events]
    assert read_events(tmp_path / "run" / LOG) == events
    assert {event.kind for event in events} >= {"forecast", "step", "valid", "saved", "end"}
    about = json.loads((tmp_path / "run" / "run.json").read_text())["about"]
    assert about["data"]["train"] == Prepared(prepared_folder).report.train.sha256
    assert about["forecast"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert train(tmp_path / "run", request_for(prepared_folder), events.append, ignore) == result, "it had ended"


@pytest.mark.usefixtures("quick_choice")
def test_a_run_need_not_translate(tmp_path: Path, prepared_folder: Path) -> None:
    result = train(tmp_path / "run", request_for(prepared_folder, "train.valid_translations=0"), ignore, ignore)
    assert "bleu" not in result
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.usefixtures("quick_choice")
def test_a_terminal_shows_bars_and_every_event_is_described(tmp_path: Path, prepared_folder: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, highlight=False)
    display = TrainingDisplay(console, tmp_path, quiet=False, tensorboard=False)
    events = [
        OutOfMemoryEvent(step=3, micro_limit=500),
        BadStepEvent(step=4, in_a_row=1),
        DamagedEvent(step=5, fault="x"),
        ResumedEvent(step=6),
    ]
    with display.live:
        display.show_stage("reading", 10, None)
        train(tmp_path / "run", request_for(prepared_folder), display.show_event, display.show_stage)
        for event in events:
            display.show_event(event)
    shown = screen.getvalue()
    for part in (
        "parameters",
        "step 12 of 12",
        "loss ",
        "█",
        "” → “",
        "validation perplexity",
        "tokens/s",
        "out of memory; passes have at most 500",
        "NaN or infinite",
        "is damaged (x)",
        "resumed from step 6",
    ):
        assert part in shown, part


@pytest.mark.usefixtures("quick_choice")
def test_tensorboard_gets_the_curves_of_the_log(
    tmp_path: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path / "run", request_for(prepared_folder), ignore, ignore)
    events = read_events(tmp_path / "run" / LOG)
    with show_training(tmp_path, quiet=True, tensorboard=True) as (on_event, _):
        assert not (tmp_path / "tensorboard").exists(), "a run refuses a folder that is not empty"
        for event in events:
            on_event(event)
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    written = {point.step: point.value for point in curves.Scalars("valid/loss")}
    assert written == pytest.approx({event.step: event.loss for event in events if isinstance(event, ValidationEvent)})
    assert {"train/loss", "train/learning_rate", "valid/perplexity"} <= set(curves.Tags()["scalars"])

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"--tensorboard needs the package tensorboard: .*pip install tensor"):
        TrainingDisplay(Console(), tmp_path, quiet=False, tensorboard=True)


def test_a_curve_of_blocks_shows_all_values() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 30) == "█▇▆▅▄▃▂▁"
    assert sparkline([5, 5, float("nan")], 30) == "▁▁"
    assert sparkline([], 30) == ""
    assert sparkline([4.0] * 50 + [0.0] * 50, 10) == "█████▁▁▁▁▁"


def test_resuming_removes_the_events_after_the_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path, ignore)
    for step in (1, 2, 3):
        journal.record(SavedEvent(step=step))
    with (tmp_path / LOG).open("a") as log:
        log.write('{"event": "st')  # cut by a kill
    journal.record(ResumedEvent(step=2))
    assert [event.step for event in read_events(tmp_path / LOG)] == [1, 2, 2]


REFUSED: list[tuple[list[str], str]] = [
    ([], "nothing to train on: give two files"),
    (["tatoeba-40k", "--size", "huge"], "--size is 'huge', must be one of base, big, small, tiny"),
    (["tatoeba-40k", "--budget", "soon"], "--budget is 'soon', must be a time such as 90s"),
    (["tatoeba-40k", "--budget", "2m", "--epochs", "3"], "--budget and --epochs both say how long to train"),
    (["tatoeba-40k", "--budget", "2m", "--set", "train.max_steps=3"], "--budget and train.max_steps both say how long"),
    (["tatoeba-40k", "--epochs", "0"], "--epochs is 0.0, must be above 0"),
    (["tatoeba-40k", "--schedule", "steps"], "train.schedule is 'steps', must be one of paper, inverse-root, cosine"),
    (["tatoeba-40k", "--config", "none.json"], "none.json cannot be read"),
    (["a.de", "a.en", "--valid", "v.de"], "--valid needs two files, but got v.de and --out: give source and target"),
    (["tatoeba-40k", "--device", "tpu"], "--device is 'tpu', must be cpu or cuda"),
    (["tatoeba-40k", "--passes", "fast"], "--passes is 'fast', must be written or plain: leave it out"),
    (
        ["tatoeba-40k", "--set", "train.max_stepz=3"],
        "'max_stepz' is not a field of section train: did you mean max_steps?",
    ),
    (["tatoeba-40k", "--from", "nothing"], "nothing/config.json cannot be read (No such file or directory)"),
    (["tatoeba-40k", "--batch-tokens", "many"], "data.batch_tokens is 'many', must be a whole number"),
    (["nothing.de", "nothing.en"], "nothing.de is not a file"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_input_is_refused_in_one_line_and_leaves_no_run(tmp_path: Path, arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "transduce", "train", *arguments, "--out", "run", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_request_is_refused(tmp_path: Path, prepared_folder: Path) -> None:
    claim(tmp_path / "run", request_for(prepared_folder))
    claim(tmp_path / "run", request_for(prepared_folder))
    path = tmp_path / "run" / REQUEST
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "passes"}))
    claim(tmp_path / "run", request_for(prepared_folder))  # an older version did not write this field
    with pytest.raises(ConfigError, match=r"holds a run with other arguments \(settings differ\)"):
        claim(tmp_path / "run", request_for(prepared_folder, "train.seed=2"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="is not empty and is not a training run: choose another --out"):
        claim(tmp_path / "other", request_for(prepared_folder))


@pytest.mark.usefixtures("quick_choice")
def test_a_run_can_begin_with_a_model(tmp_path: Path, prepared_folder: Path) -> None:
    train(tmp_path / "first", request_for(prepared_folder), ignore, ignore)
    first, _ = load_model(tmp_path / "first" / "model")
    data = corpus_of(write_pairs(tmp_path, "more", sentences(100, seed=3)))
    request = Request(
        data=data,
        from_model=str(tmp_path / "first"),
        device="cpu",
        settings=[*SETTINGS, "train.max_steps=4", "train.rate_factor=1e-30"],
    )
    train(tmp_path / "second", request, ignore, ignore)
    second, config = load_model(tmp_path / "second" / "model")
    assert config.model == first.config
    for name, W in second.weights().items():
        torch.testing.assert_close(W, first.weights()[name])


@pytest.mark.usefixtures("quick_choice")
def test_a_run_that_has_not_ended_can_translate(tmp_path: Path, prepared_folder: Path) -> None:
    """With the weights of its best validation so far, which its events name."""
    run, losses = tmp_path / "run", dict[int, float]()

    def interrupt(event: Event) -> None:
        if isinstance(event, ValidationEvent):
            losses[event.step] = event.loss
            translation = Translator.load(run, device="cpu").translate(["das Haus"])
            assert len(translation) == 1
            if event.step == 8:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, request_for(prepared_folder), interrupt, ignore)
    best = min(losses, key=lambda step: losses[step])
    weights = load_checkpoint(run / "snapshots" / f"step-{best:08d}")[0]
    assert_same_bits(dict(load_model(model_folder(run))[0].weights()), weights)
    done = subprocess.run(
        [sys.executable, "-m", "transduce", "translate", str(run), "--device", "cpu"],
        input="das Haus\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"{run} has not ended: this is its best checkpoint so far" in done.stderr
    train(run, request_for(prepared_folder), ignore, ignore)
    assert model_folder(run) == run / "model"
    assert not (run / "best-so-far").exists()


@pytest.mark.usefixtures("quick_choice")
def test_tuning_begins_with_the_parent_and_is_never_worse(tmp_path: Path, prepared_folder: Path) -> None:
    train(tmp_path / "first", request_for(prepared_folder, "train.max_steps=40"), ignore, ignore)
    settings = ["train.checkpoint_steps=2", "data.batch_tokens=300", "train.max_steps=4", "train.average_last=2"]
    events: list[Event] = []
    request = Request(
        prepared=str(prepared_folder), from_model=str(tmp_path / "first"), device="cpu", settings=settings
    )
    result = train(tmp_path / "second", request, events.append, ignore)
    validations = [event for event in events if isinstance(event, ValidationEvent)]
    before = json.loads((tmp_path / "first" / "result.json").read_text())
    assert [event.step for event in validations] == [0, 2, 4]
    assert validations[0].loss == pytest.approx(before["candidates"][before["taken"]]["loss"], rel=1e-5)
    losses = [candidate["loss"] for candidate in result["candidates"].values()]
    assert result["candidates"][result["taken"]]["loss"] == min(losses) <= validations[0].loss
    config = Settled.from_json((tmp_path / "second" / "run.json").read_text()).config
    rates = [event.learning_rate for event in events if isinstance(event, StepEvent)]
    parent_config = load_model(tmp_path / "first" / "model")[1]
    assert config.train.schedule == "linear"
    assert max(rates) <= scheduled_rate(40, parent_config.model.d_model, parent_config.train) * 1.0001
    worse = replace(request, settings=[*settings, "train.rate_factor=1e4"])
    bad = train(tmp_path / "third", worse, ignore, ignore)
    assert bad["candidates"][bad["taken"]]["steps"] == [0]


@pytest.mark.usefixtures("quick_choice")
def test_samples_show_the_attention_of_their_translations(tmp_path: Path, prepared_folder: Path) -> None:
    events: list[Event] = []
    train(tmp_path / "run", request_for(prepared_folder, "train.valid_translations=4"), events.append, ignore)
    scores = [event.translations for event in events if isinstance(event, ValidationEvent)]
    for score in scores:
        assert score is not None
        for sample in score.samples:
            attention = sample["attention"]
            assert [len(row) for row in attention["weights"]] == [len(attention["source"])] * len(attention["target"])
            assert np.allclose(np.sum(attention["weights"], axis=1), 1, atol=0.01 * len(attention["source"]))
            assert "".join(attention["target"][:-1]).replace("▁", " ").strip() == sample["translation"].strip()


@pytest.mark.usefixtures("quick_choice")
def test_epochs_are_readings_of_the_text(tmp_path: Path, prepared_folder: Path) -> None:
    settings = [setting for setting in request_for(prepared_folder).settings if "max_steps" not in setting]
    request = replace(request_for(prepared_folder), epochs=1.5, settings=settings)
    events: list[Event] = []
    train(tmp_path / "run", request, events.append, ignore)
    last = [event for event in events if isinstance(event, StepEvent)][-1]
    assert last.epoch == pytest.approx(1.5, abs=0.1)


def test_settings_come_from_a_file_and_those_of_the_data_do_not(tmp_path: Path) -> None:
    config = override(small(), ["train.max_steps=77", "model.dropout=0.25", "train.patience=none"])
    (tmp_path / "run.json").write_text(json.dumps({"config": json.loads(config.to_json()), "choices": {}}))
    settings = settings_from_file(tmp_path / "run.json")
    assert not any("vocab_size" in setting for setting in settings)
    sizes = {"source_vocab_size": 8000, "target_vocab_size": 8000}
    assert override(with_model(base(), **sizes), settings) == config
    assert "train.max_steps=77" not in settings_from_file(tmp_path / "run.json", with_steps=False)
    (tmp_path / "a.toml").write_text("[model]\ndropout = 0.3\n[train]\nschedule = 'cosine'\n")
    assert settings_from_file(tmp_path / "a.toml") == ["model.dropout=0.3", "train.schedule=cosine"]
    (tmp_path / "b.toml").write_text("[model]\ndroput = 0.3\n")
    with pytest.raises(ConfigError, match="did you mean dropout"):
        settings_from_file(tmp_path / "b.toml")
