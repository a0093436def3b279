"""Shows, without a GPU, that the written passes are still the program that `gpu_passes` measured.

    git archive COMMIT src | tar -x -C OLD
    python -m benchmarks.same_passes OLD/src benchmarks/results/gpu_passes_h200.json

The result names the hash of the sources that it covers, and other names or comments change that hash. So this program
compares the measured sources with the present ones: the bits of loss and gradients, by Triton's interpreter and with
dropout, and the machine code of every kernel for an H200, with the constants and options of its launches. If all are
equal, it writes the present hash into the result, beside the measured one. Otherwise it exits with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "learned positions": {"positions": "learned", "max_positions": 71},
    "window": {"attention_window": 6},
    "not tied": {"tied_embeddings": "none", "target_vocab_size": 43},
    "heads of 16 and 32": {"d_k": 16, "d_v": 32},
    "width not a power of two": {"d_model": 38, "d_ff": 23},
}
LENGTHS = ((3, 5), (9, 2), (1, 1), (70, 13), (4, 67))
"""Source and target tokens of each sentence. Some sentences need two tiles."""
MEASURED_NAMES = {"cuda": "transduce.fast.gpu", "kernels": "transduce.fast.kernels"}
"""Where the sources of the last measurement have the modules of `transduce.training.passes`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="The folder src of the commit that was measured.")
    parser.add_argument("result", type=Path, help="The result of gpu_passes. It is changed if the programs are equal.")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--part", choices=("bits", "code"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        is_code = options.part == "code"
        print(json.dumps(code_of(json.loads(sys.stdin.read())) if is_code else bits_and_launches(options.cases)))
        return
    from experiments.passport import write_result

    result = json.loads(options.result.read_text(encoding="utf-8"))
    measured = result.get("carried_over", {}).get("measured", result["covers"])
    if (other := measured_hash(options.measured)) != measured:
        sys.exit(f"{options.measured} has the hash {other}, but {measured} was measured")
    programs = [program_of(source.resolve(), options.cases) for source in (options.measured, ROOT / "src")]
    for name in programs[0]:
        if programs[0][name] != programs[1][name]:
            sys.exit(f"not the same: {name}: run python -m benchmarks.gpu_passes on a GPU")
    code = programs[0]["code"]
    shown = {"cases": options.cases, "launches": len(code), "distinct_machine_codes": len(set(code))}
    result["covers"] = measured_hash(ROOT / "src")
    result["carried_over"] = {"measured": measured, "by": "benchmarks.same_passes", "compared": shown}
    write_result(options.result, result)
    print(f"the same: {shown}")


