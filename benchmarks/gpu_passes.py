"""The training pass that is written out, on a GPU: that it is right, that it repeats to the bit, and where time goes.

    python -m benchmarks.gpu_passes --out benchmarks/results/gpu_passes_h200.json

What the tests show by Triton's interpreter is shown here by compiled kernels in bf16: the gradients' distance from
float64 is held to that of autograd under autocast. Exits with 1 when a check fails. The result names the hash of the
sources it covers.
"""

# Axes: B sentences, S source positions, T target positions.

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from experiments.passport import passport, sources_of, write_result
from transduce import ModelConfig, RunConfig, Transformer, base, big, small, with_model
from transduce.data.batches import make_batch
from transduce.runtime import configure
from transduce.training.passes import cuda
from transduce.training.passes.layout import Dropout
from transduce.training.passes.written import COVERED, GraphPasses, ThreadPasses, written_passes
from transduce.training.recipe import adam, model_loss

DEVICE = "cuda"
NOT_ON_A_GPU = ("training/passes/cpu.py",)
"""Of what is covered: nothing here runs it."""
MEAN_NO_WORSE_THAN, LARGEST_NO_WORSE_THAN = 2.0, 3.0
"""Distance from float64 over that of autograd under autocast, which keeps what sub-layers add up in float32, and we in
bf16."""
CASES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "learned positions": {"positions": "learned"},
    "window": {"attention_window": 16},
    "not tied": {"tied_embeddings": "none", "target_vocab_size": 6000},
    "narrow heads": {"d_k": 16, "d_v": 32},
    "width no power of two": {"d_model": 192, "d_ff": 500},
}


def batch_of(config: ModelConfig, n_tokens: int, longest: int, seed: int = 0) -> list[Tensor]:
    """Sentences of all lengths, so many tokens of either side."""
    rng, pairs, n = np.random.default_rng(seed), [], 0
    while n < n_tokens:
        lengths = rng.integers(1, longest, 2)
        pairs.append(
            (
                rng.integers(3, config.source_vocab_size, lengths[0]).tolist(),
                rng.integers(3, config.target_vocab_size, lengths[1]).tolist(),
            )
        )
        n += max(lengths) + 1
    return [torch.from_numpy(ids) for ids in make_batch(pairs, config)[:3]]


def passes_of(model: Transformer, longest: int, n_tokens: int) -> GraphPasses | ThreadPasses:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return written_passes(model, longest, torch.bfloat16, n_tokens, 0.1)


def distances(found: Transformer, expected: Transformer) -> Tensor:
    """Of each parameter's gradient: norm of the difference over norm of the expected."""
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    gradients = ((p.grad, q.grad) for p, q in pairs)
    return torch.stack([(a.double() - b).norm() / b.norm() for a, b in gradients if a is not None and b is not None])


