"""A map over processes whose results come in the order of the tasks.

Processes of our own, since `multiprocessing` either forks, which threads do not survive, or runs the user's script once
more in each child, and its workers outlive a killed parent. These end with it: their input does.
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
    """`function` must be one that can be pickled: a function of a module, or a `partial` of one.

    Each process holds one task at a time, so that memory is bounded; while we use a result, all are at work.
    """
    if n_processes == 1:
        yield from map(function, tasks)
        return
    environment = environment_of_children()
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(n_processes)
    ]
    try:
        for child in children:
            _send(child, function)
        waiting: list[subprocess.Popen[bytes]] = []
        for task, child in zip(tasks, cycle(children), strict=False):
            result = [_receive(waiting.pop(0))] if len(waiting) == n_processes else []
            _send(child, task)
            waiting.append(child)
            yield from result
        for child in waiting:
            yield _receive(child)
    finally:
        for child in children:
            child.kill()
            child.communicate()


def environment_of_children() -> dict[str, str]:
    """They must find what we found, wherever it was."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _send(child: subprocess.Popen[bytes], what: Any) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(what, child.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        child.stdin.flush()
    except BrokenPipeError:
        raise _died(child) from None


def _receive(child: subprocess.Popen[bytes]) -> Any:
    assert child.stdout is not None
    try:
        result, error = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _died(child) from None
    if error is not None:
        raise error
    return result


def _died(child: subprocess.Popen[bytes]) -> DataError:
    return DataError(f"a working process ended with code {child.wait()}: free some memory, or use one process")


def serve() -> None:
    """The life of a child: a function, then tasks, until the parent closes the pipe or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    tasks, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not get between the results
    try:
        function = pickle.load(tasks)
        while True:
            _reply(results, function, pickle.load(tasks))
    except (EOFError, BrokenPipeError):
        os._exit(0)  # without a last flush, which would complain about the closed pipe


def _reply(results: IO[bytes], function: Callable[[Any], Any], task: Any) -> None:
    result, failure = None, None
    try:
        result = function(task)
    except Exception as error:
        error.add_note(traceback.format_exc())
        failure = error
    pickle.dump((result, failure), results, protocol=pickle.HIGHEST_PROTOCOL)
    results.flush()
