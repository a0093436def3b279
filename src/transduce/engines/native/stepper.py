"""The model by `native.c`: one call for the encoder, one for a turn of a search. Its slow twin is `FastStepper`."""

# Axes: as in stepper.py.

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import transduce.engines.native.library as native
from transduce.config import DecodeConfig, ModelConfig
from transduce.engines.cached import (
    Asking,
    Attending,
    Cells,
    FastStepper,
    Int8Product,
    Norm,
    Product,
    Thinking,
    in_lanes,
)
from transduce.engines.native.library import Precision
from transduce.errors import DataError
from transduce.model import Transformer
from transduce.search.candidates import How
from transduce.search.hypotheses import Beams, Sentence, length_penalty
from transduce.search.loop import turn
from transduce.search.peaks import GROUP, Peaks

ROWS, INPUTS, COLUMNS = 32, 64, 32
"""Of these products take multiples: what is missing is filled up."""
MOST_ROWS = 128
"""At a time in int8, of a model whose weights stay in the cache. As many go through the layers together (MANY_ROWS), so
that products of more are no faster, and keys and values of more sentences take the weights' room."""
CACHED = 16 << 20
"""Bytes of weights. What is larger is read from memory once for all rows: so the more of them, the better."""


DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "int8": (torch.int8, torch.float16),
}
"""Of what is multiplied, and of keys and values."""


def why_not(config: ModelConfig, precision: Precision) -> str | None:
    """Beside what keeps `FastStepper` from it."""
    return native.why_not(precision) if config.activation == "relu" else f"model.activation is {config.activation}"


class NativeStepper(FastStepper):
    def __init__(self, model: Transformer, precision: Precision) -> None:
        assert why_not(model.config, precision) is None
        super().__init__(model, precision)
        config, self.kernels = self.config, native.library(precision)
        self.dtype, self.kept_dtype = DTYPES[precision]
        self.n_bytes = 0
        self.held: list[Any] = []
        """What `self.native` points to."""
        self.length_penalties: dict[tuple[str, float], Tensor] = {}
        encoder, decoder = (self._layers(stack) for stack in (self.encoder, self.decoder))
        self.native = native.Model(
            encoder,
            decoder,
            self._matrix(self.output),
            len(self.encoder),
            len(self.decoder),
            config.n_heads,
            config.d_k,
            config.d_v,
            config.d_model,
            config.d_ff,
        )
        self.most_rows = MOST_ROWS if precision == "int8" and self.n_bytes <= CACHED else None

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
        self.n_bytes += packed.nbytes
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
        shape = (len(self.decoder), n, config.n_heads)
        state = Cells(
            memory_key_LBHKS=torch.empty(*shape, config.d_k, lanes, dtype=self.kept_dtype),
            memory_value_LBHSU=torch.empty(*shape, lanes, config.d_v, dtype=self.kept_dtype),
            unseen_B11S=torch.empty(n, 1, 1, lanes),
            source_B=torch.empty(n, dtype=torch.long),
            n_source=lanes,
            cell_LBHCW=torch.empty(*shape, 0, config.d_k + config.d_v, dtype=self.kept_dtype),
            hidden_BKC=torch.empty(n, 1, 0),
            length_B=torch.zeros(n, dtype=torch.long),
            longest=0,
        )
        # Held until the call returns: another thread may make more positions, in place of these.
        source_BS, places, positions_TD = source_BS.contiguous(), torch.arange(n), self._checked_positions(0, n_source)
        self._check_ids(int(source_BS.min()), int(source_BS.max()))
        new = self._arrivals(n, n_source, positions_TD, source_BS.data_ptr(), places.data_ptr(), None, None)
        self.kernels.encode(self.native, _given(state), new)
        return state

    def _checked_positions(self, side: int, n: int) -> Tensor:
        """What is compiled does not look where a table ends."""
        if len(positions_TD := self.positions(side, n)) < n:
            raise DataError(f"a text has {n} tokens, learned positions end at {len(positions_TD)}: split it")
        return positions_TD

    def _check_ids(self, least: int, most: int) -> None:
        if least < 0 or most >= len(self.source_VD):
            raise DataError(f"token ids from {least} to {most}, this model knows 0 to {len(self.source_VD) - 1}")

    def _arrivals(self, n: int, room: int, positions_TD: Tensor, *lists: int | None) -> native.Arrivals:
        """`lists`: addresses of sources, places, numbers and limits."""
        config = self.config
        return native.Arrivals(
            *lists, n, room, config.pad_id, config.bos_id, self.source_VD.data_ptr(), positions_TD.data_ptr()
        )

    def enter(
        self, beams: Beams, state: Cells, places: Sequence[int], new: Sequence[Sentence], limits: Sequence[int]
    ) -> tuple[Beams, Cells] | None:
        """New sentences in the places of others, by one call. None where there is no room for them, or they want
        another way."""
        room, n_tokens = max(len(sentence.source) for sentence in new), beams.token_BKT.shape[2]
        is_forced = beams.forced_BT.shape[1] > 0 or any(sentence.prefix for sentence in new)
        if is_forced or room > state.unseen_B11S.shape[3] or max(limits) > n_tokens:
            return None
        beams, pad_id = _whole(beams), self.config.pad_id
        source = [id for one in new for id in (*one.source, *[pad_id] * (room - len(one.source)))]
        lists = [_array(one) for one in (source, places, [sentence.number for sentence in new], limits)]
        positions_TD = self._checked_positions(0, room)
        self._check_ids(min(source), max(source))
        arrivals = self._arrivals(len(new), room, positions_TD, *map(ctypes.addressof, lists))
        longest = self.kernels.enter(self.native, _given(state), _hypotheses(beams), arrivals)
        return beams, replace(state, longest=longest, n_source=max(state.n_source, in_lanes(room)))

    def _with_cells(self, state: Cells) -> tuple[Cells, Tensor, int]:
        """For each hypothesis a cell that nobody needed, which it sees from now on; and where all cells end."""
        n, n_kept, n_cells = state.hidden_BKC.shape
        cell_BK = torch.empty(n, n_kept, dtype=torch.long)
        end = self.kernels.take_cells(state.hidden_BKC.data_ptr(), n, n_kept, n_cells, cell_BK.data_ptr())
        return (state, cell_BK, end) if end >= 0 else self._with_cells(state.with_more_cells())

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Peaks, Cells]:
        state, cell_BK, end = self._with_cells(state)
        x_RD = self.embed(last_R, state)
        given = _given(state, cell_BK, end)
        n_rows, config = len(last_R), self.config
        out_RD = torch.empty(_up(n_rows, ROWS), _up(config.d_model, INPUTS), dtype=self.dtype)
        scale_R = torch.empty(n_rows)
        peak_RN, log_sum_R1 = torch.empty(n_rows, _up(config.target_vocab_size, GROUP) // GROUP), torch.empty(n_rows, 1)
        self.kernels.step(
            self.native,
            ctypes.byref(given),
            x_RD.data_ptr(),
            out_RD.data_ptr(),
            scale_R.data_ptr(),
            peak_RN.data_ptr(),
            log_sum_R1.data_ptr(),
        )
        after = replace(state, length_B=state.length_B + 1, longest=state.longest + 1)
        return Peaks(peak_RN, log_sum_R1, *self._lookers(out_RD, scale_R)), after

    @torch.no_grad()
    def turn(self, beams: Beams, state: Cells, how: How) -> tuple[Beams, Cells, list[bool]]:
        """Both are consumed: hypotheses, too, change in place."""
        if not how.is_plain(beams):
            return turn(self, beams, state, how)
        beams, (n, n_kept) = _whole(beams), beams.last_BK.shape
        penalty_T = self._length_penalty(how.settings, beams.token_BKT.shape[2] + 1)
        cell_BK, is_over_B = torch.empty(n, n_kept, dtype=torch.long), torch.empty(n, dtype=torch.bool)
        given = _hypotheses(beams, is_over_B)
        forbidden_AV, next_AV = how.rules.penalty_AV.float().contiguous(), how.rules.next_AV.contiguous()
        by = native.How(
            forbidden_AV.data_ptr(),
            next_AV.data_ptr(),
            penalty_T.data_ptr(),
            how.eos_id,
            how.settings.min_length,
            how.settings.n_best,
            how.settings.stop_early,
        )
        positions_TD = self._checked_positions(1, state.longest + 1)
        while (
            self.kernels.turn(
                self.native, _given(state, cell_BK), given, by, self.target_VD.data_ptr(), positions_TD.data_ptr()
            )
            < 0
        ):
            state = state.with_more_cells()
        return beams, replace(state, longest=state.longest + 1), is_over_B.tolist()

    def _length_penalty(self, settings: DecodeConfig, n: int) -> Tensor:
        """Of n lengths or more, from 0."""
        key = settings.length_penalty, settings.length_alpha
        if len(known_T := self.length_penalties.get(key, torch.empty(0))) < n:
            known_T = self.length_penalties[key] = length_penalty(torch.arange(2 * n), settings)
        return known_T

    def _lookers(
        self, x_RD: Tensor, scale_R: Tensor
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor]]:
        def look(row: Tensor, group: Tensor) -> Tensor:
            found = torch.empty(*row.shape, GROUP)
            self.kernels.look(
                self.native,
                x_RD.data_ptr(),
                scale_R.data_ptr(),
                row.data_ptr(),
                group.data_ptr(),
                row.numel(),
                found.data_ptr(),
            )
            return found

        def logits() -> Tensor:
            own_RD = x_RD[: len(scale_R), : self.config.d_model].contiguous()
            return self.output.of((own_RD, scale_R[:, None]) if self.dtype == torch.int8 else own_RD)

        return look, logits


