"""The keywords of a translation that change the search for one call. The command line has a flag for most of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypedDict

from transduce.config import DecodeConfig
from transduce.errors import ConfigError


class SearchKeywords(TypedDict, total=False):
    """None leaves a setting as it is."""

    beam: int | None
    n_best: int | None
    max_extra_tokens: int | None
    sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None


FIELDS = {"beam": "beam_size", "sample": "method"}
"""Fields of `DecodeConfig` that have another name than their keyword."""
SAMPLING = ("temperature", "top_k", "top_p", "seed")


def check_keywords(keywords: Mapping[str, Any]) -> None:
    if unknown := keywords.keys() - SearchKeywords.__annotations__.keys():
        known = ", ".join(SearchKeywords.__annotations__)
        raise TypeError(f"{min(unknown)!r} is not a keyword of a translation: choose from {known}")


def search_settings(
    settings: DecodeConfig, keywords: Mapping[str, Any], spelling: Callable[[str], str] = str
) -> DecodeConfig:
    """`settings` changed by keywords. They may also have the names of their fields in `DecodeConfig`.

    `spelling` says how messages write a keyword: the command line has flags.
    """
    changes = {FIELDS.get(name, name): value for name, value in keywords.items() if value is not None}
    if "method" in changes:
        changes["method"] = {True: "sample", False: "beam"}.get(changes["method"], changes["method"])
    if "beam_size" in changes:
        if changes.get("method") == "sample":
            raise ConfigError(f"{spelling('beam')} and {spelling('sample')} exclude each other: keep one")
        changes["method"] = "beam"
    if changes.get("method", settings.method) == "beam":
        for name in SAMPLING:
            if name in changes:
                raise ConfigError(f"{spelling(name)} has an effect only when sampling: add {spelling('sample=True')}")
        n_best = changes.get("n_best", settings.n_best)
        if "beam_size" not in changes and isinstance(n_best, int):
            changes["beam_size"] = max(n_best, settings.beam_size)
    try:
        return replace(settings, **changes)
    except ConfigError as error:
        keyword_of = {field: keyword for keyword, field in FIELDS.items()}
        message = re.sub(r"decode\.(\w+)", lambda match: spelling(keyword_of.get(match[1], match[1])), str(error))
        raise ConfigError(message) from None
