"""The training loop, for one process or many. It may be killed at any moment and resumes with the same bits.

No random state is carried from step to step: the batches of a step and its dropout follow from the seed and the number
of the step. So a checkpoint is weights, Adam's moments and a few counters.
"""

# Axes: B sentences, S source positions, T target positions.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import RunConfig
from transduce.data.batches import Batch, Examples, prefetch, steps
from transduce.data.plan import Layout, make_layout
from transduce.errors import TransduceError
from transduce.model import Transformer
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.gradients import StepGradients, TrainingError
from transduce.training.journal import (
    BadStepEvent,
    FinalChoice,
    OnEvent,
    ResumedEvent,
    SavedEvent,
    StepEvent,
    TranslationScore,
    ValidationEvent,
)
from transduce.training.pace import CHANGED, Pace
from transduce.training.passes.written import GraphPasses, ThreadPasses, written_passes
from transduce.training.recipe import adam, scheduled_rate
from transduce.training.share import Share, Tensors
from transduce.training.snapshots import Snapshots, State, choose_final_model, name_of
from transduce.training.validation import ScoreTranslations, Validation, ValidationScore
from transduce.training.window import Averages, Window, memory_bytes

LOG_EVERY = 20
BAD_BATCHES = "bad-batches"


class Stopped(TransduceError):
    """The run stopped because the user interrupted it."""


