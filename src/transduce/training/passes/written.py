"""A pass of training written out, there and back, by the operations of `fast/`: its slow twin is `recipe.model_loss`.

The way back is written layer by layer, because so products add to what is already there, most of what autograd would
keep is not kept, and nothing is in the way of recording it all as a CUDA graph: a replay needs no Python.
"""

# Axes: N tokens of either side, S source tokens, T target tokens, D = d_model, F = d_ff, V vocabulary.
# P all heads side by side, or places of dropout.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.errors import DataError
from transduce.model import AddAndNorm, FeedForward, MemoryAttention, SelfAttention, Transformer, sinusoid
from transduce.training.passes.layout import (
    AttentionInputs,
    Dropout,
    Given,
    NormGradients,
    Shape,
    Side,
    pack,
    padded,
    unpack,
)
from transduce.training.passes.loss import add_product_

COVERED = ("training/passes/*.py", "model.py")
"""What a measurement of these passes on a GPU is about: it is stale once one of them changes."""
GRAIN = 64
"""Lengths of passes on a GPU are multiples of it, as tiles of matrix products are."""
MOST_WORKERS = 4
"""On a CPU, parts of a batch at once. Each has gradients of its own, so that memory grows with them."""
N_SHAPES = 24
"""Passes on a GPU are as long as the longest, or equal steps shorter: more steps waste less room and record longer."""


def why_not(config: ModelConfig, device: str) -> str | None:
    """What of this model is not written out here, in words; None where all of it is."""
    on_cpu, widths = device == "cpu", {config.d_k, config.d_v}
    unknown = {
        "model.norm is pre": config.norm == "pre",
        f"model.activation is {config.activation}": config.activation != "relu",
        "there is dropout on attention weights": config.attention_dropout > 0,
        "there is dropout in the feed-forward network": config.ffn_dropout > 0,
        "attention has biases": config.attention_bias,
        "the output has a bias": config.output_bias,
        f"a head is {config.d_k} and {config.d_v} wide": len(widths) > 1 if on_cpu else not widths <= {16, 32, 64, 128},
        "attention has a window": on_cpu and config.attention_window is not None,
    }
    return next((name for name, is_so in unknown.items() if is_so), None)


