"""Table 1 of the paper, measured: one self-attention, recurrent, convolutional and restricted self-attention layer.

    python -m experiments.table1 --out experiments/results/table1_cpu.json --svg docs/figures/table1.svg
    python -m experiments.table1 --out experiments/results/table1_h200.json --device cuda

Complexity: the time and the peak memory of one forward and backward pass, with gradients of the input and of all
weights, and two counts of multiply-adds in the forward pass: the paper's count and the count of the whole layer. They
differ for self-attention. The paper counts n n d for scores and weighted sums, but not n d d for W_Q, W_K, W_V and W_O,
which also take time. Exponents are least-squares fits between logarithms over the larger sizes.

Sequential operations: the longest chain of matrix products in which each needs the result of the previous one. Maximum
path length: the smallest number of layers (time steps in a recurrent layer) through which the first input receives a
gradient from the last output. Both numbers come from running the layers on the CPU; they do not depend on the device.
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

# Must be set before torch is imported. Otherwise the profiler logs its start and end for each measurement.
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
from transduce.insight.drawing import COLOURS, check_figure_file, draw_in_style, new_figure, row_of_axes, write_figure
from transduce.runtime import configure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEED = 1
FITTED = 4
"""The fit uses sizes from 1 / FITTED of the largest size. For smaller sizes, the fixed cost of each operation
dominates."""
BENT = 1.1
"""The table marks an exponent if a point differs from the fitted line by more than this factor: the growth is not a
power of the size."""
WHAT = {
    "seconds": "fastest forward and backward pass, with gradients of the input and of all weights; CPU time on a CPU",
    "peak_bytes": "peak memory during such a pass, without the input and the weights",
    "multiply_adds": "multiply-adds of all matrix products in the forward pass",
    "multiply_adds_of_the_paper": "multiply-adds that Table 1 counts: for self-attention, without the four projections",
    "sequential": "longest chain of dependent matrix products in the graph of the forward pass",
    "path": "smallest number of layers, or time steps, through which the first input receives a gradient from the last "
    "output",
}
MARK = r"\*"  # escaped for Markdown
MEASURED = ("multiply_adds_of_the_paper", "multiply_adds", "seconds", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The measured sizes."""

    ns: tuple[int, ...]
    d: int
    """The width used while n varies."""
    ds: tuple[int, ...]
    n: int
    """The length used while d varies, and, together with `d`, while the kernel or the window varies."""
    kernels: tuple[int, ...]
    windows: tuple[int, ...]
    path_ns: tuple[int, ...]
    """The lengths for sequential operations and path lengths."""
    kernel: int = 3
    window: int = 64
    batch: int = 1
    enough_seconds: float = 0.5
    """Passes are repeated at least three times, and until this total time."""


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
    """A row of Table 1: the paper's terms, and a function that makes a layer of width d."""

    complexity: str
    sequential: str
    path: str
    make: Callable[[int, Scale], nn.Module]
    width: str | None = None
    """The paper's name for the layer's third size, in addition to n and d."""
    make_wide: Callable[[int, int], nn.Module] | None = None
    """Makes a layer from d and the third size."""


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
# The table of the paper gives the path length of dilated convolutions. Section 4 gives O(n/k) for the others.
DILATED = "convolutional, dilated"
DILATED_PATH = "O(log_k(n))"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="Use tiny sizes, only to test the command.")
    parser.add_argument("--svg", type=Path, help="Draw seconds and memory against n.")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: omit --device")
    if options.svg is not None:
        check_figure_file(options.svg)
    configure_process(options.device)
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
        write_figure(draw_in_style(lambda: draw(written)), options.svg)
    print(table(written))


def configure_process(device: str) -> None:
    """Settings that must be the same for all sizes."""
    torch.manual_seed(SEED)
    # With several threads, small sizes run on one thread and large sizes on several, which bends the lines.
    configure(device, 1)
    if device == "cuda":
        # Otherwise only convolutions would use the lower precision of TF32.
        torch.backends.cudnn.allow_tf32 = False


# Measuring


def measure_kind(name: str, scale: Scale, device: str) -> dict[str, Any]:
    kind = KINDS[name]

    def sizes(pairs: Iterator[tuple[int, int]]) -> list[dict[str, Any]]:
        return [measure(name, kind.make(d, scale), n, d, scale, device) for n, d in pairs]

    result: dict[str, Any] = {"paper": {name: getattr(kind, name) for name in ("complexity", "sequential", "path")}}
    result["by_n"] = sizes((n, scale.d) for n in scale.ns)
    result["by_d"] = sizes((scale.n, d) for d in scale.ds)
    exponents = {by: exponents_of(result[f"by_{by}"], by) for by in ("n", "d")}
    if (make_wide := kind.make_wide) is not None and (by := kind.width) is not None:
        result[f"by_{by}"] = [
            {by: width} | measure(f"{name}, {by} {width},", make_wide(scale.d, width), scale.n, scale.d, scale, device)
            for width in (scale.kernels if by == "k" else scale.windows)
        ]
        exponents[by] = exponents_of(result[f"by_{by}"], by)
    chains = {n: longest_chain(kind.make(PATH_WIDTH, scale)(torch.randn(1, n, PATH_WIDTH))) for n in scale.path_ns}
    result["sequential"] = [{"n": n, "operations": chain} for n, chain in chains.items()]
    result["path"] = [{"n": n, "length": path_of(kind, n, scale)} for n in scale.path_ns]
    return result | {"exponents": exponents}


