"""The gradients of one step, summed over as many passes as memory requires."""

# Axes: B sentences, S source positions, T target positions.

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from transduce.config import TrainConfig
from transduce.errors import TransduceError
from transduce.model import Transformer
from transduce.training.choices import Choices
from transduce.training.journal import OnEvent, OutOfMemoryEvent
from transduce.training.passes.written import GraphPasses, ThreadPasses
from transduce.training.recipe import model_loss
from transduce.training.share import Part, Pass, Share, passes_of, width_of
from transduce.training.snapshots import State


class TrainingError(TransduceError):
    """The run cannot continue. Its checkpoints are still in place."""


class StepGradients:
    def __init__(
        self, model: Transformer, passes: GraphPasses | ThreadPasses | None, choices: Choices, on_event: OnEvent
    ) -> None:
        """`passes`: the written passes, or None for plain ones."""
        self.model, self.passes, self.choices, self.on_event = model, passes, choices, on_event
        self.parameters = list(model.parameters())

    def begin(self, config: TrainConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    def fill(self, step: int, share: Share, state: State) -> Tensor:
        """Fills every gradient and returns the summed loss. If memory runs out, repeats the step in smaller passes."""
        while True:
            try:
                return self._accumulate(step, share, state.micro_limit)
            except torch.OutOfMemoryError:
                # The limit is lowered outside this block: here the error still holds the memory of the failed pass.
                pass
            self._lower_limit(step, share, state)

    def _accumulate(self, step: int, share: Share, limit: int | None) -> Tensor:
        for p in self.parameters:  # zeros, not None: a rank with an empty share also takes part in the sum
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
        total = torch.zeros((), device=self.device)
        for place, parts in self._passes_of(share, limit):
            # Divided once, by the tokens of the whole step, which every rank knows from the plan.
            total += self._add_gradients(parts, (step, *place), 1 / share.n_target_tokens)
        return total

    def _passes_of(self, share: Share, limit: int | None) -> Iterator[Pass]:
        can_join = self.passes is not None and self.passes.joins
        return passes_of(share, limit, limit or self.choices.micro_tokens, can_join)

    def _add_gradients(self, parts: Sequence[Part], place: tuple[int, ...], factor: float) -> Tensor:
        seed = seed_of(self.config.seed, *place)
        if self.passes is not None:
            return self.passes.add_gradients(parts, [seed], factor)
        (part,) = parts
        torch.manual_seed(seed)
        loss_sum = self.loss_of(*(ids.to(self.device, non_blocking=True) for ids in part))
        (loss_sum * factor).backward()
        return loss_sum.detach()

    def loss_of(self, source_BS: Tensor, target_in_BT: Tensor, target_out_BT: Tensor) -> Tensor:
        # Chunks are faster on a CPU; on a GPU they are not measured.
        in_chunks = self.device.type == "cpu"
        smoothing = self.config.label_smoothing
        with self.choices.autocast():
            return model_loss(self.model, source_BS, target_in_BT, target_out_BT, smoothing, in_chunks=in_chunks)

    def _lower_limit(self, step: int, share: Share, state: State) -> None:
        """Halves the size of the largest pass of this step."""
        widest = max(width_of(batch) for batch in share.batches)
        largest = max(one.n_positions for one in self._passes_of(share, state.micro_limit))
        if largest <= widest:
            raise TrainingError(
                f"one pair of {widest} tokens does not fit into memory: choose a smaller --size, or prepare the text "
                "again with a lower data.max_characters"
            )
        state.micro_limit = largest // 2
        for p in self.parameters:
            p.grad = None
        if self.passes is not None:
            self.passes.forget()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.on_event(OutOfMemoryEvent(step=step, micro_limit=state.micro_limit))


def seed_of(seed: int, *place: int) -> int:
    """One random stream for each pass of each step, the same whichever rank runs it."""
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
