"""A run: one folder, from the request to the finished model. The same request goes on where it stopped.

request.json   what was asked for: another request is refused
prepared/      the data, where it came from text files
run.json       what was settled before the first step, and is never measured again
log.jsonl      every event
checkpoints/   to go on from
snapshots/     to average
result.json    how it ended
model/         the model folder
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from transduce import __version__
from transduce.config import PRESETS, RunConfig, override, with_model
from transduce.data import corpora
from transduce.data.prepare import Prepared, Progress, prepare
from transduce.data.subword import SUBWORDS, Subwords
from transduce.errors import ConfigError, DataError, ModelFolderError, TransduceError
from transduce.evaluation.metrics import bleu
from transduce.files import UNFINISHED, write_whole
from transduce.model import Transformer
from transduce.model_folder.format import MODEL, RUN, Origin, load_config, load_model, model_folder, save_model
from transduce.runtime import check_device, default_device, processor_name
from transduce.training.choices import Choices, check_passes, choose
from transduce.training.dial import dial, with_steps
from transduce.training.distributed import Group
from transduce.training.trainer import Speed, Tell, Trainer
from transduce.translation.alignment import MOST_PAIRS, Pair, choose_heads
from transduce.translation.translator import Translator

REQUEST, LOG, RESULT, PREPARED = "request.json", "log.jsonl", "result.json", "prepared"
N_MILESTONES, LEAST_MILESTONES, MILESTONES_SHARE = 20, 6, 0.1
"""Checkpoints in a run that is too short for one every ten minutes; fewer where they would take more of a budget."""
CALIBRATE_SECONDS, CALIBRATE_SHARE = 2.0, 0.03
"""For how long steps are timed before the first: the longer, the better a budget is kept."""
JUDGED_EXTRA_TOKENS, N_SHOWN = 10, 3
"""Of translations at each validation: how much longer than the source, and how many are logged to be looked at."""
ALIGN_SECONDS = 3.0
MARGIN = 0.02
"""Of a budget, left for what was not foreseen."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for, as it was written."""

    data: dict[str, Any] = field(default_factory=dict)
    """For `corpora.choose`; empty where `prepared` says where the data is."""
    prepared: str | None = None
    keep_all: bool = False
    vocab_size: int | None = None
    size: str | None = None
    budget: str | None = None
    from_model: str | None = None
    settings: list[str] = field(default_factory=list)
    device: str | None = None
    batch_tokens: str | None = None
    deterministic: bool = False
    passes: str | None = None


