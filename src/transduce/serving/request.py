"""Read the fields of a translation request from JSON or a form, as LibreTranslate defines them.

Each error of a request has a message of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

from transduce.serving.limits import Limits, Refusal

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_FIELDS = 50
"""Fields of a form in addition to the texts, each of which is a field q."""
AUTO = "auto"


class TranslationRequest(NamedTuple):
    texts: list[str]
    is_list: bool
    """Whether q is a list. The response then has lists too."""
    source: str
    target: str
    n_alternatives: int
    beam: int | None


async def read_fields(request: Request, body: bytes, limits: Limits) -> dict[str, Any]:
    """Return the fields of a body that was read already. An empty body has none."""
    if not body:
        return {}
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json":
        return _read_json(body)
    if content_type == "application/x-www-form-urlencoded":
        return _read_form(body, limits)
    if content_type == "multipart/form-data":
        return await _read_multipart(request, limits)
    raise Refusal(415, "send application/json, application/x-www-form-urlencoded or multipart/form-data")


def _read_json(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "the body must be a JSON object")
    return fields


def _read_form(body: bytes, limits: Limits) -> dict[str, Any]:
    try:
        fields = parse_qs(
            body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS + limits.texts
        )
    except ValueError:
        raise Refusal(400, "the body is not a form in UTF-8") from None
    return {name: _one_or_list(values) for name, values in fields.items()}


async def _read_multipart(request: Request, limits: Limits) -> dict[str, Any]:
    from starlette.formparsers import MultiPartException

    try:
        form = await request.form(max_files=0, max_fields=MAX_FIELDS + limits.texts, max_part_size=limits.body_bytes)
    except (MultiPartException, ValueError, LookupError):  # a file, no boundary, not UTF-8, an unknown charset
        raise Refusal(400, "the form cannot be read: send texts as parts in UTF-8, and no files") from None
    return {name: _one_or_list([str(value) for value in form.getlist(name)]) for name in form}


def _one_or_list(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def read_request(fields: dict[str, Any], limits: Limits) -> TranslationRequest:
    q = fields.get("q")
    if q is None:
        raise Refusal(400, "Invalid request: missing q parameter")
    texts = q if isinstance(q, list) else [q]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(400, "q must be a text, or a list of texts")
    if len(texts) > limits.texts:
        raise Refusal(413, f"q has {len(texts)} texts, the limit is {limits.texts}")
    if (n := sum(map(len, texts))) > limits.characters:
        raise Refusal(413, f"q has {n} characters, the limit is {limits.characters}")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise Refusal(400, "q has half a character (a lone surrogate)")
    if (text_format := fields.get("format", "text")) != "text":
        fault = "format html is not supported" if text_format == "html" else "unknown format"
        raise Refusal(400, f"{fault}: send plain text as format text")
    n_alternatives = _whole_number(fields, "alternatives", 0, limits.alternatives)
    beam = _whole_number(fields, "beam", 1, limits.beam) if fields.get("beam") not in (None, "") else None
    if beam is not None and beam <= n_alternatives:
        raise Refusal(422, f"beam is {beam}, must be above alternatives, {n_alternatives}")
    source, target = (_language(fields, name) for name in ("source", "target"))
    return TranslationRequest(texts, isinstance(q, list), source, target, n_alternatives, beam)


def _language(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"Invalid request: missing {name} parameter")
    return value


def _whole_number(fields: dict[str, Any], name: str, minimum: int, maximum: int) -> int:
    """Return the value of the field, or the minimum if the field is missing."""
    value = fields.get(name)
    if value in (None, ""):
        return minimum
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not minimum <= value <= maximum:
        raise Refusal(422, f"{name} must be a whole number from {minimum} to {maximum}")
    return value


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
