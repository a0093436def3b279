"""The page of the server in a browser: typing, details of words, choices, attention, and the history."""

from __future__ import annotations

import json
import math
import re
import subprocess
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
    assert page.locator("#alternatives button.alternative").count() == 3
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
    alternative = page.locator("#alternatives button.alternative span").first.inner_text()
    page.locator("#alternatives button.alternative").first.click()
    wait_for(page, alternative)


def explained(
    page: Page,
    tokens: list[tuple[str, float, list[tuple[str, float]]]],
    alternatives: list[tuple[str, float]],
    text: str = "One.",
) -> None:
    """Let the page show this response: tokens of one word, and translations with their probabilities."""
    (_, best), *others = alternatives
    line = {
        "translatedText": text,
        "log_prob": math.log(best),
        "alternatives": [{"text": other, "log_prob": math.log(p)} for other, p in others],
        "flags": {},
        "tokens": [
            {"piece": piece, "probability": p, "word": 0, "runners_up": runners_up} for piece, p, runners_up in tokens
        ],
        "n_first": len(tokens),
        "alignment": [[0, 0]],
    }
    page.route("**/explain", lambda route: route.fulfill(json={"lines": [line]}))
    type_in(page, "Eins.")
    wait_for(page, text)


def test_alternatives_are_sorted_by_probability_and_never_add_up_to_more_than_100_percent(open_page: OpenPage) -> None:
    page = open_page()
    first = ("▁One", 0.2, [("▁A", 0.3335), ("▁An", 0.3335), ("▁The", 0.133)])  # naively rounded: 100.1 %
    second = (".", 0.75, [("!", 0.2), ("?", 0.0001)])
    # The translation is the best by the score of the search, not by its probability.
    explained(
        page, [first, second], [("One.", 0.15), ("An.", 0.3335), ("A.", 0.3335), ("Uno.", 0.183), ("1.", 0.00002)]
    )
    translations = page.locator("#alternatives .alternative")
    assert translations.locator("span").all_text_contents() == ["An.", "A.", "Uno.", "One.", "1."]
    *texts, smallest = translations.locator("small").all_text_contents()
    assert [share(text) for text in texts] == pytest.approx([0.3335, 0.3335, 0.183, 0.15], abs=1e-3)
    assert sum(map(share, texts)) == pytest.approx(1, abs=1e-9)
    assert smallest == "< 0.1\u00a0%"
    assert page.locator("#alternatives [aria-current]").inner_text().startswith("One.")
    assert "The probability that the model gives to the whole translation" in page.locator("#alternatives").inner_text()
    assert "likely" not in page.locator("main").inner_text()
    click_word(page, "One.")
    lists = page.locator("#word .choice ol")
    assert lists.nth(0).locator("bdi").all_text_contents() == ["A", "An", "One", "The"]
    assert lists.nth(1).locator("bdi").all_text_contents() == ["One.", "One!", "One?"]
    assert page.locator("#word [aria-current] bdi").all_text_contents() == ["One", "One."]
    texts = lists.nth(0).locator("small").all_text_contents()
    assert sum(map(share, texts)) == pytest.approx(1, abs=1e-9)
    assert lists.nth(1).locator("small").all_text_contents() == ["75.0\u00a0%", "20.0\u00a0%", "< 0.1\u00a0%"]
    assert page.locator("#word h3").first.inner_text() == "Probability of token 1 of 2"
    assert "probability 15.0\u00a0% = 20.0\u00a0% \u00d7 75.0\u00a0%" in page.locator("#word .head").inner_text()


TINTS = {"doubtful": (0, 0.5), "unsure": (0.5, 0.8), "": (0.8, 1.01)}


def test_whole_words_are_tinted_by_the_product_of_their_probabilities(
    open_page: OpenPage, translator: Translator
) -> None:
    text = "Der Hund schläft, aber es ist zu früh."
    (expected,) = translator.translate([text], with_details=True)
    assert expected.tokens is not None
    page = open_page()
    type_in(page, text)
    wait_for(page, expected.text)
    words = list[list[float]]()
    for token in expected.tokens[:-1]:
        words += [[]] if token.piece.startswith("▁") else []
        words[-1].append(token.probability)
    assert "it's" in expected.text
    elements = page.locator("#output .word")
    assert elements.count() == len(words)
    names = [element.get_attribute("class") for element in elements.all()]
    for name, probabilities in zip(names, words, strict=True):
        low, high = TINTS[(name or "").removeprefix("word").strip()]
        assert low <= math.prod(probabilities) < high
    assert {"word", "word unsure", "word doubtful"} == set(names), "the sentence has words of each colour"
    assert elements.locator("span").evaluate_all(
        "all => all.map((each) => getComputedStyle(each).backgroundColor)"
    ) == ["rgba(0, 0, 0, 0)"] * sum(map(len, words)), "a part of a word has a colour of its own"
    legend = page.locator("#legend")
    assert "product of the probabilities of its tokens" in legend.inner_text()
    assert legend.locator(".doubtful").inner_text() == "below 50 %"


