"""Environment variables that must be set before torch is imported, and fixtures for all tests."""

import os

# Some virtual machines announce AMX but hide the shape of its tiles, and oneDNN's bf16 kernels then crash with an
# illegal instruction. Without AMX the same kernels run on every machine, and the tests check values, not speed.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# A second thread does not speed up matrices this small, and on a busy machine threads mostly wait for each other: with
# two other programs on two cores, the copy task took more than ten minutes instead of 50 seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's interpreter runs kernels without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Fixtures that tests of several folders use.
pytest_plugins = ["tests.support.browser", "tests.support.training"]

# The same examples in every run, so that only a change of the code can make a test fail. `make fuzz` draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training run, German to English, made by the command `transduce train`."""
    out = tmp_path_factory.mktemp("trained") / "run"
    settings = ["model.n_encoder_layers=2", "model.n_decoder_layers=2", "train.max_steps=220", "train.warmup_steps=60"]
    settings += ["train.checkpoint_steps=55", "train.average_last=1", "data.batch_tokens=1000", "train.rate_factor=0.6"]
    command = [sys.executable, "-m", "transduce", "train", "tatoeba-40k", "--size", "tiny", "--vocab-size", "2000"]
    command += ["--device", "cpu", "--out", str(out)]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out
