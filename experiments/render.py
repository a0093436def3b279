"""Writes the tables of our pages from the JSON results, so that no number in them is typed by hand.

    python -m experiments.render            # updates the tables in README.md and docs
    python -m experiments.render --check    # exits with 1 if a table is outdated

A table is the text between `<!-- table: NAME -->` and `<!-- end of table -->`.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from transduce.insight.ablation import Part
from transduce.serving.limits import Limits

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
START = re.compile(r"<!-- table: [\w-]+ -->")


def pages_with_tables() -> Iterator[Path]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        if START.search(page.read_text(encoding="utf-8")):
            yield page


PAGES = tuple(pages_with_tables())


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
            sys.exit(f"{page.relative_to(ROOT)} has outdated tables: run python -m experiments.render")


def rendered(text: str) -> str:
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match['name']]()}\n\n{match[3]}", text)


def result(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. The first column is aligned left, the others right."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ruler, *rows))


def with_range(ratio: Sequence[float]) -> str:
    """The median, the lowest and the highest value."""
    median, low, high = ratio
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def at_a_glance() -> str:
    """The main results, each with the best published or measured value of a peer and the command that measured it."""
    on_cpu = result("benchmarks/results/train_speed_base_cpu.json")
    same_allocator = on_cpu["keeping_memory"] | {"ours": on_cpu["ours"]}
    cpu_command, gpu_command = "--size base", "--size base --device cuda"
    rows = [
        multi30k_row(),
        train_speed_row("two cores", on_cpu, cpu_command),
        train_speed_row("two cores, peer with our allocator settings", same_allocator, cpu_command),
        train_speed_row("one H200", result("benchmarks/results/train_speed_base_h200.json"), gpu_command),
        *(translate_speed_row(dtype) for dtype in ("int8", "float32")),
    ]
    return table(["what", "`transduce`", "best peer", "measured by"], rows)


def multi30k_row() -> list[str]:
    """BLEU on the form and the direction that the best published score has."""
    from experiments.published import BEST

    form, test, direction = "tok", "test_2016_flickr", "en-de"
    best = BEST[f"multi30k {form}", test, direction]
    runs = grouped(result("experiments/results/multi30k_h200.json"), "form", "direction")[f"{form} {direction}"]
    what = f"BLEU, Multi30k {test}, {direction}, {len(runs)} seeds"
    system = best.system.partition(",")[0]
    ours = mean_and_spread([run["bleu"] for run in runs])
    return [what, ours, f"{best.bleu:g} ({system}, published)", "`python -m experiments.multi30k`"]


def train_speed_row(where: str, measured: dict[str, Any], options: str) -> list[str]:
    """Training of base beside the fastest peer, in the same run of the benchmark."""
    speeds = {name: statistics.median(values) for name, values in measured["target_tokens_per_second"].items()}
    ours = speeds.pop(measured["ours"])
    peer = max(speeds, key=lambda name: speeds[name])
    return [
        f"training, base, {where}: target tokens per second",
        f"{ours:,.0f}",
        f"{speeds[peer]:,.0f} ({plain_name(peer).partition(' (')[0]})",
        f"`python -m benchmarks.train_speed {options}`",
    ]


def plain_name(name: str) -> str:
    """The name of a program and its settings, without the abbreviations of the result files."""
    return name.replace("obvious", "textbook code").replace("keeps memory", "our allocator settings")


def translate_speed_row(dtype: str) -> list[str]:
    """Translation by the bundled model beside the fastest peer of the same precision."""
    bulk = result("benchmarks/results/translate_speed_small_cpu.json")["per_second"]["beam 4"]
    speeds = {name: statistics.median(values) for name, values in bulk.items() if name.endswith(f"({dtype})")}
    ours = speeds.pop(f"ours ({dtype})")
    peer = max(speeds, key=lambda name: speeds[name])
    return [
        f"translation, bundled model, beam 4, {dtype}, two cores: sentences per second",
        f"{ours:,.0f}",
        f"{speeds[peer]:,.0f} ({peer.partition(' (')[0]})",
        "`python -m benchmarks.translate_speed`",
    ]


def train_speed_cpu() -> str:
    results = [result(f"benchmarks/results/train_speed_{size}_cpu.json") for size in ("small", "base")]
    names = dict.fromkeys(name for one in results for name in one["target_tokens_per_second"])
    rows = []
    for name in names:
        speeds = [one["target_tokens_per_second"].get(name) for one in results]
        cells = (f"{statistics.median(values):,.0f}" if values else "" for values in speeds)
        rows.append([plain_name(name), *cells])
    rows.append(["ours relative to the fastest peer", *(with_range(one["ratio"]) for one in results)])
    same_allocator = [one["keeping_memory"]["ratio"] for one in results]
    rows.append(["the same, peer with our allocator settings", *map(with_range, same_allocator)])
    return table(["target tokens per second, two cores", "small", "base"], rows)


def train_speed_gpu() -> str:
    sizes = ("base", "big")
    measured = [result(f"benchmarks/results/train_real_{size}_h200.json") for size in sizes]
    synthetic = {one["d_model"]: one for one in result("benchmarks/results/gpu_passes_h200.json")["speed"]}
    runs = [one["ways"]["written"] for one in measured]
    same_size = [synthetic[one["config"]["model"]["d_model"]] for one in measured]
    peers = result("benchmarks/results/train_speed_base_h200.json")
    rows = [
        [
            "`transduce train` on Europarl, padding not counted",
            *(f"{run['target_tokens_per_second']:,.0f}" for run in runs),
        ],
        [
            "the same: slowest and fastest ten steps",
            *(f"{run['lowest']:,.0f} to {run['highest']:,.0f}" for run in runs),
        ],
        [
            "synthetic: one repeated batch of sentences of 32 tokens",
            *(f"{one['target_tokens_per_second']:,.0f}" for one in same_size),
        ],
        *(
            [
                f"synthetic: {plain_name(name)}" + ", in turns with the peers" * (name == peers["ours"]),
                f"{statistics.median(speeds):,.0f}",
                "",
            ]
            for name, speeds in peers["target_tokens_per_second"].items()
        ),
        ["synthetic: ours relative to the fastest peer", with_range(peers["ratio"]), ""],
        ["memory of `transduce train`, GB", *(f"{run['memory_bytes'] / 1e9:.1f}" for run in runs)],
    ]
    return table(["target tokens per second, one H200", *sizes], rows)


def time_to_loss() -> str:
    """Time and steps of both programs."""
    rows = []
    for corpus in ("Europarl", "Multi30k"):
        measured = result(f"benchmarks/results/time_to_loss_{corpus.lower()}_h200.json")
        both = (measured[name] for name in ("ours", "nn.Transformer"))
        ours, theirs = (f"{one['seconds']:.1f} s, {one['steps']} steps" for one in both)
        target = f"{corpus}, {measured['size']}: {measured['loss']:g}"
        rows.append([target, ours, theirs, f"{measured['ratio']:.1f}"])
    head = ["validation loss to reach, one H200", "`transduce train`", "`nn.Transformer`, plain loop", "times as fast"]
    return table(head, rows)


def translate_speed_cpu() -> str:
    speeds = result("benchmarks/results/translate_speed_small_cpu.json")
    kinds = list(speeds["per_second"])
    rows = [
        [
            name,
            *(f"{statistics.median(speeds['per_second'][kind][name]):,.0f}" for kind in kinds),
            f"{speeds['bleu']['beam 4'][name]:.1f}",
        ]
        for name in speeds["per_second"]["beam 4"]
    ]
    for name, key in (("CTranslate2 (int8)", "ratio"), ("Hugging Face", "over_hugging_face")):
        rows.append([f"{speeds['ours']} relative to {name}", with_range(speeds[key]), *[""] * 4])
    head = [kind.replace("one by one", "one sentence at a time") for kind in kinds]
    return table(["sentences per second, two cores", *head, "BLEU"], rows)


def translate_speed_base_cpu() -> str:
    speeds = result("benchmarks/results/translate_forced_base_cpu.json")
    rows = [
        [name, f"{statistics.median(values):,.1f}", str(speeds["batch"][name])]
        for name, values in speeds["per_second"].items()
    ]
    for name, key in (("CTranslate2 (int8)", "ratio"), ("Hugging Face", "over_hugging_face")):
        rows.append([f"ours (int8) relative to {name}", with_range(speeds[key]), ""])
    return table(["base, 32,000 subwords, 20 tokens, beam 4, two cores", "sentences per second", "batch size"], rows)


def serve_load() -> str:
    results = [result(f"benchmarks/results/serve_load{name}_cpu.json") for name in ("", "_int8")]
    servers = ("together", "alone", "one at a time")
    rows = []
    for one in results:
        for n, measured in one["clients"]["together"].items():
            by_server = [one["clients"][server][n] for server in servers]
            cells = [
                f"{statistics.median(load['per_second']):,.0f} ({load['p50_ms']:.0f}, {load['p99_ms']:.0f})"
                for load in by_server
            ]
            assert set(measured["codes"]) == {"200"}
            rows.append([f"{n} client{'s' * (n != '1')}, {one['dtype']}", *cells])
        ratios = one["clients"]["ratio_at_64"]
        bulk = statistics.median(one["clients"]["bulk_per_second"])
        share = f"{with_range(ratios['bulk'])} of {bulk:,.0f} sentences per second"
        rows.append([f"64 clients, {one['dtype']}: throughput relative to bulk translation", share, "", ""])
        slower = [f"1 / {ratios[server][0]:.1f}" for server in servers[1:]]
        rows.append([f"64 clients, {one['dtype']}: throughput relative to shared batches", "1", *slower])
    abuse, soak = results[0]["abuse"], results[0]["soak"]
    slowdown = abuse["beside an abuser"]["p99_ms"] / abuse["quiet"]["p99_ms"]
    name = "p99 of 8 regular clients while another client abuses the server"
    rows.append([name, f"{slowdown:.2f} times the p99 without abuse", "", ""])
    name = f"peak memory in the second half of {soak['n_requests']:,} requests, relative to the first half"
    rows.append([name, f"{round(100 * soak['growth'], 1) + 0.0:+.1f} %", "", ""])
    routes = with_range(result("benchmarks/results/serve_routes_cpu.json")["routes"]["ratio"])
    name = "64 clients, float32: `/translate` called directly, relative to all requests through FastAPI"
    rows.append([name, f"{routes} times", "", ""])
    head = ["requests per second (p50, p99 in ms), two cores", "shared batches", "`--alone`", "plain server"]
    return table(head, rows)


def multi30k() -> str:
    rows = []
    for name, runs in grouped(result("experiments/results/multi30k_h200.json"), "form", "direction").items():
        rows.append(row_of(name, runs))
    (alone,) = result("experiments/results/multi30k_alone_h200.json")["runs"]
    rows.append(row_of(f"{alone['form']} {alone['direction']}, seed {alone['seed']}, alone on the GPU", [alone]))
    head = ["form, direction", "BLEU", "BLEU on val", "BLEU, length penalty chosen on val", "seeds", "minutes"]
    return table(head, rows)


def grouped(runs: dict[str, Any], *keys: str) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs["runs"]:
        groups.setdefault(" ".join(run[key] for key in keys), []).append(run)
    return dict(sorted(groups.items(), reverse=True))


def row_of(name: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    with_chosen_penalty = [run["with_the_penalty_best_on_val"]["bleu"] for run in runs]
    bleu, on_val = ([run[key] for run in runs] for key in ("bleu", "bleu_on_val"))
    minutes = statistics.mean(run["minutes"] for run in runs)
    scores = map(mean_and_spread, (bleu, on_val, with_chosen_penalty))
    return [name, *scores, str(len(runs)), f"{minutes:.1f}"]


def passes() -> str:
    """The written passes compared with the plain ones."""
    rows = []
    for name, runs in grouped(result("experiments/results/multi30k_passes_h200.json"), "passes").items():
        losses, bleu, minutes = ([run[key] for run in runs] for key in ("valid_loss", "bleu", "minutes"))
        rows.append([name, mean_and_spread(losses, 4), mean_and_spread(bleu), f"{statistics.mean(minutes):.1f}"])
    return table(["passes", "validation loss", "BLEU", "minutes"], rows)


def ablation() -> str:
    """The heads with the largest and the smallest effect on BLEU."""
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
    rows.append([f"heads whose interval for BLEU is below zero: {n_below} of {len(heads)}", "", ""])
    return table(["removed head", "change in BLEU", "change in loss per token"], rows)


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """The mean, and the standard deviation if there are several values."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def serve_limits() -> str:
    """The limits, with the docstring and the default of each field."""
    (fields,) = (node.body for node in ast.walk(ast.parse(inspect.getsource(Limits))) if isinstance(node, ast.ClassDef))
    rows = []
    for field, after in itertools.pairwise(fields):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            name, text = field.target.id, " ".join(str(after.value.value).split())
            rows.append(
                [
                    f"`{name}`: {text[0].lower()}{text[1:].rstrip('.')}",
                    f"{getattr(Limits(), name):,}".removesuffix(".0"),
                ]
            )
    return table(["limit", "default"], rows)


