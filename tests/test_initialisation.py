"""Fresh weights have the spread that each logical matrix asks for, not the one of the packed matrix that holds it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.primes import prime_config
from transduce import Transformer
from transduce.model import AddAndNorm

CONFIG = prime_config(d_model=2 * 113, d_k=19, d_v=41, attention_bias=True, output_bias=True, positions="learned")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(CONFIG).weights()


@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O", "W_1", "W_2"])
def test_each_matrix_is_xavier_uniform_by_its_own_shape(weights: dict[str, torch.Tensor], name: str) -> None:
    for W in (W for full_name, W in weights.items() if full_name.endswith(name)):
        bound = math.sqrt(6 / sum(W.shape))
        assert 0.98 * bound < W.abs().max() <= bound
        assert W.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)  # of a uniform distribution


def test_embeddings_have_unit_variance_once_scaled(weights: dict[str, torch.Tensor]) -> None:
    for name in ("source_embedding", "source_positions", "target_positions"):
        assert weights[name].std().item() * math.sqrt(CONFIG.d_model) == pytest.approx(1, rel=0.05)


def test_biases_are_zero_and_gains_one(weights: dict[str, torch.Tensor]) -> None:
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


def dropped(x: torch.Tensor) -> float:
    return float((x == 0).float().mean())


def test_dropout_falls_on_the_sums_of_embeddings_and_positions() -> None:
    model = Transformer(prime_config(dropout=0.3)).train()
    ids_BT = torch.randint(3, 37, (50, 41))
    for x_BTD in (model.embedding.source(ids_BT), model.embedding.target(ids_BT)):
        assert dropped(x_BTD) == pytest.approx(0.3, abs=0.02)
    assert dropped(model.eval().embedding.source(ids_BT)) == 0


def test_dropout_falls_on_the_output_of_a_sub_layer_before_it_is_added() -> None:
    add_and_norm = AddAndNorm(prime_config(norm="pre", dropout=0.3)).train()
    x = torch.full((500, 22), 7.0)
    added = add_and_norm.after(x, torch.ones(500, 22)) - x
    assert dropped(added) == pytest.approx(0.3, abs=0.02)
    assert sorted(added.unique().tolist()) == pytest.approx([0, 1 / 0.7])


def test_attention_weights_are_those_before_dropout() -> None:
    model = Transformer(prime_config(attention_dropout=0.5)).train()
    ids_BT = torch.randint(3, 37, (2, 5))
    attention = model(ids_BT, ids_BT, with_attention=True).attention
    for weights in attention:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


def test_dropout_acts_in_training_and_only_then() -> None:
    torch.manual_seed(0)
    ids_BT = torch.randint(3, 37, (2, 5))
    for field in ("dropout", "attention_dropout", "ffn_dropout"):
        off = {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dropout": 0.0}
        for with_attention in (False, True):
            model = Transformer(prime_config(**(off | {field: 0.5})))
            a, b = (model.train()(ids_BT, ids_BT, with_attention).logits_BTV for _ in range(2))
            assert not torch.allclose(a, b), field
            a, b = (model.eval()(ids_BT, ids_BT, with_attention).logits_BTV for _ in range(2))
            assert torch.equal(a, b), field
