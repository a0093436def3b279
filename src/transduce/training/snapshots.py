"""Checkpoints to resume from, snapshots to average, and the choice of the final model.

A checkpoint holds weights, moments and state; the newest two are kept. A snapshot holds the weights of a milestone
alone, so many of them can be kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.model import Transformer
from transduce.model_folder.format import (
    BEST_SO_FAR,
    average,
    checkpoints,
    fault_of,
    load_checkpoint,
    save_checkpoint,
    step_of,
)
from transduce.training.journal import Candidate, DamagedEvent, FinalChoice, OnEvent
from transduce.training.validation import ValidationScore

CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"
KEEP_LAST = 2
"""Checkpoints that are kept: the newest, and one more in case the newest is damaged."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps for each parameter."""


@dataclass
class State:
    """What a checkpoint holds beside weights and moments."""

    step: int = 0
    n_tokens: int = 0
    """Target tokens so far, end marks included."""
    seconds: float = 0.0
    micro_limit: int | None = None
    """The most positions of one pass, padding included. None until a pass runs out of memory."""
    losses: dict[int, float] = field(default_factory=dict)
    """Validation loss by step."""

    def best_step(self) -> int | None:
        return min(self.losses, key=lambda step: self.losses[step], default=None)

    def n_since_best(self) -> int:
        """Validations after the best one."""
        best = self.best_step()
        return sum(step > best for step in self.losses) if best is not None else 0

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> State:
        return cls(**{**values, "losses": {int(step): value for step, value in values["losses"].items()}})


class Snapshots:
    """The folders checkpoints/ and snapshots/ of a run."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints, self.snapshots, self.best = folder / CHECKPOINTS, folder / SNAPSHOTS, folder / BEST_SO_FAR

    def save(
        self, model: Transformer, optimiser: torch.optim.Adam, state: State, *, is_milestone: bool, n_average: int
    ) -> None:
        """Saves a checkpoint, at a milestone a snapshot too, and removes those that are no longer needed.
        `n_average`: the number of snapshots that an average takes."""
        weights = model.weights()
        if is_milestone:
            save_checkpoint(self.snapshots / name_of(state.step), weights, {}, {"step": state.step})
        save_checkpoint(self.checkpoints / name_of(state.step), weights, moments_of(model, optimiser), asdict(state))
        for old in checkpoints(self.checkpoints)[KEEP_LAST:]:
            shutil.rmtree(old)
        steps, best = self.steps(), state.best_step()
        kept = {*steps[-n_average:], *up_to(best, steps)[-n_average:]}
        for old in checkpoints(self.snapshots):
            if step_of(old) not in kept:
                shutil.rmtree(old)

    def save_best(self, save: Callable[[Path], None]) -> None:
        """Replaces the model folder of the best validation so far. `save` writes a model folder."""
        new = self.best.with_suffix(".new")
        shutil.rmtree(new, ignore_errors=True)
        save(new)
        shutil.rmtree(self.best, ignore_errors=True)
        new.rename(self.best)

    def remove_best(self) -> None:
        """Once the final model exists."""
        for folder in (self.best, self.best.with_suffix(".new")):
            shutil.rmtree(folder, ignore_errors=True)

    def load_newest(
        self, model: Transformer, optimiser: torch.optim.Adam, device: torch.device, on_event: OnEvent
    ) -> State | None:
        """Loads the newest checkpoint that is not damaged; None if there is none."""
        for folder in checkpoints(self.checkpoints):
            if (fault := fault_of(folder)) is not None:
                on_event(DamagedEvent(step=step_of(folder), fault=fault))
                continue
            weights, moments, state = load_checkpoint(folder)
            model.load_weights(weights)
            for name, p in model.named_parameters():
                optimiser.state[p] = {key: moments[f"{name}/{key}"].to(device) for key in MOMENTS}
            return State.from_json(state)
        return None

    def remove_after(self, step: int) -> None:
        for folder in (self.checkpoints, self.snapshots):
            for path in checkpoints(folder):
                if step_of(path) > step:
                    shutil.rmtree(path)

    def steps(self) -> list[int]:
        """The steps of all snapshots, in order."""
        return sorted(step_of(path) for path in checkpoints(self.snapshots))

    def has(self, step: int) -> bool:
        return (self.snapshots / name_of(step)).exists()

    def average(self, steps: Sequence[int]) -> dict[str, Tensor]:
        return average([self.snapshots / name_of(step) for step in steps])


def moments_of(model: Transformer, optimiser: torch.optim.Adam) -> dict[str, Tensor]:
    tensors = {}
    for name, p in model.named_parameters():
        for key, value in optimiser.state[p].items():
            tensors[f"{name}/{key}"] = value
    return tensors


def up_to(last: int | None, steps: Sequence[int]) -> list[int]:
    return [step for step in steps if last is not None and step <= last]


def choose_final_model(
    model: Transformer,
    snapshots: Snapshots,
    best: int | None,
    n_average: int,
    validation_loss: Callable[[], ValidationScore | None],
) -> FinalChoice:
    """Leaves the best candidate in the model: the average of the last snapshots, of those up to the best, or the best.
    `best`: the step with the lowest validation loss."""
    steps = snapshots.steps()
    averages = {"average of the last": steps[-n_average:]}
    if best is not None:
        averages["average up to the best"] = up_to(best, steps)[-n_average:]
        averages["best"] = [best]
    candidates: dict[str, Candidate] = {}
    for name, chosen in averages.items():
        if any(chosen == candidate.steps for candidate in candidates.values()):
            continue
        model.load_weights(snapshots.average(chosen))
        score = validation_loss()
        candidates[name] = Candidate(
            steps=chosen,
            loss=score and score.loss,
            perplexity=score and score.perplexity,
            accuracy=score and score.accuracy,
        )
    taken = min(candidates, key=lambda name: candidates[name].loss or 0.0)
    model.load_weights(snapshots.average(candidates[taken].steps))
    return FinalChoice(taken=taken, candidates=candidates)


def name_of(step: int) -> str:
    return f"step-{step:08d}"