@dataclass
class Settled:
    """What `run.json` holds."""

    config: RunConfig
    choices: Choices
    about: dict[str, Any]

    def to_json(self) -> str:
        values = {"config": asdict(self.config), "choices": asdict(self.choices), "about": self.about}
        return json.dumps(values, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Settled:
        values = json.loads(text)
        config = RunConfig.from_json(json.dumps(values["config"]))
        return cls(config, Choices(**values["choices"]), values["about"])


def train(folder: Path, request: Request, tell: Tell, progress: Progress) -> dict[str, Any]:
    """Runs to the end, or goes on to it, and returns the result. Under torchrun every rank calls this."""
    began = time.monotonic()
    rank, n_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trainer: Trainer | None = None
    journal = Journal(folder, tell) if rank == 0 else None
    hear = journal.tell if journal else (lambda event: None)
    if rank == 0:
        check(request)
        claim(folder, request)
        if not (folder / RUN).exists():
            try:
                trainer = settle(folder, request, n_ranks, began, hear, progress)
            except TransduceError:
                _give_up(folder)
                raise
    else:
        _wait_for(folder / RUN)
    if (folder / RESULT).exists() and (folder / MODEL).exists():
        return _read(folder / RESULT)
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    prepared = find_prepared(folder, request)
    group = Group.start(settled.choices.device)
    if trainer is None:
        trainer = _trainer(folder, _parent(request), settled.config, settled.choices, prepared, hear)
    trainer.begin(settled.config, group)
    with _signals(trainer):
        trainer.run()
    ended = trainer.finish()
    result = {
        **ended,
        "steps": trainer.state.step,
        "target_tokens": trainer.state.n_tokens,
        "seconds": round(trainer.state.seconds, 1),
        "config_hash": settled.config.hash(),
    }
    if group.is_first:
        write_whole(folder / RESULT, json.dumps(result, indent=2) + "\n")
        if not (folder / MODEL).exists():
            with settled.choices.all_threads():
                heads = choose_heads(trainer.model, pairs_to_align(prepared), group.device)
            save_model(folder / MODEL, trainer.model, settled.config, prepared.subwords, origin_of(prepared), heads)
        hear({"event": "end", "step": trainer.state.step, **ended})
    group.close()
    return result


def check(request: Request) -> None:
    """What can be refused before anything is written."""
    if request.size is not None and request.size not in PRESETS:
        raise ConfigError(f"--size is {request.size!r}, must be one of {', '.join(PRESETS)}: or leave it to us")
    if request.budget is not None:
        parse_budget(request.budget)
    check_device(request.device)
    check_passes(request.passes)
    override(PRESETS[request.size or "small"](), settings_of(request))
    if request.from_model is not None:
        load_config(model_folder(Path(request.from_model)))
    if request.prepared is None:
        corpora.choose(**request.data)


def settings_of(request: Request) -> list[str]:
    """`--set`, which is asked last and so decides, after what other flags say the same way."""
    is_number = request.batch_tokens not in (None, "auto")
    return [*([f"data.batch_tokens={request.batch_tokens}"] if is_number else []), *request.settings]


def _give_up(folder: Path) -> None:
    """A run that was refused before it had data leaves nothing; one that has its data can be asked for again."""
    if not (folder / PREPARED).exists() and not (folder / RUN).exists():
        shutil.rmtree(folder, ignore_errors=True)


def claim(folder: Path, request: Request) -> None:
    """The folder is ours, new, or refused."""
    path, wanted = folder / REQUEST, json.loads(json.dumps(asdict(request)))
    if path.exists():
        # What could not be asked for yet when the run began has its default.
        known = json.loads(json.dumps(asdict(Request()))) | _read(path)
        if differing := [name for name in wanted if wanted[name] != known[name]]:
            raise ConfigError(
                f"{folder} holds a run that was asked for otherwise ({', '.join(differing)} differ): give the same "
                "command to go on with it, or another --out"
            )
    elif folder.exists() and any(not inside.name.endswith(UNFINISHED) for inside in folder.iterdir()):
        raise ConfigError(f"{folder} holds something that is no run: choose another --out")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(wanted, indent=2) + "\n")


def find_prepared(folder: Path, request: Request) -> Prepared:
    return Prepared(request.prepared or folder / PREPARED)


def settle(folder: Path, request: Request, n_ranks: int, began: float, tell: Tell, progress: Progress) -> Trainer:
    """Prepares the data, turns the dial, measures, and writes it down. The trainer is ready to begin."""
    parent = _parent(request)
    if request.prepared is None and not (folder / PREPARED).exists():
        _prepare(folder, request, parent, progress)
    prepared = find_prepared(folder, request)
    if parent is not None and prepared.subwords.sha256 != parent.subwords.sha256:
        raise DataError(f"{prepared.folder} has other subwords than {request.from_model}: give the text instead")
    config, size = configure(request, prepared, parent)
    longest = longest_of(prepared)
    choices = choose(config, request.device, n_ranks, longest, request.deterministic, request.passes)
    trainer = _trainer(folder, parent, config, choices, prepared, tell)
    if request.batch_tokens == "auto" and (fits := trainer.fits()) < choices.micro_tokens:
        choices = replace(choices, micro_tokens=max(fits, longest))
        trainer = _trainer(folder, parent, config, choices, prepared, tell)
    budget = None if request.budget is None else parse_budget(request.budget)
    calibrate_seconds = max(CALIBRATE_SECONDS, CALIBRATE_SHARE * (budget or 0.0))
    speed = trainer.calibrate(calibrate_seconds, n_ranks)
    if budget is not None:
        config, size = configure(request, prepared, parent, speed.tokens_per_second * budget)
        if (config.model, config.data) != (trainer.config.model, trainer.config.data):
            choices = replace(choices, micro_tokens=min(choices.micro_tokens, config.data.batch_tokens))
            trainer = _trainer(folder, parent, config, choices, prepared, tell)
            speed = trainer.calibrate(calibrate_seconds, n_ranks)
    config = in_time(config, speed, budget, time.monotonic() - began)
    forecast = {
        "size": size,
        "parameters": sum(p.numel() for p in trainer.parameters),
        "steps": config.train.max_steps,
        "seconds": round(config.train.max_steps * speed.seconds_per_step, 1),
        "memory_bytes": speed.memory_bytes,
        "epochs": round(config.train.max_steps / trainer.layout.n_steps, 1),
        "batch_tokens": config.data.batch_tokens,
        "seconds_per_step": speed.seconds_per_step,
        "tokens_per_second": speed.tokens_per_second,
    }
    settled = Settled(config, choices, {"forecast": forecast, "n_ranks": n_ranks, **_passport(prepared, choices)})
    write_whole(folder / RUN, settled.to_json() + "\n")
    tell({"event": "forecast", "step": 0, **forecast, **asdict(choices)})
    return trainer