HYPOTHESES = (
    "number_B",
    "limit_B",
    "length_B",
    "n_ended_B",
    "token_BKT",
    "last_BK",
    "state_BK",
    "ended_token_BKT",
    "ended_length_BK",
    "margin_B",
    "log_prob_BK",
    "ended_log_prob_BK",
    "ended_score_BK",
)
"""Of `Beams`, in the order of `native.Hypotheses`."""


def _whole(beams: Beams) -> Beams:
    """Without gaps, as those that stay are left with."""
    gaps = {name: x for name in HYPOTHESES if not (x := getattr(beams, name)).is_contiguous()}
    return replace(beams, **{name: x.contiguous() for name, x in gaps.items()}) if gaps else beams


def _hypotheses(beams: Beams, is_over_B: Tensor | None = None) -> native.Hypotheses:
    pointers = (getattr(beams, name).data_ptr() for name in HYPOTHESES)
    return native.Hypotheses(*pointers, beams.token_BKT.shape[2], None if is_over_B is None else is_over_B.data_ptr())


def _given(state: Cells, cell_BK: Tensor | None = None, end: int = 0) -> native.State:
    return native.State(
        state.cell_LBHCW.data_ptr(),
        None if cell_BK is None else cell_BK.data_ptr(),
        state.hidden_BKC.data_ptr(),
        state.memory_key_LBHKS.data_ptr(),
        state.memory_value_LBHSU.data_ptr(),
        state.unseen_B11S.data_ptr(),
        state.source_B.data_ptr(),
        state.length_B.data_ptr(),
        *state.hidden_BKC.shape,
        end,
        state.unseen_B11S.shape[3],
    )


def _array(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
