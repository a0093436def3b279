"""The README's tables, from the results that programs wrote: no number in them is typed by hand.

    python -m experiments.render            # writes them into README.md
    python -m experiments.render --check    # exits with 1 where README.md has others

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    old = README.read_text(encoding="utf-8")
    new = rendered(old)
    if options.check:
        sys.exit("README.md has other tables than the results: python -m experiments.render" if new != old else 0)
    README.write_text(new, encoding="utf-8")


def rendered(text: str) -> str:
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found['name']]()}\n\n{found[3]}", text)


def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ruler, *rows))


def train_speed_cpu() -> str:
    found = [result(f"benchmarks/results/train_speed_{size}_cpu.json") for size in ("small", "base")]
    names = dict.fromkeys(way for one in found for way in one["target_tokens_per_second"])
    rows = []
    for way in names:
        cells = [one["target_tokens_per_second"].get(way) for one in found]
        rows.append([way, *(f"{statistics.median(of):,.0f}" if of else "" for of in cells)])
    ratios = [one["ratio"] for one in found], [one["keeping_memory"]["ratio"] for one in found]
    for name, cells in zip(("ours over the fastest peer", "... both keeping memory"), ratios, strict=True):
        rows.append([name, *("{:.2f} ({:.2f} to {:.2f})".format(*cell) for cell in cells)])
    return table(["target tokens a second, two cores", "small", "base"], rows)


TABLES = {"train-speed-cpu": train_speed_cpu}

if __name__ == "__main__":
    main()
