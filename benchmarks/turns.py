"""Programs that take turns: each is a process of its own, so that none is in another's way and noise meets all."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any


class Worker:
    """A script called with `--worker`. It reads its task, a line of JSON, and then answers line by line."""

    def __init__(self, script: str, task: dict[str, Any]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # for as long as the process is
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self._tell(task)

    def _tell(self, what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def ask(self, question: Any) -> Any | None:
        """None where the process has died, whose last words are then printed."""
        self.begin(question)
        return self.answer()

    def begin(self, question: Any) -> None:
        with contextlib.suppress(OSError):  # who has died has no answer either
            self._tell(question)

    def answer(self) -> Any | None:
        """To the first question that has none yet."""
        assert self.process.stdout is not None
        try:
            return json.loads(self.process.stdout.readline())
        except ValueError:
            self.process.wait()
            self.errors.seek(0)
            print("".join(self.errors.readlines()[-3:]), end="", flush=True)
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Of figures that were measured in turns: the median, the lowest and the highest."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return [statistics.median(found), found[0], found[-1]]
