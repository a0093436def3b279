"""Table 2 of the paper: commands for its four runs, and smaller runs of the same program with their scores and costs.

The paper's runs need eight GPUs and the WMT14 data. Ours take minutes on one GPU or an hour on a CPU, and are scored on
public test sets.

    python -m experiments.table2 --print en_de_big                # the commands of a run of the paper, under torchrun
    python -m experiments.table2 --run europarl --data DATA --work WORK --out experiments/results/table2_h200.json
    python -m experiments.table2 --run europarl-cpu --data DATA --work WORK --out experiments/results/table2_cpu.json
    python -m experiments.table2 --out experiments/results/table2_h200.json --table

DATA holds europarl-de-en/{train,dev,test}, newstest/de-en/newstest2014, multi30k/{train,val,test_2016_flickr}, each as
.de.xz and .en.xz, and tatoeba-en-de/all.{de,en}.xz. WORK keeps prepared data and unfinished runs, and the same command
resumes them. Search uses the paper's settings (beam 4, length penalty 0.6) and the average of checkpoints. --multi30k
names a result of `python -m experiments.multi30k`, which the table then includes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments import bundled_model, multi30k, render
from experiments.flops import Lengths, counted, estimated_flops
from experiments.passport import write_result
from experiments.published import BEST, EN_FR, EN_FR_BIG, TABLE_2, TRAINING
from experiments.runs import (
    BATCH_SIZE,
    Record,
    prepare_once,
    record_of,
    run_in_parallel,
    score,
    settings_from,
    train_config,
)
from transduce import RunConfig, Translator, base, big, override, small, tiny, with_model
from transduce.data.prepare import Prepared
from transduce.evaluation.evaluate import read_text
from transduce.paper_check import Row, Size, check_paper, count_parameters
from transduce.training.dial import SHAPES_ON_GPU

# The paper's four runs


def en_de_base() -> RunConfig:
    return base()


def en_de_big() -> RunConfig:
    return big()


def en_fr_base() -> RunConfig:
    return override(base(), (f"{name}={value}" for name, value in EN_FR.items()))


def en_fr_big() -> RunConfig:
    return override(big(), (f"{name}={value}" for name, value in EN_FR_BIG.items()))


class PaperRun(NamedTuple):
    config: Callable[[], RunConfig]
    size: Size
    direction: str
    stated: dict[str, Any]
    """Settings that the paper states for this run, and that differ from those of its size."""

    def differences(self) -> list[Row]:
        """The rows of `check-paper` that differ from the paper, except for the settings in `stated`."""
        rows = check_paper(self.config(), self.size)
        return [row for row in rows if row.verdict == "differs" and self.stated.get(row.setting) != row.ours]


PAPER_RUNS = {
    "en_de_base": PaperRun(en_de_base, "base", "en-de", {}),
    "en_de_big": PaperRun(en_de_big, "big", "en-de", {}),
    "en_fr_base": PaperRun(en_fr_base, "base", "en-fr", EN_FR),
    "en_fr_big": PaperRun(en_fr_big, "big", "en-fr", EN_FR_BIG),
}


def commands_for(name: str) -> str:
    """The commands of a run of the paper, with comments on the resulting model and on the paper's cost."""
    config, size, direction, _ = paper = PAPER_RUNS[name]
    source, target = direction.split("-")
    prepared, preset = f"wmt14-{direction}", {"base": base, "big": big}[size]()
    cost = TRAINING[size]
    flops = estimated_flops(cost.hours * 3600, cost.n_gpus, cost.device)
    train = ["train", prepared, "--size", size, "--out", name]
    for setting in settings_from(config(), preset):
        train += ["--set", setting]
    split = " --compound-split" if target == "de" else ""  # as for the paper's scores
    differing = ", ".join(row.setting for row in paper.differences()) or "nothing"
    return "\n".join(
        [
            f"# differences from the paper: {differing}; {count_parameters(config()) / 1e6:.1f} M parameters",
            f"# the paper: {cost.hours:g} hours on {cost.n_gpus} {cost.device}, {flops:.1e} FLOPs by its own estimate",
            f"transduce prepare train.{source} train.{target} --languages {direction} --valid newstest2013.{source} "
            f"newstest2013.{target} --vocab-size {config().model.source_vocab_size} --out {prepared}",
            "# on one machine with eight GPUs",
            shlex.join(["transduce", *train, "--devices", "8"]),
            "# or on several machines: run this on each of them",
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            + shlex.join(["-m", "transduce", *train]),
            f"transduce evaluate {name} --source newstest2014.{source} --reference newstest2014.{target}{split}",
        ]
    )


