"""What experiments that train have in common: a `RunConfig` goes through the package's own trainer, and a record with
its passport comes back."""

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
from transduce.training.run import LOG, Request, Settled, read_log, train

Job = TypeVar("Job")
Record = dict[str, Any]

BATCH_SIZE = 256
"""Sentences searched side by side. It changes no text, and a GPU is idle with fewer."""


class Done(NamedTuple):
    """A run that has ended."""

    folder: Path
    settled: Settled
    ended: Record


def prepare_once(folder: Path, train: Sequence[Path], valid: Sequence[Path], languages: str, vocabulary: int) -> None:
    """By the package's command, where it has not been done."""
    if not folder.exists():
        command = [sys.executable, "-m", "transduce", "prepare", *map(str, train), "--valid", *map(str, valid)]
        command += ["--languages", languages, "--vocab-size", str(vocabulary), "--out", str(folder)]
        subprocess.run(command, check=True)


def settings_from(config: RunConfig, since: RunConfig) -> list[str]:
    """What `--set` makes `config` of `since` with. Vocabularies are as large as the data makes them, and left out."""
    new, old = asdict(with_vocabulary_of(since, config)), asdict(since)
    return [
        f"{section}.{name}={value}"
        for section, fields in new.items()
        for name, value in fields.items()
        if value != old[section][name]
    ]


def with_vocabulary_of(known: RunConfig, config: RunConfig) -> RunConfig:
    """`config` with the vocabulary of another."""
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
    """In this process, from where it stopped. A budget decides how many steps are taken; else all is as `config` is."""
    settings = settings_from(config, base())
    request = Request(
        prepared=str(prepared), size="base", settings=settings, device=device, passes=passes, budget=budget
    )
    precision = torch.get_float32_matmul_precision()
    try:
        ended = train(folder, request, lambda event: None, lambda stage, done, total: None)
    finally:
        torch.set_float32_matmul_precision(precision)  # a trainer lowers it on a GPU; scores are those of float32
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    if budget is None:
        asked = with_vocabulary_of(settled.config, config)
        measured = settled.config.train.checkpoint_steps
        asked = replace(asked, train=replace(asked.train, checkpoint_steps=config.train.checkpoint_steps or measured))
        assert settled.config == asked, "the command line has changed the run"
    return Done(folder, settled, ended)


def record_of(done: Done) -> Record:
    """What became of it, and its passport. Its minutes are those of all steps, with validation, without the start."""
    settled, ended = done.settled, done.ended
    speeds = [event["tokens_per_second"] for event in read_log(done.folder / LOG) if event["event"] == "step"]
    taken = ended["candidates"][ended["taken"]]
    return {
        "perplexity": taken["perplexity"],
        "valid_loss": taken["loss"],
        "taken": ended["taken"],
        "averaged": len(taken["steps"]),
        "steps": ended["steps"],
        "target_tokens": ended["target_tokens"],
        "parameters": settled.about["forecast"]["parameters"],
        "minutes": ended["seconds"] / 60,
        "tokens_per_second": statistics.median(speeds),
        "passes": settled.choices.way,
        "why_plain": settled.choices.why_plain,
        "dtype": settled.choices.dtype,
        "data": settled.about["data"]["train"],
        **passport(settled.config, settled.choices.device),
    }


def score(translator: Translator, sources: Sequence[str], references: Sequence[str], tokenise: str = "13a") -> Record:
    """BLEU by the translator's own settings, which are told beside it."""
    found = bleu([one.text for one in translator.stream(list(sources))], references, tokenise=tokenise)
    settings = translator.settings
    return {
        "bleu": found.value,
        "interval": found.interval,
        "signature": found.signature,
        "n_sentences": len(references),
        "search": f"beam {settings.beam_size}, length penalty {settings.length_alpha:g}",
    }


def beside(
    n: int, do: Callable[[Job], Record], jobs: Sequence[Job], minutes: float = math.inf
) -> Iterator[tuple[Job, Record]]:
    """Each as it ends, so many at once; none is begun after so many minutes. What one changes of PyTorch, or how it
    dies, is no other's affair: each has a process of its own, with cores of its own. The first error is raised when all
    have ended."""
    errors, last = [], time.monotonic() + 60 * minutes
    free: SimpleQueue[set[int]] = SimpleQueue()
    for cores in shares_of_cores(n):
        free.put(cores)
    with ThreadPoolExecutor(n) as pool:
        running = {pool.submit(_in_a_process, do, job, last, free): job for job in jobs}
        for one in as_completed(running):
            if (error := one.exception()) is not None:
                errors.append(error)
                print(f"{running[one]}: {error}", file=sys.stderr, flush=True)
            elif (record := one.result()) is not None:
                yield running[one], record
    if errors:
        raise errors[0]


def shares_of_cores(n: int) -> list[set[int]]:
    """Apart where there are enough: two runs that each keep all cores busy take several times as long."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cores[i % len(cores) :: n]) if cores else set() for i in range(n)]


def _in_a_process(do: Callable[[Job], Record], job: Job, last: float, free: SimpleQueue[set[int]]) -> Record | None:
    """None where it is too late to begin."""
    if time.monotonic() > last:
        return None
    cores = free.get()
    try:
        # Not one pool for all: when a process dies, its pool is broken for all that wait in it.
        with ProcessPoolExecutor(1, get_context("spawn"), _begin, (cores, os.getpid())) as alone:
            return alone.submit(do, job).result()
    finally:
        free.put(cores)


def _begin(cores: set[int], parent: int) -> None:
    _keep_to(cores)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A run saves what it has when it is told to end. Else it would go on alone, beside the one that is begun next."""
    while os.getppid() == parent:
        time.sleep(1)
    signal.raise_signal(signal.SIGTERM)


def _keep_to(cores: set[int]) -> None:
    if cores:  # a system that does not tell them does not take them either
        os.sched_setaffinity(0, cores)
        # PyTorch has counted all of them when it was imported; who has asked for fewer threads has fewer.
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))
