"""How the tokens of a batch lie for a pass of training, and what the operations of `gpu.py` and `cpu.py` share.

A GPU has them one sentence behind another in one long row, without padding: everything but attention treats tokens one
by one, and attention is told from where to where each token may look. So a pass has one of a few shapes, whatever the
lengths of sentences. On a CPU, where any shape will do, the row is that of the padded batch.
"""

# Axes: N tokens of either side, S source tokens, T target tokens, B sentences; K kinds of numbers; P places of dropout.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transduce.config import ModelConfig

Ints = NDArray[np.int32]


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


class AttentionInputs(NamedTuple):
    query_NP: Tensor
    key_MP: Tensor
    value_MP: Tensor


class NormGradients(NamedTuple):
    x_ND: Tensor
    y_ND: Tensor
    gain_D: Tensor
    bias_D: Tensor
    y_sum_D: Tensor
    """Of `y_ND` over the tokens: the gradient of a bias that was added to it."""


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


def pack(batch: Sequence[NDArray[np.int64]], shape: Shape, seed: Sequence[int], config: ModelConfig) -> Ints:
    """All that a pass is given, in one row, as `unpack` wants it: one copy brings it to the device."""
    source_BS, target_in_BT, target_out_BT = batch
    source, target = _Spans.of(source_BS != config.pad_id), _Spans.of(target_out_BT != config.pad_id)
    # Whatever is in the window of a token has the token in its own.
    near = max(shape) if config.attention_window is None else config.attention_window // 2
    of_source = [
        source_BS[source.token_BN],
        source.place_N - source.first_N,
        np.maximum(source.first_N, source.place_N - near),
        np.minimum(source.last_N, source.place_N + near + 1),
        target.first_B[source.sentence_N],
        target.last_B[source.sentence_N],
    ]
    of_target = [
        target_in_BT[target.token_BN],
        target_out_BT[target.token_BN],
        target.place_N - target.first_N,
        np.maximum(target.first_N, target.place_N - near),
        target.place_N + 1,
        target.place_N,
        np.minimum(target.last_N, target.place_N + near + 1),
        source.first_B[target.sentence_N],
        source.last_B[target.sentence_N],
    ]
    of_source_KS = np.zeros((len(of_source), shape.n_source), dtype=np.int32)
    of_target_KT = np.zeros((len(of_target), shape.n_target), dtype=np.int32)
    of_source_KS[0], of_target_KT[:2] = config.pad_id, config.pad_id
    of_source_KS[:, : len(source.place_N)] = of_source
    of_target_KT[:, : len(target.place_N)] = of_target
    return np.concatenate([of_source_KS.ravel(), of_target_KT.ravel(), keys(seed, config)])


def keys(seed: Sequence[int], config: ModelConfig) -> Ints:
    """One for each place of dropout: the two sums of embeddings and all sub-layers."""
    n = 2 + 2 * config.n_encoder_layers + 3 * config.n_decoder_layers
    return np.random.SeedSequence(seed).generate_state(n).view(np.int32)


class _Spans(NamedTuple):
    """Where sentences stand in the long row: of each sentence, and of each token the same and its sentence."""

    token_BN: NDArray[np.bool_]
    """In the padded batch."""
    place_N: NDArray[np.int64]
    sentence_N: NDArray[np.int64]
    first_B: NDArray[np.int64]
    last_B: NDArray[np.int64]

    @classmethod
    def of(cls, token_BN: NDArray[np.bool_]) -> _Spans:
        length_B = token_BN.sum(1)
        last_B = length_B.cumsum()
        return cls(
            token_BN, np.arange(length_B.sum()), np.arange(len(length_B)).repeat(length_B), last_B - length_B, last_B
        )

    @property
    def first_N(self) -> NDArray[np.int64]:
        return self.first_B[self.sentence_N]

    @property
    def last_N(self) -> NDArray[np.int64]:
        return self.last_B[self.sentence_N]


def unpack(ints: Tensor, shape: Shape) -> Given:
    """Views of what `pack` made."""
    of_source, of_target = 6 * shape.n_source, 9 * shape.n_target
    source_S, position_S, first_S, last_S, heard_first_S, heard_last_S = ints[:of_source].view(6, shape.n_source)
    (
        target_in_T, target_out_T, position_T,
        past_first_T, past_last_T, future_first_T, future_last_T, memory_first_T, memory_last_T,
    ) = ints[of_source : of_source + of_target].view(9, shape.n_target)  # fmt: skip
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
