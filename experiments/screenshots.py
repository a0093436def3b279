"""The picture of the inspector in the README, by the model that comes along: python -m experiments.screenshots"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from transduce import Translator
from transduce.insight.attention import inspect
from transduce.insight.page import to_page

SENTENCE = "Tom hat gestern ein neues Auto gekauft, weil das alte kaputt war."
OUT = Path(__file__).parent.parent / "docs" / "inspector.png"
WIDTH, HEIGHT, SCALE = 1180, 1410, 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    arguments = parser.parse_args()
    records = list(inspect(Translator.load(device="cpu"), [SENTENCE]))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "inspector.html"
        page.write_text(to_page(records, "tatoeba-de-en", "de-en"), encoding="utf-8")
        photograph(page, arguments.out, arguments.scheme)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1000:.0f} kB")


def photograph(page: Path, out: Path, scheme: str) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            device_scale_factor=SCALE,
            color_scheme="dark" if scheme == "dark" else "light",
        )
        tab.goto(page.as_uri())
        tab.wait_for_selector("[data-drawn=all]")
        tab.screenshot(path=out)
        browser.close()
    Image.open(out).convert("RGB").save(out, optimize=True)


if __name__ == "__main__":
    main()
