"""Settings from Python, JSON and `--set` are checked in the same way; errors name the value, the bound and a remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce import ConfigError, ModelConfig, RunConfig, base, override, tiny, with_model
from transduce.config import PRESETS

EVERY_FIELD = [
    (section.name, field.name)
    for section in dataclasses.fields(RunConfig)
    for field in dataclasses.fields(getattr(base(), section.name))
]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_json_round_trip(preset: Any) -> None:
    assert RunConfig.from_json(preset().to_json()) == preset()
    assert RunConfig.from_json(preset().to_json()).hash() == preset().hash()


def test_presets_have_different_hashes() -> None:
    assert len({preset().hash() for preset in PRESETS.values()}) == len(PRESETS)


@pytest.mark.parametrize(("section", "name"), EVERY_FIELD)
def test_set_reaches_every_field(section: str, name: str) -> None:
    """The value of a field, written as text, gives the same configuration. Errors for bad values name the field."""
    for preset in (base(), tiny()):
        value = getattr(getattr(preset, section), name)
        assert override(preset, [f"{section}.{name}={value}"]) == preset
    with pytest.raises(ConfigError, match=rf"{section}\.{name} is 'nonsense', must be .+: give"):
        override(base(), [f"{section}.{name}=nonsense"])


def other_value(section: str, name: str) -> Any:
    """A value that the field does not have in `base()`, or None if it can have only one."""
    value = getattr(getattr(base(), section), name)
    chosen: dict[str, Any] = {"pad_id": 5, "bos_id": 6, "eos_id": 7, "attention_window": 3, "n_encoder_layers": 2}
    chosen |= {"clip_norm": 0.5, "checkpoint_steps": 11, "patience": 13, "valid_sample": 17}
    chosen |= {"min_length": 3, "no_repeat_ngram": 2, "top_k": 5}
    words = {"tied_embeddings": "two", "norm": "pre", "positions": "learned", "activation": "gelu"}
    words |= {"schedule": "cosine", "method": "sample", "length_penalty": "length"}
    if name in chosen | words:
        return (chosen | words)[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return None
    return value * 2 if isinstance(value, int) else value / 2 + 0.01


@pytest.mark.parametrize(("section", "name"), EVERY_FIELD)
def test_every_field_can_be_changed_by_set_and_by_json(section: str, name: str) -> None:
    if (value := other_value(section, name)) is None:
        assert name in ("subwords", "batch_by", "length_penalty"), "only these fields have a single value"
        return
    start = with_model(base(), tied_embeddings="none")  # so that the vocabularies may have different sizes
    by_set = override(start, [f"{section}.{name}={value}"])
    by_json = RunConfig.from_json(
        json.dumps(json.loads(start.to_json()) | {section: json.loads(start.to_json())[section] | {name: value}})
    )
    for config in (by_set, by_json):
        assert getattr(getattr(config, section), name) == value
        assert config.hash() != start.hash()


def test_set_changes_only_the_fields_that_it_names() -> None:
    config = override(base(), ["train.max_steps=1_000", "model.attention_window=128", "model.attention_bias=TRUE"])
    assert (config.train.max_steps, config.model.attention_window, config.model.attention_bias) == (1000, 128, True)
    assert override(config, ["model.attention_window=none"]).model.attention_window is None
    assert with_model(config, attention_window=None, attention_bias=False).model == base().model


def test_settings_apply_together_so_their_order_does_not_matter() -> None:
    """One of these settings alone would be invalid: three-way tying requires vocabularies of equal size."""
    for settings in (
        ["model.source_vocab_size=50", "model.target_vocab_size=50"],
        ["model.target_vocab_size=50", "model.source_vocab_size=50"],
    ):
        assert override(base(), settings).model.source_vocab_size == 50


def test_an_integer_is_accepted_for_a_float_field() -> None:
    assert with_model(base(), dropout=0) == with_model(base(), dropout=0.0)
    assert with_model(base(), dropout=0).hash() == with_model(base(), dropout=0.0).hash()


INVALID = [
    ({"n_heads": 0}, "model.n_heads is 0, must be at least 1: raise it"),
    ({"d_k": -3}, "model.d_k is -3, must be at least 1"),
    ({"n_encoder_layers": 10**9}, "model.n_encoder_layers is 1000000000, must be at most 1000: lower it"),
    ({"d_ff": 10**12}, "model.d_ff is 1000000000000, must be at most 1000000: lower it"),
    ({"n_decoder_layers": 0}, "model.n_decoder_layers is 0, must be at least 1"),
    ({"dropout": 1.5}, "model.dropout is 1.5, must be from 0 up to but not including 1: give a share such as 0.1"),
    ({"dropout": 1.0}, "model.dropout is 1.0, must be"),
    ({"attention_dropout": -0.1}, "model.attention_dropout is -0.1, must be"),
    ({"dropout": float("nan")}, "model.dropout is nan, must be"),
    ({"d_model": 511}, "model.d_model is 511, must be even for sinusoids, .*: use 512, or model.positions=learned"),
    ({"attention_window": 0}, "model.attention_window is 0, must be at least 1: use none to"),
    ({"norm_eps": 0.0}, "model.norm_eps is 0.0, must be above 0"),
    ({"norm_eps": float("inf")}, "model.norm_eps is inf, must be above 0"),
    ({"source_vocab_size": 3}, "model.source_vocab_size is 3, must be at least 4"),
    ({"target_vocab_size": 40_000}, "must equal model.target_vocab_size .*: share one vocabulary, or"),
    ({"pad_id": 37_000}, "model.pad_id is 37000, must be below the vocabulary size 37000: lower it"),
    ({"eos_id": 0}, "model.eos_id is 0, must differ from pad_id 0 and bos_id 1: give the end"),
    ({"norm": "both"}, "model.norm is 'both', must be one of post, pre: give such a value"),
    ({"n_heads": "8"}, "model.n_heads is '8', must be a whole number"),
    ({"n_heads": 8.0}, "model.n_heads is 8.0, must be a whole number"),
    ({"n_heads": True}, "model.n_heads is True, must be a whole number"),
    ({"attention_bias": 1}, "model.attention_bias is 1, must be true or false"),
    ({"dropout": 10**400}, "model.dropout is 1000.*, must be a number"),
    ({"attention_window": "wide"}, "model.attention_window is 'wide', must be a whole number or none"),
]


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=[str(c)[:40] for c, _ in INVALID])
def test_an_invalid_model_is_refused_from_python_and_from_json(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes)
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_json(json.dumps({"model": changes}))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.warmup_steps=0", "train.warmup_steps is 0, must be at least 1"),
        ("train.adam_beta2=1", "train.adam_beta2 is 1.0, must be from 0 up to but not including 1"),
        ("train.adam_eps=-1e-9", "train.adam_eps is -1e-09, must be above 0"),
        ("train.label_smoothing=1.2", "train.label_smoothing is 1.2, must be"),
        ("data.batch_tokens=0", "data.batch_tokens is 0, must be at least 1"),
        ("decode.beam_size=0", "decode.beam_size is 0, must be at least 1"),
        ("decode.top_p=1.5", "decode.top_p is 1.5, must be at most 1"),
        ("decode.temperature=0", "decode.temperature is 0.0, must be above 0 and finite"),
        ("decode.seed=9223372036854775808", "decode.seed is 9223372036854775808, must be at most"),
        ("decode.max_extra_tokens=10000000000", "decode.max_extra_tokens is 10000000000, must be at most 100000"),
        ("decode.n_best=5", "decode.n_best is 5, must be at most decode.beam_size, 4: raise that too"),
        ("decode.length_alpha=-1", "decode.length_alpha is -1.0, must be 0 or more"),
        ("decode.length_alpha=nan", "decode.length_alpha is nan, must be 0 or more"),
        ("model.n_haeds=8", "'n_haeds' is not a field of section model: did you mean n_heads?"),
        ("modle.n_heads=8", "'modle' is not a section: did you mean model?"),
        ("model.zzz=8", "'zzz' is not a field of section model: choose from source_vocab_size, "),
        ("n_heads=8", "'n_heads=8' must read section.field=value: for example"),
        ("model.n_heads", "'model.n_heads' must read section.field=value"),
        ("", "'' must read section.field=value"),
    ],
)
def test_an_invalid_setting_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(base(), [setting])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config is not JSON"),
        ("[" * 100_000, "config is not JSON"),
        ("[]", "config is list, must be an object with sections model, data, train, decode"),
        ('{"model": 3}', "config section model is int, must be an object"),
        ('{"modle": {}}', "'modle' is not a section: did you mean model?"),
        ('{"model": {"n_haeds": 8}}', "'n_haeds' is not a field of section model: did you mean n_heads?"),
        ('{"model": {"d_k": 8, "d_k": 9}}', "config gives 'd_k' twice: keep one"),
        ('{"model": {"d_k": NaN}}', "model.d_k is nan, must be a whole number"),
        ('{"model": {"norm": ["post"]}}', r"model.norm is \['post'\], must be one of"),
    ],
)
def test_invalid_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_json(text)


def test_a_field_that_is_missing_in_json_has_its_default() -> None:
    assert RunConfig.from_json('{"model": {"dropout": 0.3}}') == with_model(base(), dropout=0.3)


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        base().model.n_heads = 16  # type: ignore[misc]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3))
def test_any_json_value_in_any_field_is_accepted_or_refused_with_a_config_error(value: Any) -> None:
    for section, name in EVERY_FIELD:
        with contextlib.suppress(ConfigError):
            config = RunConfig.from_json(json.dumps({section: {name: value}}))
            assert RunConfig.from_json(config.to_json()) == config
