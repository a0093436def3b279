"""Restricted self-attention (section 4) equals full attention with hidden positions. Its memory grows with n r."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from transduce.attention import Visible, attend, attend_window


@pytest.mark.parametrize("n", [1, 31, 32, 33, 131, 200])
@pytest.mark.parametrize("window", [1, 2, 7, 64, 66, 101, 1000])
@pytest.mark.parametrize("look_ahead", [True, False])
def test_attention_in_blocks_equals_full_attention_with_the_same_visibility(
    n: int, window: int, look_ahead: bool
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True) for d in (5, 5, 7))
    is_token_BM = torch.ones(2, n, dtype=torch.bool)
    is_token_BM[1, n // 2 :] = False
    position = torch.arange(n)
    in_window_QM = (position[:, None] - position).abs() * 2 <= window
    if not look_ahead:
        in_window_QM = in_window_QM & (position <= position[:, None])
    full, _ = attend(query, key, value, Visible(is_token_BM[:, None] & in_window_QM), 0.0)
    windowed = attend_window(query, key, value, Visible(is_token_BM[:, None], look_ahead, window), 0.0)
    torch.testing.assert_close(windowed, full, atol=1e-12, rtol=0)

    direction = torch.randn_like(full)
    expected = torch.autograd.grad((full * direction).sum(), (query, key, value))
    gradients = torch.autograd.grad((windowed * direction).sum(), (query, key, value))
    torch.testing.assert_close(gradients, expected, atol=1e-12, rtol=0)


MEASURE = """
import torch
from pathlib import Path
from transduce import Transformer, base, with_model

def status(field):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024

model = Transformer(with_model(base(), attention_window={window}, n_encoder_layers=2, n_decoder_layers=1, d_model=128,
                               d_ff=256, n_heads=4, d_k=32, d_v=32, source_vocab_size=97, target_vocab_size=97).model)
with torch.no_grad():
    model.eval().encode(torch.full((1, 500), 5))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    if {decoder}:
        x_BTD, _ = model.decode(torch.full((1, {n}), 5), model.encode(torch.full((1, 50), 5)))
    else:
        x_BTD = model.encode(torch.full((1, {n}), 5)).memory_BSD
    assert x_BTD.shape[1] == {n} and x_BTD.isfinite().all()
print(status("VmHWM") - before)
"""


def peak_mib(n: int, window: int, decoder: bool) -> float:
    """The peak memory of a pass over n tokens, minus the memory before the pass."""
    code = MEASURE.format(window=window, n=n, decoder=decoder)
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_a_pass_over_ten_thousand_tokens_needs_150_mib_and_memory_grows_linearly(decoder: bool) -> None:
    """The weights of full attention alone would need 4 heads x 10,000 x 10,000 x 4 bytes = 1.5 GiB."""
    at_10k, at_40k = (peak_mib(n, 128, decoder) for n in (10_000, 40_000))
    assert 10 < at_10k < 150
    assert at_40k < 6 * at_10k  # memory proportional to n grows by 4, memory proportional to n * n by 16
