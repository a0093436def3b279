"""The PyTorch model and the NumPy reference agree for the same weights, under every model setting.

In float64, to 1e-11: about a hundred times the rounding error that we observe with logits of about 10.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.primes import SWITCHES, is_token, prime_config, random_ids, random_model
from transduce import ModelConfig, RunConfig, Transformer, greedy, reference, save_model
from transduce.training import recipe

TOLERANCE = 1e-11

every_switch = pytest.mark.parametrize("config", [prime_config(**c) for c in SWITCHES.values()], ids=list(SWITCHES))


def in_numpy(model: Transformer) -> dict[str, reference.Array]:
    return {name: W.numpy() for name, W in model.weights().items()}


@every_switch
@pytest.mark.parametrize("with_attention", [False, True], ids=["fast", "with attention weights"])
def test_logits_agree(config: ModelConfig, with_attention: bool) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    expected = reference.transformer(in_numpy(model), config, source_BS.numpy(), target_BT.numpy())
    with torch.no_grad():
        output = model(source_BS, target_BT, with_attention)
    np.testing.assert_allclose(output.logits_BTV.numpy(), expected.logits_BTV, atol=TOLERANCE)
    assert np.abs(expected.logits_BTV).max() < 100  # the tolerance is for logits of this size


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("window", [7, 80])
def test_logits_agree_for_texts_long_enough_for_attention_in_blocks(norm: str, window: int) -> None:
    config = prime_config(norm=norm, attention_window=window)
    model, (source_BS, target_BT) = random_model(config), random_ids(config, n_source=131, n_target=137)
    expected = reference.transformer(in_numpy(model), config, source_BS.numpy(), target_BT.numpy())
    with torch.no_grad():
        logits_BTV = model(source_BS, target_BT).logits_BTV
    np.testing.assert_allclose(logits_BTV.numpy(), expected.logits_BTV, atol=TOLERANCE)


@every_switch
def test_attention_weights_agree_and_sum_to_one(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    expected = reference.transformer(in_numpy(model), config, source_BS.numpy(), target_BT.numpy())
    with torch.no_grad():
        attention = model(source_BS, target_BT, with_attention=True).attention
    for kind in ("encoder_LBHSS", "decoder_LBHTT", "memory_LBHTS"):
        np.testing.assert_allclose(getattr(attention, kind).numpy(), getattr(expected, kind), atol=TOLERANCE)
    np.testing.assert_allclose(attention.decoder_LBHTT.sum(-1), 1, atol=TOLERANCE)
    np.testing.assert_allclose(attention.memory_LBHTS.sum(-1), 1, atol=TOLERANCE)


@every_switch
def test_losses_agree(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    target_in_BT, target_out_BT = target_BT[:, :-1], target_BT[:, 1:]
    expected = reference.transformer(in_numpy(model), config, source_BS.numpy(), target_in_BT.numpy())
    expected_loss = reference.loss(expected.logits_BTV, target_out_BT.numpy(), 0.1, config.pad_id)
    with torch.no_grad():
        loss_sum, n_tokens = recipe.loss(model(source_BS, target_in_BT).logits_BTV, target_out_BT, 0.1, config.pad_id)
    assert (loss_sum.item(), n_tokens.item()) == pytest.approx(expected_loss, rel=1e-12)


@every_switch
def test_greedy_searches_agree(config: ModelConfig) -> None:
    model, (source_BS, _) = random_model(config), random_ids(config)
    targets = greedy(model, config, source_BS, max_extra_tokens=5)
    assert targets == reference.greedy(in_numpy(model), config, source_BS.numpy(), max_extra_tokens=5)
    assert any(targets)


@every_switch
def test_the_reference_reads_the_weights_file_of_a_model_folder(config: ModelConfig, tmp_path: Path) -> None:
    model, (source_BS, target_BT) = random_model(config, torch.float32), random_ids(config)
    save_model(tmp_path / "model", model, RunConfig(model=config))
    weights = reference.load_weights(tmp_path / "model" / "weights.safetensors")
    expected = reference.transformer(weights, config, source_BS.numpy(), target_BT.numpy())
    with torch.no_grad():
        logits_BTV = model(source_BS, target_BT).logits_BTV
    assert expected.logits_BTV.dtype == np.float32
    np.testing.assert_allclose(logits_BTV.numpy(), expected.logits_BTV, atol=1e-4)


def test_the_decoder_need_not_hide_padding_of_the_target() -> None:
    """Hiding padding in addition to later positions changes only the outputs at padding, which are not used."""
    config = prime_config()
    rng, (_, target_BT) = np.random.default_rng(0), random_ids(config)
    n = target_BT.shape[1]
    query, key, value = rng.normal(size=(3, 3, config.n_heads, n, config.d_k))
    not_ahead_BTT = np.broadcast_to(reference.not_ahead(n), (3, n, n))
    both_BTT = not_ahead_BTT & reference.not_padding(target_BT.numpy(), config.pad_id)[:, None]
    with_padding, _ = reference.attend(query, key, value, not_ahead_BTT)
    without_padding, _ = reference.attend(query, key, value, both_BTT)
    is_token_BT = is_token(target_BT, config).numpy()
    np.testing.assert_array_equal(with_padding.swapaxes(1, 2)[is_token_BT], without_padding.swapaxes(1, 2)[is_token_BT])
    assert not np.array_equal(with_padding, without_padding)
