"""Keeps a budget of time: how many steps and milestones fit, decided before the first step and again during training.

A milestone is a checkpoint with a validation. Each decision changes settings of training from one step on, and is in
plan.jsonl before it takes effect. A resumed run first repeats the decisions that it finds there, at the same steps, so
its weights are those that the uninterrupted run had.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transduce.config import RunConfig, TrainConfig
from transduce.training.dial import with_steps, with_warmup

PLAN = "plan.jsonl"
MAX_MILESTONES, MILESTONES_SHARE = 20, 0.1
"""Milestones in a run that is too short for one every ten minutes: fewer if they would take more than this share of the
time."""
USUAL_MILESTONES = 6
"""A milestone translates fewer sentences if otherwise this many would not fit."""
MARGIN = 0.02
"""The share of the remaining time that is left unplanned."""
CHANGED = ("max_steps", "checkpoint_steps", "valid_translations", "warmup_steps", "rate_factor")
"""The settings that a decision changes."""
WORTH_CHANGING = 0.03
"""A smaller change is not made. It is a share of the remaining time, or of the last quarter."""
RECENT_SHARE = 0.05
"""The share of the budget over which the time of steps is averaged."""
BETWEEN_DECISIONS = 0.02
"""The share of the budget between two decisions, except the one that ends the run."""
LOG_SHARE = 0.01
"""The share of the budget between two looks at the clock."""
MIN_STEPS = 10
"""A run with a budget has at least this many steps: it is refused if they do not fit."""
ALIGN_SECONDS = 3.0
"""For choosing the heads that align words, at the end."""


class Speed(NamedTuple):
    """What steps and milestones cost. The costs of milestones are estimates until the first one."""

    seconds_per_step: float
    seconds_per_validation: float
    """Of the loss alone."""
    seconds_per_translation: float
    seconds_per_save: float
    tokens_per_second: float
    memory_bytes: int

    def seconds_per_milestone(self, n_translations: int) -> float:
        return self.seconds_per_validation + self.seconds_per_save + n_translations * self.seconds_per_translation

    def seconds_to_finish(self, n_translations: int) -> float:
        """Three candidates for the final model are validated, and the heads that align words are chosen."""
        return ALIGN_SECONDS + 3 * self.seconds_per_validation + self.seconds_per_milestone(n_translations)


def plan_steps(
    config: RunConfig, speed: Speed, budget: float, seconds: float, step: int = 0, max_warmup: int | None = None
) -> RunConfig:
    """Fills the remaining `seconds` of a budget with steps and milestones. `step`: the last one that is done."""
    train = config.train
    seconds_to_translate = MILESTONES_SHARE * budget / USUAL_MILESTONES / 2
    n_translations = min(train.valid_translations, int(seconds_to_translate / max(speed.seconds_per_translation, 1e-9)))
    seconds_per_milestone = speed.seconds_per_milestone(n_translations)
    interval = max(budget / MAX_MILESTONES, seconds_per_milestone / MILESTONES_SHARE)
    n_milestones = max(1, round(seconds / interval))
    seconds_of_steps = (
        seconds * (1 - MARGIN) - n_milestones * seconds_per_milestone - speed.seconds_to_finish(n_translations)
    )
    n_steps = max(0 if step else MIN_STEPS, int(seconds_of_steps / speed.seconds_per_step))
    planned = with_steps(config, step + n_steps, max_warmup)
    checkpoint_steps = train.checkpoint_steps or max(1, -(-n_steps // n_milestones))
    train = replace(planned.train, checkpoint_steps=checkpoint_steps, valid_translations=n_translations)
    return replace(planned, train=train)


class Pace:
    """The clock of a run with a budget. It belongs to the first rank; the others follow its decisions."""

    def __init__(
        self, folder: Path, requested: RunConfig, speed: Speed, budget: float, spent: float, max_warmup: int
    ) -> None:
        """`requested`: the configuration before a plan changed it. `spent`: seconds of the budget so far."""
        self.path, self.requested, self.speed, self.budget = folder / PLAN, requested, speed, budget
        self.max_warmup, self.began = max_warmup, time.monotonic() - spent
        self.decisions, self.last_decision = read_plan(self.path), time.monotonic()
        self.log_every = max(1, int(LOG_SHARE * budget / speed.seconds_per_step))

    def resume(self, seconds: float) -> None:
        """Counts the seconds of training before the checkpoint from which the run resumes."""
        self.began -= seconds

    def seconds_left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def observe_steps(self, seconds_per_step: float, n_steps: int) -> None:
        """Takes the mean of recent steps, so that one slow step does not change the plan."""
        weight = min(1.0, seconds_per_step * n_steps / (RECENT_SHARE * self.budget))
        mean = (1 - weight) * self.speed.seconds_per_step + weight * seconds_per_step
        self.speed = self.speed._replace(seconds_per_step=mean)

    def observe_validation(self, seconds: float, seconds_to_translate: float, train: TrainConfig) -> None:
        self.speed = self.speed._replace(seconds_per_validation=seconds)
        if train.valid_translations:
            per_translation = seconds_to_translate / train.valid_translations
            self.speed = self.speed._replace(seconds_per_translation=per_translation)

    def observe_save(self, seconds: float) -> None:
        self.speed = self.speed._replace(seconds_per_save=seconds)

    def settings(self, step: int, train: TrainConfig, *, may_decide: bool) -> TrainConfig:
        """The settings after this step: those of a decision that was made before, or of a new one."""
        known = [changes for at, changes in self.decisions.items() if at <= step]
        if known:
            train = replace(train, **known[-1])
        if not may_decide or step <= max(self.decisions, default=0):
            return train
        changes = self._new_plan(step, train)
        is_over = changes["max_steps"] <= step < train.max_steps
        is_soon = time.monotonic() - self.last_decision < BETWEEN_DECISIONS * self.budget
        seconds_changed = abs(changes["max_steps"] - train.max_steps) * self.speed.seconds_per_step
        is_small = seconds_changed <= WORTH_CHANGING * max(self.seconds_left(), self.budget / 4)
        if not is_over and (is_soon or is_small):
            return train
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **changes}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.decisions[step], self.last_decision = changes, time.monotonic()
        return replace(train, **changes)

    def _new_plan(self, step: int, train: TrainConfig) -> dict[str, Any]:
        seconds, old_warmup = self.seconds_left(), train.warmup_steps
        planned = plan_steps(self.requested, self.speed, self.budget, seconds, step, self.max_warmup)
        if planned.train.warmup_steps < old_warmup:
            # A shorter warm-up would lower the rate once it is over, and raise it at once while it lasts.
            planned = with_warmup(planned, min(old_warmup, max(planned.train.warmup_steps, 2 * step)))
        return {name: getattr(planned.train, name) for name in CHANGED}


def read_plan(path: Path) -> dict[int, dict[str, Any]]:
    """The decisions by step, without a last line that is incomplete because the process was killed."""
    decisions = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            decisions[values.pop("step")] = values
    return decisions
