"""The error rate of word alignment against manual alignments: the NAACL 2003 Hansards, French and English.

python -m experiments.alignment_error --run RUN --data FOLDER --out experiments/results/alignment_error_hansards.json

FOLDER holds test.en, test.fr and test.gold, compressed or not. The script scores the heads that the model folder
names, and also every layer and every single head. The comparison shows how good a choice without gold alignments was.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch

from experiments.passport import passport, write_result
from transduce.data.corpora import find_packed, read_lines
from transduce.translation.alignment import Link, error_rate, lexical_links, memory_attention, word_links, words_of
from transduce.translation.translator import Translator

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a run trained from French to English")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    translator = Translator.load(options.run, device=options.device)
    french, english, gold = (read(options.data / f"test.{name}") for name in ("fr", "en", "gold"))
    result = measure(translator, french, english, gold)
    print({name: value for name, value in result.items() if name != "heads"})
    if options.out:
        write_result(options.out, result | passport(translator.config, options.device))


def read(path: Path) -> list[str]:
    file = path if path.exists() else find_packed(path, "the NAACL 2003 shared task on word alignment")
    return [line.decode() for line in read_lines(file)]


def parse_gold(line: str) -> tuple[set[Link], set[Link]]:
    """Sure and possible links as (French, English), counted from 0. The file has (English, French), counted from 1."""
    links: dict[str, set[Link]] = {"-": set(), "p": set()}
    for english, kind, french in re.findall(r"(\d+)([-p])(\d+)", line):
        links[kind].add((int(french) - 1, int(english) - 1))
    return links["-"], links["p"]


def measure(translator: Translator, french: list[str], english: list[str], gold: list[str]) -> dict[str, Any]:
    pairs = list(zip(translator.subwords.encode(french), translator.subwords.encode(english), strict=True))
    words = [[words_of(translator.subwords.pieces(side)) for side in pair] for pair in pairs]
    sure, possible = zip(*map(parse_gold, gold), strict=True)
    n_layers, n_heads = translator.config.model.n_decoder_layers, translator.config.model.n_heads
    candidates: set[tuple[int, int, tuple[int, ...]]] = {
        (layer, shift, (h,)) for layer in range(n_layers) for shift in (0, 1) for h in range(n_heads)
    }
    candidates |= {(layer, shift, tuple(range(n_heads))) for layer in range(n_layers) for shift in (0, 1)}
    if (chosen := translator.heads) is not None:
        candidates.add((chosen.layer, chosen.shift, chosen.heads))
    links_by_candidate: dict[Any, list[set[Link]]] = {candidate: [] for candidate in candidates}
    for first in range(0, len(pairs), BATCH):
        batch = pairs[first : first + BATCH]
        with torch.no_grad():
            weight_LBHTS = memory_attention(translator.model, batch, translator.device).float().cpu()
        for b, (source, target) in enumerate(batch):
            source_words, target_words = words[first + b]
            for layer, shift, heads in candidates:
                weight_TS = weight_LBHTS[layer, b, list(heads)].mean(0)[shift:][: len(target), : len(source) + 1]
                links_by_candidate[layer, shift, heads].append(set(word_links(weight_TS, source_words, target_words)))
    errors = {candidate: error_rate(links, sure, possible) for candidate, links in links_by_candidate.items()}
    best = min(errors, key=lambda candidate: errors[candidate])
    lexical = [
        {(s[i], t[j]) for i, j in links if s[i] is not None and t[j] is not None}
        for links, (s, t) in zip(lexical_links(pairs), words, strict=True)
    ]
    return {
        "n_sentences": len(pairs),
        "chosen": chosen and {"layer": chosen.layer, "shift": chosen.shift, "heads": chosen.heads},
        "error_rate": chosen and errors[chosen.layer, chosen.shift, chosen.heads],
        "best_by_gold": {"layer": best[0], "shift": best[1], "heads": best[2], "error_rate": errors[best]},
        "lexical_links_of_these_sentences_alone": error_rate(lexical, sure, possible),  # type: ignore[arg-type]
        "heads": [
            {"layer": layer, "shift": shift, "heads": heads, "error_rate": errors[layer, shift, heads]}
            for layer, shift, heads in sorted(errors)
        ],
    }


if __name__ == "__main__":
    main()