# Ours


@dataclass(frozen=True)
class Corpus:
    """In paths, {} stands for the language."""

    train: str
    valid: str
    tests: dict[str, str]
    directions: tuple[str, ...]
    config: Callable[[], RunConfig]
    vocabulary: int

    def files(self, root: Path, path: str, direction: str) -> list[Path]:
        return [root / path.format(language) for language in direction.split("-")]


def on_multi30k() -> RunConfig:
    return override(tiny(), [*multi30k.SETTINGS, f"data.n_shapes={SHAPES_ON_GPU}"])


def on_tatoeba() -> RunConfig:
    return override(small(), [*bundled_model.TRAIN, f"data.n_shapes={SHAPES_ON_GPU}"])


def on_europarl() -> RunConfig:
    """The paper's base with the dropout of big, because training visits so little text about thirty times."""
    config = with_model(base(), dropout=big().model.dropout)
    return replace(config, train=replace(config.train, max_steps=12_000, checkpoint_steps=400, valid_translations=0))


def on_europarl_big() -> RunConfig:
    ours, wide = on_europarl(), big()
    return replace(ours, model=wide.model, train=replace(ours.train, max_steps=8000))


def on_a_cpu(batch_tokens: int, max_steps: int, warmup_steps: int) -> RunConfig:
    """`small` with the paper's rate and dropout. The runs are short and visit each sentence only a few times."""
    settings = [
        f"data.batch_tokens={batch_tokens}",
        f"train.max_steps={max_steps}",
        f"train.warmup_steps={warmup_steps}",
        "train.clip_norm=1",
        "train.checkpoint_steps=200",
        "train.valid_translations=0",
    ]
    return override(small(), settings)


EUROPARL = Corpus(
    train="europarl-de-en/train.{}.xz",
    valid="europarl-de-en/dev.{}.xz",
    tests={"newstest2014": "newstest/de-en/newstest2014.{}.xz", "Europarl, held out": "europarl-de-en/test.{}.xz"},
    directions=("de-en",),
    config=on_europarl,
    vocabulary=16_000,
)
# `bundled_model split` makes the parts: no German or English sentence of the test text occurs in training.
TATOEBA = Corpus(
    train="train.{}",
    valid="valid.{}",
    tests={"Tatoeba, held out": "test.{}"},
    directions=("-".join(bundled_model.LANGUAGES),),
    config=on_tatoeba,
    vocabulary=bundled_model.VOCABULARY,
)
CORPORA = {
    "multi30k": Corpus(
        train="multi30k/train.{}.xz",
        valid="multi30k/val.{}.xz",
        tests={"test_2016_flickr": "multi30k/test_2016_flickr.{}.xz"},
        directions=("en-de", "de-en"),
        config=on_multi30k,
        vocabulary=multi30k.VOCABULARY,
    ),
    "tatoeba": TATOEBA,
    "tatoeba-cpu": replace(TATOEBA, config=partial(on_a_cpu, 2048, 5000, 1000)),
    "europarl": EUROPARL,
    "europarl-big": replace(EUROPARL, config=on_europarl_big),
    "europarl-cpu": replace(EUROPARL, config=partial(on_a_cpu, 4096, 5000, 1500), vocabulary=8000),
}


class Job(NamedTuple):
    corpus: str
    direction: str
    seed: int
    settings: list[str]
    budget: str | None
    vocabulary: int
    sentences: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.print:
        print("\n\n".join(commands_for(name) for name in options.print))
        return
    if options.run:
        run_missing(options)
    multi30k_result = json.loads(options.multi30k.read_text(encoding="utf-8")) if options.multi30k else None
    print(table([json.loads(options.out.read_text(encoding="utf-8"))], multi30k_result))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", nargs="+", choices=list(PAPER_RUNS), help="Print the commands of these runs.")
    parser.add_argument("--run", nargs="+", choices=list(CORPORA))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, help="Folder for prepared data and unfinished runs.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--budget", help="Training time, such as 4m, which decides the number of steps.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings that override ours.")
    parser.add_argument("--vocabulary", type=int, help="Number of subwords, instead of ours.")
    parser.add_argument("--sentences", type=int, help="Use only the first N sentences of each test set. Default: all.")
    parser.add_argument("--beside", type=int, default=1, help="Number of simultaneous runs.")
    parser.add_argument("--device")
    parser.add_argument("--multi30k", type=Path, help="A result of experiments.multi30k to include in the table.")
    parser.add_argument("--table", action="store_true", help="Only print the table of the existing result.")
    options = parser.parse_args(arguments)
    if options.run and not (options.data and options.work and options.out):
        parser.error("--run needs --data, --work and --out: give all three")
    if not options.print and not options.out:
        parser.error("--out is missing: name the result file")
    return options


