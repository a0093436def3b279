"""The provenance of a result: the configuration, code, device and versions that produced it."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import transduce
from transduce import RunConfig


def passport(config: RunConfig, device: str) -> dict[str, Any]:
    return {
        "config_hash": config.hash(),
        "config": asdict(config),
        "commit": commit(),
        "sources": sources(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{device}, {torch.get_num_threads()} threads",
        "versions": {
            "transduce": transduce.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def sources() -> str:
    """A hash of the package's code. It identifies the code even in a copy without git history."""
    return sources_of(["**/*.py", "**/*.[ch]"])


def sources_of(patterns: Iterable[str], without: Iterable[str] = ()) -> str:
    """A hash of the files that match a pattern, without some of them. All are relative to the package."""
    package = Path(transduce.__file__).parent
    paths = {path for pattern in patterns for path in package.glob(pattern)} - {package / name for name in without}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def commit() -> str:
    """The current commit, with "-changed" if the working tree differs from it, or "unknown" without git history."""
    try:
        folder = Path(__file__).parent
        name = _git("rev-parse", "--short=12", "HEAD", cwd=folder)
        paths = ("../src", "../benchmarks", ".", ":!results", ":!../benchmarks/results", ":!*.md")
        return name + ("-changed" if _git("status", "--porcelain", "--", *paths, cwd=folder) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str, cwd: Path) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def write_result(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
