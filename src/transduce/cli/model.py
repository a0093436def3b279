"""From command-line options to a translator."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transduce.config import override
from transduce.errors import ConfigError

if TYPE_CHECKING:
    from transduce.translation.translator import Translator


def bundled_model(quiet: bool) -> Path:
    from transduce.model_folder.format import BUNDLED, BUNDLED_MODEL

    if not quiet:
        print(f"using the bundled model {BUNDLED_MODEL}: German to English, for short sentences", file=sys.stderr)
    return BUNDLED


def decoding_flags(beam: int | None, sample: bool, **sampling: Any) -> dict[str, Any]:
    """Keywords of `search_settings`. None means that the flag was left out."""
    return {"beam": beam, "sample": sample or None, **sampling}


def flag_of(keyword: str) -> str:
    """The flag for a keyword of `Translator.translate`, which may have a value: to='en'."""
    name = keyword.partition("=")[0]
    return "--nbest" if name == "n_best" else f"--{name.replace('_', '-')}"


def load_translator(
    model: Path,
    flags: dict[str, Any],
    settings: list[str],
    device: str | None,
    precision: str,
    threads: int | None,
    batch_size: int | None = None,
    *,
    verbose: bool = False,
    reports_engine: bool = True,
) -> Translator:
    """Decoding settings are the model's own, changed by flags, which are keywords of `search_settings`, and then by
    `--set`.

    A slower engine than this device could have is reported on stderr; with `verbose`, any engine is. `reports_engine`:
    False if the caller reports it.
    """
    import torch

    from transduce.model_folder.format import BEST_SO_FAR, load_config, model_folder
    from transduce.runtime import check_device, configure, default_device
    from transduce.translation.keywords import search_settings
    from transduce.translation.translator import Translator

    for setting in settings:
        if not setting.strip().startswith("decode."):
            raise ConfigError(f"--set {setting} does not apply to a trained model: only decode.* settings do")
    if precision not in ("float32", "bfloat16", "int8"):
        raise ConfigError(f"--dtype is {precision!r}, must be float32, bfloat16 or int8: leave it out for float32")
    check_device(device)
    configure(device or default_device(), threads)
    folder = model_folder(model)
    config = load_config(folder)
    config = override(replace(config, decode=search_settings(config.decode, flags, flag_of)), settings)
    translator = Translator.load(
        model,
        device=device,
        dtype=torch.bfloat16 if precision == "bfloat16" else torch.float32,
        settings=config.decode,
        batch_size=batch_size,
        precision="int8" if precision == "int8" else "float32",
    )
    translator.spelling = flag_of
    if folder.name == BEST_SO_FAR:
        print(f"{model} has not ended: this is its best checkpoint so far", file=sys.stderr)
    if reports_engine and (translator.engine.is_fallback or verbose):
        kind = "slower engine" if translator.engine.is_fallback else "engine"
        print(f"{kind}: {translator.engine}", file=sys.stderr)
    return translator


def load_to_inspect(
    model: Path | None, settings: list[str], device: str | None, threads: int | None, quiet: bool, **flags: Any
) -> Translator:
    """The named model or the bundled one, in float32."""
    path = bundled_model(quiet) if model is None else model
    return load_translator(path, flags, settings, device, "float32", threads)
