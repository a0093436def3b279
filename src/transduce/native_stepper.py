"""The model by `native.c`: one call for the encoder, one for a step. Its slow twin is `FastStepper`."""

# Axes: as in stepper.py.

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import transduce.native as native
from transduce.config import ModelConfig
from transduce.model import Transformer
from transduce.native import Precision
from transduce.peaks import GROUP, Doubts, Peaks
from transduce.stepper import Asking, Attending, Cells, FastStepper, Int8Product, Norm, Product, Thinking, in_lanes

ROWS, INPUTS, COLUMNS = 32, 64, 32
"""Of these products take multiples: what is missing is filled up."""


def why_not(config: ModelConfig, precision: Precision) -> str | None:
    """Beside what keeps `FastStepper` from it."""
    return native.why_not(precision) if config.activation == "relu" else f"model.activation is {config.activation}"


class NativeStepper(FastStepper):
    def __init__(self, model: Transformer, precision: Precision) -> None:
        assert why_not(model.config, precision) is None
        super().__init__(model, precision)
        config, self.kernels = self.config, native.library(precision)
        self.dtype = torch.int8 if precision == "int8" else torch.float32
        self.held: list[Any] = []
        """What `self.native` points to."""
        encoder, decoder = (self._layers(stack) for stack in (self.encoder, self.decoder))
        self.native = native.Model(
            encoder, decoder, self._matrix(self.output), len(self.encoder), len(self.decoder), config.n_heads,
            config.d_k, config.d_v, config.d_model, config.d_ff,
        )  # fmt: skip

    def _layers(self, stack: list[Any]) -> Any:
        """Those of an encoder have nothing in the places of the memory."""
        found = (native.Layer * len(stack))()
        for own, sub_layers in zip(found, stack, strict=True):
            for sub_layer in sub_layers:
                if isinstance(sub_layer, Attending):
                    own.Q_KV, own.O = self._matrix(sub_layer.Q_KV), self._matrix(sub_layer.O)
                    own.attending = self._norm(sub_layer.norm)
                elif isinstance(sub_layer, Asking):
                    own.memory_Q, own.memory_KV = self._matrix(sub_layer.Q), self._matrix(sub_layer.KV)
                    own.memory_O, own.asking = self._matrix(sub_layer.O), self._norm(sub_layer.norm)
                elif isinstance(sub_layer, Thinking):
                    own.one, own.two = self._matrix(sub_layer.one), self._matrix(sub_layer.two)
                    own.thinking = self._norm(sub_layer.norm)
        self.held.append(found)
        return found

    def _matrix(self, product: Product) -> native.Matrix:
        n_in, n_out = product.W_NF.shape
        packed = torch.empty(_up(n_in, INPUTS) * _up(n_out, COLUMNS), dtype=self.dtype)
        sums = torch.empty(_up(n_out, COLUMNS), dtype=torch.int32)
        columns_FN = product.W_NF.T.contiguous()
        self.kernels.pack(columns_FN.data_ptr(), n_in, n_out, packed.data_ptr(), sums.data_ptr())
        self.held.append((packed, sums, product))
        bias = None if product.b_F is None else product.b_F.data_ptr()
        scale = product.scale_F.data_ptr() if isinstance(product, Int8Product) else None
        return native.Matrix(packed.data_ptr(), sums.data_ptr(), scale, bias, n_in, n_out)

    def _norm(self, norm: Norm) -> native.Norm:
        self.held.append(norm)
        return native.Norm(norm.gain_D.data_ptr(), norm.bias_D.data_ptr(), norm.eps)

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Cells:
        assert prefix_BT is None, "a search forces its prefix, token by token"
        config, (n, n_source), lanes = self.config, source_BS.shape, in_lanes(source_BS.shape[1])
        x_BSD = self.source_VD[source_BS] + self.positions(0, n_source)[:n_source]
        is_token_BS = source_BS != config.pad_id
        source_B = is_token_BS.sum(1)
        shape = (len(self.decoder), n, config.n_heads)
        key_LBHKS, value_LBHSU = torch.zeros(*shape, config.d_k, lanes), torch.zeros(*shape, lanes, config.d_v)
        self.kernels.encode(
            self.native, x_BSD.data_ptr(), source_B.data_ptr(), key_LBHKS.data_ptr(), value_LBHSU.data_ptr(), n,
            n_source, lanes,
        )  # fmt: skip
        unseen_BS = torch.zeros(n, n_source).masked_fill_(~is_token_BS, -torch.inf)
        return Cells(
            memory_key_LBHKS=key_LBHKS,
            memory_value_LBHSU=value_LBHSU,
            unseen_B11S=F.pad(unseen_BS, (0, lanes - n_source), value=-torch.inf)[:, None, None],
            source_B=source_B,
            n_source=lanes,
            cell_LBHCW=torch.empty(*shape, 0, config.d_k + config.d_v),
            hidden_BKC=torch.empty(n, 1, 0),
            length_B=torch.zeros(n, dtype=torch.long),
            longest=0,
        )

    def _with_cells(self, state: Cells) -> tuple[Cells, Tensor, int]:
        """For each hypothesis a cell that nobody needed, which it sees from now on; and where all cells end."""
        n, n_kept, n_cells = state.hidden_BKC.shape
        cell_BK = torch.empty(n, n_kept, dtype=torch.long)
        end = self.kernels.take_cells(state.hidden_BKC.data_ptr(), n, n_kept, n_cells, cell_BK.data_ptr())
        return (state, cell_BK, end) if end >= 0 else self._with_cells(state.with_more_cells())

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Peaks, Cells]:
        state, cell_BK, end = self._with_cells(state)
        n, n_kept, n_cells = state.hidden_BKC.shape
        x_RD = self.embed(last_R, state)
        given = native.State(
            state.cell_LBHCW.data_ptr(), cell_BK.data_ptr(), state.hidden_BKC.data_ptr(),
            state.memory_key_LBHKS.data_ptr(), state.memory_value_LBHSU.data_ptr(), state.source_B.data_ptr(), n,
            n_kept, n_cells, end, state.unseen_B11S.shape[3],
        )  # fmt: skip
        n_rows, config = len(last_R), self.config
        out_RD = torch.empty(_up(n_rows, ROWS), _up(config.d_model, INPUTS), dtype=self.dtype)
        scale_R = torch.empty(n_rows)
        peak_RN, log_sum_R1 = torch.empty(n_rows, _up(config.target_vocab_size, GROUP) // GROUP), torch.empty(n_rows, 1)
        self.kernels.step(
            self.native, ctypes.byref(given), x_RD.data_ptr(), out_RD.data_ptr(), scale_R.data_ptr(),
            peak_RN.data_ptr(), log_sum_R1.data_ptr(),
        )  # fmt: skip
        after = replace(state, length_B=state.length_B + 1, longest=state.longest + 1)
        return NativePeaks(peak_RN, log_sum_R1, *self._lookers(out_RD, scale_R), self, out_RD, scale_R), after

    def _lookers(
        self, x_RD: Tensor, scale_R: Tensor
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor]]:
        def look(row: Tensor, group: Tensor) -> Tensor:
            found = torch.empty(*row.shape, GROUP)
            self.kernels.look(
                self.native, x_RD.data_ptr(), scale_R.data_ptr(), row.data_ptr(), group.data_ptr(), row.numel(),
                found.data_ptr(),
            )  # fmt: skip
            return found

        def logits() -> Tensor:
            own_RD = x_RD[: len(scale_R), : self.config.d_model].contiguous()
            return self.output.of((own_RD, scale_R[:, None]) if self.dtype == torch.int8 else own_RD)

        return look, logits


