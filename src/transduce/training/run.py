"""A run: one folder, from the request to the finished model. The same request resumes a run that was stopped.

request.json   the arguments of the run; a request with other arguments is refused
prepared/      the data, if the run began with text files
run.json       what was settled before the first step; it is never measured again
plan.jsonl     with a budget: changes of the number of steps during training, each written before it takes effect
log.jsonl      every event
checkpoints/   to resume from
best-so-far/   a model folder with the weights of the best validation, until the run has ended
snapshots/     to average
bad-batches/   the pairs of steps with a NaN or infinite gradient
result.json    the scores of the final model
model/         the model folder
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.prepare import Prepared, Progress
from transduce.errors import TransduceError
from transduce.files import write_atomically
from transduce.model_folder.format import MODEL, RUN, save_model
from transduce.training.distributed import Group
from transduce.training.journal import EndEvent, Event, Journal, OnEvent
from transduce.training.request import Request, check_request, claim, read_json
from transduce.training.settle import (
    PREPARED,
    Settled,
    find_prepared,
    load_parent,
    make_trainer,
    pace_of,
    refuse_short_budget,
    settle,
)
from transduce.training.trainer import Trainer
from transduce.training.validation import origin_of
from transduce.translation.alignment import MAX_PAIRS, Pair, choose_heads

RESULT = "result.json"


def train(
    folder: Path, request: Request, on_event: OnEvent, on_progress: Progress, seconds_before: float = 0.0
) -> dict[str, Any]:
    """Starts or resumes the run, trains to the end, and returns the content of result.json. Changes settings of the
    whole process, see `Choices.configure_process`. Under torchrun every rank calls this. `seconds_before`: of a budget,
    what passed before this call."""
    began = time.monotonic() - seconds_before
    rank, n_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    record = Journal(folder, on_event).record if rank == 0 else _ignore
    trainer: Trainer | None = None
    if rank == 0:
        check_request(request)
        if not (folder / RUN).exists():
            refuse_short_budget(request, began)
        claim(folder, request)
        if not (folder / RUN).exists():
            try:
                trainer = settle(folder, request, n_ranks, began, record, on_progress)
            except TransduceError:
                _remove_without_data(folder)
                raise
    else:
        _wait_for(folder / RUN)
    if (folder / RESULT).exists() and (folder / MODEL).exists():
        return read_json(folder / RESULT)
    settled = Settled.from_json((folder / RUN).read_text(encoding="utf-8"))
    prepared = find_prepared(folder, request)
    group = Group.start(settled.choices.device)
    if resumes := trainer is None:
        settled.choices.configure_process()
        parent = load_parent(request)
        trainer = make_trainer(folder, parent, settled.config, settled.choices, prepared, record)
    trainer.begin(settled.config, group, pace_of(folder, settled, time.monotonic() - began, resumes))
    with _stop_on_signals(trainer):
        trainer.run()
    choice = trainer.finish()
    result = {
        **choice.to_json(),
        "steps": trainer.state.step,
        "target_tokens": trainer.state.n_tokens,
        "seconds": round(trainer.state.seconds, 1),
        "config_hash": settled.config.hash(),
    }
    if group.is_first:
        write_atomically(folder / RESULT, json.dumps(result, indent=2) + "\n")
        if not (folder / MODEL).exists():
            heads = choose_heads(trainer.model, pairs_to_align(prepared), group.device)
            save_model(folder / MODEL, trainer.model, settled.config, prepared.subwords, origin_of(prepared), heads)
        trainer.snapshots.remove_best()
        record(EndEvent(step=trainer.state.step, choice=choice))
    group.close()
    return result


def _ignore(event: Event) -> None:
    """Ranks other than the first report nothing."""


def _remove_without_data(folder: Path) -> None:
    """Removes a refused run, unless its data is prepared: then the same command can use that data."""
    if not (folder / PREPARED).exists() and not (folder / RUN).exists():
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(path: Path) -> None:
    """Waits until the first rank has written the file. If the first rank fails, torchrun ends this process."""
    while not path.exists():
        time.sleep(0.2)


@contextmanager
def _stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """After Ctrl-C or SIGTERM the trainer saves and stops. A second signal stops at once, without saving.

    Python allows only the main thread to handle signals, so a run in another thread is left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(number: int, frame: object) -> None:
        if trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = True

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pairs_to_align(prepared: Prepared) -> list[Pair]:
    """Pairs on which the heads that align words are chosen: validation pairs first, then training pairs."""
    pairs: list[Pair] = []
    for examples in (prepared.valid, prepared.train):
        rows = np.linspace(0, len(examples) - 1, min(len(examples), MAX_PAIRS - len(pairs))).astype(int)
        for row in rows:
            source, target = examples.pair(int(row))
            pairs.append(([*examples.tag(int(row)), *source.tolist()], target.tolist()))
    return pairs


def start_ranks(n_ranks: int, arguments: list[str]) -> int:
    """Runs the same command in several processes on this machine, by torchrun. Returns its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    return subprocess.call([*command, "-m", "transduce", *arguments])
