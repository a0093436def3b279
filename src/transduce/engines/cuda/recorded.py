"""Turns of a search recorded as CUDA graphs: one launch each instead of hundreds of small ones.

A recording reads and writes at fixed addresses, so hypotheses and state stay in its tensors from turn to turn. A
recorded turn cannot branch: its conditions are computed in the recording and read after it, see `peaks.Conditions`. The
slow twin is `search.loop.turn` with `CachedStepper`, whose operations are recorded.
"""

# Axes: as in cached.py; T tokens of a hypothesis.

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.engines.cached import CachedStepper
from transduce.engines.cells import AXES, Cells, needed
from transduce.model import Transformer
from transduce.search.candidates import SearchSettings
from transduce.search.hypotheses import Beams
from transduce.search.loop import advance, rows_of, turn
from transduce.search.peaks import GROUP, Conditions, Peaks, has_enough_groups

SOURCE_ROOM, CELL_ROOM, TOKEN_ROOM = 32, 64, 64
"""Widths are rounded up to multiples of these, so that there are few shapes. Each shape needs a recording."""
MAX_RECORDINGS = 16
"""A limit on memory: each recording holds the logits of a turn."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function, runs it once, and returns a function that repeats it."""

STEP_FIELDS = [name for name in AXES if name != "source_B"]
"""Fields of a state that a step reads."""
EMPTY = {
    "log_prob_BK": -torch.inf,
    "ended_score_BK": -torch.inf,
    "n_ended_B": 0,
    "state_BK": 0,
    "length_B": 0,
    "limit_B": 0,
    "last_BK": 0,
}
"""Values for unused places: a sentence that is over."""


class Shape(NamedTuple):
    n_sentences: int
    n_kept: int
    n_cells: int
    n_source: int
    n_tokens: int
    n_positions: int


class RecordedStepper(CachedStepper):
    """For a GPU, in float32 or bfloat16."""

    def __init__(self, model: Transformer, record: Record | None = None) -> None:
        super().__init__(model)
        n_more = -len(self.target_VD) % GROUP
        self.output_DV = F.pad(self.output.W_NF, (0, n_more))
        self.bias_V = None if self.output.b_F is None else F.pad(self.output.b_F, (0, n_more))
        self.record = record or CudaRecorder()
        self.recordings: dict[Any, list[Recording]] = {}
        self.seen: set[Any] = set()

    def attend_to_past(self, query_RP: Tensor, *past: Tensor) -> Tensor:
        if not query_RP.is_cuda:
            return super().attend_to_past(query_RP, *past)
        from transduce.engines.cuda.kernels import attend_to_past  # Triton exists on machines with GPUs only

        return attend_to_past(query_RP, *past)

    def attend_to_memory(self, query_RP: Tensor, *memory: Tensor) -> Tensor:
        if not query_RP.is_cuda:
            return super().attend_to_memory(query_RP, *memory)
        from transduce.engines.cuda.kernels import attend_to_memory

        return attend_to_memory(query_RP, *memory)

    def peaks(self, x_RD: Tensor) -> Peaks:
        if not x_RD.is_cuda:
            return Peaks.of(self.output(x_RD))
        from transduce.engines.cuda.kernels import peaks_of

        if x_RD.dtype == torch.float32:
            logits_RV = torch.mm(x_RD, self.output_DV)
        else:  # bfloat16 logits have so few digits that many tokens would be equal
            logits_RV = torch.mm(x_RD, self.output_DV, out_dtype=torch.float32)
        return peaks_of(logits_RV if self.bias_V is None else logits_RV.add_(self.bias_V), len(self.target_VD))

    @torch.no_grad()
    def turn(self, beams: Beams, state: Cells, settings: SearchSettings) -> tuple[Beams, Cells, list[bool]]:
        n, n_kept, n_tokens = beams.token_BKT.shape
        if not (settings.is_plain(beams) and has_enough_groups(n_kept, self.config.target_vocab_size)):
            return turn(self, beams, state, settings)
        recording = next((one for same in self.recordings.values() for one in same if one.holds(state)), None)
        n_needed = _max_needed(needed(state.hidden_BKC)) if recording is None else recording.n_needed
        if n_needed + n_kept > state.hidden_BKC.shape[2]:
            state = state.with_more_cells()
        n_cells = _round_up(state.hidden_BKC.shape[2], CELL_ROOM)
        n_source = _round_up(state.unseen_B11S.shape[3], SOURCE_ROOM)
        state = state.with_room(n_source, n_cells)
        n_positions = len(self.positions.table("target", state.longest + 1))
        shape = Shape(_round_size(n), n_kept, n_cells, n_source, _round_up(n_tokens, TOKEN_ROOM), n_positions)
        recording = self._recording_for(shape, beams, state, settings)
        return turn(self, beams, state, settings) if recording is None else recording.replay(beams, state)

    def _recording_for(self, shape: Shape, beams: Beams, state: Cells, settings: SearchSettings) -> Recording | None:
        """A recording that holds this state, or a free one. None for the first turn of a shape: it may be the only one,
        and recording costs more than a turn."""
        # A recording keeps its rules alive, so no other rules can have the same id.
        key = shape, settings.decode, id(settings.rules.penalty_AV), settings.eos_id
        if key not in self.seen:
            self.seen.add(key)
            return None
        for recording in (same := self.recordings.setdefault(key, [])):
            if recording.is_free or recording.holds(state):
                return recording
        self._make_room()
        same.append(Recording(self, shape, beams, state, settings))
        return same[-1]

    def _make_room(self) -> None:
        if sum(map(len, self.recordings.values())) >= MAX_RECORDINGS:
            for same in self.recordings.values():
                same[:] = [one for one in same if not one.is_free]


