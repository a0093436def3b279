"""Every setting and its default, which exist nowhere else. The defaults are the paper's base model.

A run is a function that returns a `RunConfig`. `override` applies `section.field=value`, as `--set` does.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin

from transduce.errors import ConfigError


class _Section:
    """Types are checked here, once, for Python, JSON and `--set` alike."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for name, hint in _hints(self.section).items():
            value = getattr(self, name)
            # 1 and 1.0 must give the same JSON, hence the same hash; past 2**53 they are not the same number.
            if hint is float and type(value) is int and abs(value) < 2**53:
                value = float(value)
                object.__setattr__(self, name, value)
            if not _fits(value, hint):
                raise ConfigError(f"{self.section}.{name} is {value!r}, must be {_describe(hint)}: give such a value")
        self._check()

    def _check(self) -> None:
        """The bounds, which each section has of its own."""

    def _at_least(self, bound: int, *names: str, remedy: str = "raise it") -> None:
        for name in names:
            if (value := getattr(self, name)) is not None and value < bound:
                raise ConfigError(f"{self.section}.{name} is {value}, must be at least {bound}: {remedy}")

    def _at_most(self, bound: int, *names: str) -> None:
        """Far above any use: so that a file with a slip, or with malice, is refused before memory is asked for."""
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
    """The first token of target_in. Some models of others start with their padding, so it may equal pad_id."""
    eos_id: int = 2

    def _check(self) -> None:
        # Three ids below are reserved, and a vocabulary of those alone has nothing to say.
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
                "give the end of a sentence an id of its own"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Section):
    section: ClassVar[str] = "data"

    subwords: Literal["bpe"] = "bpe"
    batch_by: Literal["length"] = "length"
    """Pairs of about the same length share a batch. A name and not a switch: there is no second way."""
    batch_tokens: int = 25_000
    """Source tokens and target tokens, each, of one optimiser step over all ranks; end marks counted, padding not."""
    n_shapes: int = 128
    """Batches are padded to at most so many pairs of lengths: more leave less padding, fewer compile sooner."""
    valid_pairs: int = 2000
    """About so many are held out, or half of it, where no validation files are given; at most one in 16."""
    max_characters: int = 1000
    """Cleaning drops a pair with a longer side."""
    max_length_ratio: float = 3.0
    """Cleaning drops a pair with one side more than so many times as long as the other and 20 more, in characters and
    in bytes."""
    min_letter_share: float = 0.5
    """Cleaning drops a pair with a side of fewer letters, as a share of what is not white space."""

    def _check(self) -> None:
        self._at_least(1, "batch_tokens", "n_shapes", "max_characters")
        self._at_most(60_000, "n_shapes")
        self._at_least(0, "valid_pairs")
        self._probability("min_letter_share")
        if not 1 <= self.max_length_ratio < float("inf"):
            raise ConfigError(f"data.max_length_ratio is {self.max_length_ratio}, must be 1 or more: 3 is usual")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Section):
    section: ClassVar[str] = "train"

    max_steps: int = 100_000
    warmup_steps: int = 4000
    rate_factor: float = 1.0
    """Multiplies equation 3. Not in the paper: a short run wants both few steps of warm-up and a rate that is not high,
    which the equation alone cannot give."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-9
    label_smoothing: float = 0.1
    clip_norm: float | None = None
    """Gradients of a larger norm are shortened to it. The paper does not clip."""
    checkpoint_minutes: float = 10.0
    checkpoint_steps: int | None = None
    """Steps from one checkpoint, with its validation, to the next. None: measured before the first step, so that they
    take `checkpoint_minutes`, or a twentieth of the run where that is less."""
    average_last: int = 5
    """How many of the last checkpoints are averaged into the final model."""
    patience: int | None = None
    """Training ends when so many checkpoints in a row have not lowered the validation loss. None: it does not."""
    max_bad_steps: int = 10
    """Training ends when so many steps in a row gave a loss or gradient that is no number."""
    valid_translations: int = 200
    """Validation pairs that are translated at each checkpoint, greedily, for BLEU; 0: none."""
    seed: int = 1

    def _check(self) -> None:
        self._at_least(1, "max_steps", "warmup_steps", "checkpoint_steps", "average_last", "patience", "max_bad_steps")
        self._at_least(0, "seed", "valid_translations")
        self._at_most(2**62, "seed")
        self._probability("adam_beta1", "adam_beta2", "label_smoothing")
        self._positive("adam_eps", "checkpoint_minutes", "clip_norm", "rate_factor")


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(_Section):
    section: ClassVar[str] = "decode"

    method: Literal["beam", "sample"] = "beam"
    beam_size: int = 4
    """1 is greedy search."""
    n_best: int = 1
    """Translations of a sentence: the best of the beam, or so many draws."""
    length_penalty: Literal["gnmt", "length"] = "gnmt"
    """What divides the log-probability of a hypothesis: "gnmt" is ((5 + length) / 6) ** length_alpha, "length" is
    length ** length_alpha, as some other toolkits have it. The end mark counts."""
    length_alpha: float = 0.6
    max_extra_tokens: int = 50
    """A translation may be this much longer than its source."""
    stop_early: bool = True
    """End the search of a sentence when no live hypothesis can win any more."""
    min_length: int = 0
    """Tokens before a translation may end."""
    no_repeat_ngram: int = 0
    """No translation has the same so many tokens twice; 0: it may."""

    temperature: float = 1.0
    """Of sampling: below 1 the probable becomes more so."""
    top_k: int = 0
    """Of sampling: draw from so many most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Of sampling: draw from the fewest most probable tokens that together have this probability."""
    seed: int = 1

    @property
    def n_hypotheses(self) -> int:
        """That a search keeps of each sentence."""
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
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """A field that is missing takes its default, so that a file outlives the fields that come after it."""
        try:
            values = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"config is not JSON ({error}): write it with RunConfig.to_json") from None
        if not isinstance(values, dict):
            raise ConfigError(f"config is {_brief(values)}, must be an object with sections {', '.join(_sections())}")
        changes = []
        for section, settings in values.items():
            if section not in _sections():
                raise _unknown("section", section, _sections())
            if not isinstance(settings, dict):
                raise ConfigError(f"config section {section} is {_brief(settings)}, must be an object of fields")
            changes += [(section, name, value) for name, value in settings.items()]
        return _change(cls(), changes)

    def hash(self) -> str:
        """Twelve digits that name this configuration in results."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def base() -> RunConfig:
    return RunConfig()


