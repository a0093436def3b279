"""The Transformer of "Attention Is All You Need" as a Python toolkit: train a translator, translate, look inside."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from transduce.config import (
    DataConfig,
    DecodeConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    base,
    big,
    override,
    small,
    tiny,
    with_model,
)
from transduce.errors import ConfigError, DataError, ModelFolderError

if TYPE_CHECKING:
    from transduce.commands import Inspection, TrainedRun, evaluate, inspect, prepare, train
    from transduce.data.batches import Batch, make_batch
    from transduce.model import DecoderState, Transformer
    from transduce.model_folder.format import load_model, save_model
    from transduce.search.loop import greedy
    from transduce.translation.result import Translation
    from transduce.translation.translator import Translator

# Imported on first use, because their modules import torch or numpy, which takes seconds.
_LAZY_IMPORTS = {
    "Batch": "transduce.data.batches",
    "DecoderState": "transduce.model",
    "Inspection": "transduce.commands",
    "TrainedRun": "transduce.commands",
    "Transformer": "transduce.model",
    "Translation": "transduce.translation.result",
    "Translator": "transduce.translation.translator",
    "evaluate": "transduce.commands",
    "greedy": "transduce.search.loop",
    "inspect": "transduce.commands",
    "load_model": "transduce.model_folder.format",
    "make_batch": "transduce.data.batches",
    "prepare": "transduce.commands",
    "save_model": "transduce.model_folder.format",
    "train": "transduce.commands",
}

__all__ = [
    "Batch",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DecodeConfig",
    "DecoderState",
    "Inspection",
    "ModelConfig",
    "ModelFolderError",
    "RunConfig",
    "TrainConfig",
    "TrainedRun",
    "Transformer",
    "Translation",
    "Translator",
    "base",
    "big",
    "evaluate",
    "greedy",
    "inspect",
    "load_model",
    "make_batch",
    "override",
    "prepare",
    "save_model",
    "small",
    "tiny",
    "train",
    "with_model",
]

try:
    __version__ = version("transduce")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "uninstalled"


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'transduce' has no attribute {name!r}")
    return getattr(import_module(_LAZY_IMPORTS[name]), name)
