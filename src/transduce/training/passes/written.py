"""The forward and backward pass of training, written out with the operations of `cpu.py` or `cuda.py`.

Its slow twin is `recipe.model_loss` with autograd. The backward pass is written layer by layer, for three reasons:
matrix products add directly to the gradients, most of what autograd would store is not stored, and the whole pass can
be recorded as a CUDA graph, so that a replay needs no Python.
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
    NormGradients,
    PassInputs,
    Shape,
    Side,
    pack,
    padded_inputs,
    unpack,
)
from transduce.training.passes.loss import add_product_

COVERED = ("training/passes/*.py", "model.py")
"""The sources that a measurement of these passes on a GPU covers. It is stale once one of them changes."""
GRAIN = 64
"""Lengths of passes on a GPU are multiples of this, which is the tile of matrix products."""
MAX_WORKERS = 4
"""Parts of a batch that run at once on a CPU. Each worker has gradients of its own, so memory grows with them."""
N_SHAPES = 24
"""Lengths of a pass on a GPU, in equal steps up to the longest. More lengths waste less padding but record longer."""


def why_not(config: ModelConfig, device: str) -> str | None:
    """The first property of this model that the written passes do not support, in words; None if they support it."""
    on_cpu, widths = device == "cpu", {config.d_k, config.d_v}
    unsupported = {
        "model.norm is pre": config.norm == "pre",
        f"model.activation is {config.activation}": config.activation != "relu",
        "there is dropout on attention weights": config.attention_dropout > 0,
        "there is dropout in the feed-forward network": config.ffn_dropout > 0,
        "attention has biases": config.attention_bias,
        "the output has a bias": config.output_bias,
        f"a head is {config.d_k} and {config.d_v} wide": len(widths) > 1 if on_cpu else not widths <= {16, 32, 64, 128},
        "attention has a window": on_cpu and config.attention_window is not None,
    }
    return next((name for name, is_so in unsupported.items() if is_so), None)


class Operations(Protocol):
    """The functions of `cpu.py` and `cuda.py`. Forward functions return what their backward functions need (`Any`)."""

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
    def attend(self, inputs: AttentionInputs, visible: Any, n_heads: int) -> Any: ...
    def attend_backward(
        self,
        grad_NP: Tensor,
        inputs: AttentionInputs,
        attended: Any,
        visible: Any,
        n_heads: int,
        grads: AttentionInputs,
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
    """A parameter, and its copy in the precision of products. With equal precision both are one tensor."""

    def __init__(self, parameter: Tensor, dtype: torch.dtype) -> None:
        self.parameter, self.low_precision = parameter, parameter.detach().to(dtype)

    def add_gradient(self, x_ND: Tensor, grad_NF: Tensor) -> None:
        add_product_(gradient_of(self.parameter), x_ND.T, grad_NF)


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a pass adds to existing gradients"
    return parameter.grad


# Sub-layers, forward and backward


class SelfAttentionPass:
    def __init__(self, model: WrittenPass, attention: SelfAttention, norm: AddAndNorm) -> None:
        self.W_QKV, self.W_O = model.matrix(attention.W_QKV.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_QKV.widths.values()), attention.n_heads
        self.operations, self.norm = model.operations, NormPass(model, norm)

    def forward(self, x_ND: Tensor, visible: Any, keys_P: Tensor) -> tuple[Tensor, _SelfSaved]:
        qkv_NP = x_ND @ self.W_QKV.low_precision
        inputs = AttentionInputs(*qkv_NP.split(self.widths, 1))
        attended = self.operations.attend(inputs, visible, self.n_heads)
        out_ND, normed = self.norm.forward(x_ND, attended.head_NP @ self.W_O.low_precision, keys_P)
        return out_ND, _SelfSaved(x_ND, qkv_NP, attended, normed)

    def backward(self, grad_ND: Tensor, saved: _SelfSaved, visible: Any) -> Tensor:
        grad_x_ND, grad_y_ND = self.norm.backward(grad_ND, saved.normed)
        self.W_O.add_gradient(saved.attended.head_NP, grad_y_ND)
        grad_qkv_NP = torch.empty_like(saved.qkv_NP)
        inputs = AttentionInputs(*saved.qkv_NP.split(self.widths, 1))
        grads = AttentionInputs(*grad_qkv_NP.split(self.widths, 1))
        grad_head_NP = grad_y_ND @ self.W_O.low_precision.T
        self.operations.attend_backward(grad_head_NP, inputs, saved.attended, visible, self.n_heads, grads)
        self.W_QKV.add_gradient(saved.x_ND, grad_qkv_NP)
        return grad_x_ND.addmm_(grad_qkv_NP, self.W_QKV.low_precision.T)


class _SelfSaved(NamedTuple):
    x_ND: Tensor
    qkv_NP: Tensor
    attended: Any
    normed: Any


class MemoryAttentionPass:
    """Keys and values come from outside: one product with the memory makes those of all layers."""

    def __init__(self, model: WrittenPass, attention: MemoryAttention, norm: AddAndNorm) -> None:
        self.W_Q, self.W_O = model.matrix(attention.W_Q.W), model.matrix(attention.W_O.W)
        self.widths, self.n_heads = list(attention.W_KV.widths.values()), attention.n_heads
        self.operations, self.norm = model.operations, NormPass(model, norm)

    def forward(self, x_TD: Tensor, kv_SP: Tensor, visible: Any, keys_P: Tensor) -> tuple[Tensor, _MemorySaved]:
        query_TP = x_TD @ self.W_Q.low_precision
        inputs = AttentionInputs(query_TP, *kv_SP.split(self.widths, 1))
        attended = self.operations.attend(inputs, visible, self.n_heads)
        out_TD, normed = self.norm.forward(x_TD, attended.head_NP @ self.W_O.low_precision, keys_P)
        return out_TD, _MemorySaved(x_TD, query_TP, attended, normed)

    def backward(self, grad_TD: Tensor, saved: _MemorySaved, kv_SP: Tensor, grad_kv_SP: Tensor, visible: Any) -> Tensor:
        grad_x_TD, grad_y_TD = self.norm.backward(grad_TD, saved.normed)
        self.W_O.add_gradient(saved.attended.head_NP, grad_y_TD)
        inputs = AttentionInputs(saved.query_TP, *kv_SP.split(self.widths, 1))
        grads = AttentionInputs(torch.empty_like(saved.query_TP), *grad_kv_SP.split(self.widths, 1))
        grad_head_TP = grad_y_TD @ self.W_O.low_precision.T
        self.operations.attend_backward(grad_head_TP, inputs, saved.attended, visible, self.n_heads, grads)
        self.W_Q.add_gradient(saved.x_TD, grads.query_NP)
        return grad_x_TD.addmm_(grads.query_NP, self.W_Q.low_precision.T)


class _MemorySaved(NamedTuple):
    x_TD: Tensor
    query_TP: Tensor
    attended: Any
    normed: Any


class FeedForwardPass:
    def __init__(self, model: WrittenPass, feed_forward: FeedForward, norm: AddAndNorm) -> None:
        first, second = feed_forward.W_1, feed_forward.W_2
        assert first.b is not None
        assert second.b is not None
        self.W_1, self.W_2 = model.matrix(first.W), model.matrix(second.W)
        self.b_1, self.b_2 = model.matrix(first.b), model.matrix(second.b)
        self.operations, self.norm = model.operations, NormPass(model, norm)

    def forward(self, x_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, _FeedForwardSaved]:
        hidden_NF = self.operations.linear_relu(x_ND, self.W_1.low_precision, self.b_1.low_precision)
        y_ND = torch.addmm(self.b_2.low_precision, hidden_NF, self.W_2.low_precision)
        out_ND, normed = self.norm.forward(x_ND, y_ND, keys_P)
        return out_ND, _FeedForwardSaved(x_ND, hidden_NF, normed)

    def backward(self, grad_ND: Tensor, saved: _FeedForwardSaved) -> Tensor:
        grad_x_ND, grad_y_ND = self.norm.backward(grad_ND, saved.normed, gradient_of(self.b_2.parameter))
        self.W_2.add_gradient(saved.hidden_NF, grad_y_ND)
        grad_hidden_NF = grad_y_ND @ self.W_2.low_precision.T
        self.operations.relu_backward_(grad_hidden_NF, saved.hidden_NF, gradient_of(self.b_1.parameter))
        self.W_1.add_gradient(saved.x_ND, grad_hidden_NF)
        return grad_x_ND.addmm_(grad_hidden_NF, self.W_1.low_precision.T)


class _FeedForwardSaved(NamedTuple):
    x_ND: Tensor
    hidden_NF: Tensor
    normed: Any


class NormPass:
    def __init__(self, model: WrittenPass, norm: AddAndNorm) -> None:
        self.operations, self.norm, self.place = model.operations, norm, model.next_place()

    def forward(self, x_ND: Tensor, y_ND: Tensor, keys_P: Tensor) -> tuple[Tensor, Any]:
        dropout = Dropout(self.norm.dropout, keys_P, self.place)
        return self.operations.add_and_norm(x_ND, y_ND, self.norm.weight, self.norm.bias, self.norm.eps, dropout)

    def backward(self, grad_ND: Tensor, normed: Any, y_bias_grad_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and y, and adds to `y_bias_grad_D`, the gradient of a bias in y."""
        weight, bias = self.norm.weight, self.norm.bias
        grads = NormGradients(gradient_of(weight), gradient_of(bias), y_bias_grad_D)
        grad_x_ND, grad_y_ND = self.operations.add_and_norm_backward(grad_ND, normed, weight, bias, grads)
        # Without dropout x and y share one gradient tensor; the caller adds to that of x, so it needs its own copy.
        return grad_x_ND.clone() if grad_x_ND is grad_y_ND else grad_x_ND, grad_y_ND


