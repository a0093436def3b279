"""The committed results of checks on a GPU belong to the current sources."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_passes import NOT_ON_A_GPU
from experiments.passport import sources, sources_of
from transduce.training.passes.written import COVERED

COMPILED = ("products", "search", "vectors")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_current_passes_were_checked_on_a_gpu() -> None:
    result = json.loads((RESULTS / "gpu_passes_h200.json").read_text())
    current = sources_of(COVERED, NOT_ON_A_GPU)
    assert result["covers"] == current, "run python -m benchmarks.gpu_passes on a GPU, and commit its result"
    assert all(check["passed"] for check in result["checks"])
    assert len(result["checks"]) >= 8


def test_different_sources_have_different_hashes() -> None:
    assert len({sources_of(COVERED), sources_of(COVERED[1:]), sources_of(COVERED, NOT_ON_A_GPU)}) == 3


def test_the_hash_of_the_sources_includes_compiled_files() -> None:
    assert sources() not in (sources_of(["**/*.py"]), sources_of(["**/*.py", "**/*.h"]))
    assert sources() == sources_of(
        ["**/*.py", "engines/native/native.c", *(f"engines/native/{part}.h" for part in COMPILED)]
    )
