"""The saved page in a real browser: it opens from disk, shows what the record says, and runs nothing but itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.browser import share
from tests.support.inspector import HOSTILE, LONG, SENTENCE, record_of
from transduce import Translator
from transduce.insight.attention import AttentionRecord, inspect
from transduce.insight.heads import KINDS
from transduce.insight.page import to_page
from transduce.translation.explain import Token

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

DRAWN = "[data-drawn=all]"
Opened = Callable[..., "Page"]


@pytest.fixture(scope="module")
def records() -> list[AttentionRecord]:
    return list(inspect(Translator.load(device="cpu"), [SENTENCE, "Ich bin müde."]))


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Opens a page of records; at the end, nothing must have gone wrong in it and nothing been asked of a network."""
    wrong: list[str] = []
    contexts = []

    def open_page(records: list[AttentionRecord], **settings: Any) -> Page:
        path = tmp_path / "page.html"
        path.write_text(to_page(records, "tatoeba-de-en", "de-en"), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector(DRAWN)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def chosen(page: Page, what: str) -> str:
    return page.locator(f".{what}-choice input:checked + span").inner_text()


def shares(page: Page, side: str) -> list[float]:
    return [share(text) for text in page.locator(f".lines .{side} .token small").all_text_contents()]


def test_it_opens_from_disk_and_shows_the_translation(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records)
    assert page.locator(".sentence").inner_text() == SENTENCE
    assert page.locator(".translation").inner_text() == records[0].translation
    said = page.locator(".chip small").all_text_contents()
    assert [share(text) for text in said] == pytest.approx([t.probability for t in records[0].tokens], abs=6e-4)
    page.locator(".chip").nth(2).hover()
    others = page.locator(".instead").inner_text()
    for piece, probability in records[0].tokens[2].runners_up:
        assert f"{piece.removeprefix('▁')} {100 * probability:.1f}\u00a0%" in others
    page.get_by_label("Sentence").select_option(index=1)
    assert page.locator(".sentence").inner_text() == "Ich bin müde."
    assert page.evaluate("document.activeElement.tagName") == "SELECT"
    assert page.locator(".lines .left .token").count() == len(records[1].target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_click_shows_the_row_of_a_token_with_the_right_numbers(
    opened: Opened, records: list[AttentionRecord], kind: Any
) -> None:
    page = opened(records)
    page.locator(f'.head[data-at="{kind} 2 3"]').click()
    assert (chosen(page, "layer"), chosen(page, "head")) == ("3", "4")
    weight_QM = records[0].weights[kind][2, 3]
    page.locator(".lines .left .token").nth(4).click()
    page.mouse.move(0, 0)
    assert page.locator(".lines .left .token.active").count() == 1
    assert page.locator(".lines .left .token").nth(4).get_attribute("aria-pressed") == "true"
    np.testing.assert_allclose(shares(page, "right"), weight_QM[4], atol=1e-3)
    best = int(weight_QM[4].argmax())
    text = page.locator(".lines .right .token bdi").nth(best).inner_text()
    assert re.search(
        rf"looks at {re.escape(text)} {100 * weight_QM[4, best]:.1f}", page.locator(".looking").inner_text()
    )
    page.locator(".lines .right .token").nth(1).click()
    page.mouse.move(0, 0)
    np.testing.assert_allclose(shares(page, "left"), weight_QM[:, 1], atol=1e-3)
    page.keyboard.press("Escape")
    assert page.locator(".lines .token.active").count() == 0


def test_the_heat_map_answers_where_the_pointer_is(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records)
    weight_TS = records[0].weights["memory"][0, 0]
    page.locator('.head[data-at="memory 0 0"]').click()
    box = page.locator(".heat").bounding_box()
    assert box is not None
    n_rows, n_columns = weight_TS.shape
    cell = 28
    x, y = (
        box["x"] + box["width"] - 2 - cell * (n_columns - 3 - 0.5),
        box["y"] + box["height"] - 2 - cell * (n_rows - 5 - 0.5),
    )
    page.mouse.move(x, y)
    assert (
        f"here {records[0].source[3].removeprefix('▁')} {100 * weight_TS[5, 3]:.1f}"
        in page.locator(".looking").inner_text()
    )
    page.mouse.click(x, y)
    assert page.locator(".lines .left .token").nth(5).get_attribute("aria-pressed") == "true"


def test_heads_layers_kinds_and_tokens_are_reached_by_keyboard(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records)
    page.keyboard.press("1")
    assert chosen(page, "kind").lower() == "encoder self"
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Shift+ArrowLeft")
    assert (chosen(page, "layer"), chosen(page, "head")) == ("1", "1")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert (chosen(page, "layer"), chosen(page, "head")) == ("2", "2")
    page.keyboard.press("j")
    page.keyboard.press("j")
    np.testing.assert_allclose(shares(page, "right"), records[0].weights["encoder"][1, 1, 1], atol=1e-3)
    page.keyboard.press("k")
    np.testing.assert_allclose(shares(page, "right"), records[0].weights["encoder"][1, 1, 0], atol=1e-3)
    page.locator(".head-choice input:checked").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert chosen(page, "head") == "4", "the buttons answer to arrows too, once for each"
    page.locator(".layer-choice input:checked").focus()
    page.keyboard.press("ArrowLeft")
    assert (chosen(page, "layer"), chosen(page, "head")) == ("1", "4"), "each row of buttons for itself"
    page.keyboard.press("ArrowRight")
    page.locator(".lines .left .token").first.focus()
    page.keyboard.press("ArrowDown")
    np.testing.assert_allclose(shares(page, "right"), records[0].weights["encoder"][1, 3, 1], atol=1e-3)


def test_words_that_belong_together_light_up_together(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records)
    source, target = records[0].words
    word = source.index("Auto")
    page.locator(".sentence .word").nth(word).hover()
    lit = page.locator(".translation .linked").all_text_contents()
    assert lit == [target[t] for s, t in records[0].alignment or () if s == word] == ["car"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_not_blank_and_axe_finds_nothing(
    opened: Opened, records: list[AttentionRecord], scheme: str, tmp_path: Path
) -> None:
    from axe_playwright_python.sync_playwright import Axe
    from PIL import Image

    page = opened(records, color_scheme=scheme)
    page.locator(".lines .left .token").nth(4).click()
    page.locator("summary").click()
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []
    page.screenshot(path=tmp_path / "page.png")
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
    ground = int(np.bincount(picture.ravel()).argmax())
    assert (ground > 200) == (scheme == "light")
    assert len(np.unique(picture)) > 50
    assert 0.02 < (np.abs(picture.astype(int) - ground) > 60).mean() < 0.6


def test_the_theme_can_be_chosen(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records, color_scheme="light")

    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    seen = [ground()]
    for theme in ("light", "dark", "auto"):
        page.locator(".theme").click()
        assert page.locator(".theme").inner_text() == f"Theme: {theme}"
        seen.append(ground())
    assert seen[0] == seen[1] == seen[3] != seen[2]


@pytest.mark.parametrize("n_sentences", [1, 2])
def test_a_phone_scrolls_in_one_direction(opened: Opened, records: list[AttentionRecord], n_sentences: int) -> None:
    long = list(inspect(Translator.load(device="cpu"), [LONG]))
    for shown in (records[:n_sentences], long[:n_sentences]):
        page = opened(shown, viewport={"width": 360, "height": 740}, has_touch=True)
        page.locator(".lines .left .token").nth(4).tap()
        page.locator("summary").tap()
        page.locator("footer").scroll_into_view_if_needed()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.locator(".lines .left .token.active").count() == 1


def base_sized(n: int) -> AttentionRecord:
    """As many layers and heads as the paper's base model has, and n tokens on either side."""
    rng = np.random.default_rng(0)

    def rows(visible_QM: Any) -> Any:
        weight_LHQM = rng.random((6, 8, n, n), dtype=np.float32) ** 9 * visible_QM
        weight_LHQM /= weight_LHQM.sum(-1, keepdims=True)
        return weight_LHQM

    pieces = [f"▁w{i}" for i in range(n - 1)]
    whole = np.ones((n, n), dtype=np.float32)
    return record_of(
        pieces,
        text=" ".join(p[1:] for p in pieces),
        translation=" ".join(p[1:] for p in pieces),
        source=(*pieces, "</s>"),
        source_words=(*range(n - 1), None),
        alignment=tuple((i, i) for i in range(n - 1)),
        tokens=tuple(Token(piece, 0.5, []) for piece in pieces),
        weights={"encoder": rows(whole), "decoder": rows(np.tri(n, dtype=np.float32)), "memory": rows(whole)},
    )


def test_300_tokens_open_within_two_seconds_and_stay_usable(browser: Browser, tmp_path: Path) -> None:
    record = base_sized(300)
    path = tmp_path / "page.html"
    path.write_text(to_page([record]), encoding="utf-8")
    took = []
    for _ in range(5):  # others may be at work on this machine: the quickest of a few
        page = browser.new_page()
        page.goto("about:blank")
        began = time.monotonic()
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector(".lines .token")
        page.evaluate("() => new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)))")
        took.append(time.monotonic() - began)
        if took[-1] < 2:
            break
        page.close()
    assert min(took) < 2
    page.wait_for_selector(DRAWN)
    page.locator(".lines .left .token").nth(250).click()
    page.mouse.move(0, 0)
    weight_S = record.weights["memory"][int(chosen(page, "layer")) - 1, int(chosen(page, "head")) - 1, 250]
    np.testing.assert_allclose(shares(page, "right"), weight_S, atol=1e-3)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.locator(".chip").nth(3).click()
    page.wait_for_function("document.querySelector('.lines').scrollTop < 60")
    box = page.locator(".heat").bounding_box()
    assert box is not None
    assert box["width"] < 600, "the whole of it can be seen"
    page.locator(".heat").click(position={"x": 100, "y": box["height"] * 200.5 / 300})
    active = page.locator(".lines .left .token[aria-pressed=true] bdi")
    assert active.inner_text() in ("w198", "w199", "w200")
    page.wait_for_function("document.querySelector('.lines').scrollTop > 3000")
    page.close()


def test_what_tokens_say_is_shown_and_not_run(opened: Opened) -> None:
    pieces = [f"▁{text}" for text in HOSTILE]
    text = " ".join(HOSTILE)
    page = opened([record_of(pieces, text=text, translation=text)])
    assert page.locator(".lines .left .token bdi").all_text_contents() == ["start", *HOSTILE]
    assert page.locator(".chip bdi").all_text_contents() == HOSTILE
    assert page.locator(".translation").text_content() == text
    page.locator(".lines .left .token").nth(1).click()
    assert HOSTILE[0] in page.locator(".looking").inner_text()
    assert page.evaluate("window.ran") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_an_inspector_can_be_opened_in_place_and_closed(opened: Opened, records: list[AttentionRecord]) -> None:
    page = opened(records)
    page.evaluate("""() => {
        const element = document.body.appendChild(document.createElement("section"));
        window.second = Inspector.mount(element, JSON.parse(document.getElementById("records").textContent));
    }""")
    assert page.locator("section.inspector .translation").inner_text() == records[0].translation
    page.evaluate("window.second.destroy()")
    assert page.locator("section.inspector *").count() == 0
    assert page.locator("main .translation").count() == 1
