"""A browser for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        # CI sets this variable, because a skipped test would hide a missing browser.
        assert "TRANSDUCE_NEED_BROWSER" not in os.environ, "chromium is missing: apt-get install chromium"
        pytest.skip("Chromium is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def share(text: str) -> float:
    return float(text.replace("\u00a0", " ").removesuffix(" %")) / 100 if text else 0.0
