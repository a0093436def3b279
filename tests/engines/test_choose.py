"""The choice of the engine, and the effects of creating one: little memory, and no change to the process."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.primes import prime_config, random_model
from transduce import ConfigError
from transduce.engines.cached import CachedStepper
from transduce.engines.choose import Engine, choose_engine, make_stepper
from transduce.engines.layers import Linear, Precision
from transduce.engines.native import library
from transduce.engines.native.stepper import NativeStepper
from transduce.model import Transformer

PRECISIONS: list[Precision] = ["float32", "int8"]
NO_COMPILER = "there is no C compiler 'cc'"
FOLDER = Path(__file__).parents[1] / "models" / "version-1"

with_compiled_library = pytest.mark.skipif(
    "AVX512" in str(library.unsupported("int8")), reason="this processor cannot run the compiled engine"
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a compiled library."""
    monkeypatch.setattr(library, "unsupported", lambda precision: None)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unsupported", lambda precision: NO_COMPILER)


def model_with(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    return random_model(prime_config(**changes), dtype).eval()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_compiled_engine_is_chosen_if_it_supports_the_model(compiled: None, precision: Precision) -> None:
    engine = choose_engine(model_with(), precision)
    assert engine == Engine("native", precision, "the fastest for this model on this machine", is_fallback=False)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_compiler_the_cached_engine_is_the_fallback(no_compiler: None, precision: Precision) -> None:
    engine = choose_engine(model_with(), precision)
    assert engine == Engine("cached", precision, NO_COMPILER, is_fallback=True)
    assert str(engine) == f"cached (PyTorch with a cache for all hypotheses), {precision}: {NO_COMPILER}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_cached_engine_is_the_fallback_for_an_activation_that_is_not_compiled(
    compiled: None, precision: Precision
) -> None:
    engine = choose_engine(model_with(activation="gelu"), precision)
    assert engine == Engine("cached", precision, "model.activation is gelu", is_fallback=True)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float64, "float64")])
def test_the_cached_engine_is_the_fallback_for_number_formats_that_are_not_compiled(
    compiled: None, dtype: torch.dtype, name: str
) -> None:
    engine = choose_engine(model_with(dtype), "float32")
    assert engine == Engine("cached", name, f"the compiled engine has no {name}", is_fallback=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"norm": "pre"}, "model.norm is pre"), ({"attention_window": 4}, "attention has a window")],
    ids=str,
)
def test_the_model_itself_is_the_fallback_for_options_of_no_engine_and_int8_is_refused(
    compiled: None, changes: dict[str, Any], reason: str
) -> None:
    model = model_with(**changes)
    assert choose_engine(model, "float32") == Engine("model", "float32", reason, is_fallback=True)
    with pytest.raises(ConfigError) as error:
        choose_engine(model, "int8")
    assert str(error.value) == f"there is no int8 for this model ({reason}): take --dtype float32"


def test_on_a_gpu_the_model_itself_is_the_default_and_int8_is_refused(compiled: None) -> None:
    """PyTorch's device "meta", which holds no values, stands for a GPU."""
    model = model_with().to("meta")
    assert choose_engine(model, "float32") == Engine("model", "float32", "the default on a GPU", is_fallback=False)
    half = choose_engine(model_with(torch.bfloat16).to("meta"), "float32")
    assert half == Engine("model", "bfloat16", "the default on a GPU", is_fallback=False)
    with pytest.raises(ConfigError, match="there is no int8 on a GPU: take --dtype float32 or bfloat16"):
        choose_engine(model, "int8")


def test_the_stepper_is_the_one_that_the_choice_names(no_compiler: None) -> None:
    model, pre_norm = model_with(), model_with(norm="pre")
    assert isinstance(make_stepper(choose_engine(model, "int8"), model, "int8"), CachedStepper)
    assert make_stepper(choose_engine(pre_norm, "float32"), pre_norm, "float32") is pre_norm


