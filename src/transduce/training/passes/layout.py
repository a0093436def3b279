"""How the tokens of a batch lie for a pass of training, and what the operations of `gpu.py` and `cpu.py` share.

A GPU has them one sentence behind another in one long row, without padding: everything but attention treats tokens one
by one, and attention is told from where to where each token may look. So a pass has one of a few shapes, whatever the
lengths of sentences. On a CPU, where any shape will do, the row is that of the padded batch.
"""

# Axes: N tokens of either side, S source tokens, T target tokens, B sentences; K kinds of numbers; P places of dropout.

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
"""Source, target as it goes in, target as it should come out: each a row for a sentence, padded."""


class Dropout(NamedTuple):
    """Dropout at one place of the model: its probability and key. Keys are on the device, so that a graph of kernels
    that was recorded once can be replayed with others."""

    probability: float
    keys_P: Tensor
    """int32, one for each place."""
    place: int

    @property
    def threshold(self) -> int:
        return round(self.probability * 2**24)

    @property
    def factor(self) -> float:
        """Of what is kept."""
        return 1 / (1 - self.threshold / 2**24)

    def kept(self, shape: Sequence[int]) -> Tensor:
        """What it keeps, times its factor: the slow twin of `kernels.is_kept`."""
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
    """Of weights, which the way back through Add & Norm adds to."""

    gain_D: Tensor
    bias_D: Tensor
    y_bias_D: Tensor | None
    """Of a bias that was added to y before, where there was one."""


class Side(NamedTuple):
    """Of each token: its id and its place in the sentence."""

    ids_N: Tensor
    position_N: Tensor


class Given(NamedTuple):
    """What a pass is given, on the device. Padding sees nothing that counts, and is seen by none."""

    source: Side
    target: Side
    target_out_T: Tensor
    encoder: Any
    """Who sees whom, as the device wants it: `Sight` or `Padded`."""
    decoder: Any
    memory: Any
    keys_P: Tensor
    """Of dropout."""


# For a GPU: packed


class Sight(NamedTuple):
    """Who sees whom: query n the keys from first to before last, key m is seen by queries likewise. int32."""

    first_N: Tensor
    last_N: Tensor
    seen_first_M: Tensor
    seen_last_M: Tensor


class Shape(NamedTuple):
    n_source: int
    n_target: int


def pack(batches: Sequence[Batch], shape: Shape, seed: Sequence[int], config: ModelConfig) -> Ints:
    """All that a pass is given, of any number of padded batches one behind another, in one row, as `unpack` wants it:
    one copy brings it to the device."""
    source, target = (_Spans.of([batch[side] != config.pad_id for batch in batches]) for side in (0, 2))
    # Whatever is in the window of a token has the token in its own.
    near = max(shape) if config.attention_window is None else config.attention_window // 2
    of_source = [
        source.tokens([source_BS for source_BS, _, _ in batches]),
        source.place_N - source.first_N,
        np.maximum(source.first_N, source.place_N - near),
        np.minimum(source.last_N, source.place_N + near + 1),
        target.first_B.repeat(source.length_B),
        target.last_B.repeat(source.length_B),
    ]
    of_target = [
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
    key_P, n_of_source = keys(seed, config), len(of_source) * shape.n_source
    packed = np.zeros(n_of_source + len(of_target) * shape.n_target + len(key_P), dtype=np.int32)
    of_source_KS = packed[:n_of_source].reshape(len(of_source), -1)
    of_target_KT = packed[n_of_source : -len(key_P)].reshape(len(of_target), -1)
    of_source_KS[0], of_target_KT[:2], packed[-len(key_P) :] = config.pad_id, config.pad_id, key_P
    for rows_KN, rows in ((of_source_KS, of_source), (of_target_KT, of_target)):
        for row_N, row in zip(rows_KN, rows, strict=True):
            row_N[: len(row)] = row
    return packed


def keys(seed: Sequence[int], config: ModelConfig) -> Ints:
    """One for each place of dropout: the two sums of embeddings and all sub-layers."""
    n = 2 + 2 * config.n_encoder_layers + 3 * config.n_decoder_layers
    return np.random.SeedSequence(seed).generate_state(n).view(np.int32)


class _Spans(NamedTuple):
    """Where sentences stand in the long row: each by its bounds, and each token by its place and its sentence's."""

    are_tokens: Sequence[NDArray[np.bool_]]
    """In each padded batch."""
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


def unpack(ints: Tensor, shape: Shape) -> Given:
    """Views of what `pack` made."""
    of_source, of_target = 6 * shape.n_source, 9 * shape.n_target
    source_S, position_S, first_S, last_S, heard_first_S, heard_last_S = ints[:of_source].view(6, shape.n_source)
    (
        target_in_T,
        target_out_T,
        position_T,
        past_first_T,
        past_last_T,
        future_first_T,
        future_last_T,
        memory_first_T,
        memory_last_T,
    ) = ints[of_source : of_source + of_target].view(9, shape.n_target)
    return Given(
        source=Side(source_S, position_S),
        target=Side(target_in_T, position_T),
        target_out_T=target_out_T,
        encoder=Sight(first_S, last_S, first_S, last_S),
        decoder=Sight(past_first_T, past_last_T, future_first_T, future_last_T),
        memory=Sight(memory_first_T, memory_last_T, heard_first_S, heard_last_S),
        keys_P=ints[of_source + of_target :],
    )


# For a CPU: padded


class Padded(NamedTuple):
    """Who sees whom in rows of equally long sentences. There is no window: padding would see nothing but padding."""

    n_sentences: int
    hidden_B11M: Tensor | None
    """Minus infinity where a key is hidden, else 0. None: nothing is."""
    is_causal: bool


def padded(batch: Sequence[Tensor], seed: Sequence[int], config: ModelConfig, dtype: torch.dtype) -> Given:
    source_BS, target_in_BT, target_out_BT = batch
    n_sentences, n_source, n_target = *source_BS.shape, target_in_BT.shape[1]
    is_hidden_B11S = (source_BS == config.pad_id)[:, None, None]
    hidden_B11S = torch.zeros(is_hidden_B11S.shape, dtype=dtype).masked_fill_(is_hidden_B11S, -torch.inf)
    return Given(
        source=Side(source_BS.flatten(), torch.arange(n_source).repeat(n_sentences)),
        target=Side(target_in_BT.flatten(), torch.arange(n_target).repeat(n_sentences)),
        target_out_T=target_out_BT.flatten(),
        encoder=Padded(n_sentences, hidden_B11S, False),
        decoder=Padded(n_sentences, None, True),
        memory=Padded(n_sentences, hidden_B11S, False),
        keys_P=torch.from_numpy(keys(seed, config)),
    )
