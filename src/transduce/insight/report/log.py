"""Curves, validations, marks and sample translations, read from the log of a run.

A log may have a hundred thousand lines, nearly all of them steps. One regular expression reads these in half the time
that JSON takes. If it does not fit all of them, because a line is damaged or another version wrote it, every line is
read as JSON.
"""

# Axes: N lines of steps, P points of a curve.

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from transduce.training.journal import (
    BadStepEvent,
    DamagedEvent,
    EndEvent,
    Event,
    OutOfMemoryEvent,
    ResumedEvent,
    StepEvent,
    TranslationScore,
    ValidationEvent,
    event_from_json,
)

MAX_POINTS = 1500
"""Points of a curve: about as many as a screen has columns."""
MAX_MARKS = 60
"""Marks of one kind. If there are more, neighbours are combined."""
MAX_TRANSLATED = 60
"""Validations whose sample translations are shown."""

Item = TypeVar("Item")
Values = NDArray[np.float64]

COLUMNS = [field.name for field in fields(StepEvent)]
STEP_BEGINS = '{"event": "step", '
STEP_LINE = re.compile(
    re.escape(STEP_BEGINS) + ", ".join(f'"{name}": ([^,}}\n]*)' for name in COLUMNS) + r"\}$", re.MULTILINE
)


@dataclass(frozen=True)
class Log:
    step_columns: dict[str, Values]
    """One array for each field of `StepEvent`, in the order of the steps."""
    events: list[Event]
    """All other events, in the order of the log."""
    n_unreadable: int
    """Lines that are cut or damaged, or that another version wrote."""

    @cached_property
    def tokens_N(self) -> Values:
        """Target tokens since the first step. A line tells the speed of its steps in two ways, hence their tokens."""
        columns = self.step_columns
        tokens_per_step_N = np.nan_to_num(columns["tokens_per_second"] * columns["seconds_per_step"], posinf=0.0)
        return np.cumsum(tokens_per_step_N * np.diff(columns["step"], prepend=0.0))

    @property
    def n_tokens(self) -> int:
        return round(self.tokens_N[-1]) if len(self.tokens_N) else 0

    @property
    def seconds(self) -> float | None:
        """The time of the last line of a step."""
        return self.last("seconds")

    @property
    def step(self) -> int:
        """The last step that an event names."""
        return max([int(self.last("step") or 0), *(event.step for event in self.events)])

    def last(self, name: str) -> float | None:
        column_N = self.step_columns[name]
        return float(column_N[-1]) if len(column_N) and math.isfinite(column_N[-1]) else None

    def of_kind(self, kind: type[Item]) -> list[Item]:
        return [event for event in self.events if isinstance(event, kind)]

    def at(self, steps: Sequence[int]) -> dict[str, list[Any]]:
        """Steps with the tokens and the seconds that belong to them."""
        step_N = self.step_columns["step"]
        if not len(step_N):
            return {"step": list(steps), "tokens": [None] * len(steps), "seconds": [None] * len(steps)}
        return {
            "step": list(steps),
            "tokens": [round(n) for n in np.interp(steps, step_N, self.tokens_N)],
            "seconds": rounded(np.interp(steps, step_N, self.step_columns["seconds"])),
        }


