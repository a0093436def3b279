"""Decoding with a cache gives what decoding without one gives, however rows are batched, selected and joined.

In float64, to 1e-11: see test_model_equals_reference.
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


def uncached(model: Transformer, source_BS: Tensor, target_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return model(source_BS, target_BT).logits_BTV  # type: ignore[no-any-return]


def walk(model: Transformer, state: DecoderState, target_RT: Tensor) -> tuple[Tensor, DecoderState]:
    logits = []
    for last_R in target_RT.T:
        logits_RV, state = model.step(last_R, state)
        logits.append(logits_RV)
    return torch.stack(logits, 1), state


@every_switch
def test_cached_equals_uncached(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    logits_BTV, state = walk(model, model.start(source_BS), target_BT)
    torch.testing.assert_close(logits_BTV, uncached(model, source_BS, target_BT), **TOLERANCE)
    assert state.length_R.tolist() == [target_BT.shape[1]] * 3
    assert state.longest == target_BT.shape[1]


@every_switch
def test_batched_equals_single(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    together_BTV = uncached(model, source_BS, target_BT)
    for i in range(3):
        source_S, target_T = source_BS[i][source_BS[i] != 0], target_BT[i][is_token(target_BT, config)[i]]
        alone_TV = uncached(model, source_S[None], target_T[None])[0]
        torch.testing.assert_close(together_BTV[i, : len(target_T)], alone_TV, **TOLERANCE)


@every_switch
def test_a_prefix_stands_for_the_steps_it_replaces(config: ModelConfig) -> None:
    """Rows of unequal prefixes: 23, 30 and 3 tokens go in at once, then each row goes on from where it is."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    length_B = is_token(target_BT, config).sum(1)
    next_B = torch.tensor([5, 7, 11])
    state = model.start(source_BS, prefix_BT=target_BT[:, :-1])
    assert state.length_R.tolist() == [23, 30, 3]
    logits_BV, state = model.step(next_B, state)
    again_BV, _ = model.step(next_B, state)
    for i, n in enumerate(length_B.clamp(max=30).tolist()):
        target_T = torch.cat([target_BT[i, :n], next_B[i : i + 1].expand(2)])
        expected_TV = uncached(model, source_BS[i : i + 1], target_T[None])[0]
        torch.testing.assert_close(torch.stack([logits_BV[i], again_BV[i]]), expected_TV[-2:], **TOLERANCE)


@every_switch
def test_a_start_mark_alone_is_a_prefix(config: ModelConfig) -> None:
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    state = model.start(source_BS, prefix_BT=target_BT[:, :1])
    assert state.length_R.tolist() == [1, 1, 1]
    logits_BV, _ = model.step(target_BT[:, 1], state)
    torch.testing.assert_close(logits_BV, uncached(model, source_BS, target_BT[:, :2])[:, 1], **TOLERANCE)


def test_an_empty_prefix_is_none() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    empty = model.start(source_BS, prefix_BT=target_BT[:, :0])
    logits, expected = (model.step(target_BT[:, 0], state)[0] for state in (empty, model.start(source_BS)))
    assert torch.equal(logits, expected)


