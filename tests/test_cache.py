"""Decoding with a cache gives the same logits as decoding without one, however rows are batched, selected and joined.

In float64, to 1e-11: test_model_equals_reference explains the tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.primes import SWITCHES, is_token, prime_config, random_ids, random_model
from transduce import DataError, DecoderState, ModelConfig, Transformer

TOLERANCE: dict[str, Any] = {"atol": 1e-11, "rtol": 0}

every_switch = pytest.mark.parametrize("config", [prime_config(**c) for c in SWITCHES.values()], ids=list(SWITCHES))


def decode_without_cache(model: Transformer, source_BS: Tensor, target_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(source_BS, target_BT).logits_BTV  # type: ignore[no-any-return]


def decode_with_cache(model: Transformer, state: DecoderState, target_RT: Tensor) -> tuple[Tensor, DecoderState]:
    logits = []
    for last_R in target_RT.T:
        logits_RV, state = model.step(last_R, state)
        logits.append(logits_RV)
    return torch.stack(logits, 1), state


@every_switch
def test_decoding_with_and_without_a_cache_gives_equal_logits(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    logits_BTV, state = decode_with_cache(model, model.start(source_BS), target_BT)
    torch.testing.assert_close(logits_BTV, decode_without_cache(model, source_BS, target_BT), **TOLERANCE)
    assert state.length_R.tolist() == [target_BT.shape[1]] * 3
    assert state.longest == target_BT.shape[1]


@every_switch
def test_a_batch_gives_the_logits_of_its_sentences_alone(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    together_BTV = decode_without_cache(model, source_BS, target_BT)
    for i in range(3):
        source_S, target_T = source_BS[i][source_BS[i] != 0], target_BT[i][is_token(target_BT, config)[i]]
        alone_TV = decode_without_cache(model, source_S[None], target_T[None])[0]
        torch.testing.assert_close(together_BTV[i, : len(target_T)], alone_TV, **TOLERANCE)


@every_switch
def test_starting_with_a_prefix_equals_decoding_the_prefix_step_by_step(config: ModelConfig) -> None:
    """The rows have prefixes of 23, 30 and 3 tokens, and then each continues at its own position."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    length_B = is_token(target_BT, config).sum(1)
    next_B = torch.tensor([5, 7, 11])
    state = model.start(source_BS, prefix_BT=target_BT[:, :-1])
    assert state.length_R.tolist() == [23, 30, 3]
    logits_BV, state = model.step(next_B, state)
    again_BV, _ = model.step(next_B, state)
    for i, n in enumerate(length_B.clamp(max=30).tolist()):
        target_T = torch.cat([target_BT[i, :n], next_B[i : i + 1].expand(2)])
        expected_TV = decode_without_cache(model, source_BS[i : i + 1], target_T[None])[0]
        torch.testing.assert_close(torch.stack([logits_BV[i], again_BV[i]]), expected_TV[-2:], **TOLERANCE)


