"""The layout of tokens in a training pass, and the types that `cuda.py` and `cpu.py` share.

On a GPU, the sentences of a pass are packed one after another in one long row, without padding. Only attention depends
on the sentence of a token; it receives the span of positions that each token sees. So a few shapes serve all lengths of
sentences. On a CPU any shape is equally good, and the row is the flattened padded batch.
"""

# Axes: N tokens of either side, S source tokens, T target tokens, B sentences, K kinds of numbers, P places of dropout.
# In attention: N queries, M attended positions.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transduce.config import ModelConfig

Ints = NDArray[np.int32]
Batch = Sequence[NDArray[np.int64]]
"""source_BS, target_in_BT, target_out_BT: padded, one row per sentence."""


class Dropout(NamedTuple):
    """Dropout at one place of the model. Keys are on the device, so a CUDA graph can be replayed with new ones."""

    probability: float
    keys_P: Tensor
    """Random numbers, int32, one for each place."""
    place: int

    @property
    def threshold(self) -> int:
        return round(self.probability * 2**24)

    @property
    def factor(self) -> float:
        """The factor for values that are kept."""
        return 1 / (1 - self.threshold / 2**24)

    def mask(self, shape: Sequence[int]) -> Tensor:
        """The tensor to multiply with: 0 or `factor`. The slow twin of `kernels.is_kept`."""
        low = 2**32 - 1
        bits = (torch.arange(math.prod(shape), device=self.keys_P.device) * 0x9E3779B9) & low
        bits = (((bits ^ (bits >> 16)) * 0x85EBCA6B) & low) ^ (self.keys_P[self.place].long() & low)
        bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & low
        return (((bits ^ (bits >> 16)) >> 8) >= self.threshold).view(*shape) * self.factor


class AttentionInputs(NamedTuple):
    query_NP: Tensor
    key_MP: Tensor
    value_MP: Tensor


class NormGradients(NamedTuple):
    """Gradients of weights, to which the backward pass of Add & Norm adds."""

    gain_D: Tensor
    bias_D: Tensor
    y_bias_D: Tensor | None
    """The gradient of a bias that the layer before added to y. None if it added none."""


class Side(NamedTuple):
    """The tokens of one side: ids, and positions in their sentences."""

    ids_N: Tensor
    position_N: Tensor


class PassInputs(NamedTuple):
    """The inputs of a pass, on the device. No token sees padding, and the loss ignores what padding sees."""

    source: Side
    target: Side
    target_out_T: Tensor
    encoder: Any
    """The visible positions in self-attention of the encoder: `PackedVisibility` or `PaddedVisibility`."""
    decoder: Any
    """The same for self-attention of the decoder."""
    memory: Any
    """The same for attention from the decoder to the memory."""
    keys_P: Tensor
    """Keys of dropout."""


# For a GPU: packed


class PackedVisibility(NamedTuple):
    """Query n sees the keys from `first` to before `last`; key m is seen by the queries from `seen_first` to before
    `seen_last`. int32."""

    first_N: Tensor
    last_N: Tensor
    seen_first_M: Tensor
    seen_last_M: Tensor


class Shape(NamedTuple):
    n_source: int
    n_target: int


def pack(batches: Sequence[Batch], shape: Shape, seed: Sequence[int], config: ModelConfig) -> Ints:
    """Packs the inputs of a pass over any number of padded batches into one row, which one copy brings to the device.
    `unpack` reverses it."""
    source, target = (_Spans.of([batch[side] != config.pad_id for batch in batches]) for side in (0, 2))
    # A window is symmetric: a token sees exactly the tokens that see it.
    near = max(shape) if config.attention_window is None else config.attention_window // 2
    source_rows = [
        source.tokens([source_BS for source_BS, _, _ in batches]),
        source.place_N - source.first_N,
        np.maximum(source.first_N, source.place_N - near),
        np.minimum(source.last_N, source.place_N + near + 1),
        target.first_B.repeat(source.length_B),
        target.last_B.repeat(source.length_B),
    ]
    target_rows = [
        target.tokens([target_in_BT for _, target_in_BT, _ in batches]),
        target.tokens([target_out_BT for _, _, target_out_BT in batches]),
        target.place_N - target.first_N,
        np.maximum(target.first_N, target.place_N - near),
        target.place_N + 1,
        target.place_N,
        np.minimum(target.last_N, target.place_N + near + 1),
        source.first_B.repeat(target.length_B),
        source.last_B.repeat(target.length_B),
    ]
    key_P, n_source_ints = keys(seed, config), len(source_rows) * shape.n_source
    packed = np.zeros(n_source_ints + len(target_rows) * shape.n_target + len(key_P), dtype=np.int32)
    source_rows_KS = packed[:n_source_ints].reshape(len(source_rows), -1)
    target_rows_KT = packed[n_source_ints : -len(key_P)].reshape(len(target_rows), -1)
    source_rows_KS[0], target_rows_KT[:2], packed[-len(key_P) :] = config.pad_id, config.pad_id, key_P
    for packed_KN, rows in ((source_rows_KS, source_rows), (target_rows_KT, target_rows)):
        for packed_N, row in zip(packed_KN, rows, strict=True):
            packed_N[: len(row)] = row
    return packed


