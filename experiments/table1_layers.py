"""The layers of the paper's Table 1, each a map from (B, T, D) to (B, T, D), and functions that count their operations.

Self-attention is the module of the package, with W_Q, W_K, W_V and W_O. As in the table, there are no residuals, norms
or feed-forward networks.
"""

# Axes: B batch, T positions, D width of the layer.

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.flop_counter import FlopCounterMode

from transduce import RunConfig, base, with_model
from transduce.attention import Visible
from transduce.model import Attended, SelfAttention

D_K = 64  # as in the paper's base and big: a wider layer has more heads, not wider heads
PATH_WIDTH = 16  # the width of layers whose path length is measured; it does not depend on the width
aten = torch.ops.aten


def attention_config(d: int, window: int | None = None) -> RunConfig:
    n_heads = max(d // D_K, 1)
    return with_model(base(), d_model=d, n_heads=n_heads, d_k=d // n_heads, d_v=d // n_heads, attention_window=window)


class Attention(nn.Module):
    """Self-attention, either full or restricted to a window. With `as_written`, all attention weights are in memory at
    the same time, as in equation 1."""

    def __init__(self, d: int, window: int | None = None, as_written: bool = False) -> None:
        super().__init__()
        self.attention = SelfAttention(attention_config(d, window).model)
        self.visible, self.as_written = Visible(window=window), as_written
        for W in self.parameters():
            nn.init.xavier_uniform_(W)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.attention.project(x_BTD)
        attended_BTD: Tensor = self.attention(query, Attended(key, value, self.visible), self.as_written)[0]
        return attended_BTD


class Recurrent(nn.Module):
    """h_t = tanh(x_t W + h_(t-1) U), in a loop over t. All x_t W are one product, because they do not depend on h."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(d, d))
        for W in self.parameters():
            nn.init.xavier_uniform_(W)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BD = torch.zeros_like(x_BTD[:, 0])
        states = []
        # Not x_BTD[:, t]: in the backward pass each slice allocates zeros of the full length, n n in total.
        for xW_BD in (x_BTD @ self.W).unbind(1):
            h_BD = torch.addmm(xW_BD, h_BD, self.U).tanh()
            states.append(h_BD)
        return torch.stack(states, 1)

    def step(self, x_BTD: Tensor, h_BTD: Tensor) -> Tensor:
        """One time step of every position at once, each from the state of the previous position. n such steps are
        equal to the layer."""
        before_BTD = torch.cat([torch.zeros_like(h_BTD[:, :1]), h_BTD[:, :-1]], 1)
        return (x_BTD @ self.W + before_BTD @ self.U).tanh()


class Convolution(nn.Module):
    """A convolution centred on its position, or a dilated one over previous positions.

    Centred dilated convolutions are not used, because a stack of them may not connect the two ends. For example, with 6
    positions and kernels of size 3, the distance 5 is only 9 - 3 - 1, and every order of these steps leaves the
    sequence.
    """

    def __init__(self, d: int, kernel: int, dilation: int | None = None) -> None:
        super().__init__()
        assert kernel % 2, "an even kernel has no centre"
        reach = (kernel - 1) * (dilation or 1)
        padding = reach // 2 if dilation is None else reach
        self.convolve = nn.Conv1d(d, d, kernel, padding=padding, dilation=dilation or 1, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # `Conv1d` pads both sides; the outputs after the last position are removed.
        out_BDT: Tensor = self.convolve(x_BTD.transpose(1, 2))[..., : x_BTD.shape[1]]
        return out_BDT.transpose(1, 2)


# Complexity per layer


class Products(NamedTuple):
    """Executed multiply-adds of matrix products in one forward pass, including padding and positions outside a
    window."""

    whole: int
    paper: int
    """Without W_Q, W_K, W_V and W_O: for self-attention, Table 1 counts only the scores and the weighted sums."""


def multiply_adds(layer: nn.Module, x_BTD: Tensor) -> Products:
    # PyTorch's counter does not support fused attention on a CPU and would count zero for it.
    cpu_attention = {aten._scaled_dot_product_flash_attention_for_cpu: flops_of_attention}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=cpu_attention) as counter:
        layer(x_BTD.detach())
    flops = counter.get_flop_counts()["Global"]
    whole = sum(flops.values()) // 2
    if not isinstance(layer, Attention):
        return Products(whole, whole)
    # Projections are the only products of two single matrices; attention uses batched products.
    paper = whole - flops[aten.mm] // 2
    assert paper > 0, "the counter missed the attention"
    return Products(whole, paper)


def flops_of_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """FLOPs of the scores and the weighted sums. A multiply-add is two FLOPs, as in PyTorch's counter."""
    (n_attended, d_v), d_k = value[-2:], key[-1]
    return 2 * math.prod(query[:-1]) * n_attended * (d_k + d_v)


# Sequential operations

CHAINED = {"Mm": 1, "Bmm": 1, "Addmm": 1, "Convolution": 1, "ScaledDotProduct": 2}
"""The number of consecutive products of an operation. Keys are prefixes of the operation's name in the graph."""
MAY_CHAIN = re.compile("mm|conv|linear|attention|rnn", re.IGNORECASE)


def longest_chain(output: Tensor) -> int:
    """The longest chain of dependent matrix products in autograd's graph.

    Even a perfectly parallel machine must execute these products one after another.
    """
    chain: dict[Node, int] = {}
    assert output.grad_fn is not None
    stack = [output.grad_fn]
    # Without recursion, because the graph of a recurrent layer is thousands of operations deep.
    while stack:
        node = stack[-1]
        inputs = [input_node for input_node, _ in node.next_functions if input_node is not None]
        if unknown := [input_node for input_node in inputs if input_node not in chain]:
            stack += unknown
        else:
            longest_input = max((chain[input_node] for input_node in inputs), default=0)
            chain[stack.pop()] = products_in(node.name()) + longest_input
    return chain[output.grad_fn]


def products_in(operation: str) -> int:
    for name, n_products in CHAINED.items():
        if operation.startswith(name):
            return n_products
    assert not MAY_CHAIN.search(operation), f"{operation} may be a matrix product, but is not in CHAINED"
    return 0


# Maximum path length


def layers_between_ends(layer_at: Callable[[int], nn.Module], n: int) -> int:
    """The smallest number of stacked layers through which the first of n inputs receives a gradient from the last
    output.

    The gradient passes through one layer at a time. Between two layers, non-zero gradients are replaced by random
    numbers, because a product of a thousand small numbers would underflow to zero.
    """
    reached_T = torch.arange(n) == n - 1
    for count in range(1, n + 1):
        x_BTD = torch.randn(1, n, PATH_WIDTH, dtype=torch.float64, requires_grad=True)
        direction_BTD = torch.randn_like(x_BTD) * reached_T[:, None]
        (gradient_BTD,) = torch.autograd.grad(layer_at(count).double()(x_BTD), x_BTD, direction_BTD)
        reached_T = (gradient_BTD != 0).any(-1)[0]
        if reached_T[0]:
            return count
    raise AssertionError(f"{n} layers do not connect the ends of {n} positions")


def steps_between_ends(layer: Recurrent, n: int) -> int:
    """The same, but counted in time steps: every path in a recurrent layer leads through time steps."""
    layer, reached_T = layer.double(), torch.arange(n) == n - 1
    for count in range(1, n + 1):
        x_BTD, h_BTD = torch.randn(2, 1, n, PATH_WIDTH, dtype=torch.float64, requires_grad=True).unbind()
        direction_BTD = torch.randn_like(x_BTD) * reached_T[:, None]
        to_x_BTD, to_h_BTD = torch.autograd.grad(layer.step(x_BTD, h_BTD), (x_BTD, h_BTD), direction_BTD)
        if (to_x_BTD != 0).any(-1)[0, 0]:
            return count
        reached_T = (to_h_BTD != 0).any(-1)[0]
    raise AssertionError(f"{n} steps do not connect the ends of {n} positions")
