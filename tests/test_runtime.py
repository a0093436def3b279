"""The number of cores and threads follows affinity, container limits and OMP_NUM_THREADS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from transduce import runtime

VERSION_2 = {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}
VERSION_1 = {"cpu/a/b/cpu.cfs_quota_us": "300000\n", "cpu/a/b/cpu.cfs_period_us": "100000\n"}
GROUPS = {"2": ("0::/a/b\n", VERSION_2, 1.5), "1": ("4:memory:/a\n3:cpu,cpuacct:/a/b\n", VERSION_1, 3.0)}
GROUPS |= {"none": ("0::/\n", {}, float("inf")), "damaged": ("nonsense\n", VERSION_2, float("inf"))}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limit_of_a_container_is_read(tmp_path: Path, name: str) -> None:
    """Of the group itself and of those around it, the lowest limit counts."""
    process, files, expected = GROUPS[name]
    (tmp_path / "process").write_text(process)
    for file, text in files.items():
        (tmp_path / "root" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / file).write_text(text)
    assert runtime.container_cores(tmp_path / "root", tmp_path / "process") == expected


def test_a_container_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "container_cores", lambda: 1.5)
    assert runtime.n_cores() == 1
    monkeypatch.setattr(runtime, "container_cores", lambda: 0.2)
    assert runtime.n_cores() == 1


@pytest.mark.parametrize(("value", "expected"), [("1", 1), ("1,4", 1), ("999", None), ("0", None), ("many", None)])
def test_omp_num_threads_is_followed(monkeypatch: pytest.MonkeyPatch, value: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert runtime.default_threads() == (expected or runtime.n_cores())


def test_the_age_of_a_process_includes_its_start() -> None:
    code = "import time; time.sleep(0.5); from transduce.runtime import process_age; print(process_age())"
    began = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0.5 <= age <= time.monotonic() - began + 0.02, "the system counts in hundredths of a second"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there is no affinity on this system")
def test_a_process_on_one_core_uses_one_thread() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); import transduce.runtime as r;"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code} print(r.default_threads())"], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "1\n", done.stderr
