"""The one place that chooses the engine for a model on this machine.

The engines, from fast to slow: `native` (compiled C, CPUs), `cached` (PyTorch, one cache for all hypotheses) and
`model` (the methods `start` and `step` of the model). The function `unsupported` of an engine returns the reason why it
cannot be used. `engines.cuda`, which records turns of the search on a GPU, is not chosen yet: only an earlier form,
which recorded single steps, has been measured (benchmarks/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from transduce.engines import cached
from transduce.engines.cached import CachedStepper
from transduce.engines.layers import Precision
from transduce.engines.native import stepper as native
from transduce.engines.native.stepper import NativeStepper
from transduce.errors import ConfigError
from transduce.model import Transformer
from transduce.search.protocols import Stepper

Name = Literal["native", "cached", "model"]

DESCRIPTIONS: dict[Name, str] = {
    "native": "compiled for this processor",
    "cached": "PyTorch with a cache for all hypotheses",
    "model": "the model itself, step by step",
}


@dataclass(frozen=True)
class Engine:
    name: Name
    precision: str
    reason: str
    """Why this engine was chosen: what the faster engines do not support, or that there is no faster one."""
    is_fallback: bool
    """Whether a faster engine exists for this device, but not for this model or machine."""

    def __str__(self) -> str:
        return f"{self.name} ({DESCRIPTIONS[self.name]}), {self.precision}: {self.reason}"


def choose_engine(model: Transformer, precision: Precision) -> Engine:
    """Raises ConfigError if int8 is requested and no engine supports it for this model."""
    parameter = next(model.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    if parameter.device.type != "cpu":
        if precision == "int8":
            raise ConfigError("there is no int8 on a GPU: take --dtype float32 or bfloat16")
        return Engine("model", dtype, "the default on a GPU", is_fallback=False)
    if (reason := cached.unsupported(model.config)) is not None:
        if precision == "int8":
            raise ConfigError(f"there is no int8 for this model ({reason}): take --dtype float32")
        return Engine("model", dtype, reason, is_fallback=True)
    if parameter.dtype != torch.float32:
        return Engine("cached", dtype, f"the compiled engine has no {dtype}", is_fallback=True)
    if (reason := native.unsupported(model.config, precision)) is not None:
        return Engine("cached", precision, reason, is_fallback=True)
    return Engine("native", precision, "the fastest for this model on this machine", is_fallback=False)


def make_stepper(engine: Engine, model: Transformer, precision: Precision) -> Stepper[Any]:
    if engine.name == "native":
        return NativeStepper(model, precision)
    return CachedStepper(model, precision) if engine.name == "cached" else model
