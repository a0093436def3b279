"""What commands print for people: tables, bars, progress."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from transduce.data.prepare import CorpusReport, Report
    from transduce.data.prepare import Progress as Told
    from transduce.data.stats import Stats
    from transduce.paper import Row

LONGEST_EXAMPLE = 30
LONGEST_BAR = 20


@contextmanager
def progress_on_stderr(quiet: bool) -> Iterator[Told]:
    """Bars on a terminal; elsewhere a line when a stage begins."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        said = list[str]()

        def say(stage: str, done: int, total: int | None) -> None:
            if stage not in said:
                said.append(stage)
                print(stage, file=sys.stderr, flush=True)

        yield say
        return
    count = TextColumn("{task.fields[count]}")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), count)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def draw(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                for task in tasks.values():  # what was of unknown length is over when the next begins
                    finished = bars.tasks[task].completed or 1
                    bars.update(task, total=finished, completed=finished)
                tasks[stage] = bars.add_task(escape(stage), total=total, count="")
            bars.update(tasks[stage], completed=done, total=total, count=f"{done:,} pairs" if done else "")

        yield draw


def paper_table(title: str, rows: list[Row]) -> Table:
    table = Table("section", title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("setting", min_width=max(len(row.setting) for row in rows if ":" not in row.setting))
    for name in ("paper", "ours", "verdict"):
        table.add_column(name)
    colours = {"same": "green", "differs": "bold red", "not stated": "dim"}
    for row in rows:
        colour = colours[row.verdict]
        cells = (row.section, row.setting, _show(row.paper), _show(row.ours), f"[{colour}]{row.verdict}[/]")
        table.add_row(*cells)
    return table


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def show_report(console: Console, report: Report, out: Path) -> None:
    for corpus in report.corpora:
        console.print(_dropped_table(corpus))
    for corpus in report.valid_corpora:
        what = f"{corpus.n_read:,} pairs of {corpus.name}, {_direction(corpus)}, as they are"
        console.print(escape(f"validation: {what}"))
    if report.held_out_share:
        console.print(
            f"validation: {report.valid.n_pairs:,} pairs, those whose source hashes to the first 1/"
            f"{round(1 / report.held_out_share)}: the same on every machine and in any order"
        )
    chosen = "as asked" if report.vocab_size_given else "from the size of the corpus"
    tags = f"; tags for {', '.join(report.tagged_languages)}" if report.tagged_languages else ""
    console.print(f"subwords: {report.vocab_size:,} entries, {chosen}{tags}")
    table = Table("split", box=box.SIMPLE)
    for name in ("pairs", "source tokens", "target tokens"):
        table.add_column(name, justify="right")
    for name, split in (("train", report.train), ("valid", report.valid)):
        table.add_row(name, f"{split.n_pairs:,}", f"{split.n_source_tokens:,}", f"{split.n_target_tokens:,}")
    console.print(table)
    seconds = ", ".join(f"{stage} {time:.1f}" for stage, time in report.seconds.items())
    console.print(escape(f"written to {out} in {sum(report.seconds.values()):.1f} s ({seconds})"))


def _dropped_table(corpus: CorpusReport) -> Table:
    title = escape(f"{corpus.name}, {_direction(corpus)}: {corpus.n_read:,} pairs read")
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("pairs", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("the first of them", overflow="ellipsis", no_wrap=True, ratio=1)
    rows = [(f"dropped: {rule}", n, _example(corpus.examples[rule])) for rule, n in corpus.dropped.items()]
    rows.append(("dropped: a side is in validation", corpus.n_shared, ""))
    rows.append(("held out for validation", corpus.n_held_out, ""))
    rows.append(("[bold]kept to train on", corpus.n_kept, ""))
    for name, n, example in rows:
        if n:
            table.add_row(name, f"{n:,}", f"{n / corpus.n_read:.2%}", example)
    return table


def _direction(corpus: CorpusReport) -> str:
    return f"{corpus.source_language}-{corpus.target_language}{' both ways' if corpus.both_ways else ''}"


def _example(example: list[Any]) -> str:
    line, *sides = example
    source, target = (_brief(side) for side in sides)
    return escape(f"line {line:,}: {source} | {target}")


def _brief(text: str) -> str:
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return text if len(text) <= LONGEST_EXAMPLE else text[: LONGEST_EXAMPLE - 1] + "…"


def show_stats(console: Console, stats: Stats) -> None:
    table = Table("tokens", title="lengths", title_justify="left", title_style="bold", box=box.SIMPLE)
    for name in ("source", "target"):
        table.add_column(name, justify="right")
        table.add_column("")
    most = max(max(bar.n_source, bar.n_target) for bar in stats.bars)
    for bar in stats.bars:
        cells = []
        for n in (bar.n_source, bar.n_target):
            cells += [f"{n:,}", "█" * round(LONGEST_BAR * n / most) or ("▏" if n else "")]
        table.add_row(f"{bar.first}-{bar.last}" if bar.first < bar.last else str(bar.first), *cells)
    console.print(table)
    console.print(
        f"mean length: source {stats.mean_source_length:.1f}, target {stats.mean_target_length:.1f}; "
        f"longest {stats.longest:,}; spelt in bytes: {stats.byte_share:.2%} of tokens"
    )
    console.print(
        f"an epoch of {stats.n_examples:,} examples at {stats.batch_tokens:,} tokens: {stats.n_steps:,} steps of "
        f"{stats.source_tokens_per_step:,.0f} source and {stats.target_tokens_per_step:,.0f} target tokens,\n"
        f"{stats.n_micro_batches:,} micro-batches in {stats.n_shapes} shapes; "
        f"not padding: {stats.source_non_pad_share:.1%} of source, {stats.target_non_pad_share:.1%} of target"
    )


def show_corpora(console: Console, registry: Mapping[str, Mapping[str, Any]], data_root: Path | None) -> None:
    for name, facts in registry.items():
        kinds = {"train": "pairs", "trees": "trees", "test": "pairs to test on"}
        kind = next(kind for kind in kinds if kind in facts["lines"])
        what = " ".join([*facts.get("languages", []), f"{facts['lines'][kind]:,}", kinds[kind]])
        console.print(f"[bold]{escape(name)}[/]  {escape(what)}: {escape(facts['about'])}")
        console.print(escape(f"    licence: {facts['licence']}\n    from {facts['from']}"))
    where = "with --data-root they can be used by name" if data_root is None else f"read from {data_root} by name"
    console.print(escape(f"tatoeba-40k is in the package; the others, {where}; checksums are checked"))


def console_for_stdout() -> Console:
    """Where nobody looks at a terminal, lines are as long as they want to be."""
    is_terminal = sys.stdout.isatty()
    return Console(highlight=False, soft_wrap=not is_terminal, width=None if is_terminal else 140)
