"""The decoder one token at a time, faster. Its slow twin is `Transformer.start` and `Transformer.step`.

When hypotheses change places nothing of the past is copied: all that the hypotheses of a sentence ever were lies in the
cells of one cache, and each knows which cells are its own. Weights lie as products want them, in int8 where asked for.
"""

# Axes: L layers, B sentences, K hypotheses of each, R = B K rows, H heads, S source positions, C cells, D = d_model,
# P all heads side by side, V vocabulary, N inputs and F outputs of a product.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from transduce.config import ModelConfig
from transduce.model import ACTIVATIONS, AddAndNorm, Transformer, sinusoid

Precision = Literal["float32", "int8"]
ROOM = 16
"""Steps for which there is room when there is too little."""
KNOWN_POSITIONS = 256
"""Sinusoids made beforehand; more are made as they are needed."""


def why_not(config: ModelConfig) -> str | None:
    """What of this model is not written out here; None where all of it is."""
    unknown = {"model.norm is pre": config.norm == "pre", "attention has a window": config.attention_window is not None}
    return next((name for name, is_so in unknown.items() if is_so), None)


# Products


class Product:
    """x W + b."""

    def __init__(self, W_NF: Tensor, b_F: Tensor | None) -> None:
        self.W_NF, self.b_F = W_NF.detach().contiguous(), None if b_F is None else b_F.detach()

    def __call__(self, x_RN: Tensor) -> Tensor:
        return torch.mm(x_RN, self.W_NF) if self.b_F is None else torch.addmm(self.b_F, x_RN, self.W_NF)


class Int8Product:
    """The same with 8 bits: each column of W and each row of x has a scale of its own, so that what is beside a row
    changes nothing in it."""

    def __init__(self, W_NF: Tensor, b_F: Tensor | None) -> None:
        W_NF = W_NF.detach().float()
        self.scale_F = W_NF.abs().amax(0).clamp(min=1e-12) / 127
        self.W_NF = (W_NF / self.scale_F).round().to(torch.int8).contiguous()
        self.b_F = None if b_F is None else b_F.detach().float()

    def __call__(self, x_RN: Tensor) -> Tensor:
        scale_R1 = x_RN.abs().amax(1, keepdim=True).clamp_(min=1e-12).div_(127)
        found_RF = torch._int_mm((x_RN / scale_R1).round_().to(torch.int8), self.W_NF) * scale_R1
        return found_RF.mul_(self.scale_F) if self.b_F is None else torch.addcmul(self.b_F, found_RF, self.scale_F)


PRODUCTS: dict[Precision, type[Product | Int8Product]] = {"float32": Product, "int8": Int8Product}


class Layer(NamedTuple):
    """Of the decoder."""

    QKV: Product | Int8Product
    self_O: Product | Int8Product
    self_norm: AddAndNorm
    Q: Product | Int8Product
    memory_O: Product | Int8Product
    memory_norm: AddAndNorm
    one: Product | Int8Product
    two: Product | Int8Product
    norm: AddAndNorm


# The state


