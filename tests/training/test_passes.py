"""Written passes compute the same as their slow twin: the model, the loss and autograd."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux")

from tests.support.primes import prime_config, random_model
from transduce import ModelConfig, Transformer, attention
from transduce.errors import DataError
from transduce.training.passes import cpu
from transduce.training.passes import cuda as kernels
from transduce.training.passes.layout import (
    AttentionInputs,
    Dropout,
    NormGradients,
    PackedVisibility,
    PaddedVisibility,
    Shape,
    Side,
    pack,
    padded_inputs,
    unpack,
)
from transduce.training.passes.written import WrittenPass, why_not, written_passes
from transduce.training.recipe import loss, model_loss

LENGTHS = [(3, 5), (9, 2), (1, 1), (70, 13), (4, 67)]
"""Source and target tokens of each sentence. Some sentences need two tiles."""


def packed_config(**changes: Any) -> ModelConfig:
    return prime_config(
        **({"n_heads": 3, "d_k": 16, "d_v": 32, "n_encoder_layers": 1, "n_decoder_layers": 2, "dropout": 0.0} | changes)
    )


def padded_batch(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    sources, targets = ([torch.randint(3, 37, (lengths[side],)) for lengths in LENGTHS] for side in (0, 1))
    shifted = [F.pad(target[:-1], (1, 0), value=config.bos_id) for target in targets]
    source_BS, target_in_BT, target_out_BT = (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.pad_id)
        for rows in (sources, shifted, targets)
    )
    return source_BS, target_in_BT, target_out_BT


def run_written_pass(model: Transformer, batch: tuple[Tensor, ...], shape: Shape | None, seed: int = 0) -> Tensor:
    """The summed loss. Replaces the gradients. `shape`: of a packed pass on a GPU; None for a padded pass on a CPU."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if shape is None:
        inputs = padded_inputs(batch, [seed], model.config, torch.float32)
    else:
        ints = pack([[ids.numpy() for ids in batch]], shape, [seed], model.config)
        inputs = unpack(torch.from_numpy(ints), shape)
    written_pass = WrittenPass(model, longest=71, dtype=torch.float32, operations=cpu if shape is None else kernels)
    return written_pass.add_gradients(inputs, 0.1, torch.tensor([0.25]))


@pytest.mark.parametrize("shape", [None, Shape(101, 97)], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "learned", "max_positions": 71},
        {"attention_window": 6},
        {"tied_embeddings": "two", "target_vocab_size": 43},
        {"tied_embeddings": "none", "target_vocab_size": 43},
        {"bos_id": 0},
        {"norm_eps": 0.1},
    ],
    ids=str,
)
def test_loss_and_gradients_equal_those_of_the_model_and_autograd(changes: dict[str, Any], shape: Shape | None) -> None:
    config = packed_config(**changes) if shape else packed_config(**changes, d_v=16)
    if reason := why_not(config, "cuda" if shape else "cpu"):
        pytest.skip(f"written passes do not support this model: {reason}")
    batch = padded_batch(config)
    fast = random_model(config, torch.float32).train()
    slow = copy.deepcopy(fast).double()
    expected = model_loss(slow, *batch, 0.1, in_chunks=False)
    (expected * 0.25).backward()
    loss_sum = run_written_pass(fast, batch, shape)
    torch.testing.assert_close(loss_sum.double(), expected.detach(), rtol=1e-5, atol=0)
    for (name, p), q in zip(slow.named_parameters(), fast.parameters(), strict=True):
        assert_near(q.grad, p.grad, name)


def test_consecutive_batches_are_packed_like_one_batch() -> None:
    config = packed_config()
    batch = [ids_BN.numpy() for ids_BN in padded_batch(config)]
    whole = pack([batch], Shape(101, 97), [0], config)
    parts = [[batch[0][:3, :9], *(ids_BN[:3, :5] for ids_BN in batch[1:])], [ids_BN[3:] for ids_BN in batch]]
    assert np.array_equal(pack(parts, Shape(101, 97), [0], config), whole)
    assert not np.array_equal(pack(parts[::-1], Shape(101, 97), [0], config), whole)


