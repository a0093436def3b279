"""The plan of an epoch: each example occurs once, within token budgets, shared by ranks, and with little padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from transduce import ConfigError, DataError
from transduce.data.plan import GRID_RESOLUTION, Layout, choose_shapes, make_layout


def lengths_like_text(n: int, seed: int = 0, mean: float = 30.0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sources of widely varying lengths and targets of similar lengths, as in Europarl."""
    rng = np.random.default_rng(seed)
    source_N = np.maximum(1, rng.gamma(2.5, mean / 2.5, n)).astype(np.int32)
    target_N = np.maximum(1, source_N * rng.normal(0.96, 0.14, n)).astype(np.int32)
    return source_N, target_N


SOURCE, TARGET = lengths_like_text(3001)


def layout_of(batch_tokens: int = 700, n_shapes: int = 13, seed: int = 5, micro_tokens: int | None = None) -> Layout:
    return make_layout(
        SOURCE, TARGET, batch_tokens=batch_tokens, n_shapes=n_shapes, seed=seed, micro_tokens=micro_tokens
    )


def rows_of(layout: Layout, epoch: int, rank: int = 0, n_ranks: int = 1) -> list[list[int]]:
    """For each step, the rows in a rank's micro-batches."""
    plan = layout.epoch(epoch)
    return [
        [int(row) for micro in plan.step(step, rank, n_ranks) for row in micro.rows] for step in range(layout.n_steps)
    ]


@pytest.mark.parametrize("micro_tokens", [None, 700, 350, 200])
def test_every_example_occurs_once_per_epoch(micro_tokens: int | None) -> None:
    layout = layout_of(micro_tokens=micro_tokens)
    for epoch in (0, 1, 7):
        rows = [row for step in rows_of(layout, epoch) for row in step]
        assert sorted(rows) == list(range(len(SOURCE)))


@pytest.mark.parametrize("micro_tokens", [700, 350, 200])
def test_token_budgets_are_not_exceeded(micro_tokens: int) -> None:
    layout = layout_of(micro_tokens=micro_tokens)
    plan = layout.epoch(3)
    for step in range(layout.n_steps):
        micro_batches = plan.step(step)
        rows = np.concatenate([micro.rows for micro in micro_batches])
        assert 0 < SOURCE[rows].sum() <= 700
        assert 0 < TARGET[rows].sum() <= 700
        for rows, (n_source, n_target) in micro_batches:
            assert SOURCE[rows].max() <= n_source
            assert TARGET[rows].max() <= n_target
            assert len(rows) * max(n_source, n_target) <= micro_tokens


def test_no_step_is_small() -> None:
    """No step is small, neither the last one nor those made of partly filled micro-batches."""
    source_N, target_N = lengths_like_text(20_000)
    layout = make_layout(source_N, target_N, batch_tokens=5000, n_shapes=32, seed=1)
    n_tokens = [max(source_N[rows].sum(), target_N[rows].sum()) for rows in rows_of(layout, 0)]
    assert min(n_tokens) > 2000
    assert np.mean(n_tokens) > 4200


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 8])
def test_ranks_share_every_step(n_ranks: int) -> None:
    layout = layout_of(batch_tokens=1400, micro_tokens=150)
    whole = rows_of(layout, 2)
    shares = [rows_of(layout, 2, rank, n_ranks) for rank in range(n_ranks)]
    for step in range(layout.n_steps):
        together = [row for share in shares for row in share[step]]
        assert sorted(together) == sorted(whole[step]), "the shares are disjoint and together make up the step"
    if n_ranks > 1:
        assert all(any(share) for share in shares)


def test_a_ranks_share_may_be_empty() -> None:
    layout = layout_of()
    assert any(not layout.epoch(0).step(step, 1, 2) for step in range(layout.n_steps))


def test_the_plan_depends_only_on_its_arguments() -> None:
    first, second = layout_of(), layout_of()
    np.random.default_rng(1).random()
    assert rows_of(first, 4) == rows_of(second, 4)
    assert rows_of(first, 4) != rows_of(first, 5)
    assert rows_of(first, 4) != rows_of(layout_of(seed=6), 4)


