"""The page at /: a few files, each by its name. No path from a request ever reaches the file system."""

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fastapi import FastAPI

FOLDER = Path(__file__).parent.parent / "web"
HTML, CSS, JS = "text/html", "text/css", "text/javascript"
FILES = {
    "/": ("translate.html", HTML),
    "/translate.css": ("translate.css", CSS),
    "/translate.js": ("translate.js", JS),
    "/asking.js": ("asking.js", JS),
    "/words.js": ("words.js", JS),
    "/style.css": ("style.css", CSS),
    "/inspector.js": ("inspector.js", JS),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
MANUAL = "/docs"
PATHS = frozenset({*FILES, MANUAL})
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
"""The last two: whatever would turn text into HTML or script throws, whoever wrote it."""


class File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def read(path: str) -> File:
    name, kind = FILES[path]
    content = (FOLDER / name).read_bytes()
    headers = {
        "content-type": kind if kind.startswith("image/") else f"{kind}; charset=utf-8",
        "content-security-policy": POLICY,
        # Asked again each time, and sent again only where it has changed: a page never meets another version's script.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return File(content, headers)


def add_page(app: "FastAPI") -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    async def answer(file: File, request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.headers["etag"] in known or "*" in known:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    for path in FILES:
        app.router.add_route(path, partial(answer, read(path)), methods=["GET", "HEAD"])
