"""The decoder one token at a time, faster. Its slow twin is `Transformer.start` and `Transformer.step`.

When hypotheses change places nothing of the past is copied: all that the hypotheses of a sentence ever were lies in the
cells of one cache, and each knows which cells are its own. Weights lie as products want them, in int8 where asked for.
"""

# Axes: L layers, B sentences, K hypotheses of each, R = B K rows, H heads, X = B H, S source positions, C cells,
# M = S or C, Q queries of a sentence, D = d_model, P all heads side by side, W the key and the value of one head,
# V vocabulary, J blocks of it, N inputs and F outputs of a product. Where K comes last it is d_k, and U is d_v.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import ModelConfig
from transduce.engines.native.library import Precision
from transduce.model import ACTIVATIONS, AddAndNorm, FeedForward, MemoryAttention, SelfAttention, Transformer, sinusoid
from transduce.search.peaks import Peaks

ROOM = 8
"""Steps for which there is room when there is too little."""
LANES = 16
"""Softmax is several times slower over rows that do not fill them: 16 of float32 are a vector."""
KNOWN_POSITIONS = 256
"""Sinusoids made beforehand; more are made as they are needed."""
BLOCK = 512
"""Tokens whose logits are found together: those of some hundred rows stay in the cache of a core."""
FEW_ROWS = 16
"""For no more than these all logits are found at once."""


def why_not(config: ModelConfig) -> str | None:
    """What of this model is not written out here; None where all of it is."""
    unknown = {"model.norm is pre": config.norm == "pre", "attention has a window": config.attention_window is not None}
    return next((name for name, is_so in unknown.items() if is_so), None)


# Products


class Product:
    """x W + b."""

    def __init__(self, W_NF: Tensor, b_F: Tensor | None) -> None:
        self.W_NF, self.b_F = W_NF.detach().contiguous(), None if b_F is None else b_F.detach()

    def ready(self, x_RN: Tensor) -> Any:
        """What `of` takes: one may serve several products."""
        return x_RN

    def of(self, x_RN: Any) -> Tensor:
        return torch.mm(x_RN, self.W_NF) if self.b_F is None else torch.addmm(self.b_F, x_RN, self.W_NF)

    def into(self, out_RF: Tensor, x_RN: Any, columns: slice) -> None:
        """Some columns."""
        torch.mm(x_RN, self.W_NF[:, columns], out=out_RF)
        if self.b_F is not None:
            out_RF.add_(self.b_F[columns])

    def __call__(self, x_RN: Tensor) -> Tensor:
        return self.of(self.ready(x_RN))


class Int8Product(Product):
    """The same with 8 bits: each column of W and each row of x has a scale of its own, so that what is beside a row
    changes nothing in it."""

    def __init__(self, W_NF: Tensor, b_F: Tensor | None) -> None:
        W_NF = W_NF.detach().float()
        self.scale_F = W_NF.abs().amax(0).clamp(min=1e-12) / 127
        self.W_NF = (W_NF / self.scale_F).round().to(torch.int8).T.contiguous().T  # so few rows take less time
        self.b_F = None if b_F is None else b_F.detach().float()

    def ready(self, x_RN: Tensor) -> Any:
        scale_R1 = x_RN.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        return (x_RN / scale_R1).round_().to(torch.int8), scale_R1

    def of(self, ready: Any) -> Tensor:
        x_RN, scale_R1 = ready
        # To float32 first: to multiply integers and floats takes three times as long.
        found_RF = torch._int_mm(x_RN, self.W_NF).float().mul_(scale_R1)
        if self.b_F is None:
            return found_RF.mul_(self.scale_F)
        return torch.addcmul(self.b_F, found_RF, self.scale_F, out=found_RF)

    def into(self, out_RF: Tensor, ready: Any, columns: slice) -> None:
        x_RN, scale_R1 = ready
        out_RF.copy_(torch._int_mm(x_RN, self.W_NF[:, columns])).mul_(scale_R1).mul_(self.scale_F[columns])
        if self.b_F is not None:
            out_RF.add_(self.b_F[columns])


