"""The page of the server in a real browser: type, look into words, force another, look inside, come back later."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import browser, share
from tests.support.inspector import HOSTILE
from tests.support.serving import SENTENCE, TOKEN, Live, served
from transduce import Translator
from transduce.serving.guard import Access

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

pytestmark = pytest.mark.slow
__all__ = ["browser"]

Opened = Callable[..., "Page"]
RESET = "Failed to load resource"
"""What Chromium says of each answer that is an error."""


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


@pytest.fixture(scope="module")
def live(translator: Translator) -> Iterator[Live]:
    with served(translator) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, live: Live) -> Iterator[Opened]:
    """Opens the page; at the end, nothing must have gone wrong in it, and nobody else been asked."""
    wrong: list[str] = []
    contexts: list[BrowserContext] = []

    def open_page(at: Live = live, before: str = "", may_fail: bool = False, **settings: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1180, "height": 900}} | settings))
        contexts.append(context)
        if before:
            context.add_init_script(before)
        page = context.new_page()
        page.on("console", lambda said: None if may_fail and RESET in said.text else wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: None if asked.url.startswith(at.url) else wrong.append(asked.url))
        page.goto(at.url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def type_in(page: Page, text: str) -> None:
    page.locator("#text").fill(text)


def wait_for(page: Page, text: str) -> None:
    whole = re.compile("^" + r"\s+".join(map(re.escape, text.split())) + "$")
    page.get_by_role("status").filter(has_text=whole).wait_for(state="attached")


def said(page: Page) -> str:
    return page.locator("#output").inner_text().replace("\u00a0", " ")


def lit(page: Page) -> list[str]:
    return page.locator("#mirror mark").all_text_contents()


def pick(page: Page, word: str) -> None:
    page.locator("#output .word", has_text=re.compile(rf"^{re.escape(word)}$")).click()
    page.mouse.move(0, 0)


def test_the_translation_comes_as_one_types(opened: Opened, live: Live) -> None:
    page = opened()
    assert page.evaluate("document.activeElement.id") == "text"
    n_before = len(live.log)
    page.locator("#text").press_sequentially("Das ist nicht gut.", delay=10)
    wait_for(page, "That's not good.")
    assert said(page) == "That's not good."
    n_asked = len(live.logged("/explain", 1, n_before))
    assert n_asked <= 3, "not one for each key"
    page.locator("#text").press_sequentially("\n\nIch bin müde.")
    wait_for(page, "That's not good. I'm tired.")
    assert said(page).split("\n")[0] == "That's not good."
    *_, last = live.logged("/explain", n_asked + 1, n_before)
    assert last["sentences"] == 1, "what is known is not asked again"
    assert page.locator("#others .other").count() == 3
    page.locator("#clear").click()
    assert said(page) == ""


def test_an_answer_that_comes_late_is_not_shown(opened: Opened) -> None:
    page = opened()
    held: list[Route] = []
    page.route("**/explain", lambda route: held.append(route) if not held else route.continue_())
    type_in(page, "Das ist nicht gut.")
    with page.expect_event("requestfailed") as failed:  # withdrawn
        page.wait_for_timeout(600)
        type_in(page, "Ich bin müde.")
    assert len(held) == 1
    asked = failed.value.post_data_json
    assert asked is not None
    assert asked["q"] == ["Das ist nicht gut."]
    wait_for(page, "I'm tired.")
    assert said(page) == "I'm tired."


def test_a_word_shows_where_it_looked_and_what_else_could_have_been_said(
    opened: Opened, translator: Translator
) -> None:
    (wanted,) = translator.translate([SENTENCE], with_details=True)
    assert wanted.tokens is not None
    page = opened()
    type_in(page, SENTENCE)
    wait_for(page, wanted.text)
    pick(page, "yesterday")
    assert lit(page) == page.locator("#word .seen").all_text_contents() == ["gestern"]
    token = next(token for token in wanted.tokens if token.piece == "▁yesterday")
    shares = [share(text.removeprefix("< ")) for text in page.locator("#word small").all_text_contents()]
    own = [token.probability, *[probability for _, probability in token.runners_up]]
    assert shares == pytest.approx([max(p, 0.001) for p in own], abs=6e-4)
    names = [piece.removeprefix("▁") for piece, _ in token.runners_up]
    assert page.locator("#word .runner bdi").all_text_contents() == names
    doubts = page.locator("#output .piece").evaluate_all(
        "all => all.map((one) => Number(one.style.getPropertyValue('--doubt')))"
    )
    assert [1 - doubt for doubt in doubts] == pytest.approx([t.probability for t in wanted.tokens[:-1]], abs=1e-4)
    page.locator("#output .word", has_text="car").hover()
    assert lit(page) == ["Auto"]
    page.locator("#word [aria-label=Close]").click()
    assert lit(page) == []
    assert page.locator("#word").is_hidden()


def test_a_word_can_be_forced_and_let_go(opened: Opened, translator: Translator) -> None:
    page = opened()
    type_in(page, SENTENCE)
    (free,) = translator.translate([SENTENCE], with_details=True)
    wait_for(page, free.text)
    pick(page, "yesterday")
    other = page.locator("#word .runner bdi").first.inner_text()
    page.locator("#word .runner").first.click()
    (wanted,) = translator.translate([SENTENCE], prefix=f"Tom bought a new car {other}")
    wait_for(page, wanted.text)
    assert said(page) == wanted.text
    assert said(page).startswith(f"Tom bought a new car {other}")
    assert page.locator("#output .chosen").all_text_contents() == [other]
    assert page.evaluate("document.activeElement.textContent") == other
    page.get_by_label("A word of yours").fill("on")
    page.get_by_role("button", name="Say this").click()
    (own,) = translator.translate([SENTENCE], prefix="Tom bought a new car on")
    wait_for(page, own.text)
    page.get_by_role("button", name="Undo choices").click()
    wait_for(page, free.text)
    assert page.get_by_role("button", name="Undo choices").is_hidden()
    alternative = page.locator("#others .other span").first.inner_text()
    page.locator("#others .other").first.click()
    wait_for(page, alternative)


def test_the_inspector_opens_in_place(opened: Opened) -> None:
    page = opened()
    type_in(page, SENTENCE)
    page.locator("#output .word").first.wait_for()
    pick(page, "yesterday")
    page.locator("#word .runner").first.click()
    page.locator("#output .chosen").wait_for()
    page.locator("#look").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    assert page.locator("#inspector .translation").inner_text() == said(page)
    before = page.locator("#inspector .head-choice input:checked").get_attribute("value")
    page.locator("#output .word").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#inspector .head-choice input:checked").get_attribute("value") == before
    page.locator("#look").click()
    assert page.locator("#inspector *").count() == 0
    page.locator("#look").click()
    page.locator("#inspector .translation").wait_for()
    type_in(page, "Ich bin müde.")
    assert page.locator("#inspector *").count() == 0, "it was of another sentence"


def test_words_are_reached_by_keyboard(opened: Opened) -> None:
    page = opened()
    type_in(page, SENTENCE)
    wait_for(page, "Tom bought a new car yesterday because the old one broke.")
    page.locator("#output .word").first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert lit(page) == ["gestern"]
    assert page.locator("#output [aria-pressed=true]").inner_text() == "yesterday"
    page.locator("#word .runner").first.focus()
    page.keyboard.press("Escape")
    assert page.locator("#word").is_hidden()
    assert page.evaluate("document.activeElement.textContent") == "yesterday"
    page.keyboard.press("Space")
    assert lit(page) == ["gestern"]
    page.keyboard.press("Escape")
    assert page.locator("#word").is_hidden()
    assert page.locator("#output [tabindex='0']").count() == 1


def test_the_history_outlives_a_reload_and_can_be_cleared(opened: Opened) -> None:
    page = opened()
    type_in(page, "Ich bin müde.")
    entries = page.locator("#history .entry")
    entries.first.wait_for(state="attached")
    type_in(page, "Das ist gut.")
    page.locator("#history .entry").nth(1).wait_for(state="attached")
    page.reload()
    page.locator("#history summary").click()
    assert [text.split("\n")[0] for text in entries.all_inner_texts()] == ["Das ist gut.", "Ich bin müde."]
    entries.nth(1).click()
    wait_for(page, "I'm tired.")
    page.get_by_role("button", name="Clear history").click()
    assert entries.count() == 0
    page.reload()
    assert entries.count() == 0
    page.locator("#history summary").click()
    page.get_by_label("keep one").uncheck()
    type_in(page, "Das ist gut.")
    wait_for(page, "That's good.")
    page.wait_for_timeout(2000)
    assert entries.count() == 0


def test_where_storage_is_refused_all_else_works(opened: Opened) -> None:
    page = opened(
        before="""for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, {
            get() { throw new DOMException("no", "SecurityError"); } });"""
    )
    type_in(page, "Ich bin müde.")
    wait_for(page, "I'm tired.")
    assert page.locator("#history-note").text_content() == "this browser keeps none"
    page.locator("#theme").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Opened, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened(color_scheme=scheme)

    def check() -> None:
        found = Axe().run(page).response["violations"]
        assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []

    check()
    type_in(page, f"{SENTENCE}\nIch bin müde.")
    page.locator("#history .entry").first.wait_for(state="attached")
    pick(page, "broke.")
    page.locator("#history summary").click()
    check()
    page.locator("#word .runner:enabled").first.click()
    page.locator("#output .chosen").wait_for()
    page.locator("#look").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_manual_is_a_page_too(opened: Opened, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened(color_scheme=scheme, viewport={"width": 360, "height": 740})
    page.get_by_role("link", name="the API").click()
    page.get_by_role("heading", name="POST /translate").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["target"] for node in one["nodes"]][:3]) for one in found] == []


def test_the_theme_is_remembered(opened: Opened) -> None:
    page = opened(color_scheme="light")
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "Theme: dark"
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 25)"


def test_a_phone_scrolls_in_one_direction(opened: Opened) -> None:
    page = opened(viewport={"width": 360, "height": 740}, has_touch=True)
    long = "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichenschmied" * 2
    type_in(page, f"{SENTENCE}\n{long}")
    page.locator("#history .entry").first.wait_for(state="attached")
    page.locator("#output .word").nth(5).tap()
    page.locator("#look").tap()
    page.locator("#inspector[data-drawn=all]").wait_for()
    page.locator("#history summary").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#history .entry").first.bounding_box()
    assert box is not None
    assert box["height"] > 40


def test_hostile_text_is_shown_and_not_run(opened: Opened, live: Live) -> None:
    page = opened()
    text = "\n".join(HOSTILE)
    type_in(page, text)
    page.locator("#history .entry").first.wait_for(state="attached")
    for word in page.locator("#output p.line").first.locator(".word").all()[:2]:
        word.click()
    assert page.locator("#mirror").text_content() == text + "\u200b"
    pieces = [[f"▁{one}", 0.5] for one in HOSTILE]
    token = {"piece": f"▁{HOSTILE[0]}", "probability": 0.5, "word": 0, "runners_up": pieces}
    answer = {
        "translatedText": HOSTILE[0],
        "log_prob": -1,
        "alternatives": [{"text": HOSTILE[2], "log_prob": -2}],
        "flags": {"loop": HOSTILE[2]},
        "tokens": [token],
        "n_first": 1,
        "alignment": [[0, 0]],
    }
    page.route("**/explain", lambda route: route.fulfill(json={"lines": [answer]}))
    type_in(page, "anders")
    page.locator("#output .flag").wait_for()
    assert page.locator("#output p.line").first.text_content() == HOSTILE[0]
    page.locator("#output .word").first.click()
    assert page.locator("#word .runner bdi").all_text_contents() == HOSTILE
    assert page.evaluate("window.ran") is None
    assert page.locator("main img").count() == 0
    assert page.locator("script").count() == 4


def test_a_server_that_is_busy_is_asked_again_and_what_is_wrong_is_told(opened: Opened) -> None:
    page = opened(may_fail=True)
    answers = [
        {"status": 429, "json": {"error": "too many requests: slow down"}, "headers": {"retry-after": "1"}},
        {"status": 503, "json": {"error": "too much is waiting already"}, "headers": {"retry-after": "1"}},
    ]
    page.route("**/explain", lambda route: route.fulfill(**answers.pop(0)) if answers else route.continue_())
    type_in(page, "Ich bin müde.")
    page.get_by_role("alert").filter(has_text="Too many requests: slow down. Trying again in 1 s.").wait_for()
    wait_for(page, "I'm tired.")
    assert page.get_by_role("alert").count() == 0
    type_in(page, "ab " * 1700)
    page.get_by_role("alert").filter(has_text="The text has 5,100 characters, the limit is 5,000.").wait_for()
    type_in(page, "a" * 4900)
    page.get_by_role("alert").filter(has_text="tokens, the limit is 4000.").wait_for()
    page.route("**/explain", lambda route: route.abort())
    type_in(page, "Das ist gut.")
    page.get_by_role("alert").filter(has_text="The server cannot be reached.").wait_for()
    page.unroute("**/explain")
    page.get_by_role("button", name="Try again").click()
    wait_for(page, "That's good.")


def test_a_token_is_asked_for_and_kept_for_the_tab(opened: Opened, translator: Translator) -> None:
    with served(translator, access=Access(TOKEN)) as live:
        page = opened(live, may_fail=True)
        page.get_by_label("This server asks for a token").fill("a-wrong-token-of-some-length")
        page.get_by_role("button", name="Use it").click()
        page.get_by_role("alert").filter(has_text="Invalid API key.").wait_for()
        page.get_by_label("This server asks for a token").fill(TOKEN)
        page.get_by_role("button", name="Use it").click()
        page.locator("#access").wait_for(state="hidden")
        type_in(page, "Ich bin müde.")
        wait_for(page, "I'm tired.")
        page.reload()
        type_in(page, "Das ist gut.")
        wait_for(page, "That's good.")
        assert TOKEN not in page.evaluate("JSON.stringify(localStorage)")


def test_languages_can_be_chosen(opened: Opened, translator: Translator) -> None:
    from transduce.model_folder.format import Origin

    directions = (("de", "en"), ("en", "de"), ("nl", "en"))
    own = Translator(translator.model, translator.config, translator.subwords, Origin(directions, longest_source=40))
    with served(own) as live:
        page = opened(live)
        page.get_by_label("From").select_option("English")
        assert page.get_by_label("To", exact=True).locator("option").all_text_contents() == ["German"]
        type_in(page, "Ich bin müde.")
        page.locator("#output .word").first.wait_for()
        page.locator("#output .word").first.click()
        assert "does not say which of its heads" in page.locator("#word").inner_text()
        page.get_by_role("button", name="Swap languages").click()
        assert page.get_by_label("From").input_value() == "de"
        page.get_by_label("From").select_option("Dutch")
        assert page.get_by_role("button", name="Swap languages").is_hidden()
        page.reload()
        page.locator("#about", has_text="Dutch to English").wait_for()
