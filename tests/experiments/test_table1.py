"""Table 1: each layer computes its equation, and the counts equal closed forms that were derived by hand."""

# Axes: B batch, T positions, D width of the layer, H heads, K = d_k, Q queries, M attended positions.

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import table1
from experiments.table1 import KINDS, MEASURED, SCALES, dilated_path, exponent, exponents_of, path_of, peak_bytes, table
from experiments.table1_layers import (
    PATH_WIDTH,
    Attention,
    Convolution,
    Recurrent,
    layers_between_ends,
    longest_chain,
    multiply_adds,
    products_in,
    steps_between_ends,
)

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
B, T, D = 2, 13, 10
SCALE = SCALES["quick"]


def inputs(n: int = T, d: int = D, batch: int = B) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(batch, n, d, dtype=torch.float64, requires_grad=True)


def reached(layer: nn.Module, x_BTD: Tensor, position: int) -> set[int]:
    """The inputs that get a gradient from the output at `position`."""
    (gradient_BTD,) = torch.autograd.grad(layer(x_BTD)[:, position].square().sum(), x_BTD)
    return set((gradient_BTD != 0).any(-1).any(0).nonzero().flatten().tolist())


# The layers


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("as_written", [False, True])
def test_self_attention_is_equation_1_between_its_projections(window: int | None, as_written: bool) -> None:
    n, d, n_heads, d_k = 101, 128, 2, 64  # long enough for several blocks
    layer, x_BTD = Attention(d, window, as_written).double(), inputs(n, d)
    W = {
        name: W.numpy()
        for linear in (layer.attention.W_QKV, layer.attention.W_O)
        for name, W in linear.weights().items()
    }
    expected_BTD = np.zeros((B, n, d))
    for b, head, query in np.ndindex(B, n_heads, n):
        columns = slice(head * d_k, head * d_k + d_k)
        x_TD = x_BTD[b].detach().numpy()
        q_K, k_TK, v_TK = x_TD[query] @ W["W_Q"][:, columns], x_TD @ W["W_K"][:, columns], x_TD @ W["W_V"][:, columns]
        near = [m for m in range(n) if window is None or abs(query - m) <= window / 2]
        weight_M = np.exp(k_TK[near] @ q_K / math.sqrt(d_k))
        expected_BTD[b, query] += weight_M / weight_M.sum() @ v_TK[near] @ W["W_O"][columns]
    np.testing.assert_allclose(layer(x_BTD).detach().numpy(), expected_BTD, atol=1e-10)


def test_restricted_self_attention_with_a_window_over_all_positions_is_full_self_attention() -> None:
    x_BTD = inputs(n=101)
    full, wide, narrow = Attention(D).double(), Attention(D, 200).double(), Attention(D, 198).double()
    for layer in (wide, narrow):
        layer.load_state_dict(full.state_dict())
    torch.testing.assert_close(wide(x_BTD), full(x_BTD), atol=1e-12, rtol=0)
    assert not torch.allclose(
        narrow(x_BTD)[:, 0], full(x_BTD)[:, 0], atol=1e-9, rtol=0
    )  # the last position is just outside the window


def test_the_recurrent_layer_equals_its_equation_step_by_step() -> None:
    layer, x_BTD = Recurrent(D).double(), inputs()
    W, U = layer.W.detach().numpy(), layer.U.detach().numpy()
    actual_BTD = layer(x_BTD).detach().numpy()
    for b in range(B):
        h_D = np.zeros(D)
        for t in range(T):
            h_D = np.tanh(x_BTD[b, t].detach().numpy() @ W + h_D @ U)
            np.testing.assert_allclose(actual_BTD[b, t], h_D, atol=1e-12)


def test_n_simultaneous_steps_of_all_positions_equal_the_recurrent_layer() -> None:
    layer, x_BTD = Recurrent(D).double(), inputs()
    h_BTD = torch.zeros_like(x_BTD)
    for count in range(1, T + 1):
        h_BTD = layer.step(x_BTD, h_BTD)
        assert torch.allclose(h_BTD, layer(x_BTD), atol=1e-12, rtol=0) == (count == T)


