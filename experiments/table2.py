"""Table 2 of the paper: its four runs to the letter, to be run where there are eight GPUs and the data; and the same
program at a scale where one GPU takes minutes, or a CPU an hour, scored on public test sets and with its cost.

    python -m experiments.table2 --print en_de_big                # how to run the paper's, under torchrun
    python -m experiments.table2 --run europarl --data DATA --work WORK --out experiments/results/table2_h200.json
    python -m experiments.table2 --run europarl-cpu --data DATA --work WORK --out experiments/results/table2_cpu.json
    python -m experiments.table2 --out experiments/results/table2_h200.json --table

DATA holds europarl-de-en/{train,dev,test}, newstest/de-en/newstest2014, multi30k/{train,val,test_2016_flickr}, each as
.de.xz and .en.xz, and tatoeba-en-de/all.{de,en}.xz. What is prepared or has not ended stays in WORK, and the same
command goes on with it. Search is the paper's, beam 4 and length penalty 0.6, by the average of checkpoints. Runs of
`python -m experiments.multi30k` are shown as well where --multi30k says what it wrote.
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
from experiments.flops import Lengths, as_the_paper, counted
from experiments.passport import write_result
from experiments.published import BEST, EN_FR, EN_FR_BIG, TABLE_2, TRAINING
from experiments.runs import BATCH_SIZE, Record, beside, prepare_once, record_of, score, settings_from, train_config
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


class Paper(NamedTuple):
    config: Callable[[], RunConfig]
    size: Size
    direction: str
    stated: dict[str, Any]
    """What the paper says of this run and not of its size."""

    def differences(self) -> list[Row]:
        """From the paper, by `check-paper`, once it knows of the language pair."""
        rows = check_paper(self.config(), self.size)
        return [row for row in rows if row.verdict == "differs" and self.stated.get(row.setting) != row.ours]


PAPER_RUNS = {
    "en_de_base": Paper(en_de_base, "base", "en-de", {}),
    "en_de_big": Paper(en_de_big, "big", "en-de", {}),
    "en_fr_base": Paper(en_fr_base, "base", "en-fr", EN_FR),
    "en_fr_big": Paper(en_fr_big, "big", "en-fr", EN_FR_BIG),
}


def how_to_run(name: str) -> str:
    """Commands, and what they will make."""
    config, size, direction, _ = paper = PAPER_RUNS[name]
    source, target = direction.split("-")
    prepared, preset = f"wmt14-{direction}", {"base": base, "big": big}[size]()
    cost = TRAINING[size]
    flops = as_the_paper(cost.hours * 3600, cost.n_gpus, cost.device)
    train = ["train", prepared, "--size", size, "--out", name]
    for setting in settings_from(config(), preset):
        train += ["--set", setting]
    split = " --compound-split" if target == "de" else ""  # as the paper's scores were
    differing = ", ".join(row.setting for row in paper.differences()) or "nothing"
    return "\n".join(
        [
            f"# differing from the paper: {differing}; {count_parameters(config()) / 1e6:.1f} M parameters",
            f"# the paper: {cost.hours:g} hours on {cost.n_gpus} {cost.device}, {flops:.1e} FLOPs as it counts them",
            f"transduce prepare train.{source} train.{target} --languages {direction} --valid newstest2013.{source} "
            f"newstest2013.{target} --vocab-size {config().model.source_vocab_size} --out {prepared}",
            "# one machine with eight GPUs",
            shlex.join(["transduce", *train, "--devices", "8"]),
            "# or several, on each of them",
            "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
            + shlex.join(["-m", "transduce", *train]),
            f"transduce evaluate {name} --source newstest2014.{source} --reference newstest2014.{target}{split}",
        ]
    )


# Ours


@dataclass(frozen=True)
class Corpus:
    """Paths have the language in the place of {}."""

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
    """The paper's base, with the dropout of its big: so little text is read some thirty times."""
    config = with_model(base(), dropout=big().model.dropout)
    return replace(config, train=replace(config.train, max_steps=12_000, checkpoint_steps=400, valid_translations=0))


def on_europarl_big() -> RunConfig:
    ours, wide = on_europarl(), big()
    return replace(ours, model=wide.model, train=replace(ours.train, max_steps=8000))


def on_a_cpu(batch_tokens: int, max_steps: int, warmup_steps: int) -> RunConfig:
    """`small`, with the paper's rate and dropout, for so little time that nothing is read often."""
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
# Its parts are made by `bundled_model split`: no sentence of the test has a side in training.
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
        print("\n\n".join(how_to_run(name) for name in options.print))
        return
    if options.run:
        run_missing(options)
    other = json.loads(options.multi30k.read_text(encoding="utf-8")) if options.multi30k else None
    print(table([json.loads(options.out.read_text(encoding="utf-8"))], other))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", nargs="+", choices=list(PAPER_RUNS), help="How to run these of the paper's.")
    parser.add_argument("--run", nargs="+", choices=list(CORPORA))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, help="For what is prepared, and for runs that have not ended.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--budget", help="Such as 4m: steps are chosen to fill it.")
    parser.add_argument("--set", nargs="*", default=[], help="Settings after ours.")
    parser.add_argument("--vocabulary", type=int, help="Subwords, where ours are too many.")
    parser.add_argument("--sentences", type=int, help="Of each test, the first so many; all when not given.")
    parser.add_argument("--beside", type=int, default=1, help="Runs at once.")
    parser.add_argument("--device")
    parser.add_argument("--multi30k", type=Path, help="What experiments.multi30k wrote, to be shown as well.")
    parser.add_argument("--table", action="store_true", help="Only print what is there.")
    options = parser.parse_args(arguments)
    if options.run and not (options.data and options.work and options.out):
        parser.error("--run needs --data, --work and --out")
    if not options.print and not options.out:
        parser.error("--out is needed")
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
    for job, record in beside(options.beside, partial(run_one, options), jobs):
        result["runs"].append(job._asdict() | {"beside": min(options.beside, len(jobs))} | record)
        write_result(options.out, result)
        shutil.rmtree(folder_of(options, job))  # not before it is written down