@with_compiled_library
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_stepper_of_the_compiled_engine_is_the_native_one(precision: Precision) -> None:
    model = model_with()
    assert isinstance(make_stepper(choose_engine(model, precision), model, precision), NativeStepper)


# Memory


@pytest.fixture
def only_new_objects() -> Iterator[None]:
    """Hides all present objects from `gc.get_objects`, because looking at all of them is slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def new_tensor_bytes(model: Transformer) -> int:
    """Bytes of all new tensors that do not share memory with the model. Tensors that share memory count once."""
    # Not isinstance, which reads an attribute of every object: deprecated ones warn.
    storages = [x.untyped_storage() for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    n_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(n_bytes[address] for address in n_bytes.keys() - {p.data_ptr() for p in model.parameters()})


@with_compiled_library
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_compiled_engine_holds_each_weight_once_and_rearranges_one_layer_at_a_time(
    precision: Precision, monkeypatch: pytest.MonkeyPatch, only_new_objects: None
) -> None:
    # Sizes that need no padding, and six layers of equal size.
    config = prime_config(
        d_model=64,
        d_ff=256,
        n_heads=4,
        d_k=16,
        d_v=16,
        n_encoder_layers=6,
        n_decoder_layers=6,
        source_vocab_size=1024,
        target_vocab_size=1024,
    )
    model = random_model(config, torch.float32).eval()
    n_weights = sum(p.numel() for p in model.parameters())
    largest_layer = max(sum(p.nbytes for p in layer.parameters()) for layer in model.decoder)
    matrix, not_packed = NativeStepper._matrix, []

    def measured(self: NativeStepper, weights: Linear) -> Any:
        not_packed.append(new_tensor_bytes(model) - self.n_bytes)
        return matrix(self, weights)

    monkeypatch.setattr(NativeStepper, "_matrix", measured)
    stepper = NativeStepper(model, precision)
    n_bytes = new_tensor_bytes(model)
    assert stepper.n_bytes <= n_bytes <= 1.1 * n_weights * (4 if precision == "float32" else 1)
    assert stepper.source_VD.data_ptr() == model.embedding.source_embedding.data_ptr()
    assert stepper.target_VD.data_ptr() == model.embedding.target_embedding.data_ptr()
    assert max(not_packed) < largest_layer, "rearranged weights of several layers were in memory at the same time"


# The process

CONSTRUCTORS = """
import os, sys
import torch

symbols = []
sys.addaudithook(lambda event, arguments: symbols.append(arguments[1]) if event == "ctypes.dlsym" else None)
torch.set_num_threads(3)

def settings():
    smallest = torch.full((1000,), 1e-40)  # a denormal number, which -ffast-math would turn into zero
    return {
        "threads": torch.get_num_threads(),
        "threads between operations": torch.get_num_interop_threads(),
        "precision of products": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "attention by cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "denormal numbers": bool((smallest * 1.0 > 0).all()),
        "environment": dict(os.environ),
        "memory allocator": "mallopt" in symbols,
    }

import transduce.runtime
from transduce.engines.cached import CachedStepper
from transduce.translation.translator import Translator
before = settings()
for precision in ("float32", "int8"):
    translator = Translator.load(sys.argv[1], device="cpu", precision=precision)
    Translator(translator.model, translator.config, translator.subwords, precision=precision)
    CachedStepper(translator.model, precision)
    print(translator.engine.name)
after = settings()
assert after == before, [name for name in before if before[name] != after[name]]

transduce.runtime.configure("cpu", 2)
changed = settings()
assert [name for name in before if before[name] != changed[name]] == ["threads", "memory allocator"]
"""


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_constructors_do_not_change_the_process_and_configure_does() -> None:
    run_python(CONSTRUCTORS, str(FOLDER))


def test_translating_imports_no_module_of_training() -> None:
    code = "import sys, transduce.translation.translator; print(*sorted(sys.modules))"
    modules = run_python(code).split()
    assert "transduce.translation.translator" in modules
    assert [name for name in modules if name.startswith("transduce.training")] == []
