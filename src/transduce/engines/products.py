"""x W + b by PyTorch, in the model's own precision or in 8 bits."""

# Axes: R rows, N inputs, F outputs.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transduce.engines.layers import Linear, Precision


class Product:
    """x W + b."""

    def __init__(self, weights: Linear) -> None:
        self.W_NF, self.b_F = weights.W_NF.contiguous(), weights.b_F

    def prepare(self, x_RN: Tensor) -> Any:
        """The form of x that `apply` takes. One prepared x may serve several products."""
        return x_RN

    def apply(self, x_RN: Any) -> Tensor:
        return torch.mm(x_RN, self.W_NF) if self.b_F is None else torch.addmm(self.b_F, x_RN, self.W_NF)

    def apply_into(self, out_RF: Tensor, x_RN: Any, columns: slice) -> None:
        """Computes some columns."""
        torch.mm(x_RN, self.W_NF[:, columns], out=out_RF)
        if self.b_F is not None:
            out_RF.add_(self.b_F[columns])

    def __call__(self, x_RN: Tensor) -> Tensor:
        return self.apply(self.prepare(x_RN))


class Int8Product(Product):
    """x W + b in 8 bits. Each column of W and each row of x has a scale, so the result of a row never depends on other
    rows."""

    def __init__(self, weights: Linear) -> None:
        W_NF, self.scale_F = quantise_columns(weights.W_NF)
        self.W_NF = W_NF.T.contiguous().T  # this memory layout is faster with few rows
        self.b_F = None if weights.b_F is None else weights.b_F.float()

    def prepare(self, x_RN: Tensor) -> Any:
        scale_R1 = x_RN.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        return (x_RN / scale_R1).round_().to(torch.int8), scale_R1

    def apply(self, prepared: Any) -> Tensor:
        x_RN, scale_R1 = prepared
        # Converted to float32 first: multiplying integers by floats takes three times as long.
        result_RF = torch._int_mm(x_RN, self.W_NF).float().mul_(scale_R1)
        if self.b_F is None:
            return result_RF.mul_(self.scale_F)
        return torch.addcmul(self.b_F, result_RF, self.scale_F, out=result_RF)

    def apply_into(self, out_RF: Tensor, prepared: Any, columns: slice) -> None:
        x_RN, scale_R1 = prepared
        out_RF.copy_(torch._int_mm(x_RN, self.W_NF[:, columns])).mul_(scale_R1).mul_(self.scale_F[columns])
        if self.b_F is not None:
            out_RF.add_(self.b_F[columns])


PRODUCTS: dict[Precision, type[Product]] = {"float32": Product, "int8": Int8Product}


def quantise_columns(W_NF: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and the scale of each column."""
    W_NF = W_NF.float()
    scale_F = W_NF.abs().amax(0).clamp(min=1e-12) / 127
    return (W_NF / scale_F).round().to(torch.int8), scale_F


def round_to_float16(x: Tensor) -> Tensor:
    """The nearest float16, in the dtype of x; the largest finite one for values out of range."""
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half().to(x.dtype)


ROUND_KEPT: dict[Precision, Callable[[Tensor], Tensor]] = {"float32": lambda x: x, "int8": round_to_float16}
"""The rounding of keys and values before they are stored. With int8 products the compiled engine stores them as
float16, because in float32 the keys and values of many sentences do not fit into the caches of a core. `CachedStepper`
stores the same numbers."""
