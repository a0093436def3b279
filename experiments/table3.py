"""Table 3 of the paper, row by row, with extra rows that the paper does not have, at a scale of about a minute per run.

    python -m experiments.table3 --prepared FOLDER --out experiments/results/table3_h200.json --beside 8
    python -m experiments.table3 --out experiments/results/table3_h200.json --table

A row is a function from one `RunConfig` to another. Applied to the paper's base, it gives the row of the paper. Our
runs apply it to a smaller base, whose widths are divided by `--scale` and whose depth is divided by `--depth`. They
have fewer steps, one fifth of them warm-up, and smaller batches. The peak rate is that of equation 3 after 4,000 steps.
As in the paper, checkpoints are not averaged. The last weights are scored on the validation text. FOLDER is a prepared
folder, such as WORK/prepared of `python -m experiments.bundled_model split`. The result is written after each run, and
runs in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments import render
from experiments.chart import dot_chart
from experiments.gradient_norms import gradient_norms
from experiments.passport import passport, write_result
from experiments.published import TABLE_3
from experiments.runs import BATCH_SIZE, Record, record_of, run_in_parallel, score, settings_from, train_config
from experiments.variants import VARIANTS
from transduce import ConfigError, RunConfig, Translator, base, load_model, override, with_model
from transduce.data.prepare import Prepared
from transduce.evaluation.evaluate import perplexity_of
from transduce.model_folder.format import MODEL, load_origin
from transduce.paper_check import count_parameters
from transduce.training.dial import SHAPES_ON_GPU, with_steps
from transduce.training.gradients import TrainingError

Change = Callable[[RunConfig], RunConfig]

SCALE, STEPS, BATCH_TOKENS = 4, 3000, 8192
DEPTH = ("n_encoder_layers", "n_decoder_layers")
BIG_STEPS = 3
"""Steps of big divided by steps of base, as in the paper."""
WIDTH_MULTIPLE = 16
"""Widths that are multiples of this are fast on a GPU."""
SEEDS = (1, 2, 3)


# The changes of rows


def heads(n: int) -> Change:
    """`n` heads at constant cost: the total width of all heads stays the same."""

    def change(config: RunConfig) -> RunConfig:
        model = config.model
        return with_model(config, n_heads=n, d_k=model.n_heads * model.d_k // n, d_v=model.n_heads * model.d_v // n)

    return change


def multiply(factor: float, *names: str) -> Change:
    """Multiplies the named sizes by a factor."""

    def change(config: RunConfig) -> RunConfig:
        sizes = {name: factor * getattr(config.model, name) for name in names}
        if fractions := [f"{name} {size:g}" for name, size in sizes.items() if size != int(size)]:
            raise ConfigError(
                f"{', '.join(fractions)} is not a whole number: choose --scale and --depth that divide these sizes"
            )
        return with_model(config, **{name: int(size) for name, size in sizes.items()})

    return change


def model(**changes: Any) -> Change:
    return lambda config: with_model(config, **changes)


def label_smoothing(share: float) -> Change:
    return lambda config: replace(config, train=replace(config.train, label_smoothing=share))


def no_warmup(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, schedule="inverse-root"))


def big(config: RunConfig) -> RunConfig:
    wide = multiply(2, "d_model", "d_ff", "n_heads")(with_model(config, dropout=0.3))
    return replace(wide, train=replace(wide.train, max_steps=BIG_STEPS * wide.train.max_steps))


def one_narrow_head(config: RunConfig) -> RunConfig:
    """One head of the usual width, and wider feed-forward networks, so that the number of parameters stays the same up
    to rounding of d_ff."""
    narrow = with_model(config, n_heads=1)
    n_saved = count_parameters(config) - count_parameters(narrow)
    n_per_unit = count_parameters(with_model(narrow, d_ff=narrow.model.d_ff + 1)) - count_parameters(narrow)
    n_units = WIDTH_MULTIPLE * round(n_saved / n_per_unit / WIDTH_MULTIPLE)
    return with_model(narrow, d_ff=narrow.model.d_ff + n_units)


class Row(NamedTuple):
    letter: str
    name: str
    change: Change
    variant: str = "as it is"

    @property
    def key(self) -> str:
        return f"{self.letter}: {self.name}"

    @property
    def is_in_paper(self) -> bool:
        return self.letter != "extra"


ROWS = [
    Row("base", "base", lambda config: config),
    *(Row("A", f"{n} head{'s' if n > 1 else ''}", heads(n)) for n in (1, 4, 16, 32)),
    Row("B", "d_k / 4", multiply(1 / 4, "d_k")),
    Row("B", "d_k / 2", multiply(1 / 2, "d_k")),
    # Relative to the paper's 6 layers: 2, 4 and 8.
    Row("C", "depth / 3", multiply(1 / 3, *DEPTH)),
    Row("C", "depth x 2/3", multiply(2 / 3, *DEPTH)),
    Row("C", "depth x 4/3", multiply(4 / 3, *DEPTH)),
    # The width of a head changes with d_model, so that all heads together stay as wide as the model.
    Row("C", "d_model / 2", multiply(1 / 2, "d_model", "d_k", "d_v")),
    Row("C", "d_model x 2", multiply(2, "d_model", "d_k", "d_v")),
    Row("C", "d_ff / 2", multiply(1 / 2, "d_ff")),
    Row("C", "d_ff x 2", multiply(2, "d_ff")),
    *(Row("D", f"dropout {p:g}", model(dropout=p)) for p in (0.0, 0.2)),
    *(Row("D", f"label smoothing {share:g}", label_smoothing(share)) for share in (0.0, 0.2)),
    Row("E", "learned positions", model(positions="learned")),
    Row("big", "big", big),
    Row("extra", "one narrow head, d_ff wider", one_narrow_head),
    Row("extra", "no 1 / sqrt(d_k)", lambda config: config, "unscaled"),
    Row("extra", "pre-norm", model(norm="pre")),
    Row("extra", "no warm-up", no_warmup),
    Row("extra", "pre-norm, no warm-up", lambda config: no_warmup(with_model(config, norm="pre"))),
    Row("extra", "no self-attention", lambda config: config, "no self-attention"),
]
LETTERS = list(dict.fromkeys(row.letter for row in ROWS))


def scaled(by: int, depth: int, steps: int) -> RunConfig:
    """The paper's base with all widths divided by `by` and the numbers of layers divided by `depth`."""
    paper = base()
    config = multiply(1 / depth, *DEPTH)(multiply(1 / by, "d_model", "d_ff", "d_k", "d_v")(paper))
    data = replace(paper.data, batch_tokens=BATCH_TOKENS, n_shapes=SHAPES_ON_GPU)
    train = replace(paper.train, average_last=1, valid_translations=0)
    return with_steps(replace(config, data=data, train=train), steps)


