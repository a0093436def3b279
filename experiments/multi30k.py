"""Multi30k, the field's small benchmark: tiny models by `transduce train`, scored on test_2016_flickr, three seeds.

    python -m experiments.multi30k --data DIR --out experiments/results/multi30k_h200.json

DIR holds the corpus as {train,val,test_2016_flickr}[.lc.norm.tok].{en,de}.xz. "tok" is the lower-cased, normalised,
tokenised form of the published figures, scored as it is (tok:none); "raw" is cased text, scored by sacreBLEU's default.
The checkpoint is chosen on val. The result is written after each run, and runs that are in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.passport import passport, write_result
from transduce.data.corpora import read_lines
from transduce.metrics import bleu
from transduce.training.run import LOG, Settled, read_log

FORMS = {"tok": ".lc.norm.tok", "raw": ""}
SETTINGS = [
    # The published figure is of 4+4 layers, 128 wide, dropout 0.3, which is `tiny`. Its rate peaks at 0.005 after 2,000
    # steps of 4,096 tokens; equation 3 alone would peak at 0.002.
    "data.batch_tokens=4096", "train.warmup_steps=2000", "train.rate_factor=2.5", "train.max_steps=8000",
    "train.checkpoint_steps=200", "train.average_last=10", "train.valid_translations=0",
]  # fmt: skip
VOCABULARY = 10_000
BEAM = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--directions", nargs="+", default=["en-de", "de-en"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], help="Settings after ours.")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    options = parser.parse_args()
    result: dict[str, Any] = {"experiment": "multi30k", "runs": []}
    if options.out.exists():
        result = json.loads(options.out.read_text())
    for form in options.forms:
        for direction in options.directions:
            for seed in options.seeds:
                named = {"form": form, "direction": direction, "seed": seed, "settings": [*SETTINGS, *options.set],
                         "vocabulary": options.vocabulary}  # fmt: skip
                if not any(named.items() <= run.items() for run in result["runs"]):
                    result["runs"].append(named | run_one(options, form, direction, seed))
                    result["summary"] = summary(result["runs"])
                    write_result(options.out, result)
                    print(json.dumps(result["summary"]), flush=True)


def run_one(options: argparse.Namespace, form: str, direction: str, seed: int) -> dict[str, Any]:
    """Trains, translates the test set with the command line, and scores."""
    source, target = direction.split("-")

    def files(part: str) -> list[str]:
        return [str(options.data / f"{part}{FORMS[form]}.{language}.xz") for language in (source, target)]

    with tempfile.TemporaryDirectory() as place:
        run, translated = Path(place) / "run", Path(place) / "out"
        began = time.monotonic()
        command = [sys.executable, "-m", "transduce", "train", *files("train"), "--valid", *files("val")]
        command += ["--out", str(run), "--size", "tiny", "--vocab-size", str(options.vocabulary)]
        for setting in [*SETTINGS, *options.set, f"train.seed={seed}"]:
            command += ["--set", setting]
        subprocess.run(command, check=True)
        minutes = (time.monotonic() - began) / 60
        command = [sys.executable, "-m", "transduce", "translate", str(run), files("test_2016_flickr")[0]]
        with translated.open("wb") as out:
            subprocess.run([*command, "--beam", str(BEAM), "--quiet"], check=True, stdout=out)
        hypotheses = translated.read_text(encoding="utf-8").split("\n")[:-1]
        references = [line.decode() for line in read_lines(files("test_2016_flickr")[1])]
        settled = Settled.from_json((run / "run.json").read_text())
        ended = json.loads((run / "result.json").read_text())
        speed = [event["tokens_per_second"] for event in read_log(run / LOG) if event["event"] == "step"]
    score = bleu(hypotheses, references, tokenise="none" if form == "tok" else "13a")
    return {
        "bleu": score.value, "signature": score.signature, "minutes": minutes, "taken": ended["taken"],
        "valid_loss": min(one["loss"] for one in ended["candidates"].values()),
        "tokens_per_second": statistics.median(speed), **passport(settled.config, settled.choices.device),
    }  # fmt: skip


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dict.fromkeys(f"{run['form']} {run['direction']}" for run in runs):
        scores = [run["bleu"] for run in runs if f"{run['form']} {run['direction']}" == name]
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        found[name] = {"mean": statistics.mean(scores), "spread": spread, "scores": scores}
    return found


if __name__ == "__main__":
    main()