# The paper's tables. The modules that produce them import this one, so the functions below import those modules late.


def table_or_command(path: str, command: str, show: Callable[[Any], str]) -> str:
    """The table of a result, or the command that produces the result if it does not exist."""
    return show(result(path)) if (ROOT / path).exists() else f"No result yet: run `{command} --out {path}`."


def table1() -> str:
    def show(values: Any) -> str:
        from experiments import table1

        return table1.table(values)

    return table_or_command("experiments/results/table1_cpu.json", "python -m experiments.table1", show)


def table2() -> str:
    """Multi30k, and all runs on a GPU and on a CPU. A corpus without a run on a GPU has a row without values."""
    from experiments import table2

    on_gpu, on_cpu = "experiments/results/table2_h200.json", "experiments/results/table2_cpu.json"
    results = [result(path) for path in (on_gpu, on_cpu) if (ROOT / path).exists()]
    present = {run["corpus"] for one in results for run in one["runs"]}
    missing = [corpus for corpus in ("tatoeba", "europarl") if corpus not in present]
    text = table2.table(results, result("experiments/results/multi30k_h200.json"), missing)
    if not missing:
        return text
    command = f"python -m experiments.table2 --run {' '.join(missing)} --data DATA --work WORK --out {on_gpu}"
    return f"{text}\n\nNot run on a GPU yet: {', '.join(missing)}. Run `{command}`."


