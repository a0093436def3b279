"""The layers of the paper's Table 1, each from (B, T, D) to (B, T, D), and what can be counted of them by running them.

Self-attention is the package's own module, with W_Q, W_K, W_V and W_O. Residuals, normalisation and feed-forward
networks are left out, as the table has none.
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

D_K = 64  # as in the paper's base and big alike: a wider layer has more heads, not wider ones
PATH_WIDTH = 16  # of the layers whose paths are followed, which no width changes
aten = torch.ops.aten


def attention_config(d: int, window: int | None = None) -> RunConfig:
    n_heads = max(d // D_K, 1)
    return with_model(base(), d_model=d, n_heads=n_heads, d_k=d // n_heads, d_v=d // n_heads, attention_window=window)


class Attention(nn.Module):
    """Self-attention of all positions, or restricted to a window; `as_written` holds all weights at once."""

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
    """h_t = tanh(x_t W + h_(t-1) U), in a loop over t. All x_t W are one product, as nothing in them waits."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.W, self.U = nn.Parameter(torch.empty(d, d)), nn.Parameter(torch.empty(d, d))
        for W in self.parameters():
            nn.init.xavier_uniform_(W)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BD = torch.zeros_like(x_BTD[:, 0])
        states = []
        # Not x_BTD[:, t]: on the way back each such cut makes zeros of the whole length, n n in all.
        for xW_BD in (x_BTD @ self.W).unbind(1):
            h_BD = torch.addmm(xW_BD, h_BD, self.U).tanh()
            states.append(h_BD)
        return torch.stack(states, 1)

    def step(self, x_BTD: Tensor, h_BTD: Tensor) -> Tensor:
        """Every position takes one step of time at once, from the state before it: n of them are the layer."""
        before_BTD = torch.cat([torch.zeros_like(h_BTD[:, :1]), h_BTD[:, :-1]], 1)
        return (x_BTD @ self.W + before_BTD @ self.U).tanh()


class Convolution(nn.Module):
    """Centred on its position; dilated, it looks back from it.

    For centred and dilated ones, no stack may join the two ends: of 6 positions by kernels of 3, the distance 5 is only
    9 - 3 - 1, and whichever of these steps comes first leaves the sequence.
    """

    def __init__(self, d: int, kernel: int, dilation: int | None = None) -> None:
        super().__init__()
        assert kernel % 2, "an even kernel has no centre"
        reach = (kernel - 1) * (dilation or 1)
        padding = reach // 2 if dilation is None else reach
        self.convolve = nn.Conv1d(d, d, kernel, padding=padding, dilation=dilation or 1, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # What looks back is padded on both sides all the same, and what comes after the last position is cut.
        out_BDT: Tensor = self.convolve(x_BTD.transpose(1, 2))[..., : x_BTD.shape[1]]
        return out_BDT.transpose(1, 2)


# Complexity per layer


class Products(NamedTuple):
    """Multiply-adds of matrix products in one forward pass, as it ran: with padding, and with what a window hides."""

    whole: int
    paper: int
    """Without W_Q, W_K, W_V and W_O: of self-attention, Table 1 has the scores and the weighted sums alone."""


def multiply_adds(layer: nn.Module, x_BTD: Tensor) -> Products:
    # The counter knows of no fused attention on a CPU, and would pass over it.
    known = {aten._scaled_dot_product_flash_attention_for_cpu: flops_of_attention}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        layer(x_BTD.detach())
    flops = counter.get_flop_counts()["Global"]
    whole = sum(flops.values()) // 2
    if not isinstance(layer, Attention):
        return Products(whole, whole)
    # Projections are products of two matrices, attention of batches of them.
    paper = whole - flops[aten.mm] // 2
    assert paper > 0, "the counter has passed over the attention"
    return Products(whole, paper)


def flops_of_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """Of the scores and the weighted sums, from shapes; two for each multiply-add, as the counter has it."""
    (n_attended, d_v), d_k = value[-2:], key[-1]
    return 2 * math.prod(query[:-1]) * n_attended * (d_k + d_v)


# Sequential operations

CHAINED = {"Mm": 1, "Bmm": 1, "Addmm": 1, "Convolution": 1, "ScaledDotProduct": 2}
"""How many products, one after the other, an operation is, by how its name begins in the graph."""
MAY_CHAIN = re.compile("mm|conv|linear|attention|rnn", re.IGNORECASE)


def longest_chain(output: Tensor) -> int:
    """The most matrix products that wait for each other on any way from the input, in the graph that autograd kept.

    No machine, however parallel, could run fewer after each other than these.
    """
    chain: dict[Node, int] = {}
    assert output.grad_fn is not None
    waiting = [output.grad_fn]
    # Without recursion: a recurrent layer makes a graph thousands of operations deep.
    while waiting:
        node = waiting[-1]
        before = [one for one, _ in node.next_functions if one is not None]
        if unknown := [one for one in before if one not in chain]:
            waiting += unknown
        else:
            chain[waiting.pop()] = products_in(node.name()) + max((chain[one] for one in before), default=0)
    return chain[output.grad_fn]


def products_in(operation: str) -> int:
    for name, n_products in CHAINED.items():
        if operation.startswith(name):
            return n_products
    assert not MAY_CHAIN.search(operation), f"{operation} may be a matrix product, and is not in CHAINED"
    return 0


# Maximum path length


def layers_between_ends(layer_at: Callable[[int], nn.Module], n: int) -> int:
    """The fewest stacked layers through which the first of n inputs gets a gradient from the last output.

    The gradient is carried back through one layer at a time. Between two, what is not zero is drawn anew: the product
    of a thousand small numbers would be zero for want of digits.
    """
    lit_T = torch.arange(n) == n - 1
    for count in range(1, n + 1):
        x_BTD = torch.randn(1, n, PATH_WIDTH, dtype=torch.float64, requires_grad=True)
        direction_BTD = torch.randn_like(x_BTD) * lit_T[:, None]
        (gradient_BTD,) = torch.autograd.grad(layer_at(count).double()(x_BTD), x_BTD, direction_BTD)
        lit_T = (gradient_BTD != 0).any(-1)[0]
        if lit_T[0]:
            return count
    raise AssertionError(f"{n} layers do not join the ends of {n} positions")


def steps_between_ends(layer: Recurrent, n: int) -> int:
    """As above, of steps of time in place of layers: in one recurrent layer every path leads through them."""
    layer, lit_T = layer.double(), torch.arange(n) == n - 1
    for count in range(1, n + 1):
        x_BTD, h_BTD = torch.randn(2, 1, n, PATH_WIDTH, dtype=torch.float64, requires_grad=True).unbind()
        direction_BTD = torch.randn_like(x_BTD) * lit_T[:, None]
        to_x_BTD, to_h_BTD = torch.autograd.grad(layer.step(x_BTD, h_BTD), (x_BTD, h_BTD), direction_BTD)
        if (to_x_BTD != 0).any(-1)[0, 0]:
            return count
        lit_T = (to_h_BTD != 0).any(-1)[0]
    raise AssertionError(f"{n} steps do not join the ends of {n} positions")
