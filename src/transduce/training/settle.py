"""All that is decided before the first step: data, configuration, device and precision, number of steps. See run.json.

It is written down once. A resumed run reads it and measures nothing again.
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce import __version__
from transduce.config import PRESETS, RunConfig, TrainConfig, override, with_model
from transduce.data import corpora
from transduce.data.prepare import Prepared, Progress, prepare
from transduce.data.subword import SUBWORDS, Subwords
from transduce.errors import ConfigError, DataError
from transduce.files import write_atomically
from transduce.model import Transformer
from transduce.model_folder.format import RUN, load_config, load_model, model_folder, save_model
from transduce.runtime import default_device, default_threads, processor_name
from transduce.training.choices import Choices, choose, probe
from transduce.training.dial import MIN_BATCH_TOKENS, dial, tuned, with_steps
from transduce.training.distributed import Group
from transduce.training.journal import Forecast, ForecastEvent, OnEvent
from transduce.training.pace import MAX_MILESTONES, MIN_STEPS, Pace, Speed, plan_steps
from transduce.training.request import Request, parse_budget, settings_of
from transduce.training.speed import measure_rates, micro_tokens_that_fit, speed_of
from transduce.training.trainer import Trainer
from transduce.training.validation import origin_of, translation_scorer

PREPARED = "prepared"
MEASURE_SECONDS, MEASURE_SHARE = 20.0, 0.05
"""The highest time for measuring this machine, and the highest share of a budget."""
CHOICE_SHARE = 0.75
CALIBRATE_SECONDS, CALIBRATE_SHARE = 2.0, 0.03
"""Of that, the time for the speed of steps: the higher of both."""
OPTIMISM = 3.0
"""A probe before the start may find speeds that are too low by this factor, because its passes are small."""
VALIDATION_SHARE, MIN_VALID_PAIRS = 0.01, 200
"""One validation takes at most this share of a budget, but has at least this many pairs."""


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


def pace_of(folder: Path, settled: Settled, seconds: float, resumes: bool) -> Pace | None:
    """The clock of a run with a budget. `seconds`: since this process began. `resumes`: an earlier process began the
    run, and its time before the first step counts too."""
    if (values := settled.about.get("pace")) is None:
        return None
    requested = replace(settled.config, train=TrainConfig(**values["requested"]))
    spent = seconds + (values["spent"] if resumes else 0.0)
    speed = Speed(**values["speed"])
    return Pace(folder, requested, speed, values["budget"], spent, values["max_warmup"])


class Parent(NamedTuple):
    """The model of `--from`."""

    weights: dict[str, Tensor]
    config: RunConfig
    subwords: Subwords


def refuse_short_budget(request: Request, began: float) -> None:
    """Refuses a budget in which not even ten steps fit, before anything that takes long. Only a CPU can be so slow."""
    if request.budget is None or (request.device or default_device()) != "cpu":
        return
    budget, settings = parse_budget(request.budget), settings_of(request)
    config = override(PRESETS[request.size or "small"](), settings)
    takes_papers_batches = request.size in ("base", "big") or any(
        "data.batch_tokens" in setting for setting in settings
    )
    tokens_per_step = config.data.batch_tokens if takes_papers_batches else MIN_BATCH_TOKENS
    if request.from_model is not None:
        config = replace(config, model=load_config(model_folder(Path(request.from_model))).model)
    tokens_per_second = OPTIMISM * probe(config.model, request.threads or default_threads())
    spent, needed = time.monotonic() - began, MIN_STEPS * tokens_per_step / tokens_per_second
    if spent + needed > budget:
        raise ConfigError(
            f"--budget is {budget:.0f} s, but {MIN_STEPS} steps of {tokens_per_step:,} tokens take at least "
            f"{spent + needed:.0f} s on this machine: raise it, or choose a smaller --size or data.batch_tokens"
        )


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
    on_progress("measuring the speed of this machine", 0, None)
    budget = None if request.budget is None else parse_budget(request.budget)
    deadline = time.monotonic() + min(MEASURE_SECONDS, MEASURE_SHARE * (budget or math.inf))
    config, size = resolve_config(request, prepared, parent)
    choices = _choose(config, request, n_ranks, longest_sentence(prepared), deadline)
    choices.configure_process()
    trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
    if request.batch_tokens == "auto" and (n_fit := micro_tokens_that_fit(trainer)) < choices.micro_tokens:
        choices = replace(choices, micro_tokens=max(n_fit, longest_sentence(prepared)))
        trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
    rates = measure_rates(trainer, _seconds_to_measure(deadline, budget), n_ranks)
    speed = speed_of(trainer, rates)
    about: dict[str, Any] = {"n_ranks": n_ranks, **_provenance(prepared, choices)}
    if budget is not None:
        config, size = resolve_config(request, prepared, parent, speed.tokens_per_second * budget)
        config = limit_validation(config, speed, budget, len(prepared.valid))
        choices = replace(choices, micro_tokens=min(choices.micro_tokens, config.data.batch_tokens))
        trainer = make_trainer(folder, parent, config, choices, prepared, on_event)
        if choices.device == "cuda":  # there, speed depends on the size of a batch
            rates = measure_rates(trainer, _seconds_to_measure(deadline, budget), n_ranks)
        speed = speed_of(trainer, rates)
        spent = time.monotonic() - began
        is_fixed = parent is not None or any("train.warmup_steps" in setting for setting in settings_of(request))
        max_warmup = config.train.warmup_steps if is_fixed else TrainConfig().warmup_steps
        about["pace"] = {
            "budget": budget,
            "spent": spent,
            "speed": speed._asdict(),
            "requested": asdict(config.train),
            "max_warmup": max_warmup,
        }
        config = plan_steps(config, speed, budget, budget - spent, max_warmup=max_warmup)
    else:
        if request.epochs is not None:
            config = with_steps(config, math.ceil(request.epochs * trainer.layout.n_steps))
        config = plan_checkpoints(config, speed)
    forecast = forecast_of(trainer, config, size, speed)
    about["forecast"] = asdict(forecast)
    write_atomically(folder / RUN, Settled(config, choices, about).to_json() + "\n")
    on_event(ForecastEvent(forecast=forecast, choices=choices))
    return trainer


def _choose(config: RunConfig, request: Request, n_ranks: int, longest: int, deadline: float) -> Choices:
    """Most of the time for measuring goes to the choice of threads and precision: it decides more than any other."""
    seconds = CHOICE_SHARE * (deadline - time.monotonic())
    return choose(
        config, request.device, n_ranks, longest, request.deterministic, request.passes, request.threads, seconds
    )


def _seconds_to_measure(deadline: float, budget: float | None) -> float:
    seconds = max(CALIBRATE_SECONDS, CALIBRATE_SHARE * (budget or 0.0))
    return min(seconds, deadline - time.monotonic())


def limit_validation(config: RunConfig, speed: Speed, budget: float, n_pairs: int) -> RunConfig:
    """Validates on fewer pairs if all of them would take too much of the budget."""
    if config.train.valid_sample is not None or n_pairs == 0:
        return config
    n_fit = int(n_pairs * VALIDATION_SHARE * budget / max(speed.seconds_per_validation, 1e-9))
    if n_fit >= n_pairs:
        return config
    return replace(config, train=replace(config.train, valid_sample=max(n_fit, min(n_pairs, MIN_VALID_PAIRS))))


def plan_checkpoints(config: RunConfig, speed: Speed) -> RunConfig:
    """Without a budget: how many steps are between two checkpoints, if the configuration does not say."""
    train = config.train
    if train.checkpoint_steps is not None:
        return config
    by_minutes = int(60 * train.checkpoint_minutes / speed.seconds_per_step)
    checkpoint_steps = max(1, min(by_minutes, -(-train.max_steps // MAX_MILESTONES)))
    return replace(config, train=replace(train, checkpoint_steps=checkpoint_steps))


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
        config, size = tuned(config, parent.config, n_tokens, max_tokens), f"that of {request.from_model}"
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

    def save_best(model: Transformer, path: Path) -> None:
        save_model(path, model, config, prepared.subwords, origin_of(prepared))

    return Trainer(
        folder,
        config,
        choices,
        prepared.train,
        prepared.valid,
        group,
        on_event,
        parent.weights if parent else None,
        decode_pairs,
        translation_scorer(prepared, config),
        save_best,
    )


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