@every_switch
def test_a_prefix_may_be_the_start_mark_alone(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    state = model.start(source_BS, prefix_BT=target_BT[:, :1])
    assert state.length_R.tolist() == [1, 1, 1]
    logits_BV, _ = model.step(target_BT[:, 1], state)
    torch.testing.assert_close(logits_BV, decode_without_cache(model, source_BS, target_BT[:, :2])[:, 1], **TOLERANCE)


def test_an_empty_prefix_equals_no_prefix() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    empty = model.start(source_BS, prefix_BT=target_BT[:, :0])
    logits, expected = (model.step(target_BT[:, 0], state)[0] for state in (empty, model.start(source_BS)))
    assert torch.equal(logits, expected)


@every_switch
def test_selected_rows_give_the_same_logits_as_alone(config: ModelConfig) -> None:
    """Each sentence gets a second row, rows are reordered within their sentence, then one sentence is removed."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    target_BT = target_BT.where(is_token(target_BT, config), 5)
    _, state = decode_with_cache(model, model.start(source_BS), target_BT[:, :2])
    state = state.select(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert (state.n_rows, state.n_sentences) == (6, 3)
    prefix_RT = target_BT[:, :2].repeat_interleave(2, 0)

    last_R = torch.tensor([5, 7, 11, 13, 17, 19])
    _, state = model.step(last_R, state)
    prefix_RT = torch.cat([prefix_RT, last_R[:, None]], 1)

    rows_R = torch.tensor([1, 1, 3, 2, 4, 5])
    state, prefix_RT = state.select(rows_R), prefix_RT[rows_R]
    rows_R, sentences_B = torch.tensor([4, 5, 1, 0]), torch.tensor([2, 0])
    state, prefix_RT = state.select(rows_R, sentences_B), prefix_RT[rows_R]

    logits_RV, _ = model.step(last_R[:4], state)
    target_RT = torch.cat([prefix_RT, last_R[:4, None]], 1)
    expected_RTV = decode_without_cache(model, source_BS[sentences_B].repeat_interleave(2, 0), target_RT)
    torch.testing.assert_close(logits_RV, expected_RTV[:, -1], **TOLERANCE)


@every_switch
def test_joined_states_give_the_same_logits_as_alone(config: ModelConfig) -> None:
    """Sources of 1 and 29 tokens, targets of 2 and 19 tokens: each row keeps its own position."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    _, short = decode_with_cache(model, model.start(source_BS[2:, :1]), target_BT[2:, :2])
    _, long = decode_with_cache(model, model.start(source_BS[:2]), target_BT[:2, :19])
    assert short.join(long).longest == long.join(short).longest == 19
    last_R = torch.tensor([5, 7, 11])
    logits_RV, state = model.step(last_R, short.join(long))
    again_RV, _ = model.step(last_R, state)
    rows = [(source_BS[2:], target_BT[2, :2]), (source_BS[:1], target_BT[0, :19]), (source_BS[1:2], target_BT[1, :19])]
    for i, (source_1S, prefix_T) in enumerate(rows):
        target_T = torch.cat([prefix_T, last_R[i : i + 1].expand(2)])
        expected_TV = decode_without_cache(model, source_1S, target_T[None])[0]
        torch.testing.assert_close(torch.stack([logits_RV[i], again_RV[i]]), expected_TV[-2:], **TOLERANCE)


def test_all_rows_of_a_sentence_share_its_memory() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS)
    with_four_rows = state.select(torch.arange(3).repeat_interleave(4))
    assert with_four_rows.n_rows == 12
    assert with_four_rows.memory_key_LBHSK.data_ptr() == state.memory_key_LBHSK.data_ptr()
    assert with_four_rows.memory_value_LBHSU.shape[1] == 3


def test_the_cache_stays_small_while_sentences_join_and_leave() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS[:1])
    for _ in range(20):  # each sentence stays for 10 tokens: the older of two leaves
        state = state.join(model.start(source_BS[1:2]))
        for _ in range(5):
            _, state = model.step(torch.full((state.n_rows,), 5), state)
        if state.n_rows == 2:
            state = state.select(torch.tensor([1]), torch.tensor([1]))
    assert (state.n_sentences, state.longest, state.length_R.tolist()) == (1, 5, [5])
    assert state.key_LRHTK.shape[3] == 16


def test_every_sentence_must_have_the_same_number_of_rows() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS)
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.select(torch.tensor([0, 0, 1, 2]))
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.select(torch.tensor([0, 1, 2]), torch.tensor([0, 1]))
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.join(state.select(torch.arange(3).repeat_interleave(2)))


def test_a_state_can_become_empty_and_be_joined_again() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    no_rows = torch.tensor([], dtype=torch.long)
    _, state = decode_with_cache(model, model.start(source_BS), target_BT[:, :3])
    state = state.select(no_rows, no_rows).select(no_rows)
    assert (state.n_rows, state.n_sentences, state.longest) == (0, 0, 0)
    logits_RV, state = model.step(no_rows, state)
    assert logits_RV.shape == (0, config.target_vocab_size)
    logits_BTV, _ = decode_with_cache(model, state.join(model.start(source_BS)), target_BT)
    torch.testing.assert_close(logits_BTV, decode_without_cache(model, source_BS, target_BT), **TOLERANCE)


def test_decoding_refuses_training_mode_and_mixed_precisions() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config, torch.float32), random_ids(config)
    with pytest.raises(AssertionError, match="call eval"):
        model.train().start(source_BS)
    state = model.eval().start(source_BS)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="different precisions"):
        model.step(target_BT[:, 0], state)


def test_decoding_does_not_change_the_model() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decode_with_cache(model, model.start(source_BS), target_BT)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [name for name, _ in model.named_buffers()] == []


def test_texts_longer_than_the_learned_positions_are_refused() -> None:
    config = prime_config(positions="learned")
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    message = r"a text has 42 tokens, learned positions end at 41: split it"
    with pytest.raises(DataError, match=message):
        model.encode(torch.full((1, 42), 5))
    state = model.start(source_BS, prefix_BT=torch.full((3, 41), 5))
    with pytest.raises(DataError, match=message):
        model.step(target_BT[:, 0], state)
