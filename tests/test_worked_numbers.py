"""The NumPy reference and the PyTorch code give numbers that were calculated by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from transduce import ConfigError, attention, model, reference
from transduce.training import recipe

Function = Callable[..., Any]


def sinusoid_in_torch(position: Any, d_model: int) -> Any:
    return model.sinusoid(torch.as_tensor(position), d_model).numpy()


@pytest.mark.parametrize("sinusoid", [reference.sinusoid, sinusoid_in_torch])
def test_positions_of_the_third_token_in_eight_dimensions(sinusoid: Function) -> None:
    expected = [0.9093, -0.4161, 0.1987, 0.9801, 0.0200, 0.9998, 0.0020, 0.999998]
    assert sinusoid(np.array([2]), 8)[0] == pytest.approx(expected, abs=5e-5)
    assert sinusoid(np.array([2]), 8)[0, -1] == pytest.approx(0.999998, abs=5e-7)


@pytest.mark.parametrize("sinusoid", [reference.sinusoid, sinusoid_in_torch])
@pytest.mark.parametrize("shift", [1, 7, 100])
def test_a_shift_of_all_positions_is_a_linear_map(sinusoid: Function, shift: int) -> None:
    d_model, position_T = 26, np.arange(500)
    map_DD = np.zeros((d_model, d_model))
    for i in range(0, d_model, 2):  # by the formulas of sin(a + b) and cos(a + b), each pair is rotated by an angle
        angle = shift / 10000 ** (i / d_model)
        map_DD[i : i + 2, i : i + 2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    np.testing.assert_allclose(
        sinusoid(position_T, d_model) @ map_DD, sinusoid(position_T + shift, d_model), atol=1e-12
    )


def test_softmax_of_one_two_three() -> None:
    assert reference.softmax(np.array([1.0, 2.0, 3.0])) == pytest.approx([0.0900, 0.2447, 0.6652], abs=5e-5)


def test_softmax_and_log_sum_exp_are_finite_for_numbers_of_any_size() -> None:
    x = np.array([-1e300, 0.0, 1e300])
    assert reference.softmax(x).tolist() == [0, 0, 1]
    assert reference.log_sum_exp(np.array([1000.0, 1000.0])) == pytest.approx(1000 + math.log(2))
    assert reference.log_sum_exp(np.array([-1000.0, -1000.0])) == pytest.approx(-1000 + math.log(2))


def loss_in_torch(logits: Any, target: Any, label_smoothing: float, pad_id: int) -> tuple[float, int]:
    loss_sum, n_tokens = recipe.loss(torch.as_tensor(logits), torch.as_tensor(target), label_smoothing, pad_id)
    return loss_sum.item(), int(n_tokens)


@pytest.mark.parametrize("loss", [reference.loss, loss_in_torch])
def test_cross_entropy_of_two_rows(loss: Function) -> None:
    logits_BTV = np.array([[[2, 0.5], [0.5, 2]]])
    loss_sum, n_tokens = loss(logits_BTV, np.array([[0, 1]]), label_smoothing=0.0, pad_id=-1)
    assert (loss_sum / n_tokens, n_tokens) == (pytest.approx(0.2014133, abs=5e-8), 2)


@pytest.mark.parametrize("loss", [reference.loss, loss_in_torch])
def test_smoothing_distributes_eps_over_the_whole_vocabulary(loss: Function) -> None:
    logits_BTV, eps = np.log([[[0.5, 0.25, 0.125, 0.125]]]), 0.1
    expected = -((1 - eps) * math.log(0.25) + eps / 4 * math.log(0.5 * 0.25 * 0.125 * 0.125))
    assert loss(logits_BTV, np.array([[1]]), eps, pad_id=0) == (pytest.approx(expected), 1)


@pytest.mark.parametrize("loss", [reference.loss, loss_in_torch])
def test_padding_has_no_loss(loss: Function) -> None:
    logits_BTV = np.random.default_rng(0).normal(size=(1, 3, 5))
    alone, n_alone = loss(logits_BTV[:, :2], np.array([[1, 2]]), 0.1, pad_id=0)
    padded, n_padded = loss(logits_BTV, np.array([[1, 2, 0]]), 0.1, pad_id=0)
    assert (padded, n_padded) == (pytest.approx(alone), n_alone)


def test_smoothed_targets_of_both_kinds() -> None:
    over_vocabulary = reference.smoothed_targets(np.array([2]), 5, 0.1)
    np.testing.assert_allclose(over_vocabulary, [[0.02, 0.02, 0.92, 0.02, 0.02]])
    over_other_words = reference.smoothed_targets(np.array([2]), 5, 0.1, over="other words")
    np.testing.assert_allclose(over_other_words, [[0, 0.1 / 3, 0.9, 0.1 / 3, 0.1 / 3]])
    np.testing.assert_allclose([over_vocabulary.sum(), over_other_words.sum()], 1)


@pytest.mark.parametrize("learning_rate", [reference.learning_rate, recipe.learning_rate])
def test_learning_rate_is_highest_at_the_end_of_warm_up(learning_rate: Function) -> None:
    rates = [learning_rate(step, 512, 4000) for step in range(1, 20_000)]
    assert 1 + int(np.argmax(rates)) == 4000
    assert max(rates) == pytest.approx(1 / math.sqrt(512 * 4000))
    assert rates[0] == pytest.approx(rates[3999] / 4000)  # first a linear increase
    assert rates[15_999] == pytest.approx(rates[3999] / 2)  # then proportional to 1 / sqrt(step)


@pytest.mark.parametrize(
    ("learning_rate", "error"), [(reference.learning_rate, ValueError), (recipe.learning_rate, ConfigError)]
)
@pytest.mark.parametrize(("step", "warmup_steps"), [(0, 4000), (-1, 4000), (1, 0)])
def test_steps_are_counted_from_1(
    learning_rate: Function, error: type[Exception], step: int, warmup_steps: int
) -> None:
    with pytest.raises(error, match=f"step is {step} and warmup_steps is {warmup_steps}.* at least 1"):
        learning_rate(step, 512, warmup_steps)


def attend_in_torch(query: Any, key: Any, value: Any, visible: Any) -> Any:
    query, key, value, visible = (torch.as_tensor(x) for x in (query, key, value, visible))
    return [x.numpy() for x in attention.attend(query, key, value, attention.Visible(visible), 0.0)]


@pytest.mark.parametrize("attend", [reference.attend, attend_in_torch])
def test_attention_of_two_queries_and_two_keys(attend: Function) -> None:
    # Scores are (ln 3, 0) and (0, 0), so the weights are (3/4, 1/4) and (1/2, 1/2).
    query = np.array([[math.sqrt(2) * math.log(3), 0], [0, 0]])[None, None]
    key, value = np.eye(2)[None, None], np.array([[4.0, 8.0], [0.0, 4.0]])[None, None]
    head, weight = attend(query, key, value, np.ones((1, 2, 2), dtype=bool))
    np.testing.assert_allclose(weight[0, 0], [[0.75, 0.25], [0.5, 0.5]])
    np.testing.assert_allclose(head[0, 0], [[3, 7], [2, 6]])
    # If the first key is hidden, the second has all the weight.
    head, weight = attend(query, key, value, np.array([[[False, True]] * 2]))
    np.testing.assert_allclose(weight[0, 0], [[0, 1], [0, 1]])
    np.testing.assert_allclose(head[0, 0], [[0, 4], [0, 4]])


def test_attention_of_one_head_takes_the_matrices_of_the_paper() -> None:
    rng = np.random.default_rng(1)
    query_QK, key_MK, value_MU = rng.normal(size=(5, 7)), rng.normal(size=(3, 7)), rng.normal(size=(3, 11))
    visible_QM = np.tri(5, 3, dtype=bool)
    head_QU, weight_QM = reference.attend(query_QK, key_MK, value_MU, visible_QM)
    assert (head_QU.shape, weight_QM.shape) == ((5, 11), (5, 3))
    four_axes = (query_QK[None, None], key_MK[None, None], value_MU[None, None])
    for visible in (visible_QM, visible_QM[None], visible_QM[None, None]):
        head_BHQU, weight_BHQM = reference.attend(*four_axes, visible)
        np.testing.assert_array_equal(head_BHQU, head_QU[None, None])
        np.testing.assert_array_equal(weight_BHQM, weight_QM[None, None])
    # Two sentences with one head each, or two heads of one sentence.
    head_BQU, _ = reference.attend(np.stack([query_QK] * 2), key_MK, value_MU, np.stack([visible_QM] * 2))
    np.testing.assert_array_equal(head_BQU, np.stack([head_QU] * 2))


def test_visibility_of_three_tokens_and_two_of_padding() -> None:
    ids_BT = np.array([[1, 2, 3, 0, 0]])
    is_token = [[True, True, True, False, False]]
    triangle = [[m <= q for m in range(5)] for q in range(5)]
    both = [[m <= q and m < 3 for m in range(5)] for q in range(5)]
    assert reference.not_padding(ids_BT, 0).tolist() == is_token
    assert reference.not_ahead(5).tolist() == triangle
    assert (reference.not_padding(ids_BT, 0)[:, None] & reference.not_ahead(5)).tolist() == [both]

    is_token_B1M = torch.tensor(ids_BT != 0)[:, None]
    cpu = torch.device("cpu")
    assert attention.Visible(is_token_B1M).matrix(5, 5, cpu)[0].tolist() == is_token
    assert attention.Visible(look_ahead=False).matrix(5, 5, cpu)[0].tolist() == triangle
    assert attention.Visible(is_token_B1M, look_ahead=False).matrix(5, 5, cpu)[0].tolist() == both


@pytest.mark.parametrize(
    ("window", "visible"),
    [(1, [4]), (2, [3, 4, 5]), (3, [3, 4, 5]), (4, [2, 3, 4, 5, 6]), (5, [2, 3, 4, 5, 6]), (99, list(range(9)))],
)
def test_a_window_of_r_is_the_r_nearest_positions_and_one_more_if_r_is_even(window: int, visible: list[int]) -> None:
    in_window = reference.in_window(9, window)
    assert in_window[4].nonzero()[0].tolist() == visible
    assert attention.Visible(window=window).matrix(9, 9, torch.device("cpu"))[0].tolist() == in_window.tolist()


def test_layer_norm_uses_the_biased_variance_with_eps_inside_the_square_root() -> None:
    weights = {"norm.gain": np.array([1.0, 10.0]), "norm.bias": np.array([0.5, 0.0])}
    # The mean is 3, the deviations are -1 and 1, the biased variance is 1. With eps = 3 the square root is 2.
    assert reference.layer_norm(weights, "norm", 3.0, np.array([2.0, 4.0])).tolist() == [0.0, 5.0]
