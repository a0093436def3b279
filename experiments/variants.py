"""Variants of the model that are not settings of the package: they replace its functions temporarily.

The context manager `during` is active while a run trains. A variant that changes the model needs plain passes, which
call the model's own modules. After training, `settle` changes the weights so that an ordinary model computes the same
function, and search needs no variant. `n_unused` counts parameters that the model has but does not use.
"""

# Axes: B sentences, H heads, Q queries, M attended positions, K = d_k, T target positions, D = d_model.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce import ModelConfig, Transformer
from transduce.model import Attended, MultiHeadAttention, SelfAttention


class Variant(NamedTuple):
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    settle: Callable[[Transformer], None] = lambda model: None
    n_unused: Callable[[ModelConfig], int] = lambda config: 0
    passes: str | None = None
    """The value of `--passes`; None selects the fastest passes."""


@contextmanager
def replaced(owner: Any, name: str, new: object) -> Iterator[None]:
    """Replace a method of a class or a function of a module, and restore it at the end."""
    is_inherited, old = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


# Attention without the factor 1 / sqrt(d_k), in all three kinds of attention


def unscaled() -> AbstractContextManager[None]:
    scaled = MultiHeadAttention.forward

    def forward(
        self: MultiHeadAttention, query_BHQK: Tensor, attended: Attended, with_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        return scaled(self, query_BHQK * math.sqrt(query_BHQK.shape[-1]), attended, with_attention)

    return replaced(MultiHeadAttention, "forward", forward)


@torch.no_grad()
def put_scale_into_queries(model: Transformer) -> None:
    for name, W in model.weights().items():
        if name.endswith(".W_Q"):
            W.mul_(math.sqrt(model.config.d_k))


# No self-attention in encoder and decoder. The residual sums, the norms, the positions and the memory attention stay.
# The encoder sees each token alone; the decoder sees the last token and the memory.


def no_self_attention() -> AbstractContextManager[None]:
    def forward(
        self: SelfAttention, query_BHQK: Tensor, attended: Attended, with_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        n_sentences, n_heads, n_queries, _ = query_BHQK.shape
        x_BQD = query_BHQK.new_zeros(n_sentences, n_queries, self.W_O.W.shape[1])
        n_attended = attended.key_BHMK.shape[2]
        weight_BHQM = query_BHQK.new_zeros(n_sentences, n_heads, n_queries, n_attended) if with_attention else None
        return x_BQD, weight_BHQM

    return replaced(SelfAttention, "forward", forward)


@torch.no_grad()
def silence_self_attention(model: Transformer) -> None:
    for name, W in model.weights().items():
        if name.endswith(".self_attention.W_O"):
            W.zero_()


def n_self_attention_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        weights = Transformer(config).weights()
    return sum(W.numel() for name, W in weights.items() if ".self_attention." in name)


VARIANTS = {
    "as it is": Variant(),
    "unscaled": Variant(unscaled, put_scale_into_queries, passes="plain"),
    "no self-attention": Variant(no_self_attention, silence_self_attention, n_self_attention_parameters, "plain"),
}
