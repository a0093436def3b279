"""The OpenAPI document as a page at /docs: what each route does, a command, its response, and a form to try it.

The page is plain HTML with one script of its own. It makes no third-party requests.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from transduce.serving.page import MANUAL, POLICY
from transduce.serving.schema import DESCRIPTIONS, REFUSALS

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
<script src="manual.js" defer></script>
</head>
<body>
<header class="translator bar">
  <h1><img src="icon.svg" alt="" width="28" height="28">transduce: the API</h1>
  <p class="back"><a href="./">Back to the translator</a></p>
</header>
<main>
<div class="translator manual">
"""
INTRODUCTION = """<section class="card" aria-label="Introduction">
<p>Programs use this server with the requests below. /translate and /languages are those of
<a href="https://github.com/LibreTranslate/LibreTranslate">LibreTranslate</a>, the others are added. A POST request
has a body of JSON. The commands can be pasted into a terminal, and the forms send the same requests from this page. For
programs, <a href="openapi.json">openapi.json</a> has the same descriptions.</p>
<nav aria-label="Requests">{links}</nav>
<form id="access" hidden>
  <label for="token">This server requires a token. The commands contain it once it is entered:</label>
  <input id="token" type="password" autocomplete="off" spellcheck="false" required>
  <button type="submit" class="strong">Use token</button>
  <p class="note">The token is stored until this tab is closed.</p>
</form>
</section>
"""
FOOT = "</div>\n</main>\n</body>\n</html>\n"
WIDTH = 64
"""Characters in a line of JSON. A value that does not fit is written on several lines."""
FIXED_FIELDS = {"api_key", "format"}
"""Fields that the forms do not have: the token is entered once, and the format has one value."""


def add_manual(app: FastAPI) -> None:
    """Add the page at /docs, and the descriptions of the other routes, which must be added before."""
    from fastapi.routing import APIRoute
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

    for route in app.routes:
        if isinstance(route, APIRoute):
            route.description = DESCRIPTIONS[route.path]
    document = app.openapi()

    async def respond(request: Request) -> HTMLResponse:
        address = f"{request.url.scheme}://{request.headers['host']}"
        return HTMLResponse(manual(document, address), headers={"content-security-policy": POLICY})

    app.router.add_route(MANUAL, respond, methods=["GET", "HEAD"])


def manual(document: dict[str, Any], address: str) -> str:
    links = "\n".join(f'<a href="#{_id(path)}">{escape(path)}</a>' for path in document["paths"])
    sections = [
        line
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        for line in _route(path, method, route, address)
    ]
    return HEAD + INTRODUCTION.format(links=links) + "\n".join([*sections, *_errors()]) + "\n" + FOOT


def curl(url: str, body: dict[str, Any] | None) -> str:
    """Return a command for a shell: GET without a body, POST with one. `manual.js` writes it for other values."""
    parts = ["curl", "-s", shlex.quote(url)]
    if body is not None:
        parts += ["-H 'content-type: application/json' -d", shlex.quote(json.dumps(body, ensure_ascii=False))]
    return " ".join(parts)


def _route(path: str, method: str, route: dict[str, Any], address: str) -> Iterator[str]:
    content = route["requestBody"]["content"] if "requestBody" in route else {}
    schema = next(iter(content.values()))["schema"] if content else None
    response = route["responses"].get("200", {"description": "", "content": {}})
    example = next(
        (one["schema"]["example"] for one in response["content"].values() if "example" in one["schema"]), None
    )
    yield f'<section class="card route" id="{_id(path)}" aria-label="{escape(path)}">'
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    yield f"<p>{escape(route.get('description', ''))}</p>"
    yield '<div class="request">\n<h3>Command</h3>'
    command = curl(address + path, None if schema is None else schema["example"])
    yield f'<div class="code"><pre class="command">{escape(command)}</pre></div>'
    if schema is not None:
        yield f'<details><summary>Fields of the body</summary>\n<p class="note">As {escape(" or ".join(content))}.</p>'
        yield from _fields(schema)
        yield "</details>"
    yield from _form(path, method, schema)
    yield '</div>\n<div class="response">\n<h3>Response</h3>'
    yield f"<p>{escape(response['description'])}</p>"
    if example is not None:
        yield f'<div class="code"><pre>{escape(pretty(example))}</pre></div>'
    codes = [code for code in route["responses"] if code != "200"]
    links = ", ".join(f'<a href="#error-{escape(code)}">{escape(code)}</a>' for code in codes)
    yield f'<p class="note">The status is 200, or one of these errors: {links}.</p>\n</div>\n</section>'


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


def _form(path: str, method: str, schema: dict[str, Any] | None) -> Iterator[str]:
    """A form with an input for each field. It is hidden until the script shows it."""
    schema = schema or {"properties": {}, "example": {}}
    yield f'<form class="try" data-path="{escape(path)}" data-method="{method.upper()}" hidden>'
    yield "<h3>Try it</h3>"
    for name, field in schema["properties"].items():
        if name not in FIXED_FIELDS:
            entry = _input(name, field, schema["example"].get(name, ""))
            needed = "" if name in schema["required"] else " (optional)"
            yield f"<label><span>{escape(name)}{needed}</span>{entry}</label>"
    yield '<button type="submit" class="strong">Send</button>'
    yield '<p class="note status" role="status"></p>'
    label = f"Response of {escape(path)}"
    yield f'<pre class="result" tabindex="0" role="region" aria-label="{label}" hidden></pre>\n</form>'


def _input(name: str, field: dict[str, Any], value: str) -> str:
    if "enum" in field:
        options = "".join(f"<option>{escape(option)}</option>" for option in field["enum"])
        return f'<select name="{name}">{options}</select>'
    if name == "q":
        return f'<textarea name="q" rows="2" dir="auto" spellcheck="false">{escape(value)}</textarea>'
    if field.get("type") == "integer":
        return f'<input name="{name}" type="number" min="{field["minimum"]}" inputmode="numeric">'
    return f'<input name="{name}" type="text" value="{escape(value)}" autocomplete="off" spellcheck="false">'


def _errors() -> Iterator[str]:
    yield '<section class="card" id="errors" aria-label="Errors">\n<h2>Errors</h2>'
    yield "<p>An error is JSON with one field, <code>error</code>, and one of these status codes:</p>\n<dl>"
    for code, reason in REFUSALS.items():
        yield f'<dt id="error-{code}"><code>{code}</code></dt><dd>{escape(reason)}</dd>'
    yield "</dl>\n</section>"


def pretty(value: Any, indent: str = "") -> str:
    """Return JSON for people: a value on one line if it fits."""
    text = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(text) <= WIDTH or not isinstance(value, dict | list):
        return text
    inner = f"{indent}  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(name)}: {pretty(one, inner)}" for name, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{pretty(one, inner)}" for one in value) + f"\n{indent}]"


def _id(path: str) -> str:
    return escape(path.strip("/"))


def _type_name(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if "oneOf" in schema:
        return " or ".join(map(_type_name, schema["oneOf"]))
    if schema["type"] == "array":
        return f"a list of {_type_name(schema['items'])}s"
    return str(schema["type"])
