"""Records of attention as one file that opens anywhere: the page of `page/` with its script, style and data inside.

Nothing is asked of a network, and a content-security-policy in the file forbids it: the one script that may run, and
the one style, are named by their hashes.
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
from transduce.insight.heads import KINDS, MEMORY_WORDS, WORDS
from transduce.translation.result import FLAGS

PAGE = Path(__file__).parent.parent / "web"
STYLE_TAG, SCRIPT_TAG = '<link rel="stylesheet" href="style.css">', '<script src="inspector.js"></script>'
CHARSET_TAG, TITLE = '<meta charset="utf-8">', "Attention inspector"
MOST_BYTES = 200_000_000
"""Of attention weights in one page: what a browser still opens."""


def to_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> str:
    n_bytes = sum(weight_LHQM.size * 2 for record in records for weight_LHQM in record.weights.values())
    if n_bytes > MOST_BYTES:
        most = f"{n_bytes / 1e6:,.0f} MB of attention weights, at most {MOST_BYTES / 1e6:,.0f}"
        raise DataError(f"the page would hold {most}: give fewer sentences, or shorter ones")
    html, style, script = (
        (PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "style.css", "inspector.js")
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
    data = _inside_script(for_page(records, model, direction))
    replacements = {
        CHARSET_TAG: f'{CHARSET_TAG}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{TITLE}</title>": f"<title>{escape(title)}</title>",
        STYLE_TAG: f"<style>{style}</style>",
        SCRIPT_TAG: f'<script type="application/json" id="records">{data}</script>\n<script>{script}</script>',
    }
    for tag, full in replacements.items():
        assert html.count(tag) == 1, f"index.html must have {tag} once"
        # Cut and joined, not replaced in place: what goes in may hold what is looked for.
        before, _, after = html.partition(tag)
        html = before + full + after
    return html


def for_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> dict[str, Any]:
    """What Inspector.mount takes: the document, and the words that the page has for things."""
    places = {kind: MEMORY_WORDS if kind == "memory" else WORDS for kind in KINDS}
    return to_document(records, model, direction) | {"names": {"kinds": KINDS, "places": places, "flags": FLAGS}}


def _inside_script(document: dict[str, Any]) -> str:
    """JSON that no HTML parser can mistake for the end of the script, or for a comment."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
