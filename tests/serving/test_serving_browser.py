"""The page of the server in a browser: typing, details of words, choices, attention, and the history."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import share
from tests.support.inspector import HOSTILE
from tests.support.serving import SENTENCE, TOKEN, Live, served
from transduce import Translator
from transduce.serving.guard import Access

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Route

pytestmark = pytest.mark.slow
OpenPage = Callable[..., "Page"]
FAILED_RESPONSE = "Failed to load resource"
"""Chromium writes this to the console for each response with an error code."""


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


@pytest.fixture(scope="module")
def live(translator: Translator) -> Iterator[Live]:
    with served(translator) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser, live: Live) -> Iterator[OpenPage]:
    """A function that opens the page. At the end, the page must have no errors and no third-party requests."""
    faults: list[str] = []
    contexts: list[BrowserContext] = []

    def open_in_new_context(
        server: Live = live, init_script: str = "", may_fail: bool = False, **settings: Any
    ) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1180, "height": 900}} | settings))
        contexts.append(context)
        if init_script:
            context.add_init_script(init_script)
        page = context.new_page()

        def check_console(message: ConsoleMessage) -> None:
            if not (may_fail and FAILED_RESPONSE in message.text):
                faults.append(message.text)

        def check_request(request: Request) -> None:
            if not request.url.startswith(server.url):
                faults.append(request.url)

        page.on("console", check_console)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", check_request)
        page.goto(server.url)
        return page

    yield open_in_new_context
    for context in contexts:
        context.close()
    assert faults == []


def type_in(page: Page, text: str) -> None:
    page.locator("#text").fill(text)


def wait_for(page: Page, text: str) -> None:
    """Wait until the finished translation is announced to screen readers."""
    whole = re.compile("^" + r"\s+".join(map(re.escape, text.split())) + "$")
    page.get_by_role("status").filter(has_text=whole).wait_for(state="attached")


def translation(page: Page) -> str:
    return page.locator("#output").inner_text().replace("\u00a0", " ")


def highlighted(page: Page) -> list[str]:
    return page.locator("#mirror mark").all_text_contents()


def click_word(page: Page, word: str) -> None:
    page.locator("#output .word", has_text=re.compile(rf"^{re.escape(word)}$")).click()
    page.mouse.move(0, 0)


def violations(page: Page) -> list[tuple[str, list[Any]]]:
    """Return the name of each rule of accessibility that the page breaks, and where."""
    from axe_playwright_python.sync_playwright import Axe

    rules = Axe().run(page).response["violations"]
    return [(rule["id"], [node["target"] for node in rule["nodes"]][:3]) for rule in rules]


def test_text_is_translated_as_it_is_typed(open_page: OpenPage, live: Live) -> None:
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "text"
    n_before = len(live.log)
    page.locator("#text").press_sequentially("Das ist nicht gut.", delay=10)
    wait_for(page, "That's not good.")
    assert translation(page) == "That's not good."
    n_requests = len(live.logged("/explain", 1, n_before))
    assert n_requests <= 3, "the page sends a request for each key"
    page.locator("#text").press_sequentially("\n\nIch bin müde.")
    wait_for(page, "That's not good. I'm tired.")
    assert translation(page).split("\n")[0] == "That's not good."
    *_, last = live.logged("/explain", n_requests + 1, n_before)
    assert last["sentences"] == 1, "a translated line was sent again"
    assert page.locator("#alternatives .alternative").count() == 3
    page.locator("#clear").click()
    assert translation(page) == ""


def test_the_request_for_an_old_text_is_cancelled(open_page: OpenPage) -> None:
    page = open_page()
    held: list[Route] = []
    page.route("**/explain", lambda route: held.append(route) if not held else route.continue_())
    type_in(page, "Das ist nicht gut.")
    with page.expect_event("requestfailed") as failed:
        page.wait_for_timeout(600)
        type_in(page, "Ich bin müde.")
    assert len(held) == 1
    body = failed.value.post_data_json
    assert body is not None
    assert body["q"] == ["Das ist nicht gut."]
    wait_for(page, "I'm tired.")
    assert translation(page) == "I'm tired."


def test_a_word_shows_its_alignment_its_probability_and_its_alternatives(
    open_page: OpenPage, translator: Translator
) -> None:
    (expected,) = translator.translate([SENTENCE], with_details=True)
    assert expected.tokens is not None
    page = open_page()
    type_in(page, SENTENCE)
    wait_for(page, expected.text)
    click_word(page, "yesterday")
    assert highlighted(page) == page.locator("#word .source-word").all_text_contents() == ["gestern"]
    token = next(token for token in expected.tokens if token.piece == "▁yesterday")
    shares = [share(text.removeprefix("< ")) for text in page.locator("#word small").all_text_contents()]
    probabilities = [token.probability, *[probability for _, probability in token.runners_up]]
    assert shares == pytest.approx([max(p, 0.001) for p in probabilities], abs=6e-4)
    names = [piece.removeprefix("▁") for piece, _ in token.runners_up]
    assert page.locator("#word .runner bdi").all_text_contents() == names
    doubts = page.locator("#output .piece").evaluate_all(
        "pieces => pieces.map((piece) => Number(piece.style.getPropertyValue('--doubt')))"
    )
    assert [1 - doubt for doubt in doubts] == pytest.approx([t.probability for t in expected.tokens[:-1]], abs=1e-4)
    page.locator("#output .word", has_text="car").hover()
    assert highlighted(page) == ["Auto"]
    page.locator("#word [aria-label=Close]").click()
    assert highlighted(page) == []
    assert page.locator("#word").is_hidden()


def test_a_word_can_be_chosen_and_the_choice_undone(open_page: OpenPage, translator: Translator) -> None:
    page = open_page()
    type_in(page, SENTENCE)
    (free,) = translator.translate([SENTENCE], with_details=True)
    wait_for(page, free.text)
    click_word(page, "yesterday")
    other = page.locator("#word .runner bdi").first.inner_text()
    page.locator("#word .runner").first.click()
    (expected,) = translator.translate([SENTENCE], prefix=f"Tom bought a new car {other}")
    wait_for(page, expected.text)
    assert translation(page) == expected.text
    assert translation(page).startswith(f"Tom bought a new car {other}")
    assert page.locator("#output .chosen").all_text_contents() == [other]
    assert page.evaluate("document.activeElement.textContent") == other
    page.get_by_label("Another word").fill("on")
    page.get_by_role("button", name="Use this word").click()
    (with_typed_word,) = translator.translate([SENTENCE], prefix="Tom bought a new car on")
    wait_for(page, with_typed_word.text)
    page.get_by_role("button", name="Undo choices").click()
    wait_for(page, free.text)
    assert page.get_by_role("button", name="Undo choices").is_hidden()
    alternative = page.locator("#alternatives .alternative span").first.inner_text()
    page.locator("#alternatives .alternative").first.click()
    wait_for(page, alternative)


def test_the_inspector_opens_in_place(open_page: OpenPage) -> None:
    page = open_page()
    type_in(page, SENTENCE)
    page.locator("#output .word").first.wait_for()
    click_word(page, "yesterday")
    page.locator("#word .runner").first.click()
    page.locator("#output .chosen").wait_for()
    page.locator("#show-attention").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    assert page.locator("#inspector .translation").inner_text() == translation(page)
    before = page.locator("#inspector .head-choice input:checked").get_attribute("value")
    page.locator("#output .word").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#inspector .head-choice input:checked").get_attribute("value") == before
    page.locator("#show-attention").click()
    assert page.locator("#inspector *").count() == 0
    page.locator("#show-attention").click()
    page.locator("#inspector .translation").wait_for()
    type_in(page, "Ich bin müde.")
    assert page.locator("#inspector *").count() == 0, "the inspector shows another sentence"


def test_words_can_be_used_with_the_keyboard(open_page: OpenPage) -> None:
    page = open_page()
    type_in(page, SENTENCE)
    wait_for(page, "Tom bought a new car yesterday because the old one broke.")
    page.locator("#output .word").first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert highlighted(page) == ["gestern"]
    assert page.locator("#output [aria-pressed=true]").inner_text() == "yesterday"
    page.locator("#word .runner").first.focus()
    page.keyboard.press("Escape")
    assert page.locator("#word").is_hidden()
    assert page.evaluate("document.activeElement.textContent") == "yesterday"
    page.keyboard.press("Space")
    assert highlighted(page) == ["gestern"]
    page.keyboard.press("Escape")
    assert page.locator("#word").is_hidden()
    assert page.locator("#output [tabindex='0']").count() == 1


def test_the_history_survives_a_reload_and_can_be_cleared(open_page: OpenPage) -> None:
    page = open_page()
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
    page.get_by_label("store the history").uncheck()
    type_in(page, "Das ist gut.")
    wait_for(page, "That's good.")
    page.wait_for_timeout(2000)
    assert entries.count() == 0


def test_the_page_works_if_the_browser_refuses_storage(open_page: OpenPage) -> None:
    page = open_page(
        init_script="""for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, {
            get() { throw new DOMException("no", "SecurityError"); } });"""
    )
    type_in(page, "Ich bin müde.")
    wait_for(page, "I'm tired.")
    assert page.locator("#history-note").text_content() == "this browser does not allow storage"
    page.locator("#theme").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme)

    def check() -> None:
        assert violations(page) == []

    check()
    type_in(page, f"{SENTENCE}\nIch bin müde.")
    page.locator("#history .entry").first.wait_for(state="attached")
    click_word(page, "broke.")
    page.locator("#history summary").click()
    check()
    page.locator("#word .runner:enabled").first.click()
    page.locator("#output .chosen").wait_for()
    page.locator("#show-attention").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_manual_is_accessible_and_fits_a_phone(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": 360, "height": 740})
    page.get_by_role("link", name="the API").click()
    page.get_by_role("heading", name="POST /translate").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert violations(page) == []


def test_the_theme_is_remembered(open_page: OpenPage) -> None:
    page = open_page(color_scheme="light")
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "Theme: dark"
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 25)"


def test_a_phone_scrolls_in_one_direction(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 740}, has_touch=True)
    long = "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichenschmied" * 2
    type_in(page, f"{SENTENCE}\n{long}")
    page.locator("#history .entry").first.wait_for(state="attached")
    page.locator("#output .word").nth(5).tap()
    page.locator("#show-attention").tap()
    page.locator("#inspector[data-drawn=all]").wait_for()
    page.locator("#history summary").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    box = page.locator("#history .entry").first.bounding_box()
    assert box is not None
    assert box["height"] > 40


def test_hostile_text_is_shown_and_not_executed(open_page: OpenPage, live: Live) -> None:
    page = open_page()
    text = "\n".join(HOSTILE)
    type_in(page, text)
    page.locator("#history .entry").first.wait_for(state="attached")
    for word in page.locator("#output p.line").first.locator(".word").all()[:2]:
        word.click()
    assert page.locator("#mirror").text_content() == text + "\u200b"
    pieces = [[f"▁{text}", 0.5] for text in HOSTILE]
    token = {"piece": f"▁{HOSTILE[0]}", "probability": 0.5, "word": 0, "runners_up": pieces}
    line = {
        "translatedText": HOSTILE[0],
        "log_prob": -1,
        "alternatives": [{"text": HOSTILE[2], "log_prob": -2}],
        "flags": {"loop": HOSTILE[2]},
        "tokens": [token],
        "n_first": 1,
        "alignment": [[0, 0]],
    }
    page.route("**/explain", lambda route: route.fulfill(json={"lines": [line]}))
    type_in(page, "anders")
    page.locator("#output .flag").wait_for()
    assert page.locator("#output p.line").first.text_content() == HOSTILE[0]
    page.locator("#output .word").first.click()
    assert page.locator("#word .runner bdi").all_text_contents() == HOSTILE
    assert page.evaluate("window.ran") is None
    assert page.locator("main img").count() == 0
    assert page.locator("script").count() == 4


def test_requests_to_a_busy_server_are_repeated_and_errors_are_shown(open_page: OpenPage) -> None:
    page = open_page(may_fail=True)
    refusals = [
        {"status": 429, "json": {"error": "too many requests: slow down"}, "headers": {"retry-after": "1"}},
        {"status": 503, "json": {"error": "too many sentences are waiting"}, "headers": {"retry-after": "1"}},
    ]
    page.route("**/explain", lambda route: route.fulfill(**refusals.pop(0)) if refusals else route.continue_())
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


def test_the_page_prompts_for_the_token_and_stores_it_for_the_tab(open_page: OpenPage, translator: Translator) -> None:
    with served(translator, access=Access(TOKEN)) as live:
        page = open_page(live, may_fail=True)
        page.get_by_label("This server requires a token").fill("a-wrong-token-of-some-length")
        page.get_by_role("button", name="Use token").click()
        page.get_by_role("alert").filter(has_text="Invalid API key.").wait_for()
        page.get_by_label("This server requires a token").fill(TOKEN)
        page.get_by_role("button", name="Use token").click()
        page.locator("#access").wait_for(state="hidden")
        type_in(page, "Ich bin müde.")
        wait_for(page, "I'm tired.")
        page.reload()
        type_in(page, "Das ist gut.")
        wait_for(page, "That's good.")
        assert TOKEN not in page.evaluate("JSON.stringify(localStorage)")


def test_languages_can_be_chosen(open_page: OpenPage, translator: Translator) -> None:
    from transduce.model_folder.format import Origin

    directions = (("de", "en"), ("en", "de"), ("nl", "en"))
    origin = Origin(directions, longest_source=40)
    with served(Translator(translator.model, translator.config, translator.subwords, origin)) as live:
        page = open_page(live)
        page.get_by_label("From").select_option("English")
        assert page.get_by_label("To", exact=True).locator("option").all_text_contents() == ["German"]
        type_in(page, "Ich bin müde.")
        page.locator("#output .word").first.wait_for()
        page.locator("#output .word").first.click()
        assert "does not name its alignment heads" in page.locator("#word").inner_text()
        page.get_by_role("button", name="Swap languages").click()
        assert page.get_by_label("From").input_value() == "de"
        page.get_by_label("From").select_option("Dutch")
        assert page.get_by_role("button", name="Swap languages").is_hidden()
        page.reload()
        page.locator("#about", has_text="Dutch to English").wait_for()
