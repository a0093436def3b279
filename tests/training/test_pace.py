"""A budget of time is kept when the machine changes its speed, and a resumed run repeats what was decided."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import assert_same_bits, config_for, ignore, request_for, trainer_for, weights_of
from transduce import RunConfig, override
from transduce.data.prepare import Prepared
from transduce.training.journal import Event, StepEvent
from transduce.training.pace import PLAN, Pace, Speed, plan_steps, read_plan
from transduce.training.recipe import learning_rate
from transduce.training.run import train
from transduce.training.trainer import Stopped

SPEED = Speed(
    seconds_per_step=0.1,
    seconds_per_validation=0.4,
    seconds_per_translation=0.01,
    seconds_per_save=0.1,
    tokens_per_second=1.0,
    memory_bytes=0,
)
CONFIG = override(RunConfig(), ["train.max_steps=100000"])


class Machine:
    """A clock that runs as work is done: `slowness` says how slow the machine is at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slowness: Callable[[float], float]) -> None:
        self.now, self.slowness = 0.0, slowness
        monkeypatch.setattr("transduce.training.pace.time.monotonic", lambda: self.now)

    def work(self, seconds: float) -> float:
        """Returns the seconds that the work takes now."""
        took = seconds * self.slowness(self.now)
        self.now += took
        return took


def simulate(machine: Machine, folder: Path, budget: float, expected: Speed = SPEED) -> tuple[RunConfig, list[int]]:
    """Trains as the trainer does. Returns the configuration at the end, and the steps with a validation."""
    config = plan_steps(CONFIG, expected, budget, budget, max_warmup=4000)
    pace = Pace(folder, CONFIG, expected, budget, machine.now, 4000)
    milestones, step = [], 0
    while step < config.train.max_steps:
        seconds, n = 0.0, 0
        while n == 0 or not (step % pace.log_every == 0 or is_milestone(step, config)):
            seconds, step, n = seconds + machine.work(SPEED.seconds_per_step), step + 1, n + 1
        pace.observe_steps(seconds / n, n)
        config = replace(config, train=pace.settings(step, config.train, may_decide=True))
        if is_milestone(step, config):
            milestones.append(step)
            pace.observe_save(machine.work(SPEED.seconds_per_save))
            loss = machine.work(SPEED.seconds_per_validation)
            translations = machine.work(SPEED.seconds_per_translation * config.train.valid_translations)
            pace.observe_validation(loss, translations, config.train)
    machine.work(SPEED.seconds_to_finish(config.train.valid_translations))
    return config, milestones


def is_milestone(step: int, config: RunConfig) -> bool:
    assert config.train.checkpoint_steps is not None
    return step % config.train.checkpoint_steps == 0 or step == config.train.max_steps


