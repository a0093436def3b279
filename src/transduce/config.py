"""All settings and their only defaults, which are those of the paper's base model.

A run is a function that returns a `RunConfig`. `override` applies the `section.field=value` texts of `--set`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin

from transduce.errors import ConfigError


class _Section:
    """Base of the sections: checks types and bounds, the same for values from Python, JSON and `--set`."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        section_class: type = type(self)
        for name, hint in _field_hints(section_class).items():
            value = getattr(self, name)
            # 1 and 1.0 must give the same JSON and so the same hash. From 2**53 on, not every int is a float.
            if hint is float and type(value) is int and abs(value) < 2**53:
                value = float(value)
                object.__setattr__(self, name, value)
            if not _fits(value, hint):
                raise _wrong_type(f"{self.section}.{name}", value, hint)
        self._check()

    def _check(self) -> None:
        """Check the bounds of this section's values."""

    def _at_least(self, bound: int, *names: str, remedy: str = "raise it") -> None:
        for name in names:
            if (value := getattr(self, name)) is not None and value < bound:
                raise ConfigError(f"{self.section}.{name} is {value}, must be at least {bound}: {remedy}")

    def _at_most(self, bound: int, *names: str) -> None:
        """Refuse absurd sizes, whether a mistake or an attack, before memory is allocated for them."""
        for name in names:
            if (value := getattr(self, name)) > bound:
                raise ConfigError(f"{self.section}.{name} is {value}, must be at most {bound}: lower it")

    def _probability(self, *names: str) -> None:
        for name in names:
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(
                    f"{self.section}.{name} is {value}, must be from 0 up to but not including 1: "
                    "give a share such as 0.1, or 0 for none"
                )

    def _positive(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{self.section}.{name} is {value}, must be above 0 and finite: raise it")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Section):
    """The shape of the model. The defaults are those of the paper's base model.

    >>> from transduce import ModelConfig
    >>> config = ModelConfig(n_encoder_layers=12, n_decoder_layers=3)
    >>> config.n_encoder_layers, config.d_model, config.norm
    (12, 512, 'post')
    """

    section: ClassVar[str] = "model"

    source_vocab_size: int = 37_000
    target_vocab_size: int = 37_000
    tied_embeddings: Literal["three", "two", "none"] = "three"
    """"three": both embeddings and the output projection are one matrix, which needs one shared vocabulary;
    "two": the target embedding and the output projection; "none": three matrices."""

    n_encoder_layers: int = 6
    n_decoder_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    n_heads: int = 8
    d_k: int = 64
    d_v: int = 64

    norm: Literal["post", "pre"] = "post"
    """Where layer normalisation sits. Figure 1 of the paper is "post"; "pre" adds a final norm to each stack."""
    positions: Literal["sinusoid", "learned"] = "sinusoid"
    max_positions: int = 1024
    """Rows of the learned position tables; sinusoids have no limit."""
    attention_window: int | None = None
    """Restricted self-attention of section 4: position i sees j where 2 |i - j| <= attention_window.
    None is the paper's model: every position sees every other."""

    dropout: float = 0.1
    """P_drop: on the output of each sub-layer and on the sums of embeddings and positions."""
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0

    activation: Literal["relu", "gelu", "swish"] = "relu"
    attention_bias: bool = False
    output_bias: bool = False
    norm_eps: float = 1e-6

    pad_id: int = 0
    bos_id: int = 1
    """The first token of target_in. It may equal pad_id: some imported models start with the padding token."""
    eos_id: int = 2

    def _check(self) -> None:
        # Three ids are reserved, so a vocabulary of three has no words.
        self._at_least(4, "source_vocab_size", "target_vocab_size", remedy="pad, bos and eos need room beside words")
        sizes = ("n_encoder_layers", "n_decoder_layers", "d_model", "d_ff", "n_heads", "d_k", "d_v", "max_positions")
        self._at_least(1, *sizes)
        self._at_most(1000, "n_encoder_layers", "n_decoder_layers")
        self._at_most(10**6, "d_model", "d_ff", "n_heads", "d_k", "d_v", "max_positions")
        self._at_most(10**8, "source_vocab_size", "target_vocab_size")
        self._at_least(1, "attention_window", remedy="use none to let every position see every other")
        self._at_least(0, "pad_id", "bos_id", "eos_id")
        self._probability("dropout", "attention_dropout", "ffn_dropout")
        self._positive("norm_eps")
        if self.positions == "sinusoid" and self.d_model % 2:
            raise ConfigError(
                f"model.d_model is {self.d_model}, must be even for sinusoids, which come in pairs: "
                f"use {self.d_model + 1}, or model.positions=learned"
            )
        if self.tied_embeddings == "three" and self.source_vocab_size != self.target_vocab_size:
            raise ConfigError(
                f"model.source_vocab_size is {self.source_vocab_size}, must equal model.target_vocab_size "
                f"({self.target_vocab_size}) when tied three ways: share one vocabulary, or model.tied_embeddings=two"
            )
        smallest = min(self.source_vocab_size, self.target_vocab_size)
        for name in ("pad_id", "bos_id", "eos_id"):
            if (value := getattr(self, name)) >= smallest:
                raise ConfigError(f"model.{name} is {value}, must be below the vocabulary size {smallest}: lower it")
        if self.eos_id in (self.pad_id, self.bos_id):
            raise ConfigError(
                f"model.eos_id is {self.eos_id}, must differ from pad_id {self.pad_id} and bos_id {self.bos_id}: "
                "give the end of a sentence a different id"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Section):
    """Cleaning of the training text, and the size of batches.

    >>> from transduce import DataConfig
    >>> config = DataConfig(max_characters=200)
    >>> config.max_characters, config.batch_tokens
    (200, 25000)
    """

    section: ClassVar[str] = "data"

    subwords: Literal["bpe"] = "bpe"
    batch_by: Literal["length"] = "length"
    """Pairs of similar lengths share a batch. This is the only method; the field records it in the configuration."""
    batch_tokens: int = 25_000
    """Source tokens of one optimiser step over all ranks, and as many target tokens. End marks count, padding does
    not."""
    n_shapes: int = 128
    """Batches are padded to at most this many different shapes: more need less padding, fewer compile faster."""
    valid_pairs: int = 2000
    """Without validation files, between half as many and this many training pairs are held out; at most one in 16."""
    max_characters: int = 1000
    """Cleaning drops a pair if one side is longer."""
    max_length_ratio: float = 3.0
    """Cleaning drops a pair if one side is longer than max_length_ratio times the other plus 20, both in characters and
    in bytes."""
    min_letter_share: float = 0.5
    """Cleaning drops a pair if letters are a smaller share of one side's characters. White space does not count."""

    def _check(self) -> None:
        self._at_least(1, "batch_tokens", "n_shapes", "max_characters")
        self._at_most(60_000, "n_shapes")
        self._at_least(0, "valid_pairs")
        self._probability("min_letter_share")
        if not 1 <= self.max_length_ratio < float("inf"):
            raise ConfigError(f"data.max_length_ratio is {self.max_length_ratio}, must be 1 or more: 3 is usual")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Section):
    """The optimiser, the number of steps, checkpoints and validation.

    >>> from transduce import TrainConfig
    >>> config = TrainConfig(max_steps=2000, warmup_steps=200)
    >>> config.max_steps, config.label_smoothing
    (2000, 0.1)
    """

    section: ClassVar[str] = "train"

    max_steps: int = 100_000
    warmup_steps: int = 4000
    rate_factor: float = 1.0
    """Multiplies equation 3. Not in the paper: a short run needs few warm-up steps, for which the equation alone gives
    too high a rate."""
    schedule: Literal["paper", "inverse-root", "cosine", "linear"] = "paper"
    """The learning rate over time. "paper" is equation 3: linear warm-up, then the inverse root of the step. The others
    have the same peak: "inverse-root" stays at it during the warm-up; "cosine" and "linear" fall from it to zero."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-9
    label_smoothing: float = 0.1
    clip_norm: float | None = None
    """Gradients of a larger norm are scaled down to this norm. The paper does not clip."""
    checkpoint_minutes: float = 10.0
    checkpoint_steps: int | None = None
    """Steps between checkpoints, each with a validation. None: as many as take `checkpoint_minutes`, or a twentieth of
    the run if that is less; the speed is measured before the first step."""
    average_last: int = 5
    """Number of last checkpoints that are averaged into the final model."""
    patience: int | None = None
    """Training ends after this many consecutive checkpoints without a lower validation loss. None: never."""
    max_bad_steps: int = 10
    """Training ends after this many consecutive steps with a loss or gradient that is NaN or infinite."""
    valid_translations: int = 200
    """Validation pairs that each checkpoint translates with greedy search, to measure BLEU; 0: none."""
    valid_sample: int | None = None
    """Each checkpoint computes the loss of at most this many validation pairs, spread evenly over all; None: of all. A
    short budget lowers it."""
    seed: int = 1

    def _check(self) -> None:
        self._at_least(1, "max_steps", "warmup_steps", "checkpoint_steps", "average_last", "patience", "max_bad_steps")
        self._at_least(1, "valid_sample")
        self._at_least(0, "seed", "valid_translations")
        self._at_most(2**62, "seed")
        self._probability("adam_beta1", "adam_beta2", "label_smoothing")
        self._positive("adam_eps", "checkpoint_minutes", "clip_norm", "rate_factor")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(_Section):
    """The search for a translation.

    >>> from transduce import DecodeConfig, Translator
    >>> greedy_search = DecodeConfig(beam_size=1)
    >>> translator = Translator.load(settings=greedy_search, device="cpu")
    >>> translator.translate(["Das ist gut."])[0].text
    "That's good."
    """

    section: ClassVar[str] = "decode"

    method: Literal["beam", "sample"] = "beam"
    beam_size: int = 4
    """1 is greedy search."""
    n_best: int = 1
    """Translations of each sentence: the best of the beam, or independent samples."""
    length_penalty: Literal["gnmt", "length"] = "gnmt"
    """The divisor of a hypothesis's log-probability: "gnmt" is ((5 + length) / 6) ** length_alpha; "length" is
    length ** length_alpha, which some other toolkits use. The end mark counts."""
    length_alpha: float = 0.6
    max_extra_tokens: int = 50
    """A translation may have at most this many tokens more than its source."""
    stop_early: bool = True
    """End the search of a sentence as soon as no live hypothesis can still become the best."""
    min_length: int = 0
    """Minimum number of tokens of a translation."""
    no_repeat_ngram: int = 0
    """No sequence of this many tokens occurs twice in a translation; 0: no restriction."""

    temperature: float = 1.0
    """For sampling: values below 1 favour probable tokens more strongly."""
    top_k: int = 0
    """For sampling: draw from this many most probable tokens; 0: from all."""
    top_p: float = 1.0
    """For sampling: draw from the smallest set of most probable tokens that together have this probability."""
    seed: int = 1

    @property
    def n_hypotheses(self) -> int:
        """Hypotheses that a search keeps for each sentence."""
        return self.beam_size if self.method == "beam" else self.n_best

    def _check(self) -> None:
        self._at_least(1, "beam_size", "n_best")
        self._at_least(0, "max_extra_tokens", "min_length", "no_repeat_ngram", "top_k", "seed")
        self._at_most(1000, "beam_size", "n_best")
        self._at_most(100_000, "max_extra_tokens", "min_length", "no_repeat_ngram")
        self._at_most(2**62, "seed")
        self._positive("temperature", "top_p")
        if self.top_p > 1:
            raise ConfigError(f"decode.top_p is {self.top_p}, must be at most 1: 1 draws from all tokens")
        if self.method == "beam" and self.n_best > self.beam_size:
            raise ConfigError(
                f"decode.n_best is {self.n_best}, must be at most decode.beam_size, {self.beam_size}: raise that too"
            )
        if not 0 <= self.length_alpha < float("inf"):
            raise ConfigError(f"decode.length_alpha is {self.length_alpha}, must be 0 or more: 0 is no penalty")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run. JSON files store it, and `hash` identifies it in results.

    >>> from transduce import RunConfig, TrainConfig
    >>> config = RunConfig(train=TrainConfig(max_steps=2000))
    >>> RunConfig.from_json(config.to_json()) == config
    True
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Missing fields take their defaults, so that files written before a field existed stay readable."""
        try:
            values = json.loads(text, object_pairs_hook=_refuse_repeats)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config is not JSON ({error}): write it with RunConfig.to_json") from None
        sections = _field_hints(RunConfig)
        if not isinstance(values, dict):
            raise ConfigError(
                f"config is {type(values).__name__}, must be an object with sections {', '.join(sections)}"
            )
        changes = []
        for section, settings in values.items():
            _look_up(section, sections, "section")
            if not isinstance(settings, dict):
                raise ConfigError(f"config section {section} is {type(settings).__name__}, must be an object of fields")
            changes += [(section, name, value) for name, value in settings.items()]
        return _change(cls(), changes)

    def hash(self) -> str:
        """Twelve hexadecimal digits that identify this configuration in results."""
        values = asdict(self)
        for section, name in NEWER_FIELDS:
            if values[section][name] == getattr(getattr(RunConfig(), section), name):
                del values[section][name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


NEWER_FIELDS = (("train", "schedule"), ("train", "valid_sample"))
"""Fields that older versions did not have. At their default they do not change the hash, so old results keep theirs."""


def base() -> RunConfig:
    """Return the paper's base model, with its recipe. These are the defaults of all settings.

    >>> from transduce import base
    >>> config = base()
    >>> config.model.n_encoder_layers, config.model.d_model, config.train.max_steps
    (6, 512, 100000)
    """
    return RunConfig()


def big() -> RunConfig:
    """Return the paper's big model, with its recipe.

    >>> from transduce import big
    >>> config = big()
    >>> config.model.d_model, config.model.n_heads, config.model.dropout, config.train.max_steps
    (1024, 16, 0.3, 300000)
    """
    config = with_model(base(), d_model=1024, d_ff=4096, n_heads=16, dropout=0.3)
    return replace(config, train=replace(config.train, max_steps=300_000, average_last=20))


def small() -> RunConfig:
    """Return half the depth and width of `base`, with a vocabulary for some hundred thousand sentence pairs.

    >>> from transduce import small
    >>> config = small().model
    >>> config.n_encoder_layers, config.d_model, config.target_vocab_size
    (3, 256, 8000)
    """
    return with_model(base(), **_layers(3), **_vocabulary(8000), d_model=256, d_ff=1024, n_heads=4)


def tiny() -> RunConfig:
    """Return a narrow model for some ten thousand sentence pairs, with more dropout against overfitting.

    >>> from transduce import tiny
    >>> config = tiny().model
    >>> config.n_encoder_layers, config.d_model, config.dropout
    (4, 128, 0.3)
    """
    changes = _layers(4) | _vocabulary(8000)
    return with_model(base(), **changes, d_model=128, d_ff=256, n_heads=4, d_k=32, d_v=32, dropout=0.3)


PRESETS = {"base": base, "big": big, "small": small, "tiny": tiny}


def with_model(config: RunConfig, **changes: Any) -> RunConfig:
    """Return `config` with some model settings replaced.

    >>> from transduce import base, with_model
    >>> row_a_of_table_3 = with_model(base(), n_heads=16, d_k=32, d_v=32)
    >>> row_a_of_table_3.model.n_heads, row_a_of_table_3.model.d_model
    (16, 512)
    """
    return _change(config, [("model", name, value) for name, value in changes.items()])


def override(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Apply texts of the form `section.field=value`, as the command line does for `--set`.

    All of them are applied at once, so values that are valid only together may come in any order.

    >>> from transduce import override, tiny
    >>> config = override(tiny(), ["train.max_steps=1000", "decode.beam_size=8"])
    >>> config.train.max_steps, config.decode.beam_size
    (1000, 8)
    """
    values = parse_settings(RunConfig, settings, flag="--set", example="train.max_steps=1000", noun="field")
    return _change(config, [(*path.split(".", 1), value) for path, value in values.items()])


def parse_settings(
    settings_class: type, settings: Iterable[str], *, flag: str, example: str, noun: str
) -> dict[str, Any]:
    """Parse texts such as `characters=20000` into values of the types that the fields of a dataclass have.

    If the fields of `settings_class` are dataclasses themselves, the texts read `section.field=value`, otherwise
    `name=value`. The keys of the result are the paths as written: "train.max_steps", or "characters". A repeated path
    takes its last value. Bounds are not checked here but by the dataclass.

    `flag` is the command-line option that gives the texts, and `example` a valid text for it; `noun` is the word for a
    field in messages, such as "limit".
    """
    hints = _field_hints(settings_class)
    has_sections = all(is_dataclass(hint) for hint in hints.values())
    form = "section.field=value" if has_sections else "name=value"
    values = {}
    for setting in settings:
        path, equals, text = (part.strip() for part in setting.partition("="))
        if not equals or (has_sections and "." not in path):
            raise ConfigError(f"{flag} {setting!r} must read {form}: for example {example}")
        if has_sections:
            section, name = path.split(".", 1)
            section_class = _look_up(section, hints, "section")
            hint = _look_up(name, _field_hints(section_class), f"{noun} of section {section}")
            label = path
        else:
            hint = _look_up(path, hints, noun)
            label = f"{noun} {path}"
        values[path] = _parse(label, text, hint)
    return values


def _change(config: RunConfig, changes: Iterable[tuple[str, str, Any]]) -> RunConfig:
    by_section: dict[str, dict[str, Any]] = {}
    for section, name, value in changes:
        section_class = _look_up(section, _field_hints(RunConfig), "section")
        _look_up(name, _field_hints(section_class), f"field of section {section}")
        by_section.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in by_section.items()})


def _layers(n: int) -> dict[str, int]:
    return {"n_encoder_layers": n, "n_decoder_layers": n}


def _vocabulary(size: int) -> dict[str, int]:
    return {"source_vocab_size": size, "target_vocab_size": size}


@cache
def _field_hints(settings_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(settings_class)
    return {field.name: hints[field.name] for field in fields(settings_class)}


def _look_up(name: str, hints: dict[str, Any], kind: str) -> Any:
    """The type of the field `name`; `kind` says in the error what the names are."""
    if name in hints:
        return hints[name]
    matches = difflib.get_close_matches(name, hints, n=1)
    remedy = f"did you mean {matches[0]}?" if matches else f"choose from {', '.join(hints)}"
    raise ConfigError(f"{name!r} is not a {kind}: {remedy}")


def _parse(label: str, text: str, hint: Any) -> Any:
    try:
        value = _convert(text, hint)
    except ValueError:
        value = text
    if not _fits(value, hint):
        raise _wrong_type(label, value, hint)
    return value


def _wrong_type(label: str, value: object, hint: Any) -> ConfigError:
    return ConfigError(f"{label} is {value!r}, must be {_describe(hint)}: give such a value")


def _convert(text: str, hint: Any) -> Any:
    if get_origin(hint) is types.UnionType:  # `int | None` and `float | None` are the only unions in use
        (inner,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
        return None if text.lower() in ("none", "null") else _convert(text, inner)
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        return hint(text)
    return text


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is types.UnionType:
        return any(_fits(value, arm) for arm in get_args(hint))
    return type(value) is hint  # not isinstance, which accepts True as an int


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is types.UnionType:
        return " or ".join(_describe(arm) for arm in get_args(hint))
    return {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none"}[hint]


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"config gives {sorted(repeated)[0]!r} twice: keep one")
    return dict(pairs)
