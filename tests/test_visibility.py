"""Queries see neither later positions nor padding. A query that sees no position gives zeros."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.primes import is_token, prime_config, random_ids, random_model
from transduce import reference
from transduce.attention import Visible, attend, attend_fused, attend_window

windows = pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
both_paths = pytest.mark.parametrize("with_attention", [False, True], ids=["fast", "with attention weights"])


@windows
@both_paths
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_no_position_of_the_decoder_sees_later_positions(norm: str, window: int | None, with_attention: bool) -> None:
    """All tokens differ, so the gradient of a row of the embedding table is the gradient at one position."""
    config = prime_config(norm=norm, tied_embeddings="none", attention_window=window)
    model, (source_BS, _) = random_model(config), random_ids(config)
    ids_T = torch.randperm(config.target_vocab_size)
    logits_TV = model(source_BS[:1], ids_T[None], with_attention).logits_BTV[0]
    for t in (0, 1, 17, len(ids_T) - 1):
        (gradient_VD,) = torch.autograd.grad(
            logits_TV[t].square().sum(), model.embedding.target_embedding, retain_graph=True
        )
        gradient_TD = gradient_VD[ids_T]
        assert (gradient_TD[t + 1 :] == 0).all(), "the gradient must be exactly zero"
        assert gradient_TD[t].abs().sum() > 0
        # With each layer, the visible range extends by half a window.
        reached_T = gradient_TD[: t + 1].abs().sum(1) > 0
        reach = t if window is None else config.n_decoder_layers * (window // 2)
        assert reached_T.tolist() == [t - m <= reach for m in range(t + 1)]


@windows
@both_paths
def test_the_encoder_sees_in_both_directions_but_not_beyond_its_window(
    window: int | None, with_attention: bool
) -> None:
    config = prime_config(tied_embeddings="none", attention_window=window)
    model = random_model(config)
    ids_S = torch.randperm(config.source_vocab_size - 1) + 1  # without padding
    memory_SD = model.encode(ids_S[None], with_attention).memory_BSD[0]
    (gradient_VD,) = torch.autograd.grad(memory_SD[17].square().sum(), model.embedding.source_embedding)
    reach = len(ids_S) if window is None else config.n_encoder_layers * (window // 2)
    assert (gradient_VD[ids_S].abs().sum(1) > 0).tolist() == [abs(17 - m) <= reach for m in range(len(ids_S))]


@windows
@both_paths
def test_more_padding_does_not_change_the_logits(window: int | None, with_attention: bool) -> None:
    config = prime_config(attention_window=window)
    model, (source_BS, target_BT) = random_model(config), random_ids(config)
    pad_B = torch.zeros(3, 7, dtype=torch.long)
    with torch.no_grad():
        plain = model(source_BS, target_BT, with_attention).logits_BTV
        padded = model(torch.cat([source_BS, pad_B], 1), torch.cat([target_BT, pad_B], 1), with_attention).logits_BTV
    is_token_BT = is_token(target_BT, config)
    torch.testing.assert_close(padded[:, : target_BT.shape[1]][is_token_BT], plain[is_token_BT], atol=1e-11, rtol=0)


def attend_as_written(query: Tensor, key: Tensor, value: Tensor, visible: Visible, dropout: float) -> Tensor:
    return attend(query, key, value, visible, dropout)[0]


Attend = Callable[[Tensor, Tensor, Tensor, Visible, float], Tensor]


@pytest.mark.parametrize("attention", [attend_as_written, attend_fused])
@pytest.mark.parametrize("d_v", [7, 11], ids=["d_v = d_k", "d_v != d_k"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_that_sees_no_position_gives_zeros_forward_and_backward(
    attention: Attend, d_v: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True) for n, d in ((13, 7), (17, 7), (17, d_v))
    )
    visible_BQM = torch.rand(2, 13, 17) > 0.3
    visible_BQM[0, 5] = False
    visible_BQM[1] = False
    head = attention(query, key, value, Visible(visible_BQM), 0.0)
    assert (head[0, :, 5] == 0).all()
    assert (head[1] == 0).all()
    assert (head[0, :, 4] != 0).all()
    head.square().sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    assert (query.grad[0, :, 5] == 0).all()
    assert all((x.grad[1] == 0).all() for x in (query, key, value) if x.grad is not None)
    assert all(x.grad.isfinite().all() for x in (query, key, value) if x.grad is not None)
    assert query.grad[0, :, 4].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_query_that_sees_no_position_in_its_window_gives_zeros(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 131, 7, dtype=dtype, requires_grad=True) for _ in range(3))
    is_token_BM = torch.ones(2, 131, dtype=torch.bool)
    is_token_BM[0, 50:] = False
    head = attend_window(query, key, value, Visible(is_token_BM[:, None], window=6), 0.0)
    assert (head[0, :, 53:] == 0).all()
    assert (head[0, :, 52] != 0).all()
    head.square().sum().backward()
    for x in (query, key, value):
        assert x.grad is not None
        assert (x.grad[0, :, 53:] == 0).all()
        assert x.grad.isfinite().all()


def test_the_reference_gives_zeros_for_queries_that_see_no_position() -> None:
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 2, 5, 7))
    head, weight = reference.attend(query, key, value, np.zeros((1, 5, 5), dtype=bool))
    assert not head.any()
    assert not weight.any()


@windows
@both_paths
def test_a_source_of_padding_alone_gives_finite_logits_and_gradients(window: int | None, with_attention: bool) -> None:
    config = prime_config(attention_window=window, dropout=0.0)
    model, (source_BS, target_BT) = random_model(config).train(), random_ids(config)
    source_BS[1] = config.pad_id
    logits_BTV = model(source_BS, target_BT, with_attention).logits_BTV
    logits_BTV.square().sum().backward()
    assert logits_BTV.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
