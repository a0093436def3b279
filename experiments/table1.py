"""The paper's Table 1, measured: self-attention, recurrent, convolutional and restricted layers, one of each.

    python -m experiments.table1 --out experiments/results/table1_cpu.json --svg docs/figures/table1.svg
    python -m experiments.table1 --out experiments/results/table1_h200.json --device cuda

Complexity: seconds and most bytes at once of one pass forward and back (gradients of the input and of all weights), and
the multiply-adds of the forward pass, twice: those that the paper counts, and those of the whole layer. For
self-attention these differ: n n d for scores and weighted sums, but also n d d for W_Q, W_K, W_V and W_O, which the
paper leaves out and a clock does not. Exponents are least squares between logarithms over the larger sizes.

Sequential operations: the longest chain of matrix products that wait for each other. Maximum path length: the fewest
layers (in a recurrent one: steps of time) through which the last output gives the first input a gradient. Both are
counted by running the layers, on the CPU: no device changes them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time

# Before torch, which reads it once: its profiler else tells stderr of its start and end, for each measurement.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from experiments.passport import passport, write_result
from experiments.table1_layers import (
    PATH_WIDTH,
    Attention,
    Convolution,
    Recurrent,
    attention_config,
    layers_between_ends,
    longest_chain,
    multiply_adds,
    steps_between_ends,
)
from transduce.insight.drawing import COLOURS, check_figure_file, drawn, new_figure, row_of_axes, write_figure
from transduce.runtime import configure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEED = 1
FITTED = 4
"""Exponents are of the sizes from a quarter of the largest on: below, what every operation costs hides them."""
BENT = 1.1
"""A power whose worst point lies off its line by more than this factor is marked in the table: it is no power."""
WHAT = {
    "seconds": "fastest pass forward and back, with gradients of the input and of all weights; on a CPU, of its time",
    "peak_bytes": "most bytes at once during such a pass, above the input and the weights, which stood before",
    "multiply_adds": "of all matrix products of the forward pass, as they ran",
    "multiply_adds_of_the_paper": "of those that Table 1 counts: of self-attention, without its four projections",
    "sequential": "longest chain of matrix products that wait for each other, in the graph of the forward pass",
    "path": "fewest layers, or steps of time, through which the last output gives the first input a gradient",
}
MARK = r"\*"  # so that Markdown shows it
MEASURED = ("multiply_adds_of_the_paper", "multiply_adds", "seconds", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Which sizes are measured."""

    ns: tuple[int, ...]
    d: int
    """The width at which n varies."""
    ds: tuple[int, ...]
    n: int
    """The length at which d varies, and at `d` the kernel and the window."""
    kernels: tuple[int, ...]
    windows: tuple[int, ...]
    path_ns: tuple[int, ...]
    """The lengths at which chains and paths are counted."""
    kernel: int = 3
    window: int = 64
    batch: int = 1
    enough_seconds: float = 0.5
    """Passes are repeated for so long, at least three times."""


