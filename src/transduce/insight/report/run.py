"""What the report says about one run: its state, its curves, its data, its scores, and what is missing.

Each file of a run may be missing or damaged. Then the report lacks a part, and `missing` says which.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from transduce.config import RunConfig
from transduce.data.prepare import REPORT, TRAIN, Report
from transduce.data.store import Store
from transduce.errors import ConfigError, DataError
from transduce.insight.report import log as logs
from transduce.insight.report.log import Log
from transduce.model_folder.format import CARD, CONFIG, MODEL, RUN
from transduce.training.journal import LOG, BadStepEvent, FinalChoice, ForecastEvent, ResumedEvent
from transduce.training.request import REQUEST
from transduce.training.run import RESULT
from transduce.training.settle import PREPARED
from transduce.training.trainer import BAD_BATCHES

MIN_SILENCE, MAX_GAPS = 120.0, 5.0
"""A run has stopped if its log is older than this many seconds and than this many of its longest gaps between lines."""
N_BARS = 12
MAX_COUNTED_PAIRS = 1_000_000
"""Lengths of sentences are counted on this many pairs, evenly spaced."""


def require_run(folder: Path) -> None:
    if not any((folder / name).is_file() for name in (REQUEST, RUN, LOG)):
        raise ConfigError(f"{folder} is not a training run: give a folder that transduce train wrote")


class Missing(list[str]):
    """Sentences about what a report lacks."""

    def read_json(self, path: Path, if_missing: str) -> dict[str, Any]:
        """The content of a file, empty if it is missing or damaged. `if_missing`: what that means; "" to ignore it."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                return values
        except FileNotFoundError:
            if if_missing:
                self.append(f"{path.name} is missing: {if_missing}.")
            return {}
        except (OSError, ValueError, RecursionError):
            pass
        self.append(f"{path.name} cannot be read: it is damaged.")
        return {}


def about_run(folder: Path, name: str) -> dict[str, Any]:
    missing = Missing()
    settled = missing.read_json(folder / RUN, "the run has not chosen its settings yet")
    request = missing.read_json(folder / REQUEST, "")
    log = logs.read(folder / LOG)
    choice, result = _result(folder, missing)
    config = _config_of(settled)
    about = _dict(settled, "about")
    data = _data(folder, request, missing)
    if log.n_unreadable:
        lines = "1 line" if log.n_unreadable == 1 else f"{log.n_unreadable:,} lines"
        missing.append(f"{lines} of {LOG} cannot be read: cut, damaged, or written by another version.")
    validations = logs.validations(log)
    if not log.events and not len(log.tokens_N):
        missing.append(f"{LOG} has no event yet: there are no curves.")
    elif not validations["step"]:
        has_none = data is not None and data["valid"]["n_pairs"] == 0
        missing.append("The run has no validation text." if has_none else "There was no validation yet.")
    return {
        "name": name,
        "path": str(folder),
        "missing": missing,
        **_progress(folder, log, config, result),
        **_size_and_machine(log, settled, about),
        "choice": choice,
        "scores": _scores(folder, missing),
        "curves": logs.curves(log),
        "validations": validations,
        "marks": logs.marks(log),
        "translations": logs.translations(log),
        "data": data,
        "hashes": _dict(about, "data"),
        "versions": _dict(about, "versions"),
        "started": about.get("started"),
        "config_hash": _hash_of(settled),
        "commands": _commands(folder, data),
    }


def settings_of(folder: Path) -> dict[str, Any]:
    """All settings in run.json by name, empty if it is missing or damaged."""
    return _config_of(Missing().read_json(folder / RUN, ""))


