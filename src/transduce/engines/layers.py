"""The weights of a model as faster engines use them, described without saying how products are computed.

Matrices that share an input lie side by side, queries are already divided by sqrt(d_k), and the key and the value of
one head are adjacent. Layers are rearranged one at a time, so an engine that packs the weights never holds a second
copy of all of them.
"""

# Axes: D = d_model, N inputs and F outputs of a product, V vocabulary, T positions.

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.model import AddAndNorm, Embedding, FeedForward, MemoryAttention, SelfAttention, Transformer, sinusoid

Precision = Literal["float32", "int8"]
"""The number format of products. Sums, normalisation and softmax are float32 in both."""
KNOWN_POSITIONS = 256
"""Sinusoids computed at first; the table grows for longer texts."""


class Linear(NamedTuple):
    """x W + b."""

    W_NF: Tensor
    b_F: Tensor | None


class Norm(NamedTuple):
    gain_D: Tensor
    bias_D: Tensor
    eps: float

    @classmethod
    def of(cls, norm: AddAndNorm) -> Norm:
        return cls(norm.weight.detach(), norm.bias.detach(), norm.eps)

    def __call__(self, x_RD: Tensor) -> Tensor:
        return torch.layer_norm(x_RD, self.gain_D.shape, self.gain_D, self.bias_D, self.eps)


class SelfAttentionWeights(NamedTuple):
    Q_KV: Linear
    """Queries of all heads, then key and value of the first head, key and value of the second, and so on."""
    O: Linear  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, attention: SelfAttention, norm: AddAndNorm) -> SelfAttentionWeights:
        Q, K, V = attention.W_QKV.widths.values()
        n_heads, scale = attention.n_heads, (Q // attention.n_heads) ** -0.5

        def arranged(x: Tensor) -> Tensor:
            query, key, value = x.detach().split([Q, K, V], -1)
            return torch.cat([query * scale, _by_head(key, value, n_heads)], -1)

        W, b = attention.W_QKV.W, attention.W_QKV.b
        O = Linear(attention.W_O.W.detach(), _detached(attention.W_O.b))  # noqa: E741
        return cls(Linear(arranged(W), None if b is None else arranged(b)), O, Norm.of(norm))


class CrossAttentionWeights(NamedTuple):
    """The decoder's attention to the memory."""

    Q: Linear
    KV: Linear
    O: Linear  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, attention: MemoryAttention, norm: AddAndNorm) -> CrossAttentionWeights:
        W_Q, W_KV, W_O, n_heads = attention.W_Q, attention.W_KV, attention.W_O, attention.n_heads
        scale, widths = (W_Q.W.shape[1] // n_heads) ** -0.5, list(W_KV.widths.values())

        def arranged(x: Tensor) -> Tensor:
            key, value = x.detach().split(widths, -1)
            return _by_head(key, value, n_heads)

        return cls(
            Linear(W_Q.W.detach() * scale, None if W_Q.b is None else W_Q.b.detach() * scale),
            Linear(arranged(W_KV.W), None if W_KV.b is None else arranged(W_KV.b)),
            Linear(W_O.W.detach(), _detached(W_O.b)),
            Norm.of(norm),
        )


class FeedForwardWeights(NamedTuple):
    first: Linear
    second: Linear
    norm: Norm

    @classmethod
    def of(cls, network: FeedForward, norm: AddAndNorm) -> FeedForwardWeights:
        first, second = (Linear(part.W.detach(), _detached(part.b)) for part in (network.W_1, network.W_2))
        return cls(first, second, Norm.of(norm))


class EncoderWeights(NamedTuple):
    self_attention: SelfAttentionWeights
    feed_forward: FeedForwardWeights


class DecoderWeights(NamedTuple):
    self_attention: SelfAttentionWeights
    cross_attention: CrossAttentionWeights
    feed_forward: FeedForwardWeights


def encoder_weights(model: Transformer) -> Iterator[EncoderWeights]:
    """Layer by layer."""
    for layer in model.encoder:
        yield EncoderWeights(
            SelfAttentionWeights.of(layer.self_attention, layer.self_attention_norm),
            FeedForwardWeights.of(layer.feed_forward, layer.feed_forward_norm),
        )


def decoder_weights(model: Transformer) -> Iterator[DecoderWeights]:
    """Layer by layer."""
    for layer in model.decoder:
        yield DecoderWeights(
            SelfAttentionWeights.of(layer.self_attention, layer.self_attention_norm),
            CrossAttentionWeights.of(layer.memory_attention, layer.memory_attention_norm),
            FeedForwardWeights.of(layer.feed_forward, layer.feed_forward_norm),
        )


def output_weights(model: Transformer) -> Linear:
    """The projection from the last layer to the logits."""
    return Linear(model.embedding.output_projection.detach().T, _detached(model.embedding.output_bias))


class Positions:
    """The vectors that are added to the embeddings of source and target. The sinusoid table grows as needed."""

    def __init__(self, embedding: Embedding, config: ModelConfig) -> None:
        self.d_model = config.d_model
        self.learned = [_detached(table) for table in (embedding.source_positions, embedding.target_positions)]
        self.like = embedding.target_embedding
        self.sinusoid_TD = sinusoid(torch.arange(0), config.d_model)

    def table(self, side: Literal["source", "target"], n: int) -> Tensor:
        """At least n rows; fewer if positions are learned and the table is shorter."""
        if (learned_TD := self.learned[side == "target"]) is not None:
            return learned_TD
        known_TD = self.sinusoid_TD  # read once: another thread may replace the table by a shorter one
        if len(known_TD) < n:
            T = torch.arange(max(KNOWN_POSITIONS, 2 * n), device=self.like.device)
            known_TD = self.sinusoid_TD = sinusoid(T, self.d_model).to(self.like.dtype)
        return known_TD


def _by_head(key: Tensor, value: Tensor, n_heads: int) -> Tensor:
    parts = [torch.unflatten(part, -1, (n_heads, -1)) for part in (key, value)]
    return torch.cat(parts, -1).flatten(-2)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
