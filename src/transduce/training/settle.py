"""All that is decided before the first step: data, configuration, device and precision, number of steps. See run.json.

It is written down once. A resumed run reads it and measures nothing again.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce import __version__
from transduce.config import PRESETS, RunConfig, override, with_model
from transduce.data import corpora
from transduce.data.prepare import Prepared, Progress, prepare
from transduce.data.subword import SUBWORDS, Subwords
from transduce.errors import ConfigError, DataError
from transduce.files import write_atomically
from transduce.model_folder.format import RUN, load_model, model_folder
from transduce.runtime import default_device, processor_name
from transduce.training.choices import Choices, choose
from transduce.training.dial import dial, with_steps
from transduce.training.distributed import Group
from transduce.training.journal import Forecast, ForecastEvent, OnEvent
from transduce.training.request import Request, parse_budget, settings_of
from transduce.training.speed import Speed, measure_speed, micro_tokens_that_fit
from transduce.training.trainer import Trainer
from transduce.training.validation import translation_scorer

PREPARED = "prepared"
MAX_MILESTONES, MIN_MILESTONES, MILESTONES_SHARE = 20, 6, 0.1
"""Checkpoints in a run that is too short for one every ten minutes: fewer if they would take more than this share of a
budget."""
CALIBRATE_SECONDS, CALIBRATE_SHARE = 2.0, 0.03
"""The time, or the share of a budget, for measuring steps. More time makes the number of steps more accurate."""
ALIGN_SECONDS = 3.0
"""For choosing the heads that align words, at the end."""
MARGIN = 0.02
"""The share of a budget that is left unplanned."""


@dataclass
class Settled:
    """The content of run.json."""

    config: RunConfig
    choices: Choices
    about: dict[str, Any]

    def to_json(self) -> str:
        values = {"config": asdict(self.config), "choices": asdict(self.choices), "about": self.about}
        return json.dumps(values, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settled:
        values = json.loads(text)
        config = RunConfig.from_json(json.dumps(values["config"]))
        return cls(config, Choices(**values["choices"]), values["about"])


class Parent(NamedTuple):
    """The model of `--from`."""

    weights: dict[str, Tensor]
    config: RunConfig
    subwords: Subwords


def settle(
    folder: Path, request: Request, n_ranks: int, began: float, on_event: OnEvent, on_progress: Progress
) -> Trainer:
    """Prepares the data, chooses the configuration, measures, and writes run.json. `began`: when the run began, by
    `time.monotonic`. Returns a trainer that is ready to begin."""
    parent = load_parent(request)
    if request.prepared is None and not (folder / PREPARED).exists():
        _prepare(folder, request, parent, on_progress)
    prepared = find_prepared(folder, request)
    if parent is not None and prepared.subwords.sha256 != parent.subwords.sha256:
        raise DataError(f"{prepared.folder} has other subwords than {request.from_model}: give the text instead")
    config, size = resolve_config(request, prepared, parent)
    longest = longest_sentence(prepared)
    choices = choose(config, request.device, n_ranks, longest, request.deterministic, request.passes)
    choices.configure_process()
    trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
    if request.batch_tokens == "auto" and (n_fit := micro_tokens_that_fit(trainer)) < choices.micro_tokens:
        choices = replace(choices, micro_tokens=max(n_fit, longest))
        trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
    budget = None if request.budget is None else parse_budget(request.budget)
    calibrate_seconds = max(CALIBRATE_SECONDS, CALIBRATE_SHARE * (budget or 0.0))
    speed = measure_speed(trainer, calibrate_seconds, n_ranks)
    if budget is not None:
        config, size = resolve_config(request, prepared, parent, speed.tokens_per_second * budget)
        if (config.model, config.data) != (trainer.config.model, trainer.config.data):
            choices = replace(choices, micro_tokens=min(choices.micro_tokens, config.data.batch_tokens))
            trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
            speed = measure_speed(trainer, calibrate_seconds, n_ranks)
    config = plan_steps(config, speed, budget, time.monotonic() - began)
    forecast = forecast_of(trainer, config, size, speed)
    about = {"forecast": asdict(forecast), "n_ranks": n_ranks, **_provenance(prepared, choices)}
    write_atomically(folder / RUN, Settled(config, choices, about).to_json() + "\n")
    on_event(ForecastEvent(forecast=forecast, choices=choices))
    return trainer


def _prepare(folder: Path, request: Request, parent: Parent | None, on_progress: Progress) -> None:
    train_corpora, valid_corpora = corpora.choose(**request.data)
    config = override(RunConfig(), [s for s in request.settings if s.strip().startswith("data.")])
    vocab_size = request.vocab_size
    if vocab_size is None and request.size in ("base", "big"):
        vocab_size = PRESETS[request.size]().model.source_vocab_size
    prepare(
        train_corpora,
        folder / PREPARED,
        config.data,
        valid=valid_corpora,
        vocab_size=vocab_size,
        with_cleaning=not request.keep_all,
        subwords=parent.subwords if parent else None,
        progress=on_progress,
    )


def find_prepared(folder: Path, request: Request) -> Prepared:
    return Prepared(request.prepared or folder / PREPARED)


def load_parent(request: Request) -> Parent | None:
    if request.from_model is None:
        return None
    folder = model_folder(Path(request.from_model))
    model, config = load_model(folder)
    return Parent(model.weights(), config, Subwords.load(folder / SUBWORDS))


def resolve_config(
    request: Request, prepared: Prepared, parent: Parent | None, max_tokens: float | None = None
) -> tuple[RunConfig, str]:
    """The configuration and the name of its size: from `--from`, `--size` or the dial, then changed by settings.
    `max_tokens`: target tokens that fit into the budget."""
    n_entries = len(prepared.subwords)
    is_on_gpu = (request.device or default_device()) == "cuda"
    n_tokens = int(max(length_N.sum() for length_N in prepared.train.lengths()))
    config, size = dial(len(prepared.train), n_tokens, is_on_gpu, request.size, max_tokens)
    if parent is not None:
        config, size = replace(config, model=parent.config.model), f"that of {request.from_model}"
    config = with_model(config, source_vocab_size=n_entries, target_vocab_size=n_entries)
    # A batch must hold at least one pair, even if a short budget asks for small batches.
    batch_tokens = max(config.data.batch_tokens, longest_sentence(prepared))
    config = replace(config, data=replace(config.data, batch_tokens=batch_tokens))
    return override(config, settings_of(request)), size


def longest_sentence(prepared: Prepared) -> int:
    """Tokens of the longest sentence, validation included: a pass must hold it."""
    lengths = [*prepared.train.lengths(), *prepared.valid.lengths()]
    return max(int(length_N.max(initial=0)) for length_N in lengths)


def make_trainer(
    folder: Path, parent: Parent | None, config: RunConfig, choices: Choices, prepared: Prepared, on_event: OnEvent
) -> Trainer:
    """A trainer for this process alone; `Trainer.begin` may give it another group."""
    group = Group(0, 1, torch.device(choices.device))

    def decode_pairs(pairs: list[list[list[int]]]) -> list[list[str]]:
        return [prepared.subwords.decode(pair) for pair in pairs]

    weights = parent.weights if parent else None
    scorer = translation_scorer(prepared, config)
    return Trainer(
        folder, config, choices, prepared.train, prepared.valid, group, on_event, weights, decode_pairs, scorer
    )


def plan_steps(config: RunConfig, speed: Speed, budget: float | None, spent: float) -> RunConfig:
    """Chooses the number of steps that fill the budget, and how often to save. `spent`: seconds of it so far."""
    train, n_milestones = config.train, MAX_MILESTONES
    if budget is not None:
        # Translations may take half of the time of milestones; a short budget translates fewer sentences.
        seconds = MILESTONES_SHARE * budget / MIN_MILESTONES / 2
        n_translations = min(train.valid_translations, int(seconds / max(speed.seconds_per_translation, 1e-9)))
        train = replace(train, valid_translations=n_translations)
        seconds_to_translate = n_translations * speed.seconds_per_translation
        seconds_per_milestone = speed.seconds_per_validation + speed.seconds_per_save + seconds_to_translate
        n_affordable = int(MILESTONES_SHARE * budget / seconds_per_milestone)
        n_milestones = max(MIN_MILESTONES, min(MAX_MILESTONES, n_affordable))
        # At the end, three candidates for the final model are validated, and the heads that align words are chosen.
        seconds_to_finish = 3 * speed.seconds_per_validation + seconds_to_translate + ALIGN_SECONDS
        remaining = budget * (1 - MARGIN) - spent - n_milestones * seconds_per_milestone - seconds_to_finish
        max_steps = int(remaining / speed.seconds_per_step)
        if max_steps < 1:
            raise ConfigError(
                f"--budget is {budget:.0f} s, of which {spent:.0f} s passed before the first step: raise it, or choose "
                "a smaller --size"
            )
        train = with_steps(replace(config, train=train), max_steps).train
    if train.checkpoint_steps is None:
        by_minutes = int(60 * train.checkpoint_minutes / speed.seconds_per_step)
        train = replace(train, checkpoint_steps=max(1, min(by_minutes, -(-train.max_steps // n_milestones))))
    return replace(config, train=train)


def forecast_of(trainer: Trainer, config: RunConfig, size: str, speed: Speed) -> Forecast:
    return Forecast(
        size=size,
        parameters=sum(p.numel() for p in trainer.parameters),
        steps=config.train.max_steps,
        seconds=round(config.train.max_steps * speed.seconds_per_step, 1),
        memory_bytes=speed.memory_bytes,
        epochs=round(config.train.max_steps / trainer.layout.n_steps, 1),
        batch_tokens=config.data.batch_tokens,
        seconds_per_step=speed.seconds_per_step,
        tokens_per_second=speed.tokens_per_second,
    )


def _provenance(prepared: Prepared, choices: Choices) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name()
        if choices.device == "cuda"
        else f"{processor_name()}, {choices.n_threads} threads",
        "versions": {"transduce": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": {
            "train": prepared.report.train.sha256,
            "valid": prepared.report.valid.sha256,
            "subwords": prepared.report.subwords_sha256,
            "files": {name: sha for corpus in prepared.report.corpora for name, sha in corpus.files.items()},
        },
    }