MACHINES: dict[str, Callable[[float], float]] = {
    "as measured": lambda now: 1.0,
    "four times as slow from the middle": lambda now: 1.0 if now < 300 else 4.0,
    "four times as fast from the middle": lambda now: 1.0 if now < 300 else 0.25,
    "slow every other minute": lambda now: 1.0 + 3.0 * (int(now / 60) % 2),
    "measured on a busy machine": lambda now: 0.1,
    "measured on a quiet machine": lambda now: 8.0,
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_budget_is_kept_within_a_tenth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine(monkeypatch, MACHINES[name])
    config, milestones = simulate(machine, tmp_path, 600.0)
    assert machine.now == pytest.approx(600, rel=0.1)
    assert 3 <= len(milestones) <= 40
    assert milestones[-1] == config.train.max_steps


@pytest.mark.parametrize("name", ["as measured", "measured on a busy machine", "measured on a quiet machine"])
def test_the_learning_rate_has_its_peak_and_a_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The schedule follows the number of steps: about a fifth of them are warm-up, at most the paper's 4,000."""
    config, _ = simulate(Machine(monkeypatch, MACHINES[name]), tmp_path, 600.0)
    train_settings, d_model = config.train, config.model.d_model
    peak = train_settings.rate_factor * learning_rate(train_settings.warmup_steps, d_model, train_settings.warmup_steps)
    assert peak == pytest.approx(learning_rate(4000, d_model, 4000))
    expected = min(4000, train_settings.max_steps / 5)
    assert train_settings.warmup_steps == pytest.approx(expected, rel=0.3)


def test_a_machine_of_constant_speed_needs_few_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(Machine(monkeypatch, lambda now: 1.0), tmp_path, 600.0)
    assert len(read_plan(tmp_path / PLAN)) <= 5
    simulate(Machine(monkeypatch, MACHINES["slow every other minute"]), tmp_path / "..", 600.0)
    assert len(read_plan(tmp_path / ".." / PLAN)) <= 60


def test_fewer_sentences_are_translated_if_the_budget_is_short() -> None:
    slow = SPEED._replace(seconds_per_translation=0.05)
    config = config_for("train.valid_translations=200")
    assert plan_steps(config, slow, 60.0, 40.0).train.valid_translations == 10, "by hand: 0.1 * 60 / 6 / 2 = 0.5 s"
    quick = slow._replace(seconds_per_translation=0.001)
    assert plan_steps(config, quick, 60.0, 40.0).train.valid_translations == 200
    assert plan_steps(config, slow, 60.0, 0.1).train.max_steps == 10, "a run that has begun takes ten steps"


def test_a_resumed_run_repeats_the_decisions_of_the_first_one(tmp_path: Path, prepared: Prepared) -> None:
    """With dropout. A decision in the middle changes warm-up and length; the run is stopped before and after it."""
    changes = {"max_steps": 9, "checkpoint_steps": 3, "valid_translations": 0, "warmup_steps": 2, "rate_factor": 0.4}
    config = config_for("train.checkpoint_steps=3", "train.max_bad_steps=1", "train.valid_translations=0")

    def run(folder: Path, stop: int | None) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        (folder / PLAN).write_text(json.dumps({"step": 5, **changes}) + "\n")

        def stop_at_step(event: Event) -> None:
            trainer.stop_requested = isinstance(event, StepEvent) and event.step == stop

        trainer = trainer_for(folder, prepared, config, stop_at_step)
        trainer.begin(config, trainer.group, Pace(folder, config, SPEED, 1e6, 0.0, 4000))
        trainer.run()
        assert trainer.state.step == 9
        return weights_of(trainer)

    whole = run(tmp_path / "whole", None)
    for stop in (4, 5, 7):
        with pytest.raises(Stopped):
            run(tmp_path / f"stopped-{stop}", stop)
        assert_same_bits(run(tmp_path / f"stopped-{stop}", None), whole)
    plain = trainer_for(tmp_path / "plain", prepared, config)
    plain.run()
    assert plain.state.step == 12, "without a plan nothing changes"


def test_a_plan_may_end_with_an_incomplete_line(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text('{"step": 3, "max_steps": 9}\n{"step": 5, "max')
    assert read_plan(tmp_path / PLAN) == {3: {"max_steps": 9}}
    assert read_plan(tmp_path / "nothing") == {}


@pytest.mark.usefixtures("quick_choice")
def test_a_run_with_a_budget_ends_in_time_and_keeps_its_plan(tmp_path: Path, prepared_folder: Path) -> None:
    settings = [s for s in request_for(prepared_folder).settings if not s.startswith(("train.max", "train.check"))]
    request = request_for(prepared_folder, budget="12s")
    request.settings[:] = [*settings, "train.valid_translations=2"]
    began = time.monotonic()
    result = train(tmp_path / "run", request, ignore, ignore)
    assert time.monotonic() - began < 24
    assert result["steps"] >= 10
    settled = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settled["about"]["pace"]["budget"] == 12
    decisions = read_plan(tmp_path / "run" / PLAN)
    last = list(decisions.values())[-1]["max_steps"] if decisions else settled["config"]["train"]["max_steps"]
    assert result["steps"] == last
