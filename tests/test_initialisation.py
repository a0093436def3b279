"""Initial weights have the scale of each matrix of the paper, not of the packed matrix; dropout is where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.primes import prime_config
from transduce import Transformer
from transduce import model as model_module
from transduce.attention import Visible, attend, attend_fast, attend_fused
from transduce.model import AddAndNorm, FeedForward

CONFIG = prime_config(d_model=2 * 113, d_k=19, d_v=41, attention_bias=True, output_bias=True, positions="learned")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(CONFIG).weights()


@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O", "W_1", "W_2"])
def test_each_matrix_is_xavier_uniform_by_its_unpacked_shape(weights: dict[str, torch.Tensor], name: str) -> None:
    """W_Q, W_K and W_V are smaller by the square root of two."""
    for W in (W for full_name, W in weights.items() if full_name.endswith(name)):
        bound = math.sqrt((3 if name in ("W_Q", "W_K", "W_V") else 6) / sum(W.shape))
        assert 0.98 * bound < W.abs().max() <= bound
        assert W.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)  # a uniform distribution


def test_embeddings_have_unit_variance_once_scaled() -> None:
    torch.manual_seed(0)
    weights = Transformer(replace(CONFIG, tied_embeddings="none")).weights()
    tables = ("source_embedding", "target_embedding", "output_projection", "source_positions", "target_positions")
    for name in tables:
        assert weights[name].std().item() * math.sqrt(CONFIG.d_model) == pytest.approx(1, rel=0.05)


def test_biases_are_zero_and_gains_are_one(weights: dict[str, torch.Tensor]) -> None:
    biases = [W for name, W in weights.items() if ".b_" in name or name.endswith("bias")]
    gains = [W for name, W in weights.items() if name.endswith("gain")]
    assert biases
    assert gains
    assert not any(W.any() for W in biases)
    assert all((W == 1).all() for W in gains)


def test_weights_are_views_into_the_parameters() -> None:
    model = Transformer(CONFIG)
    model.weights()["encoder.0.self_attention.W_K"].fill_(7.0)
    packed = model.encoder[0].self_attention.W_QKV.W.detach()
    assert int((packed == 7).sum()) == CONFIG.d_model * CONFIG.n_heads * CONFIG.d_k


def share_of_zeros(x: torch.Tensor) -> float:
    return float((x == 0).float().mean())


def test_dropout_applies_to_the_sums_of_embeddings_and_positions() -> None:
    model = Transformer(prime_config(dropout=0.3)).train()
    ids_BT = torch.randint(3, 37, (50, 41))
    for x_BTD in (model.embedding.source(ids_BT), model.embedding.target(ids_BT)):
        assert share_of_zeros(x_BTD) == pytest.approx(0.3, abs=0.02)
    assert share_of_zeros(model.eval().embedding.source(ids_BT)) == 0


def test_dropout_applies_to_the_output_of_a_sub_layer_before_it_is_added() -> None:
    add_and_norm = AddAndNorm(prime_config(norm="pre", dropout=0.3)).train()
    x = torch.full((500, 22), 7.0)
    added = add_and_norm.after(x, torch.ones(500, 22)) - x
    assert share_of_zeros(added) == pytest.approx(0.3, abs=0.02)
    assert sorted(added.unique().tolist()) == pytest.approx([0, 1 / 0.7])


def test_dropout_applies_inside_the_feed_forward_network() -> None:
    """All columns of W_2 are equal, so dropout before W_2 changes all outputs of a token in the same way."""
    model = FeedForward(prime_config(ffn_dropout=0.5)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    x = model(torch.rand(100, 1, 22))
    assert (x == x[..., :1]).all()
    assert len(x[:, 0, 0].round(decimals=3).unique()) > 5


@pytest.mark.parametrize("attention", [lambda *a: attend(*a)[0], attend_fused], ids=["as written", "fused"])
def test_dropout_applies_to_attention_weights(attention: Callable[..., torch.Tensor]) -> None:
    """With a single key, its weight is 1, so a head is either zero or its value, scaled up."""
    query, key, value = torch.randn(50, 4, 9, 7), torch.randn(50, 4, 1, 7), torch.ones(50, 4, 1, 3)
    head = attention(query, key, value, Visible(), 0.3)
    assert share_of_zeros(head) == pytest.approx(0.3, abs=0.04)
    assert sorted(head.unique().tolist()) == pytest.approx([0, 1 / 0.7])
    assert (head == head[..., :1]).all()


def test_dropout_applies_to_all_three_kinds_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    dropouts = []

    def spy(*arguments: Any) -> torch.Tensor:
        dropouts.append(arguments[-1])
        return attend_fast(*arguments)

    monkeypatch.setattr(model_module, "attend_fast", spy)
    config = prime_config(attention_dropout=0.3)
    ids_BT = torch.randint(3, 37, (2, 5))
    for is_training, dropout in ((True, 0.3), (False, 0.0)):
        dropouts.clear()
        Transformer(config).train(is_training)(ids_BT, ids_BT)
        assert dropouts == [dropout] * (config.n_encoder_layers + 2 * config.n_decoder_layers)


@pytest.mark.parametrize("window", [None, 6])
def test_attention_without_weights_uses_pytorchs_fused_kernel(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    kernel, calls = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*arguments: Any, **keyword_arguments: Any) -> torch.Tensor:
        calls.append(arguments[0].shape)
        return kernel(*arguments, **keyword_arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    config = prime_config(attention_window=window)
    model, ids_BT = Transformer(config).eval(), torch.randint(3, 37, (2, 131))
    model(ids_BT, ids_BT)
    assert len(calls) == config.n_encoder_layers + 2 * config.n_decoder_layers
    calls.clear()
    model(ids_BT, ids_BT, with_attention=True)
    assert calls == []


def test_returned_attention_weights_are_those_before_dropout() -> None:
    model = Transformer(prime_config(attention_dropout=0.5)).train()
    ids_BT = torch.randint(3, 37, (2, 5))
    attention = model(ids_BT, ids_BT, with_attention=True).attention
    for weights in attention:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_dropout_applies_only_in_training() -> None:
    torch.manual_seed(0)
    ids_BT = torch.randint(3, 37, (2, 5))
    for field in ("dropout", "attention_dropout", "ffn_dropout"):
        no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
        for with_attention in (False, True):
            model = Transformer(prime_config(**(no_dropout | {field: 0.5})))
            a, b = (model.train()(ids_BT, ids_BT, with_attention).logits_BTV for _ in range(2))
            assert not torch.allclose(a, b), field
            a, b = (model.eval()(ids_BT, ids_BT, with_attention).logits_BTV for _ in range(2))
            assert torch.equal(a, b), field