def _prepare(folder: Path, request: Request, parent: Parent | None, progress: Progress) -> None:
    train_corpora, valid_corpora = corpora.choose(**request.data)
    config = override(RunConfig(), [s for s in request.settings if s.strip().startswith("data.")])
    vocab_size = request.vocab_size
    if vocab_size is None and request.size in ("base", "big"):
        vocab_size = PRESETS[request.size]().model.source_vocab_size
    prepare(
        train_corpora,
        folder / PREPARED,
        config.data,
        valid=valid_corpora,
        vocab_size=vocab_size,
        with_cleaning=not request.keep_all,
        subwords=parent.subwords if parent else None,
        progress=progress,
    )


class Parent(NamedTuple):
    """The model that a run begins from."""

    weights: dict[str, Tensor]
    config: RunConfig
    subwords: Subwords


def _parent(request: Request) -> Parent | None:
    if request.from_model is None:
        return None
    folder = model_folder(Path(request.from_model))
    model, config = load_model(folder)
    return Parent(model.weights(), config, Subwords.load(folder / SUBWORDS))


def configure(
    request: Request, prepared: Prepared, parent: Parent | None, most_tokens: float | None = None
) -> tuple[RunConfig, str]:
    """By `--from`, `--size` or the dial; then by what was set."""
    n_entries = len(prepared.subwords)
    is_on_gpu = (request.device or default_device()) == "cuda"
    n_tokens = int(max(length_N.sum() for length_N in prepared.train.lengths()))
    config, size = dial(len(prepared.train), n_tokens, is_on_gpu, request.size, most_tokens)
    if parent is not None:
        config, size = replace(config, model=parent.config.model), f"that of {request.from_model}"
    config = with_model(config, source_vocab_size=n_entries, target_vocab_size=n_entries)
    # A batch holds at least one pair, however short the time is.
    batch_tokens = max(config.data.batch_tokens, longest_of(prepared))
    config = replace(config, data=replace(config.data, batch_tokens=batch_tokens))
    return override(config, settings_of(request)), size


def longest_of(prepared: Prepared) -> int:
    """Tokens of the longest sentence, of validation too: a pass must hold it."""
    lengths = [*prepared.train.lengths(), *prepared.valid.lengths()]
    return max(int(length_N.max(initial=0)) for length_N in lengths)


