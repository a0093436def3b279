"""Takes the screenshots of the inspector and of the server's page, with the bundled model.

python -m experiments.screenshots
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transduce import Translator
from transduce.insight.attention import inspect
from transduce.insight.page import to_page

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

SENTENCE = "Tom hat gestern ein neues Auto gekauft, weil das alte kaputt war."
WIDTH = 1180
DOCS = Path(__file__).parent.parent / "docs"
Scheme = Literal["light", "dark"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="a folder")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--only", choices=["inspector", "serve"])
    arguments = parser.parse_args()
    translator = Translator.load(device="cpu")
    for name, take in {"inspector": take_inspector, "serve": take_server}.items():
        if arguments.only in (None, name):
            out = arguments.out / f"{name}.png"
            take(translator, out, arguments.scheme)
            print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


def take_inspector(translator: Translator, out: Path, scheme: Scheme) -> None:
    records = list(inspect(translator, [SENTENCE]))
    with tempfile.TemporaryDirectory() as folder, browser_page(1500, 1.1, scheme) as tab:
        page = Path(folder) / "inspector.html"
        page.write_text(to_page(records, "tatoeba-de-en", "de-en"), encoding="utf-8")
        tab.goto(page.as_uri())
        tab.wait_for_selector("[data-drawn=all]")
        save(tab, out)


def take_server(translator: Translator, out: Path, scheme: Scheme) -> None:
    with running_server(translator) as address, browser_page(990, 1.4, scheme) as tab:
        tab.goto(address)
        tab.locator("#text").fill(SENTENCE)
        tab.locator("#output .word", has_text="broke").click()
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(500)
        save(tab, out)


@contextmanager
def running_server(translator: Translator) -> Iterator[str]:
    from transduce.serving.application import make_app
    from transduce.serving.guard import Access
    from transduce.serving.limits import Limits
    from transduce.serving.server import listen, make_server
    from transduce.serving.service import Service

    service = Service({"model": translator}, Limits())
    server = make_server(make_app(service, Access(), lambda values: None), service)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        service.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            service.batcher.close()


@contextmanager
def browser_page(height: int, scale: float, scheme: Scheme) -> Iterator[Page]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        viewport: ViewportSize = {"width": WIDTH, "height": height}
        yield browser.new_page(viewport=viewport, device_scale_factor=scale, color_scheme=scheme)
        browser.close()


def save(tab: Page, out: Path) -> None:
    from PIL import Image

    tab.screenshot(path=out)
    Image.open(out).convert("RGB").save(out, optimize=True)


if __name__ == "__main__":
    main()
