"""The interface between the search and a model: start, step and select, and optional faster methods.

Each optional protocol has a slow twin in `loop.py` that gives the same result by start, step and select.
"""

# Axes: B sentences, R rows, S source positions, T tokens.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self, TypeVar, runtime_checkable

from torch import Tensor

from transduce.search.candidates import SearchSettings
from transduce.search.hypotheses import Beams, Sentence
from transduce.search.peaks import Peaks


class State(Protocol):
    """The state of a stepper. Rows are grouped by sentence, and each sentence has the same number of them."""

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Self: ...

    def join(self, other: Self) -> Self: ...


S = TypeVar("S", bound=State)


class Stepper(Protocol[S]):
    """A model, or any object with the same methods. A state that is passed in is consumed."""

    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> S: ...

    def step(self, last_R: Tensor, state: S) -> tuple[Tensor | Peaks, S]:
        """The logits of the token after `last_R`."""


class Queue(Protocol):
    """Sentences that arrive while the search runs."""

    def get(self, wait: bool) -> Sentence | None:
        """The next sentence. None without `wait`: there is none at the moment. None with `wait`: none will follow."""


Cancelled = Callable[[Sequence[Sentence]], Iterable[int]]
"""Called once per turn with the sentences in the search. Returns the places of those that are cancelled."""


@runtime_checkable
class HasTurn(Protocol[S]):
    """Slow twin: `loop.turn`."""

    def turn(self, beams: Beams, state: S, settings: SearchSettings) -> tuple[Beams, S, list[bool]]: ...


@runtime_checkable
class HasEnter(Protocol[S]):
    """Slow twin: `loop.enter`."""

    def enter(
        self, beams: Beams, state: S, places: Sequence[int], new: Sequence[Sentence], limits: Sequence[int]
    ) -> tuple[Beams, S] | None:
        """Puts new sentences in the places of others. None if these sentences need the slow twin."""


@runtime_checkable
class HasPut(Protocol):
    """A state. Slow twin: `loop.put`."""

    def put(self, places: Tensor, other: Self) -> Self:
        """Replaces the sentences at these places by the other's, in order."""


@runtime_checkable
class HasMaxRows(Protocol):
    max_rows: int | None
    """The number of hypotheses, over all sentences, above which each takes longer; None if there is no such number."""
