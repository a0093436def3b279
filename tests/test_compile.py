"""Training and decoding compile to one graph each: no branch depends on the value of a tensor."""

from __future__ import annotations

import pytest
import torch

from tests.support.primes import SWITCHES, prime_config, random_ids, random_model
from transduce import ModelConfig

every_switch = pytest.mark.parametrize("config", [prime_config(**c) for c in SWITCHES.values()], ids=list(SWITCHES))


@every_switch
def test_a_training_pass_compiles_to_one_graph(config: ModelConfig) -> None:
    torch._dynamo.reset()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(source_BS, target_BT).logits_BTV, model(source_BS, target_BT).logits_BTV)


@every_switch
def test_a_decoding_step_compiles_to_one_graph(config: ModelConfig) -> None:
    torch._dynamo.reset()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    expected, _ = model.step(target_BT[:, 1], model.start(source_BS, target_BT[:, :1]))
    compiled = torch.compile(model.step, backend="eager", fullgraph=True)
    logits_RV, state = compiled(target_BT[:, 1], model.start(source_BS, target_BT[:, :1]))
    torch.testing.assert_close(logits_RV, expected)
    assert state.longest == 2