# The whole pass


class WrittenPass:
    """Computes loss and gradients. Reads the weights of the model again at each pass."""

    def __init__(self, model: Transformer, longest: int, dtype: torch.dtype, operations: Operations) -> None:
        """`longest`: tokens of the longest sentence of either side, end mark included."""
        self.model, self.dtype, self.config, self.operations = model, dtype, model.config, operations
        self._n_places, self._matrices = 2, dict[int, Matrix]()  # places 0 and 1 belong to the embeddings
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
        self.low_precision_W_KV = torch.cat([W.detach() for W in self.W_KV], 1).to(dtype)
        self.output = self.matrix(model.embedding.output_projection)
        if model.embedding.source_positions is not None and longest > self.config.max_positions:
            raise DataError(
                f"a sentence has {longest} tokens, but model.max_positions is {self.config.max_positions}: raise it"
            )
        positions = torch.arange(longest, device=self.low_precision_W_KV.device)
        self.sinusoid_TD = sinusoid(positions, self.config.d_model).to(self.output.parameter.dtype)

    def matrix(self, parameter: Tensor) -> Matrix:
        return self._matrices.setdefault(id(parameter), Matrix(parameter, self.dtype))

    def next_place(self) -> int:
        """A new place of dropout, which has its own key."""
        self._n_places += 1
        return self._n_places - 1

    @torch.no_grad()
    def add_gradients(self, inputs: PassInputs, label_smoothing: float, factor_1: Tensor) -> Tensor:
        """Adds the gradient of the summed loss, times `factor_1`, to that of each parameter. Returns the sum."""
        self._refresh()
        memory_SD, encoder_saved = self._encode(inputs)
        kv_SP = memory_SD @ self.low_precision_W_KV
        x_TD, decoder_saved = self._decode(inputs, kv_SP)
        loss_sum, grad_TD = self.operations.projected_loss(
            x_TD,
            self.output.low_precision,
            gradient_of(self.output.parameter),
            inputs.target_out_T,
            label_smoothing,
            self.config.pad_id,
            factor_1,
        )
        grad_kv_SP = torch.empty_like(kv_SP)
        self._decode_backward(grad_TD, decoder_saved, inputs, kv_SP, grad_kv_SP)
        for W, layer_grad_kv_SP in zip(self.W_KV, self._by_layer(grad_kv_SP), strict=True):
            add_product_(gradient_of(W), memory_SD.T, layer_grad_kv_SP)
        self._encode_backward(grad_kv_SP @ self.low_precision_W_KV.T, encoder_saved, inputs)
        return loss_sum

    def _refresh(self) -> None:
        """Copies the parameters, which the optimiser has changed, to their copies of lower precision."""
        for low_precision, W in zip(self._by_layer(self.low_precision_W_KV), self.W_KV, strict=True):
            low_precision.copy_(W)
        copied = [m for m in self._matrices.values() if m.low_precision.dtype != m.parameter.dtype]
        if copied:
            torch._foreach_copy_([m.low_precision for m in copied], [m.parameter for m in copied])

    def _by_layer(self, kv_SP: Tensor) -> Sequence[Tensor]:
        return list(kv_SP.split([W.shape[1] for W in self.W_KV], 1))

    def _encode(self, inputs: PassInputs) -> tuple[Tensor, list[Any]]:
        x_SD, embedding_saved = self._embed(inputs.source, inputs.keys_P, 0)
        saved = [embedding_saved]
        for attention, feed_forward in self.encoder:
            x_SD, attention_saved = attention.forward(x_SD, inputs.encoder, inputs.keys_P)
            x_SD, feed_forward_saved = feed_forward.forward(x_SD, inputs.keys_P)
            saved += [attention_saved, feed_forward_saved]
        return x_SD, saved

    def _encode_backward(self, grad_SD: Tensor, saved: list[Any], inputs: PassInputs) -> None:
        for attention, feed_forward in reversed(self.encoder):
            grad_SD = feed_forward.backward(grad_SD, saved.pop())
            grad_SD = attention.backward(grad_SD, saved.pop(), inputs.encoder)
        self._embed_backward(grad_SD, inputs.source, saved.pop(), 0)

    def _decode(self, inputs: PassInputs, kv_SP: Tensor) -> tuple[Tensor, list[Any]]:
        x_TD, embedding_saved = self._embed(inputs.target, inputs.keys_P, 1)
        saved = [embedding_saved]
        for (attention, memory, feed_forward), layer_kv_SP in zip(self.decoder, self._by_layer(kv_SP), strict=True):
            x_TD, attention_saved = attention.forward(x_TD, inputs.decoder, inputs.keys_P)
            x_TD, memory_saved = memory.forward(x_TD, layer_kv_SP, inputs.memory, inputs.keys_P)
            x_TD, feed_forward_saved = feed_forward.forward(x_TD, inputs.keys_P)
            saved += [attention_saved, memory_saved, feed_forward_saved]
        return x_TD, saved

    def _decode_backward(
        self, grad_TD: Tensor, saved: list[Any], inputs: PassInputs, kv_SP: Tensor, grad_kv_SP: Tensor
    ) -> None:
        layers = zip(self.decoder, self._by_layer(kv_SP), self._by_layer(grad_kv_SP), strict=True)
        for (attention, memory, feed_forward), layer_kv_SP, layer_grad_kv_SP in reversed(list(layers)):
            grad_TD = feed_forward.backward(grad_TD, saved.pop())
            grad_TD = memory.backward(grad_TD, saved.pop(), layer_kv_SP, layer_grad_kv_SP, inputs.memory)
            grad_TD = attention.backward(grad_TD, saved.pop(), inputs.decoder)
        self._embed_backward(grad_TD, inputs.target, saved.pop(), 1)

    def _embed(self, side: Side, keys_P: Tensor, place: int) -> tuple[Tensor, Any]:
        table_VD, learned_TD = self._tables(place)
        position_TD = self.sinusoid_TD if learned_TD is None else learned_TD
        dropout = Dropout(self.config.dropout, keys_P, place)
        return self.operations.embed(side, table_VD, position_TD, dropout, self.dtype)

    def _embed_backward(self, grad_ND: Tensor, side: Side, saved: Any, place: int) -> None:
        table_VD, learned_TD = self._tables(place)
        position_grad_TD = None if learned_TD is None else gradient_of(learned_TD)
        self.operations.embed_backward(grad_ND, side, saved, gradient_of(table_VD), position_grad_TD)

    def _tables(self, place: int) -> tuple[Tensor, Tensor | None]:
        """Embeddings and learned positions of the source (place 0) or the target (place 1)."""
        embedding = self.model.embedding
        if place == 0:
            return embedding.source_embedding, embedding.source_positions
        return embedding.target_embedding, embedding.target_positions


