"""What no setting of the package does, and none should, done to it from outside while a run goes on.

A variant is entered around training. One that changes the model wants plain passes, which are the model's own. When it
is trained, `settle` makes an ordinary model of it that computes the same: so a search need not know. `n_unused`
parameters are in the model and take no part.
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
from transduce.training import trainer as loop


class Variant(NamedTuple):
    during: Callable[[], AbstractContextManager[None]] = nullcontext
    settle: Callable[[Transformer], None] = lambda model: None
    n_unused: Callable[[ModelConfig], int] = lambda config: 0
    passes: str | None = None
    """As `--passes` has them; None: the best there are."""


@contextmanager
def replaced(owner: Any, name: str, new: object) -> Iterator[None]:
    """A method of a class, or a function of a module, for a while."""
    is_own, old = name in vars(owner), getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, old)
        else:  # it was inherited, and is again
            delattr(owner, name)


# Attention without 1 / sqrt(d_k), in all three places


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


# No self-attention in encoder and decoder. The sum and the norm around each stay, and so do positions and the attention
# to the memory: the encoder sees each token alone, the decoder the last one beside the memory.


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


def n_of_self_attention(config: ModelConfig) -> int:
    with torch.device("meta"):
        weights = Transformer(config).weights()
    return sum(W.numel() for name, W in weights.items() if ".self_attention." in name)


# No warm-up. It is no setting: with a warm-up of one step equation 3 begins as many times above its peak as the root of
# the steps of warm-up, and with the same peak it is as far below what it is compared with from then on.


def no_warmup() -> AbstractContextManager[None]:
    """The rate begins at its peak, stays there for what was the warm-up, and goes on as ever."""

    def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
        return float((d_model * max(step, warmup_steps)) ** -0.5)

    return replaced(loop, "learning_rate", learning_rate)


VARIANTS = {
    "as it is": Variant(),
    "unscaled": Variant(unscaled, put_scale_into_queries, passes="plain"),
    "no self-attention": Variant(no_self_attention, silence_self_attention, n_of_self_attention, "plain"),
    "no warm-up": Variant(no_warmup),
}