class Operations(Protocol):
    """What `fast/cpu.py` and `fast/gpu.py` have. What they save for the way back is their own affair."""

    def embed(
        self, side: Side, table_VD: Tensor, position_TD: Tensor, dropout: Dropout, dtype: torch.dtype
    ) -> tuple[Tensor, Any]: ...
    def embed_backward(
        self, grad_ND: Tensor, side: Side, saved: Any, table_grad_VD: Tensor, position_grad_TD: Tensor | None
    ) -> None: ...
    def add_and_norm(
        self, x_ND: Tensor, y_ND: Tensor, gain_D: Tensor, bias_D: Tensor, eps: float, dropout: Dropout
    ) -> tuple[Tensor, Any]: ...
    def add_and_norm_backward(
        self, grad_ND: Tensor, normed: Any, gain_D: Tensor, bias_D: Tensor, grads: NormGradients
    ) -> tuple[Tensor, Tensor]: ...
    def linear_relu(self, x_ND: Tensor, W_DF: Tensor, b_F: Tensor) -> Tensor: ...
    def relu_backward_(self, grad_NF: Tensor, hidden_NF: Tensor, bias_grad_F: Tensor) -> None: ...
    def attend(self, inputs: AttentionInputs, sight: Any, n_heads: int) -> Any: ...
    def attend_backward(
        self, grad_NP: Tensor, inputs: AttentionInputs, attended: Any, sight: Any, n_heads: int, grads: AttentionInputs
    ) -> None: ...
    def projected_loss(
        self,
        x_TD: Tensor,
        W_VD: Tensor,
        W_grad_VD: Tensor,
        target_T: Tensor,
        label_smoothing: float,
        pad_id: int,
        factor_1: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


def operations_on(device: torch.device) -> Operations:
    if device.type == "cpu":
        from transduce.training.passes import cpu

        return cpu
    from transduce.training.passes import cuda

    return cuda


# Weights


class Matrix:
    """A weight in the precision of products, beside the parameter that learns: one and the same where that is alike."""

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self.parameter, self.rough = parameter, parameter.detach().to(dtype)

    def learn(self, x_ND: Tensor, grad_NF: Tensor) -> None:
        add_product_(gradient_of(self.parameter), x_ND.T, grad_NF)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a pass adds to what is there"
    return parameter.grad


# Sub-layers, there and back


class SelfAttentionPass:
    def __init__(self, model: WrittenPass, attention: SelfAttention, norm: AddAndNorm) -> None:
        self.W_QKV, self.W_O = model.matrix(attention.W_QKV.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_QKV.widths.values()), attention.n_heads
        self.own, self.norm = model.own, NormPass(model, norm)

    def forward(self, x_ND: Tensor, sight: Any, keys_P: Tensor) -> tuple[Tensor, _SelfSaved]:
        qkv_NP = x_ND @ self.W_QKV.rough
        attended = self.own.attend(AttentionInputs(*qkv_NP.split(self.widths, 1)), sight, self.n_heads)
        out_ND, normed = self.norm.forward(x_ND, attended.head_NP @ self.W_O.rough, keys_P)
        return out_ND, _SelfSaved(x_ND, qkv_NP, attended, normed)

    def backward(self, grad_ND: Tensor, saved: _SelfSaved, sight: Any) -> Tensor:
        grad_x_ND, grad_y_ND = self.norm.backward(grad_ND, saved.normed)
        self.W_O.learn(saved.attended.head_NP, grad_y_ND)
        grad_qkv_NP = torch.empty_like(saved.qkv_NP)
        inputs = AttentionInputs(*saved.qkv_NP.split(self.widths, 1))
        grads = AttentionInputs(*grad_qkv_NP.split(self.widths, 1))
        self.own.attend_backward(grad_y_ND @ self.W_O.rough.T, inputs, saved.attended, sight, self.n_heads, grads)
        self.W_QKV.learn(saved.x_ND, grad_qkv_NP)
        return grad_x_ND.addmm_(grad_qkv_NP, self.W_QKV.rough.T)


class _SelfSaved(NamedTuple):
    x_ND: Tensor
    qkv_NP: Tensor
    attended: Any
    normed: Any


class MemoryAttentionPass:
    """Its keys and values are made of the memory for all layers at once, outside."""

    def __init__(self, model: WrittenPass, attention: MemoryAttention, norm: AddAndNorm) -> None:
        self.W_Q, self.W_O = model.matrix(attention.W_Q.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_KV.widths.values()), attention.n_heads
        self.own, self.norm = model.own, NormPass(model, norm)

    def forward(self, x_TD: Tensor, kv_SP: Tensor, sight: Any, keys_P: Tensor) -> tuple[Tensor, _MemorySaved]:
        query_TP = x_TD @ self.W_Q.rough
        attended = self.own.attend(AttentionInputs(query_TP, *kv_SP.split(self.widths, 1)), sight, self.n_heads)
        out_TD, normed = self.norm.forward(x_TD, attended.head_NP @ self.W_O.rough, keys_P)
        return out_TD, _MemorySaved(x_TD, query_TP, attended, normed)

    def backward(self, grad_TD: Tensor, saved: _MemorySaved, kv_SP: Tensor, grad_kv_SP: Tensor, sight: Any) -> Tensor:
        grad_x_TD, grad_y_TD = self.norm.backward(grad_TD, saved.normed)
        self.W_O.learn(saved.attended.head_NP, grad_y_TD)
        inputs = AttentionInputs(saved.query_TP, *kv_SP.split(self.widths, 1))
        grads = AttentionInputs(torch.empty_like(saved.query_TP), *grad_kv_SP.split(self.widths, 1))
        self.own.attend_backward(grad_y_TD @ self.W_O.rough.T, inputs, saved.attended, sight, self.n_heads, grads)
        self.W_Q.learn(saved.x_TD, grads.query_NP)
        return grad_x_TD.addmm_(grads.query_NP, self.W_Q.rough.T)


class _MemorySaved(NamedTuple):
    x_TD: Tensor
    query_TP: Tensor
    attended: Any
    normed: Any


class FeedForwardPass:
    def __init__(self, model: WrittenPass, feed_forward: FeedForward, norm: AddAndNorm) -> None:
        one, two = feed_forward.W_1, feed_forward.W_2
        assert one.b is not None
        assert two.b is not None
        self.W_1, self.W_2 = model.matrix(one.W), model.matrix(two.W)
        self.b_1, self.b_2 = model.matrix(one.b), model.matrix(two.b)
        self.own, self.norm = model.own, NormPass(model, norm)

    def forward(self, x_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, _FeedForwardSaved]:
        hidden_NF = self.own.linear_relu(x_ND, self.W_1.rough, self.b_1.rough)
        y_ND = torch.addmm(self.b_2.rough, hidden_NF, self.W_2.rough)
        out_ND, normed = self.norm.forward(x_ND, y_ND, keys_P)
        return out_ND, _FeedForwardSaved(x_ND, hidden_NF, normed)

    def backward(self, grad_ND: Tensor, saved: _FeedForwardSaved) -> Tensor:
        grad_x_ND, grad_y_ND = self.norm.backward(grad_ND, saved.normed, gradient_of(self.b_2.parameter))
        self.W_2.learn(saved.hidden_NF, grad_y_ND)
        grad_hidden_NF = grad_y_ND @ self.W_2.rough.T
        self.own.relu_backward_(grad_hidden_NF, saved.hidden_NF, gradient_of(self.b_1.parameter))
        self.W_1.learn(saved.x_ND, grad_hidden_NF)
        return grad_x_ND.addmm_(grad_hidden_NF, self.W_1.rough.T)


class _FeedForwardSaved(NamedTuple):
    x_ND: Tensor
    hidden_NF: Tensor
    normed: Any


class NormPass:
    def __init__(self, model: WrittenPass, norm: AddAndNorm) -> None:
        self.own, self.norm, self.place = model.own, norm, model.next_place()

    def forward(self, x_ND: Tensor, y_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, Any]:
        dropout = Dropout(self.norm.dropout, keys_P, self.place)
        return self.own.add_and_norm(x_ND, y_ND, self.norm.weight, self.norm.bias, self.norm.eps, dropout)

    def backward(self, grad_ND: Tensor, normed: Any, y_bias_grad_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gradients of x and of y; that of a bias in y is added to."""
        weight, bias = self.norm.weight, self.norm.bias
        grads = NormGradients(gradient_of(weight), gradient_of(bias), y_bias_grad_D)
        grad_x_ND, grad_y_ND = self.own.add_and_norm_backward(grad_ND, normed, weight, bias, grads)
        # Where nothing is dropped x and y have one gradient, and one of them will be added to.
        return grad_x_ND.clone() if grad_x_ND is grad_y_ND else grad_x_ND, grad_y_ND


# The whole pass


class WrittenPass:
    """Loss and gradients of a model's weights, which are read anew at each pass."""

    def __init__(self, model: Transformer, longest: int, dtype: torch.dtype, own: Operations) -> None:
        """`longest`: tokens of a sentence of either side, the end mark counted."""
        self.model, self.dtype, self.config, self.own = model, dtype, model.config, own
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
        if model.embedding.source_positions is not None and longest > self.config.max_positions:
            raise DataError(
                f"a sentence has {longest} tokens, but model.max_positions is {self.config.max_positions}: raise it"
            )
        positions = torch.arange(longest, device=self.rough_W_KV.device)
        self.sinusoid_TD = sinusoid(positions, self.config.d_model).to(self.output.parameter.dtype)

    def matrix(self, parameter: Tensor) -> Matrix:
        return self._matrices.setdefault(id(parameter), Matrix(parameter, self.dtype))

    def next_place(self) -> int:
        self._n_places += 1
        return self._n_places - 1

    @torch.no_grad()
    def add_gradients(self, given: Given, label_smoothing: float, factor_1: Tensor) -> Tensor:
        """Adds the gradient of the summed loss times `factor_1` to each parameter's; returns the sum."""
        self._refresh()
        memory_SD, encoder_saved = self._encode(given)
        kv_SP = memory_SD @ self.rough_W_KV
        x_TD, decoder_saved = self._decode(given, kv_SP)
        loss_sum, grad_TD = self.own.projected_loss(
            x_TD,
            self.output.rough,
            gradient_of(self.output.parameter),
            given.target_out_T,
            label_smoothing,
            self.config.pad_id,
            factor_1,
        )
        grad_kv_SP = torch.empty_like(kv_SP)
        self._decode_backward(grad_TD, decoder_saved, given, kv_SP, grad_kv_SP)
        for W, own_grad_kv_SP in zip(self.W_KV, self._of_layers(grad_kv_SP), strict=True):
            add_product_(gradient_of(W), memory_SD.T, own_grad_kv_SP)
        self._encode_backward(grad_kv_SP @ self.rough_W_KV.T, encoder_saved, given)
        return loss_sum

    def _refresh(self) -> None:
        for rough, W in zip(self._of_layers(self.rough_W_KV), self.W_KV, strict=True):
            rough.copy_(W)
        rounded = [m for m in self._matrices.values() if m.rough.dtype != m.parameter.dtype]
        if rounded:
            torch._foreach_copy_([m.rough for m in rounded], [m.parameter for m in rounded])

    def _of_layers(self, kv_SP: Tensor) -> Sequence[Tensor]:
        return list(kv_SP.split([W.shape[1] for W in self.W_KV], 1))

    def _encode(self, given: Given) -> tuple[Tensor, list[Any]]:
        x_SD, embedding_saved = self._embed(given.source, given.keys_P, 0)
        saved = [embedding_saved]
        for attention, feed_forward in self.encoder:
            x_SD, attention_saved = attention.forward(x_SD, given.encoder, given.keys_P)
            x_SD, feed_forward_saved = feed_forward.forward(x_SD, given.keys_P)
            saved += [attention_saved, feed_forward_saved]
        return x_SD, saved

    def _encode_backward(self, grad_SD: Tensor, saved: list[Any], given: Given) -> None:
        for attention, feed_forward in reversed(self.encoder):
            grad_SD = feed_forward.backward(grad_SD, saved.pop())
            grad_SD = attention.backward(grad_SD, saved.pop(), given.encoder)
        self._embed_backward(grad_SD, given.source, saved.pop(), 0)

    def _decode(self, given: Given, kv_SP: Tensor) -> tuple[Tensor, list[Any]]:
        x_TD, embedding_saved = self._embed(given.target, given.keys_P, 1)
        saved = [embedding_saved]
        for (attention, memory, feed_forward), own_kv_SP in zip(self.decoder, self._of_layers(kv_SP), strict=True):
            x_TD, attention_saved = attention.forward(x_TD, given.decoder, given.keys_P)
            x_TD, memory_saved = memory.forward(x_TD, own_kv_SP, given.memory, given.keys_P)
            x_TD, feed_forward_saved = feed_forward.forward(x_TD, given.keys_P)
            saved += [attention_saved, memory_saved, feed_forward_saved]
        return x_TD, saved

    def _decode_backward(
        self, grad_TD: Tensor, saved: list[Any], given: Given, kv_SP: Tensor, grad_kv_SP: Tensor
    ) -> None:
        layers = zip(self.decoder, self._of_layers(kv_SP), self._of_layers(grad_kv_SP), strict=True)
        for (attention, memory, feed_forward), own_kv_SP, own_grad_kv_SP in reversed(list(layers)):
            grad_TD = feed_forward.backward(grad_TD, saved.pop())
            grad_TD = memory.backward(grad_TD, saved.pop(), own_kv_SP, own_grad_kv_SP, given.memory)
            grad_TD = attention.backward(grad_TD, saved.pop(), given.decoder)
        self._embed_backward(grad_TD, given.target, saved.pop(), 1)

    def _embed(self, side: Side, keys_P: Tensor, place: int) -> tuple[Tensor, Any]:
        table_VD, learned_TD = self._tables(place)
        position_TD = self.sinusoid_TD if learned_TD is None else learned_TD
        return self.own.embed(side, table_VD, position_TD, Dropout(self.config.dropout, keys_P, place), self.dtype)

    def _embed_backward(self, grad_ND: Tensor, side: Side, saved: Any, place: int) -> None:
        table_VD, learned_TD = self._tables(place)
        position_grad_TD = None if learned_TD is None else gradient_of(learned_TD)
        self.own.embed_backward(grad_ND, side, saved, gradient_of(table_VD), position_grad_TD)

    def _tables(self, place: int) -> tuple[Tensor, Tensor | None]:
        own = self.model.embedding
        return [(own.source_embedding, own.source_positions), (own.target_embedding, own.target_positions)][place]


# Passes over batches


def written_passes(
    model: Transformer, longest: int, dtype: torch.dtype, most_tokens: int, label_smoothing: float, n_threads: int = 1
) -> GraphPasses | ThreadPasses:
    """`longest`: tokens of a sentence; `most_tokens`: of a batch of either side; `n_threads`: on a CPU."""
    device = next(model.parameters()).device
    own = operations_on(device)
    if device.type == "cuda":
        return GraphPasses(WrittenPass(model, longest, dtype, own), most_tokens, label_smoothing)
    twins = [model, *(shadow(model) for _ in range(min(n_threads, MOST_WORKERS) - 1))]
    return ThreadPasses([WrittenPass(twin, longest, dtype, own) for twin in twins], label_smoothing, n_threads)


def shadow(model: Transformer) -> Transformer:
    """The same weights, in the same memory, with gradients of its own."""
    twin = Transformer(model.config)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.data, q.grad = p.data, torch.zeros_like(p)
    return twin.train()


class ThreadPasses:
    """On a CPU: one batch is cut into as many parts as there are workers, which meet only at the end of a pass. Threads
    inside each operation would wait for each other hundreds of times, and for long on a busy machine."""

    joins = False

    def __init__(self, runs: Sequence[WrittenPass], label_smoothing: float, n_threads: int) -> None:
        self.runs, self.label_smoothing, self.config = runs, label_smoothing, runs[0].config
        self.inner_threads = max(1, n_threads // len(runs))
        self.pool = ThreadPoolExecutor(max(1, len(runs) - 1), "pass", torch.set_num_threads, (self.inner_threads,))

    def add_gradients(self, batches: Sequence[Sequence[Tensor]], seed: Sequence[int], factor: float) -> Tensor:
        """Adds to each parameter's gradient; returns the summed loss."""
        (batch,) = batches
        n_rows, n_workers = len(batch[0]), len(self.runs)
        parts = list(zip(*(ids.split(-(-n_rows // n_workers)) for ids in batch), strict=True))

        def work(i: int) -> Tensor:
            given = padded(parts[i], [*seed, i], self.config, self.runs[i].dtype)
            return self.runs[i].add_gradients(given, self.label_smoothing, torch.tensor([factor]))

        others = [self.pool.submit(work, i) for i in range(1, len(parts))]
        try:
            loss_sum = work(0)
        finally:
            wait(others)  # whatever happened here, nobody works on when this is left
        for other in others:
            loss_sum += other.result()
        merging = [self.pool.submit(self._merge, i, len(parts)) for i in range(1, n_workers)]
        self._merge(0, len(parts))
        for one in merging:
            one.result()
        return loss_sum

    def _merge(self, i: int, n_parts: int) -> None:
        """A share of the parameters: their gradients, always added in the same order."""
        own, *others = (
            [gradient_of(p) for p in run.model.parameters()][i :: len(self.runs)] for run in self.runs[:n_parts]
        )
        for more in others:
            torch._foreach_add_(own, more)
            torch._foreach_zero_(more)

    def forget(self) -> None:
        """After a pass that failed: what workers had found of it."""
        for run in self.runs[1:]:
            torch._foreach_zero_([gradient_of(p) for p in run.model.parameters()])


class GraphPasses:
    """On a GPU: passes of a few shapes, each of which is recorded as a graph when it is first needed, and replayed from
    then on. Batches go through one behind another in the same pass, which is longer and has one of fewer shapes."""

    joins = True

    def __init__(self, run: WrittenPass, most_tokens: int, label_smoothing: float) -> None:
        self.run, self.label_smoothing, self.config = run, label_smoothing, run.config
        self.device = run.rough_W_KV.device
        self.grain = max(GRAIN, -(-most_tokens // (N_SHAPES * GRAIN)) * GRAIN)
        self.stream = torch.cuda.Stream()
        self.recorded: dict[Shape, _Recorded] = {}

    def add_gradients(self, batches: Sequence[Sequence[Tensor]], seed: Sequence[int], factor: float) -> Tensor:
        """Adds to each parameter's gradient; returns the summed loss, which the next pass may overwrite."""
        arrays = [[ids.numpy() for ids in batch] for batch in batches]
        n_source, n_target = (
            sum(int((batch[side] != self.config.pad_id).sum()) for batch in arrays) for side in (0, 2)
        )
        shape = Shape(*(-(-n // self.grain) * self.grain for n in (n_source, n_target)))
        ints = torch.from_numpy(pack(arrays, shape, seed, self.config))
        recorded = self.recorded.get(shape) or self._record(ints, shape)
        recorded.ints.copy_(ints.pin_memory(), non_blocking=True)
        recorded.factor_1.fill_(factor)
        recorded.graph.replay()
        return recorded.loss_sum

    def _record(self, ints: Tensor, shape: Shape) -> _Recorded:
        on_device = ints.to(self.device)
        factor_1 = torch.zeros(1, device=self.device)  # so that the trial below adds nothing to the gradients
        given, graph = unpack(on_device, shape), torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):  # compiles what is not compiled yet, which no graph can
                self.run.add_gradients(given, self.label_smoothing, factor_1)
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)
        # All use the same memory: they never run at once, and none needs what another left there.
        pool = next(iter(self.recorded.values())).graph.pool() if self.recorded else None
        # Other threads, such as the one that fetches batches, may go on meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            loss_sum = self.run.add_gradients(given, self.label_smoothing, factor_1)
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
