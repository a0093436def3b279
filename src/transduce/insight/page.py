"""Records of attention as one self-contained HTML file: the page in `web/` with its script, style and data inlined.

The page makes no network requests; a content-security policy in the file enforces it and allows only the one script and
the one style sheet, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from transduce.errors import DataError
from transduce.insight.attention import AttentionRecord, to_document
from transduce.insight.heads import KINDS, MEMORY_PLACES, PLACES
from transduce.translation.result import FLAGS

WEB = Path(__file__).parent.parent / "web"
STYLE_TAG, SCRIPT_TAG = '<link rel="stylesheet" href="style.css">', '<script src="inspector.js"></script>'
CHARSET_TAG, TITLE = '<meta charset="utf-8">', "Attention inspector"
MAX_WEIGHT_BYTES = 200_000_000
"""Attention weights in one page: browsers still open a page of this size."""


def to_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> str:
    n_bytes = sum(weight_LHQM.size * 2 for record in records for weight_LHQM in record.weights.values())
    if n_bytes > MAX_WEIGHT_BYTES:
        size, limit = f"{n_bytes / 1e6:,.0f} MB", f"{MAX_WEIGHT_BYTES / 1e6:,.0f} MB"
        raise DataError(
            f"the page would contain {size} of attention weights, the limit is {limit}: give fewer or shorter sentences"
        )
    html, style, script = (
        (WEB / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "inspector.js")
    )
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = f"{records[0].text[:60]} - {TITLE}" if records else TITLE
    data = _escape_for_script(for_page(records, model, direction))
    replacements = {
        CHARSET_TAG: f'{CHARSET_TAG}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{TITLE}</title>": f"<title>{escape(title)}</title>",
        STYLE_TAG: f"<style>{style}</style>",
        SCRIPT_TAG: f'<script type="application/json" id="records">{data}</script>\n<script>{script}</script>',
    }
    for tag, content in replacements.items():
        assert html.count(tag) == 1, f"index.html must have {tag} once"
        html = html.replace(tag, content)
    return html


def for_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> dict[str, Any]:
    """The argument of Inspector.mount: the document, and display names for kinds, places and flags."""
    places = {kind: MEMORY_PLACES if kind == "memory" else PLACES for kind in KINDS}
    return to_document(records, model, direction) | {"names": {"kinds": KINDS, "places": places, "flags": FLAGS}}


def _escape_for_script(document: dict[str, Any]) -> str:
    """JSON without characters that an HTML parser could take for the end of the script or for a comment."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