def check_gradients(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    config = with_model(small(), **({"dropout": 0.0} | changes)).model
    ours = Transformer(config).to(DEVICE).train()
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    batch, factor = batch_of(config, 3000, 120), 1 / 1000
    loss_sum = passes_of(ours, 121, 6000).add_gradients([batch], [1], factor)
    source_BS, target_in_BT, target_out_BT = (ids.to(DEVICE) for ids in batch)
    with torch.autocast(DEVICE, torch.bfloat16):
        (model_loss(theirs, source_BS, target_in_BT, target_out_BT, 0.1, in_chunks=False) * factor).backward()
    expected = model_loss(exact, source_BS, target_in_BT, target_out_BT, 0.1, in_chunks=False)
    (expected * factor).backward()
    found, usual = distances(ours, exact), distances(theirs, exact)
    loss_distance = abs(float(loss_sum) / float(expected) - 1)
    is_near = found.mean() < MEAN_NO_WORSE_THAN * usual.mean() and found.max() < LARGEST_NO_WORSE_THAN * usual.max()
    return {
        "check": f"gradients, {name}",
        "mean_distance": float(found.mean()),
        "largest_distance": float(found.max()),
        "mean_of_autograd": float(usual.mean()),
        "largest_of_autograd": float(usual.max()),
        "loss": loss_distance,
        "passed": bool(is_near) and loss_distance < 2e-3,
    }


def check_repeats() -> dict[str, Any]:
    """With dropout: a replayed graph gives the bits of the first pass, also when one of another shape came between;
    another seed gives others; two passes give the sum of each."""
    torch.manual_seed(0)
    config = small().model
    model = Transformer(config).to(DEVICE).train()
    passes = passes_of(model, 121, 6000)
    one, two = (batch_of(config, n, 120, n) for n in (3000, 1000))

    def gradients(*batches: list[Tensor], seed: int = 1) -> list[Tensor]:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        for batch in batches:
            passes.add_gradients([batch], [seed], 1e-3)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, second, again, other, both = (
        gradients(one),
        gradients(two),
        gradients(one),
        gradients(one, seed=2),
        gradients(one, two),
    )
    same, differs = all(map(torch.equal, first, again)), not any(map(torch.equal, first, other))
    off = max(float((c - a - b).norm() / (a + b).norm()) for a, b, c in zip(first, second, both, strict=True))
    return {
        "check": "repeats to the bit",
        "same": same,
        "another_seed_differs": differs,
        "sum_is_off_by": off,
        "passed": same and differs and off < 1e-5,
    }


def check_dropout() -> dict[str, Any]:
    """What compiled kernels drop is what their slow twin says."""
    dropout = Dropout(0.3, torch.tensor([5, -123456789], dtype=torch.int32, device=DEVICE), 1)
    x_ND = torch.ones(1000, 500, device=DEVICE)
    is_same = torch.equal(cuda.drop(x_ND, dropout), dropout.mask(x_ND.shape).float())
    return {"check": "dropout", "share_kept": float((dropout.mask(x_ND.shape) > 0).float().mean()), "passed": is_same}


def synthetic(config: RunConfig, n_tokens: int, n_steps: int = 30) -> dict[str, Any]:
    """Sentences of 32 tokens: a whole step, and the time of its kernels."""
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    model = Transformer(config.model).to(DEVICE).train()
    optimiser = adam(model.parameters(), config.train)
    optimiser.param_groups[0]["lr"] = 1e-4
    passes = passes_of(model, 32, n_tokens)
    batch = list(torch.randint(3, config.model.target_vocab_size, (3, n_tokens // 32, 32)))

    def step() -> None:
        optimiser.zero_grad(set_to_none=False)
        passes.add_gradients([batch], [1], 1 / n_tokens)
        optimiser.step()

    milliseconds = time_of(step, n_steps)
    memory_bytes = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    return {
        "d_model": config.model.d_model,
        "tokens": n_tokens,
        "milliseconds": milliseconds,
        "target_tokens_per_second": n_tokens / milliseconds * 1e3,
        "kernels": [[e.key[:90], round(e.self_device_time_total / 1e3, 3), e.count] for e in kernels[:25]],
        "memory_bytes": memory_bytes,
    }


def time_of(step: Callable[[], None], n: int) -> float:
    for _ in range(3):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / n


def main(
    out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None, tokens: int = 25_600
) -> None:
    configure(DEVICE)
    result: dict[str, Any] = {
        "benchmark": "gpu_passes",
        "covers": sources_of(COVERED, NOT_ON_A_GPU),
        "checks": [],
        "speed": [],
    }

    def keep(where: str, found: dict[str, Any]) -> None:
        print({key: value for key, value in found.items() if key != "kernels"}, flush=True)
        for kernel in found.get("kernels", []):
            print("  ", *kernel, flush=True)
        result[where].append(found)
        if out is not None:  # after each: the device may be gone before the next has ended
            write_result(out, result | passport(base(), DEVICE))

    def attempt(where: str, find: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        try:
            keep(where, find(*arguments))
        except Exception:  # time on a device is dear: the others are still to be seen
            failed = traceback.format_exc()
            print(failed, flush=True)
            keep(where, {"check": f"{find.__name__} {arguments}"[:80], "passed": False, "failed": failed})

    attempt("checks", check_dropout)
    for name, changes in CASES.items():
        attempt("checks", check_gradients, name, changes)
    attempt("checks", check_repeats)
    for config, n_tokens in ((base(), tokens), (big(), tokens), (small(), 8192)):
        attempt("speed", synthetic, config, n_tokens)
    if not all(found.get("passed", True) for found in result["checks"] + result["speed"]):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
