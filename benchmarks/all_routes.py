"""The server without its direct routes, for comparison: every request passes through FastAPI.

    python -m benchmarks.all_routes float32 2

Like `transduce serve --port 0`, it prints its address once it is ready.
"""

from __future__ import annotations

import sys
from typing import cast

from transduce import Translator
from transduce.engines.layers import Precision
from transduce.runtime import configure
from transduce.serving.guard import Access
from transduce.serving.limits import Limits
from transduce.serving.server import serve
from transduce.serving.service import Service


def main(precision: str, n_threads: str, *limits: str) -> None:
    configure("cpu", int(n_threads))
    translator = Translator.load(device="cpu", precision=cast(Precision, precision))
    service = Service({"model": translator}, Limits().changed(limits), n_workers=int(n_threads))
    serve(service, Access(), "127.0.0.1", 0, quiet=True, with_direct_routes=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
