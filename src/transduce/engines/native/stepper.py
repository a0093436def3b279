"""The model computed by `native.c`: one call for the encoder, one per turn of a search. Slow twin: `CachedStepper`.

Weights are packed layer by layer from the neutral description in `engines.layers`; embeddings are the model's
tensors themselves.
"""

# Axes: as in cached.py.

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from transduce.config import DecodeConfig, ModelConfig
from transduce.engines import cached
from transduce.engines.cells import Cells, in_lanes
from transduce.engines.layers import (
    DecoderWeights,
    EncoderWeights,
    Linear,
    Norm,
    Positions,
    Precision,
    decoder_weights,
    encoder_weights,
    output_weights,
)
from transduce.engines.native import library as native
from transduce.engines.products import quantise_columns
from transduce.errors import DataError
from transduce.model import Transformer
from transduce.search.candidates import SearchSettings
from transduce.search.hypotheses import Beams, Sentence, length_penalty
from transduce.search.loop import turn
from transduce.search.peaks import GROUP, Peaks

ROWS, INPUTS, COLUMNS = 32, 64, 32
"""Products take multiples of these; the rest is padded with zeros."""
MAX_ROWS = 128
"""Rows searched together in int8, for a model whose weights fit into the cache: ROWS_PER_PASS in native.c. More rows
would not make products faster, and their keys and values would evict the weights."""
CACHED = 16 << 20
"""Bytes of weights that fit into the cache. Larger weights are read from memory once for all rows, so more rows are
better."""

DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype]] = {
    "float32": (torch.float32, torch.float32),
    "int8": (torch.int8, torch.float16),
}
"""The dtype of the elements that are multiplied, and of stored keys and values."""


def unsupported(config: ModelConfig, precision: Precision) -> str | None:
    """Why this engine does not support the configuration on this machine; None if it does."""
    if (reason := cached.unsupported(config)) is not None:
        return reason
    return native.unsupported(precision) if config.activation == "relu" else f"model.activation is {config.activation}"


