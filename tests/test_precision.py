"""bf16 results are close to float32 results, and finite for extreme inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.primes import prime_config, random_ids
from transduce import Transformer

MAX_DISTANCE = 0.02
"""Norm of the difference divided by the norm of the float32 logits. bf16 has 8 bits: one rounding loses up to 0.004."""


def logits_and_gradient(model: Transformer, source_BS: Tensor, target_BT: Tensor) -> tuple[Tensor, Tensor]:
    logits_BTV = model(source_BS, target_BT).logits_BTV
    model.zero_grad()
    logits_BTV.float().square().mean().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return logits_BTV.detach().float(), gradient


def distance(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
@pytest.mark.parametrize("precision", ["autocast", "all bf16"])
def test_bf16_is_close_to_float32(norm: str, window: int | None, precision: str) -> None:
    config = prime_config(norm=norm, attention_window=window, d_model=2 * 61, dropout=0.0)
    torch.manual_seed(0)
    model, (source_BS, target_BT) = Transformer(config), random_ids(config)
    expected, expected_gradient = logits_and_gradient(model, source_BS, target_BT)
    if precision == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            logits, gradient = logits_and_gradient(model, source_BS, target_BT)
    else:
        logits, gradient = logits_and_gradient(model.bfloat16(), source_BS, target_BT)
    assert 0 < distance(logits, expected) < MAX_DISTANCE
    assert distance(gradient, expected_gradient) < 5 * MAX_DISTANCE


@pytest.mark.parametrize("scale", [1e-30, 1e6, 1e15])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_bf16_is_finite_for_extreme_embeddings(scale: float, norm: str) -> None:
    config = prime_config(norm=norm, tied_embeddings="two", dropout=0.0)
    torch.manual_seed(0)
    model, (source_BS, target_BT) = Transformer(config), random_ids(config)
    model.weights()["source_embedding"].mul_(scale)
    source_BS[0] = 5  # the same token at every position
    source_BS[1] = config.pad_id
    logits, gradient = logits_and_gradient(model.bfloat16(), source_BS, target_BT)
    assert logits.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_huge_scores_is_finite(dtype: torch.dtype) -> None:
    """With scores near the maximum of the type, softmax must not overflow, and hidden positions must stay hidden."""
    config = prime_config(dropout=0.0, n_encoder_layers=1, n_decoder_layers=1)
    torch.manual_seed(0)
    model, (source_BS, target_BT) = Transformer(config), random_ids(config)
    for name, W in model.weights().items():
        if name.endswith(("W_Q", "W_K")):
            W.mul_(1e15)
    for with_attention in (False, True):
        output = model.to(dtype)(source_BS, target_BT, with_attention)
        assert output.logits_BTV.isfinite().all()
    assert (output.attention.encoder_LBHSS[0, 1, :, :, 19:] == 0).all()