PRODUCTS: dict[Precision, type[Product]] = {"float32": Product, "int8": Int8Product}


def in_half(x: Tensor) -> Tensor:
    """As float16 has it, or the most that it has."""
    most = torch.finfo(torch.float16).max
    return x.clamp(-most, most).half().to(x.dtype)


KEEPS: dict[Precision, Callable[[Tensor], Tensor]] = {"float32": lambda x: x, "int8": in_half}
"""What becomes of keys and values. Those of many sentences leave the caches of a core: so where products are rounded
more than that they have half the bytes in `native.c`, and here the same numbers."""


class Norm(NamedTuple):
    gain_D: Tensor
    bias_D: Tensor
    eps: float

    @classmethod
    def of(cls, norm: AddAndNorm) -> Norm:
        return cls(norm.weight.detach(), norm.bias.detach(), norm.eps)

    def __call__(self, x_RD: Tensor) -> Tensor:
        return torch.layer_norm(x_RD, self.gain_D.shape, self.gain_D, self.bias_D, self.eps)


# Layers: weights as the steps below want them. A query is born divided by the root of d_k.


class Attending(NamedTuple):
    """To what came before it, or stands beside it."""

    Q_KV: Product
    """Queries of all heads, then key and value of the first head, of the second, and so on."""
    O: Product  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, attention: SelfAttention, norm: AddAndNorm, make: type[Product]) -> Attending:
        Q, K, V = attention.W_QKV.widths.values()
        n_heads, scale = attention.n_heads, (Q // attention.n_heads) ** -0.5

        def arranged(x: Tensor) -> Tensor:
            query, key, value = x.detach().split([Q, K, V], -1)
            return torch.cat([query * scale, _by_head(key, value, n_heads)], -1)

        W, b = attention.W_QKV.W, attention.W_QKV.b
        own = make(arranged(W), None if b is None else arranged(b))
        return cls(own, make(attention.W_O.W, attention.W_O.b), Norm.of(norm))


class Asking(NamedTuple):
    """The memory."""

    Q: Product
    KV: Product
    O: Product  # noqa: E741
    norm: Norm

    @classmethod
    def of(cls, attention: MemoryAttention, norm: AddAndNorm, make: type[Product]) -> Asking:
        W_Q, W_KV, W_O, n_heads = attention.W_Q, attention.W_KV, attention.W_O, attention.n_heads
        scale, widths = (W_Q.W.shape[1] // n_heads) ** -0.5, list(W_KV.widths.values())

        def arranged(x: Tensor) -> Tensor:
            key, value = x.detach().split(widths, -1)
            return _by_head(key, value, n_heads)

        return cls(
            make(W_Q.W * scale, None if W_Q.b is None else W_Q.b * scale),
            make(arranged(W_KV.W), None if W_KV.b is None else arranged(W_KV.b)),
            make(W_O.W, W_O.b),
            Norm.of(norm),
        )


class Thinking(NamedTuple):
    """The feed-forward network."""

    one: Product
    two: Product
    norm: Norm

    @classmethod
    def of(cls, network: FeedForward, norm: AddAndNorm, make: type[Product]) -> Thinking:
        return cls(make(network.W_1.W, network.W_1.b), make(network.W_2.W, network.W_2.b), Norm.of(norm))


def _by_head(key: Tensor, value: Tensor, n_heads: int) -> Tensor:
    parts = [torch.unflatten(part, -1, (n_heads, -1)) for part in (key, value)]
    return torch.cat(parts, -1).flatten(-2)


def attend(query_XQK: Tensor, key_XKM: Tensor, value_XMU: Tensor, hidden_B1QM: Tensor) -> Tensor:
    """Equation 1. `hidden`: -inf where a query may not look, else 0."""
    score_XQM = torch.bmm(query_XQK, key_XKM)
    score_XQM.view(len(hidden_B1QM), -1, *score_XQM.shape[1:]).add_(hidden_B1QM)
    return torch.bmm(score_XQM.softmax(-1), value_XMU)


# The state


@dataclass(frozen=True)
class Cells:
    """What steps need of the past. Rows stand sentence by sentence, equally many for each: K."""

    memory_key_LBHKS: Tensor
    memory_value_LBHSU: Tensor
    unseen_B11S: Tensor
    """-inf at padding, else 0."""
    source_B: Tensor
    """Tokens of each source."""
    n_source: int
    """No source is longer; what is past it is room."""
    cell_LBHCW: Tensor
    """Keys and values. What no hypothesis of the sentence has in its past is free for the next tokens: there are few
    more cells than a hypothesis has tokens, for most of the past is shared."""
    hidden_BKC: Tensor
    """-inf where a cell is none of the hypothesis's past, else 0."""
    length_B: Tensor
    longest: int

    @property
    def n_sentences(self) -> int:
        return len(self.length_B)

    @property
    def end(self) -> int:
        """No cell from there on is needed by anybody."""
        return in_lanes(_end(self.hidden_BKC))

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Cells:
        """As `DecoderState.select`."""
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
        """Both, this one's sentences and rows first."""
        if self.n_sentences == 0:
            return other
        wide = self._as_wide_as(other)
        other = other._as_wide_as(wide)
        joined = {name: torch.cat([getattr(wide, name), getattr(other, name)], axis) for name, axis in AXES.items()}
        return Cells(**joined, n_source=max(self.n_source, other.n_source), longest=max(self.longest, other.longest))

    def put(self, places: Tensor, other: Cells) -> Cells:
        """The sentences at these places give way to the other's, in order. Nothing else is copied."""
        wide = self._as_wide_as(other)
        if other.longest > 0:
            other = other._as_wide_as(wide)
        else:  # what is in cells that nobody sees is all one
            hidden_BKC = _widen(other.hidden_BKC, 2, wide.hidden_BKC.shape[2], -torch.inf)
            other = replace(other.with_room(wide.unseen_B11S.shape[3], 0), hidden_BKC=hidden_BKC)
        for name, axis in AXES.items():
            if name != "cell_LBHCW" or other.longest > 0:
                getattr(wide, name).index_copy_(axis, places, getattr(other, name))
        return replace(wide, n_source=in_lanes(_longest(wide.source_B)), longest=_longest(wide.length_B))

    def _as_wide_as(self, other: Cells) -> Cells:
        """With room for as many positions and cells."""
        return self.with_room(other.unseen_B11S.shape[3], other.hidden_BKC.shape[2])

    def with_room(self, n_source: int, n_cells: int) -> Cells:
        """For at least so many positions and cells."""
        if n_source > self.unseen_B11S.shape[3]:
            self = replace(
                self,
                memory_key_LBHKS=_widen(self.memory_key_LBHKS, 4, n_source),
                memory_value_LBHSU=_widen(self.memory_value_LBHSU, 3, n_source),
                unseen_B11S=_widen(self.unseen_B11S, 3, n_source, -torch.inf),
            )
        if n_cells > self.hidden_BKC.shape[2]:
            self = replace(
                self,
                cell_LBHCW=_widen(self.cell_LBHCW, 3, n_cells),
                hidden_BKC=_widen(self.hidden_BKC, 2, n_cells, -torch.inf),
            )
        return self

    def with_free_cells(self) -> tuple[Cells, Tensor]:
        """For each hypothesis a cell that nobody needs, cell_BK, the first there are."""
        n_kept, n_cells = self.hidden_BKC.shape[1:]
        if n_cells >= n_kept:
            cell_BK = self.free_cells()
            if self.n_sentences == 0 or int(cell_BK.max()) < n_cells:
                return self, cell_BK
        return self.with_more_cells().with_free_cells()

    def free_cells(self) -> Tensor:
        """cell_BK; there must be enough."""
        n, n_kept, n_cells = self.hidden_BKC.shape
        free_BC = torch.arange(n_cells, device=self.length_B.device).expand(n, -1)
        return torch.where(needed(self.hidden_BKC), n_cells, free_BC).topk(n_kept, largest=False).values

    def take(self, cell_BK: Tensor) -> None:
        """Each hypothesis sees its cell from now on, and none of the others'."""
        n, n_kept = cell_BK.shape
        own_KK = torch.eye(n_kept, device=cell_BK.device, dtype=self.hidden_BKC.dtype).log()  # 0 at its own, else -inf
        self.hidden_BKC.scatter_(2, cell_BK[:, None].expand(-1, n_kept, -1), own_KK.expand(n, -1, -1))

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
"""That of the sentences, in each tensor."""


def needed(hidden_BKC: Tensor) -> Tensor:
    """By any hypothesis of the sentence, (B, C)."""
    return hidden_BKC.amax(1) == 0


def _longest(length_B: Tensor) -> int:
    return int(length_B.max()) if len(length_B) else 0


def _end(hidden_BKC: Tensor) -> int:
    """After the last cell that somebody needs."""
    if hidden_BKC.numel() == 0:
        return 0
    cells = (hidden_BKC == 0).flatten(0, 1).any(0).nonzero()
    return int(cells[-1]) + 1 if len(cells) else 0


def in_lanes(n: int) -> int:
    return -(-n // LANES) * LANES


def _widen(x: Tensor, axis: int, n: int, value: float = 0.0) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - axis - 1) + [0, n - x.shape[axis]], value=value)


# Steps


class FastStepper:
    """A model that is in evaluation mode, and stays as it is."""

    def __init__(self, model: Transformer, precision: Precision = "float32") -> None:
        assert why_not(model.config) is None
        self.config, make, embedding = model.config, PRODUCTS[precision], model.embedding
        self.keep = KEEPS[precision]
        self.encoder = [
            (
                Attending.of(layer.self_attention, layer.self_attention_norm, make),
                Thinking.of(layer.feed_forward, layer.feed_forward_norm, make),
            )
            for layer in model.encoder
        ]
        self.decoder = [
            (
                Attending.of(layer.self_attention, layer.self_attention_norm, make),
                Asking.of(layer.memory_attention, layer.memory_attention_norm, make),
                Thinking.of(layer.feed_forward, layer.feed_forward_norm, make),
            )
            for layer in model.decoder
        ]
        self.output = make(embedding.output_projection.T, embedding.output_bias)
        scale = self.config.d_model**0.5
        self.source_VD, self.target_VD = (
            table.detach() * scale for table in (embedding.source_embedding, embedding.target_embedding)
        )
        self.learned = [
            None if table is None else table.detach()
            for table in (embedding.source_positions, embedding.target_positions)
        ]
        # In place where there is such a one.
        own = ACTIVATIONS[self.config.activation]
        self.activation: Callable[[Tensor], Tensor] = torch.relu_ if self.config.activation == "relu" else own
        self.sinusoid_TD = sinusoid(torch.arange(0), self.config.d_model)

    def positions(self, side: int, n: int) -> Tensor:
        """Of the source or the target, n or more."""
        if (learned_TD := self.learned[side]) is not None:
            return learned_TD
        known_TD = self.sinusoid_TD  # looked at once: another thread may put fewer in its place
        if len(known_TD) < n:
            T = torch.arange(max(KNOWN_POSITIONS, 2 * n), device=self.target_VD.device)
            known_TD = self.sinusoid_TD = sinusoid(T, self.config.d_model).to(self.target_VD.dtype)
        return known_TD

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Cells:
        assert prefix_BT is None, "a search forces its prefix, token by token"
        config, (n, n_source) = self.config, source_BS.shape
        hidden_BS = torch.zeros(source_BS.shape, dtype=self.target_VD.dtype, device=source_BS.device)
        unseen_B11S = hidden_BS.masked_fill_(source_BS == config.pad_id, -torch.inf)[:, None, None]
        memory_RD = self.encode(source_BS, unseen_B11S)
        memory_LBHSW = torch.stack(
            [_heads(self.keep(asking.KV(memory_RD)), n, config.n_heads) for _, asking, _ in self.decoder]
        )
        memory_LBHSW = _widen(memory_LBHSW, 3, in_lanes(n_source))
        return Cells(
            memory_key_LBHKS=memory_LBHSW[..., : config.d_k].transpose(3, 4).contiguous(),
            memory_value_LBHSU=memory_LBHSW[..., config.d_k :].contiguous(),
            unseen_B11S=_widen(unseen_B11S, 3, in_lanes(n_source), -torch.inf),
            source_B=(source_BS != config.pad_id).sum(1),
            n_source=in_lanes(n_source),
            cell_LBHCW=memory_LBHSW[:, :, :, :0],
            hidden_BKC=self.target_VD.new_empty(n, 1, 0),
            length_B=torch.zeros(n, dtype=torch.long, device=source_BS.device),
            longest=0,
        )

    def encode(self, source_BS: Tensor, unseen_B11S: Tensor) -> Tensor:
        """The memory of all sentences, position after position."""
        (n, n_source), n_heads, d_k = source_BS.shape, self.config.n_heads, self.config.d_k
        x_RD: Tensor = (self.source_VD[source_BS] + self.positions(0, n_source)[:n_source]).flatten(0, 1)
        for attending, thinking in self.encoder:
            query_RP, key_value_RP = attending.Q_KV(x_RD).split([n_heads * d_k, n_heads * (d_k + self.config.d_v)], 1)
            query_XSK = _heads(query_RP, n, n_heads).flatten(0, 1)
            past_XSW = _heads(self.keep(key_value_RP), n, n_heads).flatten(0, 1)
            head_XSU = attend(query_XSK, past_XSW[..., :d_k].transpose(1, 2), past_XSW[..., d_k:], unseen_B11S)
            x_RD = attending.norm(attending.O(_rows(head_XSU, n)).add_(x_RD))
            x_RD = self._think(thinking, x_RD)
        return x_RD

    def _think(self, thinking: Thinking, x_RD: Tensor) -> Tensor:
        return thinking.norm(thinking.two(self.activation(thinking.one(x_RD))).add_(x_RD))

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Peaks, Cells]:
        state, cell_BK, x_RD = self._begin(last_R, state)
        peaks = self.peaks(self.decode(x_RD, cell_BK, state, state.n_source, state.end))
        return peaks, replace(state, length_B=state.length_B + 1, longest=state.longest + 1)

    def decode(self, x_RD: Tensor, cell_BK: Tensor, state: Cells, n_source: int, end: int) -> Tensor:
        """Through all layers. What is past `n_source` and `end` nobody needs."""
        n, n_cells, n_heads = state.n_sentences, state.hidden_BKC.shape[2], self.config.n_heads
        first_B1H = torch.arange(0, n * n_heads * n_cells, n_cells, device=x_RD.device).view(n, 1, n_heads)
        place_BKH = first_B1H + cell_BK[..., None]
        hidden_BKC, unseen_B11S = state.hidden_BKC[..., :end], state.unseen_B11S[..., :n_source]
        for i, (attending, asking, thinking) in enumerate(self.decoder):
            query_RP, new_RP = attending.Q_KV(x_RD).tensor_split([n_heads * self.config.d_k], 1)
            head_RP = self.look_back(query_RP, new_RP, state.cell_LBHCW[i], place_BKH, hidden_BKC)
            x_RD = attending.norm(attending.O(head_RP).add_(x_RD))
            key_BHKS, value_BHSU = state.memory_key_LBHKS[i], state.memory_value_LBHSU[i]
            head_RP = self.look_at_source(asking.Q(x_RD), key_BHKS, value_BHSU, unseen_B11S)
            x_RD = asking.norm(asking.O(head_RP).add_(x_RD))
            x_RD = self._think(thinking, x_RD)
        return x_RD

    def look_back(
        self, query_RP: Tensor, new_RP: Tensor, cell_BHCW: Tensor, place_BKH: Tensor, hidden_BKC: Tensor
    ) -> Tensor:
        """What is new of each hypothesis goes to its place among all cells; then what each finds in its own, (R, P)."""
        n, n_heads, n_cells, width = cell_BHCW.shape
        cell_BHCW.view(-1, width).index_copy_(0, place_BKH.flatten(), self.keep(new_RP).reshape(-1, width))
        past_XCW, d_k = cell_BHCW.view(-1, n_cells, width)[:, : hidden_BKC.shape[2]], self.config.d_k
        query_XKK = _heads(query_RP, n, n_heads).flatten(0, 1)
        key_XKC, value_XCU = past_XCW[..., :d_k].transpose(1, 2), past_XCW[..., d_k:]
        return _rows(attend(query_XKK, key_XKC, value_XCU, hidden_BKC[:, None]), n)

    def look_at_source(self, query_RP: Tensor, key_BHKS: Tensor, value_BHSU: Tensor, unseen_B11S: Tensor) -> Tensor:
        n, n_source, n_heads = len(key_BHKS), unseen_B11S.shape[3], self.config.n_heads
        key_XKS, value_XSU = key_BHKS.flatten(0, 1)[..., :n_source], value_BHSU.flatten(0, 1)[:, :n_source]
        return _rows(attend(_heads(query_RP, n, n_heads).flatten(0, 1), key_XKS, value_XSU, unseen_B11S), n)

    def _begin(self, last_R: Tensor, state: Cells) -> tuple[Cells, Tensor, Tensor]:
        """Where what is new of each hypothesis goes, cell_BK, which it sees from now on; and it itself, x_RD."""
        state, cell_BK = state.with_free_cells()
        state.take(cell_BK)
        return state, cell_BK, self.embed(last_R, state)

    def embed(self, last_R: Tensor, state: Cells) -> Tensor:
        position_B1D = self.positions(1, state.longest + 1)[state.length_B][:, None]
        x_BKD: Tensor = torch.unflatten(self.target_VD[last_R], 0, state.hidden_BKC.shape[:2]) + position_B1D
        return x_BKD.flatten(0, 1)

    def peaks(self, x_RD: Tensor) -> Peaks:
        n_rows, n = len(x_RD), self.config.target_vocab_size
        ready = self.output.ready(x_RD)
        if n_rows <= FEW_ROWS:
            return Peaks.of(self.output.of(ready))
        blocks = range(0, n, BLOCK)
        logits_JRV = x_RD.new_empty(len(blocks), n_rows, BLOCK)

        def made() -> Iterator[int]:
            for j, first in enumerate(blocks):
                n_block = min(BLOCK, n - first)
                self.output.into(logits_JRV[j, :, :n_block], ready, slice(first, first + n_block))
                if n_block < BLOCK:
                    logits_JRV[j, :, n_block:] = -torch.inf
                yield j

        return Peaks.of_blocks(logits_JRV, n, made())


def _heads(x_RP: Tensor, n_sentences: int, n_heads: int) -> Tensor:
    """(B, H, Q, width of a head)"""
    return x_RP.view(n_sentences, -1, n_heads, x_RP.shape[1] // n_heads).transpose(1, 2)


def _rows(head_XQU: Tensor, n_sentences: int) -> Tensor:
    return torch.unflatten(head_XQU, 0, (n_sentences, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