def test_too_few_learned_positions_are_refused_before_the_first_pass() -> None:
    model = random_model(packed_config(positions="learned", max_positions=70), torch.float32)
    with pytest.raises(DataError, match=r"a sentence has 71 tokens, but model\.max_positions is 70: raise it"):
        WrittenPass(model, 71, torch.float32, kernels)


def assert_near(actual: Tensor | None, expected: Tensor | None, name: str, tolerance: float = 1e-4) -> None:
    assert actual is not None
    assert expected is not None
    assert (actual - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("n_threads", [2, 3, 9])
def test_workers_split_a_batch_and_their_gradients_are_summed(n_threads: int) -> None:
    """There are five sentences, so that some workers have none. Two passes add to the same gradients."""
    config = packed_config(d_v=16)
    batch, results = padded_batch(config), []
    for n in (1, n_threads):
        model = random_model(config, torch.float32).train()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        passes = written_passes(model, 71, torch.float32, 500, 0.1, n)
        loss_sum = passes.add_gradients([batch], [1], 0.5) + passes.add_gradients([batch], [2], 0.5)
        results.append([loss_sum, *(p.grad for p in model.parameters())])
    for single, several in zip(*results, strict=True):
        assert_near(single, several, "", 1e-5)


def test_with_dropout_the_same_seed_gives_the_same_bits() -> None:
    config = packed_config(d_v=16, dropout=0.3)
    batch, results = padded_batch(config), []
    for seed in (1, 1, 2):
        model = random_model(config, torch.float32).train()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        loss_sum = written_passes(model, 71, torch.float32, 500, 0.1, 2).add_gradients([batch], [seed], 1.0)
        results.append([loss_sum, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, results[0], results[1]))
    assert not any(map(torch.equal, results[0], results[2]))


def test_in_bfloat16_a_written_pass_is_about_as_accurate_as_autograd() -> None:
    config = packed_config(d_v=16)
    source_BS, target_in_BT, target_out_BT = batch = padded_batch(config)
    fast = random_model(config, torch.float32).train()
    autocast, exact = copy.deepcopy(fast), copy.deepcopy(fast).double()
    for p in fast.parameters():
        p.grad = torch.zeros_like(p)
    inputs = padded_inputs(batch, [1], config, torch.bfloat16)
    WrittenPass(fast, 71, torch.bfloat16, cpu).add_gradients(inputs, 0.1, torch.ones(1))
    with torch.autocast("cpu", torch.bfloat16):
        model_loss(autocast, source_BS, target_in_BT, target_out_BT, 0.1, in_chunks=False).backward()
    model_loss(exact, source_BS, target_in_BT, target_out_BT, 0.1, in_chunks=False).backward()

    def distance(model: Transformer) -> float:
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
        return statistics.mean(float((a - b).norm() / b.norm()) for a, b in pairs if a is not None and b is not None)

    assert 0 < distance(fast) < 1.5 * distance(autocast) < 0.5


def test_padding_after_the_tokens_changes_nothing() -> None:
    config = packed_config(dropout=0.3)
    batch, results = padded_batch(config), []
    for shape in (Shape(87, 88), Shape(192, 128)):
        model = random_model(config, torch.float32).train()
        results.append([run_written_pass(model, batch, shape), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert_near(a, b, "")


def dropout_at(place: int, p: float) -> Dropout:
    return Dropout(p, torch.tensor([5, -123456789, 2**31 - 1, 77], dtype=torch.int32), place)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("shape", [(7, 22), (33, 64), (1100, 8)])
def test_add_and_norm_equal_autograd_forward_and_backward(p: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    x, y, grad = (torch.randn(shape) for _ in range(3))
    gain, bias = torch.randn(shape[1]), torch.randn(shape[1])
    dropout = dropout_at(1, p)
    out, normed = kernels.add_and_norm(x, y, gain, bias, 1e-3, dropout)
    sums = NormGradients(torch.ones(shape[1]), torch.ones(shape[1]), torch.ones(shape[1]))
    grads = [
        *kernels.add_and_norm_backward(grad, normed, gain, bias, sums),
        *(total - 1 for total in sums if total is not None),
    ]

    inputs = [tensor.double().requires_grad_() for tensor in (x, y, gain, bias)]
    mask = dropout.mask(shape)
    expected = F.layer_norm(inputs[0] + inputs[1] * mask, shape[1:], inputs[2], inputs[3], 1e-3)
    expected.backward(grad.double())
    assert_near(out, expected.detach(), "out", 1e-5)
    for name, a, b in zip(["x", "y", "gain", "bias"], grads, inputs, strict=False):
        assert_near(a, b.grad, name, 1e-5)
    assert inputs[1].grad is not None
    assert_near(grads[4], inputs[1].grad.sum(0), "sum of y", 1e-5)


def test_embedding_equals_the_formula_forward_and_backward() -> None:
    torch.manual_seed(1)
    ids, positions = torch.randint(0, 11, (40,), dtype=torch.int32), torch.randint(0, 5, (40,), dtype=torch.int32)
    table, position_table, dropout = torch.randn(11, 22), torch.randn(5, 22), dropout_at(2, 0.25)
    side = Side(ids, positions)
    out, saved = kernels.embed(side, table, position_table, dropout, torch.float32)
    mask = dropout.mask((40, 22))
    assert_near(out, (table[ids.long()] * 22**0.5 + position_table[positions.long()]) * mask, "out", 1e-6)
    grads = torch.ones(11, 22), torch.ones(5, 22)
    kernels.embed_backward(out, side, saved, *grads)
    for grad, index, factor in ((grads[0], ids, 22**0.5), (grads[1], positions, 1.0)):
        expected = torch.ones_like(grad).index_add_(0, index, out * mask, alpha=factor)
        assert_near(grad, expected, "gradient", 1e-5)


def test_dropout_drops_its_share_and_masks_of_different_places_and_keys_are_independent() -> None:
    p, shape = 0.3, (200, 64)
    keys = [torch.from_numpy(np.random.SeedSequence([seed]).generate_state(2).view(np.int32)) for seed in (1, 2)]
    masks = [Dropout(p, keys_P, place).mask(shape) > 0 for keys_P in keys for place in (0, 1)]
    for mask in masks:
        assert abs(float(mask.float().mean()) - 0.7) < 4 * (0.21 / mask.numel()) ** 0.5
        for one, other in ((mask[:, 1:], mask[:, :-1]), (mask[1:], mask[:-1])):  # neighbours are independent
            assert abs(float((one == other).float().mean()) - 0.58) < 4 * (0.25 / one.numel()) ** 0.5
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((mask == other).float().mean()) - 0.58) < 4 * (0.25 / mask.numel()) ** 0.5


@pytest.mark.parametrize("case", ["everything", "nothing", "gaps"])
def test_packed_attention_equals_autograd_for_any_visibility(case: str) -> None:
    """Queries and keys are parts of wider tensors, as they are in a pass."""
    torch.manual_seed(1)
    n, m, n_heads, d_v = 70, 140, 2, 32
    wide = [torch.randn(n, 50), torch.randn(m, 130)]
    inputs = AttentionInputs(wide[0][:, 3:35], wide[1][:, 5:37], wide[1][:, 40:104])
    first_N = torch.zeros(n, dtype=torch.int32) if case != "gaps" else torch.randint(0, 100, (n,), dtype=torch.int32)
    reach = {"everything": m, "nothing": 0, "gaps": 40}[case]
    last_N = (first_N + reach).clamp(max=m)
    visible_NM = (torch.arange(m) >= first_N[:, None]) & (torch.arange(m) < last_N[:, None])
    # Each key names all queries: a wider span is allowed here, because the spans of the queries are exact.
    visible = PackedVisibility(
        first_N, last_N, torch.zeros(m, dtype=torch.int32), torch.full((m,), n, dtype=torch.int32)
    )
    attended = kernels.attend(inputs, visible, n_heads)
    grad_NP = torch.randn(n, n_heads * d_v)
    grads = AttentionInputs(*(torch.full_like(x, torch.nan) for x in inputs))
    kernels.attend_backward(grad_NP, inputs, attended, visible, n_heads, grads)

    exact_inputs = [x.double().requires_grad_() for x in inputs]
    heads = [x.unflatten(1, (n_heads, -1)).transpose(0, 1)[None] for x in exact_inputs]
    expected, _ = attention.attend(heads[0], heads[1], heads[2], attention.Visible(visible_NM[None]), 0.0)
    expected_NP = expected[0].transpose(0, 1).flatten(1)
    expected_NP.backward(grad_NP.double())
    torch.testing.assert_close(attended.head_NP.double(), expected_NP.detach(), rtol=1e-4, atol=1e-5)
    for a, b in zip(grads, exact_inputs, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.double(), b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("by_products", [False, True])
def test_attention_on_a_cpu_equals_autograd(by_products: bool, is_causal: bool) -> None:
    torch.manual_seed(1)
    n_sentences, n_keys, n_heads, d_k = 3, 7, 2, 5
    n_queries = n_keys if is_causal else 11
    wide = [torch.randn(n_sentences * n, 37) for n in (n_queries, n_keys)]
    inputs = AttentionInputs(wide[0][:, 3:13], wide[1][:, 5:15], wide[1][:, 20:30])
    token_BM = torch.arange(n_keys) < torch.tensor([n_keys, 1, 4])[:, None]
    hidden_B11M = None if is_causal else torch.zeros(token_BM.shape).masked_fill(~token_BM, -torch.inf)[:, None, None]
    visible = PaddedVisibility(n_sentences, hidden_B11M, is_causal)
    attended = (cpu.attend_by_products if by_products else cpu.attend)(inputs, visible, n_heads)
    assert isinstance(attended, cpu.AttendedByProducts if by_products else cpu.Attended)
    grad_NP = torch.randn(n_sentences * n_queries, n_heads * d_k)
    grads = AttentionInputs(*(torch.full_like(x, torch.nan) for x in inputs))
    cpu.attend_backward(grad_NP, inputs, attended, visible, n_heads, grads)

    exact_inputs = [x.double().requires_grad_() for x in inputs]
    heads = [x.view(n_sentences, -1, n_heads, d_k).transpose(1, 2) for x in exact_inputs]
    expected_visible = attention.Visible(look_ahead=False) if is_causal else attention.Visible(token_BM[:, None])
    expected, _ = attention.attend(heads[0], heads[1], heads[2], expected_visible, 0.0)
    expected_NP = expected.transpose(1, 2).flatten(2).flatten(0, 1)
    expected_NP.backward(grad_NP.double())
    torch.testing.assert_close(attended.head_NP.double(), expected_NP.detach(), rtol=1e-4, atol=1e-5)
    for a, b in zip(grads, exact_inputs, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.double(), b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_vocabulary", [11, 4096, 5000])
def test_the_loss_kernel_equals_the_loss_and_its_gradient(n_vocabulary: int) -> None:
    """Some logits are so large that their exponentials overflow."""
    torch.manual_seed(1)
    logits_NV, target_N = torch.randn(9, n_vocabulary) * 5, torch.randint(1, 11, (9,), dtype=torch.int32)
    logits_NV[0] += 1000
    target_N[[2, 8]] = 0
    exact_NV = logits_NV.double().requires_grad_()
    expected, _ = loss(exact_NV[None], target_N[None].long(), 0.1, 0)
    expected.backward()
    assert exact_NV.grad is not None
    loss_N = kernels.loss_and_gradient_(logits_NV, target_N, 0.1, 0, torch.tensor([0.5]))
    torch.testing.assert_close(loss_N.sum().double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(logits_NV.double(), exact_NV.grad * 0.5, rtol=1e-3, atol=1e-6)


def test_unsupported_settings_have_a_reason() -> None:
    assert why_not(packed_config(), "cuda") is None
    for changes in (
        {"norm": "pre"},
        {"activation": "gelu"},
        {"attention_dropout": 0.1},
        {"ffn_dropout": 0.1},
        {"attention_bias": True},
        {"output_bias": True},
        {"d_k": 7},
    ):
        assert why_not(packed_config(**changes), "cuda") is not None, changes
    assert why_not(packed_config(d_v=16), "cpu") is None
    assert why_not(packed_config(attention_window=3, d_v=16), "cpu") is not None
    assert why_not(packed_config(), "cpu") is not None
