"""A training pass over tokens without padding, by the kernels of `fast/`: its slow twin is `recipe.model_loss`.

Sentences stand one behind another in one long row. Everything but attention treats tokens one by one, and attention is
told from where to where each token may look. So every pass has one of a few shapes, whatever the lengths of sentences,
and can be recorded once as a CUDA graph and replayed: Python is not in the way. The way back is written out, layer by
layer, because that lets products add to what is already there and saves most of what autograd would keep.
"""

# Axes: N tokens of either side, S source tokens, T target tokens, B sentences, D = d_model, F = d_ff, V vocabulary.
# P all heads side by side, L layers.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from transduce.config import ModelConfig
from transduce.fast.packed import (
    Attended,
    AttentionInputs,
    Dropout,
    Normed,
    Sight,
    add_and_norm,
    add_and_norm_backward,
    attend,
    attend_backward,
    drop,
    embed,
    loss_and_gradient_,
    relu_backward_,
)
from transduce.model import AddAndNorm, FeedForward, MemoryAttention, SelfAttention, Transformer, sinusoid

Ints = NDArray[np.int32]

GRAIN = 64
"""Lengths of passes are multiples of it, as tiles of matrix products are."""
LOSS_TOKENS = 32_768
"""Logits of at most so many tokens are held at once."""


def why_not(config: ModelConfig) -> str | None:
    """What of this model the kernels do not know, in words; None where they know all of it."""
    unknown = {
        "model.norm is pre": config.norm == "pre",
        f"model.activation is {config.activation}": config.activation != "relu",
        "there is dropout on attention weights": config.attention_dropout > 0,
        "there is dropout in the feed-forward network": config.ffn_dropout > 0,
        "attention has biases": config.attention_bias,
        "the output has a bias": config.output_bias,
        f"a head is {config.d_k} and {config.d_v} wide": not {config.d_k, config.d_v} <= {16, 32, 64, 128},
    }
    return next((name for name, is_so in unknown.items() if is_so), None)


# Packing


class Side(NamedTuple):
    """Of each token: its id and its place in the sentence."""

    ids_N: Tensor
    position_N: Tensor


class Packed(NamedTuple):
    """What a pass is given, on the device. Behind the tokens there may be padding, which sees and is seen by none."""

    source: Side
    target: Side
    target_out_T: Tensor
    encoder: Sight
    decoder: Sight
    memory: Sight
    keys_P: Tensor
    """Of dropout."""


class Shape(NamedTuple):
    n_source: int
    n_target: int


def pack(batch: Sequence[NDArray[np.int64]], shape: Shape, seed: Sequence[int], config: ModelConfig) -> Ints:
    """All that a pass is given, in one row, as `unpack` wants it: one copy brings it to the device."""
    source_BS, target_in_BT, target_out_BT = batch
    source, target = _Spans.of(source_BS != config.pad_id), _Spans.of(target_out_BT != config.pad_id)
    # Whatever is in the window of a token has the token in its own.
    near = max(shape) if config.attention_window is None else config.attention_window // 2
    of_source = [
        source_BS[source.token_BN],
        source.place_N - source.first_N,
        np.maximum(source.first_N, source.place_N - near),
        np.minimum(source.last_N, source.place_N + near + 1),
        target.first_B[source.sentence_N],
        target.last_B[source.sentence_N],
    ]
    of_target = [
        target_in_BT[target.token_BN],
        target_out_BT[target.token_BN],
        target.place_N - target.first_N,
        np.maximum(target.first_N, target.place_N - near),
        target.place_N + 1,
        target.place_N,
        np.minimum(target.last_N, target.place_N + near + 1),
        source.first_B[target.sentence_N],
        source.last_B[target.sentence_N],
    ]
    of_source_KS = np.zeros((len(of_source), shape.n_source), dtype=np.int32)
    of_target_KT = np.zeros((len(of_target), shape.n_target), dtype=np.int32)
    of_source_KS[0], of_target_KT[:2] = config.pad_id, config.pad_id
    of_source_KS[:, : len(source.place_N)] = of_source
    of_target_KT[:, : len(target.place_N)] = of_target
    # One key for each place of dropout: the two sums of embeddings and all sub-layers.
    n_keys = 2 + 2 * config.n_encoder_layers + 3 * config.n_decoder_layers
    keys_P = np.random.SeedSequence(seed).generate_state(n_keys).view(np.int32)
    return np.concatenate([of_source_KS.ravel(), of_target_KT.ravel(), keys_P])


