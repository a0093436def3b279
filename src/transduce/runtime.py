"""The environment of the process: device, threads, memory allocator, cache folder, processor.

`configure` changes settings of the whole process. The command line, the server and the trainer call it; no constructor
does. PyTorch is imported inside functions, so that a worker process that only reads text does not load it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from pathlib import Path

from transduce.errors import ConfigError

MALLOPT = {-1: 2**31 - 1, -2: 64 * 2**20, -3: 2**30}
"""Values of M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, by their numbers in malloc.h."""


def configure(device: str, n_threads: int | None = None) -> None:
    """Prepare this process to run a model on `device`. May be called more than once."""
    import torch

    if n_threads is not None:
        torch.set_num_threads(n_threads)
    if torch.device(device).type == "cuda":
        # cuDNN's attention needs most of a second to plan each new shape, and there are hundreds of shapes.
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        keep_memory()


def check_device(device: str | None) -> None:
    """Refuse a --device that does not exist on this machine."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}, must be cpu or cuda: leave it out to use a GPU if there is one")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but PyTorch finds no GPU: leave it out to use the CPU")


def default_device() -> str:
    """The GPU if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# Processor and cores


def n_cores() -> int:
    """The number of CPU cores that this process may use: by its affinity, and by the limit of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, container_cores())))


def default_threads() -> int:
    """The number of threads for computing: OMP_NUM_THREADS if it is set, at most one per core."""
    requested = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(n_cores(), int(requested)) if requested.isdecimal() and int(requested) > 0 else n_cores()


def container_cores(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float:
    """The CPU time per second that the control groups of this process allow; infinite without a limit.

    A container may see all cores of its host and be stopped for most of the time if it uses them.
    """
    limits = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        for line in process.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = root / name.strip("/") if not controllers else root / "cpu" / name.strip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                limits.append(_cpu_quota(folder))
    return min(limits)


def _cpu_quota(group: Path) -> float:
    """The limit of one control group, of version 2 or 1."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period"))
        return math.inf if int(quota) < 0 else int(quota) / int(period)
    return math.inf


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "a processor"


def processor_features() -> str:
    """The instruction sets of the processor, as the system lists them.

    They are part of the key of compiled libraries, because different machines may share a home directory.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())


def process_age() -> float:
    """Seconds since this process was started, its imports included; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        return uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the whole line: the start time
    except (OSError, ValueError, IndexError):
        return 0.0


def cache_folder() -> Path:
    """The folder for files that can be created again: compiled libraries and measured speeds. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transduce"


# The allocator


def keep_memory() -> None:
    """Make glibc keep freed memory for later allocations. This has no effect with another C library.

    By default glibc returns each large tensor to the system and requests new memory, of which the system clears every
    page first. Peak memory is the same.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for setting, value in MALLOPT.items():
            mallopt(setting, value)


def release_memory() -> None:
    """Return the unused memory that glibc keeps to the system. For processes that run for a long time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