def _config_of(settled: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and the choices for the machine. What an older version did not write had what is now the default."""
    stored = _dict(settled, "config")
    if not stored:
        return {}
    sections = asdict(RunConfig())
    for section in stored:
        sections[section] = sections.get(section, {}) | _dict(stored, section)
    sections["machine"] = _dict(settled, "choices")
    return {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}


def _dict(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _hash_of(settled: Mapping[str, Any]) -> str | None:
    try:
        return RunConfig.from_json(json.dumps(settled["config"])).hash()
    except (ConfigError, LookupError):
        return None


# State and progress


def _progress(folder: Path, log: Log, config: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    planned = log.last("max_steps") or config.get("train.max_steps")
    max_steps = int(planned) if isinstance(planned, int | float) else None
    step, seconds = result.get("steps", log.step), result.get("seconds", log.seconds)
    state, note = _state(folder, log, config, bool(result), max_steps)
    is_under_way = state in ("training", "stopped") and seconds and step and max_steps
    return {
        "state": state,
        "note": note,
        "step": step,
        "max_steps": max_steps,
        "seconds": seconds,
        "seconds_left": max(0, max_steps - step) * seconds / step if is_under_way else None,
        "tokens": result.get("target_tokens", log.n_tokens),
        "epoch": log.last("epoch"),
    }


def _state(
    folder: Path, log: Log, config: Mapping[str, Any], is_finished: bool, max_steps: int | None
) -> tuple[str, str]:
    """finished, waiting, failed, training or stopped; and a sentence about it."""
    step = log.step
    if is_finished:
        is_early = max_steps is not None and step < max_steps
        return "finished", f"It ended before step {max_steps:,}: validations no longer improved." if is_early else ""
    if not step:
        return "waiting", "No step has been logged yet."
    last = next((event for event in reversed(log.events) if isinstance(event, BadStepEvent | ResumedEvent)), None)
    limit = config.get("train.max_bad_steps")
    if isinstance(last, BadStepEvent) and isinstance(limit, int) and last.in_a_row >= limit:
        problem = f"{last.in_a_row} steps in a row gave a loss or gradient that is NaN or infinite"
        return "failed", f"{problem}: the folder {BAD_BATCHES} has the last of their pairs."
    silence = time.time() - (folder / LOG).stat().st_mtime
    gap = float(np.nanmax(np.diff(log.step_columns["seconds"], prepend=0.0), initial=0.0))
    if silence > max(MIN_SILENCE, MAX_GAPS * gap):
        return "stopped", "Nothing was logged for some time. The command that started the run resumes it."
    return "training", "The final model is being chosen." if step == max_steps else ""


def _size_and_machine(log: Log, settled: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    event = next(iter(log.of_kind(ForecastEvent)), None)
    forecast = _dict(about, "forecast") or (asdict(event.forecast) if event else {})
    choices = _dict(settled, "choices") or (asdict(event.choices) if event else {})
    return {
        "size": forecast.get("size"),
        "parameters": forecast.get("parameters"),
        "batch_tokens": forecast.get("batch_tokens"),
        "device": about.get("device", choices.get("device")),
        "dtype": choices.get("dtype"),
        "why_plain": choices.get("why_plain"),
        "n_ranks": about.get("n_ranks"),
    }


# The final model and its scores


def _result(folder: Path, missing: Missing) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The choice of the final model, and result.json; None and empty as long as the run has not ended."""
    result = missing.read_json(folder / RESULT, "")
    if not result:
        return None, {}
    try:
        choice = FinalChoice.from_json(result)
        candidates = {name: asdict(candidate) for name, candidate in choice.candidates.items()}
        if not all(isinstance(step, int) for candidate in candidates.values() for step in candidate["steps"]):
            raise TypeError
        _ = candidates[choice.taken]
        bleu = None if choice.translations is None else choice.translations.bleu
        return {"taken": choice.taken, "candidates": candidates, "bleu": bleu}, _numbers(result)
    except (TypeError, ValueError, LookupError, AttributeError):
        missing.append(f"{RESULT} cannot be read: it is damaged.")
        return None, {}


def _numbers(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if isinstance(value, int | float)}


def _scores(folder: Path, missing: Missing) -> list[dict[str, Any]]:
    """The scores in the card of the model, one item for each test set and way of translating."""
    entries = missing.read_json(folder / MODEL / CARD, "").get("scores", [])
    try:
        return [_score(entry) for entry in entries]
    except (TypeError, ValueError, LookupError, AttributeError):
        missing.append(f"{CARD} cannot be read: it is damaged.")
        return []


def _score(entry: Mapping[str, Any]) -> dict[str, Any]:
    passport = entry["passport"]
    decode = passport.get("decode") or {}
    return {
        "files": [str(name) for name in passport.get("files", []) if name],
        "to": passport.get("to"),
        "n_sentences": entry.get("n_sentences"),
        "search": _search_text(decode) if decode else "",
        "precision": str(passport.get("dtype") or ""),
        "when": passport.get("when"),
        "perplexity": entry.get("perplexity"),
        "scores": [
            {
                "name": str(score["name"]),
                "value": float(score["value"]),
                "signature": str(score["signature"]),
                "interval": [float(bound) for bound in score["interval"]] if score.get("interval") else None,
            }
            for score in entry["scores"]
        ],
    }


def _search_text(decode: Mapping[str, Any]) -> str:
    return f"beam {decode['beam_size']}" if decode["method"] == "beam" else str(decode["method"])


# The data


def _data(folder: Path, request: Mapping[str, Any], missing: Missing) -> dict[str, Any] | None:
    prepared = folder / PREPARED
    if isinstance(named := request.get("prepared"), str):
        prepared = Path(named)
    path = prepared / REPORT
    try:
        report = asdict(_checked(Report.from_json(path.read_text(encoding="utf-8"))))
    except OSError:
        missing.append(f"The prepared data is not at {prepared}: the report on the data is left out.")
        return None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        missing.append(f"{path} cannot be read: it is damaged or of another version.")
        return None
    try:
        lengths = _lengths(prepared / TRAIN, (prepared / TRAIN).stat().st_mtime_ns)
    except (DataError, OSError):
        missing.append(f"{prepared / TRAIN} cannot be read: the lengths of sentences are left out.")
        lengths = None
    return report | {"folder": str(prepared), "lengths": lengths}


def _checked(report: Report) -> Report:
    """The report, if its values have the types that the page relies on."""
    counts = [report.vocab_size]
    for corpus in [*report.corpora, *report.valid_corpora]:
        counts += [corpus.n_read, corpus.n_kept, corpus.n_shared, corpus.n_held_out, *corpus.dropped.values()]
        for line, source, target in corpus.examples.values():
            counts.append(line)
            _ = source + target + corpus.name + corpus.source_language + corpus.target_language
    for split in (report.train, report.valid):
        counts += [split.n_pairs, split.n_source_tokens, split.n_target_tokens]
    if not all(isinstance(count, int) for count in counts):
        raise TypeError
    return report


@cache
def _lengths(path: Path, modified: int) -> dict[str, Any] | None:
    """The sentences by their number of tokens: bars of equal width, but the last covers the longest one percent.

    Kept in memory, because a run writes its report many times. `modified` tells a new file from an old one."""
    store = Store(path)
    if not len(store):
        return None
    stride = -(-len(store) // MAX_COUNTED_PAIRS)
    sides = [length_N[::stride].astype(int) for length_N in (store.source_length_N, store.target_length_N)]
    both = np.concatenate(sides)
    longest = int(both.max())
    width = max(1, -(-int(np.quantile(both, 0.99)) // (N_BARS - 1)))
    edges = [*range(0, width * (N_BARS - 1) + 1, width), max(longest, width * N_BARS)]
    counts = [np.histogram(np.maximum(length_N, 1), np.array(edges) + 0.5)[0] * stride for length_N in sides]
    return {
        "bars": [
            {"first": first + 1, "last": last, "source": int(source), "target": int(target)}
            for first, last, source, target in zip(edges, edges[1:], *counts, strict=False)
        ],
        "longest": longest,
        "is_sample": stride > 1,
    }


# What to do next


def _commands(folder: Path, data: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Commands for a shell, each with what it does."""
    run = shlex.quote(str(folder))
    if not (folder / MODEL / CONFIG).exists():
        return [
            {"does": "Write this report again", "command": f"transduce report {run}"},
            {"does": "Compare with other runs", "command": f"transduce runs {run}"},
        ]
    corpora = data["corpora"] if data else []
    languages = [corpora[0]["source_language"], corpora[0]["target_language"]] if corpora else ["source", "target"]
    source, target = (shlex.quote(f"test.{language}") for language in languages)
    commands = {
        "Translate": f"transduce translate {run} < {source} > out.txt",
        "Look inside": f"transduce inspect {run} --source {source} --html inspect.html --open",
        "Score": f"transduce evaluate {run} --source {source} --reference {target}",
        "Serve": f"transduce serve {run}",
        "Write this report again": f"transduce report {run}",
    }
    return [{"does": does, "command": command} for does, command in commands.items()]
