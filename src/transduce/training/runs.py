"""Finds runs and summarises them, for `transduce runs`.

Each file of a run is read on its own: what one file lacks or a damaged one hides is None, and `problems` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transduce.config import RunConfig
from transduce.errors import TransduceError
from transduce.model_folder.format import CARD, MODEL, RUN
from transduce.training.journal import (
    LOG,
    BadStepEvent,
    Event,
    FinalChoice,
    StepEvent,
    ValidationEvent,
    event_from_json,
)
from transduce.training.request import REQUEST
from transduce.training.run import RESULT

DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, TransduceError)
"""What reading a damaged file may raise: it need not be JSON, and JSON need not have the usual fields."""
NAMES = (
    "run",
    "state",
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
"""Values of a summary, besides `test`, the scores on the model's card, and `problems`. `valid_bleu` is that of greedy
translations of some validation sentences."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders that are runs, and for the others the runs directly inside them."""
    runs = []
    for folder in folders:
        runs += [folder] if _is_run(folder) else sorted(path for path in folder.glob("*") if _is_run(path))
    return runs


def _is_run(folder: Path) -> bool:
    return (folder / RUN).exists() or (folder / REQUEST).exists()


def summary_of(folder: Path) -> dict[str, Any]:
    """One row of the table of runs. Values that the run has not reached, or that cannot be read, are None."""
    summary: dict[str, Any] = {**dict.fromkeys(NAMES), "run": str(folder), "test": [], "problems": []}
    readers: dict[str, Callable[[Path, dict[str, Any]], None]] = {
        RUN: _add_settings,
        LOG: _add_progress,
        RESULT: _add_result,
        f"{MODEL}/{CARD}": _add_test_scores,
    }
    for name, add in readers.items():
        if (folder / name).exists():
            try:
                add(folder / name, summary)
            except DAMAGED as error:
                summary["problems"].append(f"{name} is damaged ({_one_line(error)})")
    if summary["state"] is None:
        summary["state"] = f"at step {summary['step']:,}" if summary["step"] else "before step 1"
        if not (folder / RUN).exists():
            summary["problems"].append(
                "no step is taken yet: the run is being prepared, or it was interrupted or refused. Its command "
                "continues it, or prints why it is refused"
            )
    return summary


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(f"lacks {text}".split()) if isinstance(error, KeyError) else " ".join(text.split())


def _read_object(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError("not a JSON object")
    return values


def _add_settings(path: Path, summary: dict[str, Any]) -> None:
    values = _read_object(path)
    config, about = RunConfig.from_json(json.dumps(values["config"])), values["about"]
    summary |= {
        "size": str(about["forecast"]["size"]),
        "parameters": int(about["forecast"]["parameters"]),
        "steps": config.train.max_steps,
        "batch_tokens": config.data.batch_tokens,
        "dropout": config.model.dropout,
        "seed": config.train.seed,
        "device": str(about["device"]),
        "config_hash": config.hash(),
        "data": str(about["data"]["train"])[:12],
        "max_bad_steps": config.train.max_bad_steps,
    }


def _add_progress(path: Path, summary: dict[str, Any]) -> None:
    events, n_damaged = _read_events(path)
    if n_damaged:
        summary["problems"].append(f"{LOG}: {n_damaged:,} damaged lines are ignored")
    steps = [event for event in events if isinstance(event, StepEvent)]
    validations = [event for event in events if isinstance(event, ValidationEvent)]
    bad_steps = [event for event in events if isinstance(event, BadStepEvent)]
    summary["step"] = max((event.step for event in events), default=0)
    if steps:
        # A run with a budget may change its number of steps.
        summary |= {"seconds": steps[-1].seconds, "steps": steps[-1].max_steps}
    if validations:
        best = min(validations, key=lambda event: event.loss)
        summary |= {"perplexity": best.perplexity, "accuracy": best.accuracy}
        summary["valid_bleu"] = best.translations and best.translations.bleu
    if bad_steps and bad_steps[-1].in_a_row >= (summary.pop("max_bad_steps", None) or float("inf")):
        summary["state"] = f"failed at step {summary['step']:,}"
        summary["problems"].append(
            f"{bad_steps[-1].in_a_row} steps in a row had a loss or gradient that is NaN or infinite: raise "
            "train.warmup_steps, set train.clip_norm=1, or look at the pairs in bad-batches/"
        )


def _read_events(path: Path) -> tuple[list[Event], int]:
    """The events of a log, and the number of damaged lines. The last one may be incomplete: the process was killed."""
    lines = path.read_bytes().splitlines()
    events, n_damaged = list[Event](), 0
    for number, line in enumerate(lines, 1):
        try:
            events.append(event_from_json(json.loads(line)))
        except DAMAGED:
            n_damaged += number < len(lines)
    return events, n_damaged


def _add_result(path: Path, summary: dict[str, Any]) -> None:
    choice = FinalChoice.from_json(_read_object(path))
    taken = choice.candidates[choice.taken]
    summary |= {"state": "done", "perplexity": taken.perplexity, "accuracy": taken.accuracy}
    summary["valid_bleu"] = choice.translations and choice.translations.bleu


def _add_test_scores(path: Path, summary: dict[str, Any]) -> None:
    """The scores that `transduce evaluate` wrote, the newest last."""
    for entry in _read_object(path)["scores"]:
        passport, scores = entry["passport"], {score["name"]: score for score in entry["scores"]}
        summary["test"].append(
            {
                "bleu": float(scores["BLEU"]["value"]),
                "signature": scores["BLEU"]["signature"],
                "chrf": float(scores["chrF++"]["value"]),
                "method": passport["decode"]["method"],
                "beam": int(passport["decode"]["beam_size"]),
                "source": passport["files"][0],
                "to": passport["to"],
                "n_sentences": int(entry["n_sentences"]),
                "when": str(passport["when"]),
            }
        )
    summary["test"].sort(key=lambda score: score["when"])
