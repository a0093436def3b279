"""The events of a run, and log.jsonl, which has one line for each.

Trainer and run report each event to an `on_event` callback. `to_json` gives the dictionary of a line of the log, and
`event_from_json` reads it back. Fields with a default are missing in the logs of older versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from transduce.files import write_atomically
from transduce.training.choices import Choices

LOG = "log.jsonl"

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The size and the length of a run, as measured before its first step. run.json holds it too."""

    size: str
    parameters: int
    steps: int
    seconds: float
    memory_bytes: int
    epochs: float
    batch_tokens: int
    seconds_per_step: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class TranslationScore:
    """BLEU of greedy translations of validation sentences."""

    bleu: float
    bleu_signature: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """A few of the sentences: source, reference, translation, and attention: the pieces of source and target, and the
    weight of each source piece for each target piece."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate for the final model: the average of some snapshots, and its scores on the validation sentences."""

    steps: list[int]
    loss: float | None
    perplexity: float | None
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class FinalChoice:
    """All candidates for the final model by name, and the name of the best one."""

    taken: str
    candidates: dict[str, Candidate]
    translations: TranslationScore | None = None

    def to_json(self) -> dict[str, Any]:
        candidates = {name: asdict(candidate) for name, candidate in self.candidates.items()}
        return {"taken": self.taken, "candidates": candidates, **_translations_to_json(self.translations)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        candidates = {name: _record(Candidate, candidate) for name, candidate in values["candidates"].items()}
        return cls(taken=values["taken"], candidates=candidates, translations=_translations_from_json(values))


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: ClassVar[str]
    """Its name in the log."""
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return _record(cls, values)


OnEvent = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class ForecastEvent(Event):
    """The run is settled: the first event of a new run."""

    kind = "forecast"
    step: int = 0
    forecast: Forecast
    choices: Choices

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind, "step": self.step, **asdict(self.forecast), **asdict(self.choices)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(forecast=_record(Forecast, values), choices=_record(Choices, values))


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """Means since the last event of this kind."""

    kind = "step"
    loss: float
    """Per target token, with label smoothing."""
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float
    memory_bytes: int
    seconds: float
    """Since the first step, without pauses between processes."""
    epoch: float
    seconds_per_step: float
    max_steps: int


@dataclass(frozen=True, kw_only=True)
class ValidationEvent(Event):
    kind = "valid"
    loss: float
    """Per target token, without label smoothing."""
    perplexity: float
    accuracy: float
    is_best: bool
    """No validation before had a lower loss."""
    translations: TranslationScore | None = None

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
        del values["translations"]
        return values | _translations_to_json(self.translations)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return _record(cls, {**values, "translations": _translations_from_json(values)})


@dataclass(frozen=True, kw_only=True)
class SavedEvent(Event):
    """A checkpoint is complete."""

    kind = "saved"


@dataclass(frozen=True, kw_only=True)
class ResumedEvent(Event):
    """The run continues from the checkpoint of this step."""

    kind = "resumed"


@dataclass(frozen=True, kw_only=True)
class DamagedEvent(Event):
    """The checkpoint of this step cannot be used."""

    kind = "damaged"
    fault: str


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryEvent(Event):
    """A pass did not fit into memory. From now on passes are smaller; batches stay the same."""

    kind = "out of memory"
    micro_limit: int
    """The most positions of a pass, padding included."""


@dataclass(frozen=True, kw_only=True)
class BadStepEvent(Event):
    """Loss or gradient was NaN or infinite; the weights did not change."""

    kind = "bad step"
    in_a_row: int


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The final model is chosen and saved."""

    kind = "end"
    choice: FinalChoice

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind, "step": self.step, **self.choice.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(step=values["step"], choice=FinalChoice.from_json(values))


KINDS: tuple[type[Event], ...] = (
    ForecastEvent,
    StepEvent,
    ValidationEvent,
    SavedEvent,
    ResumedEvent,
    DamagedEvent,
    OutOfMemoryEvent,
    BadStepEvent,
    EndEvent,
)


def event_from_json(values: Mapping[str, Any]) -> Event:
    (kind,) = (kind for kind in KINDS if kind.kind == values["event"])
    return kind.from_json(values)


def _record(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """An instance of a dataclass from the values of its fields; other values are ignored."""
    names = [one.name for one in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: values[name] for name in names if name in values})


def _translations_to_json(score: TranslationScore | None) -> dict[str, Any]:
    return {} if score is None else asdict(score)


def _translations_from_json(values: Mapping[str, Any]) -> TranslationScore | None:
    return _record(TranslationScore, values) if "bleu" in values else None


class Journal:
    """Writes log.jsonl. When a run resumes from a checkpoint, the events after that checkpoint are removed."""

    def __init__(self, folder: Path, on_event: OnEvent) -> None:
        """`on_event` is called with each event after it is written."""
        self.path, self.on_event = folder / LOG, on_event

    def record(self, event: Event) -> None:
        if isinstance(event, ResumedEvent):
            self._remove_after(event.step)
        if self.path.parent.exists():
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(event.to_json()) + "\n")
        self.on_event(event)

    def _remove_after(self, step: int) -> None:
        """Removes the validation of the step itself too: a step is saved before it is validated, and after resuming it
        is validated again."""
        kept = [e for e in read_log(self.path) if e["step"] < step or (e["step"] == step and e["event"] != "valid")]
        write_atomically(self.path, "".join(json.dumps(event) + "\n" for event in kept))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl, without a last line that is incomplete because the process was killed."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def read_events(path: Path) -> list[Event]:
    return [event_from_json(values) for values in read_log(path)]
