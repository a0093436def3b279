"""Conversion of a model to a CTranslate2 model folder, with the same weights or with quantised ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.data.subword import SUBWORDS, Subwords
from transduce.errors import ConfigError
from transduce.files import atomic_folder
from transduce.model import Transformer, sinusoid

N_POSITIONS = 1024
"""Rows of the table of sinusoids. CTranslate2 stores such a table; our model computes sinusoids when it needs them."""


def to_ctranslate2(model: Transformer, subwords: Subwords, out: Path, quantization: str | None = None) -> None:
    """Write the folder `out` atomically.

    `quantization` is CTranslate2's name: int8, float16, ...; None for float32. The input of CTranslate2 is subword
    pieces without an end mark, which it adds. Its beam search ranks as ours does with the length penalty "length".

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from transduce import Translator
    >>> from transduce.interop import to_ctranslate2
    >>> translator = Translator.load(device="cpu")
    >>> with TemporaryDirectory() as folder:
    ...     to_ctranslate2(translator.model, translator.subwords, Path(folder) / "model", "int8")
    ...     print(*sorted(path.name for path in (Path(folder) / "model").iterdir()))
    config.json model.bin shared_vocabulary.json subwords.model
    """
    spec = specification(model, subwords)
    spec.validate()
    spec.optimize(quantization=quantization)
    with atomic_folder(out) as unfinished:
        spec.save(str(unfinished))
        subwords.save(unfinished / SUBWORDS)


def specification(model: Transformer, subwords: Subwords) -> Any:
    """The model as a CTranslate2 `TransformerSpec`."""
    from ctranslate2.specs import TransformerSpec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    check(config)
    activation = {"relu": Activation.RELU, "gelu": Activation.GELU, "swish": Activation.SWISH}[config.activation]
    spec = TransformerSpec.from_config(
        (config.n_encoder_layers, config.n_decoder_layers),
        config.n_heads,
        pre_norm=config.norm == "pre",
        activation=activation,
    )
    model = copy.deepcopy(model)  # CTranslate2 quantises in place
    weights, embedding = model.weights(), model.embedding
    sides = (
        (spec.encoder, "encoder", spec.encoder.embeddings[0], embedding.source_embedding, embedding.source_positions),
        (spec.decoder, "decoder", spec.decoder.embeddings, embedding.target_embedding, embedding.target_positions),
    )
    for stack, name, table, embedding_VD, learned in sides:
        table.weight = embedding_VD.detach()
        stack.scale_embeddings = True
        sinusoids = sinusoid(torch.arange(N_POSITIONS), config.d_model)
        stack.position_encodings.encodings = (sinusoids if learned is None else learned.detach()).float()
        for i, layer in enumerate(stack.layer):
            fill_layer(layer, weights, f"{name}.{i}")
        if config.norm == "pre":
            fill_norm(stack.layer_norm, weights, f"{name}_norm")
    spec.decoder.projection.weight = embedding.output_projection.detach()
    if embedding.output_bias is not None:
        spec.decoder.projection.bias = embedding.output_bias.detach()
    register_vocabulary(spec, config, subwords)
    return spec


def fill_layer(layer: Any, weights: dict[str, Tensor], name: str) -> None:
    self_attention, memory_attention = f"{name}.self_attention", f"{name}.memory_attention"
    fill_linear(layer.self_attention.linear[0], weights, self_attention, "QKV")
    fill_linear(layer.self_attention.linear[1], weights, self_attention, "O")
    fill_norm(layer.self_attention.layer_norm, weights, f"{self_attention}_norm")
    if hasattr(layer, "attention"):
        for linear, parts in zip(layer.attention.linear, ("Q", "KV", "O"), strict=True):
            fill_linear(linear, weights, memory_attention, parts)
        fill_norm(layer.attention.layer_norm, weights, f"{memory_attention}_norm")
    fill_linear(layer.ffn.linear_0, weights, f"{name}.feed_forward", "1")
    fill_linear(layer.ffn.linear_1, weights, f"{name}.feed_forward", "2")
    fill_norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward_norm")


def fill_linear(linear: Any, weights: dict[str, Tensor], name: str, parts: Sequence[str]) -> None:
    """CTranslate2 transposes matrices, and stacks those with the same input on top of each other."""
    linear.weight = torch.cat([weights[f"{name}.W_{part}"].T for part in parts]).contiguous()
    if f"{name}.b_{parts[0]}" in weights:
        linear.bias = torch.cat([weights[f"{name}.b_{part}"] for part in parts])


def fill_norm(norm: Any, weights: dict[str, Tensor], name: str) -> None:
    norm.gamma, norm.beta = weights[f"{name}.gain"], weights[f"{name}.bias"]


def register_vocabulary(spec: Any, config: ModelConfig, subwords: Subwords) -> None:
    """Entries of the model's vocabulary that have no subword are named by their id, such as "<300>"."""
    pieces = subwords.pieces(range(len(subwords)))
    for size, register in (
        (config.source_vocab_size, spec.register_source_vocabulary),
        (config.target_vocab_size, spec.register_target_vocabulary),
    ):
        register([*pieces, *(f"<{i}>" for i in range(len(pieces), size))])
    spec.config.bos_token = spec.config.decoder_start_token = pieces[config.bos_id]
    spec.config.eos_token, spec.config.unk_token = pieces[config.eos_id], pieces[3]
    spec.config.add_source_eos, spec.config.layer_norm_epsilon = True, config.norm_eps


def check(config: ModelConfig) -> None:
    """Refuse models that CTranslate2 does not support."""
    width = config.d_model // config.n_heads
    for name, required in (("d_k", width), ("d_v", width), ("attention_window", None)):
        if (value := getattr(config, name)) != required:
            raise ConfigError(f"CTranslate2 requires model.{name}={required}, this model has {value}")