def run_missing(options: argparse.Namespace) -> None:
    result: Record = {"experiment": "table2", "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    jobs = [
        Job(name, direction, seed, options.set, options.budget, vocabulary_of(options, name), options.sentences)
        for name in options.run
        for direction in CORPORA[name].directions
        for seed in options.seeds
    ]
    jobs = [job for job in jobs if not any(job._asdict().items() <= run.items() for run in result["runs"])]
    for job in jobs:
        prepare(options, job)
    for job, record in run_in_parallel(options.beside, partial(run_one, options), jobs):
        result["runs"].append(job._asdict() | {"beside": min(options.beside, len(jobs))} | record)
        write_result(options.out, result)
        shutil.rmtree(folder_of(options, job))  # only after the result is written


def vocabulary_of(options: argparse.Namespace, name: str) -> int:
    return int(options.vocabulary or CORPORA[name].vocabulary)


def text_of(corpus: str) -> str:
    """The name of the text without a suffix such as "-cpu". Entries of one text share the prepared data."""
    return corpus.partition("-")[0]


def root_of(options: argparse.Namespace, job: Job) -> Path:
    return Path(options.work / "tatoeba" if text_of(job.corpus) == "tatoeba" else options.data)


def prepared_of(options: argparse.Namespace, job: Job) -> Path:
    return Path(options.work / f"{text_of(job.corpus)}-{job.direction}-{job.vocabulary}")


def folder_of(options: argparse.Namespace, job: Job) -> Path:
    """The folder of a run, with a different name for different settings."""
    settings = [*job.settings, job.budget or "", str(job.vocabulary)]
    name = "-".join([job.corpus, job.direction, str(job.seed), *settings]).replace("/", "_")
    return Path(options.work / "runs" / name)


def prepare(options: argparse.Namespace, job: Job) -> None:
    corpus, root = CORPORA[job.corpus], root_of(options, job)
    if text_of(job.corpus) == "tatoeba" and not (root / "prepared").exists():
        bundled_model.split(argparse.Namespace(data_root=options.data, work=root))
    train, valid = (corpus.files(root, path, job.direction) for path in (corpus.train, corpus.valid))
    prepare_once(prepared_of(options, job), train, valid, job.direction, job.vocabulary)


def run_one(options: argparse.Namespace, job: Job) -> Record:
    corpus, prepared = CORPORA[job.corpus], prepared_of(options, job)
    config = override(corpus.config(), [*job.settings, f"train.seed={job.seed}"])
    done = train_config(folder_of(options, job), prepared, config, device=options.device, budget=job.budget)
    record = record_of(done)
    lengths = Lengths.of(*Prepared(prepared).train.lengths())
    seen = lengths.multiply(record["target_tokens"] / lengths.target)
    translator = Translator.load(done.folder, device=done.settled.choices.device, batch_size=BATCH_SIZE)
    scores = {}
    for name, path in corpus.tests.items():
        files = corpus.files(root_of(options, job), path, job.direction)
        sources, references = (read_text(file)[: job.sentences] for file in files)
        scores[name] = score(translator, sources, references)
    return record | {
        "scores": scores,
        "epochs": record["target_tokens"] / lengths.target,
        "flops_counted": counted(done.settled.config.model, seen),
    }


# The table


class Entry(NamedTuple):
    """The score of one run on one test set."""

    corpus: str
    direction: str
    test: str
    search: str
    parameters: int
    bleu: float
    interval: Sequence[float] | None
    signature: str
    minutes: float
    """Time of the whole device: simultaneous runs on a GPU share it, but simultaneous runs on a CPU have their own
    cores."""
    tokens_per_second: float
    flops_counted: float | None
    device: str

    @property
    def group(self) -> tuple[Any, ...]:
        """Entries of one group differ only in the seed and share a row."""
        return self.corpus, self.direction, self.test, self.search, self.parameters, self.device

    @property
    def published_key(self) -> tuple[str, str, str]:
        """The key of the best published score in `BEST`."""
        return text_of(self.corpus), self.test, self.direction

    @property
    def flops(self) -> float | None:
        """By the paper's estimate."""
        return estimated_flops(60 * self.minutes, 1, self.device)