def measure(name: str, layer: nn.Module, n: int, d: int, scale: Scale, device: str) -> dict[str, Any]:
    """One layer at one size. If it does not fit into memory, the result says so and has no measurements."""
    result: dict[str, Any] = {"n": n, "d": d}
    if device == "cuda":
        gc.collect()  # the traceback of an out-of-memory error keeps tensors alive
        torch.cuda.empty_cache()
    try:
        layer = layer.to(device)
        x_BTD = torch.randn(scale.batch, n, d, device=device, requires_grad=True)
        direction_BTD = torch.randn_like(x_BTD)

        def run_pass() -> object:
            return torch.autograd.grad(layer(x_BTD), [x_BTD, *layer.parameters()], direction_BTD)

        products = multiply_adds(layer, x_BTD)
        result |= {"multiply_adds": products.whole, "multiply_adds_of_the_paper": products.paper}
        result |= seconds_of(run_pass, scale.enough_seconds, device) | {"peak_bytes": peak_bytes(run_pass, device)}
        summary = f"{result['seconds']:.4f} s, {result['peak_bytes'] / 1e6:.1f} MB"
    except torch.OutOfMemoryError:
        result, summary = {"n": n, "d": d, "ran_out_of_memory": True}, "out of memory"
    print(f"{name} n {n} d {d}: {summary}", file=sys.stderr, flush=True)
    return result


def seconds_of(run: Callable[[], object], enough: float, device: str) -> dict[str, Any]:
    """The fastest pass counts, because other work on the machine can only add time."""
    on_gpu = device == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    # On a CPU: the time of the process. Wall-clock time would also contain the waits of long passes for a busy core.
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
    """The peak of PyTorch's allocators. On a CPU it does not include memory that a library allocates itself."""
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
    """The dilation of each layer is the dilation of the next layer times the kernel size."""
    return layers_between_ends(lambda count: Convolution(PATH_WIDTH, kernel, kernel ** (count - 1)), n)


# Fitting


def exponents_of(points: Sequence[Mapping[str, Any]], by: str) -> dict[str, Any]:
    fitting = [point for point in points if "ran_out_of_memory" not in point]
    return {name: exponent([(point[by], point[name]) for point in fitting]) for name in MEASURED}


def exponent(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The exponent of the power law y ~ x ** exponent, and the largest factor between a point and the fitted line."""
    largest = max(x for x, _ in points)
    fitted = [point for point in points if point[0] * FITTED >= largest]
    assert len(fitted) > 1, "a fit needs at least two points"
    x, y = np.log(fitted).T
    slope, start = np.polyfit(x, y, 1)
    worst = float(np.abs(y - slope * x - start).max())
    return {"exponent": float(slope), "off_by": math.exp(worst), "from": fitted[0][0], "to": largest}


# The table and the figure


def table(result: Mapping[str, Any]) -> str:
    """A Markdown table with a row for each layer."""
    scale = result["scale"]
    ends = f"n = {scale['path_ns'][0]:,} and {scale['path_ns'][-1]:,}"
    head = [
        f"one layer; k = {scale['kernel']}, r = {scale['window']}",
        "complexity in the paper",
        "multiply-adds that the paper counts",
        "multiply-adds of the whole layer",
        "time",
        "memory",
        f"sequential operations, {ends}",
        f"path length, {ends}",
    ]
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)]]
    for name, layer in result["layers"].items():
        powers = [powers_of(layer["exponents"], measured) for measured in MEASURED]
        chain, path = ends_of(layer["sequential"], "operations"), ends_of(layer["path"], "length")
        paper = layer["paper"]
        rows.append([name, paper["complexity"], *powers, f"{paper['sequential']}: {chain}", f"{paper['path']}: {path}"])
    path = ends_of(result["dilated_path"], "length")
    rows.append([DILATED, *[""] * (len(head) - 2), f"{DILATED_PATH}: {path}"])
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    note = f"\n\n{MARK} not a power: a size differs from the fitted line by more than {BENT - 1:.0%}"
    return lines + note * (MARK in lines)


def powers_of(exponents: Mapping[str, Any], measured: str) -> str:
    fits = {by: fits_by_name[measured] for by, fits_by_name in exponents.items()}
    return " ".join(f"{by}^{fit['exponent']:.2f}{MARK * (fit['off_by'] > BENT)}" for by, fit in fits.items())


def ends_of(points: Sequence[Mapping[str, int]], name: str) -> str:
    """The values of the first and of the last point."""
    return f"{points[0][name]:,} and {points[-1][name]:,}"


def draw(result: Mapping[str, Any]) -> Figure:
    figure = new_figure(9, 4.2)
    left, right = row_of_axes(figure, 2)
    draw_growth(left, result["layers"], "seconds", 1.0)
    draw_growth(right, result["layers"], "peak_bytes", 1e-6)
    left.set(title=f"forward and backward pass, d = {result['scale']['d']}, {result['device']}", ylabel="seconds")
    right.set(title="peak memory during the pass", ylabel="MB")
    return figure


def draw_growth(axes: Axes, layers: Mapping[str, Any], measured: str, unit: float) -> None:
    for (name, layer), colour in zip(layers.items(), COLOURS, strict=False):
        points = [(point["n"], point[measured] * unit) for point in layer["by_n"] if measured in point]
        power = layer["exponents"]["n"][measured]["exponent"]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=f"{name}, $n^{{{power:.2f}}}$")
    ns = sorted({point["n"] for layer in layers.values() for point in layer["by_n"]})
    axes.set(xscale="log", yscale="log", xlabel="n, positions")
    axes.set_xticks([n for n in ns if n & (n - 1) == 0], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
