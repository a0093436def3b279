"""The comparison of written passes sees a change of the program, and no change of names and comments."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.same_passes import measured_hash

pytest.importorskip("triton", reason="Triton is for Linux")

ROOT = Path(__file__).parents[2]
CHANGES = {
    "names and comments": (r"\bplain_sum_C\b", "sum_of_logits_C", True),
    "a gradient": (r"\bfactor = tl.load\(factor_pointer\)", "factor = 2 * tl.load(factor_pointer)", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_only_a_change_of_the_program_is_reported(tmp_path: Path, name: str) -> None:
    pattern, replacement, is_same = CHANGES[name]
    shutil.copytree(ROOT / "src", tmp_path / "src")
    kernels = tmp_path / "src" / "transduce" / "training" / "passes" / "kernels.py"
    text, n_changes = re.subn(pattern, replacement, kernels.read_text())
    assert n_changes > 0
    kernels.write_text(text)
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"covers": measured_hash(tmp_path / "src")}))
    command = [sys.executable, "-m", "benchmarks.same_passes", str(tmp_path / "src"), str(result)]
    done = subprocess.run([*command, "--cases", "the paper"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == is_same, done.stdout + done.stderr
    hash_now = measured_hash(ROOT / "src")
    assert (json.loads(result.read_text())["covers"] == hash_now) == is_same
