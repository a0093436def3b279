"""A model folder is written atomically, is never a pickle, and is refused with a reason if it is damaged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.primes import SWITCHES, prime_config, random_ids, random_model
from transduce import ModelConfig, ModelFolderError, RunConfig, Transformer, Translator, load_model, save_model
from transduce.model_folder import format as format_module

every_switch = pytest.mark.parametrize("config", [prime_config(**c) for c in SWITCHES.values()], ids=list(SWITCHES))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = RunConfig(model=prime_config())
    save_model(tmp_path / "model", random_model(config.model, torch.float32), config)
    return tmp_path / "model"


@every_switch
def test_a_loaded_model_equals_the_saved_model_exactly(config: ModelConfig, tmp_path: Path) -> None:
    model, (source_BS, target_BT) = random_model(config, torch.float32), random_ids(config)
    save_model(tmp_path / "deep" / "model", model, RunConfig(model=config))
    loaded, loaded_config = load_model(tmp_path / "deep" / "model")
    assert loaded_config == RunConfig(model=config)
    assert not loaded.training
    with torch.no_grad():
        assert torch.equal(loaded(source_BS, target_BT).logits_BTV, model(source_BS, target_BT).logits_BTV)


def test_weights_have_the_papers_names_and_tied_weights_are_stored_once(folder: Path) -> None:
    weights, config = load_file(folder / "weights.safetensors"), prime_config()
    shapes = {name: tuple(W.shape) for name, W in weights.items()}
    n_keys, n_values = config.n_heads * config.d_k, config.n_heads * config.d_v
    assert {name: shape for name, shape in shapes.items() if name.startswith("decoder.2.memory_attention.")} == {
        "decoder.2.memory_attention.W_Q": (config.d_model, n_keys),
        "decoder.2.memory_attention.W_K": (config.d_model, n_keys),
        "decoder.2.memory_attention.W_V": (config.d_model, n_values),
        "decoder.2.memory_attention.W_O": (n_values, config.d_model),
    }
    assert shapes["encoder.0.feed_forward.W_1"] == (config.d_model, config.d_ff)
    assert shapes["encoder.0.feed_forward.b_2"] == (config.d_model,)
    assert shapes["encoder.1.self_attention_norm.gain"] == (config.d_model,)
    assert [name for name in shapes if "." not in name] == ["source_embedding"]
    assert sum(W.numel() for W in weights.values()) == sum(p.numel() for p in Transformer(config).parameters())


def test_save_model_does_not_overwrite(folder: Path) -> None:
    before = (folder / "weights.safetensors").read_bytes()
    config = RunConfig(model=prime_config())
    with pytest.raises(ModelFolderError, match=r"model exists: choose another name or remove it first"):
        save_model(folder, random_model(config.model, seed=1), config)
    assert (folder / "weights.safetensors").read_bytes() == before


def test_a_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(format_module, "save_file", full_disk)
    config = RunConfig(model=prime_config())
    with pytest.raises(OSError, match="No space left"):
        save_model(tmp_path / "model", random_model(config.model), config)
    assert list(tmp_path.iterdir()) == []


def test_permissions_of_a_folder_follow_the_umask(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_an_incomplete_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelFolderError, match=r"config.json cannot be read \(No such file or directory\): give a model"
    ):
        load_model(tmp_path / "nowhere")
    data = (folder / "weights.safetensors").read_bytes()
    (folder / "weights.safetensors").write_bytes(data[:-100])
    with pytest.raises(ModelFolderError, match=r"weights.safetensors is damaged \(.*\): copy the folder again"):
        load_model(folder)
    os.remove(folder / "weights.safetensors")
    with pytest.raises(ModelFolderError, match=r"weights.safetensors cannot be read \(No such file.*\): the folder"):
        load_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format_version": 1}', "[" * 100_000])
def test_an_invalid_description_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"config.json does not describe a model: give a folder that"):
        load_model(folder)


def test_other_formats_and_impossible_settings_are_refused(folder: Path) -> None:
    edit(folder, format_version=2)
    with pytest.raises(ModelFolderError, match="has format_version 2, this program reads 1: update it"):
        load_model(folder)
    edit(folder, format_version=1, config={"model": {"n_heads": 0}})
    with pytest.raises(ModelFolderError, match=r"config.json: model.n_heads is 0, must be at least 1"):
        load_model(folder)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    file = folder / "weights.safetensors"
    weights = load_file(file)
    wrong = weights | {"encoder.0.feed_forward.W_1": torch.zeros(5, 7)}
    save_file(wrong, file)
    with pytest.raises(ModelFolderError, match=r"W_1' has shape \[5, 7\], the configuration requires \[22, 13\]"):
        load_model(folder)
    save_file({name: W for name, W in weights.items() if not name.endswith("2.feed_forward.b_1")}, file)
    with pytest.raises(ModelFolderError, match=r"lacks tensor 'decoder.2.feed_forward.b_1': it belongs to another"):
        load_model(folder)
    save_file(weights | {"extra": torch.zeros(1)}, file)
    with pytest.raises(ModelFolderError, match="has an unknown tensor 'extra'"):
        load_model(folder)


def test_a_pickle_in_place_of_weights_is_refused_and_not_executed(folder: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, folder / "weights.safetensors")
    with pytest.raises(ModelFolderError, match="is damaged"):
        load_model(folder)


def test_a_folder_of_format_version_1_gives_the_recorded_translations() -> None:
    """The folder must stay readable. Its weights are random; the translations were recorded when it was made."""
    folder = Path(__file__).parents[1] / "models" / "version-1"
    translator = Translator.load(folder, device="cpu")
    translator.settings = replace(translator.settings, max_extra_tokens=2, no_repeat_ngram=1)
    short, blank, long = translator.translate(["Das Haus ist klein.", "", "Wir gehen. " * 9], "en", with_details=True)
    assert short.text == "\x047zlklGE-a\x10alĵ汇"
    assert short.score == pytest.approx(-29.5468, abs=1e-2)
    assert (short.flags, short.alignment) == (("limit",), ((3, 0),))
    assert blank.text == ""
    assert long.flags == ("split", "limit")
    assert long.alignment == ((1, 0), (1, 1), (7, 2), (7, 3), (13, 4), (13, 5))


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("origin", {"longest_source": "x"}),
        ("origin", {"directions": [1]}),
        ("alignment", {}),
        ("alignment", {"layer": 99, "heads": [0], "shift": 0}),
        ("alignment", {"layer": 0, "heads": [0], "shift": 3}),
        ("alignment", {"layer": 0, "heads": [], "shift": 0}),
        ("alignment", {"layer": 0, "heads": [99], "shift": 0}),
    ],
)
def test_an_invalid_origin_or_alignment_is_refused(folder: Path, part: str, values: object) -> None:
    description = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(description | {part: values}))
    with pytest.raises(ModelFolderError, match="has an invalid origin or alignment: copy the folder again"):
        format_module.load_origin(folder)


def test_a_run_that_has_not_ended_is_refused_as_a_model(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(
        ModelFolderError, match="training run before its first validation, so it has no model yet: wait"
    ):
        format_module.model_folder(tmp_path)
