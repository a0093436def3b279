"""Turns of a search recorded as CUDA graphs: one launch each, where a GPU would wait for hundreds of small ones.

A recording reads and writes at fixed places, so that hypotheses and state live in them from turn to turn. What a turn
would decide by what it finds is noted, and looked at once it is done. The slow twin is `search.turn` with
`FastStepper`, which is what is recorded.
"""

# Axes: as in stepper.py; T tokens of a hypothesis.

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.engines.cached import AXES, Cells, FastStepper, needed
from transduce.model import Transformer
from transduce.search.candidates import How
from transduce.search.hypotheses import Beams
from transduce.search.loop import advance, rows_of, turn
from transduce.search.peaks import GROUP, Doubts, Peaks, can_tell

SOURCE_ROOM, CELL_ROOM, TOKEN_ROOM = 32, 64, 64
"""Widths are multiples of these: others want a recording of their own."""
MOST = 16
"""Recordings that are kept. Each holds the logits of a turn."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""What was done, to be done again."""

PLACES = [name for name in AXES if name != "source_B"]
"""What a step reads of a state."""
NOBODY = {
    "log_prob_BK": -torch.inf,
    "ended_score_BK": -torch.inf,
    "n_ended_B": 0,
    "state_BK": 0,
    "length_B": 0,
    "limit_B": 0,
    "last_BK": 0,
}
"""Hypotheses of a sentence that is none: it is over."""


class Shape(NamedTuple):
    n_sentences: int
    n_kept: int
    n_cells: int
    n_source: int
    n_tokens: int
    n_positions: int


class GraphStepper(FastStepper):
    """On a GPU, in float32 or bfloat16."""

    def __init__(self, model: Transformer, record: Record | None = None) -> None:
        super().__init__(model)
        n_more = -len(self.target_VD) % GROUP
        self.output_DV = F.pad(self.output.W_NF, (0, n_more))
        self.bias_V = None if self.output.b_F is None else F.pad(self.output.b_F, (0, n_more))
        self.record = record or CudaRecorder()
        self.recordings: dict[Any, list[Recording]] = {}
        self.met: set[Any] = set()

    def look_back(self, query_RP: Tensor, *past: Tensor) -> Tensor:
        if not query_RP.is_cuda:
            return super().look_back(query_RP, *past)
        from transduce.engines.cuda.kernels import look_back  # Triton is for GPUs

        return look_back(query_RP, *past)

    def look_at_source(self, query_RP: Tensor, *memory: Tensor) -> Tensor:
        if not query_RP.is_cuda:
            return super().look_at_source(query_RP, *memory)
        from transduce.engines.cuda.kernels import look_at_source

        return look_at_source(query_RP, *memory)

    def peaks(self, x_RD: Tensor) -> Peaks:
        if not x_RD.is_cuda:
            return Peaks.of(self.output(x_RD))
        from transduce.engines.cuda.kernels import peaks_of

        if x_RD.dtype == torch.float32:
            logits_RV = torch.mm(x_RD, self.output_DV)
        else:  # which has so few digits that many tokens would be equals
            logits_RV = torch.mm(x_RD, self.output_DV, out_dtype=torch.float32)
        return peaks_of(logits_RV if self.bias_V is None else logits_RV.add_(self.bias_V), len(self.target_VD))

    @torch.no_grad()
    def turn(self, beams: Beams, state: Cells, how: How) -> tuple[Beams, Cells, list[bool]]:
        n, n_kept, n_tokens = beams.token_BKT.shape
        if not (how.is_plain(beams) and can_tell(n_kept, self.config.target_vocab_size)):
            return turn(self, beams, state, how)
        home = next((one for own in self.recordings.values() for one in own if one.is_home_of(state)), None)
        n_needed = _most(needed(state.hidden_BKC)) if home is None else home.n_needed
        if n_needed + n_kept > state.hidden_BKC.shape[2]:
            state = state.with_more_cells()
        n_cells, n_source = _up(state.hidden_BKC.shape[2], CELL_ROOM), _up(state.unseen_B11S.shape[3], SOURCE_ROOM)
        state = state.with_room(n_source, n_cells)
        n_positions = len(self.positions(1, state.longest + 1))
        shape = Shape(_roughly(n), n_kept, n_cells, n_source, _up(n_tokens, TOKEN_ROOM), n_positions)
        recording = self._recording_for(shape, beams, state, how)
        return turn(self, beams, state, how) if recording is None else recording.replay(beams, state)

    def _recording_for(self, shape: Shape, beams: Beams, state: Cells, how: How) -> Recording | None:
        """One whose places are this state's, or nobody's. None where such a turn is met for the first time: it may be
        the last."""
        # A recording holds its rules, so that no others have their number.
        key = shape, how.settings, id(how.rules.penalty_AV), how.eos_id
        if key not in self.met:
            self.met.add(key)
            return None
        for recording in (own := self.recordings.setdefault(key, [])):
            if recording.is_free or recording.is_home_of(state):
                return recording
        self._make_room()
        own.append(Recording(self, shape, beams, state, how))
        return own[-1]

    def _make_room(self) -> None:
        if sum(map(len, self.recordings.values())) >= MOST:
            for own in self.recordings.values():
                own[:] = [one for one in own if not one.is_free]