def big() -> RunConfig:
    config = with_model(base(), d_model=1024, d_ff=4096, n_heads=16, dropout=0.3)
    return replace(config, train=replace(config.train, max_steps=300_000, average_last=20))


def small() -> RunConfig:
    """Half of base's depth and width, and a vocabulary for some hundred thousand pairs."""
    return with_model(base(), **_layers(3), **_vocabulary(8000), d_model=256, d_ff=1024, n_heads=4)


def tiny() -> RunConfig:
    """For some ten thousand pairs: narrow, and held back by more dropout."""
    changes = _layers(4) | _vocabulary(8000)
    return with_model(base(), **changes, d_model=128, d_ff=256, n_heads=4, d_k=32, d_v=32, dropout=0.3)


PRESETS = {"base": base, "big": big, "small": small, "tiny": tiny}


def with_model(config: RunConfig, **changes: Any) -> RunConfig:
    """`config` with other model settings, as one row of a table differs from the next."""
    return _change(config, [("model", name, value) for name, value in changes.items()])


def override(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Applies `section.field=value` texts together, so that no order of them passes through an impossible one."""
    changes = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot:
            raise ConfigError(f"--set {setting!r} must read section.field=value: for example train.max_steps=1000")
        changes.append((section, name, _parse(section, name, text.strip())))
    return _change(config, changes)


def _change(config: RunConfig, changes: Iterable[tuple[str, str, Any]]) -> RunConfig:
    by_section: dict[str, dict[str, Any]] = {}
    for section, name, value in changes:
        _hint(section, name)  # refuses what does not exist
        by_section.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in by_section.items()})


def _layers(n: int) -> dict[str, int]:
    return {"n_encoder_layers": n, "n_decoder_layers": n}


def _vocabulary(size: int) -> dict[str, int]:
    return {"source_vocab_size": size, "target_vocab_size": size}


@cache
def _sections() -> dict[str, type[_Section]]:
    return typing.get_type_hints(RunConfig)


@cache
def _hints(section: str) -> dict[str, Any]:
    hints = typing.get_type_hints(_sections()[section])
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


def _hint(section: str, name: str) -> Any:
    if section not in _sections():
        raise _unknown("section", section, _sections())
    hints = _hints(section)
    if name not in hints:
        raise _unknown(f"field of section {section}", name, hints)
    return hints[name]


def _unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
    return ConfigError(f"{name!r} is no {what}: {remedy}")


def _parse(section: str, name: str, text: str) -> Any:
    hint = _hint(section, name)
    try:
        return _read(text, hint)
    except ValueError:
        message = f"{section}.{name} is {text!r}, must be {_describe(hint)}: give such a value"
        raise ConfigError(message) from None


def _read(text: str, hint: Any) -> Any:
    if get_origin(hint) is types.UnionType:  # `int | None` is the only union in use
        (inner,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
        return None if text.lower() in ("none", "null") else _read(text, inner)
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
    return type(value) is hint  # not isinstance: True is an int to Python, and never meant as one here


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is types.UnionType:
        return " or ".join(_describe(arm) for arm in get_args(hint))
    return {int: "a whole number", float: "a number", bool: "true or false", types.NoneType: "none"}[hint]


def _brief(value: Any) -> str:
    return type(value).__name__


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"config gives {sorted(repeated)[0]!r} twice: keep one")
    return dict(pairs)
