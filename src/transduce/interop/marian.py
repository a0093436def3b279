"""Conversion of models to and from Hugging Face's Marian: names, orientation and order of dimensions of the weights."""

# Axes: D = d_model, T positions, V entries of a vocabulary.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.errors import ConfigError
from transduce.extras import missing
from transduce.model import Transformer, sinusoid


def to_marian(model: Transformer, n_positions: int = 1024) -> Any:
    """A `MarianMTModel` that gives the same logits, for texts of up to `n_positions` tokens.

    Its layer norms use `norm_eps` of our model. Marian's format cannot store it: after saving and loading it is 1e-5.

    >>> from transduce import Translator
    >>> from transduce.interop import to_marian
    >>> marian = to_marian(Translator.load(device="cpu").model)
    >>> type(marian).__name__
    'MarianMTModel'
    """
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError:
        raise missing("to_marian", "transformers", "export") from None

    config = model.config
    check(config)
    settings = MarianConfig(
        vocab_size=config.target_vocab_size,
        d_model=config.d_model,
        max_position_embeddings=n_positions,
        encoder_layers=config.n_encoder_layers,
        decoder_layers=config.n_decoder_layers,
        encoder_attention_heads=config.n_heads,
        decoder_attention_heads=config.n_heads,
        encoder_ffn_dim=config.d_ff,
        decoder_ffn_dim=config.d_ff,
        activation_function=config.activation,
        scale_embedding=True,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        activation_dropout=config.ffn_dropout,
        pad_token_id=config.pad_id,
        eos_token_id=config.eos_id,
        bos_token_id=None,
        decoder_start_token_id=config.bos_id,
        forced_eos_token_id=None,
    )
    marian, weights = MarianMTModel(settings), model.weights()
    for module in marian.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = config.norm_eps
    order_D = order_of_dimensions(config.d_model)
    with torch.no_grad():
        state = marian.state_dict()  # views: copying into them changes the model
        for pair in weight_pairs(config):
            W = weights.get(pair.ours)  # None for a bias that only Marian has: it becomes zero
            state[pair.marian].copy_(torch.zeros(()) if W is None else pair.to_marian(W, order_D))
        state["final_logits_bias"].copy_(weights.get("output_bias", torch.zeros(())))
        for stack in ("encoder", "decoder"):  # Marian computes sinusoids in float32, we compute them in float64
            positions_TD = sinusoid(torch.arange(n_positions), config.d_model)[:, order_D.argsort()]
            state[f"model.{stack}.embed_positions.weight"].copy_(positions_TD)
    return marian.eval()


def from_marian(marian: Any) -> Transformer:
    """A model of ours with the weights of a `MarianMTModel`.

    >>> from transduce import Translator
    >>> from transduce.interop import from_marian, to_marian
    >>> model = Translator.load(device="cpu").model
    >>> from_marian(to_marian(model)).config.d_model == model.config.d_model
    True
    """
    settings, state = marian.config, marian.state_dict()
    width = settings.d_model // settings.encoder_attention_heads
    # The weights themselves, not Marian's two settings: what those tie differs between versions of transformers.
    source_VD, target_VD, output_VD = (state[name] for name in EMBEDDINGS.values())
    is_tied = torch.equal(target_VD, output_VD)
    config = ModelConfig(
        source_vocab_size=len(source_VD),
        target_vocab_size=len(output_VD),
        tied_embeddings=("three" if torch.equal(source_VD, target_VD) else "two") if is_tied else "none",
        d_model=settings.d_model,
        n_encoder_layers=settings.encoder_layers,
        n_decoder_layers=settings.decoder_layers,
        d_ff=settings.encoder_ffn_dim,
        n_heads=settings.encoder_attention_heads,
        d_k=width,
        d_v=width,
        activation=settings.activation_function,
        attention_bias=True,
        output_bias=True,
        norm_eps=1e-5,
        dropout=settings.dropout,
        attention_dropout=settings.attention_dropout,
        ffn_dropout=settings.activation_dropout,
        pad_id=settings.pad_token_id,
        bos_id=settings.decoder_start_token_id,
        eos_id=settings.eos_token_id,
    )
    must_be_equal = (("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"))
    if any(getattr(settings, a) != getattr(settings, b) for a, b in must_be_equal) or not settings.scale_embedding:
        raise ConfigError(
            "Marian models whose encoder and decoder differ, or whose embeddings are not scaled, are not supported"
        )
    order_D = order_of_dimensions(config.d_model)
    model = Transformer(config).to(source_VD.dtype).eval()
    weights = {pair.ours: pair.from_marian(state[pair.marian], order_D) for pair in weight_pairs(config)}
    model.load_weights(weights | {"output_bias": state["final_logits_bias"][0]})
    return model


