"""The growth of training costs: seconds per step by tokens per batch, and memory by model size, as JSON and SVG.

    python -m benchmarks.growth --device cuda --out benchmarks/results/growth_h200.json

A step is forward pass, backward pass and Adam on sentences of 32 tokens, as in `train_speed.py`, for our model and for
`nn.Transformer`. The lines of the charts end where memory runs out. The charts are written next to the JSON file, as
..._seconds.svg and ..._memory.svg.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_speed import OURS, Way, make_step, seconds
from experiments.chart import line_chart
from experiments.passport import passport, write_result
from transduce.config import PRESETS
from transduce.paper_check import count_parameters

SIZES = ("tiny", "small", "base", "big")
NAMES = (OURS, "nn.Transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="base")
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[4096, 8192, 16_384, 32_768, 65_536, 131_072, 200_704],
        help="Tokens per batch, for the chart of seconds.",
    )
    parser.add_argument("--memory-tokens", type=int, default=8192, help="Tokens per batch, for the chart of memory.")
    parser.add_argument("--steps", type=int, default=5, help="Number of timed steps.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "growth", "size": options.size, "by_tokens": [], "by_size": []}
    for name in NAMES:
        for tokens in options.tokens:
            result["by_tokens"].append(measure(options, name, options.size, tokens))
        for size in SIZES:
            result["by_size"].append(measure(options, name, size, options.memory_tokens))
        write_result(options.out, result | passport(PRESETS[options.size](), options.device))
    draw(options.out, result)


def measure(options: argparse.Namespace, name: str, size: str, tokens: int) -> dict[str, Any]:
    config = PRESETS[size]()
    result: dict[str, Any] = {"way": name, "size": size, "tokens": tokens, "seconds": None, "memory_bytes": None}
    on_gpu = options.device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = make_step(Way(name, "bfloat16" if on_gpu else "float32"), config, options.device, tokens)
        seconds(step, 2, options.device)
        result["seconds"] = seconds(step, options.steps, options.device) / options.steps
        result["n_parameters"] = count_parameters(config)
        result["memory_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else None
    except torch.OutOfMemoryError:
        result["ran_out_of_memory"] = True
    print(result, flush=True)
    return result


def draw(out: Path, result: dict[str, Any]) -> None:
    def lines(group: str, x: str, y: str, scale: float) -> dict[str, list[tuple[float, float]]]:
        points = {
            name: [(one[x], one[y] * scale) for one in result[group] if one["way"] == name and one[y]] for name in NAMES
        }
        return {name: line for name, line in points.items() if line}

    line_chart(
        out.with_name(f"{out.stem}_seconds.svg"),
        f"One training step, {result['size']}",
        "target tokens per batch",
        "seconds",
        lines("by_tokens", "tokens", "seconds", 1.0),
    )
    if memory := lines("by_size", "n_parameters", "memory_bytes", 1e-9):
        line_chart(out.with_name(f"{out.stem}_memory.svg"), "Peak memory of training", "parameters", "GB", memory)


if __name__ == "__main__":
    main()