def measured_hash(source: Path) -> str:
    """The hash of the files that gpu_passes covers, in a folder src of that time or of today."""
    package = source / "transduce"
    patterns, not_on_a_gpu = ["training/passes/*.py", "model.py"], "training/passes/cpu.py"
    if (package / "fast").exists():
        patterns, not_on_a_gpu = ["fast/*.py", "training/passes.py", "model.py"], "fast/cpu.py"
    paths = {path for pattern in patterns for path in package.glob(pattern)} - {package / not_on_a_gpu}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def program_of(source: Path, cases: list[str]) -> dict[str, Any]:
    """The bits, launches and machine code of the sources in this folder."""

    def run(part: str, text: str = "") -> Any:
        environment = os.environ | {"PYTHONPATH": f"{source}:{ROOT}", "TRITON_DISABLE_LINE_INFO": "1"}
        environment["TRITON_INTERPRET"] = "1" if part == "bits" else "0"
        command = [sys.executable, "-m", "benchmarks.same_passes", ".", ".", "--part", part, "--cases", *cases]
        return json.loads(
            subprocess.run(
                command, input=text, env=environment, cwd="/", stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        )

    program = run("bits")
    return {**program, "code": run("code", json.dumps(program["launches"]))}


def module_of(name: str) -> Any:
    try:
        return importlib.import_module(f"transduce.training.passes.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(MEASURED_NAMES[name])


# Loss and gradients, by the interpreter


def bits_and_launches(cases: list[str]) -> dict[str, Any]:
    launches: dict[str, None] = {}
    record_launches(lambda launch: launches.setdefault(json.dumps(launch)))
    bits = {f"{name}, {dtype}": bits_of(CASES[name], dtype) for name in cases for dtype in ("float32", "bfloat16")}
    return {"bits": bits, "launches": [json.loads(launch) for launch in launches]}


def bits_of(changes: dict[str, Any], dtype: str) -> str:
    """The hash of loss and gradients. Written for the sources of today and for those that were measured."""
    import torch

    from transduce import ModelConfig, Transformer
    from transduce.training import passes

    old = not hasattr(passes, "__path__")  # one module, before it was a folder
    layout = importlib.import_module("transduce.fast.layout" if old else "transduce.training.passes.layout")
    written = passes if old else importlib.import_module("transduce.training.passes.written")
    sizes = {
        "source_vocab_size": 37,
        "target_vocab_size": 37,
        "d_model": 22,
        "d_ff": 13,
        "n_heads": 3,
        "d_k": 16,
        "d_v": 16,
    }
    config = ModelConfig(**{**sizes, "n_encoder_layers": 1, "n_decoder_layers": 2, "dropout": 0.3} | changes)
    torch.manual_seed(1)
    model = Transformer(config).train()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
        p.grad = torch.zeros_like(p)
    shape = layout.Shape(101, 97)
    ints = layout.pack([[ids.numpy() for ids in batch_of(config)]], shape, [7], config)
    written_pass = written.WrittenPass(model, 71, getattr(torch, dtype), module_of("cuda"))
    total = written_pass.add_gradients(layout.unpack(torch.from_numpy(ints), shape), 0.1, torch.tensor([0.25]))
    assert torch.isfinite(total), "equal NaNs would show nothing"
    digest = hashlib.sha256(total.detach().numpy().tobytes())
    for p in model.parameters():
        assert p.grad is not None
        digest.update(p.grad.numpy().tobytes())
    return digest.hexdigest()


def batch_of(config: Any) -> tuple[Any, ...]:
    import torch
    from torch.nn.functional import pad
    from torch.nn.utils.rnn import pad_sequence

    torch.manual_seed(3)
    sources, targets = ([torch.randint(3, 37, (lengths[side],)) for lengths in LENGTHS] for side in (0, 1))
    shifted = [pad(target[:-1], (1, 0), value=config.bos_id) for target in targets]
    return tuple(
        pad_sequence(rows, batch_first=True, padding_value=config.pad_id) for rows in (sources, shifted, targets)
    )


# Machine code, by the compiler


def record_launches(keep: Callable[[Any], Any]) -> None:
    """Has each launch of the interpreter reported: the kernel's place in its module, its arguments and options."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        signature = inspect.signature(self.fn)
        options = {name: value for name, value in named.items() if name not in signature.parameters}
        bound = signature.bind(*arguments, **{name: named[name] for name in named.keys() - options.keys()})
        bound.apply_defaults()
        values = [type_of(value) for value in bound.arguments.values()]
        keep({"kernel": kernels().index(self.fn.__name__), "arguments": values, "options": options})
        return run(self, *arguments, grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = recorded


def kernels() -> list[str]:
    """The names of the kernels, in the order of the module."""
    return re.findall(r"^def (\w+)\(", inspect.getsource(module_of("kernels")), re.MULTILINE)


def type_of(value: Any) -> dict[str, Any]:
    """What the compiler needs to know of an argument."""
    if hasattr(value, "dtype"):
        short = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "int64": "i64", "bool": "i1", "uint8": "u8"}
        return {"type": "*" + short[str(value.dtype).removeprefix("torch.")]}
    return {"type": {int: "i32", float: "fp32"}.get(type(value), "constexpr"), "value": value}


def code_of(launches: list[dict[str, Any]]) -> list[str]:
    """A hash of each launch's machine code for an H200, without the kernel's name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, hashes = module_of("kernels"), []
    for launch in launches:
        name = kernels()[launch["kernel"]]
        kernel = getattr(module, name)
        signature, constants, attributes = {}, {}, {}
        for i, (parameter, argument) in enumerate(zip(kernel.params, launch["arguments"], strict=True)):
            is_constant = parameter.is_constexpr or argument["type"] == "constexpr"
            signature[parameter.name] = "constexpr" if is_constant else argument["type"]
            if is_constant:
                constants[i,] = argument["value"]
            elif argument["type"].startswith("*"):
                attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch["options"])
        hashes.append(hashlib.sha256(compiled.asm["ptx"].replace(name, "kernel").encode()).hexdigest()[:16])
    return hashes


if __name__ == "__main__":
    main()
