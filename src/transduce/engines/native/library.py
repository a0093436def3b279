"""`native.c`, compiled once for each precision by this machine's own compiler and kept: encoder and decoder.

There need not be a compiler: then `why_not` says so, and the same is done by PyTorch, more slowly.
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
from typing import Literal

from transduce.runtime import cache_folder, processor_features

Precision = Literal["float32", "int8"]
SOURCE, *HEADERS = (Path(__file__).with_name(name) for name in ("native.c", "products.h", "vectors.h", "search.h"))
# Sums may be added up in any order. Not -ffast-math, which would change how the whole process treats small numbers.
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
"""On x86, where compilers else stop at 256 bits."""
PRECISIONS: dict[Precision, tuple[str, ...]] = {"float32": ("-DFLOAT32",), "int8": ()}
SECONDS = 60


class CompilerError(Exception):
    """There is none, or it failed."""


# As native.c has them, field by field.

_X, _N = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    _fields_ = (("packed", _X), ("sum", _X), ("scale", _X), ("bias", _X), ("n_in", _N), ("n_out", _N))


class Norm(ctypes.Structure):
    _fields_ = (("gain", _X), ("bias", _X), ("eps", ctypes.c_float))


class Layer(ctypes.Structure):
    _fields_ = (
        ("Q_KV", Matrix),
        ("O", Matrix),
        ("attending", Norm),
        ("memory_Q", Matrix),
        ("memory_KV", Matrix),
        ("memory_O", Matrix),
        ("asking", Norm),
        ("one", Matrix),
        ("two", Matrix),
        ("thinking", Norm),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        ("output", Matrix),
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
        ("cell", _X),
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
        ("lanes", _N),
    )


class Arrivals(ctypes.Structure):
    _fields_ = (
        ("source", _X),
        ("places", _X),
        ("number", _X),
        ("limit", _X),
        ("n", _N),
        ("room", _N),
        ("pad_id", _N),
        ("bos_id", _N),
        ("embedding", _X),
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


class How(ctypes.Structure):
    _fields_ = (
        ("penalty", _X),
        ("next", _X),
        ("length_penalty", _X),
        ("eos_id", _N),
        ("min_length", _N),
        ("n_best", _N),
        ("stop_early", _N),
    )


@functools.cache
def library(precision: Precision) -> ctypes.CDLL:
    """Raises CompilerError where there can be none: also where the user's cache cannot be used."""
    try:
        return load(built(precision))
    except (OSError, RuntimeError) as error:
        raise CompilerError(f"what is compiled cannot be used: {error}") from error


def load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    model, state, arrivals, hypotheses, how = map(ctypes.POINTER, (Model, State, Arrivals, Hypotheses, How))
    for name, kinds in {
        "pack": [_X, _N, _N, _X, _X],
        "multiply": [_X, _N, ctypes.POINTER(Matrix), _X],
        "mix": [ctypes.c_int, _X, _N, _N, _X, _N, _N, _N, _X, _N],
        "encode": [model, state, arrivals],
        "step": [model, state, _X, _X, _X, _X, _X],
        "look": [model, _X, _X, _X, _X, _N, _X],
    }.items():
        function = getattr(found, name)
        function.argtypes, function.restype = kinds, None
    found.take_cells.argtypes, found.take_cells.restype = [_X, _N, _N, _N, _X], _N
    found.enter.argtypes, found.enter.restype = [model, state, hypotheses, arrivals], _N
    found.turn.argtypes, found.turn.restype = [model, state, hypotheses, how, _X, _X], _N
    return found


@functools.cache
def why_not(precision: Precision) -> str | None:
    """Remembered: a compiler that fails would be asked again for each model."""
    try:
        library(precision)
    except CompilerError as error:
        return str(error)
    return None


def built(precision: Precision) -> Path:
    """The compiled file, in the user's cache. Made under another name first, so that nobody loads half of it."""
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise CompilerError(f"there is no C compiler {compiler!r}")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    command = [compiler, *FLAGS, *PRECISIONS[precision], *(WIDE if is_x86 else ())]
    known = "\n".join(
        [*command, processor_features(), *(path.read_text(encoding="utf-8") for path in (SOURCE, *HEADERS))]
    )
    cache = cache_folder()
    path = cache / f"native-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            made = Path(place) / path.name
            subprocess.run(
                [*command, "-o", str(made), str(SOURCE), "-lm"], check=True, capture_output=True, timeout=SECONDS
            )
            made.replace(path)
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{compiler} failed: {error.stderr.decode(errors='replace').strip()[:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{compiler} failed: {error}") from error
    return path
