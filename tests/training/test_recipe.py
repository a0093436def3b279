"""The training recipe is that of the paper: learning rate, loss, optimiser and batches."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from tests.support.primes import prime_config
from transduce import Batch, TrainConfig, base, make_batch, reference
from transduce.training import recipe


def test_the_learning_rate_equals_that_of_the_reference() -> None:
    steps = [1, 2, 3999, 4000, 4001, 100_000]
    assert [recipe.learning_rate(s, 512, 4000) for s in steps] == [reference.learning_rate(s, 512, 4000) for s in steps]


def test_schedules_have_one_peak_and_their_form() -> None:
    peak = 2 * recipe.learning_rate(100, 512, 100)

    def rates(schedule: Literal["paper", "inverse-root", "cosine", "linear"]) -> list[float]:
        settings = TrainConfig(max_steps=499, warmup_steps=100, rate_factor=2, schedule=schedule)
        return [recipe.scheduled_rate(step, 512, settings) / peak for step in (1, 50, 100, 200, 300, 400, 499)]

    assert rates("paper") == pytest.approx([0.01, 0.5, 1, 2**-0.5, 3**-0.5, 0.5, 4.99**-0.5])
    assert rates("inverse-root") == pytest.approx([1, 1, 1, 2**-0.5, 3**-0.5, 0.5, 4.99**-0.5])
    assert rates("linear") == pytest.approx([0.01, 0.5, 1, 0.75, 0.5, 0.25, 0.0025])
    assert rates("cosine") == pytest.approx([0.01, 0.5, 1, 0.853553, 0.5, 0.146447, 1.5421e-5], rel=1e-4)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
def test_the_loss_equals_that_of_the_reference(label_smoothing: float) -> None:
    rng = np.random.default_rng(0)
    logits_BTV, target_BT = rng.normal(size=(2, 3, 5)) * 10, np.array([[1, 4, 0], [2, 0, 0]])
    loss_sum, n_tokens = recipe.loss(torch.tensor(logits_BTV), torch.tensor(target_BT), label_smoothing, 0)
    assert (loss_sum.item(), n_tokens.item()) == pytest.approx(
        reference.loss(logits_BTV, target_BT, label_smoothing, 0)
    )


def test_the_loss_of_bfloat16_logits_is_summed_in_float32() -> None:
    logits_BTV = torch.zeros(1, 1000, 7, dtype=torch.bfloat16)
    loss_sum, n_tokens = recipe.loss(logits_BTV, torch.ones(1, 1000, dtype=torch.long), 0.1, 0)
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() / n_tokens.item() == pytest.approx(np.log(7), rel=1e-5)


def test_adam_has_the_constants_of_the_paper_and_no_weight_decay() -> None:
    optimiser = recipe.adam([torch.nn.Parameter(torch.zeros(1))], base().train)
    (group,) = optimiser.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_a_batch_is_padded_and_shifted_to_the_right_and_counts_end_marks() -> None:
    config = prime_config()
    batch = make_batch([([11, 12], [21, 22, 23]), ([13], []), ([], [24])], config)
    assert batch.source_BS.tolist() == [[11, 12, 2], [13, 2, 0], [2, 0, 0]]
    assert batch.target_in_BT.tolist() == [[1, 21, 22, 23], [1, 0, 0, 0], [1, 24, 0, 0]]
    assert batch.target_out_BT.tolist() == [[21, 22, 23, 2], [2, 0, 0, 0], [24, 2, 0, 0]]
    assert batch.n_target_tokens == 7
    assert isinstance(batch, Batch)
