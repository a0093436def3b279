"""The written training passes on a GPU: they are correct, they repeat to the bit, and their time by kernel.

    python -m benchmarks.gpu_passes --out benchmarks/results/gpu_passes_h200.json

The tests run the kernels by Triton's interpreter; here they are compiled and compute in bf16. The distance of their
gradients from float64 is compared with that of autograd under autocast. Exits with 1 if a check fails. The result names
the hash of the sources that it covers.
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
"""Matches the covered files, but no GPU runs it."""
MEAN_NO_WORSE_THAN, LARGEST_NO_WORSE_THAN = 2.0, 3.0
"""Limits for the distance from float64, divided by that of autograd under autocast. Autocast keeps the residual sums in
float32; the written passes keep them in bf16."""
CASES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "learned positions": {"positions": "learned"},
    "window": {"attention_window": 16},
    "not tied": {"tied_embeddings": "none", "target_vocab_size": 6000},
    "narrow heads": {"d_k": 16, "d_v": 32},
    "width no power of two": {"d_model": 192, "d_ff": 500},
}


def batch_of(config: ModelConfig, n_tokens: int, longest: int, seed: int = 0) -> list[Tensor]:
    """Sentences of all lengths, with at least this number of tokens on the longer side."""
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


def distances(ours: Transformer, expected: Transformer) -> Tensor:
    """For each parameter, the norm of the difference of its gradients, divided by the norm of the expected one."""
    pairs = zip(ours.parameters(), expected.parameters(), strict=True)
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
    our_distances, autograd_distances = distances(ours, exact), distances(theirs, exact)
    loss_distance = abs(float(loss_sum) / float(expected) - 1)
    mean_is_near = our_distances.mean() < MEAN_NO_WORSE_THAN * autograd_distances.mean()
    largest_is_near = our_distances.max() < LARGEST_NO_WORSE_THAN * autograd_distances.max()
    return {
        "check": f"gradients, {name}",
        "mean_distance": float(our_distances.mean()),
        "largest_distance": float(our_distances.max()),
        "mean_of_autograd": float(autograd_distances.mean()),
        "largest_of_autograd": float(autograd_distances.max()),
        "loss": loss_distance,
        "passed": bool(mean_is_near and largest_is_near) and loss_distance < 2e-3,
    }


def check_repeats() -> dict[str, Any]:
    """With dropout. A replayed graph gives the same bits, also after a pass of another shape. Another seed gives other
    bits. Two passes give the sum of their gradients."""
    torch.manual_seed(0)
    config = small().model
    model = Transformer(config).to(DEVICE).train()
    passes = passes_of(model, 121, 6000)
    large, small_batch = (batch_of(config, n, 120, n) for n in (3000, 1000))

    def gradients(*batches: list[Tensor], seed: int = 1) -> list[Tensor]:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        for batch in batches:
            passes.add_gradients([batch], [seed], 1e-3)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    first, second, again, other, both = (
        gradients(large),
        gradients(small_batch),
        gradients(large),
        gradients(large, seed=2),
        gradients(large, small_batch),
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
    """Compiled kernels drop the same values as their slow twin."""
    dropout = Dropout(0.3, torch.tensor([5, -123456789], dtype=torch.int32, device=DEVICE), 1)
    x_ND = torch.ones(1000, 500, device=DEVICE)
    is_same = torch.equal(cuda.drop(x_ND, dropout), dropout.mask(x_ND.shape).float())
    return {"check": "dropout", "share_kept": float((dropout.mask(x_ND.shape) > 0).float().mean()), "passed": is_same}


def synthetic(config: RunConfig, n_tokens: int, n_steps: int = 30) -> dict[str, Any]:
    """The time of a step with sentences of 32 tokens, and of its kernels."""
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
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
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

    def keep(section: str, values: dict[str, Any]) -> None:
        print({key: value for key, value in values.items() if key != "kernels"}, flush=True)
        for kernel in values.get("kernels", []):
            print("  ", *kernel, flush=True)
        result[section].append(values)
        if out is not None:  # after each one, because a lent device may be taken away at any time
            write_result(out, result | passport(base(), DEVICE))

    def attempt(section: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        try:
            keep(section, measure(*arguments))
        except Exception:  # one failure must not waste the device time of the other checks
            failed = traceback.format_exc()
            print(failed, flush=True)
            keep(section, {"check": f"{measure.__name__} {arguments}"[:80], "passed": False, "failed": failed})

    attempt("checks", check_dropout)
    for name, changes in CASES.items():
        attempt("checks", check_gradients, name, changes)
    attempt("checks", check_repeats)
    for config, n_tokens in ((base(), tokens), (big(), tokens), (small(), 8192)):
        attempt("speed", synthetic, config, n_tokens)
    if not all(values.get("passed", True) for values in result["checks"] + result["speed"]):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