def check(config: ModelConfig) -> None:
    """Refuse models that Marian does not support."""
    required = replace(
        config,
        norm="post",
        positions="sinusoid",
        attention_window=None,
        tied_embeddings="three",
        d_k=config.d_model // config.n_heads,
        d_v=config.d_model // config.n_heads,
    )
    for name in ("norm", "positions", "attention_window", "tied_embeddings", "d_k", "d_v"):
        if getattr(config, name) != getattr(required, name):
            raise ConfigError(
                f"Marian requires model.{name}={getattr(required, name)}, this model has {getattr(config, name)}"
            )


def order_of_dimensions(d_model: int) -> Tensor:
    """Our dimension i is dimension order_D[i] of Marian, which has all sines before all cosines; ours alternate."""
    return torch.arange(d_model).reshape(2, -1).T.flatten()


class WeightPair(NamedTuple):
    """One weight: its names in both models, and how to convert it."""

    ours: str
    marian: str
    axis: int | None
    """The axis of our weight that has length d_model, and so another order of dimensions. None if there is none."""
    is_transposed: bool

    def from_marian(self, W: Tensor, order_D: Tensor) -> Tensor:
        W = W.T if self.is_transposed else W
        return W if self.axis is None else W.index_select(self.axis, order_D)

    def to_marian(self, W: Tensor, order_D: Tensor) -> Tensor:
        W = W if self.axis is None else W.index_select(self.axis, order_D.argsort())
        return W.T if self.is_transposed else W


EMBEDDINGS = {
    "source_embedding": "model.encoder.embed_tokens.weight",
    "target_embedding": "model.decoder.embed_tokens.weight",
    "output_projection": "lm_head.weight",
}
"""The three matrices with a row for each entry of a vocabulary: our names and Marian's."""


def weight_pairs(config: ModelConfig) -> Iterator[WeightPair]:
    n_matrices = {"three": 1, "two": 2, "none": 3}[config.tied_embeddings]
    for ours, marian in list(EMBEDDINGS.items())[:n_matrices]:
        yield WeightPair(ours, marian, 1, False)
    attentions = {"self_attention": "self_attn", "memory_attention": "encoder_attn"}
    for stack, n_layers in (("encoder", config.n_encoder_layers), ("decoder", config.n_decoder_layers)):
        for i in range(n_layers):
            ours, marian = f"{stack}.{i}", f"model.{stack}.layers.{i}"
            norms = {"feed_forward_norm": "final_layer_norm"}
            for attention, marian_attention in list(attentions.items())[: 1 if stack == "encoder" else 2]:
                norms[f"{attention}_norm"] = f"{marian_attention}_layer_norm"
                for part in "QKV":
                    linear = f"{marian}.{marian_attention}.{part.lower()}_proj"
                    yield WeightPair(f"{ours}.{attention}.W_{part}", f"{linear}.weight", 0, True)
                    yield WeightPair(f"{ours}.{attention}.b_{part}", f"{linear}.bias", None, False)
                yield WeightPair(f"{ours}.{attention}.W_O", f"{marian}.{marian_attention}.out_proj.weight", 1, True)
                yield WeightPair(f"{ours}.{attention}.b_O", f"{marian}.{marian_attention}.out_proj.bias", 0, False)
            yield WeightPair(f"{ours}.feed_forward.W_1", f"{marian}.fc1.weight", 0, True)
            yield WeightPair(f"{ours}.feed_forward.b_1", f"{marian}.fc1.bias", None, False)
            yield WeightPair(f"{ours}.feed_forward.W_2", f"{marian}.fc2.weight", 1, True)
            yield WeightPair(f"{ours}.feed_forward.b_2", f"{marian}.fc2.bias", 0, False)
            for norm, marian_norm in norms.items():
                yield WeightPair(f"{ours}.{norm}.gain", f"{marian}.{marian_norm}.weight", 0, False)
                yield WeightPair(f"{ours}.{norm}.bias", f"{marian}.{marian_norm}.bias", 0, False)