class _Spans(NamedTuple):
    """Where sentences stand in the long row: of each sentence, and of each token the same and its sentence."""

    token_BN: NDArray[np.bool_]
    """In the padded batch."""
    place_N: NDArray[np.int64]
    sentence_N: NDArray[np.int64]
    first_B: NDArray[np.int64]
    last_B: NDArray[np.int64]

    @classmethod
    def of(cls, token_BN: NDArray[np.bool_]) -> _Spans:
        length_B = token_BN.sum(1)
        last_B = length_B.cumsum()
        return cls(
            token_BN, np.arange(length_B.sum()), np.arange(len(length_B)).repeat(length_B), last_B - length_B, last_B
        )

    @property
    def first_N(self) -> NDArray[np.int64]:
        return self.first_B[self.sentence_N]

    @property
    def last_N(self) -> NDArray[np.int64]:
        return self.last_B[self.sentence_N]


def unpack(ints: Tensor, shape: Shape) -> Packed:
    """Views of what `pack` made."""
    of_source, of_target = 6 * shape.n_source, 9 * shape.n_target
    source_S, position_S, first_S, last_S, heard_first_S, heard_last_S = ints[:of_source].view(6, shape.n_source)
    (
        target_in_T, target_out_T, position_T,
        past_first_T, past_last_T, future_first_T, future_last_T, memory_first_T, memory_last_T,
    ) = ints[of_source : of_source + of_target].view(9, shape.n_target)  # fmt: skip
    return Packed(
        source=Side(source_S, position_S),
        target=Side(target_in_T, position_T),
        target_out_T=target_out_T,
        encoder=Sight(first_S, last_S, first_S, last_S),
        decoder=Sight(past_first_T, past_last_T, future_first_T, future_last_T),
        memory=Sight(memory_first_T, memory_last_T, heard_first_S, heard_last_S),
        keys_P=ints[of_source + of_target :],
    )


# Weights


