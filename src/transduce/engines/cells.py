"""The keys and values of past tokens, which are not copied when hypotheses change places.

All hypotheses of a sentence share the cells of one cache. A mask for each hypothesis says which cells are in its past.
"""

# Axes: L layers, B sentences, K hypotheses of each, R = B K rows, H heads, S source positions, C cells, W the key and
# the value of one head. Where K comes last it is d_k; U is d_v.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

ROOM = 8
"""A full cache grows by the cells for this many steps."""
LANES = 16
"""float32 values in one vector register. Softmax is several times slower over rows that do not fill whole registers."""


@dataclass(frozen=True)
class Cells:
    """The decoder's state. Rows are grouped by sentence, and each sentence has the same number of them, K."""

    memory_key_LBHKS: Tensor
    memory_value_LBHSU: Tensor
    unseen_B11S: Tensor
    """-inf at padding, else 0."""
    source_B: Tensor
    """Length of each source, in tokens."""
    n_source: int
    """At least the longest source, rounded up to whole lanes. Positions after it are spare room."""
    cell_LBHCW: Tensor
    """Keys and values. A cell that is in no hypothesis's past is free for the next token. There are few more cells than
    a hypothesis has tokens, because hypotheses share most of their past."""
    hidden_BKC: Tensor
    """0 for a cell in the hypothesis's past, -inf for all others."""
    length_B: Tensor
    longest: int

    @property
    def n_sentences(self) -> int:
        return len(self.length_B)

    @property
    def end(self) -> int:
        """All cells from here on are free."""
        return in_lanes(_end(self.hidden_BKC))

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Cells:
        """See `DecoderState.select`."""
        n = self.n_sentences if sentences_B is None else len(sentences_B)
        hidden_BKC = self.hidden_BKC.flatten(0, 1)[rows_R].unflatten(0, (n, len(rows_R) // max(n, 1)))
        if sentences_B is None:
            return replace(self, hidden_BKC=hidden_BKC)
        length_B, unseen_B11S = self.length_B[sentences_B], self.unseen_B11S[sentences_B]
        source_B = self.source_B[sentences_B]
        n_source, n_cells = in_lanes(_longest(source_B)), in_lanes(_end(hidden_BKC))
        return Cells(
            memory_key_LBHKS=self.memory_key_LBHKS[..., :n_source].index_select(1, sentences_B),
            memory_value_LBHSU=self.memory_value_LBHSU[:, :, :, :n_source].index_select(1, sentences_B),
            unseen_B11S=unseen_B11S[..., :n_source].contiguous(),
            source_B=source_B,
            n_source=n_source,
            cell_LBHCW=self.cell_LBHCW[:, :, :, :n_cells].index_select(1, sentences_B),
            hidden_BKC=hidden_BKC[..., :n_cells].contiguous(),
            length_B=length_B,
            longest=_longest(length_B),
        )

    def join(self, other: Cells) -> Cells:
        """The sentences of this state, then those of the other."""
        if self.n_sentences == 0:
            return other
        wide = self._as_wide_as(other)
        other = other._as_wide_as(wide)
        joined = {name: torch.cat([getattr(wide, name), getattr(other, name)], axis) for name, axis in AXES.items()}
        return Cells(**joined, n_source=max(self.n_source, other.n_source), longest=max(self.longest, other.longest))

    def put(self, places: Tensor, other: Cells) -> Cells:
        """Replaces the sentences at these places by the other's, in order. Copies nothing else."""
        wide = self._as_wide_as(other)
        if other.longest > 0:
            other = other._as_wide_as(wide)
        else:  # no hypothesis sees these cells, so their content does not matter
            hidden_BKC = widen(other.hidden_BKC, 2, wide.hidden_BKC.shape[2], -torch.inf)
            other = replace(other.with_room(wide.unseen_B11S.shape[3], 0), hidden_BKC=hidden_BKC)
        for name, axis in AXES.items():
            if name != "cell_LBHCW" or other.longest > 0:
                getattr(wide, name).index_copy_(axis, places, getattr(other, name))
        return replace(wide, n_source=in_lanes(_longest(wide.source_B)), longest=_longest(wide.length_B))

    def _as_wide_as(self, other: Cells) -> Cells:
        """With room for as many positions and cells as the other."""
        return self.with_room(other.unseen_B11S.shape[3], other.hidden_BKC.shape[2])

    def with_room(self, n_source: int, n_cells: int) -> Cells:
        """With room for at least this many positions and cells."""
        if n_source > self.unseen_B11S.shape[3]:
            self = replace(
                self,
                memory_key_LBHKS=widen(self.memory_key_LBHKS, 4, n_source),
                memory_value_LBHSU=widen(self.memory_value_LBHSU, 3, n_source),
                unseen_B11S=widen(self.unseen_B11S, 3, n_source, -torch.inf),
            )
        if n_cells > self.hidden_BKC.shape[2]:
            self = replace(
                self,
                cell_LBHCW=widen(self.cell_LBHCW, 3, n_cells),
                hidden_BKC=widen(self.hidden_BKC, 2, n_cells, -torch.inf),
            )
        return self

    def with_free_cells(self) -> tuple[Cells, Tensor]:
        """The first free cells, one for each hypothesis: cell_BK. The state has more cells if it had too few."""
        n_kept, n_cells = self.hidden_BKC.shape[1:]
        if n_cells >= n_kept:
            cell_BK = self.free_cells()
            if self.n_sentences == 0 or int(cell_BK.max()) < n_cells:
                return self, cell_BK
        return self.with_more_cells().with_free_cells()

    def free_cells(self) -> Tensor:
        """cell_BK. There must be enough free cells."""
        n, n_kept, n_cells = self.hidden_BKC.shape
        free_BC = torch.arange(n_cells, device=self.length_B.device).expand(n, -1)
        return torch.where(needed(self.hidden_BKC), n_cells, free_BC).topk(n_kept, largest=False).values

    def take(self, cell_BK: Tensor) -> None:
        """Adds the new cell of each hypothesis to its past, and hides it from the other hypotheses."""
        n, n_kept = cell_BK.shape
        # 0 on the diagonal, else -inf.
        identity_bias_KK = torch.eye(n_kept, device=cell_BK.device, dtype=self.hidden_BKC.dtype).log()
        self.hidden_BKC.scatter_(2, cell_BK[:, None].expand(-1, n_kept, -1), identity_bias_KK.expand(n, -1, -1))

    def with_more_cells(self) -> Cells:
        n_kept, n_cells = self.hidden_BKC.shape[1:]
        return self.with_room(0, in_lanes(n_cells + ROOM * n_kept))


AXES = {
    "memory_key_LBHKS": 1,
    "memory_value_LBHSU": 1,
    "unseen_B11S": 0,
    "source_B": 0,
    "cell_LBHCW": 1,
    "hidden_BKC": 0,
    "length_B": 0,
}
"""The axis of the sentences in each tensor."""


def needed(hidden_BKC: Tensor) -> Tensor:
    """Whether each cell is in the past of a hypothesis of its sentence: (B, C)."""
    return hidden_BKC.amax(1) == 0


def _longest(length_B: Tensor) -> int:
    return int(length_B.max()) if len(length_B) else 0


def _end(hidden_BKC: Tensor) -> int:
    """The first cell after the last one in use."""
    if hidden_BKC.numel() == 0:
        return 0
    used = (hidden_BKC == 0).flatten(0, 1).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def in_lanes(n: int) -> int:
    """n, rounded up to whole vector registers."""
    return -(-n // LANES) * LANES


def widen(x: Tensor, axis: int, n: int, value: float = 0.0) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - axis - 1) + [0, n - x.shape[axis]], value=value)
