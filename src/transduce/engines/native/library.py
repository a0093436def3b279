"""`native.c`, compiled once per precision by the machine's C compiler and kept in the cache folder.

Without a compiler, or on a processor without the instructions that the source needs, `library` raises CompilerError and
`engines.choose` takes another engine.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from transduce.engines.layers import Precision
from transduce.runtime import cache_folder, processor_features

SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("native.c", "products.h", "vectors.h", "search.h"))
# The compiler may reorder sums. -ffast-math is not used: it changes how the whole process treats denormal numbers.
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fassociative-math",
    "-freciprocal-math",
    "-ffinite-math-only",
    "-shared",
    "-fPIC",
)
WIDE = ("-mprefer-vector-width=512",)
"""On x86, where compilers otherwise use at most 256 bits."""
PRECISIONS: dict[Precision, tuple[str, ...]] = {"float32": ("-DFLOAT32",), "int8": ()}
SECONDS = 60


class CompilerError(Exception):
    """There is no compiler, or it failed."""


# The structures of native.c, field by field.

_X, _N = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    _fields_ = (("packed", _X), ("column_sum", _X), ("scale", _X), ("bias", _X), ("n_in", _N), ("n_out", _N))


class Norm(ctypes.Structure):
    _fields_ = (("gain", _X), ("bias", _X), ("eps", ctypes.c_float))


class Layer(ctypes.Structure):
    """An encoder layer leaves the fields of cross-attention empty."""

    _fields_ = (
        ("Q_KV", Matrix),
        ("O", Matrix),
        ("self_norm", Norm),
        ("memory_Q", Matrix),
        ("memory_KV", Matrix),
        ("memory_O", Matrix),
        ("memory_norm", Norm),
        ("first", Matrix),
        ("second", Matrix),
        ("feed_forward_norm", Norm),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        ("output", Matrix),
        ("source_embedding", _X),
        ("target_embedding", _X),
        ("embedding_scale", ctypes.c_float),
        ("n_encoder", _N),
        ("n_decoder", _N),
        ("n_heads", _N),
        ("d_k", _N),
        ("d_v", _N),
        ("d_model", _N),
        ("d_ff", _N),
    )


class State(ctypes.Structure):
    _fields_ = (
        ("cells", _X),
        ("new_cell", _X),
        ("hidden", _X),
        ("keys", _X),
        ("values", _X),
        ("unseen", _X),
        ("n_source", _X),
        ("length", _X),
        ("n_sentences", _N),
        ("n_kept", _N),
        ("n_cells", _N),
        ("end", _N),
        ("n_lanes", _N),
    )


class Arrivals(ctypes.Structure):
    """Sentences that enter the search."""

    _fields_ = (
        ("source", _X),
        ("places", _X),
        ("number", _X),
        ("limit", _X),
        ("n", _N),
        ("padded_length", _N),
        ("pad_id", _N),
        ("bos_id", _N),
        ("positions", _X),
    )


class Hypotheses(ctypes.Structure):
    _fields_ = (
        ("number", _X),
        ("limit", _X),
        ("length", _X),
        ("n_ended", _X),
        ("token", _X),
        ("last", _X),
        ("state", _X),
        ("ended_token", _X),
        ("ended_length", _X),
        ("margin", _X),
        ("log_prob", _X),
        ("ended_log_prob", _X),
        ("ended_score", _X),
        ("n_tokens", _N),
        ("is_over", _X),
    )


class SearchSettings(ctypes.Structure):
    _fields_ = (
        ("penalty", _X),
        ("next_state", _X),
        ("length_penalty", _X),
        ("eos_id", _N),
        ("min_length", _N),
        ("n_best", _N),
        ("stop_early", _N),
    )


@functools.cache
def library(precision: Precision) -> ctypes.CDLL:
    """Raises CompilerError if there is none, also if the user's cache folder cannot be used."""
    try:
        return load(built(precision))
    except (OSError, RuntimeError) as error:
        raise CompilerError(f"the compiled library cannot be used: {error}") from error


def load(path: Path) -> ctypes.CDLL:
    result = ctypes.CDLL(str(path))
    model, state, arrivals, hypotheses, settings = map(
        ctypes.POINTER, (Model, State, Arrivals, Hypotheses, SearchSettings)
    )
    for name, argument_types in {
        "pack": [_X, _N, _N, _X, _X],
        "multiply": [_X, _N, ctypes.POINTER(Matrix), _X],
        "weighted_sums": [ctypes.c_int, _X, _N, _N, _X, _N, _N, _N, _X, _N],
        "encode": [model, state, arrivals],
        "step": [model, state, _X, _X, _X, _X, _X],
        "logits_of_groups": [model, _X, _X, _X, _X, _N, _X],
        "all_logits": [model, _X, _X, _N, _X],
    }.items():
        function = getattr(result, name)
        function.argtypes, function.restype = argument_types, None
    result.take_cells.argtypes, result.take_cells.restype = [_X, _N, _N, _N, _X], _N
    result.enter.argtypes, result.enter.restype = [model, state, hypotheses, arrivals], _N
    result.turn.argtypes, result.turn.restype = [model, state, hypotheses, settings, _X], _N
    return result


@functools.cache
def unsupported(precision: Precision) -> str | None:
    """Why there is no compiled library, in one line; None if there is one. The result is cached, so a failing compiler
    runs once."""
    try:
        library(precision)
    except CompilerError as error:
        return " ".join(str(error).split())  # the output of a compiler can have several lines
    return None


def built(precision: Precision) -> Path:
    """The compiled file in the cache folder. It is written under a temporary name and renamed, so that no process loads
    an incomplete file."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise CompilerError(f"there is no C compiler {compiler!r}")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    command = [compiler, *FLAGS, *PRECISIONS[precision], *(WIDE if is_x86 else ())]
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS)]
    # The result of -march=native depends on the processor, and several machines may share a home directory.
    key = "\n".join([*command, processor_features(), *sources])
    cache = cache_folder()
    path = cache / f"native-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            unfinished = Path(folder) / path.name
            subprocess.run(
                [*command, "-o", str(unfinished), str(SOURCE), "-lm"], check=True, capture_output=True, timeout=SECONDS
            )
            unfinished.replace(path)
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{compiler} failed: {error}") from error
    return path