class Matrix:
    """A weight in the precision of products, beside the parameter that learns."""

    def __init__(self, parameter: Tensor, rough: Tensor) -> None:
        self.parameter, self.rough = parameter, rough

    def learn(self, x_ND: Tensor, grad_NF: Tensor) -> None:
        """Adds x^T grad to the parameter's gradient, in float32 throughout."""
        assert self.parameter.grad is not None
        add_product_(self.parameter.grad, x_ND.T, grad_NF)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def add_to_gradient(parameter: Tensor, grad: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad += grad


# Sub-layers, there and back


class SelfAttentionPass:
    def __init__(self, model: PackedPass, attention: SelfAttention, norm: AddAndNorm) -> None:
        self.W_QKV, self.W_O = model.matrix(attention.W_QKV.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_QKV.widths.values()), attention.n_heads
        self.norm = NormPass(model, norm)

    def forward(self, x_ND: Tensor, sight: Sight, keys_P: Tensor) -> tuple[Tensor, _SelfSaved]:
        qkv_NP = x_ND @ self.W_QKV.rough
        attended = attend(AttentionInputs(*qkv_NP.split(self.widths, 1)), sight, self.n_heads)
        out_ND, normed = self.norm.forward(x_ND, attended.head_NP @ self.W_O.rough, keys_P)
        return out_ND, _SelfSaved(x_ND, qkv_NP, attended, normed)

    def backward(self, grad_ND: Tensor, saved: _SelfSaved, sight: Sight, keys_P: Tensor) -> Tensor:
        grad_x_ND, grad_y_ND, _ = self.norm.backward(grad_ND, saved.normed, keys_P)
        self.W_O.learn(saved.attended.head_NP, grad_y_ND)
        grad_qkv_NP = torch.empty_like(saved.qkv_NP)
        inputs = AttentionInputs(*saved.qkv_NP.split(self.widths, 1))
        grads = AttentionInputs(*grad_qkv_NP.split(self.widths, 1))
        attend_backward(grad_y_ND @ self.W_O.rough.T, inputs, saved.attended, sight, self.n_heads, grads)
        self.W_QKV.learn(saved.x_ND, grad_qkv_NP)
        return grad_x_ND.addmm_(grad_qkv_NP, self.W_QKV.rough.T)


class _SelfSaved(NamedTuple):
    x_ND: Tensor
    qkv_NP: Tensor
    attended: Attended
    normed: Normed


class MemoryAttentionPass:
    """Its keys and values are made of the memory for all layers at once, outside."""

    def __init__(self, model: PackedPass, attention: MemoryAttention, norm: AddAndNorm) -> None:
        self.W_Q, self.W_O = model.matrix(attention.W_Q.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_KV.widths.values()), attention.n_heads
        self.norm = NormPass(model, norm)

    def forward(self, x_TD: Tensor, kv_SP: Tensor, sight: Sight, keys_P: Tensor) -> tuple[Tensor, _MemorySaved]:
        query_TP = x_TD @ self.W_Q.rough
        attended = attend(AttentionInputs(query_TP, *kv_SP.split(self.widths, 1)), sight, self.n_heads)
        out_TD, normed = self.norm.forward(x_TD, attended.head_NP @ self.W_O.rough, keys_P)
        return out_TD, _MemorySaved(x_TD, query_TP, attended, normed)

    def backward(
        self, grad_TD: Tensor, saved: _MemorySaved, kv_SP: Tensor, grad_kv_SP: Tensor, sight: Sight, keys_P: Tensor
    ) -> Tensor:
        grad_x_TD, grad_y_TD, _ = self.norm.backward(grad_TD, saved.normed, keys_P)
        self.W_O.learn(saved.attended.head_NP, grad_y_TD)
        inputs = AttentionInputs(saved.query_TP, *kv_SP.split(self.widths, 1))
        grads = AttentionInputs(torch.empty_like(saved.query_TP), *grad_kv_SP.split(self.widths, 1))
        attend_backward(grad_y_TD @ self.W_O.rough.T, inputs, saved.attended, sight, self.n_heads, grads)
        self.W_Q.learn(saved.x_TD, grads.query_NP)
        return grad_x_TD.addmm_(grads.query_NP, self.W_Q.rough.T)


class _MemorySaved(NamedTuple):
    x_TD: Tensor
    query_TP: Tensor
    attended: Attended
    normed: Normed


class FeedForwardPass:
    def __init__(self, model: PackedPass, feed_forward: FeedForward, norm: AddAndNorm) -> None:
        one, two = feed_forward.W_1, feed_forward.W_2
        assert one.b is not None
        assert two.b is not None
        self.W_1, self.W_2 = model.matrix(one.W), model.matrix(two.W)
        self.b_1, self.b_2 = model.matrix(one.b), model.matrix(two.b)
        self.norm = NormPass(model, norm)

    def forward(self, x_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, _FeedForwardSaved]:
        hidden_NF = torch._addmm_activation(self.b_1.rough, x_ND, self.W_1.rough)
        y_ND = torch.addmm(self.b_2.rough, hidden_NF, self.W_2.rough)
        out_ND, normed = self.norm.forward(x_ND, y_ND, keys_P)
        return out_ND, _FeedForwardSaved(x_ND, hidden_NF, normed)

    def backward(self, grad_ND: Tensor, saved: _FeedForwardSaved, keys_P: Tensor) -> Tensor:
        grad_x_ND, grad_y_ND, grad_b_D = self.norm.backward(grad_ND, saved.normed, keys_P)
        add_to_gradient(self.b_2.parameter, grad_b_D)
        self.W_2.learn(saved.hidden_NF, grad_y_ND)
        grad_hidden_NF = grad_y_ND @ self.W_2.rough.T
        add_to_gradient(self.b_1.parameter, relu_backward_(grad_hidden_NF, saved.hidden_NF))
        self.W_1.learn(saved.x_ND, grad_hidden_NF)
        return grad_x_ND.addmm_(grad_hidden_NF, self.W_1.rough.T)


class _FeedForwardSaved(NamedTuple):
    x_ND: Tensor
    hidden_NF: Tensor
    normed: Normed


class NormPass:
    def __init__(self, model: PackedPass, norm: AddAndNorm) -> None:
        self.norm, self.place = norm, model.next_place()

    def forward(self, x_ND: Tensor, y_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, Normed]:
        dropout = Dropout(self.norm.dropout, keys_P, self.place)
        return add_and_norm(x_ND, y_ND, self.norm.weight, self.norm.bias, self.norm.eps, dropout)

    def backward(self, grad_ND: Tensor, normed: Normed, keys_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, of y, and of a bias in y."""
        dropout = Dropout(self.norm.dropout, keys_P, self.place)
        grads = add_and_norm_backward(grad_ND, normed, self.norm.weight, dropout)
        add_to_gradient(self.norm.weight, grads.gain_D)
        add_to_gradient(self.norm.bias, grads.bias_D)
        # Where nothing is dropped x and y have one gradient, and one of them will be added to.
        grad_x_ND = grads.x_ND if grads.y_ND is not grads.x_ND else grads.x_ND.clone()
        return grad_x_ND, grads.y_ND, grads.y_sum_D


# The whole pass


class PackedPass:
    """Loss and gradients of a model's weights, which are read anew at each pass."""

    def __init__(self, model: Transformer, longest: int, dtype: torch.dtype) -> None:
        """`longest`: tokens of a sentence of either side, the end mark counted."""
        assert why_not(model.config) is None
        self.model, self.dtype, self.config = model, dtype, model.config
        self._n_places, self._matrices = 2, dict[int, Matrix]()  # places 0 and 1 are those of the embeddings
        self.encoder = [
            (
                SelfAttentionPass(self, layer.self_attention, layer.self_attention_norm),
                FeedForwardPass(self, layer.feed_forward, layer.feed_forward_norm),
            )
            for layer in model.encoder
        ]
        self.decoder = [
            (
                SelfAttentionPass(self, layer.self_attention, layer.self_attention_norm),
                MemoryAttentionPass(self, layer.memory_attention, layer.memory_attention_norm),
                FeedForwardPass(self, layer.feed_forward, layer.feed_forward_norm),
            )
            for layer in model.decoder
        ]
        self.W_KV = [layer.memory_attention.W_KV.W for layer in model.decoder]
        self.rough_W_KV = torch.cat([W.detach() for W in self.W_KV], 1).to(dtype)
        self.output = self.matrix(model.embedding.output_projection)
        device = self.rough_W_KV.device
        self.sinusoid_TD = sinusoid(torch.arange(longest, device=device), self.config.d_model).float()

    def matrix(self, parameter: Tensor) -> Matrix:
        if id(parameter) not in self._matrices:
            self._matrices[id(parameter)] = Matrix(parameter, parameter.detach().to(self.dtype, copy=True))
        return self._matrices[id(parameter)]

    def next_place(self) -> int:
        self._n_places += 1
        return self._n_places - 1

    @torch.no_grad()
    def add_gradients(self, packed: Packed, label_smoothing: float, factor_1: Tensor) -> Tensor:
        """Adds the gradient of the summed loss times `factor_1` to each parameter's; returns the sum."""
        self._refresh()
        memory_SD, encoder_saved = self._encode(packed)
        kv_SP = memory_SD @ self.rough_W_KV
        x_TD, decoder_saved = self._decode(packed, kv_SP)
        loss_sum, grad_TD = self._loss(x_TD, packed.target_out_T, label_smoothing, factor_1)
        grad_TD, grad_kv_SP = self._decode_backward(grad_TD, decoder_saved, kv_SP, packed)
        self._embed_backward(grad_TD, packed.target, packed.keys_P, 1)
        for W, grad in zip(self.W_KV, self._product(memory_SD.T, grad_kv_SP).split(self._kv_widths(), 1), strict=True):
            add_to_gradient(W, grad)
        grad_SD = self._encode_backward(grad_kv_SP @ self.rough_W_KV.T, encoder_saved, packed)
        self._embed_backward(grad_SD, packed.source, packed.keys_P, 0)
        return loss_sum

    def _refresh(self) -> None:
        matrices = list(self._matrices.values())
        torch._foreach_copy_([m.rough for m in matrices], [m.parameter for m in matrices])
        for rough, W in zip(self.rough_W_KV.split(self._kv_widths(), 1), self.W_KV, strict=True):
            rough.copy_(W)

    def _kv_widths(self) -> list[int]:
        return [W.shape[1] for W in self.W_KV]

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)

    def _encode(self, packed: Packed) -> tuple[Tensor, list[tuple[_SelfSaved, _FeedForwardSaved]]]:
        x_SD, saved = self._embed(packed.source, packed.keys_P, 0), []
        for attention, feed_forward in self.encoder:
            x_SD, attention_saved = attention.forward(x_SD, packed.encoder, packed.keys_P)
            x_SD, feed_forward_saved = feed_forward.forward(x_SD, packed.keys_P)
            saved.append((attention_saved, feed_forward_saved))
        return x_SD, saved

    def _encode_backward(
        self, grad_SD: Tensor, saved: list[tuple[_SelfSaved, _FeedForwardSaved]], packed: Packed
    ) -> Tensor:
        for attention, feed_forward in reversed(self.encoder):
            attention_saved, feed_forward_saved = saved.pop()
            grad_SD = feed_forward.backward(grad_SD, feed_forward_saved, packed.keys_P)
            grad_SD = attention.backward(grad_SD, attention_saved, packed.encoder, packed.keys_P)
        return grad_SD

    def _decode(
        self, packed: Packed, kv_SP: Tensor
    ) -> tuple[Tensor, list[tuple[_SelfSaved, _MemorySaved, _FeedForwardSaved]]]:
        x_TD, saved = self._embed(packed.target, packed.keys_P, 1), []
        for (attention, memory, feed_forward), own_kv_SP in zip(
            self.decoder, kv_SP.split(self._kv_widths(), 1), strict=True
        ):
            x_TD, attention_saved = attention.forward(x_TD, packed.decoder, packed.keys_P)
            x_TD, memory_saved = memory.forward(x_TD, own_kv_SP, packed.memory, packed.keys_P)
            x_TD, feed_forward_saved = feed_forward.forward(x_TD, packed.keys_P)
            saved.append((attention_saved, memory_saved, feed_forward_saved))
        return x_TD, saved

    def _decode_backward(
        self,
        grad_TD: Tensor,
        saved: list[tuple[_SelfSaved, _MemorySaved, _FeedForwardSaved]],
        kv_SP: Tensor,
        packed: Packed,
    ) -> tuple[Tensor, Tensor]:
        grad_kv_SP = torch.empty_like(kv_SP)
        layers = zip(
            self.decoder, kv_SP.split(self._kv_widths(), 1), grad_kv_SP.split(self._kv_widths(), 1), strict=True
        )
        for (attention, memory, feed_forward), own_kv_SP, own_grad_kv_SP in reversed(list(layers)):
            attention_saved, memory_saved, feed_forward_saved = saved.pop()
            grad_TD = feed_forward.backward(grad_TD, feed_forward_saved, packed.keys_P)
            grad_TD = memory.backward(grad_TD, memory_saved, own_kv_SP, own_grad_kv_SP, packed.memory, packed.keys_P)
            grad_TD = attention.backward(grad_TD, attention_saved, packed.decoder, packed.keys_P)
        return grad_TD, grad_kv_SP

    # 3.4 Embeddings and softmax

    def _embed(self, side: Side, keys_P: Tensor, place: int) -> Tensor:
        table_VD, position_TD = self._tables(place)
        return embed(*side, table_VD, position_TD, Dropout(self.config.dropout, keys_P, place), self.dtype)

    def _tables(self, place: int) -> tuple[Tensor, Tensor]:
        own = self.model.embedding
        learned = (own.source_positions, own.target_positions)[place]
        return (own.source_embedding, own.target_embedding)[place], self.sinusoid_TD if learned is None else learned

    def _embed_backward(self, grad_ND: Tensor, side: Side, keys_P: Tensor, place: int) -> None:
        table_VD, position_TD = self._tables(place)
        grad_ND = drop(grad_ND, Dropout(self.config.dropout, keys_P, place))
        if position_TD is not self.sinusoid_TD:
            add_to_gradient(position_TD, _sums_by(side.position_N, grad_ND, len(position_TD)))
        add_to_gradient(table_VD, _sums_by(side.ids_N, grad_ND, len(table_VD)) * self.config.d_model**0.5)

    def _loss(
        self, x_TD: Tensor, target_out_T: Tensor, label_smoothing: float, factor_1: Tensor
    ) -> tuple[Tensor, Tensor]:
        loss_sum, grad_TD = x_TD.new_zeros((), dtype=torch.float32), torch.empty_like(x_TD)
        parts = (x.split(LOSS_TOKENS) for x in (x_TD, target_out_T, grad_TD))
        for x_ND, target_N, grad_ND in zip(*parts, strict=True):
            logits_NV = x_ND @ self.output.rough.T
            loss_N = loss_and_gradient_(logits_NV, target_N, label_smoothing, self.config.pad_id, factor_1)
            loss_sum += loss_N.sum()
            torch.mm(logits_NV, self.output.rough, out=grad_ND)
            self.output.learn(logits_NV, x_ND)
        return loss_sum, grad_TD


def _sums_by(ids_N: Tensor, x_ND: Tensor, n: int) -> Tensor:
    """Row i is the sum of the rows whose id is i, always added in the same order."""
    return torch.ops.aten.embedding_dense_backward(x_ND, ids_N, n, -1, False)  # type: ignore[no-any-return]


# Passes, recorded


N_SHAPES = 16
"""Passes are as long as the longest, or so many equal steps shorter: more would waste less room, and record longer."""


class PackedPasses:
    """Passes of a few shapes, each recorded on a GPU as a graph when it is first needed, and replayed from then on."""

    def __init__(self, run: PackedPass, most_tokens: int, label_smoothing: float) -> None:
        self.run, self.label_smoothing, self.config = run, label_smoothing, run.config
        self.device = run.rough_W_KV.device
        self.grain = max(GRAIN, -(-most_tokens // (N_SHAPES * GRAIN)) * GRAIN)
        self.recorded: dict[Shape, _Recorded] = {}

    def add_gradients(self, batch: Sequence[Tensor], seed: Sequence[int], factor: float) -> Tensor:
        """Adds to each parameter's gradient; returns the summed loss, which the next pass may overwrite."""
        arrays = [ids.numpy() for ids in batch]
        n_source, _, n_target = (int((ids != self.config.pad_id).sum()) for ids in arrays)
        shape = Shape(*(-(-n // self.grain) * self.grain for n in (n_source, n_target)))
        ints = torch.from_numpy(pack(arrays, shape, seed, self.config))
        if self.device.type != "cuda":
            return self.run.add_gradients(unpack(ints, shape), self.label_smoothing, torch.tensor([factor]))
        recorded = self.recorded.get(shape) or self._record(ints, shape)
        recorded.ints.copy_(ints.pin_memory(), non_blocking=True)
        recorded.factor_1.fill_(factor)
        recorded.graph.replay()
        return recorded.loss_sum

    def _record(self, ints: Tensor, shape: Shape) -> _Recorded:
        on_device = ints.to(self.device)
        factor_1 = torch.zeros(1, device=self.device)  # so that the trial below adds nothing to the gradients
        packed, graph = unpack(on_device, shape), torch.cuda.CUDAGraph()
        trial = torch.cuda.Stream()
        trial.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(trial):  # compiles what is not compiled yet, which no graph can
            self.run.add_gradients(packed, self.label_smoothing, factor_1)
        torch.cuda.current_stream().wait_stream(trial)
        # All use the same memory: they never run at once, and none needs what another left there.
        pool = next(iter(self.recorded.values())).graph.pool() if self.recorded else None
        with torch.cuda.graph(graph, pool=pool):
            loss_sum = self.run.add_gradients(packed, self.label_smoothing, factor_1)
        self.recorded[shape] = _Recorded(graph, on_device, factor_1, loss_sum)
        return self.recorded[shape]

    def forget(self) -> None:
        """Where gradients lie elsewhere from now on, or memory is wanted."""
        self.recorded.clear()


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    ints: Tensor
    factor_1: Tensor
    loss_sum: Tensor
