"""Writes the package's registry of corpora, with line counts and checksums, and the bundled part of Tatoeba.

python -m experiments.name_corpora --data-root FOLDER     # the same folder as for `transduce prepare`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

from transduce import DataConfig
from transduce.data.cleaning import Tally, clean
from transduce.data.corpora import BUNDLED, BUNDLED_NAME, REGISTRY, read_lines, read_pairs

N_BUNDLED = 40_000

FACTS: dict[str, dict[str, Any]] = {
    BUNDLED_NAME: {
        "about": "short sentences, cleaned: the bundled part of tatoeba-en-de",
        "languages": ["de", "en"],
        "licence": "CC-BY 2.0, attribution: manythings.org/anki and tatoeba.org",
        "from": "https://www.manythings.org/anki/deu-eng.zip",
    },
    "multi30k": {
        "about": "captions of images",
        "languages": ["de", "en", "fr"],
        "files": "multi30k/{split}.{language}",
        "splits": {"train": "train", "valid": "val", "test_2016": "test_2016_flickr", "test_2017": "test_2017_flickr"},
        "licence": "none stated",
        "from": "https://github.com/multi30k/dataset (data/task1/raw)",
    },
    "multi30k-tok": {
        "about": "the same, lower-cased, normalised and tokenised",
        "languages": ["de", "en"],
        "files": "multi30k/{split}.lc.norm.tok.{language}",
        "splits": {"train": "train", "valid": "val", "test_2016": "test_2016_flickr", "test_2017": "test_2017_flickr"},
        "licence": "none stated",
        "from": "https://github.com/multi30k/dataset (data/task1/tok)",
    },
    "tatoeba-en-de": {
        "about": "short sentences, many with several translations (of 2018-05-13)",
        "languages": ["de", "en"],
        "files": "tatoeba-en-de/{split}.{language}",
        "splits": {"train": "all"},
        "licence": "CC-BY 2.0, attribution: manythings.org/anki and tatoeba.org",
        "from": "https://www.manythings.org/anki/deu-eng.zip",
    },
    "tatoeba-en-fr": {
        "about": "short sentences, many with several translations (of 2018-05-13)",
        "languages": ["en", "fr"],
        "files": "tatoeba-en-fr/{split}.{language}",
        "splits": {"train": "all"},
        "licence": "CC-BY 2.0, attribution: manythings.org/anki and tatoeba.org",
        "from": "https://www.manythings.org/anki/fra-eng.zip",
    },
    "europarl": {
        "about": "proceedings of the European Parliament: days of 1999 to 2012",
        "languages": ["de", "en"],
        "files": "europarl-de-en/{split}.{language}",
        "splits": {"train": "train", "valid": "dev", "test": "test"},
        "licence": "free to use with the source named",
        "from": "https://www.statmt.org/europarl/",
    },
    "newstest-de": {
        "about": "news, the paper's development and test sets",
        "languages": ["de", "en"],
        "files": "newstest/de-en/{split}.{language}",
        "splits": {"valid": "newstest2013", "test": "newstest2014"},
        "licence": "none stated",
        "from": "https://www.statmt.org/wmt13/test.tgz and https://www.statmt.org/wmt14/test-full.tgz",
    },
    "newstest-fr": {
        "about": "news, the paper's development and test sets",
        "languages": ["en", "fr"],
        "files": "newstest/fr-en/{split}.{language}",
        "splits": {"valid": "newstest2013", "test": "newstest2014"},
        "licence": "none stated",
        "from": "https://www.statmt.org/wmt13/test.tgz and https://www.statmt.org/wmt14/test-full.tgz",
    },
    "wsj-sample": {
        "about": "trees of the Wall Street Journal, the free sample of the Penn Treebank",
        "files": "trees/nltk_wsj_sample.{kind}",
        "licence": "non-commercial",
        "from": "https://www.nltk.org/nltk_data/ (treebank)",
    },
    "craft": {
        "about": "trees of biomedical articles",
        "files": "trees/craft.{kind}",
        "licence": "CC-BY 3.0",
        "from": "https://github.com/UCDenver-ccp/CRAFT",
    },
    "gum": {
        "about": "trees of many genres, made by a parser from gold tags",
        "files": "trees/gum.{kind}",
        "licence": "CC-BY 4.0 annotations, some texts non-commercial",
        "from": "https://github.com/amir-zeldes/gum",
    },
    "hansards": {
        "about": "Canadian Hansards with gold word alignments (NAACL 2003)",
        "languages": ["en", "fr"],
        "files": "align-en-fr/{split}.{language}",
        "splits": {"test": "test"},
        "licence": "none stated",
        "from": "https://web.eecs.umich.edu/~mihalcea/wpt/",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    root = parser.parse_args().data_root
    FACTS[BUNDLED_NAME]["lines"] = {"train": bundle(root)}
    for name, facts in FACTS.items():
        if name == BUNDLED_NAME:
            continue
        facts["lines"], facts["sha256"] = {}, {}
        files = [
            (split, facts["files"].format(split=file, language=language))
            for split, file in facts.get("splits", {}).items()
            for language in facts["languages"]
        ] or [("trees", facts["files"].format(kind=kind)) for kind in ("mrg", "doc")]
        for split, path in files:
            digest = hashlib.sha256()
            facts["lines"][split] = sum(1 for _ in read_lines(root / f"{path}.xz", digest))
            facts["sha256"][path] = digest.hexdigest()
    REGISTRY.write_text(json.dumps(FACTS, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def bundle(root: Path) -> int:
    """Write the cleaned pairs with the lowest hashes of their English sentence. So the selection is always the same,
    and a sentence comes with all its translations."""
    folder = root / "tatoeba-en-de"
    raw = read_pairs(folder / "all.de.xz", folder / "all.en.xz")
    pairs = [pair for kept in clean(raw, DataConfig(), ("de", "en"), Tally()) for pair in kept.pairs]
    # This must differ from the hash that selects validation pairs, which also takes the lowest values: with the same
    # hash, far too many of these pairs would be validation pairs.
    rank = [hashlib.blake2b(english, person=b"bundle").digest() for _, english in pairs]
    chosen = sorted(sorted(range(len(pairs)), key=lambda i: rank[i])[:N_BUNDLED])
    text = b"".join(b"\t".join(pairs[i]) + b"\n" for i in chosen)
    BUNDLED.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    print(f"{BUNDLED.name}: {len(chosen):,} pairs, {BUNDLED.stat().st_size:,} bytes")
    return len(chosen)


if __name__ == "__main__":
    main()
