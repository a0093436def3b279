"""What the tests show on a CPU, shown on a GPU: the ways of attention, the cache, bf16, memory; and that none waits.

    python -m benchmarks.gpu_checks --out benchmarks/results/gpu_checks.json

Exits with 1 when a check fails. The result names the hash of the sources that it covers.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from experiments.passport import passport, write_result
from transduce import Transformer, base, small, with_model
from transduce.attention import Visible, attend, attend_fused, attend_window
from transduce.training.recipe import adam, loss

DEVICE = "cuda"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Norm of the difference over norm of the expected."""


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def check_attention() -> list[dict[str, Any]]:
    """Each way, forward and backward, against `attend` in float64; hidden rows must be zero to the bit."""
    checks = []
    for dtype, (d_k, d_v), way in itertools.product(BOUNDS, [(64, 64), (32, 64)], ["fused", "causal", "window"]):
        torch.manual_seed(0)
        n = 300
        query, key, value = inputs = [
            torch.randn(3, 8, n, d, device=DEVICE, dtype=dtype, requires_grad=True) for d in (d_k, d_k, d_v)
        ]
        token_B1M = torch.ones(3, 1, n, dtype=torch.bool, device=DEVICE)
        token_B1M[1, :, 200:] = False
        token_B1M[2] = False
        visible = {
            "fused": Visible(token_B1M),
            "causal": Visible(look_ahead=False),
            "window": Visible(token_B1M, window=64),
        }[way]
        head = (attend_window if way == "window" else attend_fused)(query, key, value, visible, 0.0)
        query, key, value = exact = [x.detach().double().requires_grad_() for x in inputs]
        expected, _ = attend(query, key, value, visible, 0.0)
        direction = torch.randn_like(head)
        gradients = torch.autograd.grad((head * direction).sum(), inputs)
        expected_gradients = torch.autograd.grad((expected * direction.double()).sum(), exact)
        distances = [distance(a, b) for a, b in zip((head, *gradients), (expected, *expected_gradients), strict=True)]
        hidden_is_zero = way == "causal" or not any(x[2].any().item() for x in (head, *gradients))
        checks.append(
            {
                "check": "attention",
                "way": way,
                "dtype": str(dtype),
                "d_k": d_k,
                "d_v": d_v,
                "distance": max(distances),
                "bound": BOUNDS[dtype],
                "hidden_is_zero": hidden_is_zero,
                "passed": max(distances) < BOUNDS[dtype] and hidden_is_zero,
            }
        )
    return checks


def check_cache() -> list[dict[str, Any]]:
    """Cached equals uncached, with prefixes, states joined, sources of unequal length and two rows a sentence."""
    checks = []
    for window in (None, 16):
        torch.manual_seed(0)
        model = Transformer(with_model(small(), attention_window=window).model).to(DEVICE).eval()
        source_BS = torch.randint(3, 8000, (5, 40), device=DEVICE)
        source_BS[1:, 20:] = 0
        target_BT = torch.randint(3, 8000, (5, 30), device=DEVICE)
        first, second = model.start(source_BS[:2], target_BT[:2, :10]), model.start(source_BS[2:], target_BT[2:, :4])
        for last_B in target_BT[2:, 4:10].T:  # the second catches up step by step
            _, second = model.step(last_B, second)
        state = first.join(second).select(torch.arange(10, device=DEVICE) // 2)
        logits = []
        for last_B in target_BT[:, 10:].T:
            logits_RV, state = model.step(last_B.repeat_interleave(2), state)
            logits.append(logits_RV[::2])
        with torch.no_grad():
            expected = model(source_BS, target_BT).logits_BTV[:, 10:]
        gap = distance(torch.stack(logits, 1), expected)
        checks.append({"check": "cache", "window": window, "distance": gap, "bound": 1e-5, "passed": gap < 1e-5})
    return checks


def check_bf16() -> list[dict[str, Any]]:
    """base under autocast stays close to float32, in logits and gradients, and so does it compiled."""
    torch.manual_seed(0)
    model = Transformer(with_model(base(), dropout=0.0).model).to(DEVICE)
    source_BS, target_BT = torch.randint(3, 37_000, (2, 16, 50), device=DEVICE)
    source_BS[3:, 30:] = 0

    def gradient_and_logits(run: Any, bf16: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            logits_BTV = run(source_BS, target_BT).logits_BTV
        logits_BTV.float().square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), logits_BTV.detach()

    gradient, logits = gradient_and_logits(model, False)
    checks = []
    for way, run in (("eager", model), ("compiled", torch.compile(model))):
        found_gradient, found = gradient_and_logits(run, True)
        gaps = {"distance": distance(found, logits), "gradient_distance": distance(found_gradient, gradient)}
        passed = found.isfinite().all().item() and gaps["distance"] < 0.02 and gaps["gradient_distance"] < 0.1
        checks.append({"check": "bf16", "way": way, **gaps, "bound": 0.02, "gradient_bound": 0.1, "passed": passed})
    return checks


def check_no_waiting() -> list[dict[str, Any]]:
    """A training step and decoding steps never wait for the device: PyTorch raises where one would."""
    config = small()
    model = Transformer(config.model).to(DEVICE)
    optimiser = adam(model.parameters(), config.train)
    source_BS, target_BT = torch.randint(3, 8000, (2, 16, 40), device=DEVICE)
    rows_R = torch.arange(16, device=DEVICE).repeat_interleave(4)

    def train() -> None:
        logits_BTV = model.train()(source_BS, target_BT).logits_BTV
        loss_sum, n_tokens = loss(logits_BTV, target_BT, config.train.label_smoothing, config.model.pad_id)
        (loss_sum / n_tokens).backward()
        optimiser.step()
        optimiser.zero_grad()

    def decode() -> None:
        state = model.eval().start(source_BS, target_BT[:, :3]).select(rows_R)
        for _ in range(20):  # past one growth of the cache
            _, state = model.step(target_BT[rows_R, 3], state)
            state = state.select(torch.arange(64, device=DEVICE))

    checks = []
    for what, work in (("training step", train), ("decoding steps", decode)):
        work()  # what happens only the first time may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
            passed = True
        except RuntimeError as error:
            print(error)
            passed = False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checks.append({"check": "no waiting", "what": what, "passed": passed})
    return checks


def check_window_memory() -> list[dict[str, Any]]:
    """Peak memory of encoding n tokens: in proportion to n, not n * n."""
    model = Transformer(with_model(small(), attention_window=128).model).to(DEVICE).eval()
    peaks = {}
    for n in (10_000, 40_000, 160_000):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model.encode(torch.full((1, n), 5, device=DEVICE))
        peaks[n] = (torch.cuda.max_memory_allocated() - before) / 2**20
    growth = peaks[160_000] / peaks[10_000]
    return [{"check": "window memory", "peak_mib": peaks, "growth_for_16_times_n": growth, "passed": growth < 20}]


def main(out: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None) -> None:
    checks = check_attention() + check_cache() + check_bf16() + check_no_waiting() + check_window_memory()
    for check in checks:
        print(check, flush=True)
    if out is not None:
        write_result(out, {"benchmark": "gpu_checks", "checks": checks} | passport(small(), DEVICE))
    n_failed = sum(not check["passed"] for check in checks)
    print(f"{len(checks) - n_failed} passed, {n_failed} failed")
    if n_failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
