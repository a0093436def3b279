"""The tables and reports that commands print."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from transduce.data.prepare import CorpusReport, Report
    from transduce.data.stats import Stats
    from transduce.evaluation.evaluate import Evaluation
    from transduce.evaluation.metrics import BracketScore
    from transduce.paper_check import Row
    from transduce.translation.records import Summary

LONGEST_EXAMPLE = 30
LONGEST_BAR = 20


def console_for_stdout() -> Console:
    """A console that breaks lines only on a terminal."""
    is_terminal = sys.stdout.isatty()
    return Console(highlight=False, emoji=False, soft_wrap=not is_terminal, width=None if is_terminal else 140)


def seconds_text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def bytes_text(n: int) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


# check-paper


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


# prepare


def show_report(console: Console, report: Report, out: Path) -> None:
    for corpus in report.corpora:
        console.print(_dropped_table(corpus, console.width))
    for corpus in report.valid_corpora:
        console.print(
            escape(f"validation: {corpus.n_read:,} pairs of {corpus.name}, {_direction(corpus)}, not cleaned")
        )
    if report.held_out_share:
        console.print(
            f"validation: {report.valid.n_pairs:,} pairs, chosen by a hash of the source (1 of "
            f"{round(1 / report.held_out_share)}): the same pairs on every machine and in any order"
        )
    if report.valid.n_pairs == 0:
        console.print("validation: none, so training cannot measure its quality: give --valid, or more text")
    chosen = "as requested" if report.vocab_size_given else "chosen by the size of the corpus"
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
    table.add_column("first example", no_wrap=True)
    rows = [(f"dropped: {rule}", n, _example(corpus.examples[rule])) for rule, n in corpus.dropped.items()]
    rows.append(("dropped: a side is in validation", corpus.n_shared, ""))
    rows.append(("held out for validation", corpus.n_held_out, ""))
    rows.append(("[bold]kept to train on", corpus.n_kept, ""))
    # Examples are shortened to the width that is left; otherwise Rich shortens the counts, which matter more.
    max_length = width - max(len(name) for name, _, _ in rows) - len(f"{corpus.n_read:,}") - 20
    for name, n, example in rows:
        if n:
            if len(example) > max_length:
                example = example[: max_length - 1] + "…" if max_length > 0 else ""
            table.add_row(name, f"{n:,}", f"{n / corpus.n_read:.2%}", escape(example))
    return table


def _direction(corpus: CorpusReport) -> str:
    return f"{corpus.source_language}-{corpus.target_language}{' both ways' if corpus.both_ways else ''}"


def _example(example: list[Any]) -> str:
    line, *sides = example
    source, target = (_shorten(side) for side in sides)
    return f"line {line:,}: {source} | {target}"


def _shorten(text: str) -> str:
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return text if len(text) <= LONGEST_EXAMPLE else text[: LONGEST_EXAMPLE - 1] + "…"


def show_stats(console: Console, stats: Stats) -> None:
    table = Table("tokens", title="lengths", title_justify="left", title_style="bold", box=box.SIMPLE)
    for name in ("source", "target"):
        table.add_column(name, justify="right")
        table.add_column("")
    highest = max(max(bar.n_source, bar.n_target) for bar in stats.bars)
    for bar in stats.bars:
        cells = []
        for n in (bar.n_source, bar.n_target):
            cells += [f"{n:,}", "█" * round(LONGEST_BAR * n / highest) or ("▏" if n else "")]
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
        content = " ".join([*facts.get("languages", []), f"{facts['lines'][kind]:,}", kinds[kind]])
        console.print(f"[bold]{escape(name)}[/]  {escape(content)}: {escape(facts['about'])}")
        console.print(escape(f"    licence: {facts['licence']}\n    from {facts['from']}"))
    folder = "the folder that --data-root names" if data_root is None else data_root
    console.print(escape(f"tatoeba-40k is part of the package. The others are read from {folder}, and verified."))


# translate and evaluate


def show_summary(summary: Summary, quiet: bool) -> None:
    """Prints on stderr how many lines were translated, and the number of translations with each flag."""
    if summary.n_damaged:
        print(
            f"transduce: {summary.n_damaged:,} lines were not valid UTF-8, the first is {summary.first_damaged}: "
            "invalid bytes were replaced",
            file=sys.stderr,
        )
    if not quiet:
        flags = "".join(f"; {n:,} {flag}" for flag, n in sorted(summary.flags.items()))
        print(
            f"{summary.n_lines:,} line{'s' * (summary.n_lines != 1)} in {seconds_text(summary.seconds)}{flags}",
            file=sys.stderr,
        )


def show_evaluation(console: Console, evaluation: Evaluation) -> None:
    from transduce.translation.result import FLAGS

    meanings: Mapping[str, str] = dict(FLAGS.items())
    table = Table(box=box.SIMPLE_HEAD, title=f"{evaluation.n_sentences:,} sentences", title_justify="left")
    for name, justify in (("", "left"), ("score", "right"), ("95 % interval", "right"), ("signature", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for score in evaluation.scores:
        interval = f"{score.interval[0]:.1f} to {score.interval[1]:.1f}" if score.interval else ""
        table.add_row(score.name, f"{score.value:.1f}", interval, escape(score.signature))
    if evaluation.perplexity is not None:
        left_out = f", without {n:,} sentences that are too long" if (n := evaluation.n_without_perplexity) else ""
        table.add_row("perplexity", f"{evaluation.perplexity:.2f}", "", f"per subword of the references{left_out}")
    table.add_row("length ratio", f"{evaluation.length_ratio:.3f}", "", "tokens of BLEU")
    table.add_row("exact match", f"{100 * evaluation.exact_match:.1f}%", "", "")
    console.print(table)
    if len(evaluation.by_length) > 1:
        console.print(_length_table(evaluation))
    if evaluation.comparison:
        console.print(_comparison_table(evaluation))
    for flag, n in sorted(evaluation.flags.items()):
        console.print(escape(f"{n:,} flagged {flag}: {meanings[flag]}"))
    console.print("worst sentences by chrF++:")
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
    for name in ("paired bootstrap", "this", "other", "difference", "p"):
        table.add_column(name, justify="left" if name == "paired bootstrap" else "right")
    for row in evaluation.comparison:
        table.add_row(row.name, f"{row.system:.1f}", f"{row.other:.1f}", f"{row.difference:+.1f}", f"{row.p_value:.3f}")
    return table


def show_brackets(console: Console, brackets: BracketScore) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=f"{brackets.n_sentences:,} trees", title_justify="left")
    for name in ("precision", "recall", "F1", "complete match", "skipped"):
        table.add_column(name, justify="right")
    values = (brackets.precision, brackets.recall, brackets.f1, brackets.complete_match)
    table.add_row(*(f"{value:.2f}" for value in values), f"{brackets.n_skipped:,}")
    console.print(table)
    console.print(escape(brackets.signature))
