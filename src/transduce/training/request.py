"""What the user requested: the checks before anything is written, and request.json."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transduce.config import PRESETS, RunConfig, override
from transduce.data import corpora
from transduce.errors import ConfigError, ModelFolderError
from transduce.files import UNFINISHED, write_atomically
from transduce.model_folder.format import load_config, model_folder
from transduce.runtime import check_device
from transduce.training.choices import check_passes

REQUEST = "request.json"
OF_THE_DATA = ("source_vocab_size", "target_vocab_size")
"""Settings that follow from the subwords of the training text."""
OF_THE_LENGTH = ("max_steps", "warmup_steps", "rate_factor", "checkpoint_steps")
"""Settings that follow from the number of steps."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `transduce train` that decide the result, unchanged."""

    data: dict[str, Any] = field(default_factory=dict)
    """Arguments of `corpora.choose`; empty if `prepared` names the data."""
    prepared: str | None = None
    keep_all: bool = False
    vocab_size: int | None = None
    size: str | None = None
    budget: str | None = None
    epochs: float | None = None
    from_model: str | None = None
    settings: list[str] = field(default_factory=list)
    device: str | None = None
    batch_tokens: str | None = None
    deterministic: bool = False
    threads: int | None = None
    passes: str | None = None


def check_request(request: Request) -> None:
    """Refuses what can be refused before anything is written."""
    if request.size is not None and request.size not in PRESETS:
        raise ConfigError(f"--size is {request.size!r}, must be one of {', '.join(PRESETS)}: or leave it out")
    if request.budget is not None:
        parse_budget(request.budget)
    _refuse_several_lengths(request)
    check_device(request.device)
    check_passes(request.passes)
    override(PRESETS[request.size or "small"](), settings_of(request))
    if request.from_model is not None:
        load_config(model_folder(Path(request.from_model)))
    if request.prepared is None:
        corpora.choose(**request.data)


def settings_of(request: Request) -> list[str]:
    """All settings, in order of application: `--set` comes last and so wins over other options."""
    is_number = request.batch_tokens not in (None, "auto")
    return [*([f"data.batch_tokens={request.batch_tokens}"] if is_number else []), *request.settings]


def _refuse_several_lengths(request: Request) -> None:
    has_steps = any(setting.strip().startswith("train.max_steps") for setting in request.settings)
    lengths = {"--budget": request.budget, "--epochs": request.epochs, "train.max_steps": has_steps or None}
    if len(names := [name for name, value in lengths.items() if value is not None]) > 1:
        raise ConfigError(f"{' and '.join(names)} both say how long to train: give one of them")
    if request.epochs is not None and not 0 < request.epochs < math.inf:
        raise ConfigError(f"--epochs is {request.epochs}, must be above 0: raise it")


def settings_from_file(path: Path, *, with_steps: bool = True) -> list[str]:
    """Settings from a JSON or TOML file with sections, such as run.json of another run, in the form of `--set`.
    `with_steps`: False leaves out the number of steps, which something else decides."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a JSON or TOML file with settings") from None
    if isinstance(values, dict) and isinstance(values.get("config"), dict):
        values = values["config"]  # run.json, and config.json of a model folder
    config = RunConfig.from_json(json.dumps(values))  # refuses names and values that are wrong
    names = [(section, name) for section, fields in values.items() for name in fields]
    return settings_of_config(config, [name for name in names if with_steps or name[1] not in OF_THE_LENGTH])


def settings_of_config(config: RunConfig, names: Sequence[tuple[str, str]] | None = None) -> list[str]:
    """Settings in the form of `--set`, of all fields or of those with these names."""
    if names is None:
        names = [(section, name) for section, fields in asdict(config).items() for name in fields]
    return [
        f"{section}.{name}={getattr(getattr(config, section), name)}"
        for section, name in names
        if name not in OF_THE_DATA
    ]


def parse_budget(text: str) -> float:
    """Seconds from a time such as 90s, 20m or 1.5h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--budget is {text!r}, must be a time such as 90s, 20m or 2h: give one")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def claim(folder: Path, request: Request) -> None:
    """Makes a new run folder with request.json. Refuses a folder of another request, or of something else."""
    path, values = folder / REQUEST, json.loads(json.dumps(asdict(request)))
    if path.exists():
        # An older version wrote fewer fields; those that are missing had what is now the default.
        known = json.loads(json.dumps(asdict(Request()))) | read_json(path)
        if differing := [name for name in values if values[name] != known[name]]:
            raise ConfigError(
                f"{folder} holds a run with other arguments ({', '.join(differing)} differ): repeat its command to "
                "resume it, or choose another --out"
            )
    elif folder.exists() and any(not inside.name.endswith(UNFINISHED) for inside in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and is not a training run: choose another --out")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(values, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads request.json or result.json."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelFolderError(f"{path} cannot be read: the run is damaged, start another one") from None
    return values
