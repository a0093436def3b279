"""transduce serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transduce.cli.model import load_translator
from transduce.cli.options import BatchSize, Beam, Device, Precision, Settings, Threads, refuse_together
from transduce.extras import missing


def serve_command(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL", help="Model folders or run folders. Default: the bundled model."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port.")] = 5000,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token that clients must send.")] = None,
    without_token: Annotated[
        bool, typer.Option("--without-token", help="Allow clients without a token on an address other than loopback.")
    ] = False,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change one limit, such as characters. Repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another host name of this server. Repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Allow pages of this origin to call the API. Repeatable.")
    ] = None,
    trust_proxy: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="Trust this proxy's X-Forwarded-For. Repeatable.")
    ] = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Write texts and translations to the log.")] = False,
    alone: Annotated[
        bool, typer.Option("--alone", help="Give each request its own batch: slower, for comparison.")
    ] = False,
    beam: Beam = None,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Precision = "float32",
    threads: Threads = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not log each request.")] = False,
) -> None:
    """Serve translations over HTTP, with LibreTranslate's API and a web page.

    On Ctrl-C or SIGTERM the server answers the requests that it has accepted, and exits.

    Examples:

      transduce serve

      transduce serve run-de-en run-en-de --port 8080 --dtype int8

      transduce serve run --host 0.0.0.0 --token-file token --limit characters=20000
    """
    try:
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing("transduce serve", str(error.name), "serve") from None
    import torch

    from transduce.model_folder.format import BUNDLED
    from transduce.serving.guard import Access
    from transduce.serving.limits import Limits
    from transduce.serving.server import check_address, read_token, serve
    from transduce.serving.service import Service

    limits = Limits().changed(limit or [])
    refuse_together({"--token-file": token_file, "--without-token": without_token or None})
    token = read_token(token_file) if token_file is not None else None
    check_address(host, token, without_token=without_token)
    flags = {"beam": beam}
    translators = {
        str(path): load_translator(
            path, flags, settings or [], device, precision, threads, batch_size, reports_engine=False
        )
        for path in models or [BUNDLED]
    }
    is_cpu = all(translator.device.type == "cpu" for translator in translators.values())
    service = Service(translators, limits, n_workers=torch.get_num_threads() if is_cpu else 1, alone=alone)
    access = Access(token, tuple(allow_host or ()), tuple(allow_origin or ()))
    serve(service, access, host, port, proxies=trust_proxy or [], log_text=log_text, quiet=quiet)
