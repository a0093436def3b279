"""Finds runs and summarises them, for `transduce runs`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.config import RunConfig
from transduce.errors import TransduceError
from transduce.model_folder.format import BEST_SO_FAR, CARD, MODEL, RUN
from transduce.training.journal import (
    LOG,
    BadStepEvent,
    Candidate,
    Event,
    FinalChoice,
    StepEvent,
    TranslationScore,
    ValidationEvent,
    event_from_json,
)
from transduce.training.request import REQUEST
from transduce.training.run import RESULT

DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, TransduceError)
"""What reading a damaged file may raise: it need not be JSON, and JSON need not have the usual fields."""
NOT_STARTED = (
    "no step is taken yet: the run is being prepared, or it was interrupted or refused. Its command continues it, or "
    "prints why it is refused"
)
TOO_MANY_BAD_STEPS = (
    "{} steps in a row had a loss or gradient that is NaN or infinite: raise train.warmup_steps, set "
    "train.clip_norm=1, or look at the pairs in bad-batches/"
)
VALUES = (
    "size",
    "parameters",
    "step",
    "steps",
    "batch_tokens",
    "dropout",
    "seed",
    "perplexity",
    "accuracy",
    "valid_bleu",
    "seconds",
    "device",
    "config_hash",
    "data",
)
"""Values of a summary that are None if the run has not reached them, or if their file is damaged. `valid_bleu` is that
of greedy translations of some validation sentences."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders that are runs, and for the others the runs directly inside them."""
    runs = []
    for folder in folders:
        runs += [folder] if is_run(folder) else sorted(path for path in folder.glob("*") if is_run(path))
    return runs


def is_run(folder: Path) -> bool:
    """A run has its request from the beginning. Old ones may lack it."""
    return os.path.exists(folder / REQUEST) or os.path.exists(folder / RUN)


def summary_of(folder: Path) -> dict[str, Any]:
    """One row of the table of runs.

    Besides `VALUES` it has `run` and `state`, `test` (the scores on the card of the model, the newest last) and
    `problems` (damaged files, and why the run failed or has not begun).
    """
    reader = RunReader(folder)
    files = {
        REQUEST: read_object,
        RUN: reader.add_settings,
        LOG: reader.add_progress,
        RESULT: reader.add_result,
        f"{MODEL if os.path.exists(folder / MODEL) else BEST_SO_FAR}/{CARD}": reader.add_test_scores,
    }
    damaged = []
    for name, read in files.items():
        if os.path.exists(folder / name):
            try:
                read(folder / name)
            except DAMAGED as error:
                damaged.append(name)
                reader.problems.append(f"{name} is damaged ({describe(error)})")
    if RUN in damaged:
        reader.state = "damaged"
    elif not reader.state:
        step = reader.values["step"]
        reader.state = f"at step {step:,}" if step else "before step 1"
        if not os.path.exists(folder / RUN):
            reader.problems.append(NOT_STARTED)
    return {
        "run": str(folder),
        "state": reader.state,
        **reader.values,
        "test": reader.test_scores,
        "problems": reader.problems,
    }


class RunReader:
    """Reads the files of a run one by one. Each of them may be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.max_bad_steps = folder, "", float("inf")
        self.values: dict[str, Any] = dict.fromkeys(VALUES)
        self.test_scores, self.problems = list[dict[str, Any]](), list[str]()

    def add_settings(self, path: Path) -> None:
        values = read_object(path)
        config, about = RunConfig.from_json(json.dumps(values["config"])), values["about"]
        self.max_bad_steps = config.train.max_bad_steps
        self.values |= {
            "size": str(about["forecast"]["size"]),
            "parameters": int(about["forecast"]["parameters"]),
            "steps": config.train.max_steps,
            "batch_tokens": config.data.batch_tokens,
            "dropout": config.model.dropout,
            "seed": config.train.seed,
            "device": str(about["device"]),
            "config_hash": config.hash(),
            "data": str(about["data"]["train"])[:12],
        }

    def add_progress(self, path: Path) -> None:
        events, n_damaged = read_events(path)
        if n_damaged:
            self.problems.append(f"{path.name} has {n_damaged:,} damaged lines, which are ignored")
        self.values["step"] = max((int(event.step) for event in events), default=0)
        for event in events:
            if isinstance(event, StepEvent):  # with a budget, the number of steps may change during a run
                self.values |= {"seconds": float(event.seconds), "steps": int(event.max_steps)}
            elif isinstance(event, ValidationEvent) and event.is_best:
                self._add_scores(event, event.translations)
            elif isinstance(event, BadStepEvent) and event.in_a_row >= self.max_bad_steps:
                self.state = f"failed at step {self.values['step']:,}"
                self.problems.append(TOO_MANY_BAD_STEPS.format(event.in_a_row))

    def add_result(self, path: Path) -> None:
        choice = FinalChoice.from_json(read_object(path))
        self._add_scores(choice.candidates[choice.taken], choice.translations)
        self.state = "done"

    def _add_scores(self, scores: ValidationEvent | Candidate, translations: TranslationScore | None) -> None:
        bleu = None if translations is None else translations.bleu
        values = {"perplexity": scores.perplexity, "accuracy": scores.accuracy, "valid_bleu": bleu}
        self.values |= {name: None if value is None else float(value) for name, value in values.items()}

    def add_test_scores(self, path: Path) -> None:
        """The scores that `transduce evaluate` wrote."""
        for entry in read_object(path)["scores"]:
            passport, scores = entry["passport"], {score["name"]: score for score in entry["scores"]}
            self.test_scores.append(
                {
                    "bleu": float(scores["BLEU"]["value"]),
                    "bleu_signature": str(scores["BLEU"]["signature"]),
                    "chrf": float(scores["chrF++"]["value"]),
                    "method": str(passport["decode"]["method"]),
                    "beam": int(passport["decode"]["beam_size"]),
                    "source": str(passport["files"][0]),
                    "to": passport["to"],
                    "n_sentences": int(entry["n_sentences"]),
                    "when": str(passport["when"]),
                }
            )
        self.test_scores.sort(key=lambda score: score["when"])


def read_object(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError("it is not a JSON object")
    return values


def read_events(path: Path) -> tuple[list[Event], int]:
    """The events of a log, and the number of damaged lines. The last line may be incomplete: the process was killed."""
    lines = path.read_bytes().splitlines()
    events, n_damaged = list[Event](), 0
    for number, line in enumerate(lines, 1):
        try:
            events.append(event_from_json(json.loads(line)))
        except DAMAGED:
            n_damaged += number < len(lines)
    return events, n_damaged


def describe(error: BaseException) -> str:
    """On one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"it lacks {error}".split() if isinstance(error, KeyError) else str(error).split())
