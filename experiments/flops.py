"""The cost of a training run in floating-point operations, in two ways: the paper's estimate and a count.

The paper's estimate is time x GPUs x sustained capacity of a GPU (section 6.1), whatever the GPU did in that time. The
count covers the matrix products of the equations. Each multiply-add is two operations. The backward pass has twice the
operations of the forward pass, because each product needs the gradients of both its factors. The count omits norms,
softmax, dropout, Adam and padding. It includes attention to hidden positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.published import CAPACITIES
from transduce import ModelConfig

# Axes: N pairs.

FORWARD_AND_BACK = 3
OPERATIONS = 2
"""Floating-point operations of one multiply-add."""


class Lengths(NamedTuple):
    """Sums of lengths, and of products of lengths, over all pairs. A length includes the end mark."""

    source: float
    target: float
    source_source: float
    target_target: float
    source_target: float

    @classmethod
    def of(cls, source_N: NDArray[np.int32], target_N: NDArray[np.int32]) -> Lengths:
        source, target = source_N.astype(np.float64), target_N.astype(np.float64)
        products = (source @ source, target @ target, source @ target)
        return cls(float(source.sum()), float(target.sum()), *map(float, products))

    def multiply(self, factor: float) -> Lengths:
        return Lengths(*(factor * value for value in self))


def estimated_flops(seconds: float, n_gpus: float, device: str) -> float | None:
    """The paper's estimate. None for a device without a capacity in `CAPACITIES`, such as a CPU."""
    capacity = CAPACITIES.get(device)
    return None if capacity is None else seconds * n_gpus * capacity.teraflops * 1e12


def counted(model: ModelConfig, seen: Lengths) -> float:
    """The operations of training. `seen` sums over all pairs of the run and counts a pair once per visit."""
    return FORWARD_AND_BACK * OPERATIONS * multiply_adds(model, seen)


def multiply_adds(model: ModelConfig, seen: Lengths) -> float:
    """The multiply-adds of the forward pass."""
    d_keys, d_values = model.n_heads * model.d_k, model.n_heads * model.d_v
    query = key = model.d_model * d_keys
    value = output = model.d_model * d_values
    feed_forward = 2 * model.d_model * model.d_ff
    per_attended_position = d_keys + d_values  # the score and the weighted value, in all heads
    encoder = seen.source * (query + key + value + output + feed_forward) + seen.source_source * per_attended_position
    decoder = seen.target * (query + key + value + output + feed_forward) + seen.target_target * per_attended_position
    memory = seen.source * (key + value) + seen.target * (query + output) + seen.source_target * per_attended_position
    vocabulary = seen.target * model.d_model * model.target_vocab_size
    return model.n_encoder_layers * encoder + model.n_decoder_layers * (decoder + memory) + vocabulary