def in_time(config: RunConfig, speed: Speed, budget: float | None, spent: float) -> RunConfig:
    """Steps that fill the budget, and from them, or from the minutes between checkpoints, how often to save."""
    train, n_milestones = config.train, N_MILESTONES
    if budget is not None:
        # Half of what milestones may take is for translations: fewer of them where time is short.
        seconds = MILESTONES_SHARE * budget / LEAST_MILESTONES / 2
        n_judged = min(train.valid_translations, int(seconds / max(speed.seconds_per_translation, 1e-9)))
        train = replace(train, valid_translations=n_judged)
        seconds_to_judge = n_judged * speed.seconds_per_translation
        seconds_per_milestone = speed.seconds_per_validation + speed.seconds_per_save + seconds_to_judge
        affordable = int(MILESTONES_SHARE * budget / seconds_per_milestone)
        n_milestones = max(LEAST_MILESTONES, min(N_MILESTONES, affordable))
        # At the end, three candidates for the final model are compared, and heads are asked how they align.
        to_finish = 3 * speed.seconds_per_validation + seconds_to_judge + ALIGN_SECONDS
        room = budget * (1 - MARGIN) - spent - n_milestones * seconds_per_milestone - to_finish
        max_steps = int(room / speed.seconds_per_step)
        if max_steps < 1:
            raise ConfigError(
                f"--budget is {budget:.0f} s, of which {spent:.0f} s went by before the first step: give more time, "
                "or a smaller --size"
            )
        train = with_steps(replace(config, train=train), max_steps).train
    if train.checkpoint_steps is None:
        by_minutes = int(60 * train.checkpoint_minutes / speed.seconds_per_step)
        train = replace(train, checkpoint_steps=max(1, min(by_minutes, -(-train.max_steps // n_milestones))))
    return replace(config, train=train)


def parse_budget(text: str) -> float:
    """20m, 90s, 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--budget is {text!r}, must be a time such as 90s, 20m or 2h: give one")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def origin_of(prepared: Prepared) -> Origin:
    source_N, target_N = prepared.train.lengths()
    return Origin(
        directions=tuple(prepared.report.directions()),
        tagged_languages=tuple(prepared.report.tagged_languages),
        longest_source=int(source_N.max()),
        longest_target=int(target_N.max()),
    )


def pairs_to_align(prepared: Prepared) -> list[Pair]:
    """Of validation first: heads are judged on what comes first, and need not have seen it."""
    pairs: list[Pair] = []
    for examples in (prepared.valid, prepared.train):
        rows = np.linspace(0, len(examples) - 1, min(len(examples), MOST_PAIRS - len(pairs))).astype(int)
        for row in rows:
            source, target = examples.pair(int(row))
            pairs.append(([*examples.tag(int(row)), *source.tolist()], target.tolist()))
    return pairs


def _trainer(
    folder: Path, parent: Parent | None, config: RunConfig, choices: Choices, prepared: Prepared, tell: Tell
) -> Trainer:
    alone = Group(0, 1, torch.device(choices.device))

    def describe(pairs: list[list[list[int]]]) -> list[list[str]]:
        return [prepared.subwords.decode(pair) for pair in pairs]

    weights = parent.weights if parent else None
    judge = judge_on(prepared, config)
    return Trainer(folder, config, choices, prepared.train, prepared.valid, alone, tell, weights, describe, judge)


def judge_on(prepared: Prepared, config: RunConfig) -> Callable[[Transformer, int], dict[str, Any]]:
    """BLEU of greedy translations of so many validation pairs, spread over all, and a few of them to look at."""
    languages: dict[tuple[int, ...], str] = {
        (prepared.subwords.tag(name),): name for name in prepared.report.tagged_languages
    }
    # Few extra tokens: a model that has learnt little never ends, and would make the first validations the longest.
    settings = replace(config.decode, method="beam", beam_size=1, n_best=1, max_extra_tokens=JUDGED_EXTRA_TOKENS)
    origin = origin_of(prepared)

    def judge(model: Transformer, n: int) -> dict[str, Any]:
        rows = [int(row) for row in np.linspace(0, len(prepared.valid) - 1, min(n, len(prepared.valid)))]
        pairs = [prepared.valid.pair(row) for row in rows]
        sources, references = (prepared.subwords.decode([pair[side].tolist() for pair in pairs]) for side in (0, 1))
        wanted = [languages.get(tuple(prepared.valid.tag(row))) for row in rows]
        translator = Translator(model, config, prepared.subwords, origin, settings=settings)
        texts = [""] * len(rows)
        for language in dict.fromkeys(wanted):
            places = [place for place, name in enumerate(wanted) if name == language]
            found = translator.translate([sources[place] for place in places], language)
            for place, translation in zip(places, found, strict=True):
                texts[place] = translation.text
        score = bleu(texts, references, n_bootstrap=0)
        shown = list(range(0, len(rows), max(1, len(rows) // N_SHOWN)))[:N_SHOWN]
        samples = [{"source": sources[i], "reference": references[i], "translation": texts[i]} for i in shown]
        return {"bleu": score.value, "bleu_signature": score.signature, "samples": samples}

    return judge


def _passport(prepared: Prepared, choices: Choices) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name()
        if choices.device == "cuda"
        else f"{processor_name()}, {choices.n_threads} threads",
        "versions": {"transduce": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "data": {
            "train": prepared.report.train.sha256,
            "valid": prepared.report.valid.sha256,
            "subwords": prepared.report.subwords_sha256,
            "files": {name: sha for corpus in prepared.report.corpora for name, sha in corpus.files.items()},
        },
    }


class Journal:
    """log.jsonl: a line for each event. Those after a checkpoint are struck out when it is gone on from."""

    def __init__(self, folder: Path, also: Tell) -> None:
        self.path, self.also = folder / LOG, also

    def tell(self, event: dict[str, Any]) -> None:
        if event["event"] == "resumed":
            self._strike_out_after(event["step"])
        if self.path.parent.exists():
            with self.path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(event) + "\n")
        self.also(event)

    def _strike_out_after(self, step: int) -> None:
        """The validation of the step too: it is saved before it is validated, and will be validated again."""
        known = [e for e in read_log(self.path) if e["step"] < step or (e["step"] == step and e["event"] != "valid")]
        write_whole(self.path, "".join(json.dumps(event) + "\n" for event in known))


def read_log(path: Path) -> list[dict[str, Any]]:
    """A last line that a kill cut short is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


@contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the trainer to save and stop; a second one does not wait."""

    def ask(number: int, frame: object) -> None:
        if trainer.is_asked_to_stop:
            raise KeyboardInterrupt
        trainer.is_asked_to_stop = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelFolderError(f"{path} cannot be read: the run is damaged, begin another") from None
    return values


def _wait_for(path: Path) -> None:
    """Until the first rank has settled things. It ends with the others, so that nobody waits for one who is gone."""
    while not path.exists():
        time.sleep(0.2)


def start_ranks(n_ranks: int, arguments: list[str]) -> int:
    """The same command in so many processes on this machine, by torchrun. Returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    return subprocess.call([*command, "-m", "transduce", *arguments])


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Those that are runs, and the runs inside those that are not."""
    found = []
    for folder in folders:
        found += [folder] if (folder / RUN).exists() else sorted(path.parent for path in folder.glob(f"*/{RUN}"))
    return found


def summary_of(folder: Path) -> dict[str, Any]:
    """What a table of runs shows; None for what a run has not come to yet."""
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    events = read_log(folder / LOG)
    step = max((event["step"] for event in events), default=0)
    valid = [event for event in events if event["event"] == "valid"]
    result = _read(folder / RESULT) if (folder / RESULT).exists() else None
    taken = result["candidates"][result["taken"]] if result else min(valid, key=lambda e: e["loss"], default={})
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    forecast = settled.about["forecast"]
    return {
        "run": str(folder),
        "state": "done" if result else f"at step {step:,}",
        "size": forecast["size"],
        "parameters": forecast["parameters"],
        "steps": settled.config.train.max_steps,
        "batch_tokens": settled.config.data.batch_tokens,
        "dropout": settled.config.model.dropout,
        "seed": settled.config.train.seed,
        "perplexity": taken.get("perplexity"),
        "accuracy": taken.get("accuracy"),
        "bleu": (result or taken).get("bleu"),
        "seconds": seconds[-1] if seconds else None,
        "device": settled.about["device"],
        "config_hash": settled.config.hash(),
        "data": settled.about["data"]["train"][:12],
    }