@dataclass(frozen=True)
class Cells:
    """What steps need of the past. Rows stand sentence by sentence, equally many for each: K."""

    memory_key_LBHSK: Tensor
    memory_value_LBHSU: Tensor
    unseen_B11S: Tensor
    """-inf at padding, else 0."""
    n_source: int
    """No source is longer; what is past it is room."""
    key_LBHCK: Tensor
    value_LBHCU: Tensor
    """The t-th tokens of a sentence's hypotheses are in cells t K and those after it."""
    hidden_BKC: Tensor
    """-inf where a cell is none of the hypothesis's past, else 0."""
    length_B: Tensor
    longest: int

    @property
    def n_sentences(self) -> int:
        return len(self.length_B)

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> Cells:
        """As `DecoderState.select`."""
        n = self.n_sentences if sentences_B is None else len(sentences_B)
        hidden_BKC = self.hidden_BKC.flatten(0, 1)[rows_R].unflatten(0, (n, len(rows_R) // max(n, 1)))
        if sentences_B is None:
            return replace(self, hidden_BKC=hidden_BKC)
        length_B, unseen_B11S = self.length_B[sentences_B], self.unseen_B11S[sentences_B]
        longest, n_source = _longest(length_B), _longest((unseen_B11S == 0).sum(3).flatten())
        n_cells = longest * hidden_BKC.shape[1]
        return Cells(
            memory_key_LBHSK=self.memory_key_LBHSK[:, :, :, :n_source].index_select(1, sentences_B),
            memory_value_LBHSU=self.memory_value_LBHSU[:, :, :, :n_source].index_select(1, sentences_B),
            unseen_B11S=unseen_B11S[..., :n_source].contiguous(),
            n_source=n_source,
            key_LBHCK=self.key_LBHCK[:, :, :, :n_cells].index_select(1, sentences_B),
            value_LBHCU=self.value_LBHCU[:, :, :, :n_cells].index_select(1, sentences_B),
            hidden_BKC=hidden_BKC[..., :n_cells].contiguous(),
            length_B=length_B,
            longest=longest,
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
        has_past, other = other.longest > 0, other._as_wide_as(wide)
        for name, axis in AXES.items():
            if has_past or name not in ("key_LBHCK", "value_LBHCU"):  # what is in cells that nobody sees is all one
                getattr(wide, name).index_copy_(axis, places, getattr(other, name))
        n_source = _longest((wide.unseen_B11S == 0).sum(3).flatten())
        return replace(wide, n_source=n_source, longest=_longest(wide.length_B))

    def _as_wide_as(self, other: Cells) -> Cells:
        """With room for as many positions and cells."""
        return self._with_room(other.unseen_B11S.shape[3], other.hidden_BKC.shape[2])

    def _with_room(self, n_source: int, n_cells: int) -> Cells:
        if n_source > self.unseen_B11S.shape[3]:
            self = replace(
                self,
                memory_key_LBHSK=_widen(self.memory_key_LBHSK, 3, n_source),
                memory_value_LBHSU=_widen(self.memory_value_LBHSU, 3, n_source),
                unseen_B11S=_widen(self.unseen_B11S, 3, n_source, -torch.inf),
            )
        if n_cells > self.hidden_BKC.shape[2]:
            self = replace(
                self,
                key_LBHCK=_widen(self.key_LBHCK, 3, n_cells),
                value_LBHCU=_widen(self.value_LBHCU, 3, n_cells),
                hidden_BKC=_widen(self.hidden_BKC, 2, n_cells, -torch.inf),
            )
        return self

    def with_room_for_a_step(self) -> Cells:
        n_kept = self.hidden_BKC.shape[1]
        if (self.longest + 1) * n_kept <= self.hidden_BKC.shape[2]:
            return self
        return self._with_room(0, (self.longest + ROOM) * n_kept)


AXES = {
    "memory_key_LBHSK": 1, "memory_value_LBHSU": 1, "unseen_B11S": 0, "key_LBHCK": 1, "value_LBHCU": 1,
    "hidden_BKC": 0, "length_B": 0,
}  # fmt: skip
"""That of the sentences, in each tensor."""


def _longest(length_B: Tensor) -> int:
    return int(length_B.max()) if len(length_B) else 0


def _widen(x: Tensor, axis: int, n: int, value: float = 0.0) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - axis - 1) + [0, n - x.shape[axis]], value=value)


# Steps


class FastStepper:
    """A model that is in evaluation mode, and stays as it is."""

    def __init__(self, model: Transformer, precision: Precision = "float32") -> None:
        assert why_not(model.config) is None
        self.model, self.config, make = model, model.config, PRODUCTS[precision]
        self.layers = [
            Layer(
                QKV=make(layer.self_attention.W_QKV.W, layer.self_attention.W_QKV.b),
                self_O=make(layer.self_attention.W_O.W, layer.self_attention.W_O.b),
                self_norm=layer.self_attention_norm,
                Q=make(layer.memory_attention.W_Q.W, layer.memory_attention.W_Q.b),
                memory_O=make(layer.memory_attention.W_O.W, layer.memory_attention.W_O.b),
                memory_norm=layer.memory_attention_norm,
                one=make(layer.feed_forward.W_1.W, layer.feed_forward.W_1.b),
                two=make(layer.feed_forward.W_2.W, layer.feed_forward.W_2.b),
                norm=layer.feed_forward_norm,
            )
            for layer in model.decoder
        ]
        embedding = model.embedding
        self.output = make(embedding.output_projection.T, embedding.output_bias)
        self.table_VD = embedding.target_embedding.detach() * self.config.d_model**0.5
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[self.config.activation]
        self.position_TD = self._positions(KNOWN_POSITIONS)

    def _positions(self, n: int) -> Tensor:
        learned = self.model.embedding.target_positions
        if learned is not None:
            return learned.detach()
        return sinusoid(torch.arange(n, device=self.table_VD.device), self.config.d_model).to(self.table_VD.dtype)

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> Cells:
        assert prefix_BT is None, "a search forces its prefix, token by token"
        state, config = self.model.start(source_BS), self.config
        n, device = len(source_BS), source_BS.device
        unseen_BS = torch.zeros(state.memory_visible_BS.shape, dtype=self.table_VD.dtype, device=device)
        empty = (len(self.layers), n, config.n_heads, 0)
        return Cells(
            memory_key_LBHSK=state.memory_key_LBHSK,
            memory_value_LBHSU=state.memory_value_LBHSU,
            unseen_B11S=unseen_BS.masked_fill_(~state.memory_visible_BS, -torch.inf)[:, None, None],
            n_source=unseen_BS.shape[1],
            key_LBHCK=self.table_VD.new_empty(*empty, config.d_k),
            value_LBHCU=self.table_VD.new_empty(*empty, config.d_v),
            hidden_BKC=self.table_VD.new_empty(n, 1, 0),
            length_B=torch.zeros(n, dtype=torch.long, device=device),
            longest=0,
        )

    @torch.no_grad()
    def step(self, last_R: Tensor, state: Cells) -> tuple[Tensor, Cells]:
        state = state.with_room_for_a_step()
        n_sentences, n_kept, n_heads = state.n_sentences, state.hidden_BKC.shape[1], self.config.n_heads
        end, B1 = (state.longest + 1) * n_kept, torch.arange(n_sentences, device=last_R.device)[:, None]
        cell_BK = state.length_B[:, None] * n_kept + torch.arange(n_kept, device=last_R.device)
        own_KK = torch.eye(n_kept, device=last_R.device, dtype=state.hidden_BKC.dtype).log()  # 0 at its own, else -inf
        state.hidden_BKC.scatter_(2, cell_BK[:, None].expand(-1, n_kept, -1), own_KK.expand(n_sentences, -1, -1))
        hidden_B1KC, unseen_B11S = state.hidden_BKC[:, None, :, :end], state.unseen_B11S[..., : state.n_source]
        if state.longest >= len(self.position_TD):
            self.position_TD = self._positions(2 * state.longest)
        x_BKD = self.table_VD[last_R].view(n_sentences, n_kept, -1) + self.position_TD[state.length_B][:, None]
        x_RD = x_BKD.flatten(0, 1)

        def heads(x_RP: Tensor) -> Tensor:
            return x_RP.view(n_sentences, n_kept, n_heads, -1).transpose(1, 2)

        def rows(head_BHKU: Tensor) -> Tensor:
            return head_BHKU.transpose(1, 2).reshape(len(last_R), -1)

        widths = [n_heads * width for width in (self.config.d_k, self.config.d_k, self.config.d_v)]
        for i, layer in enumerate(self.layers):
            query, key, value = (heads(part) for part in layer.QKV(x_RD).split(widths, 1))
            key_BHCK, value_BHCU = state.key_LBHCK[i], state.value_LBHCU[i]
            key_BHCK[B1, :, cell_BK], value_BHCU[B1, :, cell_BK] = key.transpose(1, 2), value.transpose(1, 2)
            head = F.scaled_dot_product_attention(query, key_BHCK[:, :, :end], value_BHCU[:, :, :end], hidden_B1KC)
            x_RD = layer.self_norm(x_RD + layer.self_O(rows(head)))
            head = F.scaled_dot_product_attention(
                heads(layer.Q(x_RD)),
                state.memory_key_LBHSK[i, :, :, : state.n_source],
                state.memory_value_LBHSU[i, :, :, : state.n_source],
                unseen_B11S,
            )
            x_RD = layer.memory_norm(x_RD + layer.memory_O(rows(head)))
            x_RD = layer.norm(x_RD + layer.two(self.activation(layer.one(x_RD))))
        state = replace(state, length_B=state.length_B + 1, longest=state.longest + 1)
        return self.output(x_RD), state
