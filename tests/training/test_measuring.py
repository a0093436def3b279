"""Measuring the machine takes a limited time, survives a process that dies, and is done once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import config_for, ignore, request_for, trainer_for
from transduce import tiny
from transduce.data.prepare import Prepared
from transduce.training import choices, settle
from transduce.training.choices import Choices, fastest_of, fastest_on_cpu, measure_in_a_process
from transduce.training.run import train

SPEEDS: dict[tuple[choices.Dtype, int], float] = {("float32", 2): 5.0, ("float32", 1): 5.2, ("bfloat16", 2): 9.0}


def test_small_differences_of_speed_do_not_matter() -> None:
    assert fastest_of(SPEEDS, ("float32", 2)) == ("bfloat16", 2)
    assert fastest_of({key: SPEEDS[key] for key in list(SPEEDS)[:2]}, ("float32", 2)) == ("float32", 2)
    assert fastest_of({}, ("float32", 3)) == ("float32", 3)


def test_the_choice_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[float] = []

    def measure(model: Any, numbers: Any, seconds: float) -> tuple[dict[Any, float], bool]:
        calls.append(seconds)
        return SPEEDS, len(calls) > 1  # the first time, it was not complete

    monkeypatch.setattr(choices, "measure_in_a_process", measure)
    for _ in range(4):
        assert fastest_on_cpu(tiny().model, 1, 2, 7.0) == ("bfloat16", 2)
    assert calls == [7.0, 7.0], "an incomplete measurement is not kept, a complete one is"


def test_a_measurement_that_ends_early_gives_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that dies of an instruction that the machine does not have, and one that takes too long."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '[\"float32\", 2, 5.0]'\nprintf '[\"bfloat16\", 2'\n$END\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("END", "exit 132")
    assert measure_in_a_process(tiny().model, [2], 20.0) == ({("float32", 2): 5.0}, True)
    monkeypatch.setenv("END", "exec sleep 30")
    assert measure_in_a_process(tiny().model, [2], 1.0) == ({("float32", 2): 5.0}, False)


@pytest.mark.parametrize(("budget", "allowed"), [("60s", 3.0), ("10m", 20.0), ("5h", 20.0)])
def test_measuring_has_a_twentieth_of_the_budget_and_at_most_20_seconds(
    tmp_path: Path, prepared_folder: Path, monkeypatch: pytest.MonkeyPatch, budget: str, allowed: float
) -> None:
    given: list[float] = []

    class Enough(Exception):
        """The measuring has begun, and the test is over."""

    def fastest(model: Any, n_ranks: int, n_threads: Any, seconds: float) -> tuple[str, int]:
        given.append(seconds)
        return "float32", 1

    def rates(trainer: Any, seconds: float, n_ranks: int) -> None:
        given.append(seconds)
        raise Enough

    monkeypatch.setattr(choices, "fastest_on_cpu", fastest)
    monkeypatch.setattr(settle, "measure_rates", rates)
    stages: list[str] = []
    settings = [setting for setting in request_for(prepared_folder).settings if "max_steps" not in setting]
    request = request_for(prepared_folder, budget=budget)
    request.settings[:] = settings
    with pytest.raises(Enough):
        train(tmp_path / "run", request, ignore, lambda stage, done, total: stages.append(stage))
    assert given[0] <= 0.75 * allowed
    assert 0 < given[1] <= allowed
    assert stages[-1] == "measuring the speed of this machine"


def test_validation_is_the_same_with_any_number_of_threads(tmp_path: Path, prepared: Prepared) -> None:
    losses = []
    for n_threads in (1, 3):
        trainer = trainer_for(
            tmp_path, prepared, config_for(), choices=Choices("cpu", "float32", n_threads, 150, False)
        )
        score = trainer.validation_loss()
        assert score is not None
        losses.append(score)
    assert losses[0] == losses[1]
