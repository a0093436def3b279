"""The whole configuration from the size of the corpus and the machine, for settings that the user did not give.

    examples      size on a GPU   on a CPU   batch tokens   epochs   dropout, peak learning rate
    to 10,000     small           small       2,048         50       0.3, 1e-3; 0.1, 1e-3 in 25 epochs or fewer
    to 200,000    small           small       8,192         50       0.3, 1e-3; 0.1, 2e-3 in 25 epochs or fewer
    more          base            small      25,000         10       0.1, the paper's

The first two rows are the best of experiments/results/dial_*.json. The form of the recipe stays the paper's.
`--size base` and `--size big` take all numbers from the paper instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from transduce.config import PRESETS, RunConfig, with_model
from transduce.training.recipe import scheduled_rate


class Row(NamedTuple):
    max_examples: float
    on_gpu: str
    on_cpu: str
    batch_tokens: int
    n_epochs: int
    peak_rate: float | None
    """None: the paper's."""
    short_peak_rate: float | None


TABLE = [
    Row(10_000, "small", "small", 2048, 50, 1e-3, 1e-3),
    Row(200_000, "small", "small", 8192, 50, 1e-3, 2e-3),
    Row(float("inf"), "base", "small", 25_000, 10, None, None),
]
SHORT = 25
"""Epochs. In so few, a model does not memorise its corpus, and more dropout only slows it down."""
PATIENCE = 10
TARGET_STEPS, MIN_BATCH_TOKENS = 1500, 1024
"""If time is short, many small steps are better than few large ones."""
TUNE_EPOCHS, TUNE_WARMUP_DIVISOR = 10, 20
"""For a model that is trained further. Patience ends it sooner, and the parent is one of the candidates."""
MIN_TUNE_RATE = 0.1
"""The lowest peak for tuning, as a share of the parent's peak: the parent's rate may have fallen to zero."""
SHAPES_ON_GPU = 16
"""For small corpora: the time of a pass on a GPU is mostly that of launching kernels, and padding costs nothing."""


def dial(
    n_examples: int, n_tokens: int, is_on_gpu: bool, size: str | None, max_tokens: float | None
) -> tuple[RunConfig, str]:
    """The configuration and the name of its size. `max_tokens`: tokens that fit into a limited time, else None."""
    if size in ("base", "big"):
        return PRESETS[size](), size
    row = next(row for row in TABLE if n_examples <= row.max_examples)
    size = size or (row.on_gpu if is_on_gpu else row.on_cpu)
    n_epochs = row.n_epochs if max_tokens is None else min(row.n_epochs, max_tokens / n_tokens)
    config, peak_rate, batch_tokens = PRESETS[size](), row.peak_rate, row.batch_tokens
    if row.peak_rate is not None:
        config = with_model(config, dropout=0.1 if n_epochs <= SHORT else 0.3)
        peak_rate = row.short_peak_rate if n_epochs <= SHORT else row.peak_rate
        if is_on_gpu:
            config = replace(config, data=replace(config.data, n_shapes=SHAPES_ON_GPU))
    if max_tokens is not None:
        batch_tokens = min(batch_tokens, max(MIN_BATCH_TOKENS, int(max_tokens / TARGET_STEPS)))
    config = replace(
        config,
        data=replace(config.data, batch_tokens=batch_tokens),
        train=replace(config.train, patience=PATIENCE, clip_norm=1.0),
    )
    if peak_rate is not None:
        config = with_peak_rate(config, peak_rate)
    return with_steps(config, max(1, int(n_epochs * n_tokens / batch_tokens))), size


def tuned(config: RunConfig, parent: RunConfig, n_tokens: int, max_tokens: float | None) -> RunConfig:
    """The configuration for training the parent further: few epochs, and a learning rate that begins where the parent's
    training ended and falls to zero. A rate as high as in the parent's training would undo much of it."""
    n_epochs = TUNE_EPOCHS if max_tokens is None else min(TUNE_EPOCHS, max_tokens / n_tokens)
    max_steps = max(1, int(n_epochs * n_tokens / config.data.batch_tokens))
    peak_step = min(parent.train.warmup_steps, parent.train.max_steps)
    peak_rate, last_rate = (
        scheduled_rate(step, parent.model.d_model, parent.train) for step in (peak_step, parent.train.max_steps)
    )
    train = replace(
        config.train, schedule="linear", max_steps=max_steps, warmup_steps=max(1, max_steps // TUNE_WARMUP_DIVISOR)
    )
    return with_peak_rate(replace(config, model=parent.model, train=train), max(last_rate, MIN_TUNE_RATE * peak_rate))


def with_steps(config: RunConfig, max_steps: int, max_warmup: int | None = None) -> RunConfig:
    """Changes the number of steps. The peak learning rate stays; the warm-up is at most a fifth of the steps, and at
    most `max_warmup`, or as long as now."""
    return with_warmup(
        replace(config, train=replace(config.train, max_steps=max_steps)),
        max(1, min(max_warmup or config.train.warmup_steps, max_steps // 5)),
    )


def with_warmup(config: RunConfig, warmup_steps: int) -> RunConfig:
    """Changes the length of the warm-up, but not the peak learning rate."""
    peak_rate = config.train.rate_factor * (config.model.d_model * config.train.warmup_steps) ** -0.5
    return with_peak_rate(replace(config, train=replace(config.train, warmup_steps=warmup_steps)), peak_rate)


def with_peak_rate(config: RunConfig, peak_rate: float) -> RunConfig:
    """Equation 3 is highest at the end of the warm-up."""
    factor = peak_rate * (config.model.d_model * config.train.warmup_steps) ** 0.5
    return replace(config, train=replace(config.train, rate_factor=factor))
