"""A model in which every dimension is a different prime (d_model: twice a prime), so that shape errors always show."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transduce import ModelConfig, Transformer, base, with_model

N_SOURCE, N_TARGET = 29, 31


def prime_config(**changes: Any) -> ModelConfig:
    dimensions = {
        "n_encoder_layers": 2,
        "n_decoder_layers": 5,
        "d_model": 2 * 11,
        "d_ff": 13,
        "n_heads": 19,
        "d_k": 7,
        "d_v": 17,
        "source_vocab_size": 37,
        "target_vocab_size": 37,
        "max_positions": 41,
    }
    return with_model(base(), **(dimensions | changes)).model


SWITCHES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "pre-norm": {"norm": "pre"},
    "learned positions": {"positions": "learned"},
    "window": {"attention_window": 6},
    "attention bias": {"attention_bias": True},
    "output bias": {"output_bias": True},
    "gelu": {"activation": "gelu"},
    "swish": {"activation": "swish"},
    "norm eps": {"norm_eps": 0.1},
    "tied two ways": {"tied_embeddings": "two", "target_vocab_size": 43},
    "not tied": {"tied_embeddings": "none", "target_vocab_size": 43},
    "one head": {"n_heads": 1},
    "starts with padding": {"bos_id": 0},
    "all at once": {
        "norm": "pre",
        "positions": "learned",
        "attention_window": 11,
        "attention_bias": True,
        "output_bias": True,
        "activation": "gelu",
        "tied_embeddings": "none",
        "target_vocab_size": 43,
    },
}


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A model in evaluation mode. All weights are random, also gains and biases, so that none is 0 or 1."""
    torch.manual_seed(seed)
    model = Transformer(config).to(dtype).eval()
    for W in model.weights().values():
        W.add_(torch.randn_like(W), alpha=0.3)
    return model


def random_ids(
    config: ModelConfig, n_source: int = N_SOURCE, n_target: int = N_TARGET, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """source_BS and target_in_BT: three sentences of different lengths, padded on the right."""
    torch.manual_seed(seed)
    source_BS = torch.randint(3, config.source_vocab_size, (3, n_source))
    target_BT = torch.randint(3, config.target_vocab_size, (3, n_target))
    target_BT[:, 0] = config.bos_id
    source_BS[1, 19:] = config.pad_id
    source_BS[2, 1:] = config.pad_id
    target_BT[0, 23:] = config.pad_id
    target_BT[2, 3:] = config.pad_id
    return source_BS, target_BT


def is_token(target_BT: Tensor, config: ModelConfig) -> Tensor:
    """True for tokens of target_in, False for padding. The start mark is a token even if it has the id of padding."""
    is_token_BT = target_BT != config.pad_id
    is_token_BT[:, 0] = True
    return is_token_BT
