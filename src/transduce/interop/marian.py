"""Hugging Face's Marian, to and fro: the same weights in its names, its orientation and its order of dimensions."""

# Axes: D = d_model, T positions.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transduce.config import ModelConfig
from transduce.errors import ConfigError
from transduce.model import Transformer, sinusoid


def to_marian(model: Transformer, longest: int = 1024) -> Any:
    """A `MarianMTModel` that gives the same logits, for so many positions. Saved and loaded, its norms add 1e-5."""
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    check(config)
    settings = MarianConfig(
        vocab_size=config.target_vocab_size,
        d_model=config.d_model,
        max_position_embeddings=longest,
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
    theirs, weights = MarianMTModel(settings), model.weights()
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = config.norm_eps
    order_D = order_of_dimensions(config.d_model)
    with torch.no_grad():
        state = theirs.state_dict()  # its tensors are the model's own
        for place in places(config):
            own = weights.get(place.name)  # a bias that we do not have is zero there
            state[place.theirs].copy_(torch.zeros(()) if own is None else place.to_theirs(own, order_D))
        state["final_logits_bias"].copy_(weights.get("output_bias", torch.zeros(())))
        for stack in ("encoder", "decoder"):  # its sinusoids are made in float32, ours in float64
            positions_TD = sinusoid(torch.arange(longest), config.d_model)[:, order_D.argsort()]
            state[f"model.{stack}.embed_positions.weight"].copy_(positions_TD)
    return theirs.eval()


def from_marian(theirs: Any) -> Transformer:
    """Our model, with the weights of a `MarianMTModel`."""
    given = theirs.config
    width = given.d_model // given.encoder_attention_heads
    config = ModelConfig(
        source_vocab_size=given.vocab_size,
        target_vocab_size=given.vocab_size,
        d_model=given.d_model,
        n_encoder_layers=given.encoder_layers,
        n_decoder_layers=given.decoder_layers,
        d_ff=given.encoder_ffn_dim,
        n_heads=given.encoder_attention_heads,
        d_k=width,
        d_v=width,
        activation=given.activation_function,
        attention_bias=True,
        output_bias=True,
        norm_eps=1e-5,
        dropout=given.dropout,
        attention_dropout=given.attention_dropout,
        ffn_dropout=given.activation_dropout,
        pad_id=given.pad_token_id,
        bos_id=given.decoder_start_token_id,
        eos_id=given.eos_token_id,
    )
    same = (("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"))
    if any(getattr(given, one) != getattr(given, other) for one, other in same) or not given.scale_embedding:
        raise ConfigError("a Marian whose encoder and decoder differ, or whose embeddings are not scaled, is not known")
    state, order_D = theirs.state_dict(), order_of_dimensions(config.d_model)
    model = Transformer(config).to(state["model.shared.weight"].dtype).eval()
    weights = {place.name: place.to_ours(state[place.theirs], order_D) for place in places(config)}
    model.load_weights(weights | {"output_bias": state["final_logits_bias"][0]})
    return model


def check(config: ModelConfig) -> None:
    """Refuses what Marian cannot be."""
    needed = replace(
        config,
        norm="post",
        positions="sinusoid",
        attention_window=None,
        tied_embeddings="three",
        d_k=config.d_model // config.n_heads,
        d_v=config.d_model // config.n_heads,
    )
    for name in ("norm", "positions", "attention_window", "tied_embeddings", "d_k", "d_v"):
        if getattr(config, name) != getattr(needed, name):
            raise ConfigError(
                f"Marian wants model.{name}={getattr(needed, name)}, this model has {getattr(config, name)}"
            )


def order_of_dimensions(d_model: int) -> Tensor:
    """Marian has all sines before all cosines, ours alternate: our dimension i is its dimension order_D[i]."""
    return torch.arange(d_model).reshape(2, -1).T.flatten()


class Place(NamedTuple):
    """A weight of ours and where it is there."""

    name: str
    theirs: str
    axis: int | None
    """Ours that is d_model wide and in another order."""
    is_turned: bool
    """Its rows are their columns."""

    def to_ours(self, W: Tensor, order_D: Tensor) -> Tensor:
        W = W.T if self.is_turned else W
        return W if self.axis is None else W.index_select(self.axis, order_D)

    def to_theirs(self, W: Tensor, order_D: Tensor) -> Tensor:
        W = W if self.axis is None else W.index_select(self.axis, order_D.argsort())
        return W.T if self.is_turned else W


def places(config: ModelConfig) -> Iterator[Place]:
    yield Place("source_embedding", "model.shared.weight", 1, False)
    attentions = {"self_attention": "self_attn", "memory_attention": "encoder_attn"}
    for stack, n_layers in (("encoder", config.n_encoder_layers), ("decoder", config.n_decoder_layers)):
        for i in range(n_layers):
            ours, theirs = f"{stack}.{i}", f"model.{stack}.layers.{i}"
            norms = {"feed_forward_norm": "final_layer_norm"}
            for kind, their_kind in list(attentions.items())[: 1 if stack == "encoder" else 2]:
                norms[f"{kind}_norm"] = f"{their_kind}_layer_norm"
                for part in "QKV":
                    linear = f"{theirs}.{their_kind}.{part.lower()}_proj"
                    yield Place(f"{ours}.{kind}.W_{part}", f"{linear}.weight", 0, True)
                    yield Place(f"{ours}.{kind}.b_{part}", f"{linear}.bias", None, False)
                yield Place(f"{ours}.{kind}.W_O", f"{theirs}.{their_kind}.out_proj.weight", 1, True)
                yield Place(f"{ours}.{kind}.b_O", f"{theirs}.{their_kind}.out_proj.bias", 0, False)
            yield Place(f"{ours}.feed_forward.W_1", f"{theirs}.fc1.weight", 0, True)
            yield Place(f"{ours}.feed_forward.b_1", f"{theirs}.fc1.bias", None, False)
            yield Place(f"{ours}.feed_forward.W_2", f"{theirs}.fc2.weight", 1, True)
            yield Place(f"{ours}.feed_forward.b_2", f"{theirs}.fc2.bias", 0, False)
            for norm, their_norm in norms.items():
                yield Place(f"{ours}.{norm}.gain", f"{theirs}.{their_norm}.weight", 0, False)
                yield Place(f"{ours}.{norm}.bias", f"{theirs}.{their_norm}.bias", 0, False)