@every_switch
def test_selected_rows_go_on_as_if_they_had_been_alone(config: ModelConfig) -> None:
    """One row a sentence becomes two, rows swap pasts within a sentence, then a sentence leaves."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    target_BT = target_BT.where(is_token(target_BT, config), 5)
    _, state = walk(model, model.start(source_BS), target_BT[:, :2])
    state = state.select(torch.tensor([0, 0, 1, 1, 2, 2]))
    assert (state.n_rows, state.n_sentences) == (6, 3)
    past_RT = target_BT[:, :2].repeat_interleave(2, 0)

    last_R = torch.tensor([5, 7, 11, 13, 17, 19])
    _, state = model.step(last_R, state)
    past_RT = torch.cat([past_RT, last_R[:, None]], 1)

    rows_R = torch.tensor([1, 1, 3, 2, 4, 5])
    state, past_RT = state.select(rows_R), past_RT[rows_R]
    rows_R, sentences_B = torch.tensor([4, 5, 1, 0]), torch.tensor([2, 0])
    state, past_RT = state.select(rows_R, sentences_B), past_RT[rows_R]

    logits_RV, _ = model.step(last_R[:4], state)
    target_RT = torch.cat([past_RT, last_R[:4, None]], 1)
    expected_RTV = uncached(model, source_BS[sentences_B].repeat_interleave(2, 0), target_RT)
    torch.testing.assert_close(logits_RV, expected_RTV[:, -1], **TOLERANCE)


@every_switch
def test_joined_states_go_on_as_if_they_had_been_alone(config: ModelConfig) -> None:
    """Sources of 1 and 29 tokens, pasts of 2 and 19: each row keeps a position of its own."""
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    _, short = walk(model, model.start(source_BS[2:, :1]), target_BT[2:, :2])
    _, long = walk(model, model.start(source_BS[:2]), target_BT[:2, :19])
    assert short.join(long).longest == long.join(short).longest == 19
    last_R = torch.tensor([5, 7, 11])
    logits_RV, state = model.step(last_R, short.join(long))
    again_RV, _ = model.step(last_R, state)
    pasts = [(source_BS[2:], target_BT[2, :2]), (source_BS[:1], target_BT[0, :19]), (source_BS[1:2], target_BT[1, :19])]
    for i, (source_S, past_T) in enumerate(pasts):
        target_T = torch.cat([past_T, last_R[i : i + 1].expand(2)])
        expected_TV = uncached(model, source_S, target_T[None])[0]
        torch.testing.assert_close(torch.stack([logits_RV[i], again_RV[i]]), expected_TV[-2:], **TOLERANCE)


def test_memory_is_held_once_for_all_rows_of_a_sentence() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS)
    wide = state.select(torch.arange(3).repeat_interleave(4))
    assert wide.n_rows == 12
    assert wide.memory_key_LBHSK.data_ptr() == state.memory_key_LBHSK.data_ptr()
    assert wide.memory_value_LBHSU.shape[1] == 3


def test_the_cache_does_not_grow_for_ever_as_sentences_come_and_go() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS[:1])
    for _ in range(20):  # each sentence gets 10 tokens; the older of the two then leaves
        state = state.join(model.start(source_BS[1:2]))
        for _ in range(5):
            _, state = model.step(torch.full((state.n_rows,), 5), state)
        if state.n_rows == 2:
            state = state.select(torch.tensor([1]), torch.tensor([1]))
    assert (state.n_sentences, state.longest, state.length_R.tolist()) == (1, 5, [5])
    assert state.key_LRHTK.shape[3] == 16


def test_rows_that_do_not_divide_among_sentences_are_refused() -> None:
    config = prime_config()
    model, (source_BS, _) = random_model(config), random_ids(config)
    state = model.start(source_BS)
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.select(torch.tensor([0, 0, 1, 2]))
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.select(torch.tensor([0, 1, 2]), torch.tensor([0, 1]))
    with pytest.raises(AssertionError, match="differ in number of rows"):
        state.join(state.select(torch.arange(3).repeat_interleave(2)))


def test_a_state_may_run_empty_and_fill_again() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    none = torch.tensor([], dtype=torch.long)
    _, state = walk(model, model.start(source_BS), target_BT[:, :3])
    state = state.select(none, none).select(none)
    assert (state.n_rows, state.n_sentences, state.longest) == (0, 0, 0)
    logits_RV, state = model.step(none, state)
    assert logits_RV.shape == (0, config.target_vocab_size)
    logits_BTV, _ = walk(model, state.join(model.start(source_BS)), target_BT)
    torch.testing.assert_close(logits_BTV, uncached(model, source_BS, target_BT), **TOLERANCE)


def test_decoding_refuses_what_would_go_wrong_in_silence() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config, torch.float32), random_ids(config)
    with pytest.raises(AssertionError, match="call eval"):
        model.train().start(source_BS)
    state = model.eval().start(source_BS)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(AssertionError, match="different precisions"):
        model.step(target_BT[:, 0], state)


def test_decoding_leaves_no_trace_in_the_model() -> None:
    config = prime_config()
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    walk(model, model.start(source_BS), target_BT)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [name for name, _ in model.named_buffers()] == []


def test_learned_positions_refuse_what_they_cannot_reach() -> None:
    config = prime_config(positions="learned")
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    message = r"a text has 42 tokens, learned positions end at 41: split it"
    with pytest.raises(DataError, match=message):
        model.encode(torch.full((1, 42), 5))
    state = model.start(source_BS, prefix_BT=torch.full((3, 41), 5))
    with pytest.raises(DataError, match=message):
        model.step(target_BT[:, 0], state)
