"""What must be set before torch is first imported."""

import os

# Some virtual machines announce AMX but hide the shape of its tiles; oneDNN's bf16 kernels then die of an illegal
# instruction. One step below AMX the same kernels exist everywhere, and the tests are about values, not speed.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Matrices this small gain nothing from a second thread, and on a busy machine threads spend their time waiting for
# each other: the copy task, beside two other programs on two cores, took not 50 seconds but more than ten minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels are run by its interpreter, which needs no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples each time, so that a change is judged by what it changes; `make fuzz` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learnt a little German: short, but by the whole road, so that its model is like any other."""
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
