"""What a client asks, out of JSON or a form: as LibreTranslate has it, with a word for each thing that is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs

from transduce.serving.limits import Limits, Refusal

if TYPE_CHECKING:
    from starlette.requests import Request

MOST_FIELDS = 50
AUTO = "auto"


class Question(NamedTuple):
    texts: list[str]
    is_list: bool
    """A list is answered with lists."""
    source: str
    target: str
    n_alternatives: int
    beam: int | None


async def read_fields(request: Request, body: bytes, limits: Limits) -> dict[str, Any]:
    """Of a body that has come already, whatever its form. Without a body there are none."""
    if not body:
        return {}
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return _from_json(body)
    if kind == "application/x-www-form-urlencoded":
        return _from_form(body, limits)
    if kind == "multipart/form-data":
        return await _from_parts(request, limits)
    raise Refusal(415, "send application/json, application/x-www-form-urlencoded or multipart/form-data")


def _from_json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON in UTF-8") from None
    if not isinstance(found, dict):
        raise Refusal(400, "the body must be a JSON object")
    return found


def _from_form(body: bytes, limits: Limits) -> dict[str, Any]:
    try:
        found = parse_qs(
            body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_FIELDS + limits.texts
        )
    except ValueError:
        raise Refusal(400, "the body is not a form in UTF-8") from None
    return {name: _one_or_all(values) for name, values in found.items()}


async def _from_parts(request: Request, limits: Limits) -> dict[str, Any]:
    from starlette.formparsers import MultiPartException

    try:
        form = await request.form(max_files=0, max_fields=MOST_FIELDS + limits.texts, max_part_size=limits.body_bytes)
    except (MultiPartException, ValueError, LookupError):  # a file, no boundary, no UTF-8, no such charset
        raise Refusal(400, "the form cannot be read: send texts as parts in UTF-8, and no files") from None
    return {name: _one_or_all([str(value) for value in form.getlist(name)]) for name in form}


def _one_or_all(values: list[str]) -> str | list[str]:
    return values[0] if len(values) == 1 else values


def read_question(fields: dict[str, Any], limits: Limits) -> Question:
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
    if (form := fields.get("format", "text")) != "text":
        said = "format html is not translated here, its tags would not survive" if form == "html" else "unknown format"
        raise Refusal(400, f"{said}: send plain text as format text")
    n_alternatives = _whole(fields, "alternatives", 0, limits.alternatives)
    beam = _whole(fields, "beam", 1, limits.beam) if fields.get("beam") not in (None, "") else None
    if beam is not None and beam <= n_alternatives:
        raise Refusal(422, f"beam is {beam}, must be above alternatives, {n_alternatives}")
    source, target = (_language(fields, name) for name in ("source", "target"))
    return Question(texts, isinstance(q, list), source, target, n_alternatives, beam)


def _language(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"Invalid request: missing {name} parameter")
    return value


def _whole(fields: dict[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if value in (None, ""):
        return least
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise Refusal(422, f"{name} must be a whole number from {least} to {most}")
    return value
