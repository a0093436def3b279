"""Checks of the model on a GPU. The tests make the same checks on a CPU: attention, the cache, bfloat16 and memory.

One more check is that steps never wait for the device.

    python -m benchmarks.gpu_checks --out benchmarks/results/gpu_checks.json

It exits with code 1 if a check fails. The result contains the hash of the sources that it covers.
"""

# Axes: B sentences, R rows of hypotheses, S source positions, T target positions, V vocabulary, M attended positions.

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
"""The largest allowed `distance`."""


def distance(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, divided by the norm of the expected value."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def check_attention() -> list[dict[str, Any]]:
    """Compare each version of attention with `attend` in float64, forward and backward. The third sentence is padding
    alone, so its queries see no position: their results and gradients must be exactly zero."""
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
        query, key, value = exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        expected, _ = attend(query, key, value, visible, 0.0)
        direction = torch.randn_like(head)
        gradients = torch.autograd.grad((head * direction).sum(), inputs)
        expected_gradients = torch.autograd.grad((expected * direction.double()).sum(), exact_inputs)
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
    """Steps with the cache give the logits of the whole model: with prefixes, joined states, sources of different
    lengths and two rows per sentence."""
    checks = []
    for window in (None, 16):
        torch.manual_seed(0)
        model = Transformer(with_model(small(), attention_window=window).model).to(DEVICE).eval()
        source_BS = torch.randint(3, 8000, (5, 40), device=DEVICE)
        source_BS[1:, 20:] = 0
        target_BT = torch.randint(3, 8000, (5, 30), device=DEVICE)
        first, second = model.start(source_BS[:2], target_BT[:2, :10]), model.start(source_BS[2:], target_BT[2:, :4])
        for last_B in target_BT[2:, 4:10].T:  # until the second state has as many tokens as the first
            _, second = model.step(last_B, second)
        state = first.join(second).select(torch.arange(10, device=DEVICE) // 2)
        logits_of_steps = []
        for last_B in target_BT[:, 10:].T:
            logits_RV, state = model.step(last_B.repeat_interleave(2), state)
            logits_of_steps.append(logits_RV[::2])
        with torch.no_grad():
            expected_BTV = model(source_BS, target_BT).logits_BTV[:, 10:]
        difference = distance(torch.stack(logits_of_steps, 1), expected_BTV)
        passed = difference < 1e-5
        checks.append({"check": "cache", "window": window, "distance": difference, "bound": 1e-5, "passed": passed})
    return checks


def check_bf16() -> list[dict[str, Any]]:
    """Logits and gradients of base under autocast are close to those in float32, eager and compiled."""
    torch.manual_seed(0)
    model = Transformer(with_model(base(), dropout=0.0).model).to(DEVICE)
    source_BS, target_BT = torch.randint(3, 37_000, (2, 16, 50), device=DEVICE)
    source_BS[3:, 30:] = 0

    def gradient_and_logits(forward: Any, bf16: bool) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            logits_BTV = forward(source_BS, target_BT).logits_BTV
        logits_BTV.float().square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), logits_BTV.detach()

    expected_gradient, expected_BTV = gradient_and_logits(model, False)
    checks = []
    for way, forward in (("eager", model), ("compiled", torch.compile(model))):
        gradient, logits_BTV = gradient_and_logits(forward, True)
        distances = {
            "distance": distance(logits_BTV, expected_BTV),
            "gradient_distance": distance(gradient, expected_gradient),
        }
        is_close = distances["distance"] < 0.02 and distances["gradient_distance"] < 0.1
        passed = logits_BTV.isfinite().all().item() and is_close
        bounds = {"bound": 0.02, "gradient_bound": 0.1}
        checks.append({"check": "bf16", "way": way, **distances, **bounds, "passed": passed})
    return checks


def check_no_waiting() -> list[dict[str, Any]]:
    """A training step and decoding steps never wait for the device: PyTorch raises an error if they do."""
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
        for _ in range(20):  # enough steps for the cache to grow once
            _, state = model.step(target_BT[rows_R, 3], state)
            state = state.select(torch.arange(64, device=DEVICE))

    checks = []
    for name, run in (("training step", train), ("decoding steps", decode)):
        run()  # initialisations in the first run may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
            passed = True
        except RuntimeError as error:
            print(error)
            passed = False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checks.append({"check": "no waiting", "what": name, "passed": passed})
    return checks


def check_window_memory() -> list[dict[str, Any]]:
    """With a window, the peak memory of encoding n tokens grows with n, not with n * n."""
    model = Transformer(with_model(small(), attention_window=128).model).to(DEVICE).eval()
    peaks = {}
    for n in (10_000, 40_000, 160_000):
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        with torch.no_grad():
            model.encode(torch.full((1, n), 5, device=DEVICE))
        peaks[n] = (torch.cuda.max_memory_allocated() - allocated_before) / 2**20
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