def test_epochs_differ_in_batches_and_order_but_not_in_batch_sizes() -> None:
    layout = layout_of()
    epochs = [rows_of(layout, epoch) for epoch in range(2)]
    assert len(epochs[0]) == len(epochs[1]) == layout.n_steps
    step_contents = [{frozenset(step) for step in epoch} for epoch in epochs]
    assert len(step_contents[0] & step_contents[1]) < layout.n_steps / 20
    sizes = [sorted(map(len, epoch)) for epoch in epochs]
    assert sizes[0] == sizes[1]


def test_the_number_of_shapes_is_limited() -> None:
    layout = layout_of(n_shapes=7)
    plan = layout.epoch(0)
    shapes = {micro.shape for step in range(layout.n_steps) for micro in plan.step(step)}
    assert len(shapes) == len(layout.shape_K2) == 7


def test_text_like_europarl_needs_little_padding() -> None:
    source_N, target_N = lengths_like_text(300_000)
    layout = make_layout(source_N, target_N, batch_tokens=25_000, n_shapes=128, seed=1)
    shares = layout.non_pad_shares(source_N, target_N)
    assert min(shares) > 0.95
    coarse = make_layout(source_N, target_N, batch_tokens=25_000, n_shapes=8, seed=1)
    assert max(coarse.non_pad_shares(source_N, target_N)) < 0.9


def test_reported_non_pad_shares_match_the_batches() -> None:
    layout = layout_of()
    plan = layout.epoch(0)
    micro_batches = [micro for step in range(layout.n_steps) for micro in plan.step(step)]
    n_source = sum(len(rows) * shape[0] for rows, shape in micro_batches)
    n_target = sum(len(rows) * shape[1] for rows, shape in micro_batches)
    assert layout.non_pad_shares(SOURCE, TARGET) == (SOURCE.sum() / n_source, TARGET.sum() / n_target)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=60), st.integers(1, 20))
def test_each_example_fits_its_shape_and_shapes_are_tight(lengths: list[tuple[int, int]], n_shapes: int) -> None:
    length_N2 = np.array(lengths)
    shape_K2, shape_N = choose_shapes(length_N2[:, 0], length_N2[:, 1], n_shapes)
    assert len(shape_K2) <= n_shapes
    assert (length_N2 <= shape_K2[shape_N]).all()
    for number, shape in enumerate(shape_K2):
        longest = length_N2[shape_N == number].max(axis=0)
        assert (shape <= longest + longest // GRID_RESOLUTION).all(), "as tight as the grid of lengths allows"


def test_with_enough_shapes_short_text_has_no_padding() -> None:
    length_N2 = np.array([(s, t) for s in range(1, 6) for t in range(1, 6)])
    shape_K2, shape_N = choose_shapes(length_N2[:, 0], length_N2[:, 1], 25)
    assert (shape_K2[shape_N] == length_N2).all()


def test_the_split_saves_the_most_padding() -> None:
    """Worked out by hand: with two clusters of lengths and one allowed split, the split is between the clusters."""
    source_N = np.array([3, 4, 5, 40, 41, 42])
    target_N = np.array([4, 4, 4, 30, 31, 30])
    shape_K2, shape_N = choose_shapes(source_N, target_N, 2)
    assert shape_K2[shape_N].tolist() == [[5, 4]] * 3 + [[42, 31]] * 3


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(DataError, match=r"pair 2 has 900 tokens, a batch holds 700: raise data\.batch_tokens"):
        make_layout(np.array([3, 900]), np.array([4, 5]), batch_tokens=700, n_shapes=4, seed=1)
    with pytest.raises(DataError, match="there are no pairs"):
        make_layout(np.array([]), np.array([]), batch_tokens=700, n_shapes=4, seed=1)
    with pytest.raises(ConfigError, match="micro-batch of 701 tokens, must be from 1 to batch_tokens 700"):
        layout_of(micro_tokens=701)
    one = make_layout(np.array([700]), np.array([700]), batch_tokens=700, n_shapes=4, seed=1)
    assert one.n_steps == 1