# One run


class Job(NamedTuple):
    row: str
    seed: int


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if not options.table:
        run_missing(options)
    result = json.loads(options.out.read_text(encoding="utf-8"))
    print("\n\n".join(show(result) for show in (table, extra_table, source_table, gradient_table)))
    if options.svg is not None:
        draw(options.svg, result)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows",
        nargs="*",
        default=LETTERS,
        metavar="LETTER",
        help=f"Run the rows with these letters ({', '.join(LETTERS)}). Without a letter: only the gradient norms.",
    )
    parser.add_argument("--names", nargs="+", help="Run only the rows with these names.")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument(
        "--beside", type=int, default=1, help="Number of simultaneous runs. A small model leaves most of a GPU idle."
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="No run starts after this time.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Training steps of base.")
    parser.add_argument("--scale", type=int, default=SCALE, help="Divisor of the paper's widths.")
    parser.add_argument("--depth", type=int, default=1, help="Divisor of the paper's numbers of layers.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings of base that override ours.")
    parser.add_argument("--sentences", type=int, help="Translate only N validation sentences. Default: all.")
    parser.add_argument("--device")
    parser.add_argument("--svg", type=Path, help="Write a chart of all perplexities to this file.")
    parser.add_argument("--table", action="store_true", help="Only print the tables of the existing result.")
    options = parser.parse_args(arguments)
    if options.prepared is None and not options.table:
        parser.error("a run needs --prepared FOLDER; use --table to print an existing result")
    if unknown := set(options.rows).difference(LETTERS):
        parser.error(f"unknown row {unknown.pop()} in --rows: choose from {', '.join(LETTERS)}")
    return options