def table(results: Sequence[Record], multi30k_result: Record | None = None, missing: Sequence[str] = ()) -> str:
    """The paper's table, our table, notes on the best published scores, and the signatures. `missing` names corpora
    that have no run and get a row without values."""
    entries = [entry for result in results for run in result["runs"] for entry in entries_of(run)]
    entries += [entry_of_multi30k(run) for run in (multi30k_result or {"runs": []})["runs"]]
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.group, []).append(entry)
    ours = [row for name in missing for row in rows_without_values(name)]
    ours += [row_of(group) for group in groups.values()]
    keys = {entry.published_key for entry in entries}
    notes = [
        f"- {best.bleu:g}, {best.system} ({best.source}): {best.differs}." for key, best in BEST.items() if key in keys
    ]
    signatures = [f"- `{signature}`" for signature in dict.fromkeys(entry.signature for entry in entries)]
    parts = [paper_table(), render.table(HEAD, ours), "\n".join(notes), "Signatures:\n\n" + "\n".join(signatures)]
    return "\n\n".join(part for part in parts if part)


HEAD = [
    "training text, direction",
    "test set",
    "parameters (millions)",
    "search",
    "BLEU",
    "seeds",
    "ran on",
    "minutes",
    "target tokens per second",
    "FLOPs, the paper's estimate",
    "FLOPs, counted",
    "best published BLEU",
]


def rows_without_values(corpus: str) -> list[list[str]]:
    """One row for each direction and test set of a corpus that has no run."""
    return [
        [f"{corpus}, {direction}", test, "", "", "not run", "0", *[""] * (len(HEAD) - 6)]
        for direction in CORPORA[corpus].directions
        for test in CORPORA[corpus].tests
    ]


def paper_table() -> str:
    """The printed figures, and for the paper's own models also our count for 100,000 or 300,000 steps."""
    rows = []
    for cost in TABLE_2:
        size: Size | None = next((size for size in ("base", "big") if cost.name == f"Transformer ({size})"), None)
        flops = ""
        if size is not None:
            config = PAPER_RUNS[f"en_de_{size}"].config()
            tokens = float(config.train.max_steps * config.data.batch_tokens)
            flops = f"{counted(config.model, Lengths(tokens, tokens, 0, 0, 0)):.1e}"
        figures = [*((f"{x:g}" if x else "") for x in cost[1:3]), *((f"{x:.1e}" if x else "") for x in cost[3:])]
        rows.append([cost.name, *figures, flops])
    head = [
        "the paper, newstest2014",
        "BLEU En-De",
        "BLEU En-Fr",
        "FLOPs En-De",
        "FLOPs En-Fr",
        "FLOPs counted, without scores and sums of attention",
    ]
    return render.table(head, rows)


def entries_of(run: Record) -> list[Entry]:
    return [
        Entry(
            run["corpus"],
            run["direction"],
            test,
            result["search"],
            run["parameters"],
            result["bleu"],
            result["interval"],
            result["signature"],
            run["minutes"] / (1 if run["device"].startswith("cpu") else run["beside"]),
            run["tokens_per_second"],
            run["flops_counted"],
            run["device"],
        )
        for test, result in run["scores"].items()
    ]


def entry_of_multi30k(run: Record) -> Entry:
    """The result does not contain the number of tokens in training, so the FLOPs cannot be counted."""
    config = RunConfig.from_json(json.dumps(run["config"]))
    search = f"beam {multi30k.BEAM}, length penalty {multi30k.ALPHAS[0]:g}"
    return Entry(
        f"multi30k {run['form']}",
        run["direction"],
        "test_2016_flickr",
        search,
        count_parameters(config),
        run["bleu"],
        None,
        run["signature"],
        run["minutes"] / run["beside"],
        run["tokens_per_second"],
        None,
        run["device"],
    )


def row_of(entries: Sequence[Entry]) -> list[str]:
    """Mean and spread over seeds, or the interval of the only seed."""
    first, values = entries[0], [entry.bleu for entry in entries]
    bleu = render.mean_and_spread(values)
    if len(entries) == 1 and first.interval is not None:
        bleu += f" ({first.interval[0]:.1f} to {first.interval[1]:.1f})"
    best = BEST.get(first.published_key)

    def mean(name: str, form: str) -> str:
        values = [value for entry in entries if (value := getattr(entry, name)) is not None]
        return format(sum(values) / len(values), form) if values else ""

    return [
        f"{first.corpus}, {first.direction}",
        first.test,
        f"{first.parameters / 1e6:.1f}",
        first.search,
        bleu,
        str(len(entries)),
        first.device,
        mean("minutes", ".1f"),
        mean("tokens_per_second", ",.0f"),
        mean("flops", ".1e"),
        mean("flops_counted", ".1e"),
        f"{best.bleu:g}" if best else "none known",
    ]


if __name__ == "__main__":
    main()
