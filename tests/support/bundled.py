"""The folder of the bundled model, its held-out sentences, and a function that runs the command `transduce`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments.bundled_model import LANGUAGES
from transduce.data.corpora import read_lines
from transduce.model_folder.format import BUNDLED_MODEL, find_model

FOLDER = find_model(Path(BUNDLED_MODEL))


def transduce(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "transduce", *arguments], input=stdin, capture_output=True, text=True, cwd=cwd
    )


def heldout() -> list[list[str]]:
    return [[line.decode() for line in read_lines(FOLDER / f"heldout.{language}.xz")] for language in LANGUAGES]
