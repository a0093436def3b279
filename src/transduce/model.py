"""The paper in PyTorch, fast, with the names and the order of `reference.py`. Equation 1 is in `attention.py`.

Modules hold weights and nothing else. The state of decoding belongs to the caller: `start` creates it, `step` takes it
and returns the next one. `with_attention=True` also returns the attention weights.
"""

# Axes: B sentences, S source positions, T target positions, V vocabulary, L layers.
# D = d_model, F = d_ff, I = d_model / 2, one for each pair of sine and cosine.
# In attention: H heads, Q queries, M attended positions, K = d_k, U = d_v, P all heads side by side.
# In search: R rows (hypotheses). Rows of one sentence are adjacent, and every sentence has the same number of rows.

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
    """The output of the encoder."""

    memory_BSD: Tensor
    is_token_BS: Tensor
    """True for tokens, False for padding."""
    attention_LBHSS: Tensor | None


class Attention(NamedTuple):
    """The attention weights of all layers, computed as in equation 1, before dropout."""

    encoder_LBHSS: Tensor
    decoder_LBHTT: Tensor
    memory_LBHTS: Tensor


class Output(NamedTuple):
    logits_BTV: Tensor
    attention: Attention | None


class Transformer(nn.Module):
    """The model of Figure 1.

    >>> import torch
    >>> from transduce import Transformer, tiny
    >>> config = tiny().model
    >>> model = Transformer(config).eval()
    >>> source_BS = torch.tensor([[5, 6, config.eos_id]])
    >>> target_in_BT = torch.tensor([[config.bos_id, 7, 8, 9]])
    >>> model(source_BS, target_in_BT).logits_BTV.shape  # one sentence, four positions, 8000 subwords
    torch.Size([1, 4, 8000])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_encoder_layers))
        decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_decoder_layers))
        # nn.ModuleList is typed as a list of nn.Module; the cast gives the type checker the class of the layers.
        self.encoder, self.decoder = cast(Sequence[EncoderLayer], encoder), cast(Sequence[DecoderLayer], decoder)

        def final_norm() -> nn.Module:
            # Not in the paper: with pre-norm, nothing else normalises the sum of all residual connections.
            return nn.LayerNorm(config.d_model, eps=config.norm_eps) if config.norm == "pre" else nn.Identity()

        self.encoder_norm, self.decoder_norm = final_norm(), final_norm()
        self.initialise()

    def forward(self, source_BS: Tensor, target_in_BT: Tensor, with_attention: bool = False) -> Output:
        """Logits of the token that follows each position of `target_in_BT`. Padding is to the right of the tokens."""
        encoded = self.encode(source_BS, with_attention)
        x_BTD, weights = self.decode(target_in_BT, encoded, with_attention)
        logits_BTV = self.embedding.logits(x_BTD)
        if encoded.attention_LBHSS is None or weights is None:
            return Output(logits_BTV, None)
        return Output(logits_BTV, Attention(encoded.attention_LBHSS, *weights))

    # 3.1 Encoder and decoder stacks

    def encode(self, source_BS: Tensor, with_attention: bool = False) -> Encoded:
        """The output of the encoder, and its attention weights if `with_attention` is True."""
        is_token_BS = source_BS != self.config.pad_id
        visible = Visible(is_token_BS[:, None], window=self.config.attention_window)
        x_BSD = self.embedding.source(source_BS)
        weights = []
        for layer in self.encoder:
            x_BSD, weight_BHSS = layer(x_BSD, visible, with_attention)
            weights.append(weight_BHSS)
        return Encoded(self.encoder_norm(x_BSD), is_token_BS, torch.stack(weights) if with_attention else None)

    def decode(
        self, target_in_BT: Tensor, encoded: Encoded, with_attention: bool = False
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The output of the decoder before the projection to the vocabulary, and decoder_LBHTT and memory_LBHTS."""
        # Padding is to the right of every token, so a token that does not look ahead does not see padding either.
        visible = Visible(look_ahead=False, window=self.config.attention_window)
        x_BTD = self.embedding.target(target_in_BT)
        weights = []
        for layer in self.decoder:
            key_BHSK, value_BHSU = layer.memory_attention.project_memory(encoded.memory_BSD)
            memory = Attended(key_BHSK, value_BHSU, Visible(encoded.is_token_BS[:, None]))
            x_BTD, self_BHTT, memory_BHTS = layer(x_BTD, visible, memory, with_attention=with_attention)
            weights.append((self_BHTT, memory_BHTS))
        x_BTD = self.decoder_norm(x_BTD)
        if not with_attention:
            return x_BTD, None
        decoder_LBHTT, memory_LBHTS = (torch.stack(layers) for layers in zip(*weights, strict=True))
        return x_BTD, (decoder_LBHTT, memory_LBHTS)

    # Decoding, one token at a time

    @torch.no_grad()
    def start(self, source_BS: Tensor, prefix_BT: Tensor | None = None) -> DecoderState:
        """Encode the sources and return a state with one row for each sentence.

        `prefix_BT` holds the target tokens, start mark first, that come before the token of the first `step`. Shorter
        prefixes are padded on the right.
        """
        assert not self.training, "dropout would make decoding random: call eval() first"
        encoded = self.encode(source_BS)
        memory = [layer.memory_attention.project_memory(encoded.memory_BSD) for layer in self.decoder]
        memory_key_LBHSK, memory_value_LBHSU = (torch.stack(layers) for layers in zip(*memory, strict=True))
        config, n_rows, n_layers = self.config, len(source_BS), len(self.decoder)
        state = DecoderState(
            memory_key_LBHSK=memory_key_LBHSK,
            memory_value_LBHSU=memory_value_LBHSU,
            memory_visible_BS=encoded.is_token_BS,
            key_LRHTK=memory_key_LBHSK.new_empty(n_layers, n_rows, config.n_heads, 0, config.d_k),
            value_LRHTU=memory_value_LBHSU.new_empty(n_layers, n_rows, config.n_heads, 0, config.d_v),
            length_R=torch.zeros(n_rows, dtype=torch.long, device=source_BS.device),
            longest=0,
        )
        if prefix_BT is None or prefix_BT.shape[1] == 0:
            return state
        _, state = self._advance(prefix_BT, state)
        # The start mark counts even if it has the id of padding, as in Marian models.
        length_T = torch.arange(1, prefix_BT.shape[1] + 1, device=prefix_BT.device)
        length_R = (length_T * (prefix_BT != config.pad_id)).amax(1).clamp(min=1)
        return replace(state, length_R=length_R)

    @torch.no_grad()
    def step(self, last_R: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Logits of the token after `last_R`, and the next state. Do not use `state` again: `step` may overwrite it."""
        x_R1D, state = self._advance(last_R[:, None], state)
        return self.embedding.logits(x_R1D[:, 0]), state

    def _advance(self, ids_RT: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The output of the decoder for new tokens `ids_RT`, and the state with their keys and values."""
        n_new = ids_RT.shape[1]
        state = state.with_capacity(state.longest + n_new)
        position_RT = state.length_R[:, None] + torch.arange(n_new, device=ids_RT.device)
        # Rows differ in length, so each row has its own visible positions.
        offset_RTM = torch.arange(state.key_LRHTK.shape[3], device=ids_RT.device) - position_RT[..., None]
        visible_RTM = offset_RTM <= 0
        if self.config.attention_window is not None:
            visible_RTM = visible_RTM & (-2 * offset_RTM <= self.config.attention_window)
        memory_visible = Visible(state.memory_visible_BS[:, None])
        x_RTD = self.embedding.target_at(ids_RT, position_RT, state.longest + n_new)
        for i, layer in enumerate(self.decoder):
            memory = Attended(state.memory_key_LBHSK[i], state.memory_value_LBHSU[i], memory_visible)
            cache = LayerCache(state.key_LRHTK[i], state.value_LRHTU[i], position_RT)
            x_RTD, _, _ = layer(x_RTD, Visible(visible_RTM), memory, cache)
        state = replace(state, length_R=state.length_R + n_new, longest=state.longest + n_new)
        return self.decoder_norm(x_RTD), state

    # Weights

    def weights(self) -> dict[str, Tensor]:
        """All weights by the paper's names. Each is a view into a parameter; tied weights appear once."""
        weights = {}
        for path, module in self.named_modules():
            if isinstance(module, Projection):
                weights.update({f"{path.rpartition('.')[0]}.{name}": W for name, W in module.weights().items()})
            elif isinstance(module, nn.LayerNorm):
                weights.update({f"{path}.gain": module.weight.detach(), f"{path}.bias": module.bias.detach()})
            elif isinstance(module, Embedding):
                weights.update({name: W.detach() for name, W in module.named_parameters()})
        return weights

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the model. The names are those of `weights()`."""
        current = self.weights()
        # All names and shapes are checked before the first tensor is copied.
        if differing := current.keys() ^ weights.keys():
            name = min(differing)
            fault = "lacks" if name in current else "has an unknown"
            raise ModelFolderError(f"weights file {fault} tensor {name!r}: it belongs to another configuration")
        for name, W in current.items():
            if (shape := weights[name].shape) != W.shape:
                raise ModelFolderError(
                    f"tensor {name!r} has shape {list(shape)}, the configuration requires {list(W.shape)}"
                )
        for name, W in current.items():
            W.copy_(weights[name])

    def initialise(self) -> None:
        """Draw random weights. The paper does not state how.

        Each W is Xavier-uniform, as in the authors' code. Embedding tables are N(0, 1 / d_model), so that embeddings
        have unit variance after they are scaled by sqrt(d_model). W_Q, W_K and W_V are smaller by sqrt(2), as if they
        were drawn as one matrix: with it the loss falls faster in the first steps (benchmarks/time_to_loss.py).
        """
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
    """Two sub-layers: self-attention, then a feed-forward network."""

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
    """Three sub-layers: self-attention, attention to the memory (the output of the encoder), a feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.self_attention_norm = AddAndNorm(config)
        self.memory_attention = MemoryAttention(config)
        self.memory_attention_norm = AddAndNorm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = AddAndNorm(config)

    def forward(
        self,
        x_RTD: Tensor,
        visible: Visible,
        memory: Attended,
        cache: LayerCache | None = None,
        with_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        query, key, value = self.self_attention.project(self.self_attention_norm.before(x_RTD))
        if cache is not None:
            key, value = cache.extend(key, value)
        attended_RTD, self_RHTM = self.self_attention(query, Attended(key, value, visible), with_attention)
        x_RTD = self.self_attention_norm.after(x_RTD, attended_RTD)

        # The rows of a sentence share its memory, so attention treats them as more queries: Q = rows of a sentence * T.
        n_sentences, (n_rows, n_target, d_model) = len(memory.key_BHMK), x_RTD.shape
        n_queries = n_rows * n_target // max(n_sentences, 1)
        x_BQD = self.memory_attention_norm.before(x_RTD).reshape(n_sentences, n_queries, d_model)
        query = self.memory_attention.project_query(x_BQD)
        attended_BQD, memory_BHQS = self.memory_attention(query, memory, with_attention)
        x_RTD = self.memory_attention_norm.after(x_RTD, attended_BQD.reshape(x_RTD.shape))

        x_RTD = self.feed_forward_norm.after(x_RTD, self.feed_forward(self.feed_forward_norm.before(x_RTD)))
        return x_RTD, self_RHTM, memory_BHQS


class AddAndNorm(nn.LayerNorm):
    """LayerNorm(x + Sublayer(x)), the "Add & Norm" of Figure 1.

    Not in the paper: x + Sublayer(LayerNorm(x)) with pre-norm.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, eps=config.norm_eps)
        self.pre, self.dropout = config.norm == "pre", config.dropout

    def before(self, x: Tensor) -> Tensor:
        """The input of the sub-layer: x itself, or LayerNorm(x) with pre-norm."""
        return self.forward(x) if self.pre else x

    def after(self, x: Tensor, sub_layer_x: Tensor) -> Tensor:
        """x plus the output of the sub-layer; with post-norm, as in the paper, LayerNorm of this sum."""
        x = x + F.dropout(sub_layer_x, self.dropout, self.training)
        return x if self.pre else self.forward(x)


# 3.2 Attention


class Attended(NamedTuple):
    """The keys and values of the attended positions, and which of these positions each query may see."""

    key_BHMK: Tensor
    value_BHMU: Tensor
    visible: Visible


class MultiHeadAttention(nn.Module):
    """3.2.2: Concat(head_1, ..., head_h) W_O. The subclasses compute queries, keys and values."""

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
    """Queries, keys and values all come from the same sequence."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_keys, n_values = config.n_heads * config.d_k, config.n_heads * config.d_v
        self.W_QKV = Projection(config.d_model, config.attention_bias, Q=n_keys, K=n_keys, V=n_values)

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = map(self.split_heads, self.W_QKV.split(x_BTD))
        return query, key, value


class MemoryAttention(MultiHeadAttention):
    """Queries come from the decoder, keys and values from the memory: the "encoder-decoder attention" of 3.2.3."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_keys, n_values = config.n_heads * config.d_k, config.n_heads * config.d_v
        self.W_Q = Projection(config.d_model, config.attention_bias, Q=n_keys)
        self.W_KV = Projection(config.d_model, config.attention_bias, K=n_keys, V=n_values)

    def project_query(self, x_BQD: Tensor) -> Tensor:
        return self.split_heads(self.W_Q(x_BQD))

    def project_memory(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        key, value = map(self.split_heads, self.W_KV.split(memory_BSD))
        return key, value


class Projection(nn.Module):
    """x W + b. Matrices with the same input are packed side by side in one, so that one product computes them all.

    `Projection(d_in, bias, Q=64, K=64)` packs W_Q and W_K, and b_Q and b_K. The weights file stores them separately.
    """

    def __init__(self, d_in: int, bias: bool, **widths: int) -> None:
        super().__init__()
        self.widths = widths
        d_out = sum(widths.values())
        self.W = nn.Parameter(torch.empty(d_in, d_out))
        self.b = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.W.T, self.b)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """x W_Q + b_Q, x W_K + b_K, ..."""
        return torch.split(self.forward(x), list(self.widths.values()), dim=-1)

    def weights(self) -> dict[str, Tensor]:
        """W_Q, W_K, ... and b_Q, b_K, ..., as views into the packed parameters."""
        packed = {"W": self.W.detach()} | ({} if self.b is None else {"b": self.b.detach()})
        return {
            f"{letter}_{name}": part
            for letter, parameter in packed.items()
            for name, part in zip(self.widths, torch.split(parameter, list(self.widths.values()), dim=-1), strict=True)
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
    """From tokens to vectors, and from vectors to logits.

    Tied matrices are one parameter. The weights file stores it once, under the first of its names.
    """

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
        """Embed tokens at the given positions, of shape (R, T) or (T,). Every position is below `longest`."""
        return self._embed(target_RT, self.target_embedding, position, longest, self.target_positions)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """The linear transformation before the softmax."""
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
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model)).

    The result has the shape of `position` and one more axis of length d_model.
    """
    # float32 has an error of 1e-3 in the angle at position 10,000. Apple's GPUs do not support float64.
    dtype = torch.float32 if position.device.type == "mps" else torch.float64
    even_I = torch.arange(0, d_model, 2, dtype=dtype, device=position.device)
    angle = position[..., None] / 10000 ** (even_I / d_model)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


# The cache of keys and values, which belongs to the caller


class LayerCache(NamedTuple):
    """The cached keys and values of one layer, and the positions of the new tokens in each row."""

    key_RHTK: Tensor
    value_RHTU: Tensor
    position_RQ: Tensor

    def extend(self, key_RHQK: Tensor, value_RHQU: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values into the cache, in place, and return the whole cache."""
        assert key_RHQK.dtype == self.key_RHTK.dtype, "start and step ran in different precisions"
        position_RHQ1 = self.position_RQ[:, None, :, None].expand(-1, key_RHQK.shape[1], -1, 1)
        self.key_RHTK.scatter_(2, position_RHQ1.expand_as(key_RHQK), key_RHQK)
        self.value_RHTU.scatter_(2, position_RHQ1.expand_as(value_RHQU), value_RHQU)
        return self.key_RHTK, self.value_RHTU


@dataclass(frozen=True)
class DecoderState:
    """The state of decoding between two steps: the memory of each sentence, and the cache of each row.

    >>> import torch
    >>> from transduce import Transformer, tiny
    >>> config = tiny().model
    >>> model = Transformer(config).eval()
    >>> state = model.start(torch.tensor([[5, 6, config.eos_id]]))  # one sentence, one row
    >>> logits_RV, state = model.step(torch.tensor([config.bos_id]), state)
    >>> state = state.select(torch.tensor([0, 0]))  # two hypotheses that share the memory of the sentence
    >>> logits_RV, state = model.step(torch.tensor([7, 8]), state)
    >>> state.n_sentences, state.n_rows, state.length_R.tolist()
    (1, 2, [2, 2])
    """

    memory_key_LBHSK: Tensor
    memory_value_LBHSU: Tensor
    memory_visible_BS: Tensor
    key_LRHTK: Tensor
    value_LRHTU: Tensor
    length_R: Tensor
    longest: int
    """An upper bound of length_R, as a Python number: reading length_R would wait for the GPU."""

    @property
    def n_rows(self) -> int:
        return len(self.length_R)

    @property
    def n_sentences(self) -> int:
        return len(self.memory_visible_BS)

    def select(self, rows_R: Tensor, sentences_B: Tensor | None = None) -> DecoderState:
        """A state whose row i continues row `rows_R[i]` of this one.

        Rows of a sentence stay adjacent, and every sentence keeps the same number of rows: `rows_R` = (0, 0, 1, 1)
        gives two rows to each of two sentences. Without `sentences_B` all sentences stay, their memory is not copied,
        and the CPU does not wait for the GPU. With `sentences_B` only these sentences stay, in this order, and the
        cache and the memory are cut to the longest remaining row and source. Otherwise they would grow without bound
        while sentences join and leave.
        """
        length_R = self.length_R[rows_R]
        if sentences_B is None:
            assert len(rows_R) % max(self.n_sentences, 1) == 0, "sentences differ in number of rows"
            key_LRHTK = self.key_LRHTK.index_select(1, rows_R)
            value_LRHTU = self.value_LRHTU.index_select(1, rows_R)
            return replace(self, key_LRHTK=key_LRHTK, value_LRHTU=value_LRHTU, length_R=length_R)
        assert len(rows_R) * self.n_sentences == self.n_rows * len(sentences_B), "sentences differ in number of rows"
        longest = int(length_R.max()) if len(length_R) else 0
        capacity = _capacity_for(longest)
        visible_BS = self.memory_visible_BS[sentences_B]
        n_source = int(visible_BS.sum(1).max()) if len(sentences_B) else 0
        return DecoderState(
            memory_key_LBHSK=self.memory_key_LBHSK[:, :, :, :n_source].index_select(1, sentences_B),
            memory_value_LBHSU=self.memory_value_LBHSU[:, :, :, :n_source].index_select(1, sentences_B),
            memory_visible_BS=visible_BS[:, :n_source],
            key_LRHTK=self.key_LRHTK[:, :, :, :capacity].index_select(1, rows_R),
            value_LRHTU=self.value_LRHTU[:, :, :, :capacity].index_select(1, rows_R),
            length_R=length_R,
            longest=longest,
        )

    def join(self, other: DecoderState) -> DecoderState:
        """The sentences and rows of both states, this one's first. The narrower memory and cache are padded."""
        assert self.n_rows * other.n_sentences == other.n_rows * self.n_sentences, "sentences differ in number of rows"
        n_source = max(self.memory_visible_BS.shape[1], other.memory_visible_BS.shape[1])
        capacity = max(self.key_LRHTK.shape[3], other.key_LRHTK.shape[3])

        def joined(a: Tensor, b: Tensor, n: int) -> Tensor:
            return torch.cat([_pad_to(a, 3, n), _pad_to(b, 3, n)], dim=1)

        return DecoderState(
            memory_key_LBHSK=joined(self.memory_key_LBHSK, other.memory_key_LBHSK, n_source),
            memory_value_LBHSU=joined(self.memory_value_LBHSU, other.memory_value_LBHSU, n_source),
            memory_visible_BS=torch.cat(
                [_pad_to(self.memory_visible_BS, 1, n_source), _pad_to(other.memory_visible_BS, 1, n_source)]
            ),
            key_LRHTK=joined(self.key_LRHTK, other.key_LRHTK, capacity),
            value_LRHTU=joined(self.value_LRHTU, other.value_LRHTU, capacity),
            length_R=torch.cat([self.length_R, other.length_R]),
            longest=max(self.longest, other.longest),
        )

    def with_capacity(self, n: int) -> DecoderState:
        """A state whose cache has space for at least n tokens in each row."""
        if n <= self.key_LRHTK.shape[3]:
            return self
        capacity = _capacity_for(n)
        key_LRHTK, value_LRHTU = _pad_to(self.key_LRHTK, 3, capacity), _pad_to(self.value_LRHTU, 3, capacity)
        return replace(self, key_LRHTK=key_LRHTK, value_LRHTU=value_LRHTU)


def _capacity_for(n: int) -> int:
    """A power of two, so that the cache is copied rarely and has few different shapes."""
    return int(max(16, 2 ** math.ceil(math.log2(max(n, 1)))))


def _pad_to(x: Tensor, axis: int, n: int) -> Tensor:
    """Add zeros (or False) at the end of `axis`, up to length n."""
    return F.pad(x, [0, 0] * (x.ndim - axis - 1) + [0, n - x.shape[axis]])
