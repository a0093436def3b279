"""Translation on a GPU: its speed, and the number of lines that change with the batch size, in float32 and bfloat16.

Compares decoder steps that are recorded as CUDA graphs with plain steps of the model.

python -m benchmarks.gpu_translation --run RUN --source FILE --reference FILE --out benchmarks/results/...json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from experiments.passport import passport, write_result
from transduce.engines.cuda.recorded import RecordedStepper
from transduce.evaluation.evaluate import read_text
from transduce.evaluation.metrics import bleu
from transduce.translation.translator import Translator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-sizes", default="8,64,512", help="Comma-separated batch sizes.")
    parser.add_argument("--lines", type=int, help="Translate only the first N lines. Default: all.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources, references = (read_text(path)[: options.lines] for path in (options.source, options.reference))
    rows: list[dict[str, Any]] = []
    first: dict[str, list[str]] = {}
    for name, by_model in (("float32", True), ("float32", False), ("bfloat16", False)):
        for batch_size in map(int, options.batch_sizes.split(",")):
            dtype: torch.dtype = getattr(torch, name)
            translator = Translator.load(options.run, device=options.device, dtype=dtype, batch_size=batch_size)
            translator.stepper = translator.model if by_model else RecordedStepper(translator.model)
            translator.translate(sources)  # warm-up
            start = time.perf_counter()
            translations = translator.translate(sources)
            seconds = time.perf_counter() - start
            texts = [translation.text for translation in translations]
            score = bleu(texts, references, 0)
            rows.append(
                {
                    "dtype": name,
                    "steps_by": type(translator.stepper).__name__,
                    "batch_size": batch_size,
                    "sentences_per_second": len(texts) / seconds,
                    "changed": sum(a != b for a, b in zip(texts, first.setdefault(name, texts), strict=True)),
                    "changed_and_not_flagged": sum(
                        a.text != b and "close" not in a.flags for a, b in zip(translations, first[name], strict=True)
                    ),
                    "flagged_close": sum("close" in translation.flags for translation in translations),
                    "other_than_float32": sum(a != b for a, b in zip(texts, first["float32"], strict=True)),
                    "bleu": score.value,
                    "signature": score.signature,
                }
            )
            print(rows[-1], flush=True)
    if options.out:
        result = {"lines": len(sources), "beam": translator.settings.beam_size, "rows": rows}
        write_result(options.out, result | passport(translator.config, options.device))


if __name__ == "__main__":
    main()
