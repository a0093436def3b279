"""What a training run cost in floating-point operations, two ways: as the paper estimates it, and counted.

The paper's way is time x GPUs x what a GPU could do meanwhile (section 6.1): a price, whatever the GPU did with it.
Counted are the matrix products that the equations ask for, two operations for each product of two numbers, one pass
there and two back (each product wants the gradient of both its sides). Norms, softmax, dropout and Adam are left out,
as is padding; attention is counted as if it looked at hidden positions too.
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
"""Of a product of two numbers that is added to a sum."""


class Lengths(NamedTuple):
    """Sums over all pairs, end marks counted."""

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

    def times(self, factor: float) -> Lengths:
        return Lengths(*(factor * value for value in self))


def as_the_paper(seconds: float, n_gpus: float, device: str) -> float | None:
    """None for a device whose capacity nobody has stated here, such as a CPU."""
    capacity = CAPACITIES.get(device)
    return None if capacity is None else seconds * n_gpus * capacity.teraflops * 1e12


def counted(model: ModelConfig, seen: Lengths) -> float:
    """Of training on what was seen, each pair as often as it was."""
    return FORWARD_AND_BACK * OPERATIONS * products(model, seen)


def products(model: ModelConfig, seen: Lengths) -> float:
    """Of two numbers, in one pass forward."""
    d_keys, d_values = model.n_heads * model.d_k, model.n_heads * model.d_v
    query = key = model.d_model * d_keys
    value = output = model.d_model * d_values
    feed_forward = 2 * model.d_model * model.d_ff
    of_a_look = d_keys + d_values  # a score, and the share of a value, in all heads
    encoder = seen.source * (query + key + value + output + feed_forward) + seen.source_source * of_a_look
    decoder = seen.target * (query + key + value + output + feed_forward) + seen.target_target * of_a_look
    memory = seen.source * (key + value) + seen.target * (query + output) + seen.source_target * of_a_look
    vocabulary = seen.target * model.d_model * model.target_vocab_size
    return model.n_encoder_layers * encoder + model.n_decoder_layers * (decoder + memory) + vocabulary
