"""Prepared data, small trainers and small runs, for the tests of training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.pairs import sentences, write_pairs
from transduce import DataConfig, RunConfig, load_model, override, tiny, with_model
from transduce.data.corpora import find_corpus
from transduce.data.prepare import Prepared, prepare
from transduce.training import settle
from transduce.training.choices import Choices
from transduce.training.distributed import Group
from transduce.training.journal import Event, FinalChoice
from transduce.training.request import Request
from transduce.training.trainer import Trainer

CPU = Choices("cpu", "float32", 1, 150, False)
SETTINGS = [
    "train.max_steps=12",
    "train.checkpoint_steps=4",
    "data.batch_tokens=300",
    "data.n_shapes=8",
    "train.average_last=2",
    "train.warmup_steps=5",
]


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    files = write_pairs(folder, "a", sentences(400))
    prepare([find_corpus(files, None)], folder / "prepared", DataConfig(), vocab_size=300)
    return folder / "prepared"


@pytest.fixture
def prepared(prepared_folder: Path) -> Prepared:
    return Prepared(prepared_folder)


@pytest.fixture
def quick_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any time for measuring the machine."""
    monkeypatch.setattr(settle, "CALIBRATE_SECONDS", 0.01)
    monkeypatch.setattr("transduce.training.choices.fastest_on_cpu", lambda *_: ("float32", 1))


def ignore(*_: object) -> None:
    pass


# Trainers


def config_for(*settings: str) -> RunConfig:
    model = {
        "source_vocab_size": 300,
        "target_vocab_size": 300,
        "n_encoder_layers": 1,
        "n_decoder_layers": 1,
        "d_model": 22,
        "d_ff": 13,
        "n_heads": 3,
        "d_k": 5,
        "d_v": 7,
        "dropout": 0.2,
    }
    return override(with_model(tiny(), **model), [*SETTINGS, *settings])


def trainer_for(
    folder: Path,
    prepared: Prepared,
    config: RunConfig,
    on_event: Callable[[Event], None] = ignore,
    choices: Choices = CPU,
) -> Trainer:
    alone = Group(0, 1, torch.device("cpu"))
    return Trainer(folder, config, choices, prepared.train, prepared.valid, alone, on_event)


def run_to_the_end(folder: Path, prepared: Prepared, config: RunConfig) -> tuple[Trainer, FinalChoice]:
    trainer = trainer_for(folder, prepared, config)
    trainer.run()
    return trainer, trainer.finish()


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: W.clone() for name, W in trainer.model.weights().items()}


def assert_same_bits(ours: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert ours.keys() == others.keys()
    for name, W in ours.items():
        assert torch.equal(W, others[name]), name


def assert_same_model(run: Path, other: Path) -> None:
    """The models of two runs have the same bits."""
    ours, others = (load_model(path / "model")[0].weights() for path in (run, other))
    assert_same_bits(dict(ours), dict(others))


# Runs, by the library and by the command


def corpus_of(files: list[str]) -> dict[str, Any]:
    """The arguments of `corpora.choose` for two files."""
    nothing: dict[str, Any] = {"pairs": [], "valid": None, "valid_pairs": [], "languages": None, "fields": None}
    return {"files": files, "columns": "1,2", "both_ways": False, "data_root": None, **nothing}


def request_for(prepared_folder: Path, *settings: str, **changes: Any) -> Request:
    small = ["model.n_encoder_layers=1", "model.n_decoder_layers=1", "model.d_model=22", "model.d_ff=13"]
    return Request(
        prepared=str(prepared_folder), size="tiny", device="cpu", settings=[*small, *SETTINGS, *settings], **changes
    )


def arguments_for(folder: Path, prepared_folder: Path, *more: str) -> list[str]:
    settings = [part for setting in request_for(prepared_folder).settings for part in ("--set", setting)]
    return ["train", str(prepared_folder), "--size", "tiny", "--device", "cpu", "--out", str(folder), *settings, *more]


def start_run(folder: Path, prepared_folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "transduce", *arguments_for(folder, prepared_folder, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish_run(folder: Path, prepared_folder: Path, *more: str) -> str:
    process = start_run(folder, prepared_folder, *more)
    output, messages = process.communicate(timeout=120)
    assert process.returncode == 0, messages
    return output + messages
