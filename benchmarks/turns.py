"""Programs that are measured in turns, each in its own process, so that noise affects all of them equally."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from typing import Any


class Worker:
    """A script called with `--worker`. It reads its task, one line of JSON, and answers each request, line by line."""

    def __init__(self, script: str, task: dict[str, Any]) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open until `end`
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self._send(task)

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(message), file=self.process.stdin, flush=True)

    def request(self, request: Any) -> Any | None:
        """Send a request and return its answer. If the process has died, print its last error lines and return None."""
        self.begin(request)
        return self.answer()

    def begin(self, request: Any) -> None:
        """Send a request without waiting for its answer."""
        with contextlib.suppress(OSError):  # `answer` reports a process that has died
            self._send(request)

    def answer(self) -> Any | None:
        """The answer to the oldest request without one."""
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
    """The median, the lowest and the highest ratio of values that were measured in turns."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return [statistics.median(ratios), ratios[0], ratios[-1]]
