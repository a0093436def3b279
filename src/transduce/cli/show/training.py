"""What `transduce train` prints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from transduce.cli.show.progress import SECONDS_BETWEEN_LINES, bars_on
from transduce.cli.show.tables import bytes_text, seconds_text
from transduce.extras import missing
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

LONGEST_BAR, CURVE_WIDTH = 40, 30
BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_IF_QUIET = (OutOfMemoryEvent, BadStepEvent, DamagedEvent)


@contextmanager
def show_training(out: Path, quiet: bool, tensorboard: bool) -> Iterator[tuple[OnEvent, ProgressCallback]]:
    """Shows the progress of a run on stderr: a live display on a terminal, plain lines elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True, force_jupyter=False)
    display = TrainingDisplay(console, out, quiet, tensorboard)
    with display.live:
        yield display.show_event, display.show_stage
    display.close()


class TrainingDisplay:
    """On a terminal: a bar, the loss as a curve, the last validation and a translation of that time."""

    def __init__(self, console: Console, out: Path, quiet: bool, tensorboard: bool) -> None:
        self.console, self.quiet, self.out = console, quiet, out
        self.is_live = console.is_terminal and not quiet
        self.bars = bars_on(console)
        self.live = Live(self, console=console, refresh_per_second=4) if self.is_live else nullcontext()
        self.task: TaskID | None = None
        self.stage, self.last_printed = "", 0.0
        self.losses, self.measures, self.validation, self.sample = list[float](), "", "", ""
        self.make_writer = _tensorboard_writer() if tensorboard else None
        self.writer: Any = None

    def __rich__(self) -> Group:
        lines = []
        if self.losses:
            lines.append(f"loss {self.losses[-1]:.3f}  [cyan]{sparkline(self.losses, CURVE_WIDTH)}[/]  {self.measures}")
        lines += [line for line in (self.validation, self.sample) if line]
        return Group(self.bars, *(Text.from_markup(line, overflow="ellipsis") for line in lines))

    def show_stage(self, stage: str, done: int, total: int | None) -> None:
        """Shows a stage of preparing the data."""
        if stage != self.stage:
            self.stage = stage
            if not self.quiet and not self.is_live:
                print(stage, file=sys.stderr, flush=True)
            self._next_bar(stage, total)
        if self.task is not None:
            self.bars.update(self.task, completed=done, total=total, count=f"{done:,}" if done else "")

    def show_event(self, event: Event) -> None:
        if self.make_writer is not None:
            self.writer = self.writer or self.make_writer(str(self.out / "tensorboard"))
            _to_tensorboard(self.writer, event)
        if self.quiet and not isinstance(event, SHOWN_IF_QUIET):
            return
        if isinstance(event, StepEvent):
            self._show_step(event)
        elif line := describe_event(event):
            if isinstance(event, ValidationEvent):
                self._keep_validation(event, line)
            self.console.print(escape(line))

    def _show_step(self, event: StepEvent) -> None:
        rate = (
            f"norm {event.gradient_norm:.2f}  rate {event.learning_rate:.1e}  {event.tokens_per_second:,.0f} tokens/s"
        )
        self.measures = f"{rate}  {bytes_text(event.memory_bytes)}"
        step = f"step {event.step:,} of {event.max_steps:,}"
        if self.is_live:
            self.losses.append(event.loss)
            if self.stage != "training":
                self.stage = "training"
                self._next_bar("training", event.max_steps)
            if self.task is not None:
                self.bars.update(self.task, completed=event.step, total=event.max_steps, count=step)
        elif time.monotonic() - self.last_printed > SECONDS_BETWEEN_LINES:
            self.last_printed = time.monotonic()
            time_left = seconds_text((event.max_steps - event.step) * event.seconds_per_step)
            print(f"{step}  loss {event.loss:.3f}  {self.measures}  {time_left} left", file=sys.stderr, flush=True)

    def _keep_validation(self, event: ValidationEvent, line: str) -> None:
        self.validation = escape(line)
        if event.translations is not None and event.translations.samples:
            sample = event.translations.samples[0]
            self.sample = escape(f"“{sample['source']}” → “{sample['translation']}”")

    def _next_bar(self, name: str, total: int | None) -> None:
        if not self.is_live:
            return
        if self.task is not None:
            self.bars.remove_task(self.task)
        self.task = self.bars.add_task(escape(name), total=total, count="")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of blocks. Many values are averaged in groups, so that the whole curve fits."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    n = min(width, len(finite))
    groups = (finite[i * len(finite) // n : (i + 1) * len(finite) // n] for i in range(n))
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((mean - low) / ((high - low) or 1) * (len(BLOCKS) - 1))] for mean in means)


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


def _tensorboard_writer() -> Callable[[str], Any]:
    """The class that writes curves. It makes its folder, so it is called once the run has a folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing("--tensorboard", "tensorboard") from None
    return SummaryWriter


def _to_tensorboard(writer: Any, event: Event) -> None:
    if isinstance(event, StepEvent | ValidationEvent):
        section = "train" if isinstance(event, StepEvent) else "valid"
        for name, value in event.to_json().items():
            if isinstance(value, float):
                writer.add_scalar(f"{section}/{name}", value, event.step)


# The end of a run


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
    if taken["steps"] == [0]:
        console.print("no later checkpoint is better on the validation text: the model has the weights it began with")
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
