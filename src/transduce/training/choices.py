"""What a run needs to know about its machine: device, precision, threads and kind of passes.

It is chosen once, before the first step. On a CPU, precision and threads are chosen by measuring, and the cache folder
keeps the result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from transduce.config import ModelConfig, RunConfig
from transduce.data.parallel import child_environment
from transduce.errors import ConfigError
from transduce.runtime import cache_folder, check_device, configure, default_device, default_threads, processor_name
from transduce.training.passes.written import MAX_WORKERS, why_not, written_passes

Dtype = Literal["float32", "bfloat16"]
PassKind = Literal["written", "plain"]

CPU_MICRO_TOKENS = 4096
"""On a CPU, a larger pass does not fit into the caches and is not faster."""
CANDIDATE_SECONDS = 0.4
"""For measuring each precision and number of threads."""
PROBE_TOKENS = 128
CLEARLY_FASTER = 1.1


@dataclass(frozen=True)
class Choices:
    """There is no choice of torch.compile: it does not pay with many shapes (benchmarks/LOG.md)."""

    device: str
    dtype: Dtype
    """The precision of the passes. Weights, gradients and moments are float32."""
    n_threads: int
    micro_tokens: int
    """The most source positions, and the most target positions, of one pass, padding included."""
    deterministic: bool
    """On a GPU: every run gives the same bits, which costs some speed. On a CPU every run does anyway."""
    way: PassKind = "plain"
    """The passes written out in `passes/written.py`, or the plain ones of `model.py` and autograd. The default serves
    files from before there was a choice."""
    why_plain: str | None = None

    def configure_process(self) -> None:
        """Changes process-wide settings of PyTorch and of the allocator. `run.train` calls it; constructors do not."""
        configure(self.device, self.n_inner_threads)
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code reads memory before writing it
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high")

    @property
    def n_inner_threads(self) -> int:
        """Threads of one operation during training: written passes also run several workers at once."""
        if self.device == "cpu" and self.way == "written":
            return max(1, self.n_threads // MAX_WORKERS)
        return self.n_threads

    @contextlib.contextmanager
    def all_threads(self) -> Iterator[None]:
        """For work that gives each thread a task of its own, such as translating. It must not be used around single
        operations, whose threads wait for each other: on a busy machine they take up to thirty times as long."""
        n_before = torch.get_num_threads()
        torch.set_num_threads(self.n_threads)
        try:
            yield
        finally:
            torch.set_num_threads(n_before)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")


def choose(
    config: RunConfig,
    device: str | None,
    n_ranks: int,
    longest: int,
    deterministic: bool,
    passes: str | None = None,
    n_threads: int | None = None,
    seconds: float = 20.0,
) -> Choices:
    """`device`: None means a GPU if there is one. `longest`: tokens of the longest sentence, which a pass must hold.
    `passes`: a `PassKind`, or None for the fastest. `n_threads`: for each process, or None to choose. `seconds`: the
    highest time for measuring."""
    check_device(device)
    device = device or default_device()
    share = min(config.data.batch_tokens, max(longest, -(-config.data.batch_tokens // n_ranks)))
    reason = why_plain(config.model, device, passes)
    way: PassKind = "written" if reason is None else "plain"
    if device == "cuda":
        return Choices(
            device=device,
            way=way,
            why_plain=reason,
            dtype="bfloat16" if torch.cuda.is_bf16_supported() else "float32",
            n_threads=n_threads or torch.get_num_threads(),
            micro_tokens=share,
            deterministic=deterministic,
        )
    dtype, n_threads = fastest_on_cpu(config.model, n_ranks, n_threads, seconds)
    return Choices(
        device=device,
        way=way,
        why_plain=reason,
        dtype=dtype,
        n_threads=n_threads,
        micro_tokens=min(share, max(longest, CPU_MICRO_TOKENS)),
        deterministic=deterministic,
    )


def why_plain(config: ModelConfig, device: str, passes: str | None) -> str | None:
    """The reason for plain passes, in words; None if passes are written out."""
    if passes == "plain":
        return "--passes is plain"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        reason: str | None = "Triton is not installed"
    elif device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        reason = "this GPU has no bfloat16"
    else:
        reason = why_not(config, device)
    if reason is not None and passes == "written":
        raise ConfigError(f"--passes is written, but {reason}: leave --passes out")
    return reason


def check_passes(passes: str | None) -> None:
    if passes not in (None, *get_args(PassKind)):
        raise ConfigError(
            f"--passes is {passes!r}, must be {' or '.join(get_args(PassKind))}: leave it out to use the fastest"
        )


def fastest_on_cpu(model: ModelConfig, n_ranks: int, n_threads: int | None, seconds: float) -> tuple[Dtype, int]:
    """The fastest candidate that was measured in this time. `n_threads`: None to choose their number too."""
    share = n_threads or max(1, default_threads() // n_ranks)
    numbers = [share] if n_threads else list(dict.fromkeys((share, max(1, share // 2), 1)))
    cache = _SpeedCache(model, numbers)
    if (known := cache.get()) is not None:
        return known
    speeds, is_complete = measure_in_a_process(model, numbers, seconds)
    best = fastest_of(speeds, ("float32", share))
    if is_complete:
        cache.put(best)
    return best


def fastest_of(speeds: Mapping[tuple[Dtype, int], float], default: tuple[Dtype, int]) -> tuple[Dtype, int]:
    """The default, unless another candidate is clearly faster: on a busy machine small differences mean nothing."""
    best = max(speeds, key=lambda candidate: speeds[candidate], default=default)
    return best if speeds.get(best, 0.0) > CLEARLY_FASTER * speeds.get(default, 0.0) else default


class _SpeedCache:
    """The fastest precision and number of threads, kept between runs for each machine and size of model."""

    def __init__(self, model: ModelConfig, numbers: Sequence[int]) -> None:
        self.path = cache_folder() / "fastest.json"
        size = f"{model.d_model} wide, {model.d_ff} inside"
        self.key = f"{processor_name()}, {'/'.join(map(str, numbers))} threads, torch {torch.__version__}, {size}"

    def get(self) -> tuple[Dtype, int] | None:
        try:
            dtype, n_threads = json.loads(self.path.read_text(encoding="utf-8"))[self.key]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return ("bfloat16" if dtype == "bfloat16" else "float32"), max(1, int(n_threads))

    def put(self, best: tuple[Dtype, int]) -> None:
        with contextlib.suppress(OSError):  # a read-only home costs only the time to measure again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                known = json.loads(self.path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                known = {}
            unfinished = self.path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(known | {self.key: best}, indent=1), encoding="utf-8")
            unfinished.replace(self.path)


def measure_in_a_process(
    model: ModelConfig, numbers: Sequence[int], seconds: float
) -> tuple[dict[tuple[Dtype, int], float], bool]:
    """Passes per second of each precision and number of threads, and whether all of them were measured.

    The measuring runs in another process, because on some machines bfloat16 ends the process.
    """
    code = "from transduce.training.choices import measure; measure()"
    task = json.dumps({"model": asdict(model), "numbers": list(numbers)})
    environment = child_environment() | {"OMP_NUM_THREADS": str(max(numbers))}
    child = subprocess.Popen(
        [sys.executable, "-c", code, task],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    is_complete = True
    try:
        output, _ = child.communicate(timeout=max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        is_complete = False
    lines = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {(dtype, n_threads): speed for dtype, n_threads, speed in lines}, is_complete


def measure(arguments: Sequence[str] | None = None) -> None:
    """The main function of the measuring process: prints one line for each candidate, the most promising ones first,
    because there may be no time for all."""
    task = json.loads((arguments or sys.argv[1:])[0])
    config, (most, *fewer), speeds = ModelConfig(**task["model"]), task["numbers"], dict[tuple[Dtype, int], float]()

    def try_out(precision: Dtype, n_threads: int) -> None:
        speeds[precision, n_threads] = passes_per_second(config, precision, n_threads, seconds=CANDIDATE_SECONDS)
        print(json.dumps([precision, n_threads, speeds[precision, n_threads]]), flush=True)

    try_out("float32", most)
    try_out("bfloat16", most)
    fastest = max(speeds, key=lambda candidate: speeds[candidate])[0]
    for n_threads in fewer:
        try_out(fastest, n_threads)


def probe(config: ModelConfig, n_threads: int) -> float:
    """A rough lower bound for the target tokens per second of training in float32, found in a few seconds at most."""
    return PROBE_TOKENS * passes_per_second(config, "float32", n_threads, PROBE_TOKENS // 16, 16, seconds=0.0)


def passes_per_second(
    config: ModelConfig, precision: Dtype, n_threads: int, n_rows: int = 32, length: int = 24, seconds: float = 1.0
) -> float:
    """Runs a small batch forward and backward, as the trainer does, for this time, but at least twice."""
    from transduce.model import Transformer
    from transduce.training.recipe import model_loss

    dtype = getattr(torch, precision)
    has_written_passes = why_not(config, "cpu") is None
    configure("cpu", max(1, n_threads // MAX_WORKERS) if has_written_passes else n_threads)
    model = Transformer(config)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ids_BT = torch.randint(3, min(config.source_vocab_size, config.target_vocab_size), (n_rows, length))
    passes = written_passes(model, length, dtype, ids_BT.numel(), 0.1, n_threads) if has_written_passes else None
    n_done, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or n_done < 2:
        if passes is not None:
            passes.add_gradients([[ids_BT, ids_BT, ids_BT]], [n_done], 1.0)
        else:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
                model_loss(model, ids_BT, ids_BT, ids_BT, 0.1, in_chunks=True).backward()
        if n_done == 0:
            start = time.perf_counter()  # the first pass also allocates and compiles
        n_done += 1
    return (n_done - 1) / spent
