"""Progress on stderr: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from transduce.data.prepare import Progress as ProgressCallback

SECONDS_BETWEEN_LINES = 10.0


def bars_on(console: Console, *, disable: bool = False) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=disable)


@contextmanager
def progress_on_stderr(quiet: bool) -> Iterator[ProgressCallback]:
    """Draws a bar for each stage on a terminal; elsewhere prints a line when a stage begins."""
    if quiet:
        yield lambda stage, done, total: None
    elif sys.stderr.isatty():
        with bars_on(Console(stderr=True)) as bars:
            yield _draw_bars(bars)
    else:
        yield _print_stages()


def _print_stages() -> ProgressCallback:
    printed = list[str]()

    def print_stage(stage: str, done: int, total: int | None) -> None:
        if stage not in printed:
            printed.append(stage)
            print(stage, file=sys.stderr, flush=True)

    return print_stage


def _draw_bars(bars: Progress) -> ProgressCallback:
    tasks: dict[str, TaskID] = {}

    def draw(stage: str, done: int, total: int | None) -> None:
        if stage not in tasks:
            for task in tasks.values():  # a stage of unknown length is finished when the next one begins
                finished = bars.tasks[task].completed or 1
                bars.update(task, total=finished, completed=finished)
            tasks[stage] = bars.add_task(escape(stage), total=total, count="")
        bars.update(tasks[stage], completed=done, total=total, count=f"{done:,}" if done else "")

    return draw


@contextmanager
def translation_progress(quiet: bool) -> Iterator[Callable[[int], None]]:
    """Reports the number of translated lines. No bar is drawn if the translations appear on the same terminal."""
    if quiet or (sys.stderr.isatty() and (sys.stdout.isatty() or sys.stdin.isatty())):
        yield lambda n: None
    elif sys.stderr.isatty():
        with progress_on_stderr(quiet=False) as progress:
            yield lambda n: progress("translating", n, None)
    else:
        began = last_printed = time.monotonic()

        def print_speed(n: int) -> None:
            nonlocal last_printed
            if (now := time.monotonic()) - last_printed > SECONDS_BETWEEN_LINES:
                last_printed = now
                print(f"{n:,} lines, {n / (now - began):,.0f} per second", file=sys.stderr, flush=True)

        yield print_speed
