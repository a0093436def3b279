"""A map over processes that yields results in the order of the tasks.

This module does not use `multiprocessing`, which either forks, which is unsafe with threads, or runs the user's script
again in each child, and whose workers outlive a killed parent. The children here end with the parent, because their
input pipe closes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import IO, Any, TypeVar

from transduce.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

CHILD = "from transduce.data.parallel import serve; serve()"


def ordered_map(function: Callable[[Task], Result], tasks: Iterable[Task], n_processes: int) -> Iterator[Result]:
    """Apply `function` to the tasks. It must be picklable: a module-level function, or a `partial` of one.

    Each process holds one task at a time, which limits memory. All processes work while the caller uses a result.
    """
    if n_processes == 1:
        yield from map(function, tasks)
        return
    environment = child_environment()
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(n_processes)
    ]
    try:
        for child in children:
            _send(child, function)
        busy: list[subprocess.Popen[bytes]] = []
        for task, child in zip(tasks, cycle(children), strict=False):
            results = [_receive(busy.pop(0))] if len(busy) == n_processes else []
            _send(child, task)
            busy.append(child)
            yield from results
        for child in busy:
            yield _receive(child)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def child_environment() -> dict[str, str]:
    """The environment for a child process, which must import modules from the same places as this process."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _send(child: subprocess.Popen[bytes], message: Any) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(message, child.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        child.stdin.flush()
    except BrokenPipeError:
        raise _ended_early(child) from None


def _receive(child: subprocess.Popen[bytes]) -> Any:
    assert child.stdout is not None
    try:
        result, error = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _ended_early(child) from None
    if error is not None:
        raise error
    return result


def _ended_early(child: subprocess.Popen[bytes]) -> DataError:
    return DataError(f"a worker process ended with code {child.wait()}: free some memory, or use one process")


def serve() -> None:
    """Run a child: read a function, then tasks, until the parent closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    tasks, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # output of libraries must not mix with the results
    try:
        function = pickle.load(tasks)
        while True:
            _reply(results, function, pickle.load(tasks))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # skips the final flush, which would fail on the closed pipe


def _reply(results: IO[bytes], function: Callable[[Any], Any], task: Any) -> None:
    result, failure = None, None
    try:
        result = function(task)
    except Exception as error:
        error.add_note(traceback.format_exc())
        failure = error
    pickle.dump((result, failure), results, protocol=pickle.HIGHEST_PROTOCOL)
    results.flush()
