"""How to translate: the options that say so, and a translator made of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transduce.config import override
from transduce.errors import ConfigError

if TYPE_CHECKING:
    from transduce.translation.translator import Translator

BatchSize = Annotated[int | None, typer.Option(min=1, help="Sentences side by side, at most. Changes speed, not text.")]
Precision = Annotated[
    str, typer.Option("--dtype", metavar="float32|bfloat16|int8", help="Of the model's numbers; int8 is for CPUs.")
]
Prefix = Annotated[str, typer.Option(help="How every translation must begin.")]
Sample = Annotated[bool, typer.Option("--sample", help="Draw translations instead of searching the best.")]
Temperature = Annotated[float | None, typer.Option(help="Of sampling.")]
TopK = Annotated[int | None, typer.Option(help="Of sampling: from so many tokens.")]
TopP = Annotated[float | None, typer.Option(help="Of sampling: from the fewest tokens of this probability.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling.")]


def bundled_model(quiet: bool) -> Path:
    from transduce.model_folder.format import BUNDLED, BUNDLED_MODEL

    if not quiet:
        print(f"by {BUNDLED_MODEL}, which comes along and knows short German sentences", file=sys.stderr)
    return BUNDLED


def decoding_flags(beam: int | None, sample: bool, **of_sampling: Any) -> dict[str, Any]:
    refuse_together({"--beam": beam, "--sample": sample or None})
    for name, value in of_sampling.items():
        if value is not None and not sample:
            raise ConfigError(f"--{name.replace('_', '-')} means something to sampling alone: add --sample")
    return {"beam_size": beam, "method": "sample" if sample else None, **of_sampling}


def refuse_together(given: dict[str, Any]) -> None:
    if len(both := [name for name, value in given.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(both)} exclude each other: keep one")


def load_translator(
    model: Path,
    flags: dict[str, Any],
    settings: list[str],
    device: str | None,
    precision: str,
    threads: int | None,
    batch_size: int | None = None,
) -> Translator:
    """With the model's own way of decoding, changed by flags and then by `--set`."""
    import torch

    from transduce.model_folder.format import load_config, model_folder
    from transduce.runtime import check_device, configure, default_device
    from transduce.translation.translator import Translator

    for setting in settings:
        if not setting.strip().startswith("decode."):
            raise ConfigError(f"--set {setting} means nothing to a trained model, only the section decode does")
    if precision not in ("float32", "bfloat16", "int8"):
        raise ConfigError(f"--dtype is {precision!r}, must be float32, bfloat16 or int8: leave it out for float32")
    check_device(device)
    configure(device or default_device(), threads)
    config = load_config(model_folder(model))
    if (n_best := flags.get("n_best")) is not None and flags.get("beam_size") is None and not flags.get("method"):
        flags = flags | {"beam_size": max(n_best, config.decode.beam_size)}
    given = [f"decode.{name}={value}" for name, value in flags.items() if value is not None]
    config = override(config, [*given, *settings])
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    translator = Translator.load(
        model,
        device=device,
        dtype=dtype,
        settings=config.decode,
        batch_size=batch_size,
        precision="int8" if precision == "int8" else "float32",
    )
    if translator.engine.is_fallback:
        print(f"slower engine: {translator.engine}", file=sys.stderr)
    return translator