@pytest.mark.parametrize(("kernel", "dilation"), [(3, None), (5, None), (3, 1), (3, 3), (5, 2), (3, 20)])
def test_convolution_equals_its_sum(kernel: int, dilation: int | None) -> None:
    layer, x_BTD = Convolution(D, kernel, dilation).double(), inputs()
    kernel_DDk = layer.convolve.weight.detach().numpy()
    step, first = dilation or 1, -(kernel - 1) // 2 if dilation is None else -(kernel - 1) * dilation
    expected_BTD = np.zeros((B, T, D))
    for b, t, k in np.ndindex(B, T, kernel):
        if 0 <= (place := t + first + k * step) < T:
            expected_BTD[b, t] += kernel_DDk[:, :, k] @ x_BTD[b, place].detach().numpy()
    np.testing.assert_allclose(layer(x_BTD).detach().numpy(), expected_BTD, atol=1e-12)


def test_only_visible_positions_receive_a_gradient_through_one_layer() -> None:
    x_BTD, n = inputs(n=101), 101
    for position in (0, 50, 100):
        around = {radius: set(range(max(0, position - radius), min(n, position + radius + 1))) for radius in (2, 4)}
        assert reached(Attention(D).double(), x_BTD, position) == set(range(n))
        assert reached(Attention(D, 8).double(), x_BTD, position) == around[4]
        assert reached(Attention(D, 9, as_written=True).double(), x_BTD, position) == around[4]
        assert reached(Convolution(D, 5).double(), x_BTD, position) == around[2]
        assert reached(Recurrent(D).double(), x_BTD, position) == set(range(position + 1))
    assert reached(Convolution(D, 3, 9).double(), x_BTD, 50) == {50, 41, 32}


# Counts


@pytest.mark.parametrize(("n", "d"), [(101, 64), (257, 128), (128, 16)])
def test_multiply_adds_equal_the_closed_forms(n: int, d: int) -> None:
    x_BTD = torch.randn(B, n, d)
    projections, attention = 4 * n * d * d, 2 * n * n * d
    for as_written in (False, True):
        assert multiply_adds(Attention(d, as_written=as_written), x_BTD) == (
            B * (projections + attention),
            B * attention,
        )
    for window, block in ((6, 32), (66, 33)):
        n_blocks = math.ceil(n / block)
        banded = 2 * n_blocks * block * 3 * block * d if n > 3 * block else attention
        assert multiply_adds(Attention(d, window), x_BTD) == (B * (projections + banded), B * banded)
    assert multiply_adds(Recurrent(d), x_BTD) == (2 * B * n * d * d,) * 2
    for kernel in (3, 7):
        assert multiply_adds(Convolution(d, kernel), x_BTD) == (kernel * B * n * d * d,) * 2


@pytest.mark.parametrize("n", [1, 2, 7, 200])
def test_chains_equal_the_closed_forms(n: int) -> None:
    """Self-attention: a projection, the scores, the weighted sums, W_O. Recurrent: x W, then every step."""
    x_BTD = torch.randn(1, n, D, requires_grad=True)
    for attention in (Attention(D), Attention(D, as_written=True), Attention(D, 6)):
        assert longest_chain(attention(x_BTD)) == 4
    assert longest_chain(Recurrent(D)(x_BTD)) == n + 1
    assert longest_chain(Convolution(D, 3)(x_BTD)) == 1
    assert longest_chain(Convolution(D, 3)(Recurrent(D)(x_BTD) + Attention(D)(x_BTD))) == max(n + 1, 4) + 1


def test_an_unknown_product_is_refused() -> None:
    assert products_in("TanhBackward0") == 0
    with pytest.raises(AssertionError, match="CudnnRnnBackward0"):
        products_in("CudnnRnnBackward0")


