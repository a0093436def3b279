"""The models that training is compared with: each has the paper's settings, and computes logits from token ids."""

# Axes: B sentences, S source positions, T target positions, D = d_model, V vocabulary.

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transduce import ModelConfig
from transduce.model import sinusoid


class EmbeddingModel(nn.Module):
    """The paper's tied and scaled embedding, for models whose library has no embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.target_vocab_size, config.d_model)
        self.position_TD: Tensor
        self.register_buffer("position_TD", sinusoid(torch.arange(512), config.d_model).float())
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT) * self.config.d_model**0.5 + self.position_TD[: ids_BT.shape[1]]
        return self.dropout(x_BTD)  # type: ignore[no-any-return]


class TorchTransformer(EmbeddingModel):
    """nn.Transformer, used as in its tutorial."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.transformer = nn.Transformer(
            config.d_model,
            config.n_heads,
            config.n_encoder_layers,
            config.n_decoder_layers,
            config.d_ff,
            config.dropout,
            batch_first=True,
        )
        # The paper has no dropout on attention weights or in the feed-forward network, and such dropout costs time.
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = 0.0
        for layer in self.transformer.decoder.layers:
            layer.multihead_attn.dropout = 0.0

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        hidden_BS = source_BS == self.config.pad_id
        ahead_TT = torch.ones(2 * target_in_BT.shape[1:], dtype=torch.bool, device=source_BS.device).triu(1)
        x_BTD = self.transformer(
            self.embed(source_BS),
            self.embed(target_in_BT),
            tgt_mask=ahead_TT,
            tgt_is_causal=True,
            src_key_padding_mask=hidden_BS,
            memory_key_padding_mask=hidden_BS,
        )
        return F.linear(x_BTD, self.embedding.weight)


class Marian(nn.Module):
    """Marian as implemented by Hugging Face."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        settings = MarianConfig(
            vocab_size=config.target_vocab_size,
            d_model=config.d_model,
            encoder_layers=config.n_encoder_layers,
            decoder_layers=config.n_decoder_layers,
            encoder_attention_heads=config.n_heads,
            decoder_attention_heads=config.n_heads,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            activation_function="relu",
            dropout=config.dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            decoder_start_token_id=config.bos_id,
            forced_eos_token_id=None,
            use_cache=False,
        )
        self.pad_id, self.model = config.pad_id, MarianMTModel(settings)

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        visible_BS = (source_BS != self.pad_id).long()
        output = self.model(input_ids=source_BS, attention_mask=visible_BS, decoder_input_ids=target_in_BT)
        return output.logits  # type: ignore[no-any-return]


class JoeyNMT(nn.Module):
    """JoeyNMT's layers, called in the same way as by its `Model`, which itself requires a vocabulary of words."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from joeynmt.decoders import TransformerDecoder
        from joeynmt.embeddings import Embeddings
        from joeynmt.encoders import TransformerEncoder
        from joeynmt.transformer_layers import MultiHeadedAttention

        settings: dict[str, Any] = {
            "hidden_size": config.d_model,
            "ff_size": config.d_ff,
            "num_heads": config.n_heads,
            "activation": "relu",
            "layer_norm": "post",
            "dropout": config.dropout,
            "emb_dropout": config.dropout,
        }
        vocab_size, self.pad_id = config.target_vocab_size, config.pad_id
        self.embedding = Embeddings(config.d_model, scale=True, vocab_size=vocab_size, padding_idx=config.pad_id)
        self.encoder = TransformerEncoder(num_layers=config.n_encoder_layers, **settings)
        self.decoder = TransformerDecoder(num_layers=config.n_decoder_layers, vocab_size=vocab_size, **settings)
        self.decoder.output_layer.weight = self.embedding.lut.weight
        # JoeyNMT has one rate for all dropout. The paper has none in the feed-forward network or on attention weights.
        for layer in (*self.encoder.layers, *self.decoder.layers):
            layer.feed_forward.pwff_layer[2].p = 0.0
        for module in self.modules():
            if isinstance(module, MultiHeadedAttention):
                module.dropout.p = 0.0

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        visible_B1S, visible_B1T = ((ids != self.pad_id)[:, None] for ids in (source_BS, target_in_BT))
        memory_BSD, _ = self.encoder(self.embedding(source_BS), None, visible_B1S)
        logits_BTV, *_ = self.decoder(
            self.embedding(target_in_BT),
            memory_BSD,
            encoder_hidden=None,
            src_mask=visible_B1S,
            unroll_steps=target_in_BT.shape[1],
            hidden=None,
            trg_mask=visible_B1T,
        )
        return logits_BTV  # type: ignore[no-any-return]


