"""What the process runs on: the device, threads, the allocator, the cache folder, the processor.

`configure` is the one function here that changes the process. The command line, the server and the trainer call it;
no constructor does. PyTorch is imported inside functions, so that a worker process that reads text need not load it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

from transduce.errors import ConfigError

MALLOPT = {-1: 2**31 - 1, -2: 64 * 2**20, -3: 2**30}
"""M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, numbered as in malloc.h."""


def configure(device: str, n_threads: int | None = None) -> None:
    """Prepares this process for passes of a model on `device`. May be called again."""
    import torch

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    if torch.device(device).type == "cuda":
        # cuDNN's attention takes most of a second to plan each new shape, and there are hundreds of shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        keep_memory()


def check_device(device: str | None) -> None:
    import torch

    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}, must be cpu or cuda: leave it out to use a GPU if there is one")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but PyTorch finds no GPU: leave --device out")


def default_device() -> str:
    """A GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# Processor and cores


def n_cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "a processor"


def processor_features() -> str:
    """The instruction sets, as the system lists them: several machines may share one home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())


def cache_folder() -> Path:
    """For what can be made again: compiled libraries and measured speeds. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transduce"


# The allocator


def keep_memory() -> None:
    """Makes the C library keep freed memory for later allocations, where it can be told to.

    Otherwise each large tensor is returned to the system and requested again, and the system clears every page first.
    Peak memory is the same.
    """
    with contextlib.suppress(OSError, AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for setting, value in MALLOPT.items():
            mallopt(setting, value)


def release_memory() -> None:
    """Returns to the system what `keep_memory` keeps and nothing uses: for a process that runs for a long time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
