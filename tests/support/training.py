"""A prepared folder of training data, as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pairs import sentences, write_pairs
from transduce import DataConfig
from transduce.data.corpora import find_corpus
from transduce.data.prepare import prepare


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    files = write_pairs(folder, "a", sentences(400))
    prepare([find_corpus(files, None)], folder / "prepared", DataConfig(), vocab_size=300)
    return folder / "prepared"
