"""The translator that comes with the package, from Tatoeba's German and English (CC-BY 2.0), in three commands:

    python -m experiments.bundled_model split --data-root FOLDER --work WORK
    transduce train WORK/prepared --out WORK/run ...            (the settings are those of `TRAIN`, and in its card)
    python -m experiments.bundled_model pack --work WORK --run WORK/run

`split` holds out sentences for validation and test: of each only one translation, and nothing in training has the
German or the English of any. `pack` halves the weights' precision, scores the result on the test, and puts it into the
package. FOLDER is as `transduce prepare` takes it.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from transduce.data.corpora import read_pairs

N_HELD_OUT = 2_000
VOCABULARY = 8_000
LANGUAGES = ("de", "en")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_split = commands.add_parser("split")
    of_split.add_argument("--data-root", type=Path, required=True)
    of_split.set_defaults(do=split)
    for command in (of_split,):
        command.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    options.do(options)


def split(options: argparse.Namespace) -> None:
    folder = options.data_root / "tatoeba-en-de"
    pairs = list(dict.fromkeys(read_pairs(*(folder / f"all.{language}.xz" for language in LANGUAGES))))
    group_of = groups(pairs)
    ranked = sorted(dict.fromkeys(group_of), key=lambda group: hashlib.blake2b(b"".join(pairs[group])).digest())
    test, valid = set(ranked[:N_HELD_OUT]), set(ranked[N_HELD_OUT : 2 * N_HELD_OUT])
    parts = {
        "train": [pair for pair, group in zip(pairs, group_of, strict=True) if group not in test | valid],
        "valid": [pairs[group] for group in ranked if group in valid],  # a group is named after its first pair
        "test": [pairs[group] for group in ranked if group in test],
    }
    options.work.mkdir(parents=True, exist_ok=True)
    for name, own in parts.items():
        for side, language in enumerate(LANGUAGES):
            (options.work / f"{name}.{language}").write_bytes(b"".join(pair[side] + b"\n" for pair in own))
        print(f"{name}: {len(own):,} pairs")
    files = {name: [str(options.work / f"{name}.{language}") for language in LANGUAGES] for name in parts}
    command = [sys.executable, "-m", "transduce", "prepare", *files["train"], "--valid", *files["valid"]]
    command += ["--vocab-size", str(VOCABULARY), "--out", str(options.work / "prepared")]
    subprocess.run(command, check=True)


def groups(pairs: list[tuple[bytes, bytes]]) -> list[int]:
    """Of each pair the first one that it hangs together with, by the same German or the same English, over any number
    of steps."""
    parent = list(range(len(pairs)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for side in range(len(LANGUAGES)):
        first: dict[bytes, int] = {}
        for i, pair in enumerate(pairs):
            a, b = root(first.setdefault(pair[side], i)), root(i)
            parent[max(a, b)] = min(a, b)
    return [root(i) for i in range(len(pairs))]


if __name__ == "__main__":
    main()