ON_GPU, ON_CPU = "experiments/results/table3_h200.json", "experiments/results/table3_cpu.json"


def table3(name: Literal["table", "extra"]) -> str:
    """The results on a GPU, if there are any, then those on a CPU."""
    from experiments import table3

    show = {"table": table3.table, "extra": table3.extra_table}[name]
    parts = []
    if (ROOT / ON_GPU).exists():
        values = result(ON_GPU)
        parts.append(f"On {table3.devices_of(values)}:\n\n{show(values)}")
        missing, n_runs = table3.missing_runs(values), len(table3.ROWS) * len(table3.SEEDS)
        if missing and name == "table":
            command = f"python -m experiments.table3 --prepared FOLDER --out {ON_GPU} --beside 8"
            parts.append(f"{len(missing)} of {n_runs} runs on the GPU are missing. Run `{command}`.")
    scale = "--scale 4 --depth 2 --steps 2500 --set data.batch_tokens=512 --device cpu --beside 2"
    command = f"python -m experiments.table3 --prepared FOLDER {scale}"
    on_cpu = table_or_command(ON_CPU, command, lambda values: f"On {table3.devices_of(values)}:\n\n{show(values)}")
    return "\n\n".join([*parts, on_cpu])


def table3_source() -> str:
    """The rows that were run on a CPU for this question, and the same rows on a GPU."""
    from experiments import table3

    on_cpu = result("experiments/results/table3_source_cpu.json")
    keys = [run["row"] for run in on_cpu["runs"]]
    results = [*([result(ON_GPU)] if (ROOT / ON_GPU).exists() else []), on_cpu]
    return "\n\n".join(f"On {table3.devices_of(one)}:\n\n{table3.source_table(one, keys)}" for one in results)


def gradient_norms() -> str:
    from experiments import table3

    path, command = "experiments/results/gradient_norms_cpu.json", "python -m experiments.table3 --rows --scale 1"
    return table_or_command(path, f"{command} --prepared FOLDER", table3.gradient_table)


TABLES: dict[str, Callable[[], str]] = {
    "at-a-glance": at_a_glance,
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
    "table3-extra": lambda: table3("extra"),
    "table3-source": table3_source,
    "gradient-norms": gradient_norms,
}

if __name__ == "__main__":
    main()