@pytest.mark.parametrize("n", [2, 3, 9, 10, 27, 28, 100])
def test_paths_equal_the_closed_forms(n: int) -> None:
    reach = {"convolutional": SCALE.kernel // 2, "restricted self-attention": SCALE.window // 2}
    for name, kind in KINDS.items():
        expected = math.ceil((n - 1) / reach[name]) if name in reach else n if name == "recurrent" else 1
        assert path_of(kind, n, SCALE) == expected, name
    for kernel in (3, 5):
        digits = next(i for i in range(n) if kernel**i >= n)  # a logarithm in floating point is inexact at powers
        assert dilated_path(n, kernel) == digits


@pytest.mark.parametrize("n", [5, 12])
def test_paths_equal_those_of_gradients_through_whole_stacks(n: int) -> None:
    """One backward pass through the stack, without new random gradients between layers."""
    torch.manual_seed(0)
    layers: list[Callable[[int], nn.Module]] = [
        lambda _: Attention(PATH_WIDTH),
        lambda _: Attention(PATH_WIDTH, 4),
        lambda _: Convolution(PATH_WIDTH, 3),
        lambda i: Convolution(PATH_WIDTH, 3, 3 ** (i - 1)),
    ]
    for layer_at in layers:
        length = layers_between_ends(layer_at, n)
        for n_layers in range(1, length + 1):
            stack = nn.Sequential(*(layer_at(i) for i in range(1, n_layers + 1))).double()
            assert (0 in reached(stack, inputs(n, PATH_WIDTH), n - 1)) == (n_layers == length)


def test_a_path_that_does_not_exist_is_refused() -> None:
    """Centred dilated convolutions do not connect the ends. Ours are causal for this reason."""

    class Centred(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.convolve = nn.Conv1d(PATH_WIDTH, PATH_WIDTH, 3, padding=dilation, dilation=dilation)

        def forward(self, x_BTD: Tensor) -> Tensor:
            out_BDT: Tensor = self.convolve(x_BTD.transpose(1, 2))
            return out_BDT.transpose(1, 2)

    with pytest.raises(AssertionError, match="do not connect"):
        layers_between_ends(lambda i: Centred(3 ** (i - 1)), 6)
    layer = Recurrent(PATH_WIDTH)
    nn.init.zeros_(layer.U)
    with pytest.raises(AssertionError, match="do not connect"):
        steps_between_ends(layer, 6)


# Measurements


def test_peak_memory_is_the_maximum_over_time() -> None:
    def run() -> None:
        first, second = torch.empty(1000, 250), torch.empty(1000, 125)  # 4 bytes each
        del first
        third = torch.empty(1000, 100)
        del second, third

    assert peak_bytes(run, "cpu") == 4 * (250_000 + 125_000)


def test_only_attention_as_written_holds_all_weights_in_memory() -> None:
    n, bytes_of_weights = 512, 4 * 512 * 512  # one head
    x_BTD = torch.randn(1, n, PATH_WIDTH, requires_grad=True)

    def peak(layer: Attention) -> int:
        return peak_bytes(lambda: torch.autograd.grad(layer(x_BTD).sum(), x_BTD), "cpu")

    assert peak(Attention(PATH_WIDTH, as_written=True)) > 2 * bytes_of_weights
    assert peak(Attention(PATH_WIDTH)) < bytes_of_weights
    assert peak(Attention(PATH_WIDTH, 8)) < bytes_of_weights


def test_exponents_are_recovered_from_the_larger_sizes() -> None:
    sizes = [64, 128, 256, 512, 1024, 1536, 2048]
    fit = exponent([(x, 3e-9 * x**1.7 if x >= 512 else 5.0) for x in sizes])
    assert fit["exponent"] == pytest.approx(1.7)
    assert fit["off_by"] == pytest.approx(1)
    assert (fit["from"], fit["to"]) == (512, 2048)
    bent = exponent([(512, 1.0), (1024, 2.0 * 1.2), (2048, 4.0)])
    assert bent["exponent"] == pytest.approx(1)
    assert bent["off_by"] == pytest.approx(1.2 ** (2 / 3))


def test_a_size_that_does_not_fit_into_memory_is_reported_and_not_fitted() -> None:
    class TooLarge(Convolution):
        def forward(self, x_BTD: Tensor) -> Tensor:
            if x_BTD.requires_grad:  # the count, which keeps no activations, fits into memory
                raise torch.OutOfMemoryError
            return super().forward(x_BTD)

    point = table1.measure("too large", TooLarge(8, 3), 8, 8, SCALE, "cpu")
    assert point == {"n": 8, "d": 8, "ran_out_of_memory": True}
    points = [{"n": n, **dict.fromkeys(MEASURED, n * n)} for n in (1, 2, 4)] + [point]
    assert [one["exponent"] for one in exponents_of(points, "n").values()] == pytest.approx([2] * len(MEASURED))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("table1")
    n_threads = torch.get_num_threads()
    table1.main(["--quick", "--out", str(folder / "quick.json"), "--svg", str(folder / "quick.svg")])
    torch.set_num_threads(n_threads)
    return json.loads((folder / "quick.json").read_text()), folder


def test_the_command_writes_every_number_with_its_passport(measured: tuple[dict[str, Any], Path]) -> None:
    result, folder = measured
    assert {"commit", "sources", "config_hash", "device", "versions"} <= result.keys()
    assert list(result["layers"]) == list(KINDS)
    for name, layer in result["layers"].items():
        assert [point["n"] for point in layer["by_n"]] == list(SCALE.ns)
        assert [point["d"] for point in layer["by_d"]] == list(SCALE.ds)
        for point in layer["by_n"] + layer["by_d"]:
            assert point["median_seconds"] >= point["seconds"] > 0
            assert point["peak_bytes"] >= 4 * 2 * point["n"] * point["d"]  # the output and the input's gradient
            assert point["n_passes"] >= 3
        assert [point["n"] for point in layer["path"]] == list(SCALE.path_ns), name
    growth = {by: one["multiply_adds"] for by, one in result["layers"]["convolutional"]["exponents"].items()}
    assert [growth[by]["exponent"] for by in ("n", "d", "k")] == pytest.approx([1, 2, 1])
    assert ET.parse(folder / "quick.svg").getroot().tag.endswith("svg")


def test_the_table_shows_the_numbers_of_the_result(measured: tuple[dict[str, Any], Path]) -> None:
    result, _ = measured
    result = json.loads(json.dumps(result))
    layer = result["layers"]["restricted self-attention"]
    layer["exponents"]["r"]["peak_bytes"] |= {"exponent": 7.654, "off_by": 1.2}
    layer["exponents"]["r"]["seconds"] |= {"exponent": 6.543, "off_by": 1.05}
    layer["path"][-1]["length"], result["dilated_path"][-1]["length"] = 12_345, 6789
    lines, _, note = table(result).partition("\n\n")
    assert note == r"\* not a power: a size differs from the fitted line by more than 10%"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert [row[0] for row in rows[2:]] == [*KINDS, table1.DILATED]
    by_name = {row[0]: row for row in rows}
    assert by_name["restricted self-attention"][4].endswith(" r^6.54")
    assert by_name["restricted self-attention"][5].endswith(r" r^7.65\*")
    assert by_name["restricted self-attention"][7] == "O(n/r): 2 and 12,345"
    assert by_name[table1.DILATED][7] == "O(log_k(n)): 2 and 6,789"
    assert by_name["recurrent"][2] == "n^1.00 d^2.00"
    assert by_name["recurrent"][6] == "O(n): 9 and 28"


@pytest.mark.parametrize("device", ["cpu"])
def test_the_committed_result_has_the_current_sizes(device: str) -> None:
    result = json.loads((RESULTS / f"table1_{device}.json").read_text())
    assert result["scale"] == json.loads(json.dumps(asdict(SCALES[device]))), (
        "the result is outdated: run python -m experiments.table1"
    )
    assert table(result).count("\n|") == len(KINDS) + 2
