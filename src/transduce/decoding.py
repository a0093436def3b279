"""Search over a model that is known only as start and step."""

# Axes: B sentences, S source positions, R rows, V vocabulary.

from __future__ import annotations

from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from transduce.config import ModelConfig


class State(Protocol):
    """What a stepper remembers. Rows stand sentence by sentence, equally many for each."""

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Self: ...

    def join(self, other: Self) -> Self: ...


S = TypeVar("S", bound=State)


class Stepper(Protocol[S]):
    """A model, or anything that answers like one. A state that is passed in is consumed."""

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> S: ...

    def step(self, last_R: Tensor, state: S) -> tuple[Tensor, S]: ...


@torch.no_grad()
def greedy(stepper: Stepper[S], config: ModelConfig, source_BS: Tensor, max_extra_tokens: int) -> list[list[int]]:
    """The most probable next token, again and again. Translations without their end marks."""
    limit_B = (source_BS != config.pad_id).sum(1) + max_extra_tokens
    last_B = torch.full_like(limit_B, config.bos_id)
    live_B = limit_B > 0
    state = stepper.start(source_BS)
    steps: list[Tensor] = []
    while bool(live_B.any()):
        logits_BV, state = stepper.step(last_B, state)
        last_B = logits_BV.argmax(-1)
        steps.append(last_B)  # rows that have ended go on, for nothing, until all have
        live_B = live_B & (last_B != config.eos_id) & (len(steps) < limit_B)
    rows = torch.stack(steps, dim=1).tolist() if steps else [[] for _ in source_BS]
    return [_before_end(row[:limit], config.eos_id) for row, limit in zip(rows, limit_B.tolist(), strict=True)]


def _before_end(ids: list[int], eos_id: int) -> list[int]:
    return ids[: ids.index(eos_id)] if eos_id in ids else ids
