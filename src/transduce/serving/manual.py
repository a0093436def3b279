"""The OpenAPI document as a readable page at /docs: plain HTML without third-party requests."""

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
  <p class="note">Compatible with <a href="https://github.com/LibreTranslate/LibreTranslate">LibreTranslate</a>,
  with more routes. For programs: <a href="openapi.json">openapi.json</a>. <a href="./">Back to the translator</a></p>
</header>
<main>
<div class="translator manual">
"""
FOOT = "</div>\n</main>\n</body>\n</html>\n"


def add_manual(app: "FastAPI") -> None:
    """Add the page at /docs. It lists all other routes, so it must be added after them."""
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

    page = manual(app.openapi())

    async def respond(request: Request) -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": POLICY})

    app.router.add_route(MANUAL, respond, methods=["GET", "HEAD"])


def manual(document: dict[str, Any]) -> str:
    sections = [
        line
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        for line in _route(path, method, route)
    ]
    return HEAD + "\n".join(sections) + "\n" + FOOT


def _route(path: str, method: str, route: dict[str, Any]) -> Iterator[str]:
    yield f'<section class="card" aria-label="{escape(path)}">'
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(route['summary'])}</p>"
    if "requestBody" in route:
        content = route["requestBody"]["content"]
        yield f'<p class="note">The body, as {escape(" or ".join(content))}:</p>'
        yield from _fields(next(iter(content.values()))["schema"])
    yield "<h3>Responses</h3>\n<dl>"
    for code, response in route["responses"].items():
        yield f"<dt><code>{escape(code)}</code></dt><dd>{escape(response['description'])}</dd>"
    yield "</dl>\n</section>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield "<dl>"
    for name, field in schema["properties"].items():
        required = ["required"] if name in schema.get("required", ()) else []
        default = [f"default {field['default']}"] if "default" in field else []
        facts = ", ".join([_type_name(field), *required, *default])
        description = f" {field['description']}" if "description" in field else ""
        yield f"<dt><code>{escape(name)}</code></dt>"
        yield f'<dd><span class="note">{escape(facts)}</span>{escape(description)}</dd>'
    yield "</dl>"


def _type_name(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "oneOf" in schema:
        return " or ".join(map(_type_name, schema["oneOf"]))
    if schema["type"] == "array":
        return f"a list of {_type_name(schema['items'])}s"
    return str(schema["type"])
