"""The OpenAPI document as a page to read, at /docs: plain HTML, of this server alone."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from transduce.serving.page import MANUAL, POLICY

if TYPE_CHECKING:
    from fastapi import FastAPI

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>transduce: the API</title>
<link rel="icon" href="icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="style.css">
<link rel="stylesheet" href="translate.css">
</head>
<body>
<header class="translator bar">
  <h1><img src="icon.svg" alt="" width="28" height="28">transduce: the API</h1>
  <p class="note">Translation as <a href="https://github.com/LibreTranslate/LibreTranslate">LibreTranslate</a>'s,
  and more. For programs: <a href="openapi.json">openapi.json</a>. The page to translate with: <a href="./">/</a></p>
</header>
<main>
<div class="translator manual">
"""
FOOT = "</div>\n</main>\n</body>\n</html>\n"


def add_manual(app: "FastAPI") -> None:
    """After all other routes, of which it tells."""
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

    page = manual(app.openapi())

    async def answer(request: Request) -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    app.router.add_route(MANUAL, answer, methods=["GET", "HEAD"])


def manual(document: dict[str, Any]) -> str:
    routes = [
        line
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        for line in _route(path, method, route)
    ]
    return HEAD + "\n".join(routes) + "\n" + FOOT


def _route(path: str, method: str, route: dict[str, Any]) -> Iterator[str]:
    yield f'<section class="card" aria-label="{escape(path)}">'
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(route['summary'])}</p>"
    if "requestBody" in route:
        forms = route["requestBody"]["content"]
        yield f'<p class="note">As {escape(" or ".join(forms))}:</p>'
        yield from _fields(next(iter(forms.values()))["schema"])
    yield "<h3>Answers</h3>\n<dl>"
    for code, answer in route["responses"].items():
        yield f"<dt><code>{escape(code)}</code></dt><dd>{escape(answer['description'])}</dd>"
    yield "</dl>\n</section>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield "<dl>"
    for name, field in schema["properties"].items():
        needed = ["needed"] if name in schema.get("required", ()) else []
        default = [f"default {field['default']}"] if "default" in field else []
        said = ", ".join([_kind(field), *needed, *default])
        description = f" {field['description']}" if "description" in field else ""
        yield f"<dt><code>{escape(name)}</code></dt>"
        yield f'<dd><span class="note">{escape(said)}</span>{escape(description)}</dd>'
    yield "</dl>"


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "oneOf" in schema:
        return " or ".join(map(_kind, schema["oneOf"]))
    if schema["type"] == "array":
        return f"a list of {_kind(schema['items'])}s"
    return str(schema["type"])
