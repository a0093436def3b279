"""transduce embed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import load_to_inspect
from transduce.cli.options import Device, Files, Model, Quiet, Threads, To, refuse_together
from transduce.cli.output import write_to_stdout
from transduce.errors import ConfigError, DataError


def embed_command(
    model: Model = None,
    files: Files = None,
    pool: Annotated[
        str, typer.Option(metavar="mean|max|first", help="How the vectors of a sentence's tokens become one.")
    ] = "mean",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Write a NumPy array. Default: JSON lines on stdout.")
    ] = None,
    two: Annotated[
        tuple[str, str] | None, typer.Option("--similarity", help="Print the cosine similarity of two sentences.")
    ] = None,
    to: To = None,
    device: Device = None,
    threads: Threads = None,
    quiet: Quiet = False,
) -> None:
    """Turn sentences into vectors: the encoder's output, pooled over the tokens of each sentence.

    A blank line becomes null, or zeros in a NumPy array.

    Examples:

      transduce embed run in.de > vectors.jsonl

      transduce embed run in.de --pool max --out vectors.npy

      transduce embed --similarity 'Das Auto ist schnell.' 'Der Wagen ist schnell.'
    """
    from transduce.files import check_writable, write_atomically
    from transduce.insight.embed import as_npy, check_pool, embed, embed_stream, similarity
    from transduce.translation.records import Form

    refuse_together({"--similarity": two, "--out": out})
    pooling = check_pool(pool)
    if model is not None and (str(model) == "-" or model.is_file()):  # the first argument is a file
        model, files = None, [str(model), *(files or [])]
    if out is not None:
        if out.suffix != ".npy":
            raise ConfigError(f"--out is {out}, must end in .npy: it is a NumPy array")
        check_writable(out)
    translator = load_to_inspect(model, [], device, threads, quiet)
    if two is not None:
        print(f"{similarity(translator, *two, pooling, to):.4f}")
        return

    def refuse(where: str) -> None:
        raise DataError(f"{where} is not UTF-8: correct the line")

    texts = (record.text for record in Form().read(files or [], refuse))
    if out is not None:
        write_atomically(out, as_npy(embed(translator, list(texts), pooling, to)))
        return
    for vector in embed_stream(translator, texts, pooling, to):
        write_to_stdout(json.dumps(None if vector is None else [float(str(x)) for x in vector]) + "\n")