class Recording:
    """A recorded turn of one shape."""

    def __init__(
        self, stepper: RecordedStepper, shape: Shape, beams: Beams, state: Cells, settings: SearchSettings
    ) -> None:
        self.settings, self.shape, self.n = settings, shape, 0
        self.positions = stepper.positions.table("target", 1)  # kept alive, because the recording reads it
        self.beams = Beams(**{f.name: self._place(getattr(beams, f.name), 0) for f in fields(beams)})
        self.cells = replace(
            state,
            longest=0,
            **{name: self._place(getattr(state, name), AXES[name]) for name in AXES},  # type: ignore[arg-type]
        )
        self._empty_from(0)
        self.cells.hidden_BKC.fill_(-torch.inf)
        # The results of a turn are in tensors of this recording. All other memory is shared by all recordings.
        self.after = Beams(**{f.name: getattr(self.beams, f.name).clone() for f in fields(beams)})
        self.hidden_BKC, self.length_B = self.cells.hidden_BKC.clone(), self.cells.length_B.clone()
        self.outcome = self.length_B.new_zeros(shape.n_sentences + 2)
        self.returned_tensors: dict[str, Callable[[], Tensor | None]] = {}
        """Weak references to the tensors of the last returned state. They are None once no state uses them."""
        self.n_needed = 0
        """The highest number of cells in use in any sentence."""
        self.repeat = stepper.record(lambda: self._run(stepper))

    @property
    def is_free(self) -> bool:
        return all(tensor() is None for tensor in self.returned_tensors.values())

    def holds(self, state: Cells) -> bool:
        """Whether all tensors of the state are those of this recording, so that `n_needed` is right for it."""
        return bool(self.returned_tensors) and all(
            getattr(state, name) is tensor() for name, tensor in self.returned_tensors.items()
        )

    def _place(self, like: Tensor, axis: int) -> Tensor:
        """Zeros like this tensor, with room for all sentences of the shape."""
        sizes = list(like.shape)
        sizes[axis] = self.shape.n_sentences
        if like.ndim == 3 and like.dtype == torch.long:  # tokens
            sizes[2] = self.shape.n_tokens
        return like.new_zeros(sizes)

    def _run(self, stepper: RecordedStepper) -> None:
        cells, conditions = self.cells, Conditions([])
        cell_BK = cells.free_cells()
        cells.take(cell_BK)
        x_RD = stepper.embed(self.beams.last_BK.flatten(), cells)
        self.peaks = stepper.peaks(stepper.decode(x_RD, cell_BK, cells, self.shape.n_source, self.shape.n_cells))
        after, parent_BK = advance(self.beams, self.peaks, self.settings, conditions)
        is_over_B = after.is_over_B(self.settings.decode)
        # Finished sentences are computed until others take their places; they must not use more and more cells.
        hidden_BKC = cells.select(rows_of(parent_BK)).hidden_BKC.masked_fill(is_over_B[:, None, None], -torch.inf)
        n_needed = needed(hidden_BKC).sum(1).max()
        has_condition = torch.stack(conditions.deferred or []).any().long()
        outcome = torch.cat([is_over_B.long(), torch.stack([n_needed, has_condition])])
        torch._foreach_copy_(
            [*_tensors(self.after), self.hidden_BKC, self.length_B, self.outcome],
            [*_tensors(after), hidden_BKC, cells.length_B + 1, outcome],
        )

    def _empty_from(self, n: int) -> None:
        self.n = n
        for name, value in EMPTY.items():
            getattr(self.beams, name)[n:] = value
        self.cells.unseen_B11S[n:], self.cells.length_B[n:] = 0, 0

    def replay(self, beams: Beams, state: Cells) -> tuple[Beams, Cells, list[bool]]:
        n = state.n_sentences
        if n != self.n:
            self._empty_from(n)
        self._copy_in(beams, state, n)
        self.repeat()
        *is_over, self.n_needed, has_condition = self.outcome.tolist()
        after, hidden_BKC = self.after, self.hidden_BKC
        if has_condition:
            after, parent_BK = advance(self.beams, self.peaks, self.settings)
            is_over = after.is_over_B(self.settings.decode).tolist()
            hidden_BKC = self.cells.select(rows_of(parent_BK)).hidden_BKC
            self.n_needed = _max_needed(needed(hidden_BKC))
        beams = Beams(**{f.name: getattr(after, f.name)[:n] for f in fields(after)})
        returned = {name: getattr(self.cells, name).narrow(AXES[name], 0, n) for name in STEP_FIELDS}
        returned |= {"hidden_BKC": hidden_BKC[:n], "length_B": self.length_B[:n]}
        self.returned_tensors = {name: weakref.ref(tensor) for name, tensor in returned.items()}
        state = replace(state, longest=state.longest + 1, **returned)
        return beams, state, [bool(one) for one in is_over[:n]]

    def _copy_in(self, beams: Beams, state: Cells, n: int) -> None:
        """Copies the tensors that are not in this recording yet."""
        pairs = [(getattr(self.beams, f.name)[:n], getattr(beams, f.name)) for f in fields(beams)]
        pairs = [(place[..., : new.shape[2]] if new.ndim == 3 else place, new) for place, new in pairs]
        pairs += [(getattr(self.cells, name).narrow(AXES[name], 0, n), getattr(state, name)) for name in STEP_FIELDS]
        pairs = [(place, new) for place, new in pairs if new.numel() and place.data_ptr() != new.data_ptr()]
        torch._foreach_copy_([place for place, _ in pairs], [new for _, new in pairs])
        self.cells.hidden_BKC[n:] = -torch.inf


class CudaRecorder:
    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # a first run, because the initialisation of libraries cannot be recorded
            run()
        torch.cuda.current_stream().wait_stream(stream)
        # All recordings share memory: they never run at the same time, and their results are elsewhere.
        pool = next((other.pool() for other in self.graphs), None)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        self.graphs.add(graph)
        return graph.replay


def _tensors(beams: Beams) -> list[Tensor]:
    return [getattr(beams, f.name) for f in fields(beams)]


def _max_needed(is_needed_BC: Tensor) -> int:
    return int(is_needed_BC.sum(1).max()) if is_needed_BC.numel() else 0


def _round_up(n: int, multiple: int) -> int:
    return max(multiple, -(-n // multiple) * multiple)


def _round_size(n: int) -> int:
    """n, rounded up by at most a quarter, so that there are few sizes."""
    return _round_up(n, max(1, 2 ** (n.bit_length() - 3)))
