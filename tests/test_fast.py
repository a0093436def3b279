"""Fast code gives the same results as the simple code that it replaces."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.support.primes import prime_config, random_ids, random_model
from transduce.training.passes import loss as fast_loss
from transduce.training.passes.loss import projected_loss
from transduce.training.recipe import loss, model_loss

PAD = 0


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
def test_the_projected_loss_equals_projection_and_loss(
    label_smoothing: float, with_bias: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the value and all gradients in float64. Some targets are padding; the loss is scaled as in training."""
    monkeypatch.setattr(fast_loss, "CHUNK", chunk)
    torch.manual_seed(1)
    target_N = torch.randint(0, 11, (13,))
    target_N[[2, 12]] = PAD
    inputs = [torch.randn(13, 7, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)]
    inputs += [torch.randn(11, dtype=torch.float64)] if with_bias else []
    fast_inputs, slow_inputs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    x_ND, W_VD, bias_V = fast_inputs[0], fast_inputs[1], fast_inputs[2] if with_bias else None
    fast = projected_loss(x_ND, W_VD, bias_V, target_N, label_smoothing, PAD)
    slow, _ = loss(F.linear(*slow_inputs)[None], target_N[None], label_smoothing, PAD)
    torch.testing.assert_close(fast, slow)
    (fast / 7).backward()
    (slow / 7).backward()
    for x, y in zip(fast_inputs, slow_inputs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("output_bias", [False, True])
def test_a_pass_in_chunks_has_the_same_loss_and_gradients(output_bias: bool) -> None:
    config = prime_config(output_bias=output_bias, dropout=0.0)
    source_BS, target_BT = random_ids(config)
    results = []
    for in_chunks in (False, True):
        model = random_model(config, torch.float64).train()
        total = model_loss(model, source_BS, target_BT, target_BT, 0.1, in_chunks=in_chunks)
        total.backward()
        results.append([total.detach(), *(p.grad for p in model.parameters())])
    for slow, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow)


def test_the_projected_loss_in_bfloat16_is_as_accurate_as_projection_and_loss() -> None:
    torch.manual_seed(1)
    x_ND, W_VD, target_N = torch.randn(40, 32), torch.randn(50, 32) / 6, torch.randint(1, 50, (40,))

    def gradients(is_fast: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        x, W = x_ND.clone().requires_grad_(), W_VD.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            if is_fast:
                loss_sum = projected_loss(x, W, None, target_N, 0.1, PAD)
            else:
                loss_sum = loss(F.linear(x, W)[None], target_N[None], 0.1, PAD)[0]
        loss_sum.backward()
        assert x.grad is not None
        assert W.grad is not None
        assert x.grad.dtype == W.grad.dtype == torch.float32
        return [loss_sum.detach(), x.grad, W.grad]

    expected = gradients(False, torch.float32)
    for fast, slow, exact in zip(
        gradients(True, torch.bfloat16), gradients(False, torch.bfloat16), expected, strict=True
    ):
        assert (fast - exact).norm() <= 1.2 * (slow - exact).norm() + 1e-6 * exact.norm()


def test_release_memory_returns_what_keep_memory_kept() -> None:
    """In a new process, because `keep_memory` changes the settings of the whole process."""
    code = """
import torch
from pathlib import Path
from transduce.runtime import keep_memory, release_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
keep_memory()
before = resident()
held = [torch.ones(2_500_000) for _ in range(30)]
last = torch.ones(1000)  # allocated after the others, so that they are not at the end of the heap
del held
kept = resident()
release_memory()
print(kept - before, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    kept, remaining = map(float, done.stdout.split())
    assert kept > 250, "memory was returned before release_memory was called"
    assert remaining < 50
