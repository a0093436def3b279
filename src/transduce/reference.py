"""The paper in NumPy, in the order of its sections. Read it beside the paper; tests compare `model.py` with it.

It is not fast, and it cannot train. The weights are one flat dictionary, as in a model folder, with names such as
`encoder.0.self_attention.W_Q`, `decoder.2.feed_forward.b_1` and `source_embedding`. Tied matrices occur once, under
the first of their names. All matrices multiply from the right, x W, as in the paper.
"""

# Axes: B batch, S source positions, T target positions, V vocabulary, D = d_model, I = d_model / 2, L layers.
# In attention: H heads, Q queries, M attended positions, K = d_k, U = d_v, P all heads side by side.

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transduce.config import ModelConfig

Array = NDArray[Any]
Weights = Mapping[str, Array]


class Output(NamedTuple):
    """Logits, and the attention weights of all layers."""

    logits_BTV: Array
    encoder_LBHSS: Array
    decoder_LBHTT: Array
    memory_LBHTS: Array


def transformer(weights: Weights, config: ModelConfig, source_BS: Array, target_in_BT: Array) -> Output:
    """Figure 1: logits of the token that follows each position of `target_in_BT`."""
    memory_BSD, encoder_LBHSS = encode(weights, config, source_BS)
    x_BTD, decoder_LBHTT, memory_LBHTS = decode(weights, config, target_in_BT, memory_BSD, source_BS)
    return Output(output_logits(weights, x_BTD), encoder_LBHSS, decoder_LBHTT, memory_LBHTS)


# 3.1 Encoder and decoder stacks


def encode(weights: Weights, config: ModelConfig, source_BS: Array) -> tuple[Array, Array]:
    """The memory (the output of the encoder), and the attention weights. Layers have two sub-layers."""
    x_BSD = embed(weights, config, source_BS, "source")
    is_token_B1S = not_padding(source_BS, config.pad_id)[:, None, :]
    visible_BSS = is_token_B1S & in_window(source_BS.shape[1], config.attention_window)
    weight_LBHSS = []
    for i in range(config.n_encoder_layers):
        layer = weights_under(weights, f"encoder.{i}")
        input_BSD = before(layer, config, "self_attention", x_BSD)
        attended_BSD, weight_BHSS = multi_head(layer, "self_attention", config, input_BSD, input_BSD, visible_BSS)
        x_BSD = after(layer, config, "self_attention", x_BSD, attended_BSD)
        x_BSD = feed_forward_sub_layer(layer, config, x_BSD)
        weight_LBHSS.append(weight_BHSS)
    return final_norm(weights, config, "encoder", x_BSD), np.stack(weight_LBHSS)


def decode(
    weights: Weights, config: ModelConfig, target_in_BT: Array, memory_BSD: Array, source_BS: Array
) -> tuple[Array, Array, Array]:
    """The output of the decoder, and the attention weights of both kinds. Layers have three sub-layers."""
    x_BTD = embed(weights, config, target_in_BT, "target")
    n = target_in_BT.shape[1]
    # Padding is to the right of every token, so a token that does not look ahead does not see padding either.
    visible_BTT = np.broadcast_to(not_ahead(n) & in_window(n, config.attention_window), (len(x_BTD), n, n))
    memory_visible_BTS = np.broadcast_to(
        not_padding(source_BS, config.pad_id)[:, None, :], (len(x_BTD), n, source_BS.shape[1])
    )
    self_LBHTT, memory_LBHTS = [], []
    for i in range(config.n_decoder_layers):
        layer = weights_under(weights, f"decoder.{i}")
        input_BTD = before(layer, config, "self_attention", x_BTD)
        attended_BTD, self_BHTT = multi_head(layer, "self_attention", config, input_BTD, input_BTD, visible_BTT)
        x_BTD = after(layer, config, "self_attention", x_BTD, attended_BTD)
        input_BTD = before(layer, config, "memory_attention", x_BTD)
        attended_BTD, memory_BHTS = multi_head(
            layer, "memory_attention", config, input_BTD, memory_BSD, memory_visible_BTS
        )
        x_BTD = after(layer, config, "memory_attention", x_BTD, attended_BTD)
        x_BTD = feed_forward_sub_layer(layer, config, x_BTD)
        self_LBHTT.append(self_BHTT)
        memory_LBHTS.append(memory_BHTS)
    return final_norm(weights, config, "decoder", x_BTD), np.stack(self_LBHTT), np.stack(memory_LBHTS)


def before(layer: Weights, config: ModelConfig, sub_layer: str, x: Array) -> Array:
    """The input of a sub-layer: x itself. Not in the paper: LayerNorm(x) with pre-norm."""
    return x if config.norm == "post" else layer_norm(layer, f"{sub_layer}_norm", config.norm_eps, x)


def after(layer: Weights, config: ModelConfig, sub_layer: str, x: Array, sub_layer_x: Array) -> Array:
    """LayerNorm(x + Sublayer(x)). Not in the paper: x + Sublayer(LayerNorm(x)) with pre-norm."""
    x = x + sub_layer_x
    return layer_norm(layer, f"{sub_layer}_norm", config.norm_eps, x) if config.norm == "post" else x


