"""What others have printed, as data: the paper's Tables 2 and 3, and the best figures known for the sets we score on.

Nothing here is ours, and no other file repeats it.
"""

from __future__ import annotations

from typing import NamedTuple

PAPER = "Vaswani et al. 2017, arXiv 1706.03762"


# Table 2, and what section 6.1 says of its costs


class Cost(NamedTuple):
    """Of one row of Table 2."""

    name: str
    en_de: float | None
    """BLEU on newstest2014: tokenised, and compounds split for German."""
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
    """Section 5.2: how long a model took."""

    hours: float
    n_gpus: int
    device: str


TRAINING = {"base": Training(12, 8, "P100"), "big": Training(3.5 * 24, 8, "P100")}

EN_FR = {"model.source_vocab_size": 32_000, "model.target_vocab_size": 32_000}
"""Section 5.1: word-pieces, where En-De has about 37,000 of BPE."""
EN_FR_BIG = EN_FR | {"model.dropout": 0.1}
"""Section 6.1: instead of 0.3."""


class Capacity(NamedTuple):
    teraflops: float
    """Of single precision."""
    source: str


CAPACITIES = {
    "K80": Capacity(2.8, f"{PAPER}, footnote 5"),
    "K40": Capacity(3.7, f"{PAPER}, footnote 5"),
    "M40": Capacity(6.0, f"{PAPER}, footnote 5"),
    "P100": Capacity(9.5, f"{PAPER}, footnote 5"),
    # The paper took what a card sustains. NVIDIA prints what it reaches at most.
    "NVIDIA H200": Capacity(67.0, "NVIDIA, H200 data sheet: FP32 outside of tensor cores, at most"),
}
"""By the names that PyTorch gives devices, where they are not the paper's."""


# Table 3


class Figures(NamedTuple):
    """On newstest2013, En-De, without averaging: perplexity of a word-piece, BLEU, millions of parameters."""

    perplexity: float
    bleu: float
    parameters: float | None
    """None where the paper leaves the cell to the row of base."""


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
"""By row and by what it changes, in words that hold at any width."""


# Others, on what we score on


class Best(NamedTuple):
    bleu: float
    system: str
    source: str
    differs: str
    """In what its recipe is not ours."""


BEST = {
    ("multi30k tok", "test_2016_flickr", "en-de"): Best(
        41.02,
        "fairseq, transformer_tiny, text alone",
        "LividWo/Revisit-MMT, README-baseline",
        "a rate of 0.005 in batches of 4,096 tokens, 8,000 updates; ours 1.2 times equation 3 in batches of 16,384, as "
        "many updates; beam 5 in both. With pictures its family reaches 42.0 (wizwand.com)",
    ),
    ("europarl", "newstest2014", "de-en"): Best(
        30.51,
        "JoeyNMT, base, 60.5 M parameters",
        "JoeyNMT, README",
        "trained on all of WMT14, 15 times the text and with news in it; ours on 301,256 sentences of parliament alone",
    ),
}
"""By corpus, test set and direction; a set that is not here has no published figure that we know."""