SCALES = {
    "cpu": Scale(
        ns=(64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384),
        d=256,
        ds=(64, 128, 256, 384, 512, 768, 1024),
        n=2048,
        kernels=(3, 5, 9, 17, 33),
        windows=(64, 128, 256, 512, 1024),
        path_ns=(64, 128, 256, 512, 1024),
    ),
    "cuda": Scale(
        ns=(64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384),
        d=512,
        ds=(128, 256, 512, 768, 1024, 1536, 2048),
        n=4096,
        kernels=(3, 5, 9, 17, 33),
        windows=(64, 128, 256, 512, 1024, 2048),
        path_ns=(64, 128, 256, 512, 1024),
        batch=2,
    ),
    "quick": Scale(
        ns=(32, 128),
        d=16,
        ds=(8, 32),
        n=128,
        kernels=(3, 5),
        windows=(64, 80),
        path_ns=(8, 27),
        window=8,
        enough_seconds=0.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of Table 1: what the paper says of it, and how to make one of width d."""

    complexity: str
    sequential: str
    path: str
    make: Callable[[int, Scale], nn.Module]
    width: str | None = None
    """The name, in the paper, of what it has beside n and d."""
    make_wide: Callable[[int, int], nn.Module] | None = None
    """Of width d, and with this much of it."""


KINDS = {
    "self-attention": Kind(complexity="O(n² d)", sequential="O(1)", path="O(1)", make=lambda d, _: Attention(d)),
    "self-attention, as written": Kind(
        complexity="O(n² d)", sequential="O(1)", path="O(1)", make=lambda d, _: Attention(d, as_written=True)
    ),
    "recurrent": Kind(complexity="O(n d²)", sequential="O(n)", path="O(n)", make=lambda d, _: Recurrent(d)),
    "convolutional": Kind(
        complexity="O(k n d²)",
        sequential="O(1)",
        path="O(n/k)",
        make=lambda d, scale: Convolution(d, scale.kernel),
        width="k",
        make_wide=Convolution,
    ),
    "restricted self-attention": Kind(
        complexity="O(r n d)",
        sequential="O(1)",
        path="O(n/r)",
        make=lambda d, scale: Attention(d, scale.window),
        width="r",
        make_wide=Attention,
    ),
}
# The table's row has dilated convolutions in mind, the text beside it (section 4) has O(n/k) for those that are not.
DILATED = "convolutional, dilated"
DILATED_PATH = "O(log_k(n))"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="Sizes that show that it runs, and nothing else.")
    parser.add_argument("--svg", type=Path, help="Draw seconds and memory against n.")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: leave out --device")
    if options.svg is not None:
        check_figure_file(options.svg)
    settle(options.device)
    scale = SCALES["quick" if options.quick else options.device]
    began = time.monotonic()
    layers = {name: measure_kind(name, scale, options.device) for name in KINDS}
    result = {
        "experiment": "table1",
        "scale": asdict(scale),
        "what": WHAT,
        "dtype": "float32",
        "seed": SEED,
        "minutes": round((time.monotonic() - began) / 60, 2),
        "layers": layers,
        "dilated_path": [{"n": n, "length": dilated_path(n, scale.kernel)} for n in scale.path_ns],
    }
    write_result(options.out, result | passport(attention_config(scale.d, scale.window), options.device))
    written = json.loads(options.out.read_text(encoding="utf-8"))
    if options.svg is not None:
        write_figure(drawn(lambda: draw(written)), options.svg)
    print(table(written))


def settle(device: str) -> None:
    """What must not change from one size to the next."""
    torch.manual_seed(SEED)
    # With more threads, small sizes run on one and large ones on several: that bends the lines.
    configure(device, 1)
    if device == "cuda":
        # Convolutions alone would else multiply in fewer digits than the rest.
        torch.backends.cudnn.allow_tf32 = False


# Measuring


def measure_kind(name: str, scale: Scale, device: str) -> dict[str, Any]:
    kind = KINDS[name]

    def sizes(pairs: Iterator[tuple[int, int]]) -> list[dict[str, Any]]:
        return [measure(name, kind.make(d, scale), n, d, scale, device) for n, d in pairs]

    found: dict[str, Any] = {"paper": {of: getattr(kind, of) for of in ("complexity", "sequential", "path")}}
    found["by_n"] = sizes((n, scale.d) for n in scale.ns)
    found["by_d"] = sizes((scale.n, d) for d in scale.ds)
    exponents = {by: exponents_of(found[f"by_{by}"], by) for by in ("n", "d")}
    if (make_wide := kind.make_wide) is not None and (by := kind.width) is not None:
        found[f"by_{by}"] = [
            {by: width} | measure(f"{name}, {by} {width},", make_wide(scale.d, width), scale.n, scale.d, scale, device)
            for width in (scale.kernels if by == "k" else scale.windows)
        ]
        exponents[by] = exponents_of(found[f"by_{by}"], by)
    chains = {n: longest_chain(kind.make(PATH_WIDTH, scale)(torch.randn(1, n, PATH_WIDTH))) for n in scale.path_ns}
    found["sequential"] = [{"n": n, "operations": chain} for n, chain in chains.items()]
    found["path"] = [{"n": n, "length": path_of(kind, n, scale)} for n in scale.path_ns]
    return found | {"exponents": exponents}


def measure(name: str, layer: nn.Module, n: int, d: int, scale: Scale, device: str) -> dict[str, Any]:
    """One layer at one size. What does not fit into a GPU's memory says so, and has no numbers."""
    found: dict[str, Any] = {"n": n, "d": d}
    if device == "cuda":
        gc.collect()  # what ran out of memory lives on in its traceback
        torch.cuda.empty_cache()
    try:
        layer = layer.to(device)
        x_BTD = torch.randn(scale.batch, n, d, device=device, requires_grad=True)
        direction_BTD = torch.randn_like(x_BTD)

        def both_ways() -> object:
            return torch.autograd.grad(layer(x_BTD), [x_BTD, *layer.parameters()], direction_BTD)

        products = multiply_adds(layer, x_BTD)
        found |= {"multiply_adds": products.whole, "multiply_adds_of_the_paper": products.paper}
        found |= seconds_of(both_ways, scale.enough_seconds, device) | {"peak_bytes": peak_bytes(both_ways, device)}
        said = f"{found['seconds']:.4f} s, {found['peak_bytes'] / 1e6:.1f} MB"
    except torch.OutOfMemoryError:
        found, said = {"n": n, "d": d, "ran_out_of_memory": True}, "out of memory"
    print(f"{name} n {n} d {d}: {said}", file=sys.stderr, flush=True)
    return found


def seconds_of(run: Callable[[], object], enough: float, device: str) -> dict[str, Any]:
    """The fastest counts: what else the machine does can only add."""
    on_gpu = device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    # On a CPU the time of its one thread: beside others, long passes would wait for their turn, and short ones not.
    clock = time.perf_counter if on_gpu else time.process_time
    times: list[float] = []
    run()
    wait()
    while len(times) < 3 or sum(times) < enough:
        began = clock()
        run()
        wait()
        times.append(clock() - began)
    return {"seconds": min(times), "median_seconds": statistics.median(times), "n_passes": len(times)}


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """As PyTorch's allocators saw it: on a CPU, what a library takes from the system by itself is not in it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(int(event.nbytes()) for event in events))


def path_of(kind: Kind, n: int, scale: Scale) -> int:
    layer = kind.make(PATH_WIDTH, scale)
    if isinstance(layer, Recurrent):
        return steps_between_ends(layer, n)
    return layers_between_ends(lambda _: kind.make(PATH_WIDTH, scale), n)


def dilated_path(n: int, kernel: int) -> int:
    """Each layer's dilation is that of the one after it times the kernel."""
    return layers_between_ends(lambda count: Convolution(PATH_WIDTH, kernel, kernel ** (count - 1)), n)


# Fitting


def exponents_of(points: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
    fitting = [point for point in points if "ran_out_of_memory" not in point]
    return {of: exponent([(point[by], point[of]) for point in fitting]) for of in MEASURED}


def exponent(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The power of x with which y grows, and the factor by which the worst point lies off that line."""
    largest = max(x for x, _ in points)
    fitted = [point for point in points if point[0] * FITTED >= largest]
    assert len(fitted) > 1, "one point has no slope"
    x, y = np.log(fitted).T
    slope, start = np.polyfit(x, y, 1)
    worst = float(np.abs(y - slope * x - start).max())
    return {"exponent": float(slope), "off_by": math.exp(worst), "from": fitted[0][0], "to": largest}


# Showing


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a row for each layer, from a result as it was written."""
    scale = result["scale"]
    ends = f"n = {scale['path_ns'][0]:,} and {scale['path_ns'][-1]:,}"
    head = [
        f"one layer; k = {scale['kernel']}, r = {scale['window']}",
        "complexity in the paper",
        "multiply-adds it counts",
        "... of the whole layer",
        "seconds",
        "memory",
        f"sequential operations, {ends}",
        f"path length, {ends}",
    ]
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, found in result["layers"].items():
        powers = [powers_of(found["exponents"], of) for of in MEASURED]
        chain, path = (ends_of(found[of], of_one) for of, of_one in (("sequential", "operations"), ("path", "length")))
        paper = found["paper"]
        rows.append([name, paper["complexity"], *powers, f"{paper['sequential']}: {chain}", f"{paper['path']}: {path}"])
    path = ends_of(result["dilated_path"], "length")
    rows.append([DILATED, *[""] * (len(head) - 2), f"{DILATED_PATH}: {path}"])
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    note = f"\n\n{MARK} bent: a size lies off the line by more than {BENT - 1:.0%}" if MARK in lines else ""
    return lines + note


def powers_of(exponents: Mapping[str, Any], of: str) -> str:
    powers = {by: found[of] for by, found in exponents.items()}
    return " ".join(f"{by}^{one['exponent']:.2f}{MARK * (one['off_by'] > BENT)}" for by, one in powers.items())


def ends_of(points: Sequence[Mapping[str, int]], of: str) -> str:
    return f"{points[0][of]:,} and {points[-1][of]:,}"


def draw(result: Mapping[str, Any]) -> Figure:
    figure = new_figure(9, 4.2)
    left, right = row_of_axes(figure, 2)
    draw_growth(left, result["layers"], "seconds", 1.0)
    draw_growth(right, result["layers"], "peak_bytes", 1e-6)
    left.set(title=f"one pass forward and back, d = {result['scale']['d']}, {result['device']}", ylabel="seconds")
    right.set(title="most memory at once during the pass", ylabel="MB")
    return figure


def draw_growth(axes: Axes, layers: Mapping[str, Any], of: str, unit: float) -> None:
    for (name, found), colour in zip(layers.items(), COLOURS, strict=False):
        points = [(point["n"], point[of] * unit) for point in found["by_n"] if of in point]
        power = found["exponents"]["n"][of]["exponent"]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=f"{name}, $n^{{{power:.2f}}}$")
    ns = sorted({point["n"] for found in layers.values() for point in found["by_n"]})
    axes.set(xscale="log", yscale="log", xlabel="n, positions")
    axes.set_xticks([n for n in ns if n & (n - 1) == 0], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