def run_missing(options: argparse.Namespace) -> None:
    kind = kind_of(options)
    result: Record = {"experiment": "table3", "kind": kind, "runs": [], "gradient_norms": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
        if {"depth": 1} | result["kind"] != kind:  # older results have no depth
            sys.exit(f"{options.out} has runs of another kind ({result['kind']}, not {kind}): choose another --out")
    known = {(run["row"], run["seed"]) for run in result["runs"]}
    names = [row.key for row in ROWS if row.letter in options.rows and row.name in (options.names or [row.name])]
    jobs = [Job(name, seed) for seed in options.seeds for name in names if (name, seed) not in known]
    for job, record in run_in_parallel(options.beside, partial(run_one, options), jobs, options.minutes):
        result["runs"].append(job._asdict() | {"beside": min(options.beside, len(jobs))} | record)
        write_result(options.out, result)
        progress = job._asdict() | {name: record.get(name) for name in PROGRESS_FIELDS}
        print(json.dumps(progress), file=sys.stderr, flush=True)
    add_gradient_norms(options, result)
    write_result(options.out, result)


PROGRESS_FIELDS = ("perplexity", "bleu", "minutes", "passes", "failed")


def kind_of(options: argparse.Namespace) -> Record:
    """The properties that all runs of one table share."""
    return {
        "scale": options.scale,
        "depth": options.depth,
        "steps": options.steps,
        "settings": options.set,
        "sentences": options.sentences,
        "data": Prepared(options.prepared).report.train.sha256,
    }


def base_of(options: argparse.Namespace) -> RunConfig:
    return override(scaled(options.scale, options.depth, options.steps), options.set)


def config_of(options: argparse.Namespace, row: Row, seed: int) -> RunConfig:
    config = row.change(base_of(options))
    # The last step is the only checkpoint, so that the trainer cannot select another one.
    return replace(config, train=replace(config.train, seed=seed, checkpoint_steps=config.train.max_steps))


def run_one(options: argparse.Namespace, job: Job) -> Record:
    (row,) = (row for row in ROWS if row.key == job.row)
    config, variant = config_of(options, row, job.seed), VARIANTS[row.variant]
    about = {"change": settings_from(row.change(base_of(options)), base_of(options)), "variant": row.variant}
    prepared = Prepared(options.prepared)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with variant.during():
                done = train_config(
                    Path(folder) / "run", options.prepared, config, device=options.device, passes=variant.passes
                )
        except TrainingError as error:  # divergence is a result, too
            return about | {"failed": str(error).partition(":")[0], **passport(config, device_of(options))}
        assert variant.passes in (None, done.settled.choices.way), "this variant needs other passes"
        record = record_of(done)
        loaded, settled = load_model(done.folder / MODEL, done.settled.choices.device)
        variant.settle(loaded)
        origin, _ = load_origin(done.folder / MODEL)
        translator = Translator(loaded, settled, prepared.subwords, origin, batch_size=BATCH_SIZE)
    sources, references = valid_text(prepared, options.sentences)
    all_sources, all_references = valid_text(prepared, None)
    # It must agree with the trainer's perplexity: otherwise the scored model is not the trained one.
    perplexity_as_scored, _ = perplexity_of(translator, all_sources, all_references, None)
    shifted_sources = [*all_sources[1:], all_sources[0]]
    perplexity_of_another_source, _ = perplexity_of(translator, shifted_sources, all_references, None)
    record["parameters"] -= variant.n_unused(settled.model)
    perplexities = {
        "perplexity_as_scored": perplexity_as_scored,
        "perplexity_of_another_source": perplexity_of_another_source,
    }
    return about | record | score(translator, sources, references) | perplexities


def valid_text(prepared: Prepared, n: int | None) -> tuple[list[str], list[str]]:
    """`n` validation pairs at equal distances, or all pairs."""
    rows = np.linspace(0, len(prepared.valid) - 1, min(n or len(prepared.valid), len(prepared.valid))).astype(int)
    pairs = [prepared.valid.pair(int(row)) for row in rows]
    sources, references = (prepared.subwords.decode([pair[side].tolist() for pair in pairs]) for side in (0, 1))
    return sources, references


def device_of(options: argparse.Namespace) -> str:
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def add_gradient_norms(options: argparse.Namespace, result: Record) -> None:
    prepared = Prepared(options.prepared)
    n = len(prepared.subwords)
    known = {(one["norm"], one["seed"]) for one in result["gradient_norms"]}
    for seed in options.seeds:
        for norm in ("post", "pre"):
            config = with_model(base_of(options), norm=norm, source_vocab_size=n, target_vocab_size=n)
            config = replace(config, train=replace(config.train, seed=seed))
            if (norm, seed) not in known:
                result["gradient_norms"].append(gradient_norms(config, prepared, device_of(options)))


# The tables


def table(result: Record) -> str:
    """All rows of the paper, with our values and the printed ones. A row without a run says so."""
    rows = []
    for row in filter(lambda row: row.is_in_paper, ROWS):
        paper = TABLE_3[row.letter, row.name]
        printed = "" if paper.parameters is None else f"{paper.parameters:g}"
        counted = f"{count_parameters(row.change(base())) / 1e6:.1f}"
        cells = cells_of(row, runs_of(result, row))
        rows.append([*cells, f"{paper.perplexity:.2f}", f"{paper.bleu:.1f}", printed, counted])
    head = [
        *HEAD,
        "paper: perplexity",
        "paper: BLEU",
        "paper: parameters (millions)",
        "paper's widths: parameters by our count (millions)",
    ]
    return f"{render.table(head, rows)}\n\n{description_of(result)}"


def extra_table(result: Record) -> str:
    """The rows that the paper does not have, with base and the single head of row A for comparison."""
    rows = [row for row in ROWS if row.letter == "base" or row.key == "A: 1 head" or not row.is_in_paper]
    return render.table(HEAD, [cells_of(row, runs_of(result, row)) for row in rows])


def source_table(result: Record, keys: Sequence[str] = ()) -> str:
    """How much a row's predictions depend on the source. `keys` selects rows; without it, all rows with a run."""
    rows = []
    for row in ROWS:
        runs = [run for run in runs_of(result, row) if "perplexity_of_another_source" in run]
        if runs and row.key in (keys or [row.key]):
            right, wrong, bleu = (
                [run[name] for run in runs] for name in ("perplexity", "perplexity_of_another_source", "bleu")
            )
            ratios = [another / correct for correct, another in zip(right, wrong, strict=True)]
            rows.append(
                [
                    row.letter,
                    row.name,
                    render.mean_and_spread(right),
                    render.mean_and_spread(wrong),
                    render.mean_and_spread(ratios, 1),
                    render.mean_and_spread(bleu, 1),
                    str(len(runs)),
                ]
            )
        elif row.key in keys:
            rows.append([row.letter, row.name, "not run", "", "", "", "0"])
    head = ["row", "change", "perplexity", "perplexity given the source of another sentence", "ratio", "BLEU", "seeds"]
    return render.table(head, rows)


def description_of(result: Record) -> str:
    """The properties that all runs share, and how they were scored."""
    ended = [run for run in result["runs"] if "failed" not in run]
    if not ended:
        return "No run has ended."
    kind, first = result["kind"], ended[0]
    config = override(scaled(kind["scale"], kind.get("depth", 1), kind["steps"]), kind["settings"])

    def values_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run[name]) for run in ended))

    n_subwords = first["config"]["model"]["source_vocab_size"]
    return (
        f"Base of these runs: {config.model.n_encoder_layers} + {config.model.n_decoder_layers} layers, d_model "
        f"{config.model.d_model}, d_ff {config.model.d_ff}, {config.model.n_heads} heads with d_k "
        f"{config.model.d_k}, {n_subwords:,} subwords; {config.train.max_steps:,} steps of "
        f"{config.data.batch_tokens:,} tokens, including {config.train.warmup_steps:,} warm-up steps. BLEU: "
        f"{values_of('search')}, {first['n_sentences']:,} sentences of the validation text, "
        f"`{values_of('signature')}`. Device: {devices_of(result)}; simultaneous runs: {values_of('beside')}."
    )