@dataclass(frozen=True)
class NativePeaks(Peaks):
    """Looks into as many groups as it takes."""

    stepper: NativeStepper
    x_RD: Tensor
    scale_R: Tensor

    def best(
        self, so_far_BK: Tensor, state_BK: Tensor, penalty_AV: Tensor, n_open_B1: Tensor, may_end_B: Tensor | None,
        eos_id: int, doubts: Doubts,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        n, n_kept = so_far_BK.shape
        value_BC = torch.empty(n, n_kept + 1)
        parent_BC, token_BC = (torch.empty(n, n_kept + 1, dtype=torch.long) for _ in range(2))
        so_far_BK, state_BK, penalty_AV = so_far_BK.contiguous(), state_BK.contiguous(), penalty_AV.contiguous()
        asked = native.Asked(
            so_far_BK.data_ptr(), state_BK.data_ptr(), penalty_AV.data_ptr(),
            None if may_end_B is None else may_end_B.data_ptr(), eos_id,
        )  # fmt: skip
        self.stepper.kernels.choose(
            self.stepper.native, self.x_RD.data_ptr(), self.scale_R.data_ptr(), self.peak_RN.data_ptr(),
            self.log_sum_R1.data_ptr(), ctypes.byref(asked), n, n_kept, value_BC.data_ptr(), parent_BC.data_ptr(),
            token_BC.data_ptr(),
        )  # fmt: skip
        return value_BC.masked_fill_(value_BC < LOW, -torch.inf), parent_BC, token_BC


LOW = -1e37
"""What is lower is -inf to native.c."""


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