CONTRASTS = """(selector) => {
    const luminance = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((text) => {
            const c = Number(text) / 255;
            return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, other) => {
        const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const element = document.querySelector(selector), style = getComputedStyle(element);
    const around = getComputedStyle(element.closest(".side")).backgroundColor;
    return [contrast(style.backgroundColor, around), contrast(style.borderBottomColor, around),
        contrast(style.color, style.backgroundColor)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tint_of_a_word_is_visible_and_its_text_readable(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    type_in(page, "Der Hund schläft, aber es ist zu früh.")
    page.locator("#output .doubtful").first.wait_for()
    for name, least in (("doubtful", 2 if scheme == "dark" else 1.5), ("unsure", 1.4 if scheme == "dark" else 1.2)):
        tint, underline, text = page.evaluate(CONTRASTS, f"#output .{name}")
        assert tint >= least, name
        assert underline >= 3, name
        assert text >= 4.5, name


FAMILIES = "[...new Set([...document.querySelectorAll('body *')].map((each) => getComputedStyle(each).fontFamily))]"


def test_the_pages_use_one_font_family_and_one_for_code(open_page: OpenPage) -> None:
    page = open_page()
    type_in(page, f"{SENTENCE}\nIch bin müde.")
    page.locator("#history .entry").first.wait_for(state="attached")
    click_word(page, "broke.")
    page.locator("#show-attention").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    (family,) = page.evaluate(FAMILIES)
    assert family.startswith("-apple-system")
    assert family.endswith(" sans-serif")
    page.get_by_role("link", name="the API").click()
    page.get_by_role("heading", name="POST /translate").wait_for()
    other = set(page.evaluate(FAMILIES)) - {family}
    assert len(other) == 1
    assert other.pop().endswith(" monospace")


def test_the_empty_page_offers_sentences_and_says_what_the_model_can_do(
    open_page: OpenPage, translator: Translator
) -> None:
    page = open_page()
    examples = page.locator("#examples .example")
    assert examples.count() == 3
    assert "German to English" in page.locator("#abilities").inner_text()
    texts = examples.all_inner_texts()
    translations = [translation.text for translation in translator.translate(texts)]
    for i, (text, expected) in enumerate(zip(texts, translations, strict=True)):
        examples.nth(i).click()
        wait_for(page, expected)
        assert page.locator("#text").input_value() == text
        assert page.locator("#start").is_hidden()
        page.locator("#clear").click()
        assert page.locator("#start").is_visible()


def test_a_language_without_examples_has_a_hint(open_page: OpenPage, translator: Translator) -> None:
    from transduce.model_folder.format import Origin

    origin = Origin((("nl", "en"), ("de", "en")), longest_source=40)
    with served(Translator(translator.model, translator.config, translator.subwords, origin)) as live:
        page = open_page(live)
        page.get_by_label("From").select_option("Dutch")
        assert page.locator("#hint").inner_text() == "Type a sentence in Dutch above."
        assert page.locator("#examples").is_hidden()
        assert "Dutch to English" in page.locator("#abilities").inner_text()
        page.get_by_label("From").select_option("German")
        assert page.locator("#examples .example").count() == 3


def test_the_inspector_opens_in_place(open_page: OpenPage) -> None:
    page = open_page()
    type_in(page, SENTENCE)
    page.locator("#output .word").first.wait_for()
    click_word(page, "yesterday")
    page.locator("#word .runner").first.click()
    page.locator("#output .chosen").wait_for()
    page.locator("#show-attention").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    assert " ".join(page.locator("#inspector .words-card .right bdi").all_text_contents()) == translation(page)
    repeated = page.locator("#inspector .sentence, #inspector .translation, #inspector .chip, #inspector .theme")
    assert repeated.count() == 0, "the inspector repeats what stands above it"
    before = page.locator("#inspector .head-choice input:checked").get_attribute("value")
    page.locator("#output .word").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#inspector .head-choice input:checked").get_attribute("value") == before
    page.locator("#show-attention").click()
    assert page.locator("#inspector *").count() == 0
    page.locator("#show-attention").click()
    page.locator("#inspector .lines .token").first.wait_for()
    type_in(page, "Ich bin müde.")
    assert page.locator("#inspector *").count() == 0, "the inspector shows another sentence"


def test_the_inspector_shows_each_part_of_a_long_line(open_page: OpenPage) -> None:
    page = open_page()
    type_in(page, "Das ist nicht gut, aber ich kann es nicht ändern. " * 8)
    page.locator("#output .word").first.wait_for()
    page.locator("#show-attention").click()
    page.locator("#inspector[data-drawn=all]").wait_for()
    parts = page.locator("#inspector").get_by_label("Sentence").locator("option")
    assert parts.count() > 1
    assert "(part 2 of" in parts.nth(1).inner_text()
    before = page.locator("#inspector .lines bdi").all_text_contents()
    page.locator("#inspector").get_by_label("Sentence").select_option(index=parts.count() - 1)
    assert page.locator("#inspector .lines bdi").all_text_contents() != before


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
    open_manual(page)
    page.locator("#translate summary").click()
    form_of(page, "/translate").get_by_role("button", name="Send").click()
    form_of(page, "/translate").locator(".result").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert violations(page) == []


def commands(page: Page) -> dict[str, str]:
    """Return the command of each path."""
    sections = page.locator(".route").all()
    return {f"/{section.get_attribute('id')}": section.locator(".command").inner_text() for section in sections}


def run_in_shell(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def open_manual(page: Page) -> None:
    page.get_by_role("link", name="the API").click()
    page.get_by_role("heading", name="POST /translate").wait_for()
    page.locator("form.try").first.wait_for()


def form_of(page: Page, path: str) -> Any:
    return page.locator(f"form.try[data-path='{path}']")


def test_every_command_of_the_manual_works_when_it_is_pasted(open_page: OpenPage, live: Live) -> None:
    page = open_page()
    open_manual(page)
    responses = {path: run_in_shell(command) for path, command in commands(page).items()}
    assert len(responses) == 9
    assert json.loads(responses.pop("/translate")) == {"translatedText": "That's good."}
    assert "transduce_requests_total" in responses.pop("/metrics")
    assert all(json.loads(response) and "error" not in json.loads(response) for response in responses.values())


def test_the_manual_sends_requests_and_its_commands_equal_its_forms(open_page: OpenPage) -> None:
    page = open_page(may_fail=True)
    open_manual(page)
    form = form_of(page, "/translate")
    text = "Das ist nicht 'gut'."
    form.locator("[name=q]").fill(text)
    form.locator("[name=alternatives]").fill("2")
    form.get_by_role("button", name="Send").click()
    form.locator(".status", has_text="Status 200").wait_for()
    shown = json.loads(form.locator(".result").inner_text())
    assert len(shown["alternatives"]) == 2
    assert shown == json.loads(run_in_shell(commands(page)["/translate"]))
    form.locator("[name=target]").fill("fr")
    form.get_by_role("button", name="Send").click()
    form.locator(".status", has_text="Status 400").wait_for()
    assert "only de to en" in form.locator(".result").inner_text()
    for path in ("/languages", "/inspect", "/embed", "/metrics"):
        form_of(page, path).get_by_role("button", name="Send").click()
        form_of(page, path).locator(".status", has_text="Status 200").wait_for()
    assert "more characters" in form_of(page, "/inspect").locator(".result").inner_text()


def test_the_manual_adds_the_token_to_its_commands_and_requests(open_page: OpenPage, translator: Translator) -> None:
    with served(translator, access=Access(TOKEN)) as live:
        page = open_page(live, may_fail=True)
        page.goto(f"{live.url}/docs")
        page.get_by_label("This server requires a token").fill(TOKEN)
        assert "authorization: Bearer TOKEN" in commands(page)["/translate"]
        page.get_by_role("button", name="Use token").click()
        page.locator("#access").wait_for(state="hidden")
        assert json.loads(run_in_shell(commands(page)["/translate"])) == {"translatedText": "That's good."}
        form_of(page, "/limits").get_by_role("button", name="Send").click()
        form_of(page, "/limits").locator(".status", has_text="Status 200").wait_for()
        page.goto(live.url)  # the page at / has the same token
        type_in(page, "Ich bin müde.")
        wait_for(page, "I'm tired.")


def test_the_manual_uses_languages_of_its_server(open_page: OpenPage, translator: Translator) -> None:
    from transduce.model_folder.format import Origin

    origin = Origin((("nl", "fr"),), longest_source=40)
    with served(Translator(translator.model, translator.config, translator.subwords, origin)) as live:
        page = open_page(live)
        open_manual(page)
        page.locator(".command", has_text='"source": "nl"').first.wait_for()
        assert "translatedText" in json.loads(run_in_shell(commands(page)["/translate"]))


def test_hostile_text_in_the_manual_is_shown_and_not_executed(open_page: OpenPage) -> None:
    page = open_page()
    open_manual(page)
    page.route("**/explain", lambda route: route.fulfill(json={"translatedText": HOSTILE}))
    form = form_of(page, "/explain")
    form.locator("[name=q]").fill(HOSTILE[0])
    form.get_by_role("button", name="Send").click()
    form.locator(".result").wait_for()
    assert json.loads(form.locator(".result").inner_text())["translatedText"][0] == HOSTILE[0]
    assert HOSTILE[0] in commands(page)["/explain"]
    assert page.evaluate("window.ran") is None
    assert page.locator("script").count() == 1


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