def devices_of(result: Record) -> str:
    return ", ".join(dict.fromkeys(run["device"] for run in result["runs"]))


def missing_runs(result: Record) -> list[Job]:
    """The runs of all rows with the default seeds that the result does not have."""
    known = {(run["row"], run["seed"]) for run in result["runs"]}
    return [Job(row.key, seed) for seed in SEEDS for row in ROWS if (row.key, seed) not in known]


HEAD = [
    "row",
    "change",
    "values in these runs",
    "perplexity",
    "BLEU",
    "parameters (millions)",
    "seeds",
    "minutes",
    "ran on",
]


def runs_of(result: Record, row: Row) -> list[Record]:
    return [run for run in result["runs"] if run["row"] == row.key]


def cells_of(row: Row, runs: Sequence[Record]) -> list[str]:
    """Mean and standard deviation over the seeds whose training did not diverge."""
    if not runs:
        return [row.letter, row.name, "", "not run", "", "", "0", "", ""]
    ended = [run for run in runs if "failed" not in run]
    change = ", ".join(setting.partition(".")[2].replace("=", " ") for setting in runs[0]["change"])
    seeds = str(len(runs)) if len(ended) == len(runs) else f"{len(ended)} of {len(runs)}, the others diverged"
    device = devices_of({"runs": runs})
    if not ended:
        return [row.letter, row.name, change, "diverged", "", "", seeds, "", device]
    perplexity, bleu, minutes = ([run[name] for run in ended] for name in ("perplexity", "bleu", "minutes"))
    return [
        row.letter,
        row.name,
        change,
        render.mean_and_spread(perplexity),
        render.mean_and_spread(bleu, 1),
        f"{ended[0]['parameters'] / 1e6:.2f}",
        seeds,
        f"{sum(minutes) / len(minutes):.1f}",
        device,
    ]