def read(path: Path) -> Log:
    """A log that does not exist is empty."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    *lines, cut = text.split("\n")
    others = [line for line in lines if not line.startswith(STEP_BEGINS)]
    rows = STEP_LINE.findall(text)
    events, n_unreadable = _to_events(others)
    is_complete = len(rows) == len(lines) - len(others) and not any(isinstance(event, StepEvent) for event in events)
    try:
        columns = _to_columns(rows)
    except ValueError:  # a value that is not a number
        is_complete = False
    if not is_complete:
        events, n_unreadable = _to_events(lines)
        steps = [event for event in events if isinstance(event, StepEvent)]
        columns = _to_columns([[getattr(event, name) for name in COLUMNS] for event in steps])
        events = [event for event in events if not isinstance(event, StepEvent)]
    return Log(_in_order(columns), events, n_unreadable + bool(cut))


def _to_columns(rows: Sequence[Sequence[Any]]) -> dict[str, Values]:
    column_CN = np.array(rows, dtype=np.float64).reshape(-1, len(COLUMNS)).T
    return dict(zip(COLUMNS, column_CN, strict=True))


def _to_events(lines: Iterable[str]) -> tuple[list[Event], int]:
    """The events, and the number of lines that are none."""
    events, n_unreadable = list[Event](), 0
    for line in filter(None, lines):
        try:
            events.append(_checked(event_from_json(json.loads(line))))
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            n_unreadable += 1
    return events, n_unreadable


def _checked(event: Event) -> Event:
    """The event, if its values have the types that the report relies on."""
    numbers: list[Any] = [event.step]
    match event:
        case StepEvent():
            numbers = [getattr(event, name) for name in COLUMNS]
        case ValidationEvent():
            numbers += [event.loss, event.perplexity, event.accuracy]
            numbers += [] if event.translations is None else [event.translations.bleu]
        case OutOfMemoryEvent():
            numbers += [event.micro_limit]
        case BadStepEvent():
            numbers += [event.in_a_row]
        case EndEvent():
            numbers += [step for candidate in event.choice.candidates.values() for step in candidate.steps]
            numbers += event.choice.candidates[event.choice.taken].steps
    if not isinstance(event.step, int) or not all(isinstance(number, int | float) for number in numbers):
        raise TypeError
    _ = [float(number) for number in numbers]  # refuses integers that are too large for a float
    return event


def _in_order(columns: dict[str, Values]) -> dict[str, Values]:
    """The lines with a finite step, in the order of the steps. Of several lines for one step only the last stays."""
    step_N = columns["step"]
    if (np.diff(step_N, prepend=0.0) > 0).all() and np.isfinite(step_N).all():
        return columns
    _, from_end = np.unique(np.where(np.isfinite(step_N), step_N, np.inf)[::-1], return_index=True)
    kept = [row for row in (len(step_N) - 1 - from_end) if math.isfinite(step_N[row])]
    return {name: column_N[kept] for name, column_N in columns.items()}


# Curves

MEANS = ("loss", "gradient_norm", "learning_rate", "tokens_per_second")


def curves(log: Log) -> dict[str, Any]:
    """Curves of at most MAX_POINTS points. Each point stands for neighbouring lines: for their mean, and for the loss
    and the norm also for their lowest and their highest value. Values that are not finite become None."""
    n = len(log.tokens_N)
    first_P = np.linspace(0, n, min(n, MAX_POINTS) + 1).astype(int)[:-1]
    last_P = np.append(first_P[1:], n)[: len(first_P)] - 1
    columns = log.step_columns
    thinned: dict[str, Any] = {
        "step": columns["step"][last_P].astype(int).tolist(),
        "tokens": [round(count) for count in log.tokens_N[last_P]],
        "seconds": rounded(columns["seconds"][last_P]),
        "memory_bytes": rounded(_reduce(np.fmax, columns["memory_bytes"], first_P)),
    }
    for name in MEANS:
        value_N = columns[name]
        is_finite_N = np.isfinite(value_N)
        n_finite_P = _reduce(np.add, is_finite_N.astype(np.float64), first_P)
        with np.errstate(invalid="ignore"):
            mean_P = _reduce(np.add, np.where(is_finite_N, value_N, 0.0), first_P) / n_finite_P
        thinned[name] = rounded(mean_P)
        if n > MAX_POINTS and name in ("loss", "gradient_norm"):
            value_N = np.where(is_finite_N, value_N, np.nan)
            thinned[f"{name}_low"] = rounded(_reduce(np.fmin, value_N, first_P))
            thinned[f"{name}_high"] = rounded(_reduce(np.fmax, value_N, first_P))
    return thinned


def _reduce(operation: np.ufunc, value_N: Values, first_P: NDArray[Any]) -> Values:
    reduced_P: Values = operation.reduceat(value_N, first_P) if len(first_P) else value_N
    return reduced_P


def rounded(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Significant digits, to keep the page small. Infinite values and NaN, which JSON does not have, become None."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def validations(log: Log) -> dict[str, Any]:
    """The validations as columns."""
    events = log.of_kind(ValidationEvent)
    best = min((event for event in events if math.isfinite(event.loss)), key=lambda event: event.loss, default=None)
    events = evenly(events, MAX_POINTS, keep=[best])
    bleu = [math.nan if event.translations is None else event.translations.bleu for event in events]
    return {
        **log.at([event.step for event in events]),
        **{name: rounded(getattr(event, name) for event in events) for name in ("loss", "perplexity", "accuracy")},
        "bleu": rounded(bleu),
        "best": None if best is None else events.index(best),
        "signature": next((event.translations.bleu_signature for event in events if event.translations), ""),
    }


def evenly(items: Sequence[Item], n: int, keep: Sequence[Item | None] = ()) -> list[Item]:
    """At most about n of the items, evenly spaced: the first, the last and those to keep are among them."""
    if len(items) <= n:
        return list(items)
    chosen = {round(place) for place in np.linspace(0, len(items) - 1, n)}
    chosen |= {items.index(item) for item in keep if item is not None}
    return [items[place] for place in sorted(chosen)]


# Marks


def marks(log: Log) -> list[dict[str, Any]]:
    """The events that explain a curve, in words, in the order of their steps."""
    found: dict[str, list[tuple[int, str]]] = {}
    for event in log.events:
        match event:
            case ResumedEvent():
                text = f"resumed from the checkpoint of step {event.step:,}"
            case OutOfMemoryEvent():
                text = f"out of memory: passes have at most {event.micro_limit:,} positions from here on"
            case BadStepEvent():
                text = "loss or gradient was NaN or infinite: the weights did not change"
            case DamagedEvent():
                text = f"the checkpoint of step {event.step:,} was damaged ({event.fault}): the one before it was used"
            case EndEvent():
                steps = event.choice.candidates[event.choice.taken].steps
                text = f"final model: {event.choice.taken}, {_steps_text(steps)}"
            case _:
                continue
        found.setdefault(event.kind, []).append((event.step, text))
    max_N = log.step_columns["max_steps"]
    for place in np.flatnonzero(np.diff(max_N)):
        text = f"the number of steps was changed from {max_N[place]:,.0f} to {max_N[place + 1]:,.0f}"
        found.setdefault("plan", []).append((int(log.step_columns["step"][place]), text))
    marked = sorted((step, kind, text) for kind, items in found.items() for step, text in _combined(items))
    places = log.at([step for step, _, _ in marked])
    return [
        {"kind": kind, "step": step, "text": text, "tokens": tokens, "seconds": seconds}
        for (step, kind, text), tokens, seconds in zip(marked, places["tokens"], places["seconds"], strict=True)
    ]


def _steps_text(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(f'{step:,}' for step in steps)}"


def _combined(items: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    size = -(-len(items) // MAX_MARKS)
    groups = [items[first : first + size] for first in range(0, len(items), size)]
    return [
        (group[0][0], group[0][1] if len(group) == 1 else f"{group[0][1]}; {len(group)} times to step {group[-1][0]:,}")
        for group in groups
    ]


# Sample translations

TEXTS = ("source", "reference", "translation")


def translations(log: Log) -> list[dict[str, Any]]:
    """The sample translations of each validation, and of the final model at the end."""
    scored = [(event.step, event.translations) for event in log.of_kind(ValidationEvent) if event.translations]
    shown = [_translated(step, score, is_final=False) for step, score in evenly(scored, MAX_TRANSLATED)]
    for end in log.of_kind(EndEvent)[-1:]:
        if end.choice.translations is not None:
            shown.append(_translated(end.step, end.choice.translations, is_final=True))
    return [one for one in shown if one["samples"]]


def _translated(step: int, score: TranslationScore, *, is_final: bool) -> dict[str, Any]:
    samples = [sample for sample in map(_sample, score.samples) if sample] if isinstance(score.samples, list) else []
    return {"step": step, "bleu": score.bleu, "is_final": is_final, "samples": samples}


def _sample(sample: Any) -> dict[str, Any]:
    """Source, reference and translation, and the attention if there is any; empty if the sample lacks a text."""
    texts = {name: sample.get(name) for name in TEXTS} if isinstance(sample, dict) else {}
    if not texts or not all(isinstance(text, str) for text in texts.values()):
        return {}
    attention = _attention(sample.get("attention"))
    return texts | ({"attention": attention} if attention else {})


def _attention(value: Any) -> dict[str, Any]:
    """Pieces and weights in thousandths; empty if the shape is wrong."""
    try:
        source, target = [[str(piece) for piece in value[side]] for side in ("source", "target")]
        weight_TS = np.array(value["weights"], dtype=np.float64)
    except (TypeError, ValueError, LookupError):
        return {}
    if weight_TS.size == 0 or weight_TS.shape != (len(target), len(source)):
        return {}
    weight_TS = np.nan_to_num(weight_TS).clip(0, 1)
    return {"source": source, "target": target, "weights": np.rint(1000 * weight_TS).astype(int).tolist()}
