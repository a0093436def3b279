"""Finds runs and summarises them, for `transduce runs`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transduce.model_folder.format import RUN
from transduce.training.journal import LOG, FinalChoice, StepEvent, ValidationEvent, read_events
from transduce.training.request import read_json
from transduce.training.run import RESULT
from transduce.training.settle import Settled


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders that are runs, and for the others the runs directly inside them."""
    runs = []
    for folder in folders:
        runs += [folder] if (folder / RUN).exists() else sorted(path.parent for path in folder.glob(f"*/{RUN}"))
    return runs


def summary_of(folder: Path) -> dict[str, Any]:
    """One row of the table of runs. Values that the run has not reached yet are None."""
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    events = read_events(folder / LOG)
    step = max((event.step for event in events), default=0)
    seconds = [event.seconds for event in events if isinstance(event, StepEvent)]
    choice = FinalChoice.from_json(read_json(folder / RESULT)) if (folder / RESULT).exists() else None
    validations = [event for event in events if isinstance(event, ValidationEvent)]
    best = min(validations, key=lambda event: event.loss, default=None)
    scores = choice.candidates[choice.taken] if choice else best
    translations = choice.translations if choice else best and best.translations
    forecast = settled.about["forecast"]
    return {
        "run": str(folder),
        "state": "done" if choice else f"at step {step:,}",
        "size": forecast["size"],
        "parameters": forecast["parameters"],
        "steps": settled.config.train.max_steps,
        "batch_tokens": settled.config.data.batch_tokens,
        "dropout": settled.config.model.dropout,
        "seed": settled.config.train.seed,
        "perplexity": scores and scores.perplexity,
        "accuracy": scores and scores.accuracy,
        "bleu": translations and translations.bleu,
        "seconds": seconds[-1] if seconds else None,
        "device": settled.about["device"],
        "config_hash": settled.config.hash(),
        "data": settled.about["data"]["train"][:12],
    }