class Recording:
    """A turn of one shape."""

    def __init__(self, stepper: GraphStepper, shape: Shape, beams: Beams, state: Cells, how: How) -> None:
        self.how, self.shape, self.n = how, shape, 0
        self.positions = stepper.positions(1, 1)  # held, for the recording reads it
        self.beams = Beams(**{f.name: self._place(getattr(beams, f.name), 0) for f in fields(beams)})
        self.cells = replace(
            state,
            longest=0,
            **{name: self._place(getattr(state, name), AXES[name]) for name in AXES},  # type: ignore[arg-type]
        )
        self._nobody_from(0)
        self.cells.hidden_BKC.fill_(-torch.inf)
        # What a turn ends with has places of its own: what else it writes is room that other recordings write to.
        self.after = Beams(**{f.name: getattr(self.beams, f.name).clone() for f in fields(beams)})
        self.hidden_BKC, self.length_B = self.cells.hidden_BKC.clone(), self.cells.length_B.clone()
        self.told = self.length_B.new_zeros(shape.n_sentences + 2)
        self.lent: dict[str, Callable[[], Tensor | None]] = {}
        """What a state has of these places, for as long as it has it."""
        self.n_needed = 0
        """Of the cells of one sentence, the most."""
        self.again = stepper.record(lambda: self._run(stepper))

    @property
    def is_free(self) -> bool:
        return all(tensor() is None for tensor in self.lent.values())

    def is_home_of(self, state: Cells) -> bool:
        """All of it: then what is known of it here is still so."""
        return bool(self.lent) and all(getattr(state, name) is tensor() for name, tensor in self.lent.items())

    def _place(self, like: Tensor, axis: int) -> Tensor:
        """For as many sentences as there is room for."""
        sizes = list(like.shape)
        sizes[axis] = self.shape.n_sentences
        if like.ndim == 3 and like.dtype == torch.long:  # tokens
            sizes[2] = self.shape.n_tokens
        return like.new_zeros(sizes)

    def _run(self, stepper: GraphStepper) -> None:
        cells, doubts = self.cells, Doubts([])
        cell_BK = cells.free_cells()
        cells.take(cell_BK)
        x_RD = stepper.embed(self.beams.last_BK.flatten(), cells)
        self.peaks = stepper.peaks(stepper.decode(x_RD, cell_BK, cells, self.shape.n_source, self.shape.n_cells))
        after, parent_BK = advance(self.beams, self.peaks, self.how, doubts)
        is_over_B = after.is_over_B(self.how.settings)
        # Those that are over go on until others come, and must not take ever more cells.
        hidden_BKC = cells.select(rows_of(parent_BK)).hidden_BKC.masked_fill(is_over_B[:, None, None], -torch.inf)
        n_needed = needed(hidden_BKC).sum(1).max()
        told = torch.cat([is_over_B.long(), torch.stack([n_needed, torch.stack(doubts.noted or []).any().long()])])
        torch._foreach_copy_(
            [*_tensors(self.after), self.hidden_BKC, self.length_B, self.told],
            [*_tensors(after), hidden_BKC, cells.length_B + 1, told],
        )

    def _nobody_from(self, n: int) -> None:
        self.n = n
        for name, value in NOBODY.items():
            getattr(self.beams, name)[n:] = value
        self.cells.unseen_B11S[n:], self.cells.length_B[n:] = 0, 0

    def replay(self, beams: Beams, state: Cells) -> tuple[Beams, Cells, list[bool]]:
        n = state.n_sentences
        if n != self.n:
            self._nobody_from(n)
        self._take_in(beams, state, n)
        self.again()
        *is_over, self.n_needed, is_in_doubt = self.told.tolist()
        after, hidden_BKC = self.after, self.hidden_BKC
        if is_in_doubt:
            after, parent_BK = advance(self.beams, self.peaks, self.how)
            is_over = after.is_over_B(self.how.settings).tolist()
            hidden_BKC = self.cells.select(rows_of(parent_BK)).hidden_BKC
            self.n_needed = _most(needed(hidden_BKC))
        beams = Beams(**{f.name: getattr(after, f.name)[:n] for f in fields(after)})
        lent = {name: getattr(self.cells, name).narrow(AXES[name], 0, n) for name in PLACES}
        lent |= {"hidden_BKC": hidden_BKC[:n], "length_B": self.length_B[:n]}
        self.lent = {name: weakref.ref(tensor) for name, tensor in lent.items()}
        state = replace(state, longest=state.longest + 1, **lent)
        return beams, state, [bool(one) for one in is_over[:n]]

    def _take_in(self, beams: Beams, state: Cells, n: int) -> None:
        """What does not lie there yet."""
        pairs = [(getattr(self.beams, f.name)[:n], getattr(beams, f.name)) for f in fields(beams)]
        pairs = [(place[..., : given.shape[2]] if given.ndim == 3 else place, given) for place, given in pairs]
        pairs += [(getattr(self.cells, name).narrow(AXES[name], 0, n), getattr(state, name)) for name in PLACES]
        pairs = [(place, given) for place, given in pairs if given.numel() and place.data_ptr() != given.data_ptr()]
        torch._foreach_copy_([place for place, _ in pairs], [given for _, given in pairs])
        self.cells.hidden_BKC[n:] = -torch.inf


class CudaRecorder:
    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up, which no graph can
            run()
        torch.cuda.current_stream().wait_stream(stream)
        # All use the same memory: they never run at once, and what comes out of one lies elsewhere.
        pool = next((other.pool() for other in self.graphs), None)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        self.graphs.add(graph)
        return graph.replay


def _tensors(beams: Beams) -> list[Tensor]:
    return [getattr(beams, f.name) for f in fields(beams)]


def _most(is_needed_BC: Tensor) -> int:
    return int(is_needed_BC.sum(1).max()) if is_needed_BC.numel() else 0


def _up(n: int, to: int) -> int:
    return max(to, -(-n // to) * to)


def _roughly(n: int) -> int:
    """As many or up to a quarter more: few sizes for all n."""
    return _up(n, max(1, 2 ** (n.bit_length() - 3)))
