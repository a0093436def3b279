"""The paper in PyTorch: the same names and the same order as `reference.py`, and fast. Equation 1 is in `ops.py`.

Modules hold weights and nothing else. Decoding state belongs to the caller: `start` makes it, `step` takes and
returns it. Attention weights come back from the same call when asked for.
"""

# Axes: B sentences, S source positions, T target positions, V vocabulary, L layers.
# D = d_model, F = d_ff, I is half of D: one for each pair of sine and cosine.
# In attention: H heads, Q queries, M attended positions, K = d_k, U = d_v, P all heads side by side.
# In search: R rows; the rows of a sentence stand together, and every sentence has the same number of them.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transduce.attention import Visible, attend, attend_fast
from transduce.config import ModelConfig
from transduce.errors import DataError, ModelFolderError


class Encoded(NamedTuple):
    memory_BSD: Tensor
    token_BS: Tensor
    """Which of the memory's positions are tokens, not padding."""
    attention_LBHSS: Tensor | None


class Attention(NamedTuple):
    """Attention weights, exact, layer by layer."""

    encoder_LBHSS: Tensor
    decoder_LBHTT: Tensor
    memory_LBHTS: Tensor


class Output(NamedTuple):
    logits_BTV: Tensor
    attention: Attention | None


class Transformer(nn.Module):
    """Figure 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_encoder_layers))
        decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        # A ModuleList would tell the type checker of modules, not of layers.
        self.encoder, self.decoder = cast(Sequence[EncoderLayer], encoder), cast(Sequence[DecoderLayer], decoder)

        def final_norm() -> nn.Module:
            # Not in the paper: under pre-norm nothing else would normalise the sum of all residuals.
            return nn.LayerNorm(config.d_model, eps=config.norm_eps) if config.norm == "pre" else nn.Identity()

        self.encoder_norm, self.decoder_norm = final_norm(), final_norm()
        self.initialise()

    def forward(self, source_BS: Tensor, target_in_BT: Tensor, with_attention: bool = False) -> Output:
        """Logits of the token that follows each position of target_in. Padding stands to the right of the tokens."""
        encoded = self.encode(source_BS, with_attention)
        x_BTD, weights = self.decode(target_in_BT, encoded, with_attention)
        logits_BTV = self.embedding.logits(x_BTD)
        if encoded.attention_LBHSS is None or weights is None:
            return Output(logits_BTV, None)
        return Output(logits_BTV, Attention(encoded.attention_LBHSS, *weights))

    # 3.1 Encoder and decoder stacks

    def encode(self, source_BS: Tensor, with_attention: bool = False) -> Encoded:
        token_BS = source_BS != self.config.pad_id
        visible = Visible(token_BS[:, None], window=self.config.attention_window)
        x_BSD = self.embedding.source(source_BS)
        weights = []
        for layer in self.encoder:
            x_BSD, weight_BHSS = layer(x_BSD, visible, with_attention)
            weights.append(weight_BHSS)
        return Encoded(self.encoder_norm(x_BSD), token_BS, torch.stack(weights) if with_attention else None)

    def decode(
        self, target_in_BT: Tensor, encoded: Encoded, with_attention: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The decoder's output before the projection to the vocabulary, and its attention weights of both kinds."""
        # Padding stands to the right of every token, so looking ahead is all that must be forbidden here.
        visible = Visible(look_ahead=False, window=self.config.attention_window)
        x_BTD = self.embedding.target(target_in_BT)
        weights = []
        for layer in self.decoder:
            key_BHSK, value_BHSU = layer.memory_attention.project_memory(encoded.memory_BSD)
            memory = Attended(key_BHSK, value_BHSU, Visible(encoded.token_BS[:, None]))
            x_BTD, self_BHTT, memory_BHTS = layer(x_BTD, visible, memory, with_attention=with_attention)
            weights.append((self_BHTT, memory_BHTS))
        x_BTD = self.decoder_norm(x_BTD)
        if not with_attention:
            return x_BTD, None
        decoder_LBHTT, memory_LBHTS = (torch.stack(kind) for kind in zip(*weights, strict=True))
        return x_BTD, (decoder_LBHTT, memory_LBHTS)

    # Decoding one token at a time

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> DecoderState:
        """One row for each sentence. `prefix_BT`: what stands before the token that the first `step` is given,
        its start mark included; shorter rows are padded on the right."""
        assert not self.training, "dropout would make decoding random: call eval() first"
        encoded = self.encode(source_BS)
        memory = [layer.memory_attention.project_memory(encoded.memory_BSD) for layer in self.decoder]
        memory_key_LBHSK, memory_value_LBHSU = (torch.stack(kind) for kind in zip(*memory, strict=True))
        config, n_rows, n_layers = self.config, len(source_BS), len(self.decoder)
        state = DecoderState(
            memory_key_LBHSK=memory_key_LBHSK,
            memory_value_LBHSU=memory_value_LBHSU,
            memory_visible_BS=encoded.token_BS,
            key_LRHTK=memory_key_LBHSK.new_empty(n_layers, n_rows, config.n_heads, 0, config.d_k),
            value_LRHTU=memory_value_LBHSU.new_empty(n_layers, n_rows, config.n_heads, 0, config.d_v),
            length_R=torch.zeros(n_rows, dtype=torch.long, device=source_BS.device),
            longest=0,
        )
        if prefix_BT is None or prefix_BT.shape[1] == 0:
            return state
        _, state = self._advance(prefix_BT, state)
        # A start mark counts even where it is the padding id, as in some models of others.
        place_T = torch.arange(1, prefix_BT.shape[1] + 1, device=prefix_BT.device)
        length_R = (place_T * (prefix_BT != config.pad_id)).amax(1).clamp(min=1)
        return replace(state, length_R=length_R)

    @torch.no_grad()
    def step(self, last_R: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Logits of the token after `last_R`. Consumes `state`: its tensors may be written to."""
        x_R1D, state = self._advance(last_R[:, None], state)
        return self.embedding.logits(x_R1D[:, 0]), state

    def _advance(self, ids_RT: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        n_new = ids_RT.shape[1]
        state = state.with_room_for(state.longest + n_new)
        position_RT = state.length_R[:, None] + torch.arange(n_new, device=ids_RT.device)
        # Each row has a length of its own, so what is visible is told row by row.
        offset_RTM = torch.arange(state.key_LRHTK.shape[3], device=ids_RT.device) - position_RT[..., None]
        visible_RTM = offset_RTM <= 0
        if self.config.attention_window is not None:
            visible_RTM = visible_RTM & (-2 * offset_RTM <= self.config.attention_window)
        memory_visible = Visible(state.memory_visible_BS[:, None])
        x_RTD = self.embedding.target_at(ids_RT, position_RT, state.longest + n_new)
        for i, layer in enumerate(self.decoder):
            memory = Attended(state.memory_key_LBHSK[i], state.memory_value_LBHSU[i], memory_visible)
            past = Past(state.key_LRHTK[i], state.value_LRHTU[i], position_RT)
            x_RTD, _, _ = layer(x_RTD, Visible(visible_RTM), memory, past)
        state = replace(state, length_R=state.length_R + n_new, longest=state.longest + n_new)
        return self.decoder_norm(x_RTD), state

    # Weights

    def weights(self) -> dict[str, Tensor]:
        """Every weight under the paper's name, as a view into the packed matrix that holds it; tied ones once."""
        named = {}
        for path, module in self.named_modules():
            if isinstance(module, Projection):
                named.update({f"{path.rpartition('.')[0]}.{name}": W for name, W in module.weights().items()})
            elif isinstance(module, nn.LayerNorm):
                named.update({f"{path}.gain": module.weight.detach(), f"{path}.bias": module.bias.detach()})
            elif isinstance(module, Embedding):
                named.update({name: W.detach() for name, W in module.named_parameters()})
        return named

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies `weights`, named as `weights()` names them."""
        own = self.weights()  # all are checked before the first is copied
        if wrong := own.keys() ^ weights.keys():
            name = min(wrong)
            what = "lacks" if name in own else "has an unknown"
            raise ModelFolderError(f"weights file {what} tensor {name!r}: it belongs to another configuration")
        for name, W in own.items():
            if weights[name].shape != W.shape:
                found, wanted = list(weights[name].shape), list(W.shape)
                raise ModelFolderError(f"tensor {name!r} has shape {found}, the configuration wants {wanted}")
        for name, W in own.items():
            W.copy_(weights[name])

    def initialise(self) -> None:
        """Not stated by the paper: Xavier-uniform for each W, as its authors' code, and N(0, 1 / d_model) for
        tables of embeddings, so that they have unit variance once scaled by sqrt(d_model). W_Q, W_K and W_V are
        smaller by sqrt(2), as if drawn as one matrix: so the first steps learn more (`time_to_loss`)."""
        for name, W in self.weights().items():
            kind = name.rpartition(".")[2]
            if kind.startswith("W_"):
                nn.init.xavier_uniform_(W, gain=2**-0.5 if kind in ("W_Q", "W_K", "W_V") else 1.0)
            elif kind.startswith("b_") or kind in ("bias", "output_bias"):
                nn.init.zeros_(W)
            elif kind == "gain":
                nn.init.ones_(W)
            else:
                nn.init.normal_(W, std=self.config.d_model**-0.5)


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.self_attention_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = AddAndNorm(config)

    def forward(self, x_BSD: Tensor, visible: Visible, with_attention: bool) -> tuple[Tensor, Tensor | None]:
        query, key, value = self.self_attention.project(self.self_attention_norm.before(x_BSD))
        attended_BSD, weight_BHSS = self.self_attention(query, Attended(key, value, visible), with_attention)
        x_BSD = self.self_attention_norm.after(x_BSD, attended_BSD)
        x_BSD = self.feed_forward_norm.after(x_BSD, self.feed_forward(self.feed_forward_norm.before(x_BSD)))
        return x_BSD, weight_BHSS


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.self_attention_norm = AddAndNorm(config)
        self.memory_attention = MemoryAttention(config)
        self.memory_attention_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = AddAndNorm(config)

    def forward(
        self, x_RTD: Tensor, visible: Visible, memory: Attended, past: Past | None = None, with_attention: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = self.self_attention.project(self.self_attention_norm.before(x_RTD))
        if past is not None:
            key, value = past.extend(key, value)
        attended_RTD, self_RHTM = self.self_attention(query, Attended(key, value, visible), with_attention)
        x_RTD = self.self_attention_norm.after(x_RTD, attended_RTD)

        # All rows of a sentence ask its one memory: to attention they are just more queries, Q = rows of one x T.
        n_sentences, (n_rows, n_target, d_model) = len(memory.key_BHMK), x_RTD.shape
        n_queries = n_rows * n_target // max(n_sentences, 1)
        x_BQD = self.memory_attention_norm.before(x_RTD).reshape(n_sentences, n_queries, d_model)
        query = self.memory_attention.project_query(x_BQD)
        attended_BQD, memory_BHQS = self.memory_attention(query, memory, with_attention)
        x_RTD = self.memory_attention_norm.after(x_RTD, attended_BQD.reshape(x_RTD.shape))

        x_RTD = self.feed_forward_norm.after(x_RTD, self.feed_forward(self.feed_forward_norm.before(x_RTD)))
        return x_RTD, self_RHTM, memory_BHQS


class AddAndNorm(nn.LayerNorm):
    """LayerNorm(x + Sublayer(x)), the "Add & Norm" of Figure 1: what comes before and after the sub-layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, eps=config.norm_eps)
        self.pre, self.dropout = config.norm == "pre", config.dropout

    def before(self, x: Tensor) -> Tensor:
        return self.forward(x) if self.pre else x

    def after(self, x: Tensor, sub_layer_x: Tensor) -> Tensor:
        x = x + F.dropout(sub_layer_x, self.dropout, self.training)
        return x if self.pre else self.forward(x)


