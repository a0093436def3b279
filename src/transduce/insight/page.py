"""A page of `web/` as one self-contained HTML file, with its styles, script and data inlined: records of attention.

The file makes no network requests; a content-security policy in it enforces this and allows only its own scripts and
style sheets, by their hashes. `self_contained` makes such a file of any page; the training report uses it too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from transduce.errors import DataError
from transduce.insight.attention import AttentionRecord, to_document
from transduce.insight.heads import KINDS, MEANINGS, RULE, names_of_places
from transduce.translation.result import FLAGS

WEB = Path(__file__).parent.parent / "web"
CHARSET_TAG, TITLE_TAG = '<meta charset="utf-8">', re.compile("<title>[^<]*</title>")
STYLE_TAG = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
SCRIPT_TAG = re.compile(r'<script src="([\w.]+)"></script>')
TITLE = "Attention inspector"
MAX_WEIGHT_BYTES = 200_000_000
"""Attention weights in one page: browsers still open a page of this size."""


def to_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> str:
    n_bytes = sum(weight_LHQM.size * 2 for record in records for weight_LHQM in record.weights.values())
    if n_bytes > MAX_WEIGHT_BYTES:
        size, limit = f"{n_bytes / 1e6:,.0f} MB", f"{MAX_WEIGHT_BYTES / 1e6:,.0f} MB"
        raise DataError(
            f"the page would contain {size} of attention weights, the limit is {limit}: give fewer or shorter sentences"
        )
    title = f"{records[0].text[:60]} - {TITLE}" if records else TITLE
    return self_contained("index.html", title, "records", for_page(records, model, direction))


def self_contained(name: str, title: str, data_id: str, data: Mapping[str, Any]) -> str:
    """The page `name` of `web/` as one file. Its scripts find the data as JSON in the element with the id `data_id`."""
    html = (WEB / name).read_text(encoding="utf-8")
    styles, scripts = (
        {match[0]: (WEB / match[1]).read_text(encoding="utf-8") for match in tag.finditer(html)}
        for tag in (STYLE_TAG, SCRIPT_TAG)
    )
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts.values()))}",
            f"style-src {' '.join(map(_hash, styles.values()))}",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    (title_tag,) = TITLE_TAG.findall(html)
    replacements = {
        CHARSET_TAG: f'{CHARSET_TAG}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        title_tag: f"<title>{escape(title)}</title>",
        **{tag: f"<style>{style}</style>" for tag, style in styles.items()},
        **{tag: f"<script>{script}</script>" for tag, script in scripts.items()},
    }
    first_script = next(iter(scripts))
    data_script = f'<script type="application/json" id="{data_id}">{_escape_for_script(data)}</script>'
    replacements[first_script] = f"{data_script}\n{replacements[first_script]}"
    for tag, content in replacements.items():
        assert html.count(tag) == 1, f"{name} must have {tag} once"
        html = html.replace(tag, content)
    return html


def for_page(records: Sequence[AttentionRecord], model: str = "", direction: str = "") -> dict[str, Any]:
    """The argument of Inspector.mount: the document, and the texts that the page shows for it.

    These are the names of kinds and places, and what flags and the labels of heads mean.
    """
    places = {kind: names_of_places(kind) for kind in KINDS}
    names = {"kinds": KINDS, "places": places, "flags": FLAGS, "rule": RULE, "meanings": MEANINGS}
    return to_document(records, model, direction) | {"names": names}


def _escape_for_script(document: Mapping[str, Any]) -> str:
    """JSON without characters that an HTML parser could take for the end of the script or for a comment. NaN and
    infinity, which JSON does not have, are refused."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
