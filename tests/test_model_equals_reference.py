"""One equation, two programs: PyTorch and NumPy, given the same weights, agree under every switch.

In float64, on logits of order 10 and weights of order 1, to 1e-11: some hundred times the rounding that we see.
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
    assert np.abs(expected.logits_BTV).max() < 100  # or the tolerance would mean something else


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("window", [7, 80])
def test_logits_agree_on_texts_long_enough_to_be_cut_into_blocks(norm: str, window: int) -> None:
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
        ours, theirs = getattr(attention, kind).numpy(), getattr(expected, kind)
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
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
    ours = greedy(model, config, source_BS, max_extra_tokens=5)
    assert ours == reference.greedy(in_numpy(model), config, source_BS.numpy(), max_extra_tokens=5)
    assert any(ours)


@every_switch
def test_the_weights_file_gives_the_reference_the_same_model(config: ModelConfig, tmp_path: Path) -> None:
    model, (source_BS, target_BT) = random_model(config, torch.float32), random_ids(config)
    save_model(tmp_path / "model", model, RunConfig(model=config))
    weights = reference.load_weights(tmp_path / "model" / "weights.safetensors")
    expected = reference.transformer(weights, config, source_BS.numpy(), target_BT.numpy())
    with torch.no_grad():
        logits_BTV = model(source_BS, target_BT).logits_BTV
    assert expected.logits_BTV.dtype == np.float32
    np.testing.assert_allclose(logits_BTV.numpy(), expected.logits_BTV, atol=1e-4)


def test_padding_on_the_right_of_the_target_needs_no_visibility_of_its_own() -> None:
    """Why the decoder only forbids looking ahead: hiding padding as well changes nothing that carries meaning."""
    config = prime_config()
    rng, (_, target_BT) = np.random.default_rng(0), random_ids(config)
    n = target_BT.shape[1]
    query, key, value = rng.normal(size=(3, 3, config.n_heads, n, config.d_k))
    ahead_BTT = np.broadcast_to(reference.not_ahead(n), (3, n, n))
    combined_BTT = ahead_BTT & reference.not_padding(target_BT.numpy(), config.pad_id)[:, None]
    only_ahead, _ = reference.attend(query, key, value, ahead_BTT)
    combined, _ = reference.attend(query, key, value, combined_BTT)
    real = is_token(target_BT, config).numpy()
    np.testing.assert_array_equal(only_ahead.swapaxes(1, 2)[real], combined.swapaxes(1, 2)[real])
    assert not np.array_equal(only_ahead, combined)
