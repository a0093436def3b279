"""Artificial parallel text for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

WORDS = ["Haus", "Baum", "Hund", "Katze", "Wasser", "Feuer", "Himmel", "Erde", "Berg", "Tal", "Stadt", "Land", "Brot"]


def sentences(n: int, seed: int = 0) -> list[tuple[str, str]]:
    rng = np.random.default_rng(seed)
    word_lists = [[WORDS[w] for w in rng.integers(0, len(WORDS), rng.integers(3, 12))] for _ in range(n)]
    return [(f"Das ist {' '.join(words)}.", f"This is {' '.join(reversed(words)).lower()}.") for words in word_lists]


def write_pairs(folder: Path, name: str, pairs: Sequence[tuple[str, str]], languages: str = "de-en") -> list[str]:
    paths = []
    for side, language in enumerate(languages.split("-")):
        path = folder / f"{name}.{language}"
        path.write_bytes("".join(pair[side] + "\n" for pair in pairs).encode())
        paths.append(str(path))
    return paths
