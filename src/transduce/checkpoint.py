"""The model folder: one folder that holds all a model is. Nothing in it is a pickle.

config.json          format_version and the RunConfig
weights.safetensors  the weights, unpacked, under the paper's names; tied ones once
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from transduce.config import RunConfig
from transduce.errors import ConfigError, ModelFolderError
from transduce.folders import whole_folder
from transduce.model import Transformer

FORMAT_VERSION = 1
CONFIG = "config.json"
WEIGHTS = "weights.safetensors"


def save_model(folder: str | Path, model: Transformer, config: RunConfig) -> None:
    """Whole or not at all. Overwrites nothing."""
    assert model.config == config.model, "the folder would describe another model"
    folder = Path(folder)
    if folder.exists():
        raise ModelFolderError(f"{folder} exists: choose another name or remove it first")
    with whole_folder(folder) as unfinished:
        description = {"format_version": FORMAT_VERSION, "config": json.loads(config.to_json())}
        (unfinished / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        save_file({name: W.contiguous() for name, W in model.weights().items()}, unfinished / WEIGHTS)


def load_config(folder: str | Path) -> RunConfig:
    path = Path(folder) / CONFIG
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        version, settings = description["format_version"], json.dumps(description["config"])
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read ({error.strerror}): give a model folder") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ModelFolderError(f"{path} does not describe a model: give a folder that save_model wrote") from None
    if version != FORMAT_VERSION:
        raise ModelFolderError(f"{path} has format_version {version!r}, this program reads {FORMAT_VERSION}: update it")
    try:
        return RunConfig.from_json(settings)
    except ConfigError as error:
        raise ModelFolderError(f"{path}: {error}") from None


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
