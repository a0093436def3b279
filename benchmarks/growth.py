"""How training grows: seconds a step with the tokens of a batch, memory with the size of the model; as JSON and SVG.

    python -m benchmarks.growth --device cuda --out benchmarks/results/growth_h200.json

A step is forward, backward and Adam on sentences of 32 tokens, as `train_speed.py` has it, ours and `nn.Transformer`'s.
What does not fit into memory ends its line. The charts lie beside the JSON: ..._seconds.svg and ..._memory.svg.
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
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16_384, 32_768, 65_536, 131_072, 200_704])
    parser.add_argument("--memory-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5)
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
    found: dict[str, Any] = {"way": name, "size": size, "tokens": tokens, "seconds": None, "memory_bytes": None}
    on_gpu = options.device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = make_step(Way(name, "bfloat16" if on_gpu else "float32"), config, options.device, tokens)
        seconds(step, 2, options.device)
        found["seconds"] = seconds(step, options.steps, options.device) / options.steps
        found["n_parameters"] = count_parameters(config)
        found["memory_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else None
    except torch.OutOfMemoryError:
        found["ran_out_of_memory"] = True
    print(found, flush=True)
    return found


def draw(out: Path, result: dict[str, Any]) -> None:
    def lines(of: str, x: str, y: str, scale: float) -> dict[str, list[tuple[float, float]]]:
        found = {
            name: [(one[x], one[y] * scale) for one in result[of] if one["way"] == name and one[y]] for name in NAMES
        }
        return {name: line for name, line in found.items() if line}

    line_chart(
        out.with_name(f"{out.stem}_seconds.svg"),
        f"A step of training, {result['size']}",
        "target tokens in a batch",
        "seconds",
        lines("by_tokens", "tokens", "seconds", 1.0),
    )
    if memory := lines("by_size", "n_parameters", "memory_bytes", 1e-9):
        line_chart(
            out.with_name(f"{out.stem}_memory.svg"), "Memory of training, most at once", "parameters", "GB", memory
        )


if __name__ == "__main__":
    main()
