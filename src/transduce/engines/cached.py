"""The decoder one token at a time, in PyTorch on any device. Its slow twin is the model's `start` and `step`.

When hypotheses change places, no key and no value is copied (see `cells.py`). Weights are stored in the layout that
products use, optionally in int8.
"""

# Axes: L layers, B sentences, K hypotheses of each, R = B K rows, H heads, X = B H, S source positions, C cells,
# M = S or C, Q queries of a sentence, D = d_model, P all heads side by side, W the key and the value of one head,
# V vocabulary, J blocks of it. Where K comes last it is d_k, and U is d_v.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.engines.cells import Cells, in_lanes, widen
from transduce.engines.layers import (
    CrossAttentionWeights,
    FeedForwardWeights,
    Norm,
    Positions,
    Precision,
    SelfAttentionWeights,
    decoder_weights,
    encoder_weights,
    output_weights,
)
from transduce.engines.products import PRODUCTS, ROUND_KEPT, Product
from transduce.model import ACTIVATIONS, Transformer
from transduce.search.peaks import Peaks

BLOCK = 512
"""Tokens whose logits are computed together: with a few hundred rows they stay in the cache of a core."""
FEW_ROWS = 16
"""For this many rows or fewer, all logits are computed in one product."""


def unsupported(config: ModelConfig) -> str | None:
    """Why this engine does not support the configuration; None if it does."""
    if config.norm == "pre":
        return "model.norm is pre"
    return "attention has a window" if config.attention_window is not None else None


class SelfAttentionLayer(NamedTuple):
    Q_KV: Product
    O: Product  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, weights: SelfAttentionWeights, make: type[Product]) -> SelfAttentionLayer:
        return cls(make(weights.Q_KV), make(weights.O), weights.norm)


class CrossAttentionLayer(NamedTuple):
    Q: Product
    KV: Product
    O: Product  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, weights: CrossAttentionWeights, make: type[Product]) -> CrossAttentionLayer:
        return cls(make(weights.Q), make(weights.KV), make(weights.O), weights.norm)


class FeedForwardLayer(NamedTuple):
    first: Product
    second: Product
    norm: Norm

    @classmethod
    def of(cls, weights: FeedForwardWeights, make: type[Product]) -> FeedForwardLayer:
        return cls(make(weights.first), make(weights.second), weights.norm)


def attend(query_XQK: Tensor, key_XKM: Tensor, value_XMU: Tensor, hidden_B1QM: Tensor) -> Tensor:
    """Equation 1 for queries that are already divided by sqrt(d_k). `hidden`: 0 for visible positions, else -inf."""
    score_XQM = torch.bmm(query_XQK, key_XKM)
    score_XQM.view(len(hidden_B1QM), -1, *score_XQM.shape[1:]).add_(hidden_B1QM)
    return torch.bmm(score_XQM.softmax(-1), value_XMU)


