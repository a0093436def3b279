"""Marian models with other ties between their three embedding matrices than usual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from tests.support.primes import prime_config, random_ids
from transduce.interop.marian import from_marian, order_of_dimensions
from transduce.model import sinusoid

CONFIG = prime_config(d_model=110, n_heads=5, d_k=22, d_v=22)


def random_marian(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = MarianConfig(
        vocab_size=CONFIG.source_vocab_size,
        d_model=CONFIG.d_model,
        encoder_layers=CONFIG.n_encoder_layers,
        decoder_layers=CONFIG.n_decoder_layers,
        encoder_attention_heads=CONFIG.n_heads,
        decoder_attention_heads=CONFIG.n_heads,
        encoder_ffn_dim=CONFIG.d_ff,
        decoder_ffn_dim=CONFIG.d_ff,
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=CONFIG.pad_id,
        eos_token_id=CONFIG.eos_id,
        bos_token_id=None,
        decoder_start_token_id=CONFIG.bos_id,
        forced_eos_token_id=None,
        **changes,
    )
    marian = MarianMTModel(settings).double().eval()
    with torch.no_grad():
        for name, parameter in marian.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        marian.final_logits_bias.add_(torch.randn_like(marian.final_logits_bias))
        # Marian's sinusoids have float32 precision. Ours replace them, so that all else is compared in float64.
        order_D = order_of_dimensions(CONFIG.d_model)
        for stack in (marian.model.encoder, marian.model.decoder):
            stack.embed_positions.weight.copy_(sinusoid(torch.arange(64), CONFIG.d_model)[:, order_D.argsort()])
    return marian


@pytest.mark.parametrize(
    ("changes", "tied"),
    [
        ({}, "three"),
        ({"tie_word_embeddings": False}, "none"),
        ({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 43}, "two"),
        ({"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 43, "tie_word_embeddings": False}, "none"),
    ],
    ids=str,
)
def test_marian_gives_the_same_logits_however_its_embeddings_are_tied(changes: dict[str, Any], tied: str) -> None:
    marian, (source_BS, target_BT) = random_marian(**changes), random_ids(CONFIG)
    ours = from_marian(marian)
    assert ours.config.tied_embeddings == tied
    with torch.no_grad():
        expected = marian(
            input_ids=source_BS, attention_mask=(source_BS != CONFIG.pad_id).long(), decoder_input_ids=target_BT
        )
        logits_BTV = ours(source_BS, target_BT).logits_BTV
    torch.testing.assert_close(logits_BTV, expected.logits, atol=1e-10, rtol=0)
