"""Training for experiments: runs a `RunConfig` through the package's trainer and returns a record with its passport."""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from experiments.passport import passport
from transduce import RunConfig, Translator, base, with_model
from transduce.evaluation.metrics import bleu
from transduce.model_folder.format import RUN
from transduce.training.journal import LOG, read_log
from transduce.training.request import Request
from transduce.training.run import train
from transduce.training.settle import Settled

Job = TypeVar("Job")
Record = dict[str, Any]

BATCH_SIZE = 256
"""Sentences per search. The value does not change the translations, but a smaller one leaves a GPU idle."""


class Done(NamedTuple):
    """A finished run."""

    folder: Path
    settled: Settled
    result: Record
    """The contents of `result.json`."""


def prepare_once(folder: Path, train: Sequence[Path], valid: Sequence[Path], languages: str, vocabulary: int) -> None:
    """Run `transduce prepare`, unless the folder exists."""
    if not folder.exists():
        command = [sys.executable, "-m", "transduce", "prepare", *map(str, train), "--valid", *map(str, valid)]
        command += ["--languages", languages, "--vocab-size", str(vocabulary), "--out", str(folder)]
        subprocess.run(command, check=True)


def settings_from(config: RunConfig, since: RunConfig) -> list[str]:
    """The `--set` arguments that turn `since` into `config`, without vocabulary sizes, which the data determines."""
    new, old = asdict(with_vocabulary_of(since, config)), asdict(since)
    return [
        f"{section}.{name}={value}"
        for section, fields in new.items()
        for name, value in fields.items()
        if value != old[section][name]
    ]


def with_vocabulary_of(known: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with the vocabulary sizes of `known`."""
    sizes = known.model.source_vocab_size, known.model.target_vocab_size
    return with_model(config, source_vocab_size=sizes[0], target_vocab_size=sizes[1])


def train_config(
    folder: Path,
    prepared: Path,
    config: RunConfig,
    *,
    device: str | None = None,
    passes: str | None = None,
    budget: str | None = None,
) -> Done:
    """Train in this process, resuming a run that exists in `folder`. With a budget, the trainer chooses the number of
    steps; otherwise `config` decides everything."""
    settings = settings_from(config, base())
    if budget is not None:  # it decides the number of steps, so the trainer refuses both
        settings = [setting for setting in settings if not setting.startswith("train.max_steps=")]
    request = Request(
        prepared=str(prepared), size="base", settings=settings, device=device, passes=passes, budget=budget
    )
    precision = torch.get_float32_matmul_precision()
    try:
        result = train(folder, request, lambda event: None, lambda stage, done, total: None)
    finally:
        torch.set_float32_matmul_precision(precision)  # the trainer lowers it on a GPU, but scores need float32
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    if budget is None:
        requested = with_vocabulary_of(settled.config, config)
        checkpoint_steps = config.train.checkpoint_steps or settled.config.train.checkpoint_steps
        requested = replace(requested, train=replace(requested.train, checkpoint_steps=checkpoint_steps))
        assert settled.config == requested, "the trainer ran another configuration than the requested one"
    return Done(folder, settled, result)


def record_of(done: Done) -> Record:
    """The result of a run, and its passport. The minutes cover all steps and validations, but not the start."""
    settled, result = done.settled, done.result
    speeds = [event["tokens_per_second"] for event in read_log(done.folder / LOG) if event["event"] == "step"]
    taken = result["candidates"][result["taken"]]
    return {
        "perplexity": taken["perplexity"],
        "valid_loss": taken["loss"],
        "taken": result["taken"],
        "averaged": len(taken["steps"]),
        "steps": result["steps"],
        "target_tokens": result["target_tokens"],
        "parameters": settled.about["forecast"]["parameters"],
        "minutes": result["seconds"] / 60,
        "tokens_per_second": statistics.median(speeds),
        "passes": settled.choices.way,
        "why_plain": settled.choices.why_plain,
        "dtype": settled.choices.dtype,
        "data": settled.about["data"]["train"],
        **passport(settled.config, settled.choices.device),
    }


def score(translator: Translator, sources: Sequence[str], references: Sequence[str], tokenise: str = "13a") -> Record:
    """BLEU with the translator's settings, which the record includes."""
    texts = [translation.text for translation in translator.stream(list(sources))]
    result = bleu(texts, references, tokenise=tokenise)
    settings = translator.settings
    return {
        "bleu": result.value,
        "interval": result.interval,
        "signature": result.signature,
        "n_sentences": len(references),
        "search": f"beam {settings.beam_size}, length penalty {settings.length_alpha:g}",
    }


def run_in_parallel(
    n: int, run_job: Callable[[Job], Record], jobs: Sequence[Job], minutes: float = math.inf
) -> Iterator[tuple[Job, Record]]:
    """Run at most `n` jobs at a time and yield each record when its job ends. No job starts after `minutes`. Each job
    has its own process and its own cores, so that a crash or a changed PyTorch setting affects no other job. The first
    error is raised when all jobs have ended."""
    errors, last_start = [], time.monotonic() + 60 * minutes
    free_cores: SimpleQueue[set[int]] = SimpleQueue()
    for cores in shares_of_cores(n):
        free_cores.put(cores)
    with ThreadPoolExecutor(n) as pool:
        running = {pool.submit(_in_a_process, run_job, job, last_start, free_cores): job for job in jobs}
        for future in as_completed(running):
            if (error := future.exception()) is not None:
                errors.append(error)
                print(f"{running[future]}: {error}", file=sys.stderr, flush=True)
            elif (record := future.result()) is not None:
                yield running[future], record
    if errors:
        raise errors[0]


def shares_of_cores(n: int) -> list[set[int]]:
    """`n` sets of cores, disjoint if there are enough cores. Two runs that both use all cores take several times as
    long."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i % len(cores) :: n]) if cores else set() for i in range(n)]


def _in_a_process(
    run_job: Callable[[Job], Record], job: Job, last_start: float, free_cores: SimpleQueue[set[int]]
) -> Record | None:
    """Returns None if it is too late to start the job."""
    if time.monotonic() > last_start:
        return None
    cores = free_cores.get()
    try:
        # One pool per job: when a process dies, its pool fails for all waiting jobs.
        with ProcessPoolExecutor(1, get_context("spawn"), _set_up_process, (cores, os.getpid())) as pool:
            return pool.submit(run_job, job).result()
    finally:
        free_cores.put(cores)


def _set_up_process(cores: set[int], parent: int) -> None:
    _restrict_to(cores)
    threading.Thread(target=_terminate_after, args=(parent,), daemon=True).start()


def _terminate_after(parent: int) -> None:
    """Send SIGTERM to this process when its parent has ended; a run saves its state on SIGTERM. Otherwise the run would
    continue without its parent and compete with the next command."""
    while os.getppid() == parent:
        time.sleep(1)
    signal.raise_signal(signal.SIGTERM)


def _restrict_to(cores: set[int]) -> None:
    if cores:  # empty on a system without CPU affinity
        os.sched_setaffinity(0, cores)
        # PyTorch counted all cores at import. A user may have chosen fewer threads than cores.
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