def keys(seed: Sequence[int], config: ModelConfig) -> Ints:
    """One key for each place of dropout: the sums of embeddings and positions on both sides, and all sub-layers."""
    n = 2 + 2 * config.n_encoder_layers + 3 * config.n_decoder_layers
    return np.random.SeedSequence(seed).generate_state(n).view(np.int32)


class _Spans(NamedTuple):
    """Where the sentences of one side lie in the packed row: the bounds of each sentence, and for each token its place
    and the bounds of its sentence."""

    are_tokens: Sequence[NDArray[np.bool_]]
    """For each padded batch: True for tokens, False for padding."""
    length_B: Ints
    first_B: Ints
    last_B: Ints
    place_N: Ints
    first_N: Ints
    last_N: Ints

    @classmethod
    def of(cls, are_tokens: Sequence[NDArray[np.bool_]]) -> _Spans:
        length_B = np.concatenate([are_tokens_BN.sum(1, dtype=np.int32) for are_tokens_BN in are_tokens])
        last_B = length_B.cumsum(dtype=np.int32)
        first_B, place_N = last_B - length_B, np.arange(last_B[-1], dtype=np.int32)
        return cls(are_tokens, length_B, first_B, last_B, place_N, first_B.repeat(length_B), last_B.repeat(length_B))

    def tokens(self, ids: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([ids_BN[is_token_BN] for ids_BN, is_token_BN in zip(ids, self.are_tokens, strict=True)])


def unpack(ints: Tensor, shape: Shape) -> PassInputs:
    """Returns views of the row that `pack` made."""
    n_source_ints, n_target_ints = 6 * shape.n_source, 9 * shape.n_target
    source_S, position_S, first_S, last_S, memory_seen_first_S, memory_seen_last_S = ints[:n_source_ints].view(
        6, shape.n_source
    )
    (
        target_in_T,
        target_out_T,
        position_T,
        first_T,
        last_T,
        seen_first_T,
        seen_last_T,
        memory_first_T,
        memory_last_T,
    ) = ints[n_source_ints : n_source_ints + n_target_ints].view(9, shape.n_target)
    return PassInputs(
        source=Side(source_S, position_S),
        target=Side(target_in_T, position_T),
        target_out_T=target_out_T,
        encoder=PackedVisibility(first_S, last_S, first_S, last_S),
        decoder=PackedVisibility(first_T, last_T, seen_first_T, seen_last_T),
        memory=PackedVisibility(memory_first_T, memory_last_T, memory_seen_first_S, memory_seen_last_S),
        keys_P=ints[n_source_ints + n_target_ints :],
    )


# For a CPU: padded


class PaddedVisibility(NamedTuple):
    """The visible positions in a padded batch. Windows are not supported: padding would see only padding, which gives
    NaN."""

    n_sentences: int
    hidden_B11M: Tensor | None
    """Minus infinity for keys that are padding, else 0. None if no key is hidden."""
    is_causal: bool
    """A token sees no later token."""


def padded_inputs(batch: Sequence[Tensor], seed: Sequence[int], config: ModelConfig, dtype: torch.dtype) -> PassInputs:
    source_BS, target_in_BT, target_out_BT = batch
    n_sentences, n_source, n_target = *source_BS.shape, target_in_BT.shape[1]
    is_hidden_B11S = (source_BS == config.pad_id)[:, None, None]
    hidden_B11S = torch.zeros(is_hidden_B11S.shape, dtype=dtype).masked_fill_(is_hidden_B11S, -torch.inf)
    return PassInputs(
        source=Side(source_BS.flatten(), torch.arange(n_source).repeat(n_sentences)),
        target=Side(target_in_BT.flatten(), torch.arange(n_target).repeat(n_sentences)),
        target_out_T=target_out_BT.flatten(),
        encoder=PaddedVisibility(n_sentences, hidden_B11S, False),
        decoder=PaddedVisibility(n_sentences, None, True),
        memory=PaddedVisibility(n_sentences, hidden_B11S, False),
        keys_P=torch.from_numpy(keys(seed, config)),
    )