# Passes over batches


def written_passes(
    model: Transformer, longest: int, dtype: torch.dtype, max_tokens: int, label_smoothing: float, n_threads: int = 1
) -> GraphPasses | ThreadPasses:
    """`longest`: tokens of the longest sentence. `max_tokens`: of a batch on either side. `n_threads`: on a CPU."""
    device = next(model.parameters()).device
    operations = operations_on(device)
    if device.type == "cuda":
        return GraphPasses(WrittenPass(model, longest, dtype, operations), max_tokens, label_smoothing)
    models = [model, *(sharing_weights(model) for _ in range(min(n_threads, MAX_WORKERS) - 1))]
    passes = [WrittenPass(worker_model, longest, dtype, operations) for worker_model in models]
    return ThreadPasses(passes, label_smoothing, n_threads)


def sharing_weights(model: Transformer) -> Transformer:
    """A model with the same weights in the same memory, but with gradients of its own."""
    twin = Transformer(model.config)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.data, q.grad = p.data, torch.zeros_like(p)
    return twin.train()


class ThreadPasses:
    """On a CPU: splits a batch into one part for each worker. Workers wait for each other only at the end of a pass.

    Threads inside each operation would wait for each other hundreds of times, and for long on a busy machine.
    """

    joins = False
    """Whether a pass takes several batches."""

    def __init__(self, passes: Sequence[WrittenPass], label_smoothing: float, n_threads: int) -> None:
        """`passes`: one for each worker. The first one has the gradients of the model."""
        self.passes, self.label_smoothing, self.config = passes, label_smoothing, passes[0].config
        self.inner_threads = max(1, n_threads // len(passes))
        self.pool = ThreadPoolExecutor(max(1, len(passes) - 1), "pass", torch.set_num_threads, (self.inner_threads,))

    def add_gradients(self, batches: Sequence[Sequence[Tensor]], seed: Sequence[int], factor: float) -> Tensor:
        """Adds to the gradient of each parameter and returns the summed loss."""
        (batch,) = batches
        n_rows, n_workers = len(batch[0]), len(self.passes)
        parts = list(zip(*(ids.split(-(-n_rows // n_workers)) for ids in batch), strict=True))

        def run_part(i: int) -> Tensor:
            inputs = padded_inputs(parts[i], [*seed, i], self.config, self.passes[i].dtype)
            return self.passes[i].add_gradients(inputs, self.label_smoothing, torch.tensor([factor]))

        futures = [self.pool.submit(run_part, i) for i in range(1, len(parts))]
        try:
            loss_sum = run_part(0)
        finally:
            wait(futures)  # after an error too: no worker may still run when this function ends
        for future in futures:
            loss_sum += future.result()
        merging = [self.pool.submit(self._merge, i, len(parts)) for i in range(1, n_workers)]
        self._merge(0, len(parts))
        for merge in merging:
            merge.result()
        return loss_sum

    def _merge(self, i: int, n_parts: int) -> None:
        """Adds the workers' gradients of every n-th parameter to those of the model, always in the same order."""
        gradients, *worker_gradients = (
            [gradient_of(p) for p in one.model.parameters()][i :: len(self.passes)] for one in self.passes[:n_parts]
        )
        for added in worker_gradients:
            torch._foreach_add_(gradients, added)
            torch._foreach_zero_(added)

    def forget(self) -> None:
        """After a pass that failed: clears the gradients that workers have so far."""
        for one in self.passes[1:]:
            torch._foreach_zero_([gradient_of(p) for p in one.model.parameters()])


class GraphPasses:
    """On a GPU: passes of a few shapes. Each shape is recorded as a graph when it is first needed, and then replayed.

    Several batches go through in one pass, packed one after another: passes are longer and need fewer shapes.
    """

    joins = True
    """Whether a pass takes several batches."""

    def __init__(self, written: WrittenPass, max_tokens: int, label_smoothing: float) -> None:
        self.written, self.label_smoothing, self.config = written, label_smoothing, written.config
        self.device = written.low_precision_W_KV.device
        self.grain = max(GRAIN, -(-max_tokens // (N_SHAPES * GRAIN)) * GRAIN)
        self.stream = torch.cuda.Stream()
        self.recorded: dict[Shape, _RecordedPass] = {}

    def add_gradients(self, batches: Sequence[Sequence[Tensor]], seed: Sequence[int], factor: float) -> Tensor:
        """Adds to the gradient of each parameter and returns the summed loss, which the next pass may overwrite."""
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

    def _record(self, ints: Tensor, shape: Shape) -> _RecordedPass:
        on_device = ints.to(self.device)
        factor_1 = torch.zeros(1, device=self.device)  # so that the trial below adds nothing to the gradients
        inputs, graph = unpack(on_device, shape), torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self.stream):  # a trial compiles kernels, which is not possible while recording
                self.written.add_gradients(inputs, self.label_smoothing, factor_1)
        finally:
            torch.cuda.current_stream().wait_stream(self.stream)
        # All graphs share one memory pool: they never run at once, and none reads what another has left there.
        pool = next(iter(self.recorded.values())).graph.pool() if self.recorded else None
        # Other threads, such as the one that prefetches batches, may use the GPU during the recording.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            loss_sum = self.written.add_gradients(inputs, self.label_smoothing, factor_1)
        self.recorded[shape] = _RecordedPass(graph, on_device, factor_1, loss_sum)
        return self.recorded[shape]

    def forget(self) -> None:
        """Removes all graphs: needed when gradients move in memory, or when memory runs out."""
        self.recorded.clear()


class _RecordedPass(NamedTuple):
    graph: torch.cuda.CUDAGraph
    ints: Tensor
    factor_1: Tensor
    loss_sum: Tensor
