"""What `transduce train` and `transduce runs` print."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from transduce.cli.show.progress import SECONDS_BETWEEN_LINES, bars_on
from transduce.cli.show.tables import bytes_text, seconds_text
from transduce.errors import ConfigError
from transduce.training.journal import (
    BadStepEvent,
    DamagedEvent,
    Event,
    ForecastEvent,
    OutOfMemoryEvent,
    ResumedEvent,
    StepEvent,
    ValidationEvent,
)

if TYPE_CHECKING:
    from transduce.data.prepare import Progress as ProgressCallback
    from transduce.training.journal import OnEvent

LONGEST_BAR = 40
SHOWN_IF_QUIET = (OutOfMemoryEvent, BadStepEvent, DamagedEvent)


@contextmanager
def show_training(out: Path, quiet: bool, tensorboard: bool) -> Iterator[tuple[OnEvent, ProgressCallback]]:
    """Shows the progress of a run on stderr: a live line on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    display = TrainingDisplay(console, out, quiet, tensorboard)
    with display.live:
        yield display.show_event, display.show_stage
    display.close()


class TrainingDisplay:
    def __init__(self, console: Console, out: Path, quiet: bool, tensorboard: bool) -> None:
        self.console, self.quiet = console, quiet
        self.is_live = console.is_terminal and not quiet
        self.live = bars_on(console, disable=not self.is_live)
        self.task: TaskID | None = None
        self.stage, self.last_printed = "", 0.0
        self.writer = _tensorboard_writer(out) if tensorboard else None

    def show_stage(self, stage: str, done: int, total: int | None) -> None:
        """Shows a stage of preparing the data."""
        if stage != self.stage:
            self.stage = stage
            if not self.quiet and not self.is_live:
                print(stage, file=sys.stderr, flush=True)
            self._next_bar(stage, total)
        if self.task is not None:
            self.live.update(self.task, completed=done, total=total, count=f"{done:,}" if done else "")

    def show_event(self, event: Event) -> None:
        if self.writer is not None:
            _to_tensorboard(self.writer, event)
        if self.quiet and not isinstance(event, SHOWN_IF_QUIET):
            return
        if isinstance(event, StepEvent):
            self._show_step(event)
        elif line := describe_event(event):
            self.console.print(escape(line))

    def _show_step(self, event: StepEvent) -> None:
        line = (
            f"loss {event.loss:.3f}  norm {event.gradient_norm:.2f}  rate {event.learning_rate:.1e}  "
            f"{event.tokens_per_second:,.0f} tokens/s  {bytes_text(event.memory_bytes)}"
        )
        step = f"step {event.step:,} of {event.max_steps:,}"
        if self.is_live:
            if self.stage != "training":
                self.stage = "training"
                self._next_bar("training", event.max_steps)
            if self.task is not None:
                self.live.update(self.task, completed=event.step, description=line, count=step)
        elif time.monotonic() - self.last_printed > SECONDS_BETWEEN_LINES:
            self.last_printed = time.monotonic()
            time_left = seconds_text((event.max_steps - event.step) * event.seconds_per_step)
            print(f"{step}  {line}  {time_left} left", file=sys.stderr, flush=True)

    def _next_bar(self, name: str, total: int | None) -> None:
        if not self.is_live:
            return
        if self.task is not None:
            self.live.remove_task(self.task)
        self.task = self.live.add_task(escape(name), total=total, count="")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def describe_event(event: Event) -> str:
    """One line for people; empty for events that are not shown."""
    step = f"step {event.step:,}"
    match event:
        case ForecastEvent():
            return _describe_forecast(event)
        case ValidationEvent():
            best = ", the best so far" if event.is_best else ""
            bleu = "" if event.translations is None else f", BLEU {event.translations.bleu:.1f}"
            accuracy = f"token accuracy {event.accuracy:.1%}"
            return f"{step}: validation perplexity {event.perplexity:.2f}, {accuracy}{bleu}{best}"
        case ResumedEvent():
            return f"resumed from {step}"
        case DamagedEvent():
            return f"the checkpoint of {step} is damaged ({event.fault}): the one before it is used"
        case OutOfMemoryEvent():
            limit = f"passes have at most {event.micro_limit:,} positions from now on"
            return f"{step}: out of memory; {limit}, batches stay the same"
        case BadStepEvent():
            return f"{step}: loss or gradient is NaN or infinite; the step was skipped, its pairs are in bad-batches/"
    return ""


