"""The formats of model folders and checkpoints. No file that this package loads is a pickle.

A model folder is the complete model:

    config.json          format_version, the RunConfig, languages, the longest lengths in training, and the heads that
                         align words
    weights.safetensors  the weights under the paper's names, not packed together, tied ones once; in float32, or in
                         float16 to save space
    subwords.model       if the model was trained on text
    card.json            its scores: separate from the model, so that the rest of the folder may be read-only

A checkpoint is the complete state of training:

    weights.safetensors  as above
    optimiser.safetensors
    state.json
    manifest.json        size and SHA-256 of the other files: a checkpoint without it, or that differs from it, is not
                         used
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
from transduce.files import atomic_folder
from transduce.model import Transformer

FORMAT_VERSION = 1
CONFIG = "config.json"
RUN, MODEL, BEST_SO_FAR = "run.json", "model", "best-so-far"
"""In a run: the settings fixed before its first step; the model folder, which exists once the run has ended; and, until
then, a model folder with the weights of the best validation."""
WEIGHTS, CARD = "weights.safetensors", "card.json"
BUNDLED_MODEL = "tatoeba-de-en"
"""Name of the bundled model: German to English, made by experiments/bundled_model.py."""
OPTIMISER, STATE, MANIFEST = "optimiser.safetensors", "state.json", "manifest.json"


@dataclass(frozen=True)
class Origin:
    """Facts about the training data that matter when the model is used."""

    directions: tuple[tuple[str, str], ...] = ()
    tagged_languages: tuple[str, ...] = ()
    """The target languages if sources start with a language tag, otherwise empty."""
    longest_source: int | None = None
    longest_target: int | None = None
    """In tokens; end marks count."""


@dataclass(frozen=True)
class AlignmentHeads:
    """The decoder heads whose attention to the memory aligns target words with source words."""

    layer: int
    heads: tuple[int, ...]
    shift: int
    """0: the attention at the position that predicts the token; 1: at the next position, whose input is the token."""


BUNDLED = Path(__file__).parents[1] / "bundled" / BUNDLED_MODEL


def find_model(path: Path) -> Path:
    """The path itself, or the folder of the bundled model if `path` is its name."""
    return BUNDLED if str(path) == BUNDLED_MODEL and not path.is_dir() else path


def model_folder(path: Path) -> Path:
    """The model folder at `path`, which may also be a run or the name of the bundled model."""
    path = find_model(path)
    if (path / MODEL / CONFIG).exists():
        return path / MODEL
    if (path / BEST_SO_FAR / CONFIG).exists():
        return path / BEST_SO_FAR
    if (path / RUN).exists():
        raise ModelFolderError(f"{path} is a training run before its first validation, so it has no model yet: wait")
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
    """Write a model folder atomically. An existing folder is refused.

    `dtype` is that of the weights file. Loading gives float32 weights for every `dtype`.

    >>> import os
    >>> import tempfile
    >>> from transduce import Transformer, save_model, tiny
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> config = tiny()
    >>> save_model(folder, Transformer(config.model), config)
    >>> sorted(os.listdir(folder))
    ['config.json', 'weights.safetensors']
    """
    assert model.config == config.model, "config must describe the model"
    folder = Path(folder)
    if folder.exists():
        raise ModelFolderError(f"{folder} exists: choose another name or remove it first")
    with atomic_folder(folder) as unfinished:
        description = {"format_version": FORMAT_VERSION, "config": json.loads(config.to_json())}
        if origin is not None:
            description["origin"] = asdict(origin)
        if alignment is not None:
            description["alignment"] = asdict(alignment)
        (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        weights = {name: W.to(dtype) for name, W in model.weights().items()}
        save_file(_contiguous(weights), unfinished / WEIGHTS)
        (unfinished / WEIGHTS).chmod((unfinished / CONFIG).stat().st_mode)  # save_file lets only the owner read
        if subwords is not None:
            subwords.save(unfinished / SUBWORDS)


def load_config(folder: str | Path) -> RunConfig:
    path = Path(folder) / CONFIG
    try:
        return RunConfig.from_json(json.dumps(_read_description(path)["config"]))
    except ConfigError as error:
        raise ModelFolderError(f"{path}: {error}") from None


def load_origin(folder: str | Path) -> tuple[Origin, AlignmentHeads | None]:
    """The origin and the alignment heads. Facts that the folder lacks keep their defaults."""
    path = Path(folder) / CONFIG
    description, model = _read_description(path), load_config(folder).model
    try:
        values = description.get("origin", {})
        lengths = [values.get(name) for name in ("longest_source", "longest_target")]
        origin = Origin(
            directions=tuple((str(source), str(target)) for source, target in values.get("directions", ())),
            tagged_languages=tuple(map(str, values.get("tagged_languages", ()))),
            longest_source=None if lengths[0] is None else int(lengths[0]),
            longest_target=None if lengths[1] is None else int(lengths[1]),
        )
        if (alignment := description.get("alignment")) is None:
            return origin, None
        heads = AlignmentHeads(int(alignment["layer"]), tuple(map(int, alignment["heads"])), int(alignment["shift"]))
        if not (0 <= heads.layer < model.n_decoder_layers and heads.shift in (0, 1) and heads.heads):
            raise ValueError
        if not all(0 <= head < model.n_heads for head in heads.heads):
            raise ValueError
        return origin, heads
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelFolderError(f"{path} has an invalid origin or alignment: copy the folder again") from None


def _read_description(path: Path) -> dict[str, Any]:
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
    """Load the model, in float32 and in evaluation mode, and its configuration.

    >>> import tempfile
    >>> from transduce import Transformer, load_model, save_model, tiny
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> save_model(folder, Transformer(tiny().model), tiny())
    >>> model, config = load_model(folder)
    >>> model.training, config == tiny()
    (False, True)
    """
    config = load_config(folder)
    path = Path(folder) / WEIGHTS
    try:
        weights = load_file(path)
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read ({error.strerror or error}): the folder is incomplete") from None
    except SafetensorError as error:
        raise ModelFolderError(f"{path} is damaged ({error}): copy the folder again") from None
    model = Transformer(config.model)
    model.load_weights(weights)
    return model.to(device).eval(), config


def save_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], optimiser: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Write a checkpoint atomically."""
    if folder.exists():  # a damaged checkpoint: otherwise training would have resumed from it
        shutil.rmtree(folder)
    with atomic_folder(folder) as unfinished:
        save_file(_contiguous(weights), unfinished / WEIGHTS)
        if optimiser:
            save_file(_contiguous(optimiser), unfinished / OPTIMISER)
        (unfinished / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        manifest = {path.name: _size_and_hash(path) for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Load weights, optimiser and state. A damaged checkpoint is refused."""
    if (fault := fault_of(folder)) is not None:
        raise ModelFolderError(f"{folder} is damaged ({fault}): remove it to resume from the previous one")
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    optimiser = load_file(folder / OPTIMISER) if (folder / OPTIMISER).exists() else {}
    return load_file(folder / WEIGHTS), optimiser, state


def fault_of(folder: Path) -> str | None:
    """The reason why a checkpoint is damaged, or None if it is intact."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, expected in manifest.items():
            if _size_and_hash(folder / name) != expected:
                return f"{name} has changed"
    except OSError as error:
        return f"{Path(error.filename).name} cannot be read"
    except (ValueError, AttributeError, RecursionError):
        return f"{MANIFEST} cannot be read"
    return None if {WEIGHTS, STATE} <= manifest.keys() else f"{MANIFEST} lacks a file"


def checkpoints(parent: Path) -> list[Path]:
    """All checkpoints of a run, also damaged ones, the newest first."""
    folders = [path for path in parent.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def average(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the checkpoints' weights. Sums are in float64, so that their order does not change the result."""
    mean: dict[str, Tensor] = {}
    for folder in folders:
        for name, W in load_checkpoint(folder)[0].items():
            mean[name] = mean.get(name, torch.zeros((), dtype=torch.float64)) + W.double() / len(folders)
    return {name: W.float() for name, W in mean.items()}


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: W.detach().cpu().contiguous() for name, W in tensors.items()}


def _size_and_hash(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
