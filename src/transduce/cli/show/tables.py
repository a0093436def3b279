"""What commands print for people: tables, bars, progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from transduce.errors import ConfigError

if TYPE_CHECKING:
    from transduce.data.prepare import CorpusReport, Report
    from transduce.data.prepare import Progress as Told
    from transduce.data.stats import Stats
    from transduce.evaluation.evaluate import Evaluation
    from transduce.evaluation.metrics import BracketScore
    from transduce.paper_check import Row
    from transduce.training.trainer import Tell
    from transduce.translation.records import Summary

LONGEST_EXAMPLE = 30
LONGEST_BAR = 20
SECONDS_BETWEEN_LINES = 10.0


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
            bars.update(tasks[stage], completed=done, total=total, count=f"{done:,}" if done else "")

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
        console.print(_dropped_table(corpus, console.width))
    for corpus in report.valid_corpora:
        what = f"{corpus.n_read:,} pairs of {corpus.name}, {_direction(corpus)}, as they are"
        console.print(escape(f"validation: {what}"))
    if report.held_out_share:
        console.print(
            f"validation: {report.valid.n_pairs:,} pairs, those whose source hashes to the first 1/"
            f"{round(1 / report.held_out_share)}: the same on every machine and in any order"
        )
    if report.valid.n_pairs == 0:
        console.print("validation: none, so that training cannot tell how good it gets: give --valid, or more text")
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


def _dropped_table(corpus: CorpusReport, width: int) -> Table:
    title = escape(f"{corpus.name}, {_direction(corpus)}: {corpus.n_read:,} pairs read")
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("pairs", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("the first", no_wrap=True)
    rows = [(f"dropped: {rule}", n, _example(corpus.examples[rule])) for rule, n in corpus.dropped.items()]
    rows.append(("dropped: a side is in validation", corpus.n_shared, ""))
    rows.append(("held out for validation", corpus.n_held_out, ""))
    rows.append(("[bold]kept to train on", corpus.n_kept, ""))
    # Where there is too little room, Rich would take it from the counts, which are what one looks for.
    room = width - max(len(name) for name, _, _ in rows) - len(f"{corpus.n_read:,}") - 20
    for name, n, example in rows:
        if n:
            brief = example if len(example) <= room else example[: max(room - 1, 0)] + "…" * (room > 0)
            table.add_row(name, f"{n:,}", f"{n / corpus.n_read:.2%}", escape(brief))
    return table


def _direction(corpus: CorpusReport) -> str:
    return f"{corpus.source_language}-{corpus.target_language}{' both ways' if corpus.both_ways else ''}"


def _example(example: list[Any]) -> str:
    line, *sides = example
    source, target = (_brief(side) for side in sides)
    return f"line {line:,}: {source} | {target}"


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


def show_corpora(console: Console, registry: Mapping[str, Mapping[str, Any]], data_root: str | None) -> None:
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
    return Console(highlight=False, emoji=False, soft_wrap=not is_terminal, width=None if is_terminal else 140)


@contextmanager
def show_training(out: Path, quiet: bool, tensorboard: bool) -> Iterator[tuple[Tell, Told]]:
    """How a run goes, on stderr: a live line on a terminal, plain lines elsewhere; and its end on stdout."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    display = TrainingDisplay(console, out, quiet, tensorboard)
    with display.live:
        yield display.tell, display.told
    display.close()


