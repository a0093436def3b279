"""Logs and folders of runs, written by hand, for the tests of the training report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transduce.config import RunConfig, tiny
from transduce.training.journal import LOG

SAMPLE = {"source": "Ja.", "reference": "Yes.", "translation": "Yes."}
ATTENTION = {
    "source": ["▁Ja", ".", "</s>"],
    "target": ["▁Yes", "."],
    "weights": [[0.9, 0.05, 0.05], [0.0, 1 / 3, 2 / 3]],
}
MACHINE = {"device": "cpu", "dtype": "float32", "n_threads": 2, "micro_tokens": 4096, "deterministic": False}
FORECAST = {
    "size": "tiny",
    "parameters": 2_342_912,
    "steps": 1000,
    "seconds": 100.0,
    "memory_bytes": 2**30,
    "epochs": 5.0,
    "batch_tokens": 8192,
    "seconds_per_step": 0.1,
    "tokens_per_second": 1000.0,
}

SCORE = {"name": "BLEU", "value": 30.5, "signature": "nrefs:1|tok:13a", "interval": [29.0, 32.0]}
PASSPORT = {"files": ["test.de", "test.en"], "decode": {"method": "beam", "beam_size": 4}, "dtype": "torch.float32"}
CARD = {"scores": [{"passport": PASSPORT, "n_sentences": 2000, "perplexity": 4.5, "scores": [SCORE]}]}


# Runs that were written by hand


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "loss": 2 + 7 * math.exp(-step / 300),
        "gradient_norm": 1.5,
        "learning_rate": 1e-3 * min(step, 100) / 100,
        "tokens_per_second": 1000.0,
        "memory_bytes": 2**30 + step,
        "seconds": step / 10,
        "epoch": step / 100,
        "seconds_per_step": 0.1,
        "max_steps": 1000,
    }
    return {"event": "step", "step": step, **values, **changes}


def valid_line(
    step: int, loss: float, samples: Sequence[dict[str, Any]] | None = None, **changes: Any
) -> dict[str, Any]:
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "accuracy": 0.5, "is_best": True}
    translations = {} if samples is None else {"bleu": 20.5, "bleu_signature": "nrefs:1", "samples": list(samples)}
    return {"event": "valid", "step": step, **values, **translations, **changes}


def end_line(step: int, samples: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    candidate = {"steps": [20, 40], "loss": 1.5, "perplexity": 4.48, "accuracy": 0.6}
    choice = {"taken": "average of the last", "candidates": {"average of the last": candidate}}
    translations = {"bleu": 25.5, "bleu_signature": "nrefs:1", "samples": list(samples)} if samples else {}
    return {"event": "end", "step": step, **choice, **translations}


def log_lines(
    n_steps: int, validate_every: int | None = None, samples: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    lines = [{"event": "forecast", "step": 0, **FORECAST, **MACHINE}]
    for step in range(20, n_steps + 1, 20):
        lines.append(step_line(step))
        if validate_every and step % validate_every == 0:
            lines += [{"event": "saved", "step": step}, valid_line(step, 1 + 5 * math.exp(-step / 300), samples)]
    return lines


def write_log(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOG).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / LOG


def write_run(
    folder: Path, lines: Sequence[dict[str, Any]], config: RunConfig | None = None, prepared: str | None = None
) -> Path:
    """A run as `train` leaves it, without data, checkpoints and model."""
    write_log(folder, lines)
    about = {
        "forecast": FORECAST,
        "n_ranks": 1,
        "started": "2026-01-02T03:04:05+00:00",
        "device": "a processor, 2 threads",
        "versions": {"transduce": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "data": {"train": "1234", "valid": "5678", "subwords": "9abc", "files": {"train.de": "def0"}},
    }
    settled = {"config": asdict(config or tiny()), "choices": MACHINE, "about": about}
    (folder / "run.json").write_text(json.dumps(settled))
    (folder / "request.json").write_text(json.dumps({"prepared": prepared}))
    return folder


def write_result(folder: Path, **values: Any) -> None:
    end = end_line(0)
    (folder / "result.json").write_text(json.dumps({"taken": end["taken"], "candidates": end["candidates"], **values}))


EVERY_KIND = [
    step_line(20),
    valid_line(20, 3.0, samples=[SAMPLE | {"attention": ATTENTION}]),
    {"event": "saved", "step": 20},
    {"event": "resumed", "step": 20},
    {"event": "damaged", "step": 20, "fault": "weights.safetensors has changed"},
    {"event": "out of memory", "step": 20, "micro_limit": 2048},
    {"event": "bad step", "step": 20, "in_a_row": 1},
    end_line(20),
]