# 3.2 Attention


class Attended(NamedTuple):
    """What queries may attend to."""

    key_BHMK: Tensor
    value_BHMU: Tensor
    visible: Visible


class MultiHeadAttention(nn.Module):
    """3.2.2: Concat(head_1, ..., head_h) W_O. The two kinds below differ in where queries and keys come from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.dropout = config.n_heads, config.attention_dropout
        self.W_O = Projection(config.n_heads * config.d_v, config.attention_bias, O=config.d_model)

    def forward(self, query_BHQK: Tensor, attended: Attended, with_attention: bool) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        weight_BHQM = None
        if with_attention:
            head_BHQU, weight_BHQM = attend(query_BHQK, *attended, dropout)
        else:
            head_BHQU = attend_fast(query_BHQK, *attended, dropout)
        return self.W_O(head_BHQU.transpose(1, 2).flatten(2)), weight_BHQM

    def split_heads(self, x_BTP: Tensor) -> Tensor:
        return torch.unflatten(x_BTP, -1, (self.n_heads, x_BTP.shape[-1] // self.n_heads)).transpose(1, 2)


class SelfAttention(MultiHeadAttention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_keys, n_values = config.n_heads * config.d_k, config.n_heads * config.d_v
        self.W_QKV = Projection(config.d_model, config.attention_bias, Q=n_keys, K=n_keys, V=n_values)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = map(self.split_heads, self.W_QKV.parts(x_BTD))
        return query, key, value


class MemoryAttention(MultiHeadAttention):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_keys, n_values = config.n_heads * config.d_k, config.n_heads * config.d_v
        self.W_Q = Projection(config.d_model, config.attention_bias, Q=n_keys)
        self.W_KV = Projection(config.d_model, config.attention_bias, K=n_keys, V=n_values)

    def project_query(self, x_BQD: Tensor) -> Tensor:
        return self.split_heads(self.W_Q(x_BQD))

    def project_memory(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        key, value = map(self.split_heads, self.W_KV.parts(memory_BSD))
        return key, value


class Projection(nn.Module):
    """x W + b. Matrices that share their input lie side by side, so that one product does for all.

    Projection(d_in, bias, Q=64, K=64) holds W_Q and W_K, and b_Q and b_K: so the weights file names them.
    """

    def __init__(self, d_in: int, bias: bool, **widths: int) -> None:
        super().__init__()
        self.widths = widths
        d_out = sum(widths.values())
        self.W = nn.Parameter(torch.empty(d_in, d_out))
        self.b = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.W.T, self.b)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(self.forward(x), list(self.widths.values()), dim=-1)

    def weights(self) -> dict[str, Tensor]:
        """W_Q, W_K, ... and b_Q, ..., as views."""
        packed = {"W": self.W.detach()} | ({} if self.b is None else {"b": self.b.detach()})
        return {
            f"{kind}_{name}": part
            for kind, matrix in packed.items()
            for name, part in zip(self.widths, torch.split(matrix, list(self.widths.values()), dim=-1), strict=True)
        }


# 3.3 Position-wise feed-forward networks


class FeedForward(nn.Module):
    """Equation 2: max(0, x W_1 + b_1) W_2 + b_2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[config.activation], config.ffn_dropout
        self.W_1 = Projection(config.d_model, True, **{"1": config.d_ff})
        self.W_2 = Projection(config.d_ff, True, **{"2": config.d_model})

    def forward(self, x_BTD: Tensor) -> Tensor:
        hidden_BTF = self.activation(self.W_1(x_BTD))
        output_BTD: Tensor = self.W_2(F.dropout(hidden_BTF, self.dropout, self.training))
        return output_BTD


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


