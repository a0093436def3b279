"""Other programs that use the machine during a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from transduce.runtime import n_cores

BUSY = "import os\nwhile os.getppid() == {pid}: pass"


@contextmanager
def busy_cores() -> Iterator[None]:
    """A program for each core that uses all of its time."""
    command = [sys.executable, "-c", BUSY.format(pid=os.getpid())]
    programs = [subprocess.Popen(command) for _ in range(n_cores())]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()