def layer_norm(layer: Weights, name: str, eps: float, x: Array) -> Array:
    """Layer normalisation: mean 0 and variance 1 over the last axis, then a learned gain and bias."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    normalised: Array = (x - mean) / np.sqrt(variance + eps) * layer[f"{name}.gain"] + layer[f"{name}.bias"]
    return normalised


def final_norm(weights: Weights, config: ModelConfig, stack: str, x: Array) -> Array:
    """Not in the paper: with pre-norm, nothing else normalises the sum of all residual connections."""
    return x if config.norm == "post" else layer_norm(weights, f"{stack}_norm", config.norm_eps, x)


# 3.2.1 Scaled dot-product attention


def softmax(x: Array) -> Array:
    """Softmax over the last axis. The maximum is subtracted first, so that no exponential overflows."""
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    return e


def log_sum_exp(x: Array) -> Array:
    """log(sum(exp(x))) over the last axis, without overflow."""
    largest = x.max(-1)
    log_sum: Array = largest + np.log(np.exp(x - largest[..., None]).sum(-1))
    return log_sum


def attend(query_BHQK: Array, key_BHMK: Array, value_BHMU: Array, visible_BQM: Array) -> tuple[Array, Array]:
    """Equation 1: softmax(Q K^T / sqrt(d_k)) V. Also returns the attention weights.

    As in the paper, Q, K and V may also be matrices: one head of one sentence, without the axes B and H.
    """
    d_k = query_BHQK.shape[-1]
    score_BHQM = query_BHQK @ key_BHMK.swapaxes(-1, -2) / math.sqrt(d_k)
    # All heads of a sentence see the same positions.
    visible_B1QM = visible_BQM[:, None] if (score_BHQM.ndim, visible_BQM.ndim) == (4, 3) else visible_BQM
    score_BHQM = np.where(visible_B1QM, score_BHQM, np.finfo(score_BHQM.dtype).min)
    weight_BHQM = softmax(score_BHQM) * visible_B1QM  # a query that sees no position gives zeros, not NaN
    return weight_BHQM @ value_BHMU, weight_BHQM


# Visibility: True means that the query may see the position. Section 3.2.3 forbids looking ahead, and section 4 has the
# window. The paper does not mention padding, which batches need.


def not_padding(ids_BM: Array, pad_id: int) -> Array:
    return np.not_equal(ids_BM, pad_id)


def not_ahead(n: int) -> Array:
    """Position q sees itself and the positions before it."""
    return np.tri(n, dtype=bool)


def in_window(n: int, window: int | None) -> Array:
    """The neighbourhood of size r = `window` around each position; everything if it is None."""
    position = np.arange(n)
    distance = np.abs(position[:, None] - position)
    return np.ones((n, n), dtype=bool) if window is None else 2 * distance <= window


# 3.2.2 Multi-head attention


def multi_head(
    layer: Weights, name: str, config: ModelConfig, x_BQD: Array, memory_BMD: Array, visible_BQM: Array
) -> tuple[Array, Array]:
    """Concat(head_1, ..., head_h) W_O where head_i = Attention(x W_i^Q, memory W_i^K, memory W_i^V)."""
    weights = weights_under(layer, name)
    query_BHQK = split_heads(linear(weights, "Q", x_BQD), config.n_heads)
    key_BHMK = split_heads(linear(weights, "K", memory_BMD), config.n_heads)
    value_BHMU = split_heads(linear(weights, "V", memory_BMD), config.n_heads)
    head_BHQU, weight_BHQM = attend(query_BHQK, key_BHMK, value_BHMU, visible_BQM)
    concat_BQP = head_BHQU.swapaxes(1, 2).reshape(*x_BQD.shape[:2], config.n_heads * config.d_v)
    return linear(weights, "O", concat_BQP), weight_BHQM


def split_heads(x_BQP: Array, n_heads: int) -> Array:
    return x_BQP.reshape(*x_BQP.shape[:2], n_heads, x_BQP.shape[2] // n_heads).swapaxes(1, 2)


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"W_{name}"] + weights.get(f"b_{name}", 0)


# 3.3 Position-wise feed-forward networks


def feed_forward_sub_layer(layer: Weights, config: ModelConfig, x: Array) -> Array:
    sub_layer_x = feed_forward(weights_under(layer, "feed_forward"), config, before(layer, config, "feed_forward", x))
    return after(layer, config, "feed_forward", x, sub_layer_x)


def feed_forward(weights: Weights, config: ModelConfig, x_BTD: Array) -> Array:
    """Equation 2: max(0, x W_1 + b_1) W_2 + b_2."""
    return linear(weights, "2", ACTIVATIONS[config.activation](linear(weights, "1", x_BTD)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def gelu(x: Array) -> Array:
    """Not in the paper, but common in other Transformers."""
    activated: Array = x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))) / 2
    return activated


def swish(x: Array) -> Array:
    """Not in the paper, but used by Marian models."""
    activated: Array = x * (1 + np.tanh(x / 2)) / 2  # equals x / (1 + exp(-x)), which overflows for large negative x
    return activated


ACTIVATIONS = {"relu": relu, "gelu": gelu, "swish": swish}


# 3.4 Embeddings and softmax


def embed(weights: Weights, config: ModelConfig, ids_BT: Array, side: Literal["source", "target"]) -> Array:
    """Embeddings times sqrt(d_model), plus the positional encoding of 3.5."""
    table_VD = weights.get(f"{side}_embedding", weights["source_embedding"])
    n = ids_BT.shape[1]
    if config.positions == "learned":
        assert n <= config.max_positions
        position_TD = weights[f"{side}_positions"][:n]
    else:
        position_TD = sinusoid(np.arange(n), config.d_model).astype(table_VD.dtype)
    return table_VD[ids_BT] * math.sqrt(config.d_model) + position_TD


def output_logits(weights: Weights, x_BTD: Array) -> Array:
    """The linear transformation before the softmax. If it is tied, its matrix is that of the embedding."""
    table_VD = weights.get("output_projection", weights.get("target_embedding", weights["source_embedding"]))
    return x_BTD @ table_VD.T + weights.get("output_bias", 0)


# 3.5 Positional encoding


def sinusoid(position_T: Array, d_model: int) -> Array:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model))."""
    angle_TI = position_T[:, None] / 10000 ** (np.arange(0, d_model, 2) / d_model)
    return np.stack([np.sin(angle_TI), np.cos(angle_TI)], axis=-1).reshape(len(position_T), d_model)