class NativeStepper:
    """A float32 model in evaluation mode, whose weights do not change afterwards."""

    def __init__(self, model: Transformer, precision: Precision) -> None:
        assert unsupported(model.config, precision) is None
        self.config, self.library, embedding = model.config, native.library(precision), model.embedding
        self.dtype, self.kept_dtype = DTYPES[precision]
        self.n_bytes = 0
        """Size of the packed weights."""
        self.keep_alive: list[Any] = []
        """Everything that `self.native` points to, except the embeddings."""
        self.positions = Positions(embedding, self.config)
        self.source_VD, self.target_VD = embedding.source_embedding.detach(), embedding.target_embedding.detach()
        self.length_penalties: dict[tuple[str, float], Tensor] = {}
        config = self.config
        self.native = native.Model(
            self._layers(encoder_weights(model), config.n_encoder_layers),
            self._layers(decoder_weights(model), config.n_decoder_layers),
            self._matrix(output_weights(model)),
            self.source_VD.data_ptr(),
            self.target_VD.data_ptr(),
            config.d_model**0.5,
            config.n_encoder_layers,
            config.n_decoder_layers,
            config.n_heads,
            config.d_k,
            config.d_v,
            config.d_model,
            config.d_ff,
        )
        self.max_rows = MAX_ROWS if precision == "int8" and self.n_bytes <= CACHED else None

    def _layers(self, stack: Iterable[EncoderWeights | DecoderWeights], n_layers: int) -> Any:
        layers = (native.Layer * n_layers)()
        for layer, weights in zip(layers, stack, strict=True):
            attention, feed_forward = weights.self_attention, weights.feed_forward
            layer.Q_KV, layer.O = self._matrix(attention.Q_KV), self._matrix(attention.O)
            layer.self_norm = self._norm(attention.norm)
            if isinstance(weights, DecoderWeights):
                cross = weights.cross_attention
                layer.memory_Q, layer.memory_KV = self._matrix(cross.Q), self._matrix(cross.KV)
                layer.memory_O, layer.memory_norm = self._matrix(cross.O), self._norm(cross.norm)
            layer.first, layer.second = self._matrix(feed_forward.first), self._matrix(feed_forward.second)
            layer.feed_forward_norm = self._norm(feed_forward.norm)
        self.keep_alive.append(layers)
        return layers

    def _matrix(self, weights: Linear) -> native.Matrix:
        (n_in, n_out), W_NF, scale_F = weights.W_NF.shape, weights.W_NF, None
        if self.dtype == torch.int8:
            W_NF, scale_F = quantise_columns(W_NF)
        packed = torch.empty(_round_up(n_in, INPUTS) * _round_up(n_out, COLUMNS), dtype=self.dtype)
        sums = torch.empty(_round_up(n_out, COLUMNS), dtype=torch.int32)
        W_FN = W_NF.T.contiguous()
        self.library.pack(W_FN.data_ptr(), n_in, n_out, packed.data_ptr(), sums.data_ptr())
        bias_F = None if weights.b_F is None else weights.b_F.float().contiguous()
        self.keep_alive.append((packed, sums, scale_F, bias_F))
        self.n_bytes += packed.nbytes
        scale, bias = (None if x is None else x.data_ptr() for x in (scale_F, bias_F))
        return native.Matrix(packed.data_ptr(), sums.data_ptr(), scale, bias, n_in, n_out)

    def _norm(self, norm: Norm) -> native.Norm:
        self.keep_alive.append(norm)
        return native.Norm(norm.gain_D.data_ptr(), norm.bias_D.data_ptr(), norm.eps)

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Cells:
        assert prefix_BT is None, "the search forces a prefix token by token"
        config, (n, n_source), lanes = self.config, source_BS.shape, in_lanes(source_BS.shape[1])
        shape = (config.n_decoder_layers, n, config.n_heads)
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
        # A reference to the table is held until the call returns: another thread may replace it by a longer one.
        positions_TD = self._position_table("source", n_source)
        source_BS, places = source_BS.contiguous(), torch.arange(n)
        self._check_ids(int(source_BS.min()), int(source_BS.max()))
        new = self._arrivals(n, n_source, positions_TD, source_BS.data_ptr(), places.data_ptr(), None, None)
        self.library.encode(self.native, _native_state(state), new)
        return state

    def _position_table(self, side: Literal["source", "target"], n: int) -> Tensor:
        """The compiled code does not check where a table ends, so it is checked here."""
        if len(positions_TD := self.positions.table(side, n)) < n:
            raise DataError(f"a text has {n} tokens, learned positions end at {len(positions_TD)}: split it")
        return positions_TD

    def _check_ids(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= len(self.source_VD):
            bound = len(self.source_VD) - 1
            raise DataError(
                f"token ids are from {lowest} to {highest}, must be from 0 to {bound}: use the model's subwords"
            )

    def _arrivals(self, n: int, padded_length: int, positions_TD: Tensor, *lists: int | None) -> native.Arrivals:
        """`lists`: addresses of sources, places, numbers and limits."""
        return native.Arrivals(
            *lists, n, padded_length, self.config.pad_id, self.config.bos_id, positions_TD.data_ptr()
        )

    def enter(
        self, beams: Beams, state: Cells, places: Sequence[int], new: Sequence[Sentence], limits: Sequence[int]
    ) -> tuple[Beams, Cells] | None:
        """Puts new sentences in the places of finished ones, in one call. None if they need more room or
        have a prefix."""
        longest_source, n_tokens = max(len(sentence.source) for sentence in new), beams.token_BKT.shape[2]
        is_forced = beams.forced_BT.shape[1] > 0 or any(sentence.prefix for sentence in new)
        if is_forced or longest_source > state.unseen_B11S.shape[3] or max(limits) > n_tokens:
            return None
        beams, pad_id = _contiguous(beams), self.config.pad_id
        source = [id for one in new for id in (*one.source, *[pad_id] * (longest_source - len(one.source)))]
        lists = [_array(values) for values in (source, places, [sentence.number for sentence in new], limits)]
        positions_TD = self._position_table("source", longest_source)
        self._check_ids(min(source), max(source))
        arrivals = self._arrivals(len(new), longest_source, positions_TD, *map(ctypes.addressof, lists))
        longest = self.library.enter(self.native, _native_state(state), _native_hypotheses(beams), arrivals)
        return beams, replace(state, longest=longest, n_source=max(state.n_source, in_lanes(longest_source)))

    def _take_cells(self, state: Cells) -> tuple[Cells, Tensor, int]:
        """Takes a free cell for each hypothesis. Also returns the first cell after the last one in use."""
        n, n_kept, n_cells = state.hidden_BKC.shape
        cell_BK = torch.empty(n, n_kept, dtype=torch.long)
        end = self.library.take_cells(state.hidden_BKC.data_ptr(), n, n_kept, n_cells, cell_BK.data_ptr())
        return (state, cell_BK, end) if end >= 0 else self._take_cells(state.with_more_cells())

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Peaks, Cells]:
        state, cell_BK, end = self._take_cells(state)
        x_RD = self._embed(last_R, state)
        n_rows, config = len(last_R), self.config
        out_RD = torch.empty(_round_up(n_rows, ROWS), _round_up(config.d_model, INPUTS), dtype=self.dtype)
        scale_R = torch.empty(n_rows)
        n_groups = _round_up(config.target_vocab_size, GROUP) // GROUP
        peak_RN, log_sum_R1 = torch.empty(n_rows, n_groups), torch.empty(n_rows, 1)
        self.library.step(
            self.native,
            ctypes.byref(_native_state(state, cell_BK, end)),
            x_RD.data_ptr(),
            out_RD.data_ptr(),
            scale_R.data_ptr(),
            peak_RN.data_ptr(),
            log_sum_R1.data_ptr(),
        )
        after = replace(state, length_B=state.length_B + 1, longest=state.longest + 1)
        return Peaks(peak_RN, log_sum_R1, *self._logit_functions(out_RD, scale_R)), after

    def _embed(self, last_R: Tensor, state: Cells) -> Tensor:
        position_B1D = self.positions.table("target", state.longest + 1)[state.length_B][:, None]
        token_BKD = torch.unflatten(self.target_VD[last_R], 0, state.hidden_BKC.shape[:2])
        x_BKD: Tensor = token_BKD * self.config.d_model**0.5 + position_B1D
        return x_BKD.flatten(0, 1)

    @torch.no_grad()
    def turn(self, beams: Beams, state: Cells, settings: SearchSettings) -> tuple[Beams, Cells, list[bool]]:
        """One turn of the search in one call. `beams` and `state` are consumed: both change in place."""
        if not settings.is_plain(beams):
            return turn(self, beams, state, settings)
        beams, (n, n_kept) = _contiguous(beams), beams.last_BK.shape
        penalty_T = self._length_penalty(settings.decode, beams.token_BKT.shape[2] + 1)
        cell_BK, is_over_B = torch.empty(n, n_kept, dtype=torch.long), torch.empty(n, dtype=torch.bool)
        hypotheses = _native_hypotheses(beams, is_over_B)
        forbidden_AV, next_AV = settings.rules.penalty_AV.float().contiguous(), settings.rules.next_AV.contiguous()
        native_settings = native.SearchSettings(
            forbidden_AV.data_ptr(),
            next_AV.data_ptr(),
            penalty_T.data_ptr(),
            settings.eos_id,
            settings.decode.min_length,
            settings.decode.n_best,
            settings.decode.stop_early,
        )
        positions_TD = self._position_table("target", state.longest + 1)
        while True:
            native_state = _native_state(state, cell_BK)
            end = self.library.turn(self.native, native_state, hypotheses, native_settings, positions_TD.data_ptr())
            if end >= 0:
                return beams, replace(state, longest=state.longest + 1), is_over_B.tolist()
            state = state.with_more_cells()

    def _length_penalty(self, settings: DecodeConfig, n: int) -> Tensor:
        """The penalty of each length from 0, for n lengths or more."""
        key = settings.length_penalty, settings.length_alpha
        if len(known_T := self.length_penalties.get(key, torch.empty(0))) < n:
            known_T = self.length_penalties[key] = length_penalty(torch.arange(2 * n), settings)
        return known_T

    def _logit_functions(
        self, x_RD: Tensor, scale_R: Tensor
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[], Tensor]]:
        """`Peaks.read_groups` and `Peaks.logits`, computed from the decoder's output."""

        def read_groups(row: Tensor, group: Tensor) -> Tensor:
            result = torch.empty(*row.shape, GROUP)
            self.library.logits_of_groups(
                self.native,
                x_RD.data_ptr(),
                scale_R.data_ptr(),
                row.data_ptr(),
                group.data_ptr(),
                row.numel(),
                result.data_ptr(),
            )
            return result

        def logits() -> Tensor:
            result_RV = torch.empty(len(scale_R), self.config.target_vocab_size)
            self.library.all_logits(
                self.native, x_RD.data_ptr(), scale_R.data_ptr(), len(scale_R), result_RV.data_ptr()
            )
            return result_RV

        return read_groups, logits


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
"""Fields of `Beams` in the order of `native.Hypotheses`."""


def _contiguous(beams: Beams) -> Beams:
    """The compiled code requires contiguous tensors, and `Beams.select` returns some that are not."""
    copies = {name: x for name in HYPOTHESES if not (x := getattr(beams, name)).is_contiguous()}
    return replace(beams, **{name: x.contiguous() for name, x in copies.items()}) if copies else beams


def _native_hypotheses(beams: Beams, is_over_B: Tensor | None = None) -> native.Hypotheses:
    pointers = (getattr(beams, name).data_ptr() for name in HYPOTHESES)
    return native.Hypotheses(*pointers, beams.token_BKT.shape[2], None if is_over_B is None else is_over_B.data_ptr())


def _native_state(state: Cells, cell_BK: Tensor | None = None, end: int = 0) -> native.State:
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


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