def draw(path: Path, result: Record) -> None:
    """A chart of the perplexity of every row, with a dot for each seed and a line at the mean of base."""
    perplexities = {
        row.name if row.letter in ("base", "big", "extra") else row.key: [
            run["perplexity"] for run in runs_of(result, row) if "failed" not in run
        ]
        for row in ROWS
    }
    drawn = {name: values for name, values in perplexities.items() if values}
    if "base" not in drawn:
        sys.exit("--svg needs runs of base, because the chart has a line at base's mean: run base first")
    mean = sum(drawn["base"]) / len(drawn["base"])
    dot_chart(path, "The effect of each change", "perplexity, lower is better", drawn, mean)


def gradient_table(result: Record) -> str:
    """The gradient norms of W_2 of the feed-forward network and of all weights, for each layer: mean and spread over
    the seeds."""
    by_norm = {
        norm: [one["layers"] for one in result["gradient_norms"] if one["norm"] == norm] for norm in ("post", "pre")
    }
    rows = []
    for i, layer in enumerate(by_norm["post"][0] if by_norm["post"] else []):
        cells = [
            render.mean_and_spread([layers[i][weights] for layers in by_norm[norm]], 3)
            for weights in ("W_2", "all")
            for norm in by_norm
        ]
        rows.append([f"{layer['stack']} {layer['layer']}", *cells])
    head = ["layer", "W_2, post-norm", "W_2, pre-norm", "all weights, post-norm", "all weights, pre-norm"]
    return render.table(head, rows)


if __name__ == "__main__":
    main()