class Trainer:
    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        choices: Choices,
        train: Examples,
        valid: Examples,
        group: Group,
        on_event: OnEvent,
        first_weights: Mapping[str, Tensor] | None = None,
        decode_pairs: Callable[[list[list[list[int]]]], Any] = lambda pairs: pairs,
        score_translations: ScoreTranslations | None = None,
        save_best: Callable[[Transformer, Path], None] | None = None,
    ) -> None:
        """The caller must call `choices.configure_process`. `decode_pairs` turns ids into text for bad-batches/.
        `save_best` writes a model folder with the weights of the best validation so far."""
        self.folder, self.config, self.choices, self.group = folder, config, choices, group
        self.examples, self.on_event, self.first_weights = train, on_event, first_weights
        self.decode_pairs, self.save_best, self.stop_requested = decode_pairs, save_best, False
        self.model = Transformer(config.model).to(group.device)
        self.parameters = list(self.model.parameters())
        self.layout = self._layout_of(train, config.train.seed)
        valid = valid.sample(config.train.valid_sample or len(valid))
        valid_layout = self._layout_of(valid, seed=0) if len(valid) else None
        self.validation = Validation(self.model, config.model, choices, valid, valid_layout, score_translations)
        self.passes = self._written_passes() if choices.way == "written" else None
        self.gradients = StepGradients(self.model, self.passes, choices, on_event)
        self.snapshots = Snapshots(folder)
        self.begin(config, group)

    def _layout_of(self, examples: Examples, seed: int) -> Layout:
        settings, micro_tokens = self.config.data, self.choices.micro_tokens
        return make_layout(
            *examples.lengths(),
            batch_tokens=settings.batch_tokens,
            n_shapes=settings.n_shapes,
            seed=seed,
            micro_tokens=micro_tokens,
        )

    def _written_passes(self) -> GraphPasses | ThreadPasses:
        return written_passes(
            self.model,
            int(self.layout.shape_K2.max()),
            torch.bfloat16 if self.choices.dtype == "bfloat16" else torch.float32,
            self.choices.micro_tokens,
            self.config.train.label_smoothing,
            self.choices.n_threads,
        )

    def begin(self, config: RunConfig, group: Group, pace: Pace | None = None) -> None:
        """Resets everything to the state before the first step. `config` may differ in its training settings only.
        `pace`: keeps a budget."""
        assert (config.model, config.data) == (self.config.model, self.config.data)
        self.config, self.group, self.pace = config, group, pace
        self.model.load_weights(self.first_weights or initial_weights(config))
        self.optimiser = adam(self.parameters, config.train)
        self.gradients.begin(config.train, group.device)
        self.state, self.window = State(), Window(group)

    # The loop

    def run(self) -> None:
        """Runs from the newest intact checkpoint, or from the start, to the last step or until patience runs out."""
        self.resume()
        if self.first_weights is not None and self.state.step == 0 and not self.state.losses:
            self._save_and_validate_parent()
        self._follow_plan(may_decide=False)
        began = time.monotonic() - self.state.seconds
        shares = prefetch(self.shares(self.state.step, self.group.rank, self.group.n_ranks))
        while self.state.step < self.config.train.max_steps and not self._is_out_of_patience():
            share = next(shares)
            self.take_step(self.state.step + 1, share)
            self.state.step += 1
            self.state.n_tokens += share.n_target_tokens
            if self.state.step % self._log_every() == 0 or self._is_milestone():
                self.state.seconds = time.monotonic() - began
                self._log_and_plan()
                self._save_and_validate()
        shares.close()  # type: ignore[attr-defined]  # a generator has it

    def _save_and_validate_parent(self) -> None:
        """The model whose weights the run began with is a candidate for the final model, as step 0."""
        self.save(is_milestone=True)
        self.validate()
        self.window.restart_clock()

    def _save_and_validate(self) -> None:
        """At a milestone, or if the user requested to stop."""
        is_milestone, stop_requested = self._is_milestone(), self.group.any(self.stop_requested)
        if is_milestone or stop_requested:
            self.save(is_milestone)
        if stop_requested:
            raise Stopped(f"stopped after step {self.state.step:,}, which is saved: run the same command to resume")
        if is_milestone:
            self.validate()
            self.window.restart_clock()  # tokens per second are those of steps alone

    def _is_milestone(self) -> bool:
        settings = self.config.train
        assert settings.checkpoint_steps is not None, "settled before the first step"
        return self.state.step % settings.checkpoint_steps == 0 or self.state.step == settings.max_steps

    def _log_every(self) -> int:
        """The number of steps between two lines of the log, the same on all ranks."""
        n = min(LOG_EVERY, self.config.train.max_bad_steps)
        return n if self.pace is None else min(n, self.pace.log_every)

    def _follow_plan(self, *, may_decide: bool) -> None:
        """Changes settings as the plan of the first rank says. All ranks must call this."""
        if self.pace is None:
            return
        train = self.config.train
        if self.group.is_first:
            train = self.pace.settings(self.state.step, train, may_decide=may_decide)
        values = self.group.from_first([float(getattr(train, name)) for name in CHANGED])
        changes = {name: type(getattr(train, name))(value) for name, value in zip(CHANGED, values, strict=True)}
        self.config = replace(self.config, train=replace(train, **changes))

    def shares(self, first_step: int, rank: int = 0, n_ranks: int = 1) -> Iterator[Share]:
        """A rank's share of each step from `first_step` on, counted from 0, without end."""
        for step in steps(self.examples, self.layout, self.config.model, first_step, rank, n_ranks):
            yield Share(step.numbers, [self._tensors(batch) for batch in step.batches], step.n_target_tokens)

    def _tensors(self, batch: Batch) -> Tensors:
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids) for ids in batch[:3])
        if self.group.device.type == "cuda" and self.passes is None:  # written passes pin their packed copy instead
            return source_BS.pin_memory(), target_in_BT.pin_memory(), target_out_BT.pin_memory()
        return source_BS, target_in_BT, target_out_BT

    def _is_out_of_patience(self) -> bool:
        patience = self.config.train.patience
        return patience is not None and self.state.n_since_best() >= patience

    # One step

    def take_step(self, step: int, share: Share) -> None:
        """Does not wait for the device. The first step is 1."""
        loss_sum = self.gradients.fill(step, share, self.state)
        norm, is_bad = self.apply_gradients(step)
        self.window.add(step, loss_sum, norm, is_bad, share.n_target_tokens)

    def apply_gradients(self, step: int) -> tuple[Tensor, Tensor]:
        """One step of the optimiser. Returns the norm of the gradients, and 1 if it is NaN or infinite, else 0."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.group.sum(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if (clip_norm := self.config.train.clip_norm) is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, clip_norm, norm)
        # If this is 1, Adam changes nothing. The decision is made on the device, so the step need not wait for it.
        is_bad = 1.0 - torch.isfinite(norm).float()
        self.optimiser.found_inf = is_bad  # type: ignore[attr-defined]
        self.optimiser.param_groups[0]["lr"] = self._rate(step)
        self.optimiser.step()
        return norm, is_bad

    def _rate(self, step: int) -> float:
        return scheduled_rate(step, self.config.model.d_model, self.config.train)

    # The log

    def _log_and_plan(self) -> None:
        """Reports the steps since the last call, after the plan had its chance to end the run with this step. Raises
        TrainingError after too many bad steps in a row."""
        step = self.state.step
        averages = self.window.read()
        if self.pace is not None:
            self.pace.observe_steps(averages.seconds_per_step, averages.n_steps)
        self._follow_plan(may_decide=True)
        if averages.n_bad:
            self._keep_bad_batch(averages.last_bad_step)
            self.on_event(BadStepEvent(step=averages.last_bad_step, in_a_row=averages.bad_in_a_row))
        event = StepEvent(
            step=step,
            loss=averages.loss,
            gradient_norm=averages.gradient_norm,
            learning_rate=self._rate(step),
            tokens_per_second=averages.tokens_per_second,
            memory_bytes=memory_bytes(self.group.device),
            seconds=round(self.state.seconds, 2),
            epoch=round(step / self.layout.n_steps, 3),
            seconds_per_step=averages.seconds_per_step,
            max_steps=self.config.train.max_steps,
        )
        self.on_event(event)
        if averages.bad_in_a_row >= self.config.train.max_bad_steps:
            raise self._too_many_bad_steps(averages)

    def _too_many_bad_steps(self, averages: Averages) -> TrainingError:
        return TrainingError(
            f"{averages.bad_in_a_row} steps in a row gave a loss or gradient that is NaN or infinite, the last at step "
            f"{averages.last_bad_step}: raise train.warmup_steps, set train.clip_norm=1, or look at the pairs in "
            f"{self.folder / BAD_BATCHES}; these steps did not change the weights"
        )

    def _keep_bad_batch(self, step: int) -> None:
        """Writes the pairs of a step, which follow from its number, for the user to look at."""
        if not self.group.is_first:
            return
        epoch, place = divmod(step - 1, self.layout.n_steps)
        rows = [int(row) for micro in self.layout.epoch(epoch).step(place) for row in micro.rows]
        pairs = [[side.tolist() for side in self.examples.pair(row)] for row in rows]
        path = self.folder / BAD_BATCHES / f"{name_of(step)}.json"
        path.parent.mkdir(exist_ok=True)
        content = {"step": step, "rows": rows, "pairs": self.decode_pairs(pairs)}
        path.write_text(json.dumps(content), encoding="utf-8")

    # Validation

    def validate(self) -> ValidationScore | None:
        """Scores the current weights; None if there are no validation pairs."""
        began = time.monotonic()
        score = self.validation_loss()
        if score is None:
            return None
        seconds_per_validation, began = time.monotonic() - began, time.monotonic()
        translations = self._translations()
        self.state.losses[self.state.step] = score.loss
        event = ValidationEvent(
            step=self.state.step,
            loss=score.loss,
            perplexity=score.perplexity,
            accuracy=score.accuracy,
            is_best=self.state.best_step() == self.state.step,
            translations=translations,
        )
        if event.is_best and self.group.is_first and self.save_best is not None:
            self.snapshots.save_best(partial(self.save_best, self.model))
        self.on_event(event)
        if self.pace is not None:
            self.pace.observe_validation(seconds_per_validation, time.monotonic() - began, self.config.train)
        return score

    def validation_loss(self) -> ValidationScore | None:
        return self.validation.loss(self.group, self.state.micro_limit)

    def _translations(self) -> TranslationScore | None:
        return self.validation.translations(self.group, self.config.train.valid_translations)

    # Checkpoints

    def save(self, is_milestone: bool = False) -> None:
        began = time.monotonic()
        if self.group.is_first:
            n_average = self.config.train.average_last
            self.snapshots.save(self.model, self.optimiser, self.state, is_milestone=is_milestone, n_average=n_average)
            self.on_event(SavedEvent(step=self.state.step))
        self.group.wait()
        if self.pace is not None:
            self.pace.observe_save(time.monotonic() - began)

    def resume(self) -> None:
        """Loads the newest intact checkpoint, if there is one, and removes later ones, which are damaged."""
        state = self.snapshots.load_newest(self.model, self.optimiser, self.group.device, self.on_event)
        if state is not None:
            self.state = state
            if self.pace is not None:
                self.pace.resume(state.seconds)
            self.on_event(ResumedEvent(step=state.step))
        self.group.wait()
        if self.group.is_first:
            self.snapshots.remove_after(self.state.step)
        if state is not None and self.state.step not in self.state.losses and self.snapshots.has(self.state.step):
            self.validate()  # a milestone is saved before it is validated, so a kill in between loses no training

    def finish(self) -> FinalChoice:
        """Leaves the final model in `self.model`."""
        best, n_average = self.state.best_step(), self.config.train.average_last
        choice = choose_final_model(self.model, self.snapshots, best, n_average, self.validation_loss)
        return replace(choice, translations=self._translations())


def initial_weights(config: RunConfig) -> Mapping[str, Tensor]:
    """Made on the CPU, so that they are the same on every device. The random state of the process does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return Transformer(config.model).weights()