def vocabulary_of(options: argparse.Namespace, name: str) -> int:
    return int(options.vocabulary or CORPORA[name].vocabulary)


def text_of(corpus: str) -> str:
    """Of which there may be several models, which share what is prepared."""
    return corpus.partition("-")[0]


def root_of(options: argparse.Namespace, job: Job) -> Path:
    return Path(options.work / "tatoeba" if text_of(job.corpus) == "tatoeba" else options.data)


def prepared_of(options: argparse.Namespace, job: Job) -> Path:
    return Path(options.work / f"{text_of(job.corpus)}-{job.direction}-{job.vocabulary}")


def folder_of(options: argparse.Namespace, job: Job) -> Path:
    """Another for other settings."""
    asked = [*job.settings, job.budget or "", str(job.vocabulary)]
    name = "-".join([job.corpus, job.direction, str(job.seed), *asked]).replace("/", "_")
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
    seen = lengths.times(record["target_tokens"] / lengths.target)
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


# What is shown


class Entry(NamedTuple):
    """One run on one test set."""

    corpus: str
    direction: str
    test: str
    search: str
    parameters: int
    bleu: float
    interval: Sequence[float] | None
    signature: str
    minutes: float
    """Of the device: runs beside each other on a GPU have a share of it each, those on a CPU cores of their own."""
    tokens_per_second: float
    flops_counted: float | None
    device: str

    @property
    def kind(self) -> tuple[Any, ...]:
        """Seeds of one kind are shown together."""
        return self.corpus, self.direction, self.test, self.search, self.parameters, self.device

    @property
    def place(self) -> tuple[str, str, str]:
        """For what others have published."""
        return text_of(self.corpus), self.test, self.direction

    @property
    def flops(self) -> float | None:
        """As the paper counts them."""
        return as_the_paper(60 * self.minutes, 1, self.device)


def table(results: Sequence[Record], of_multi30k: Record | None = None) -> str:
    """The paper's, ours, and how those that stand beside ours were made. `of_multi30k`: of `experiments.multi30k`."""
    entries = [entry for result in results for run in result["runs"] for entry in entries_of(run)]
    entries += [entry_of_multi30k(run) for run in (of_multi30k or {"runs": []})["runs"]]
    kinds: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry)
    ours = [row_of(own) for own in kinds.values()]
    shown = {entry.place for entry in entries}
    notes = [
        f"- {best.bleu:g}, {best.system} ({best.source}): {best.differs}."
        for place, best in BEST.items()
        if place in shown
    ]
    signatures = [f"- `{signature}`" for signature in dict.fromkeys(entry.signature for entry in entries)]
    parts = [paper_table(), render.table(HEAD, ours), "\n".join(notes), "Signatures:\n\n" + "\n".join(signatures)]
    return "\n\n".join(part for part in parts if part)


HEAD = [
    "trained on, direction",
    "scored on",
    "M parameters",
    "search",
    "BLEU",
    "seeds",
    "on",
    "minutes",
    "target tokens/s",
    "FLOPs as the paper",
    "counted",
    "best published",
]


def paper_table() -> str:
    """As printed; of its own two models also the products of its 100,000 and 300,000 steps."""
    rows = []
    for cost in TABLE_2:
        size: Size | None = next((size for size in ("base", "big") if cost.name == f"Transformer ({size})"), None)
        products = ""
        if size is not None:
            config = PAPER_RUNS[f"en_de_{size}"].config()
            tokens = float(config.train.max_steps * config.data.batch_tokens)
            products = f"{counted(config.model, Lengths(tokens, tokens, 0, 0, 0)):.1e}"
        figures = [*((f"{x:g}" if x else "") for x in cost[1:3]), *((f"{x:.1e}" if x else "") for x in cost[3:])]
        rows.append([cost.name, *figures, products])
    head = [
        "the paper, newstest2014",
        "BLEU En-De",
        "En-Fr",
        "FLOPs En-De",
        "En-Fr",
        "counted, without attention's own",
    ]
    return render.table(head, rows)


def entries_of(run: Record) -> list[Entry]:
    return [
        Entry(
            run["corpus"],
            run["direction"],
            test,
            of["search"],
            run["parameters"],
            of["bleu"],
            of["interval"],
            of["signature"],
            run["minutes"] / (1 if run["device"].startswith("cpu") else run["beside"]),
            run["tokens_per_second"],
            run["flops_counted"],
            run["device"],
        )
        for test, of in run["scores"].items()
    ]


def entry_of_multi30k(run: Record) -> Entry:
    """Which tokens it saw it does not tell, so that nothing can be counted."""
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
    """Mean and spread over seeds; of one seed the interval."""
    first, values = entries[0], [entry.bleu for entry in entries]
    bleu = render.spread_of(values)
    if len(entries) == 1 and first.interval is not None:
        bleu += f" ({first.interval[0]:.1f} to {first.interval[1]:.1f})"
    best = BEST.get(first.place)

    def mean(name: str, form: str) -> str:
        found = [value for entry in entries if (value := getattr(entry, name)) is not None]
        return format(sum(found) / len(found), form) if found else ""

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