class TrainingDisplay:
    def __init__(self, console: Console, out: Path, quiet: bool, tensorboard: bool) -> None:
        self.console, self.out, self.quiet = console, out, quiet
        self.is_live = console.is_terminal and not quiet
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
        self.live = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not self.is_live
        )
        self.task: Any = None
        self.stage, self.max_steps, self.said = "", 0, 0.0
        self.writer: Any = None
        if tensorboard:
            self.writer = _tensorboard_writer(out)

    def told(self, stage: str, done: int, total: int | None) -> None:
        """Of preparing the data."""
        if stage != self.stage:
            self.stage = stage
            if not self.quiet and not self.is_live:
                print(stage, file=sys.stderr, flush=True)
            self._next_bar(stage, total)
        if self.task is not None:
            self.live.update(self.task, completed=done, total=total, count=f"{done:,}" if done else "")

    def tell(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if self.writer is not None:
            _to_tensorboard(self.writer, event)
        if self.quiet and kind not in ("out of memory", "bad step", "damaged"):
            return
        handler = {"forecast": self._forecast, "step": self._step}.get(kind)
        if handler is not None:
            handler(event)
        elif line := describe_event(event):
            self.console.print(escape(line))

    def _forecast(self, event: dict[str, Any]) -> None:
        self.max_steps = event["steps"]
        where = f"{event['device']}, {event['dtype']}, {event['n_threads']} threads"
        if event["way"] == "plain":
            where += f", plain passes: {event['why_plain']}"
        self.console.print(
            escape(
                f"{event['size']}: {event['parameters'] / 1e6:.1f} M parameters; "
                f"{event['steps']:,} steps of {event['batch_tokens']:,} tokens, {event['epochs']:,} epochs; "
                f"about {_time(event['seconds'])} at {event['tokens_per_second']:,.0f} target tokens/s, "
                f"{_bytes(event['memory_bytes'])} ({where})"
            )
        )

    def _step(self, event: dict[str, Any]) -> None:
        line = (
            f"loss {event['loss']:.3f}  norm {event['gradient_norm']:.2f}  rate {event['learning_rate']:.1e}  "
            f"{event['tokens_per_second']:,.0f} tokens/s  {_bytes(event['memory_bytes'])}"
        )
        self.max_steps = event["max_steps"]
        if self.is_live:
            if self.stage != "training":
                self.stage = "training"
                self._next_bar("training", self.max_steps)
            step = event["step"]
            self.live.update(self.task, completed=step, description=line, count=f"step {step:,} of {self.max_steps:,}")
        elif time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            left = _time((self.max_steps - event["step"]) * event["seconds_per_step"])
            print(f"step {event['step']:,} of {self.max_steps:,}  {line}  {left} left", file=sys.stderr, flush=True)

    def _next_bar(self, name: str, total: int | None) -> None:
        if not self.is_live:
            return
        if self.task is not None:
            self.live.remove_task(self.task)
        self.task = self.live.add_task(escape(name), total=total, count="")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def describe_event(event: dict[str, Any]) -> str:
    """One line for people, or none."""
    step = f"step {event['step']:,}"
    kind = event["event"]
    if kind == "valid":
        best = ", the best so far" if event["is_best"] else ""
        bleu = f", BLEU {event['bleu']:.1f}" if "bleu" in event else ""
        accuracy = f"token accuracy {event['accuracy']:.1%}"
        return f"{step}: validation perplexity {event['perplexity']:.2f}, {accuracy}{bleu}{best}"
    if kind == "resumed":
        return f"going on from {step}"
    if kind == "damaged":
        return f"the checkpoint of {step} is damaged ({event['fault']}): going on from the one before"
    if kind == "out of memory":
        return (
            f"{step}: out of memory; a pass holds {event['micro_limit']:,} positions from now on, batches stay the same"
        )
    if kind == "bad step":
        return f"{step}: loss or gradient is no number; the step was not taken, its pairs are in bad-batches/"
    return ""


def show_result(console: Console, out: Path, result: Mapping[str, Any], events: list[dict[str, Any]]) -> None:
    """How perplexity fell, and what came of it."""
    curve = [event for event in events if event["event"] == "valid"]
    if curve:
        with_bleu = "bleu" in curve[-1]
        table = Table("step", title="validation", title_justify="left", title_style="bold", box=box.SIMPLE)
        for name in ("BLEU", "perplexity") if with_bleu else ("perplexity",):
            table.add_column(name, justify="right")
        table.add_column("")
        most = math.log(max(event["perplexity"] for event in curve))
        for event in curve:
            bar = "█" * round(LONGEST_BAR * 2 * math.log(event["perplexity"]) / max(most, 1e-9))
            bleu = [f"{event['bleu']:.1f}"] if with_bleu else []
            table.add_row(f"{event['step']:,}", *bleu, f"{event['perplexity']:,.2f}", bar)
        console.print(table)
    for sample in result.get("samples", ()):
        console.print(escape(f"  {sample['source']}\n    -> {sample['translation']}\n     = {sample['reference']}"))
    taken = result["candidates"][result["taken"]]
    n = len(taken["steps"])
    what = f"average of {n} checkpoints" if n > 1 else "one checkpoint"
    score = (
        ""
        if taken["perplexity"] is None
        else f": perplexity {taken['perplexity']:.2f}, token accuracy {taken['accuracy']:.1%}"
    )
    if "bleu" in result:
        score += f", BLEU {result['bleu']:.1f} of greedy translations"
    console.print(escape(f"{out / 'model'}, the {what} ({result['taken']}){score}"))
    console.print(f"{result['steps']:,} steps, {result['target_tokens']:,} target tokens, {_time(result['seconds'])}")


def show_runs(console: Console, summaries: list[dict[str, Any]]) -> None:
    table = Table("run", "state", "size", box=box.SIMPLE)
    table.columns[0].overflow, table.columns[1].no_wrap = "fold", True
    for name in ("parameters", "steps", "batch", "dropout", "seed", "perplexity", "accuracy", "BLEU", "time"):
        table.add_column(name, justify="right")
    for name in ("config", "data"):
        table.add_column(name)
    for one in summaries:
        perplexity = "" if one["perplexity"] is None else f"{one['perplexity']:.2f}"
        accuracy = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
        bleu = "" if one["bleu"] is None else f"{one['bleu']:.1f}"
        table.add_row(
            escape(one["run"]),
            one["state"],
            escape(one["size"]),
            f"{one['parameters'] / 1e6:.1f} M",
            f"{one['steps']:,}",
            f"{one['batch_tokens']:,}",
            f"{one['dropout']:g}",
            str(one["seed"]),
            perplexity,
            accuracy,
            bleu,
            "" if one["seconds"] is None else _time(one["seconds"]),
            one["config_hash"],
            one["data"],
        )
    console.print(table)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _bytes(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def _tensorboard_writer(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("--tensorboard needs the package tensorboard: pip install tensorboard") from None
    return SummaryWriter(str(out / "tensorboard"))


def _to_tensorboard(writer: Any, event: dict[str, Any]) -> None:
    if event["event"] in ("step", "valid"):
        for name, value in event.items():
            if isinstance(value, float):
                writer.add_scalar(f"{'train' if event['event'] == 'step' else 'valid'}/{name}", value, event["step"])


@contextmanager
def translation_progress(quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar, unless the translations themselves are on the screen; a line now and then where nobody looks."""
    if quiet or (sys.stderr.isatty() and (sys.stdout.isatty() or sys.stdin.isatty())):
        yield lambda n: None
    elif sys.stderr.isatty():
        with progress_on_stderr(quiet=False) as told:
            yield lambda n: told("translating", n, None)
    else:
        began = said = time.monotonic()

        def say(n: int) -> None:
            nonlocal said
            if (now := time.monotonic()) - said > SECONDS_BETWEEN_LINES:
                said = now
                print(f"{n:,} lines, {n / (now - began):,.0f} a second", file=sys.stderr, flush=True)

        yield say


def show_summary(summary: Summary, quiet: bool) -> None:
    """On stderr: how much was translated, and what of it is less than it should be."""
    if summary.n_damaged:
        print(
            f"transduce: {summary.n_damaged:,} lines were no UTF-8, the first {summary.first_damaged}: "
            "what could not be read was replaced",
            file=sys.stderr,
        )
    if not quiet:
        flags = "".join(f"; {n:,} {flag}" for flag, n in sorted(summary.flags.items()))
        print(
            f"{summary.n_lines:,} line{'s' * (summary.n_lines != 1)} in {_time(summary.seconds)}{flags}",
            file=sys.stderr,
        )


def show_evaluation(console: Console, evaluation: Evaluation) -> None:
    from transduce.translation.result import FLAGS

    words: Mapping[str, str] = dict(FLAGS.items())

    table = Table(box=box.SIMPLE_HEAD, title=f"{evaluation.n_sentences:,} sentences", title_justify="left")
    for name, justify in (("", "left"), ("score", "right"), ("95 % interval", "right"), ("signature", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for score in evaluation.scores:
        interval = f"{score.interval[0]:.1f} to {score.interval[1]:.1f}" if score.interval else ""
        table.add_row(score.name, f"{score.value:.1f}", interval, escape(score.signature))
    if evaluation.perplexity is not None:
        left_out = f", {n:,} long ones left out" if (n := evaluation.n_without_perplexity) else ""
        table.add_row("perplexity", f"{evaluation.perplexity:.2f}", "", f"per subword of the references{left_out}")
    table.add_row("length ratio", f"{evaluation.length_ratio:.3f}", "", "tokens of BLEU")
    table.add_row("exact match", f"{100 * evaluation.exact_match:.1f}%", "", "")
    console.print(table)
    if len(evaluation.by_length) > 1:
        console.print(_length_table(evaluation))
    if evaluation.comparison:
        console.print(_comparison_table(evaluation))
    for flag, n in sorted(evaluation.flags.items()):
        console.print(escape(f"{n:,} flagged {flag}: {words[flag]}"))
    console.print("the worst by chrF++:")
    for line in evaluation.worst:
        console.print(escape(f"  {line.chrf:5.1f}  {line.source}"))
        console.print(escape(f"      -> {line.hypothesis}"))
        console.print(escape(f"       = {line.reference}"))


def _length_table(evaluation: Evaluation) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("words of the source", "sentences", "BLEU", "chrF++"):
        table.add_column(name, justify="right")
    for group in evaluation.by_length:
        bounds = f"{group.shortest} or more" if group.longest is None else f"{group.shortest} to {group.longest}"
        table.add_row(bounds, f"{group.n_sentences:,}", f"{group.bleu.value:.1f}", f"{group.chrf.value:.1f}")
    return table


def _comparison_table(evaluation: Evaluation) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("paired bootstrap", "this", "the other", "difference", "p"):
        table.add_column(name, justify="left" if name == "paired bootstrap" else "right")
    for row in evaluation.comparison:
        table.add_row(row.name, f"{row.system:.1f}", f"{row.other:.1f}", f"{row.difference:+.1f}", f"{row.p_value:.3f}")
    return table


def show_brackets(console: Console, found: BracketScore) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"{found.n_sentences:,} trees", title_justify="left")
    for name in ("precision", "recall", "F1", "complete match", "skipped"):
        table.add_column(name, justify="right")
    values = (found.precision, found.recall, found.f1, found.complete_match)
    table.add_row(*(f"{value:.2f}" for value in values), f"{found.n_skipped:,}")
    console.print(table)
    console.print(escape(found.signature))
