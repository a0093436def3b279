"""A map over processes: results in the order of tasks, errors reach the caller, and children end with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from transduce import DataError
from transduce.data.parallel import ordered_map


def slow_square(n: int, pause: float = 0.0) -> int:
    time.sleep(pause * (n % 3))  # so that some later tasks finish before earlier ones
    print("a library prints this", n)
    return n * n


def refuse(n: int) -> int:
    if n == 3:
        raise DataError("line 3 is not text")
    return n


def die(n: int) -> int:
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


@pytest.mark.parametrize("n_processes", [1, 2, 3])
@pytest.mark.parametrize("n_tasks", [0, 1, 2, 20])
def test_results_come_in_the_order_of_the_tasks(n_processes: int, n_tasks: int) -> None:
    results = list(ordered_map(partial(slow_square, pause=0.01), range(n_tasks), n_processes))
    assert results == [n * n for n in range(n_tasks)]


def test_large_tasks_do_not_deadlock() -> None:
    megabytes = [bytes([n]) * 3_000_000 for n in range(6)]
    assert list(ordered_map(bytes, megabytes, 2)) == megabytes


def test_errors_reach_the_caller_with_their_type() -> None:
    with pytest.raises(DataError, match="line 3 is not text") as caught:
        list(ordered_map(refuse, range(10), 2))
    assert "in refuse" in caught.value.__notes__[0]


def test_a_killed_worker_is_reported() -> None:
    with pytest.raises(DataError, match="a worker process ended with code -9: free some memory"):
        list(ordered_map(die, range(10), 2))


def test_tasks_are_consumed_lazily() -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for n in range(100):
            taken.append(n)
            yield n

    results: Any = ordered_map(refuse, tasks(), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 6
    results.close()


def test_children_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import time; from transduce.data.parallel import ordered_map\n"
        "m = ordered_map(abs, iter(range(100)), 2); next(m); print('ready', flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
    assert len(children) == 2
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while any(_is_running(child) for child in children):
        assert time.monotonic() < deadline, "children outlive their parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Whether a process is alive. A zombie has ended and waits only for its parent to read its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