def _describe_forecast(event: ForecastEvent) -> str:
    forecast, choices = event.forecast, event.choices
    machine = f"{choices.device}, {choices.dtype}, {choices.n_threads} threads"
    if choices.way == "plain":
        machine += f", plain passes: {choices.why_plain}"
    return (
        f"{forecast.size}: {forecast.parameters / 1e6:.1f} M parameters; "
        f"{forecast.steps:,} steps of {forecast.batch_tokens:,} tokens, {forecast.epochs:,} epochs; "
        f"about {seconds_text(forecast.seconds)} at {forecast.tokens_per_second:,.0f} target tokens/s, "
        f"{bytes_text(forecast.memory_bytes)} ({machine})"
    )


def _tensorboard_writer(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(out / "tensorboard"))


def _to_tensorboard(writer: Any, event: Event) -> None:
    if isinstance(event, StepEvent | ValidationEvent):
        section = "train" if isinstance(event, StepEvent) else "valid"
        for name, value in event.to_json().items():
            if isinstance(value, float):
                writer.add_scalar(f"{section}/{name}", value, event.step)


# The end of a run, and several runs


def show_result(console: Console, out: Path, result: Mapping[str, Any], events: Sequence[Event]) -> None:
    """Shows the validations of a run, some translations, and the final model with its scores."""
    if validations := [event for event in events if isinstance(event, ValidationEvent)]:
        console.print(_validation_table(validations))
    for sample in result.get("samples", ()):
        console.print(escape(f"  {sample['source']}\n    -> {sample['translation']}\n     = {sample['reference']}"))
    taken = result["candidates"][result["taken"]]
    n_averaged = len(taken["steps"])
    kind = f"average of {n_averaged} checkpoints" if n_averaged > 1 else "one checkpoint"
    scores = ""
    if taken["perplexity"] is not None:
        scores = f": perplexity {taken['perplexity']:.2f}, token accuracy {taken['accuracy']:.1%}"
    if "bleu" in result:
        scores += f", BLEU {result['bleu']:.1f} of greedy translations"
    console.print(escape(f"{out / 'model'}: {kind} ({result['taken']}){scores}"))
    seconds = seconds_text(result["seconds"])
    console.print(f"{result['steps']:,} steps, {result['target_tokens']:,} target tokens, {seconds}")


def _validation_table(validations: Sequence[ValidationEvent]) -> Table:
    has_bleu = validations[-1].translations is not None
    table = Table("step", title="validation", title_justify="left", title_style="bold", box=box.SIMPLE)
    for name in ("BLEU", "perplexity") if has_bleu else ("perplexity",):
        table.add_column(name, justify="right")
    table.add_column("")
    highest = math.log(max(event.perplexity for event in validations))
    for event in validations:
        bar = "█" * round(LONGEST_BAR * math.log(event.perplexity) / max(highest, 1e-9))
        bleu = [f"{event.translations.bleu:.1f}" if event.translations else ""] if has_bleu else []
        table.add_row(f"{event.step:,}", *bleu, f"{event.perplexity:,.2f}", bar)
    return table


def show_runs(console: Console, summaries: Sequence[Mapping[str, Any]]) -> None:
    """`summaries`: results of `runs.summary_of`."""
    table = Table("run", "state", "size", box=box.SIMPLE)
    table.columns[0].overflow, table.columns[1].no_wrap = "fold", True
    for name in ("parameters", "steps", "batch", "dropout", "seed", "perplexity", "accuracy", "BLEU", "time"):
        table.add_column(name, justify="right")
    for name in ("config", "data"):
        table.add_column(name)
    for summary in summaries:
        table.add_row(
            escape(summary["run"]),
            summary["state"],
            escape(summary["size"]),
            f"{summary['parameters'] / 1e6:.1f} M",
            f"{summary['steps']:,}",
            f"{summary['batch_tokens']:,}",
            f"{summary['dropout']:g}",
            str(summary["seed"]),
            "" if summary["perplexity"] is None else f"{summary['perplexity']:.2f}",
            "" if summary["accuracy"] is None else f"{summary['accuracy']:.1%}",
            "" if summary["bleu"] is None else f"{summary['bleu']:.1f}",
            "" if summary["seconds"] is None else seconds_text(summary["seconds"]),
            summary["config_hash"],
            summary["data"],
        )
    console.print(table)
