"""The page at /: a fixed list of files. The path of a request is never used as a path in the file system."""

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
    "/api.js": ("api.js", JS),
    "/words.js": ("words.js", JS),
    "/manual.js": ("manual.js", JS),
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
"""The content-security policy. With the last two lines, turning text into HTML or script raises an error."""


class File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def read(path: str) -> File:
    name, content_type = FILES[path]
    content = (FOLDER / name).read_bytes()
    headers = {
        "content-type": content_type if content_type.startswith("image/") else f"{content_type}; charset=utf-8",
        "content-security-policy": POLICY,
        # Browsers revalidate each time, so a page never loads the script of another version.
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return File(content, headers)


def add_page(app: "FastAPI") -> None:
    from starlette.requests import Request
    from starlette.responses import Response

    async def respond(file: File, request: Request) -> Response:
        cached_tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.headers["etag"] in cached_tags or "*" in cached_tags:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    for path in FILES:
        app.router.add_route(path, partial(respond, read(path)), methods=["GET", "HEAD"])
