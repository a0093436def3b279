"""Published figures of others: the paper's Tables 2 and 3, and the best known scores on our test sets.

This file contains no results of ours, and no other file repeats these figures.
"""

from __future__ import annotations

from typing import NamedTuple

PAPER = "Vaswani et al. 2017, arXiv 1706.03762"


# Table 2, and the costs of section 6.1


class Cost(NamedTuple):
    """One row of Table 2."""

    name: str
    en_de: float | None
    """BLEU on newstest2014: tokenised, and with compounds split for German."""
    en_fr: float | None
    en_de_flops: float | None
    en_fr_flops: float | None


TABLE_2 = [
    Cost("ByteNet", 23.75, None, None, None),
    Cost("Deep-Att + PosUnk", None, 39.2, None, 1.0e20),
    Cost("GNMT + RL", 24.6, 39.92, 2.3e19, 1.4e20),
    Cost("ConvS2S", 25.16, 40.46, 9.6e18, 1.5e20),
    Cost("MoE", 26.03, 40.56, 2.0e19, 1.2e20),
    Cost("Deep-Att + PosUnk, ensemble", None, 40.4, None, 8.0e20),
    Cost("GNMT + RL, ensemble", 26.30, 41.16, 1.8e20, 1.1e21),
    Cost("ConvS2S, ensemble", 26.36, 41.29, 7.7e19, 1.2e21),
    Cost("Transformer (base)", 27.3, 38.1, 3.3e18, 3.3e18),
    Cost("Transformer (big)", 28.4, 41.8, 2.3e19, 2.3e19),
]


class Training(NamedTuple):
    """The training time of a model, from section 5.2."""

    hours: float
    n_gpus: int
    device: str


TRAINING = {"base": Training(12, 8, "P100"), "big": Training(3.5 * 24, 8, "P100")}

EN_FR = {"model.source_vocab_size": 32_000, "model.target_vocab_size": 32_000}
"""Section 5.1: 32,000 word-pieces. En-De has about 37,000 BPE tokens."""
EN_FR_BIG = EN_FR | {"model.dropout": 0.1}
"""Section 6.1: dropout 0.1 instead of 0.3."""


class Capacity(NamedTuple):
    teraflops: float
    """In single precision."""
    source: str


CAPACITIES = {
    "K80": Capacity(2.8, f"{PAPER}, footnote 5"),
    "K40": Capacity(3.7, f"{PAPER}, footnote 5"),
    "M40": Capacity(6.0, f"{PAPER}, footnote 5"),
    "P100": Capacity(9.5, f"{PAPER}, footnote 5"),
    # The paper uses sustained capacities. NVIDIA publishes the peak.
    "NVIDIA H200": Capacity(67.0, "NVIDIA, H200 data sheet: peak FP32 without tensor cores"),
}
"""Keys are the paper's names of devices, and PyTorch's names for devices that the paper does not have."""


# Table 3


class Figures(NamedTuple):
    """Perplexity per word-piece, BLEU and millions of parameters, on newstest2013 En-De without averaging."""

    perplexity: float
    bleu: float
    parameters: float | None
    """None if the paper leaves the cell empty: the value is that of base."""


TABLE_3 = {
    ("base", "base"): Figures(4.92, 25.8, 65),
    ("A", "1 head"): Figures(5.29, 24.9, None),
    ("A", "4 heads"): Figures(5.00, 25.5, None),
    ("A", "16 heads"): Figures(4.91, 25.8, None),
    ("A", "32 heads"): Figures(5.01, 25.4, None),
    ("B", "d_k / 4"): Figures(5.16, 25.1, 58),
    ("B", "d_k / 2"): Figures(5.01, 25.4, 60),
    ("C", "depth / 3"): Figures(6.11, 23.7, 36),
    ("C", "depth x 2/3"): Figures(5.19, 25.3, 50),
    ("C", "depth x 4/3"): Figures(4.88, 25.5, 80),
    ("C", "d_model / 2"): Figures(5.75, 24.5, 28),
    ("C", "d_model x 2"): Figures(4.66, 26.0, 168),
    ("C", "d_ff / 2"): Figures(5.12, 25.4, 53),
    ("C", "d_ff x 2"): Figures(4.75, 26.2, 90),
    ("D", "dropout 0"): Figures(5.77, 24.6, None),
    ("D", "dropout 0.2"): Figures(4.95, 25.5, None),
    ("D", "label smoothing 0"): Figures(4.67, 25.3, None),
    ("D", "label smoothing 0.2"): Figures(5.47, 25.7, None),
    ("E", "learned positions"): Figures(4.92, 25.7, None),
    ("big", "big"): Figures(4.33, 26.4, 213),
}
"""Keys are the paper's row and the change, in words that are correct at any width."""


# Published scores on our test sets


class Best(NamedTuple):
    bleu: float
    system: str
    source: str
    differs: str
    """The differences between its recipe and ours."""


BEST = {
    ("multi30k tok", "test_2016_flickr", "en-de"): Best(
        41.02,
        "fairseq, transformer_tiny, text alone",
        "LividWo/Revisit-MMT, README-baseline",
        "it uses a learning rate of 0.005, batches of 4,096 tokens and 8,000 updates; ours uses 1.2 times equation 3, "
        "batches of 16,384 tokens and the same number of updates; both use beam 5. Related models that also use the "
        "pictures reach 42.0 (wizwand.com)",
    ),
    ("europarl", "newstest2014", "de-en"): Best(
        30.51,
        "JoeyNMT, base, 60.5 M parameters",
        "JoeyNMT, README",
        "it was trained on all of WMT14, which has 15 times as much text and includes news; ours was trained on "
        "301,256 sentences of parliament proceedings only",
    ),
}
"""Keys are corpus, test set and direction. We know no published score for a test set without an entry."""
