"""What is written of a model. No file that we load is a pickle.

The model folder holds all a model is:

    config.json          format_version, the RunConfig, languages, the longest lengths it was trained on, and which
                         heads align words
    weights.safetensors  the weights, unpacked, under the paper's names; tied ones once; float32, or float16 to be small
    subwords.model       where it was trained on text
    card.json            its scores: not part of what it is, so that the folder may be read-only

A checkpoint holds all that training goes on from:

    weights.safetensors  as above
    optimiser.safetensors
    state.json
    manifest.json        size and SHA-256 of the others: a checkpoint without it, or that differs, is none
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from transduce.config import RunConfig
from transduce.data.subword import SUBWORDS, Subwords
from transduce.errors import ConfigError, ModelFolderError
from transduce.files import whole_folder
from transduce.model import Transformer

FORMAT_VERSION = 1
CONFIG = "config.json"
RUN, MODEL = "run.json", "model"
"""In a run: what was settled before its first step, and the model folder, once it has ended."""
WEIGHTS, CARD = "weights.safetensors", "card.json"
BUNDLED_MODEL = "tatoeba-de-en"
"""Its name: German to English, in the package, made by experiments/bundled_model.py."""
OPTIMISER, STATE, MANIFEST = "optimiser.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Origin:
    """What a model was trained on, as far as its use depends on it."""

    directions: tuple[tuple[str, str], ...] = ()
    tagged_languages: tuple[str, ...] = ()
    """The target languages, where a source must say which it wants."""
    longest_source: int | None = None
    longest_target: int | None = None
    """In tokens, end marks counted."""


@dataclass(frozen=True)
class AlignmentHeads:
    """Whose attention to the memory says which words belong together."""

    layer: int
    heads: tuple[int, ...]
    shift: int
    """0: as they look when the token is asked for; 1: when it is known, one place later."""


BUNDLED = Path(__file__).parents[1] / "bundled" / BUNDLED_MODEL


def find_model(path: Path) -> Path:
    """That path, or where the model lies that has this name and comes with the package."""
    return BUNDLED if str(path) == BUNDLED_MODEL and not path.is_dir() else path


def model_folder(path: Path) -> Path:
    """Of a model folder, a run, or the model that comes with the package, by its name."""
    path = find_model(path)
    if (path / MODEL / CONFIG).exists():
        return path / MODEL
    if (path / RUN).exists():
        raise ModelFolderError(f"{path} is a run that has not ended, so there is no model yet: go on with it")
    return path


def save_model(
    folder: str | Path,
    model: Transformer,
    config: RunConfig,
    subwords: Subwords | None = None,
    origin: Origin | None = None,
    alignment: AlignmentHeads | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Whole or not at all. Overwrites nothing. Weights are read as float32, whatever they are kept in."""
    assert model.config == config.model, "the folder would describe another model"
    folder = Path(folder)
    if folder.exists():
        raise ModelFolderError(f"{folder} exists: choose another name or remove it first")
    with whole_folder(folder) as unfinished:
        description = {"format_version": FORMAT_VERSION, "config": json.loads(config.to_json())}
        if origin is not None:
            description["origin"] = asdict(origin)
        if alignment is not None:
            description["alignment"] = asdict(alignment)
        (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        weights = {name: W.to(dtype) for name, W in model.weights().items()}
        save_file(_contiguous(weights), unfinished / WEIGHTS)
        (unfinished / WEIGHTS).chmod((unfinished / CONFIG).stat().st_mode)  # not for the owner alone, as that makes it
        if subwords is not None:
            subwords.save(unfinished / SUBWORDS)


def load_config(folder: str | Path) -> RunConfig:
    path = Path(folder) / CONFIG
    try:
        return RunConfig.from_json(json.dumps(_describes(path)["config"]))
    except ConfigError as error:
        raise ModelFolderError(f"{path}: {error}") from None


def load_origin(folder: str | Path) -> tuple[Origin, AlignmentHeads | None]:
    """As far as the folder tells."""
    path = Path(folder) / CONFIG
    description, model = _describes(path), load_config(folder).model
    try:
        known = description.get("origin", {})
        lengths = [known.get(name) for name in ("longest_source", "longest_target")]
        origin = Origin(
            directions=tuple((str(source), str(target)) for source, target in known.get("directions", ())),
            tagged_languages=tuple(map(str, known.get("tagged_languages", ()))),
            longest_source=None if lengths[0] is None else int(lengths[0]),
            longest_target=None if lengths[1] is None else int(lengths[1]),
        )
        if (given := description.get("alignment")) is None:
            return origin, None
        heads = AlignmentHeads(int(given["layer"]), tuple(map(int, given["heads"])), int(given["shift"]))
        if not (0 <= heads.layer < model.n_decoder_layers and heads.shift in (0, 1) and heads.heads):
            raise ValueError
        if not all(0 <= head < model.n_heads for head in heads.heads):
            raise ValueError
        return origin, heads
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelFolderError(
            f"{path} does not rightly say where the model comes from: copy the folder again"
        ) from None


def _describes(path: Path) -> dict[str, Any]:
    try:
        description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version, _ = description["format_version"], description["config"]
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read ({error.strerror}): give a model folder") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ModelFolderError(f"{path} does not describe a model: give a folder that save_model wrote") from None
    if version != FORMAT_VERSION:
        raise ModelFolderError(f"{path} has format_version {version!r}, this program reads {FORMAT_VERSION}: update it")
    return description


def load_model(folder: str | Path, device: str | torch.device = "cpu") -> tuple[Transformer, RunConfig]:
    """The model, in float32 and in evaluation mode, and its configuration."""
    config = load_config(folder)
    path = Path(folder) / WEIGHTS
    try:
        weights = load_file(path)
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read ({error.strerror or error}): the folder is not whole") from None
    except SafetensorError as error:
        raise ModelFolderError(f"{path} is damaged ({error}): copy the folder again") from None
    model = Transformer(config.model)
    model.load_weights(weights)
    return model.to(device).eval(), config


def save_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], optimiser: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Whole or not at all; what stands there under the same name was not whole, or it would have been gone on from."""
    if folder.exists():
        shutil.rmtree(folder)
    with whole_folder(folder) as unfinished:
        save_file(_contiguous(weights), unfinished / WEIGHTS)
        if optimiser:
            save_file(_contiguous(optimiser), unfinished / OPTIMISER)
        (unfinished / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        manifest = {path.name: _describe(path) for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser and state, as they were saved. Refuses one that is not whole."""
    if (fault := fault_of(folder)) is not None:
        raise ModelFolderError(f"{folder} is damaged ({fault}): remove it to go on from the one before")
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    optimiser = load_file(folder / OPTIMISER) if (folder / OPTIMISER).exists() else {}
    return load_file(folder / WEIGHTS), optimiser, state


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, description in manifest.items():
            if _describe(folder / name) != description:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except (ValueError, AttributeError, RecursionError):
        return f"{MANIFEST} cannot be read"
    return None if {WEIGHTS, STATE} <= manifest.keys() else f"{MANIFEST} lacks something"


def checkpoints(parent: Path) -> list[Path]:
    """By step, the newest first, whole or not."""
    found = [path for path in parent.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def average(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of their weights, summed in float64 so that the order does not matter to the last digit of float32."""
    mean: dict[str, Tensor] = {}
    for folder in folders:
        for name, W in load_checkpoint(folder)[0].items():
            mean[name] = mean.get(name, torch.zeros((), dtype=torch.float64)) + W.double() / len(folders)
    return {name: W.float() for name, W in mean.items()}


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: W.detach().cpu().contiguous() for name, W in tensors.items()}


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
