"""The tables of our pages, from the results that programs wrote: no number in them is typed by hand.

    python -m experiments.render            # writes them into README.md and docs/tables.md
    python -m experiments.render --check    # exits with 1 where one of them has others

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from transduce.insight.ablation import Part
from transduce.serving.limits import Limits

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "tables.md")
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = rendered(old)
        if not options.check:
            page.write_text(new, encoding="utf-8")
        elif new != old:
            sys.exit(f"{page.name} has other tables than the results: python -m experiments.render")


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


def train_speed_gpu() -> str:
    sizes = ("base", "big")
    real = [result(f"benchmarks/results/train_real_{size}_h200.json") for size in sizes]
    synthetic = {one["d_model"]: one for one in result("benchmarks/results/gpu_passes_h200.json")["speed"]}
    found = [one["ways"]["written"] for one in real]
    alone = [synthetic[one["config"]["model"]["d_model"]] for one in real]
    beside = result("benchmarks/results/train_speed_base_h200.json")
    rows = [
        [
            "`transduce train` on Europarl, padding not counted",
            *(f"{of['target_tokens_per_second']:,.0f}" for of in found),
        ],
        ["... its slowest and fastest ten steps", *(f"{of['lowest']:,.0f} to {of['highest']:,.0f}" for of in found)],
        [
            "one batch of sentences of 32 tokens, again and again",
            *(f"{of['target_tokens_per_second']:,.0f}" for of in alone),
        ],
        *(
            [f"... {way}, beside peers" if way == beside["ours"] else f"... {way}", f"{statistics.median(of):,.0f}", ""]
            for way, of in beside["target_tokens_per_second"].items()
        ),
        ["... ours over the fastest of them", "{:.2f} ({:.2f} to {:.2f})".format(*beside["ratio"]), ""],
        ["memory, GB", *(f"{of['memory_bytes'] / 1e9:.1f}" for of in found)],
    ]
    return table(["target tokens a second, one H200", *sizes], rows)


def time_to_loss() -> str:
    """Of both programs: how long, and how many steps."""
    rows = []
    for corpus in ("Europarl", "Multi30k"):
        found = result(f"benchmarks/results/time_to_loss_{corpus.lower()}_h200.json")
        both = (found[name] for name in ("ours", "nn.Transformer"))
        ours, theirs = (f"{of['seconds']:.1f} s, {of['steps']} steps" for of in both)
        rows.append([f"{corpus}, {found['size']}: {found['loss']:g}", ours, theirs, f"{found['ratio']:.1f}"])
    head = ["a validation loss on one H200", "`transduce train`", "`nn.Transformer`, a plain loop", "times as soon"]
    return table(head, rows)


def translate_speed_cpu() -> str:
    found = result("benchmarks/results/translate_speed_small_cpu.json")
    kinds = list(found["per_second"])
    rows = [
        [
            way,
            *(f"{statistics.median(found['per_second'][kind][way]):,.0f}" for kind in kinds),
            f"{found['bleu']['beam 4'][way]:.1f}",
        ]
        for way in found["per_second"]["beam 4"]
    ]
    for name, key in (("CTranslate2 (int8)", "ratio"), ("Hugging Face", "over_hugging_face")):
        rows.append([f"{found['ours']} over {name}", "{:.2f} ({:.2f} to {:.2f})".format(*found[key]), *[""] * 4])
    return table(["sentences a second, two cores", *kinds, "BLEU"], rows)


def translate_speed_base_cpu() -> str:
    found = result("benchmarks/results/translate_forced_base_cpu.json")
    rows = [[way, f"{statistics.median(of):,.1f}", str(found["batch"][way])] for way, of in found["per_second"].items()]
    for name, key in (("CTranslate2 (int8)", "ratio"), ("Hugging Face", "over_hugging_face")):
        rows.append([f"ours (int8) over {name}", "{:.2f} ({:.2f} to {:.2f})".format(*found[key]), ""])
    return table(["base, 32,000 subwords, 20 tokens, beam 4, two cores", "sentences a second", "batch"], rows)


def serve_load() -> str:
    found = {name: result(f"benchmarks/results/serve_load{name}_cpu.json") for name in ("", "_int8")}
    ways = ("together", "alone", "one at a time")
    rows = []
    for one in found.values():
        for n, of in one["clients"]["together"].items():
            cells = [one["clients"][way][n] for way in ways]
            shown = [f"{statistics.median(c['per_second']):,.0f} ({c['p50_ms']:.0f}, {c['p99_ms']:.0f})" for c in cells]
            assert set(of["codes"]) == {"200"}
            rows.append([f"{n} client{'s' * (n != '1')}, {one['dtype']}", *shown])
        over = one["clients"]["ratio_at_64"]
        bulk = statistics.median(one["clients"]["bulk_per_second"])
        median, low, high = over["bulk"]
        share = f"{median:.2f} ({low:.2f} to {high:.2f}) of the same sentences in bulk, {bulk:,.0f}"
        rows.append(
            [f"... 64 clients beside that, {one['dtype']}", share, *(f"1 / {over[way][0]:.1f}" for way in ways[1:])]
        )
    abuse, soak = found[""]["abuse"], found[""]["soak"]
    worse = abuse["beside an abuser"]["p99_ms"] / abuse["quiet"]["p99_ms"]
    rows.append(["p99 of 8 honest clients beside an abuser", f"{worse:.2f} times that without him", "", ""])
    halves = f"most memory, of {soak['n_requests']:,} requests the second half over the first"
    rows.append([halves, f"{round(100 * soak['growth'], 1) + 0.0:+.1f} %", "", ""])
    head = ["requests a second (p50, p99 in ms), two cores", "shared batches", "`--alone`", "a plain server"]
    return table(head, rows)


def multi30k() -> str:
    rows = []
    for name, runs in kinds_of(result("experiments/results/multi30k_h200.json"), "form", "direction").items():
        rows.append(row_of(name, runs))
    (alone,) = result("experiments/results/multi30k_alone_h200.json")["runs"]
    rows.append(row_of(f"{alone['form']} {alone['direction']}, seed {alone['seed']}, alone on the GPU", [alone]))
    return table(["form, direction", "BLEU", "on val", "with the penalty best on val", "seeds", "minutes"], rows)


def kinds_of(found: dict[str, Any], *keys: str) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        kinds.setdefault(" ".join(run[key] for key in keys), []).append(run)
    return dict(sorted(kinds.items(), reverse=True))


def row_of(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    chosen = [run["with_the_penalty_best_on_val"]["bleu"] for run in runs]
    bleu, on_val = ([run[key] for run in runs] for key in ("bleu", "bleu_on_val"))
    minutes = statistics.mean(run["minutes"] for run in runs)
    return [name, spread_of(bleu), spread_of(on_val), spread_of(chosen), str(len(runs)), f"{minutes:.1f}"]


def passes() -> str:
    """The fast way of training beside its slow twin."""
    rows = []
    for name, runs in kinds_of(result("experiments/results/multi30k_passes_h200.json"), "passes").items():
        losses, bleu, minutes = ([run[key] for run in runs] for key in ("valid_loss", "bleu", "minutes"))
        rows.append([name, spread_of(losses, 4), spread_of(bleu), f"{statistics.mean(minutes):.1f}"])
    return table(["passes", "validation loss", "BLEU", "minutes"], rows)


def ablation() -> str:
    """The heads that matter most, and least."""
    parts = result("experiments/results/ablation_bundled.json")["parts"]
    heads = sorted(
        (part for part in parts if part["head"] is not None), key=lambda part: part["changes"]["BLEU"]["value"]
    )
    rows = []
    for part in [*heads[:4], *heads[-2:]]:
        cells = [Part(*(part[field] for field in Part._fields)).name]
        for score, form in (
            ("BLEU", "{:+.1f} ({:+.1f} to {:+.1f})"),
            ("loss per token", "{:+.3f} ({:+.3f} to {:+.3f})"),
        ):
            change = part["changes"][score]
            cells.append(form.format(change["value"], *change["interval"]))
        rows.append(cells)
    n_below = sum(part["changes"]["BLEU"]["interval"][1] < 0 for part in heads)
    rows.append([f"heads whose interval of BLEU lies below zero: {n_below} of {len(heads)}", "", ""])
    return table(["without the head", "BLEU", "loss per token"], rows)


def spread_of(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and standard deviation where there are several."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def serve_limits() -> str:
    """With what stands under each field."""
    (fields,) = (node.body for node in ast.walk(ast.parse(inspect.getsource(Limits))) if isinstance(node, ast.ClassDef))
    rows = []
    for field, under in itertools.pairwise(fields):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(under, ast.Expr)
            assert isinstance(under.value, ast.Constant)
            name, said = field.target.id, " ".join(str(under.value.value).split())
            rows.append(
                [
                    f"`{name}`: {said[0].lower()}{said[1:].rstrip('.')}",
                    f"{getattr(Limits(), name):,}".removesuffix(".0"),
                ]
            )
    return table(["limit", "default"], rows)


# The paper's tables. The programs that make them show them too; they use this one, so it imports them when needed.


def made(path: str, command: str, show: Callable[[Any], str]) -> str:
    """What is shown of a result; where there is none yet, how to make it."""
    return show(result(path)) if (ROOT / path).exists() else f"No result yet: run `{command} --out {path}`."


def table1() -> str:
    def show(found: Any) -> str:
        from experiments import table1

        return table1.table(found)

    return made("experiments/results/table1_cpu.json", "python -m experiments.table1", show)


def table2() -> str:
    """Multi30k, and what else was run: on a GPU, on a CPU, or on both."""
    from experiments import table2

    command = "python -m experiments.table2 --run tatoeba europarl --data DATA --work WORK"
    of_multi30k, on_gpu = result("experiments/results/multi30k_h200.json"), "experiments/results/table2_h200.json"
    found = [result(path) for path in (on_gpu, "experiments/results/table2_cpu.json") if (ROOT / path).exists()]
    shown = table2.table(found, of_multi30k)
    if (ROOT / on_gpu).exists():
        return shown
    return f"{shown}\n\nOf Tatoeba and Europarl there is no result on a GPU yet: run `{command} --out {on_gpu}`."


def table3(name: Literal["table", "asked"]) -> str:
    """On a GPU where it was run on one, else at what scale a CPU has run it."""
    from experiments import table3

    show = {"table": table3.table, "asked": table3.asked_table}[name]
    scale = "--scale 4 --depth 2 --steps 2500 --set data.batch_tokens=512 --device cpu --beside 2"
    if (ROOT / (on_gpu := "experiments/results/table3_h200.json")).exists():
        return show(result(on_gpu))
    command = f"python -m experiments.table3 --prepared FOLDER {scale}"
    return made("experiments/results/table3_cpu.json", command, show)


def table3_source() -> str:
    from experiments import table3

    return table3.source_table(result("experiments/results/table3_source_cpu.json"))


def gradient_norms() -> str:
    from experiments import table3

    path, command = "experiments/results/gradient_norms_cpu.json", "python -m experiments.table3 --rows --scale 1"
    return made(path, f"{command} --prepared FOLDER", table3.gradient_table)


TABLES: dict[str, Callable[[], str]] = {
    "serve-limits": serve_limits,
    "serve-load": serve_load,
    "train-speed-cpu": train_speed_cpu,
    "train-speed-gpu": train_speed_gpu,
    "time-to-loss": time_to_loss,
    "translate-speed-cpu": translate_speed_cpu,
    "translate-speed-base-cpu": translate_speed_base_cpu,
    "multi30k": multi30k,
    "passes": passes,
    "ablation": ablation,
    "table1": table1,
    "table2": table2,
    "table3": lambda: table3("table"),
    "table3-asked": lambda: table3("asked"),
    "table3-source": table3_source,
    "gradient-norms": gradient_norms,
}

if __name__ == "__main__":
    main()
