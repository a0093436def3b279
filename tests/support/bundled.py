"""The bundled model on sentences it has not seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.bundled_model import LANGUAGES
from transduce.data.corpora import read_lines
from transduce.model_folder.format import BUNDLED_MODEL, find_model

FOLDER = find_model(Path(BUNDLED_MODEL))


def transduce(*arguments: str, given: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transduce", *arguments], input=given, capture_output=True, text=True, cwd=cwd
    )


def heldout() -> list[list[str]]:
    return [[line.decode() for line in read_lines(FOLDER / f"heldout.{language}.xz")] for language in LANGUAGES]