# 3.4 Embeddings and softmax


class Embedding(nn.Module):
    """Tokens to vectors and back. A tied matrix is one parameter; the weights file has it under its first name."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

        def table(n_rows: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(n_rows, config.d_model))

        tied = config.tied_embeddings
        self.source_embedding = table(config.source_vocab_size)
        self.target_embedding = self.source_embedding if tied == "three" else table(config.target_vocab_size)
        self.output_projection = self.target_embedding if tied != "none" else table(config.target_vocab_size)
        self.output_bias = nn.Parameter(torch.empty(config.target_vocab_size)) if config.output_bias else None
        learned = config.positions == "learned"
        self.source_positions = table(config.max_positions) if learned else None
        self.target_positions = table(config.max_positions) if learned else None

    def source(self, source_BS: Tensor) -> Tensor:
        n = source_BS.shape[1]
        position_S = torch.arange(n, device=source_BS.device)
        return self._embed(source_BS, self.source_embedding, position_S, n, self.source_positions)

    def target(self, target_BT: Tensor) -> Tensor:
        n = target_BT.shape[1]
        return self.target_at(target_BT, torch.arange(n, device=target_BT.device), n)

    def target_at(self, target_RT: Tensor, position: Tensor, longest: int) -> Tensor:
        """Rows that do not all begin at position 0. `position`, (R, T) or (T,), is below `longest` throughout."""
        return self._embed(target_RT, self.target_embedding, position, longest, self.target_positions)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """The pre-softmax linear transformation."""
        return F.linear(x_BTD, self.output_projection, self.output_bias)

    def _embed(
        self, ids_BT: Tensor, table_VD: Tensor, position: Tensor, longest: int, learned: Tensor | None
    ) -> Tensor:
        if learned is None:
            position_x = sinusoid(position, self.config.d_model).to(table_VD.dtype)
        elif longest <= len(learned):
            position_x = learned[position]
        else:
            raise DataError(
                f"a text has {longest} tokens, learned positions end at {len(learned)}: "
                "split it, or train with model.positions=sinusoid or a larger model.max_positions"
            )
        x_BTD = F.embedding(ids_BT, table_VD) * math.sqrt(self.config.d_model) + position_x
        return F.dropout(x_BTD, self.config.dropout, self.training)


# 3.5 Positional encoding


def sinusoid(position: Tensor, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same. Adds an axis to `position`."""
    # In float32 the angle at position 10,000 is off by 1e-3. Apple's GPUs know no float64.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    even_I = torch.arange(0, d_model, 2, dtype=dtype, device=position.device)
    angle = position[..., None] / 10000 ** (even_I / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


# The cache, which belongs to the caller


class Past(NamedTuple):
    """One layer's part of the cache, and where the new tokens of each row go."""

    key_RHTK: Tensor
    value_RHTU: Tensor
    position_RQ: Tensor

    def extend(self, key_RHQK: Tensor, value_RHQU: Tensor) -> tuple[Tensor, Tensor]:
        """Writes in place, and returns all keys and values so far."""
        assert key_RHQK.dtype == self.key_RHTK.dtype, "start and step ran in different precisions"
        place_RHQ1 = self.position_RQ[:, None, :, None].expand(-1, key_RHQK.shape[1], -1, 1)
        self.key_RHTK.scatter_(2, place_RHQ1.expand_as(key_RHQK), key_RHQK)
        self.value_RHTU.scatter_(2, place_RHQ1.expand_as(value_RHQU), value_RHQU)
        return self.key_RHTK, self.value_RHTU


@dataclass(frozen=True)
class DecoderState:
    """What `step` needs of the past: memory held per sentence, keys and values per row, a length for each row."""

    memory_key_LBHSK: Tensor
    memory_value_LBHSU: Tensor
    memory_visible_BS: Tensor
    key_LRHTK: Tensor
    value_LRHTU: Tensor
    length_R: Tensor
    longest: int
    """No row is longer. Known without asking the device."""

    @property
    def n_rows(self) -> int:
        return len(self.length_R)

    @property
    def n_sentences(self) -> int:
        return len(self.memory_visible_BS)

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> DecoderState:
        """The state whose row i continues row `rows_R[i]`.

        Rows stay sentence by sentence, equally many for each: (0, 0, 1, 1) makes two rows of each of two. Without
        `sentences_B` the sentences stay, their memory is not touched and the device is not waited for. With it, only
        those stay, in that order, and cache and memory are cut to the longest row and source left: else, with
        sentences that come and go, they would grow for ever.
        """
        length_R = self.length_R[rows_R]
        if sentences_B is None:
            assert len(rows_R) % max(self.n_sentences, 1) == 0, "sentences differ in number of rows"
            key_LRHTK = self.key_LRHTK.index_select(1, rows_R)
            value_LRHTU = self.value_LRHTU.index_select(1, rows_R)
            return replace(self, key_LRHTK=key_LRHTK, value_LRHTU=value_LRHTU, length_R=length_R)
        assert len(rows_R) * self.n_sentences == self.n_rows * len(sentences_B), "sentences differ in number of rows"
        longest = int(length_R.max()) if len(length_R) else 0
        room = _room_for(longest)
        visible_BS = self.memory_visible_BS[sentences_B]
        n_source = int(visible_BS.sum(1).max()) if len(sentences_B) else 0
        return DecoderState(
            memory_key_LBHSK=self.memory_key_LBHSK[:, :, :, :n_source].index_select(1, sentences_B),
            memory_value_LBHSU=self.memory_value_LBHSU[:, :, :, :n_source].index_select(1, sentences_B),
            memory_visible_BS=visible_BS[:, :n_source],
            key_LRHTK=self.key_LRHTK[:, :, :, :room].index_select(1, rows_R),
            value_LRHTU=self.value_LRHTU[:, :, :, :room].index_select(1, rows_R),
            length_R=length_R,
            longest=longest,
        )

    def join(self, other: DecoderState) -> DecoderState:
        """Both, this one's sentences and rows first. A longer source or a longer past widens the other's."""
        assert self.n_rows * other.n_sentences == other.n_rows * self.n_sentences, "sentences differ in number of rows"
        n_source = max(self.memory_visible_BS.shape[1], other.memory_visible_BS.shape[1])
        n_past = max(self.key_LRHTK.shape[3], other.key_LRHTK.shape[3])

        def both(a: Tensor, b: Tensor, n: int) -> Tensor:
            return torch.cat([_widen(a, 3, n), _widen(b, 3, n)], dim=1)

        return DecoderState(
            memory_key_LBHSK=both(self.memory_key_LBHSK, other.memory_key_LBHSK, n_source),
            memory_value_LBHSU=both(self.memory_value_LBHSU, other.memory_value_LBHSU, n_source),
            memory_visible_BS=torch.cat(
                [_widen(self.memory_visible_BS, 1, n_source), _widen(other.memory_visible_BS, 1, n_source)]
            ),
            key_LRHTK=both(self.key_LRHTK, other.key_LRHTK, n_past),
            value_LRHTU=both(self.value_LRHTU, other.value_LRHTU, n_past),
            length_R=torch.cat([self.length_R, other.length_R]),
            longest=max(self.longest, other.longest),
        )

    def with_room_for(self, n: int) -> DecoderState:
        if n <= self.key_LRHTK.shape[3]:
            return self
        room = _room_for(n)
        return replace(self, key_LRHTK=_widen(self.key_LRHTK, 3, room), value_LRHTU=_widen(self.value_LRHTU, 3, room))


def _room_for(n: int) -> int:
    """A power of two, so that shapes are few and copies rare."""
    return int(max(16, 2 ** math.ceil(math.log2(max(n, 1)))))


def _widen(x: Tensor, axis: int, n: int) -> Tensor:
    """Zeros, or False, at the end of `axis`, up to length n."""
    return F.pad(x, [0, 0] * (x.ndim - axis - 1) + [0, n - x.shape[axis]])