class Eole(nn.Module):
    """The Transformer of eole, the successor of OpenNMT-py. Not in the paper: its decoder supports only pre-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        from eole.config.models import TransformerModelConfig
        from eole.config.training import TrainingConfig
        from eole.models.model import EncoderDecoderModel

        settings = TransformerModelConfig(
            encoder={
                "layers": config.n_encoder_layers,
                "encoder_layer_style": "postnorm",
                "final_encoder_layer_norm": False,
            },
            decoder={"layers": config.n_decoder_layers},
            embeddings={"word_vec_size": config.d_model, "position_encoding_type": "SinusoidalInterleaved"},
            hidden_size=config.d_model,
            transformer_ff=config.d_ff,
            heads=config.n_heads,
            head_dim=config.d_k,
            mlp_activation_fn="relu",
            add_ffnbias=True,
            norm_eps=config.norm_eps,
            share_embeddings=True,
            share_decoder_embeddings=True,
            generator_bias=False,
        )
        training = TrainingConfig(dropout=[config.dropout], attention_dropout=[0.0], param_init_method="xavier_uniform")
        ids = {str(i): i for i in range(config.target_vocab_size)}
        vocabularies = {"src": ids, "tgt": ids, "specials": {"pad_token": str(config.pad_id)}}
        self.model = EncoderDecoderModel.build(settings, vocabularies, training)
        self.model.init_weights(training)  # before this call the weights are uninitialised memory
        # eole has one rate for the inside and for the output of the feed-forward network. The paper has none inside.
        for layer in (*self.model.encoder.transformer_layers, *self.model.decoder.transformer_layers):
            layer.mlp.dropout_1.p = 0.0

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        # eole expects the whole target, end mark included, and removes the last column itself.
        output = self.model(source_BS, F.pad(target_in_BT, (0, 1)), src_len=None)
        return self.model.generator(output.dec_out)  # type: ignore[no-any-return]


class TextbookTransformer(EmbeddingModel):
    """The paper's model in the style of teaching code, written for this comparison: one matrix for each projection,
    attention in five lines, dropout as modules, and each normalisation as a separate operation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        encoder, decoder = _TextbookLayer(config, 1), _TextbookLayer(config, 2)
        self.encoder = nn.ModuleList(copy.deepcopy(encoder) for _ in range(config.n_encoder_layers))
        self.decoder = nn.ModuleList(copy.deepcopy(decoder) for _ in range(config.n_decoder_layers))

    def forward(self, source_BS: Tensor, target_in_BT: Tensor) -> Tensor:
        visible_B11S = (source_BS != self.config.pad_id)[:, None, None]
        n_target = target_in_BT.shape[1]
        visible_TT = torch.ones(n_target, n_target, dtype=torch.bool, device=source_BS.device).tril()
        memory_BSD, x_BTD = self.embed(source_BS), self.embed(target_in_BT)
        for layer in self.encoder:
            memory_BSD = layer(memory_BSD, [(memory_BSD, visible_B11S)])
        for layer in self.decoder:
            x_BTD = layer(x_BTD, [(x_BTD, visible_TT), (memory_BSD, visible_B11S)])
        return F.linear(x_BTD, self.embedding.weight)


class _TextbookLayer(nn.Module):
    def __init__(self, config: ModelConfig, n_attentions: int) -> None:
        super().__init__()
        self.n_heads, d_model = config.n_heads, config.d_model
        self.to_query, self.to_key, self.to_value, self.to_output = (
            nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(n_attentions)) for _ in range(4)
        )
        self.feed_forward = nn.Sequential(nn.Linear(d_model, config.d_ff), nn.ReLU(), nn.Linear(config.d_ff, d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(n_attentions + 1))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, attended: list[tuple[Tensor, Tensor]]) -> Tensor:
        for i, (memory_BSD, visible) in enumerate(attended):
            query, key, value = (
                project[i](x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                for project, x in ((self.to_query, x_BTD), (self.to_key, memory_BSD), (self.to_value, memory_BSD))
            )
            score = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
            weight = score.masked_fill(~visible, -1e4).softmax(-1)
            y_BTD = self.to_output[i]((weight @ value).transpose(1, 2).flatten(2))
            x_BTD = self.norms[i](x_BTD + self.dropout(y_BTD))
        return self.norms[-1](x_BTD + self.dropout(self.feed_forward(x_BTD)))  # type: ignore[no-any-return]


PEERS: dict[str, type[nn.Module]] = {
    "nn.Transformer": TorchTransformer,
    "Marian": Marian,
    "JoeyNMT": JoeyNMT,
    "eole": Eole,
    "obvious": TextbookTransformer,
}
PACKAGES = {"Marian": "transformers", "JoeyNMT": "joeynmt", "eole": "eole"}
"""The packages that peers need besides PyTorch."""
