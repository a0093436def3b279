"""Table 3 of the paper, row by row, and what people ask of it, at a scale where a run takes about half a minute.

    python -m experiments.table3 --prepared FOLDER --out experiments/results/table3_h200.json --beside 8
    python -m experiments.table3 --out experiments/results/table3_h200.json --table

A row is a function from one `RunConfig` to another: of the paper's base it makes the paper's row, of base with every
width divided by `--scale`, its depth by `--depth`, the same row at that scale. There are fewer steps, of which a fifth
is warm-up, and smaller batches; the rate has the peak that equation 3 gives it after 4,000 steps. As in the paper
nothing is averaged, and nothing is chosen either: a run is judged by its last weights, on the validation text. FOLDER
is prepared text, such as `python -m experiments.bundled_model split` makes of Tatoeba. The result is written after each
run, and runs that are in it are not run again.
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
from experiments.runs import BATCH_SIZE, Record, beside, record_of, score, settings_from, train_config
from experiments.variants import VARIANTS
from transduce import ConfigError, RunConfig, Translator, base, load_model, override, with_model
from transduce.data.prepare import Prepared
from transduce.evaluation.evaluate import perplexity_of
from transduce.model_folder.format import MODEL, load_origin
from transduce.paper_check import count_parameters
from transduce.training.dial import SHAPES_ON_GPU, with_steps
from transduce.training.trainer import TrainingError

Change = Callable[[RunConfig], RunConfig]

SCALE, STEPS, BATCH_TOKENS = 4, 3000, 8192
DEPTH = ("n_encoder_layers", "n_decoder_layers")
BIG_STEPS = 3
"""Times those of base, as in the paper."""
GRAIN = 16


# What a row changes


def heads(n: int) -> Change:
    """So many, at constant cost: all of them together stay as wide."""

    def change(config: RunConfig) -> RunConfig:
        model = config.model
        return with_model(config, n_heads=n, d_k=model.n_heads * model.d_k // n, d_v=model.n_heads * model.d_v // n)

    return change


def times(factor: float, *names: str) -> Change:
    """Those widths, or the depth, so many times as large."""

    def change(config: RunConfig) -> RunConfig:
        wanted = {name: factor * getattr(config.model, name) for name in names}
        if odd := [f"{name} {width:g}" for name, width in wanted.items() if width != int(width)]:
            raise ConfigError(
                f"{', '.join(odd)} is no whole number: --scale and --depth must divide what a row changes"
            )
        return with_model(config, **{name: int(width) for name, width in wanted.items()})

    return change


def model(**changes: Any) -> Change:
    return lambda config: with_model(config, **changes)


def label_smoothing(share: float) -> Change:
    return lambda config: replace(config, train=replace(config.train, label_smoothing=share))


def big(config: RunConfig) -> RunConfig:
    wide = times(2, "d_model", "d_ff", "n_heads")(with_model(config, dropout=0.3))
    return replace(wide, train=replace(wide.train, max_steps=BIG_STEPS * wide.train.max_steps))


def one_narrow_head(config: RunConfig) -> RunConfig:
    """One head as wide as one of many, and what that saves given to the feed-forward networks: as many parameters, but
    for what rounding to a width that a GPU likes makes of it."""
    narrow = with_model(config, n_heads=1)
    saved = count_parameters(config) - count_parameters(narrow)
    wider = with_model(narrow, d_ff=narrow.model.d_ff + 1)
    for_one_more = count_parameters(wider) - count_parameters(narrow)
    return with_model(narrow, d_ff=narrow.model.d_ff + GRAIN * round(saved / for_one_more / GRAIN))


class Row(NamedTuple):
    letter: str
    name: str
    change: Change
    variant: str = "as it is"

    @property
    def key(self) -> str:
        return f"{self.letter}: {self.name}"


ROWS = [
    Row("base", "base", lambda config: config),
    *(Row("A", f"{n} head{'s' if n > 1 else ''}", heads(n)) for n in (1, 4, 16, 32)),
    Row("B", "d_k / 4", times(1 / 4, "d_k")),
    Row("B", "d_k / 2", times(1 / 2, "d_k")),
    # Of the paper's 6: 2, 4 and 8.
    Row("C", "depth / 3", times(1 / 3, *DEPTH)),
    Row("C", "depth x 2/3", times(2 / 3, *DEPTH)),
    Row("C", "depth x 4/3", times(4 / 3, *DEPTH)),
    # Heads grow with the model, so that all of them together stay as wide as it is.
    Row("C", "d_model / 2", times(1 / 2, "d_model", "d_k", "d_v")),
    Row("C", "d_model x 2", times(2, "d_model", "d_k", "d_v")),
    Row("C", "d_ff / 2", times(1 / 2, "d_ff")),
    Row("C", "d_ff x 2", times(2, "d_ff")),
    *(Row("D", f"dropout {p:g}", model(dropout=p)) for p in (0.0, 0.2)),
    *(Row("D", f"label smoothing {share:g}", label_smoothing(share)) for share in (0.0, 0.2)),
    Row("E", "learned positions", model(positions="learned")),
    Row("big", "big", big),
    Row("asked", "one narrow head, d_ff wider", one_narrow_head),
    Row("asked", "no 1 / sqrt(d_k)", lambda config: config, "unscaled"),
    Row("asked", "pre-norm", model(norm="pre")),
    Row("asked", "no warm-up", lambda config: config, "no warm-up"),
    Row("asked", "pre-norm, no warm-up", model(norm="pre"), "no warm-up"),
    Row("asked", "no self-attention", lambda config: config, "no self-attention"),
]
LETTERS = list(dict.fromkeys(row.letter for row in ROWS))


def scaled(by: int, depth: int, steps: int) -> RunConfig:
    """The paper's base with every width divided, and its depth, for so many steps."""
    paper = base()
    config = times(1 / depth, *DEPTH)(times(1 / by, "d_model", "d_ff", "d_k", "d_v")(paper))
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
    found = json.loads(options.out.read_text(encoding="utf-8"))
    print("\n\n".join(show(found) for show in (table, asked_table, source_table, gradient_table)))
    if options.svg is not None:
        draw(options.svg, found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows",
        nargs="*",
        default=LETTERS,
        metavar="LETTER",
        help=f"By their letters, {', '.join(LETTERS)}; none: the norms of gradients alone.",
    )
    parser.add_argument("--names", nargs="+", help="Of these only those of these names.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--beside", type=int, default=1, help="Runs at once: small models leave most of a GPU idle.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="No run is begun after this.")
    parser.add_argument("--steps", type=int, default=STEPS, help="Of base.")
    parser.add_argument("--scale", type=int, default=SCALE, help="Divides the paper's widths.")
    parser.add_argument("--depth", type=int, default=1, help="Divides the paper's depth.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings of base after ours.")
    parser.add_argument("--sentences", type=int, help="Of the validation text that are translated; all when not given.")
    parser.add_argument("--device")
    parser.add_argument("--svg", type=Path, help="Where perplexities are drawn.")
    parser.add_argument("--table", action="store_true", help="Only print what is there.")
    options = parser.parse_args(arguments)
    if options.prepared is None and not options.table:
        parser.error("--prepared FOLDER is needed to run anything")
    if unknown := set(options.rows).difference(LETTERS):
        parser.error(f"--rows {unknown.pop()} is none of {', '.join(LETTERS)}")
    return options


def run_missing(options: argparse.Namespace) -> None:
    own = kind(options)
    result: Record = {"experiment": "table3", "kind": own, "runs": [], "gradient_norms": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
        if {"depth": 1} | result["kind"] != own:  # there are results from before one could choose it
            sys.exit(f"{options.out} has runs of another kind ({result['kind']}, not {own}): give another --out")
    known = {(run["row"], run["seed"]) for run in result["runs"]}
    names = [row.key for row in ROWS if row.letter in options.rows and row.name in (options.names or [row.name])]
    jobs = [Job(name, seed) for seed in options.seeds for name in names if (name, seed) not in known]
    for job, record in beside(options.beside, partial(run_one, options), jobs, options.minutes):
        result["runs"].append(job._asdict() | {"beside": min(options.beside, len(jobs))} | record)
        write_result(options.out, result)
        print(json.dumps(job._asdict() | {name: record.get(name) for name in TOLD}), file=sys.stderr, flush=True)
    add_gradient_norms(options, result)
    write_result(options.out, result)


TOLD = ("perplexity", "bleu", "minutes", "passes", "failed")


def kind(options: argparse.Namespace) -> Record:
    """What all runs of one table have in common."""
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
    # One checkpoint, the last: so there is nothing to choose from.
    return replace(config, train=replace(config.train, seed=seed, checkpoint_steps=config.train.max_steps))


def run_one(options: argparse.Namespace, job: Job) -> Record:
    (row,) = (row for row in ROWS if row.key == job.row)
    config, variant = config_of(options, row, job.seed), VARIANTS[row.variant]
    about = {"change": settings_from(row.change(base_of(options)), base_of(options)), "variant": row.variant}
    prepared = Prepared(options.prepared)
    with tempfile.TemporaryDirectory() as place:
        try:
            with variant.during():
                done = train_config(
                    Path(place) / "run", options.prepared, config, device=options.device, passes=variant.passes
                )
        except TrainingError as error:  # that a row cannot be trained is what one wanted to know
            return about | {"failed": str(error).partition(":")[0], **passport(config, device_of(options))}
        assert variant.passes in (None, done.settled.choices.way), "a variant of the model wants the model's own passes"
        record = record_of(done)
        loaded, settled = load_model(done.folder / MODEL, done.settled.choices.device)
        variant.settle(loaded)
        origin, _ = load_origin(done.folder / MODEL)
        translator = Translator(loaded, settled, prepared.subwords, origin, batch_size=BATCH_SIZE)
    sources, references = valid_text(prepared, options.sentences)
    # Of the model as it is scored: where it is not what the trainer found, it is another one.
    every_source, every_reference = valid_text(prepared, None)
    again, _ = perplexity_of(translator, every_source, every_reference, None)
    astray, _ = perplexity_of(translator, [*every_source[1:], every_source[0]], every_reference, None)
    record["parameters"] -= variant.n_unused(settled.model)
    found = {"perplexity_as_scored": again, "perplexity_of_another_source": astray}
    return about | record | score(translator, sources, references) | found


def valid_text(prepared: Prepared, n: int | None) -> tuple[list[str], list[str]]:
    """So many pairs, spread over all."""
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


# What is shown


def table(result: Record) -> str:
    """The paper's rows, ours and theirs."""
    rows = []
    for row in ROWS:
        if row.letter != "asked" and (runs := runs_of(result, row)):
            paper = TABLE_3[row.letter, row.name]
            printed = "" if paper.parameters is None else f"{paper.parameters:g}"
            ours = f"{count_parameters(row.change(base())) / 1e6:.1f}"
            rows.append([*cells_of(row, runs), f"{paper.perplexity:.2f}", f"{paper.bleu:.1f}", printed, ours])
    head = [*HEAD, "the paper's PPL", "its BLEU", "its millions", "millions at its width, by our count"]
    return f"{render.table(head, rows)}\n\n{facts_of(result)}"


def asked_table(result: Record) -> str:
    """What the paper does not show."""
    wanted = [row for row in ROWS if row.letter in ("base", "asked") or (row.letter, row.name) == ("A", "1 head")]
    rows = [cells_of(row, runs) for row in wanted if (runs := runs_of(result, row))]
    return render.table(HEAD, rows)


def source_table(result: Record) -> str:
    """How much of what a row foretells it has from the source, and not from what was said before."""
    rows = []
    for row in ROWS:
        if runs := [run for run in runs_of(result, row) if "perplexity_of_another_source" in run]:
            right, wrong, bleu = (
                [run[name] for run in runs] for name in ("perplexity", "perplexity_of_another_source", "bleu")
            )
            times_as_high = [other / own for own, other in zip(right, wrong, strict=True)]
            rows.append(
                [
                    row.letter,
                    row.name,
                    render.spread_of(right),
                    render.spread_of(wrong),
                    render.spread_of(times_as_high, 1),
                    render.spread_of(bleu, 1),
                    str(len(runs)),
                ]
            )
    head = ["row", "what changes", "PPL", "given the source of another sentence", "times as high", "BLEU", "seeds"]
    return render.table(head, rows)


def facts_of(result: Record) -> str:
    """What all runs have in common, and how they were scored."""
    ended = [run for run in result["runs"] if "failed" not in run]
    if not ended:
        return "No run has ended."
    known, one = result["kind"], ended[0]
    config = override(scaled(known["scale"], known.get("depth", 1), known["steps"]), known["settings"])

    def of_all(name: str) -> str:
        return ", ".join(dict.fromkeys(str(run[name]) for run in ended))

    n_subwords = one["config"]["model"]["source_vocab_size"]
    return (
        f"Base here: {config.model.n_encoder_layers} + {config.model.n_decoder_layers} layers, d_model "
        f"{config.model.d_model}, d_ff {config.model.d_ff}, {config.model.n_heads} heads of "
        f"{config.model.d_k}, {n_subwords:,} subwords; {config.train.max_steps:,} steps of "
        f"{config.data.batch_tokens:,} tokens, {config.train.warmup_steps:,} of them warm-up. BLEU: "
        f"{of_all('search')}, {one['n_sentences']:,} sentences of the validation text, `{of_all('signature')}`. On "
        f"{of_all('device')}; runs at once: {of_all('beside')}."
    )


HEAD = ["row", "what changes", "here", "PPL", "BLEU", "millions of parameters", "seeds", "minutes"]


def runs_of(result: Record, row: Row) -> list[Record]:
    return [run for run in result["runs"] if run["row"] == row.key]


def cells_of(row: Row, runs: Sequence[Record]) -> list[str]:
    """Mean and standard deviation over the seeds that could be trained."""
    ended = [run for run in runs if "failed" not in run]
    change = ", ".join(one.partition(".")[2].replace("=", " ") for one in runs[0]["change"])
    seeds = str(len(runs)) if len(ended) == len(runs) else f"{len(ended)} of {len(runs)}, the others diverged"
    if not ended:
        return [row.letter, row.name, change, "diverged", "", "", seeds, ""]
    ppl, bleu, minutes = ([run[name] for run in ended] for name in ("perplexity", "bleu", "minutes"))
    millions = f"{ended[0]['parameters'] / 1e6:.2f}"
    return [
        row.letter,
        row.name,
        change,
        render.spread_of(ppl),
        render.spread_of(bleu, 1),
        millions,
        seeds,
        f"{sum(minutes) / len(minutes):.1f}",
    ]


def draw(path: Path, result: Record) -> None:
    """The perplexity of every row, a dot for each seed, beside that of base."""
    found = {
        row.name if row.letter in ("base", "big", "asked") else row.key: [
            run["perplexity"] for run in runs_of(result, row) if "failed" not in run
        ]
        for row in ROWS
    }
    ended = {name: own for name, own in found.items() if own}
    if "base" not in ended:
        sys.exit("--svg wants runs of base, beside which all others are drawn: run those first")
    mean = sum(ended["base"]) / len(ended["base"])
    dot_chart(path, "What each part is worth", "perplexity, lower is better", ended, mean)


def gradient_table(result: Record) -> str:
    """Of W_2 of the feed-forward network, and of all weights, of each layer: mean and spread over the seeds."""
    by_norm = {
        norm: [one["layers"] for one in result["gradient_norms"] if one["norm"] == norm] for norm in ("post", "pre")
    }
    rows = []
    for place, first in enumerate(by_norm["post"][0] if by_norm["post"] else []):
        cells = [
            render.spread_of([own[place][what] for own in by_norm[norm]], 3)
            for what in ("W_2", "all")
            for norm in by_norm
        ]
        rows.append([f"{first['stack']} {first['layer']}", *cells])
    return render.table(["layer", "W_2, post-norm", "W_2, pre-norm", "all, post-norm", "all, pre-norm"], rows)


if __name__ == "__main__":
    main()
