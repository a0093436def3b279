"""A record of attention as a summary for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from transduce.data.subword import SPACE_MARK
from transduce.insight.attention import AttentionRecord
from transduce.insight.heads import KINDS


def show_record(console: Console, record: AttentionRecord) -> None:
    part = f" (part {record.part[0]} of {record.part[1]})" if record.part[1] > 1 else ""
    console.print(escape(f"{record.text}{part}\n  -> {record.translation}"))
    for flag in record.flags:
        console.print(escape(f"  flag: {flag}"))
    console.print(_tokens(record))
    if record.alignment:
        source, target = record.words
        links = ", ".join(f"{source[s]} - {target[t]}" for s, t in record.alignment)
        console.print(escape(f"word alignment: {links}\n"))
    console.print(_heads(record))


def _tokens(record: AttentionRecord) -> Table:
    table = Table("token", box=box.SIMPLE)
    table.add_column("probability", justify="right")
    table.add_column("alternatives")
    for token in record.tokens:
        alternatives = ", ".join(f"{_label(piece)} {probability:.1%}" for piece, probability in token.runners_up)
        table.add_row(escape(_label(token.piece)), f"{token.probability:.1%}", escape(alternatives))
    return table


def _heads(record: AttentionRecord) -> Table:
    table = Table("attention", "layer", "head", "attends mostly to", box=box.SIMPLE)
    table.add_column("distance (tokens)", justify="right")
    table.add_column("entropy (bits)", justify="right")
    for head in record.heads:
        place = (str(head.layer + 1), str(head.head + 1))
        table.add_row(KINDS[head.kind], *place, head.label, f"{head.distance:.1f}", f"{head.entropy:.1f}")
    return table


def _label(piece: str) -> str:
    return piece.replace(SPACE_MARK, "") or "\u2423"