class CachedStepper:
    """A model in evaluation mode, whose weights do not change afterwards."""

    def __init__(self, model: Transformer, precision: Precision = "float32") -> None:
        assert unsupported(model.config) is None
        self.config, make, embedding = model.config, PRODUCTS[precision], model.embedding
        self.round_kept = ROUND_KEPT[precision]
        self.encoder = [
            (SelfAttentionLayer.of(weights.self_attention, make), FeedForwardLayer.of(weights.feed_forward, make))
            for weights in encoder_weights(model)
        ]
        self.decoder = [
            (
                SelfAttentionLayer.of(weights.self_attention, make),
                CrossAttentionLayer.of(weights.cross_attention, make),
                FeedForwardLayer.of(weights.feed_forward, make),
            )
            for weights in decoder_weights(model)
        ]
        self.output = make(output_weights(model))
        scale = self.config.d_model**0.5
        self.source_VD, self.target_VD = (
            table.detach() * scale for table in (embedding.source_embedding, embedding.target_embedding)
        )
        self.positions = Positions(embedding, self.config)
        is_relu = self.config.activation == "relu"  # the one activation that PyTorch computes in place
        self.activation: Callable[[Tensor], Tensor] = torch.relu_ if is_relu else ACTIVATIONS[self.config.activation]

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Cells:
        assert prefix_BT is None, "the search forces a prefix token by token"
        config, (n, n_source) = self.config, source_BS.shape
        hidden_BS = torch.zeros(source_BS.shape, dtype=self.target_VD.dtype, device=source_BS.device)
        unseen_B11S = hidden_BS.masked_fill_(source_BS == config.pad_id, -torch.inf)[:, None, None]
        memory_RD = self.encode(source_BS, unseen_B11S)
        memory_LBHSW = torch.stack(
            [_heads(self.round_kept(cross.KV(memory_RD)), n, config.n_heads) for _, cross, _ in self.decoder]
        )
        memory_LBHSW = widen(memory_LBHSW, 3, in_lanes(n_source))
        return Cells(
            memory_key_LBHKS=memory_LBHSW[..., : config.d_k].transpose(3, 4).contiguous(),
            memory_value_LBHSU=memory_LBHSW[..., config.d_k :].contiguous(),
            unseen_B11S=widen(unseen_B11S, 3, in_lanes(n_source), -torch.inf),
            source_B=(source_BS != config.pad_id).sum(1),
            n_source=in_lanes(n_source),
            cell_LBHCW=memory_LBHSW[:, :, :, :0],
            hidden_BKC=self.target_VD.new_empty(n, 1, 0),
            length_B=torch.zeros(n, dtype=torch.long, device=source_BS.device),
            longest=0,
        )

    def encode(self, source_BS: Tensor, unseen_B11S: Tensor) -> Tensor:
        """The memory of all sentences, one row for each position."""
        (n, n_source), n_heads, d_k = source_BS.shape, self.config.n_heads, self.config.d_k
        x_RD: Tensor = (self.source_VD[source_BS] + self.positions.table("source", n_source)[:n_source]).flatten(0, 1)
        for attention, feed_forward in self.encoder:
            query_RP, key_value_RP = attention.Q_KV(x_RD).split([n_heads * d_k, n_heads * (d_k + self.config.d_v)], 1)
            query_XSK = _heads(query_RP, n, n_heads).flatten(0, 1)
            past_XSW = _heads(self.round_kept(key_value_RP), n, n_heads).flatten(0, 1)
            head_XSU = attend(query_XSK, past_XSW[..., :d_k].transpose(1, 2), past_XSW[..., d_k:], unseen_B11S)
            x_RD = attention.norm(attention.O(_rows(head_XSU, n)).add_(x_RD))
            x_RD = self._feed_forward(feed_forward, x_RD)
        return x_RD

    def _feed_forward(self, layer: FeedForwardLayer, x_RD: Tensor) -> Tensor:
        return layer.norm(layer.second(self.activation(layer.first(x_RD))).add_(x_RD))

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Peaks, Cells]:
        state, cell_BK, x_RD = self._begin(last_R, state)
        peaks = self.peaks(self.decode(x_RD, cell_BK, state, state.n_source, state.end))
        return peaks, replace(state, length_B=state.length_B + 1, longest=state.longest + 1)

    def decode(self, x_RD: Tensor, cell_BK: Tensor, state: Cells, n_source: int, end: int) -> Tensor:
        """All decoder layers. Source positions from `n_source` on and cells from `end` on are not read."""
        n, n_cells, n_heads = state.n_sentences, state.hidden_BKC.shape[2], self.config.n_heads
        first_B1H = torch.arange(0, n * n_heads * n_cells, n_cells, device=x_RD.device).view(n, 1, n_heads)
        place_BKH = first_B1H + cell_BK[..., None]
        hidden_BKC, unseen_B11S = state.hidden_BKC[..., :end], state.unseen_B11S[..., :n_source]
        for i, (attention, cross, feed_forward) in enumerate(self.decoder):
            query_RP, new_RP = attention.Q_KV(x_RD).tensor_split([n_heads * self.config.d_k], 1)
            head_RP = self.attend_to_past(query_RP, new_RP, state.cell_LBHCW[i], place_BKH, hidden_BKC)
            x_RD = attention.norm(attention.O(head_RP).add_(x_RD))
            key_BHKS, value_BHSU = state.memory_key_LBHKS[i], state.memory_value_LBHSU[i]
            head_RP = self.attend_to_memory(cross.Q(x_RD), key_BHKS, value_BHSU, unseen_B11S)
            x_RD = cross.norm(cross.O(head_RP).add_(x_RD))
            x_RD = self._feed_forward(feed_forward, x_RD)
        return x_RD

    def attend_to_past(
        self, query_RP: Tensor, new_RP: Tensor, cell_BHCW: Tensor, place_BKH: Tensor, hidden_BKC: Tensor
    ) -> Tensor:
        """Writes the new key and value of each hypothesis to its cell, then attends to its past: (R, P)."""
        n, n_heads, n_cells, width = cell_BHCW.shape
        cell_BHCW.view(-1, width).index_copy_(0, place_BKH.flatten(), self.round_kept(new_RP).reshape(-1, width))
        past_XCW, d_k = cell_BHCW.view(-1, n_cells, width)[:, : hidden_BKC.shape[2]], self.config.d_k
        query_XKK = _heads(query_RP, n, n_heads).flatten(0, 1)
        key_XKC, value_XCU = past_XCW[..., :d_k].transpose(1, 2), past_XCW[..., d_k:]
        return _rows(attend(query_XKK, key_XKC, value_XCU, hidden_BKC[:, None]), n)

    def attend_to_memory(self, query_RP: Tensor, key_BHKS: Tensor, value_BHSU: Tensor, unseen_B11S: Tensor) -> Tensor:
        n, n_source, n_heads = len(key_BHKS), unseen_B11S.shape[3], self.config.n_heads
        key_XKS, value_XSU = key_BHKS.flatten(0, 1)[..., :n_source], value_BHSU.flatten(0, 1)[:, :n_source]
        return _rows(attend(_heads(query_RP, n, n_heads).flatten(0, 1), key_XKS, value_XSU, unseen_B11S), n)

    def _begin(self, last_R: Tensor, state: Cells) -> tuple[Cells, Tensor, Tensor]:
        """Takes a cell for the new token of each hypothesis, cell_BK, and embeds that token, x_RD."""
        state, cell_BK = state.with_free_cells()
        state.take(cell_BK)
        return state, cell_BK, self.embed(last_R, state)

    def embed(self, last_R: Tensor, state: Cells) -> Tensor:
        position_B1D = self.positions.table("target", state.longest + 1)[state.length_B][:, None]
        x_BKD: Tensor = torch.unflatten(self.target_VD[last_R], 0, state.hidden_BKC.shape[:2]) + position_B1D
        return x_BKD.flatten(0, 1)

    def peaks(self, x_RD: Tensor) -> Peaks:
        n_rows, n = len(x_RD), self.config.target_vocab_size
        prepared = self.output.prepare(x_RD)
        if n_rows <= FEW_ROWS:
            return Peaks.of(self.output.apply(prepared))
        blocks = range(0, n, BLOCK)
        logits_JRV = x_RD.new_empty(len(blocks), n_rows, BLOCK)

        def blocks_computed() -> Iterator[int]:
            for j, first in enumerate(blocks):
                n_block = min(BLOCK, n - first)
                self.output.apply_into(logits_JRV[j, :, :n_block], prepared, slice(first, first + n_block))
                if n_block < BLOCK:
                    logits_JRV[j, :, n_block:] = -torch.inf
                yield j

        return Peaks.of_blocks(logits_JRV, n, blocks_computed())


def _heads(x_RP: Tensor, n_sentences: int, n_heads: int) -> Tensor:
    """(B, H, Q, width of a head)"""
    return x_RP.view(n_sentences, -1, n_heads, x_RP.shape[1] // n_heads).transpose(1, 2)


def _rows(head_XQU: Tensor, n_sentences: int) -> Tensor:
    return torch.unflatten(head_XQU, 0, (n_sentences, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