# 5.3 Optimizer


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3. Steps are counted from 1."""
    if min(step, warmup_steps) < 1:
        raise ValueError(f"step is {step} and warmup_steps is {warmup_steps}: both must be at least 1")
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


# 5.4 Regularization


def smoothed_targets(
    target_BT: Array, vocab_size: int, label_smoothing: float, over: Literal["vocabulary", "other words"] = "vocabulary"
) -> Array:
    """Label smoothing: the distribution that training compares the model's probabilities with.

    "vocabulary" mixes in the uniform distribution over all V entries, as in the article that the paper cites.
    Not in the paper: "other words", as in much teaching code, keeps 1 - eps for the target and gives eps / (V - 2)
    to every other entry except padding (id 0).
    """
    one_hot_BTV = np.zeros((*target_BT.shape, vocab_size))
    np.put_along_axis(one_hot_BTV, target_BT[..., None], 1, axis=-1)
    if over == "vocabulary":
        return (1 - label_smoothing) * one_hot_BTV + label_smoothing / vocab_size
    other_BTV = 1 - one_hot_BTV
    other_BTV[..., 0] = 0
    return (1 - label_smoothing) * one_hot_BTV + other_BTV * label_smoothing / (vocab_size - 2)


def loss(logits_BTV: Array, target_out_BT: Array, label_smoothing: float, pad_id: int) -> tuple[float, int]:
    """The cross-entropy with smoothed targets, summed over all tokens, and the number of tokens."""
    log_prob_BTV = logits_BTV - log_sum_exp(logits_BTV)[..., None]
    target_BTV = smoothed_targets(target_out_BT, logits_BTV.shape[-1], label_smoothing)
    is_token_BT = not_padding(target_out_BT, pad_id)
    return float(-((target_BTV * log_prob_BTV).sum(-1) * is_token_BT).sum()), int(is_token_BT.sum())


# Greedy search: each step takes the most probable next token. The paper uses beam search, which is in `search`.


def greedy(weights: Weights, config: ModelConfig, source_BS: Array, max_extra_tokens: int) -> list[list[int]]:
    """Translations without end marks. Each token needs a complete pass of the decoder, because there is no cache."""
    memory_BSD, _ = encode(weights, config, source_BS)
    limit_B = not_padding(source_BS, config.pad_id).sum(1) + max_extra_tokens
    target_BT = np.full((len(source_BS), 1), config.bos_id)
    is_running_B = limit_B > 0
    while is_running_B.any():
        x_BTD, _, _ = decode(weights, config, target_BT, memory_BSD, source_BS)
        next_B = output_logits(weights, x_BTD)[:, -1].argmax(-1)
        target_BT = np.concatenate([target_BT, next_B[:, None]], axis=1)
        is_running_B = is_running_B & (next_B != config.eos_id) & (target_BT.shape[1] - 1 < limit_B)
    return [trim(row, config, int(limit)) for row, limit in zip(target_BT[:, 1:], limit_B, strict=True)]


def trim(row_T: Array, config: ModelConfig, limit: int) -> list[int]:
    """The tokens before the end mark, or the first `limit` tokens if there is no end mark among them."""
    ids = [int(i) for i in row_T[:limit]]
    return ids[: ids.index(config.eos_id)] if config.eos_id in ids else ids


# Weights


def load_weights(path: str | Path) -> dict[str, Array]:
    """Read the weights file of a model folder."""
    from safetensors.numpy import load_file

    return load_file(path)


def weights_under(weights: Weights, path: str) -> dict[str, Array]:
    """The weights of one layer or sub-layer: names that start with `path.`, which is removed."""
    prefix = f"{path}."
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}
