"""Results that only a GPU can give are committed, and belong to the sources as they are now."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.gpu_passes import NOT_ON_A_GPU
from experiments.passport import sources, sources_of
from transduce.training.passes.written import COVERED

COMPILED = ("products", "search", "vectors")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_the_passes_were_checked_on_a_gpu_as_they_are() -> None:
    found = json.loads((RESULTS / "gpu_passes_h200.json").read_text())
    covers = sources_of(COVERED, NOT_ON_A_GPU)
    assert found["covers"] == covers, "run python -m benchmarks.gpu_passes on a GPU, and commit its result"
    assert all(check["passed"] for check in found["checks"])
    assert len(found["checks"]) >= 8


def test_a_changed_source_has_another_hash() -> None:
    assert len({sources_of(COVERED), sources_of(COVERED[1:]), sources_of(COVERED, NOT_ON_A_GPU)}) == 3


def test_what_is_compiled_is_named_too() -> None:
    assert sources() not in (sources_of(["**/*.py"]), sources_of(["**/*.py", "**/*.h"]))
    assert sources() == sources_of(
        ["**/*.py", "engines/native/native.c", *(f"engines/native/{part}.h" for part in COMPILED)]
    )
