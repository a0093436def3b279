"""The trainer: steps follow the recipe, a resumed run has the bits of an uninterrupted one, faults lose nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.support.training import CPU, assert_same_bits, config_for, run_to_the_end, trainer_for, weights_of
from transduce import Transformer, make_batch, with_model
from transduce.data.prepare import Prepared
from transduce.errors import DataError
from transduce.model_folder.format import average, checkpoints, fault_of, load_checkpoint, save_checkpoint
from transduce.training.gradients import TrainingError
from transduce.training.journal import BadStepEvent, DamagedEvent, Event, OutOfMemoryEvent, ResumedEvent, StepEvent
from transduce.training.recipe import adam, learning_rate, loss
from transduce.training.share import Share, n_positions
from transduce.training.snapshots import CHECKPOINTS, State
from transduce.training.speed import measure_rates, micro_tokens_that_fit, speed_of
from transduce.training.trainer import BAD_BATCHES, Stopped, Trainer
from transduce.training.validation import ValidationScore

HAS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux")


def first_share(trainer: Trainer, step: int = 0) -> Share:
    return next(iter(trainer.shares(step)))


@pytest.mark.parametrize(("limit", "n_passes"), [(None, 1), (40, 3), (1, 12)])
def test_passes_that_can_join_are_filled_up_to_the_limit(
    tmp_path: Path, prepared: Prepared, limit: int | None, n_passes: int
) -> None:
    """As on a GPU: the parts of a step in order, each once, and no pass larger than the limit."""
    trainer = trainer_for(tmp_path, prepared, config_for("data.n_shapes=4"))
    batches = [tuple(torch.randint(3, 300, (2, 7)) for _ in range(3)) for _ in range(6)]
    share = Share(list(range(6)), batches, 1)  # type: ignore[arg-type]
    single = list(trainer.gradients._passes_of(share, limit))
    assert all(len(one.parts) == 1 for one in single)
    trainer.gradients.passes = SimpleNamespace(joins=True)  # type: ignore[assignment]
    joined = list(trainer.gradients._passes_of(share, limit))
    for side in range(3):
        rows = [row.tolist() for one in joined for part in one.parts for row in part[side]]
        assert rows == [row.tolist() for one in single for row in one.parts[0][side]]
    room = CPU.micro_tokens if limit is None else limit
    assert all(one.n_positions <= room or len(one.parts) == 1 for one in joined)
    assert len(joined) == len({one.place for one in joined}), "each pass has its own seed"
    assert len(joined) == n_passes


@pytest.mark.parametrize("way", ["plain", pytest.param("written", marks=HAS_TRITON)])
def test_a_step_follows_the_recipe(tmp_path: Path, prepared: Prepared, way: Literal["plain", "written"]) -> None:
    """By hand: all pairs of the step in one batch, the loss per token, Adam with the rate of equation 3."""
    config = with_model(config_for(), dropout=0.0, d_k=16, d_v=16)
    trainer = trainer_for(tmp_path, prepared, config, choices=replace(CPU, way=way))
    model = Transformer(config.model)
    model.load_weights(weights_of(trainer))
    optimiser = adam(model.parameters(), config.train)
    for step in (1, 2, 3):
        share = first_share(trainer, step - 1)
        assert len(share.batches) > 1, "the step must have several micro-batches"
        trainer.take_step(step, share)
        epoch = trainer.layout.epoch(0)
        rows = [int(row) for micro in epoch.step(step - 1) for row in micro.rows]
        pairs = [tuple(side.tolist() for side in prepared.train.pair(row)) for row in rows]
        batch = make_batch(pairs, config.model)
        source_BS, target_in_BT, target_out_BT = (torch.from_numpy(ids) for ids in batch[:3])
        logits_BTV = model(source_BS, target_in_BT).logits_BTV
        loss_sum, n_tokens = loss(logits_BTV, target_out_BT, 0.1, 0)
        assert int(n_tokens) == share.n_target_tokens
        optimiser.zero_grad()
        (loss_sum / n_tokens).backward()
        optimiser.param_groups[0]["lr"] = learning_rate(step, config.model.d_model, config.train.warmup_steps)
        optimiser.step()
    for name, W in trainer.model.weights().items():
        torch.testing.assert_close(W, model.weights()[name], rtol=2e-4, atol=2e-6)


def test_gradients_are_clipped_to_the_norm(tmp_path: Path, prepared: Prepared) -> None:
    norms = []
    for clip in (None, 0.01):
        config = config_for() if clip is None else config_for(f"train.clip_norm={clip}")
        trainer = trainer_for(tmp_path, prepared, config)
        trainer.take_step(1, first_share(trainer))
        gradients = [p.grad for p in trainer.parameters if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("stop", [1, 4, 7, 11])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path, prepared: Prepared, stop: int) -> None:
    """Dropout is on. A run looks for a request to stop when it logs, so here it logs every step."""
    config = config_for("train.max_bad_steps=1")
    whole, whole_choice = run_to_the_end(tmp_path / "whole", prepared, config)

    def stop_at_step(event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == stop:
            stopped.stop_requested = True

    stopped = trainer_for(tmp_path / "stopped", prepared, config, stop_at_step)
    with pytest.raises(Stopped, match=f"stopped after step {stop}, which is saved: run the same command to resume"):
        stopped.run()
    resumed, resumed_choice = run_to_the_end(tmp_path / "stopped", prepared, config)
    assert_same_bits(weights_of(resumed), weights_of(whole))
    assert resumed_choice == whole_choice
    assert resumed.state.losses == whole.state.losses
    assert resumed.state.n_tokens == whole.state.n_tokens
    newest = [checkpoints(tmp_path / name / CHECKPOINTS)[0] for name in ("stopped", "whole")]
    for ours, other in zip(*(load_checkpoint(folder)[:2] for folder in newest), strict=True):
        assert_same_bits(ours, other)


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, prepared: Prepared) -> None:
    config = config_for()
    whole, _ = run_to_the_end(tmp_path, prepared, config)
    newest, older = checkpoints(tmp_path / CHECKPOINTS)
    for name, damage in [("weights.safetensors", b"x"), ("manifest.json", b"{"), ("state.json", b"")]:
        data = (newest / name).read_bytes()
        (newest / name).write_bytes(data[: len(data) // 2] + damage)
        assert fault_of(newest) is not None
        events: list[Event] = []
        trainer = trainer_for(tmp_path, prepared, config, events.append)
        trainer.resume()
        assert [type(event) for event in events][:2] == [DamagedEvent, ResumedEvent]
        assert trainer.state.step == 8
        assert not newest.exists()
        trainer, _ = run_to_the_end(tmp_path, prepared, config)
        assert_same_bits(weights_of(trainer), weights_of(whole))
    assert older.exists()


def test_averaging_is_the_mean_of_the_weights(tmp_path: Path) -> None:
    parts = [{"a": torch.randn(3, 5), "b": torch.randn(7)} for _ in range(3)]
    folders = [tmp_path / f"step-{i}" for i in range(3)]
    for folder, weights in zip(folders, parts, strict=True):
        save_checkpoint(folder, weights, {}, {})
    for name, W in average(folders).items():
        torch.testing.assert_close(W, torch.stack([part[name] for part in parts]).mean(0))


def test_the_final_model_is_the_best_of_its_candidates(tmp_path: Path, prepared: Prepared) -> None:
    trainer, choice = run_to_the_end(tmp_path, prepared, config_for())
    assert choice.candidates["average of the last"].steps == [8, 12]
    losses = {name: candidate.loss or 0.0 for name, candidate in choice.candidates.items()}
    assert choice.taken == min(losses, key=lambda name: losses[name])
    score = trainer.validation_loss()
    assert score is not None
    assert score.loss == losses[choice.taken] > 0


def test_patience_ends_a_run(tmp_path: Path, prepared: Prepared) -> None:
    config = config_for("train.max_steps=4000", "train.patience=2", "train.rate_factor=1e-30")
    trainer, _ = run_to_the_end(tmp_path, prepared, config)
    assert trainer.state.step <= 16, "at such a rate the loss does not improve"


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert ValidationScore(math.log(7), 0.5).perplexity == pytest.approx(7)
    assert State(losses={1: 2.0, 2: 1.0, 3: 1.5}).n_since_best() == 1


# Faults


class Fault:
    """Replaces the loss of chosen passes."""

    def __init__(
        self, trainer: Trainer, is_due: Callable[[tuple[Tensor, ...]], bool], act: Callable[[Tensor], Tensor]
    ) -> None:
        self.original, self.is_due, self.act = trainer.gradients.loss_of, is_due, act
        trainer.gradients.loss_of = self  # type: ignore[assignment]

    def __call__(self, *ids: Tensor) -> Tensor:
        loss_sum: Tensor = self.original(*ids)
        return self.act(loss_sum) if self.is_due(ids) else loss_sum


def out_of_memory(_: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("planted")


def test_running_out_of_memory_splits_the_pass_and_loses_no_example(tmp_path: Path, prepared: Prepared) -> None:
    config = with_model(config_for("train.max_steps=3"), dropout=0.0)
    whole = trainer_for(tmp_path / "whole", prepared, config)
    whole.run()
    events: list[Event] = []
    split = trainer_for(tmp_path / "split", prepared, config, events.append)
    Fault(split, lambda ids: n_positions(ids) > 80, out_of_memory)
    split.run()
    limits = [event.micro_limit for event in events if isinstance(event, OutOfMemoryEvent)]
    assert limits
    assert limits[-1] <= 80
    assert split.state.n_tokens == whole.state.n_tokens
    for name, W in split.model.weights().items():
        torch.testing.assert_close(W, whole.model.weights()[name], rtol=2e-3, atol=1e-5)
    assert load_checkpoint(checkpoints(tmp_path / "split" / CHECKPOINTS)[0])[2]["micro_limit"] == limits[-1]


def test_the_size_of_a_pass_that_fits_is_found_before_the_first_step(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for())
    assert micro_tokens_that_fit(trainer) == CPU.micro_tokens
    before = weights_of(trainer)
    Fault(trainer, lambda ids: n_positions(ids) > 100, out_of_memory)
    assert 40 <= micro_tokens_that_fit(trainer) <= 100
    assert_same_bits(weights_of(trainer), before)
    assert trainer.state == State()


def test_measuring_speed_changes_nothing(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for())
    before = weights_of(trainer)
    speed = speed_of(trainer, measure_rates(trainer, 0.05))
    assert speed.seconds_per_step > 0
    assert speed.tokens_per_second > 0
    assert_same_bits(weights_of(trainer), before)
    assert trainer.state == State()
    assert not any(trainer.optimiser.state.values())


def test_speed_is_measured_with_the_share_of_one_rank(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for())
    whole, share = first_share(trainer), next(iter(trainer.shares(0, 0, 2)))
    assert share.numbers == whole.numbers[::2]
    assert share.n_target_tokens == whole.n_target_tokens
    one, two = (speed_of(trainer, measure_rates(trainer, 0.2, n_ranks)) for n_ranks in (1, 2))
    assert two.tokens_per_second > one.tokens_per_second


def test_a_pair_that_does_not_fit_at_all_ends_the_run(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for())
    Fault(trainer, lambda ids: True, out_of_memory)
    with pytest.raises(TrainingError, match=r"one pair of .* tokens does not fit into memory: choose a smaller --size"):
        trainer.run()


def test_a_step_with_a_nan_is_skipped_and_many_of_them_end_the_run(tmp_path: Path, prepared: Prepared) -> None:
    config = config_for("train.max_steps=4", "train.max_bad_steps=3")
    events: list[Event] = []
    trainer = trainer_for(tmp_path, prepared, config, events.append)
    before = weights_of(trainer)
    Fault(trainer, lambda ids: True, lambda loss_sum: loss_sum * float("nan"))
    trainer.take_step(1, first_share(trainer))
    assert_same_bits(weights_of(trainer), before)
    trainer.begin(config, trainer.group)
    with pytest.raises(
        TrainingError, match=r"3 steps in a row gave a loss or gradient that is NaN or infinite, .*warmup_steps"
    ):
        trainer.run()
    assert [event.step for event in events if isinstance(event, BadStepEvent)] == [3]
    kept = json.loads((tmp_path / BAD_BATCHES / "step-00000003.json").read_text())
    rows = [int(row) for micro in trainer.layout.epoch(0).step(2) for row in micro.rows]
    assert kept["rows"] == rows
    assert kept["pairs"][0] == [side.tolist() for side in prepared.train.pair(rows[0])]


def test_a_run_continues_after_one_bad_step(tmp_path: Path, prepared: Prepared) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for("train.max_bad_steps=5"))
    n_calls = iter(range(10**6))
    Fault(trainer, lambda ids: next(n_calls) == 5, lambda loss_sum: loss_sum * float("inf"))
    trainer.run()
    assert trainer.state.step == 12
    assert all(torch.isfinite(W).all() for W in trainer.model.weights().values())


def test_a_full_disk_is_reported_and_saved_checkpoints_stay(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(tmp_path, prepared, config_for())
    n_calls = iter(range(100))

    def full(*arguments: Any) -> None:
        if next(n_calls) >= 3:
            raise DataError(f"{arguments[0]} cannot be written (No space left on device): free some space")
        save_checkpoint(*arguments)

    monkeypatch.setattr("transduce.training.snapshots.save_checkpoint", full)
    with pytest.raises(DataError, match="No space left on device"):
        trainer.run()
    monkeypatch.undo()
    whole, _ = run_to_the_end(tmp_path / "whole", prepared, config_for())
    resumed, _ = run_to_the_end(tmp_path, prepared, config_for())
    assert_same_bits(weights_of(resumed), weights_of(whole))
