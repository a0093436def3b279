"""The paper's settings and formulas, and a comparison of a configuration with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from transduce.attention import Visible, attend, attend_fast
from transduce.config import RunConfig, base, big, with_model
from transduce.model import Embedding, Transformer, sinusoid
from transduce.training.recipe import learning_rate

Size = Literal["base", "big"]
Verdict = Literal["same", "differs", "not stated"]

SETTINGS: list[tuple[str, str, Any, Any]] = [
    # section, field, base, big
    ("3.1", "model.n_encoder_layers", 6, 6),
    ("3.1", "model.n_decoder_layers", 6, 6),
    ("3.1", "model.norm", "post", "post"),
    ("3.1", "model.d_model", 512, 1024),
    ("3.2.2", "model.n_heads", 8, 16),
    ("3.2.2", "model.d_k", 64, 64),
    ("3.2.2", "model.d_v", 64, 64),
    ("3.2.2", "model.attention_bias", False, False),
    ("3.3", "model.d_ff", 2048, 4096),
    ("3.3", "model.activation", "relu", "relu"),
    ("3.4", "model.tied_embeddings", "three", "three"),
    ("3.5", "model.positions", "sinusoid", "sinusoid"),
    ("4", "model.attention_window", None, None),
    ("5.1", "data.subwords", "bpe", "bpe"),
    ("5.1", "model.source_vocab_size", 37_000, 37_000),
    ("5.1", "model.target_vocab_size", 37_000, 37_000),
    ("5.1", "data.batch_by", "length", "length"),
    ("5.1", "data.batch_tokens", 25_000, 25_000),
    ("5.2", "train.max_steps", 100_000, 300_000),
    ("5.3", "train.adam_beta1", 0.9, 0.9),
    ("5.3", "train.adam_beta2", 0.98, 0.98),
    ("5.3", "train.adam_eps", 1e-9, 1e-9),
    ("5.3", "train.warmup_steps", 4000, 4000),
    ("5.3", "train.schedule", "paper", "paper"),
    ("5.3", "train.rate_factor", 1.0, 1.0),
    ("5.4", "model.dropout", 0.1, 0.3),
    # Section 5.4 applies dropout in two places, and these are not among them.
    ("5.4", "model.attention_dropout", 0.0, 0.0),
    ("5.4", "model.ffn_dropout", 0.0, 0.0),
    ("5.4", "train.label_smoothing", 0.1, 0.1),
    ("6.1", "train.checkpoint_minutes", 10.0, 10.0),
    ("6.1", "train.average_last", 5, 20),
    ("6.1", "decode.method", "beam", "beam"),
    ("6.1", "decode.beam_size", 4, 4),
    ("6.1", "decode.length_penalty", "gnmt", "gnmt"),
    ("6.1", "decode.length_alpha", 0.6, 0.6),
    ("6.1", "decode.max_extra_tokens", 50, 50),
    ("6.1", "decode.stop_early", True, True),
]

STATED_PARAMETERS = {"base": 65e6, "big": 213e6}


@dataclass(frozen=True)
class Row:
    section: str
    setting: str
    paper: Any
    ours: Any
    verdict: Verdict


def check_paper(config: RunConfig, size: Size) -> list[Row]:
    """One row for each setting and formula of the paper, and for each setting that the paper does not state.

    The values of formulas are measured on the code.
    """
    settings = {
        f"{section}.{name}": value for section, values in asdict(config).items() for name, value in values.items()
    }
    rows = []
    for section, name, base_value, big_value in SETTINGS:
        paper, ours = (big_value if size == "big" else base_value), settings.pop(name)
        rows.append(Row(section, name, paper, ours, "same" if ours == paper else "differs"))
    for section, name, formula, expected, measured in _formulas(config):
        verdict: Verdict = "same" if math.isclose(expected, measured, rel_tol=1e-4) else "differs"
        rows.append(Row(section, f"{name}: {formula}", _short(expected), _short(measured), verdict))
    rows.sort(key=lambda row: row.section)
    return rows + [Row("-", name, "-", ours, "not stated") for name, ours in settings.items()]


def count_parameters(config: RunConfig) -> int:
    """The number of trained parameters. A tied matrix counts once; sinusoids are not trained and do not count."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config.model).parameters())


def parameter_counts() -> Iterator[tuple[str, float | None, int]]:
    """(size, the paper's count, ours). There is no verdict, since the paper's vocabulary has "about 37000" entries."""
    yield "base", STATED_PARAMETERS["base"], count_parameters(base())
    yield "big", STATED_PARAMETERS["big"], count_parameters(big())


def _formulas(config: RunConfig) -> Iterator[tuple[str, str, str, float, float]]:
    """(section, name, formula, its value, the value measured on the code) for constants that are not settings."""
    model, warmup = config.model, config.train.warmup_steps
    yield "3.2.1", "attention scale", "1 / sqrt(d_k)", model.d_k**-0.5, _attention_scale(model.d_k)
    yield "3.4", "embedding scale", "sqrt(d_model)", model.d_model**0.5, _embedding_scale(config)
    if model.positions == "sinusoid":
        slowest = float(sinusoid(torch.tensor([1]), model.d_model)[0, -2].asin())
        wavelength = 10000 ** ((model.d_model - 2) / model.d_model)
        yield "3.5", "longest wave / 2 pi", "10000^((d_model - 2) / d_model)", wavelength, 1 / slowest
    peak = max(learning_rate(step, model.d_model, warmup) for step in (warmup - 1, warmup, warmup + 1) if step)
    yield "5.3", "highest learning rate", "1 / sqrt(d_model * warmup)", (model.d_model * warmup) ** -0.5, peak


def _attention_scale(d_k: int) -> float:
    """Measure the scale as the log of the ratio of two weights, for keys whose products with the query differ by 1."""
    query_BHQK, key_BHMK = torch.zeros(1, 1, 1, d_k), torch.zeros(1, 1, 2, d_k)
    query_BHQK[..., 0] = 1
    key_BHMK[0, 0, 0, 0] = 1
    value_BHMU = torch.eye(2)[None, None]  # the identity, so that the output equals the weights
    _, weight_BHQM = attend(query_BHQK, key_BHMK, value_BHMU, Visible(), 0.0)
    fast_weight_BHQM = attend_fast(query_BHQK, key_BHMK, value_BHMU, Visible(), 0.0)
    scales = [float((weight[0, 0, 0, 0] / weight[0, 0, 0, 1]).log()) for weight in (weight_BHQM, fast_weight_BHQM)]
    return max(scales, key=lambda scale: abs(scale - d_k**-0.5))  # the less accurate of the two


def _embedding_scale(config: RunConfig) -> float:
    """Measure the factor on a row of ones. Subtracting a row of zeros removes the positions."""
    model = with_model(config, source_vocab_size=4, target_vocab_size=4, pad_id=0, bos_id=0, eos_id=1).model
    embedding = Embedding(replace(model, dropout=0.0))
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.zero_()
        embedding.source_embedding[1] = 1.0
        x_BTD = embedding.source(torch.tensor([[1], [0]]))
    return float((x_BTD[0] - x_BTD[1]).mean())


def _short(x: float) -> float:
    return float(f"{x:.6g}")
