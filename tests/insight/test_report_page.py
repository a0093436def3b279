"""The training report in a browser: it opens from disk, shows the values of the log, and runs only its own script."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.browser import share
from tests.support.inspector import HOSTILE
from tests.support.report import (
    ATTENTION,
    CARD,
    EVERY_KIND,
    end_line,
    log_lines,
    step_line,
    valid_line,
    write_result,
    write_run,
)
from transduce.config import override, tiny
from transduce.insight.report import report_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.slow

Opened = Callable[..., "Page"]
LEFT, RIGHT = 50, 12  # margins of a chart in pixels
LONG_NAME = "a-run-with-a-rather-long-name-" * 4


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    """Open the report of runs. At the end, fail if there was a message, an error, a dialog or a network request."""
    problems: list[str] = []
    contexts = []
    numbers = itertools.count()

    def open_report(*runs: Path, **settings: Any) -> Page:
        path = tmp_path / f"page-{next(numbers)}.html"
        path.write_text(report_of(runs), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("[data-drawn=all]")
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert problems == []


SOURCES = ["Das ist gut.", "Wo ist mein Buch?"]
REFERENCES = ["That is good.", "Where is my book?"]


def samples(quality: int, with_attention: bool = False) -> list[dict[str, Any]]:
    """Translations of which the first `quality` words are right."""
    texts = [" ".join([*reference.split()[:quality], "tree"]) for reference in REFERENCES]
    weights = [[0.1 * quality, 1 - 0.1 * quality, 0.0], [0.25, 0.25, 0.5]]
    extra = {"attention": ATTENTION | {"weights": weights}} if with_attention else {}
    return [
        {"source": source, "reference": reference, "translation": text, **extra}
        for source, reference, text in zip(SOURCES, REFERENCES, texts, strict=True)
    ]


def lines_of_a_run(with_attention: bool = False) -> list[dict[str, Any]]:
    """600 steps, and validations at 200, 400 and 600 with perplexities 1000, 100 and 10."""
    lines = log_lines(0)
    for step in range(20, 601, 20):
        lines.append(step_line(step, loss=9 - step / 100, gradient_norm=1 + step / 1000, learning_rate=step * 1e-6))
        lines[-1] |= {"memory_bytes": 3 * 2**30}
        if step % 200 == 0:
            perplexity = 10.0 ** (4 - step / 200)
            valid = valid_line(step, math.log(perplexity), samples(step // 200, with_attention), bleu=step / 20)
            lines.append(valid | {"perplexity": perplexity})
    return lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", lines_of_a_run(with_attention=True))


def chart(page: Page, title: str) -> Locator:
    return page.locator(".chart", has=page.get_by_role("heading", name=title, exact=True))


def hover(page: Page, title: str, part: float) -> str:
    """Point at a chart, at this part of its horizontal axis. Returns the text that appears."""
    plot = chart(page, title).locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + LEFT + part * (box["width"] - LEFT - RIGHT), box["y"] + box["height"] / 2)
    return chart(page, title).locator(".tip").inner_text()


def numbers_in(text: str) -> list[float]:
    found = re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[-\u2212]\d+)?", text)
    return [float(number.replace(",", "").replace("\u2212", "-")) for number in found]


def test_the_page_of_a_real_run_opens_from_disk_and_shows_all_parts(opened: Opened, trained: Path) -> None:
    page = opened(trained)
    result = json.loads((trained / "result.json").read_text())
    assert page.locator(".pill").inner_text() == "Finished"
    facts = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dt + dd").all_inner_texts(), strict=True))
    assert facts["Steps"] == "220 of 220"
    assert numbers_in(facts["Target tokens"])[0] == pytest.approx(result["target_tokens"] / 1000, rel=0.01)
    assert facts["Pairs read"] == "40,000"
    titles = page.locator("section h2").all_inner_texts()
    assert titles[1:3] == ["Final model and scores", "Curves"]
    assert titles[-3:] == ["Data", "Settings", "Use and provenance"]
    assert titles[3].startswith("Sample translations")
    assert page.locator(".missing").count() == 0
    assert page.locator("path.line").count() == 8
    assert all(re.match(r"M[\d.]+ [\d.]+L", d or "") for d in page.locator("path.line").evaluate_all(ATTRIBUTE_D))
    last = numbers_in(hover(page, "Training loss", 1.0).split("\n\n")[1])[0]
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert last == pytest.approx([line["loss"] for line in log if line["event"] == "step"][-1], rel=1e-3)


ATTRIBUTE_D = "(paths) => paths.map((path) => path.getAttribute('d'))"


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("Training loss", 5.0),
        ("Validation perplexity", 100.0),
        ("Validation loss", math.log(100)),
        ("Validation BLEU", 20.0),
        ("Learning rate", 4e-4),
        ("Gradient norm", 1.4),
        ("Tokens per second", 1000.0),
        ("Memory", 3.0),
    ],
)
def test_hovering_shows_the_value_at_the_pointer(opened: Opened, run: Path, title: str, expected: float) -> None:
    page = opened(run)
    where, value, *_ = hover(page, title, 400 / 600).split("\n\n")
    assert where == "step 400 · 40\u00a0k tokens · 0:00:40"
    assert numbers_in(value)[0] == pytest.approx(expected, rel=1e-3)
    assert page.locator(".cross line").count() == 8, "all charts show the same place"
    page.mouse.move(0, 0)
    assert page.locator(".tip:visible").count() == 0


def test_the_axis_can_be_tokens_and_time(opened: Opened, tmp_path: Path) -> None:
    lines = [step_line(20, seconds=10.0), step_line(40, seconds=600.0), step_line(60, seconds=1000.0)]
    lines[1] |= {"loss": 7.25}
    page = opened(write_run(tmp_path / "run", lines))
    for axis, part, tick in (("Step", 40 / 60, "20"), ("Time", 0.6, "5\u00a0min"), ("Tokens", 2 / 3, "2,000")):
        page.get_by_role("radio", name=axis).check()
        assert "7.250" in hover(page, "Training loss", part)
        assert tick in chart(page, "Training loss").locator(".grid text").all_text_contents()


def test_the_keyboard_moves_along_a_curve(opened: Opened, run: Path) -> None:
    page = opened(run)
    plot = chart(page, "Validation perplexity").locator(".plot")

    def said(key: str) -> str:
        page.keyboard.press(key)
        return plot.get_attribute("aria-valuetext") or ""

    plot.focus()
    assert "from 1,000 at step 200 to 10.00 at step 600" in said("Shift")
    assert said("End").endswith("; 10.00")
    assert said("ArrowLeft").endswith("; 100.0")
    assert said("ArrowRight").endswith("; 10.00")
    assert said("ArrowRight").endswith("; 10.00")
    assert said("Home").endswith("; 1,000")
    assert plot.get_attribute("aria-valuenow") == "0"
    assert page.locator(".tip:visible").count() == 1
    said("Escape")
    assert page.locator(".tip:visible").count() == 0
    said("ArrowRight")
    plot.evaluate("(plot) => plot.blur()")
    assert page.locator(".tip:visible").count() == 0


def test_perplexity_has_a_logarithmic_and_a_linear_scale(opened: Opened, run: Path) -> None:
    page = opened(run)

    def middle() -> float:
        dots = chart(page, "Validation perplexity").locator("circle.dot")
        first, second, third = (float(dot.get_attribute("cy") or 0) for dot in dots.all())
        return (second - first) / (third - first)

    assert middle() == pytest.approx(0.5, abs=0.01)
    page.get_by_role("radio", name="Linear").check()
    assert middle() == pytest.approx(900 / 990, abs=0.01)


def test_smoothing_is_a_moving_average_with_the_raw_curve_behind_it(opened: Opened, tmp_path: Path) -> None:
    losses = [4 + (-1) ** i for i in range(40)]
    page = opened(write_run(tmp_path / "run", [step_line(20 * i, loss=loss) for i, loss in enumerate(losses, 1)]))
    assert chart(page, "Training loss").locator("path.raw").count() == 0
    page.locator("#smoothing").fill("0.9")
    assert chart(page, "Training loss").locator("path.raw").count() == 1
    assert page.locator("path.raw").count() == 1, "only the training loss is smoothed"
    weights = 0.9 ** np.arange(29, -1, -1)
    expected = (weights * losses[:30]).sum() / weights.sum()
    values = numbers_in(hover(page, "Training loss", 30 / 40).split("\n\n")[1])
    assert values == pytest.approx([losses[29], expected], rel=1e-3)


def test_a_value_that_is_not_finite_is_a_gap(opened: Opened, tmp_path: Path) -> None:
    lines = [step_line(20 * i, loss=math.nan if i in (3, 5) else 5.0, gradient_norm=math.inf) for i in range(1, 8)]
    page = opened(write_run(tmp_path / "run", lines))
    (path,) = chart(page, "Training loss").locator("path.line").evaluate_all(ATTRIBUTE_D)
    assert re.sub(r"[\d. ]", "", path) == "MLMh" + "ML"
    assert path.count("h0") == 1, "a value between two gaps is a dot"
    assert chart(page, "Gradient norm").locator(".plot.empty").count() == 1
    assert "no finite value" in hover(page, "Training loss", 3 / 7)


def test_a_single_outlier_does_not_flatten_a_curve(opened: Opened, tmp_path: Path) -> None:
    lines = [step_line(20 * i, gradient_norm=1000.0 if i == 50 else 1.0 + i / 200) for i in range(1, 101)]
    page = opened(write_run(tmp_path / "run", lines))
    (path,) = chart(page, "Gradient norm").locator("path.line").evaluate_all(ATTRIBUTE_D)
    heights = [float(point.split(" ")[1]) for point in re.split("[ML]", path)[1:]]
    assert heights[0] - heights[-1] > 20
    assert chart(page, "Gradient norm").locator(".note").inner_text() == "cut off, up to 1,000"
    assert "1,000" in hover(page, "Gradient norm", 0.5)


def test_events_are_marked_and_listed(opened: Opened, tmp_path: Path) -> None:
    later = {"event": "damaged", "step": 50, "fault": "manifest.json cannot be read"}
    page = opened(write_run(tmp_path / "run", [step_line(20), *EVERY_KIND[3:], step_line(40), later]))
    legend = page.locator(".mark-legend").inner_text()
    for name in ("resumed", "out of memory", "NaN or infinite", "damaged checkpoint", "final model"):
        assert name in legend
    lines = chart(page, "Training loss").locator(".event line")
    places = [float(line.get_attribute("x1") or 0) for line in lines.all()]
    box = chart(page, "Training loss").locator(".plot").bounding_box()
    assert box is not None
    wide = box["width"] - LEFT - RIGHT
    assert [(place - LEFT) / wide for place in places] == pytest.approx([0.4] * 5 + [1.0], abs=1e-3)
    assert "resumed from the checkpoint of step 20" in hover(page, "Training loss", 0.4)
    open_all(page)
    table = page.get_by_role("region", name="Table: events")
    assert "weights.safetensors has changed" in table.inner_text()
    assert table.locator("tbody tr").count() == 6
    assert page.get_by_role("region", name="Table: training").locator("tbody tr").count() == 2


def test_several_runs_have_colours_and_buttons(opened: Opened, run: Path, tmp_path: Path) -> None:
    other = [line | ({"loss": 2.5} if line["event"] == "step" else {}) for line in lines_of_a_run()]
    page = opened(run, write_run(tmp_path / "other", other[:20], config=override(tiny(), ["train.seed=7"])))
    lines = chart(page, "Training loss").locator("path.line")
    colours = lines.evaluate_all("(lines) => lines.map((line) => getComputedStyle(line).stroke)")
    assert len(set(colours)) == 2
    text = hover(page, "Training loss", 200 / 600)
    assert re.search(r"step 200\s+run 7\.000\s+other 2\.500", text)
    assert "other" not in hover(page, "Training loss", 1.0), "the other run is shorter"
    button = page.get_by_role("button", name="run", exact=True)
    button.click()
    page.mouse.move(0, 0)
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 1
    page.get_by_role("button", name="other", exact=True).click()
    assert chart(page, "Training loss").locator(".plot.empty").count() == 1
    button.click()
    assert lines.count() == 1
    first = page.get_by_role("region", name="Table: settings").locator("tbody tr").first
    assert first.inner_text().split() == ["train.seed", "1", "7", "1", "not", "as", "in", "base", "runs", "differ"]


# Sample translations


def test_the_slider_shows_the_translation_of_its_validation(opened: Opened, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [*lines_of_a_run(), end_line(600, samples(4))])
    write_result(run, steps=600)
    page = opened(run)
    slider, output = page.locator("#validation"), page.locator("output[for=validation]")

    def shown() -> list[str]:
        return page.locator(".translation").all_inner_texts()

    assert shown() == [sample["translation"] for sample in samples(4)]
    assert output.inner_text() == "Final model: perplexity 4.480, BLEU 25.5"
    for place, (step, text) in enumerate(
        [(200, "1,000, BLEU 10.0"), (400, "100.0, BLEU 20.0"), (600, "10.00, BLEU 30.0")]
    ):
        slider.fill(str(place))
        assert shown() == [sample["translation"] for sample in samples(place + 1)]
        assert output.inner_text() == f"Step {step}: perplexity {text}"
        assert slider.get_attribute("aria-valuetext") == output.inner_text()
        assert (
            page.locator(".sample").first.locator(".translation mark").all_inner_texts()
            == REFERENCES[0].split()[: place + 1]
        )
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert shown() == [sample["translation"] for sample in samples(2)]
    page.get_by_role("button", name="Previous validation").click()
    assert shown() == [sample["translation"] for sample in samples(1)]
    assert page.get_by_role("button", name="Previous validation").is_disabled()
    open_all(page)
    rows = page.locator(".sample").first.locator("tbody tr").all_inner_texts()
    assert rows == [f"{step}\t{samples(n)[0]['translation']}" for n, step in enumerate((200, 400, 600, "final"), 1)]
    assert page.locator(".heat-map").count() == 0, "no attention was logged"


def test_the_heat_map_moves_with_the_slider(opened: Opened, run: Path) -> None:
    page = opened(run)
    sample = page.locator(".sample").first
    assert page.get_by_role("heading", name="Sample translations and alignment").count() == 1
    assert sample.locator("svg text").all_text_contents() == ["Yes", ".", "Ja", ".", "end"]
    for place, first in enumerate((0.1, 0.2, 0.3)):
        page.locator("#validation").fill(str(place))
        cells = sample.locator("rect")
        assert cells.count() == 6
        for n, (cell, text) in enumerate([("Ja", first), (".", 1 - first), ("end", 0.0)]):
            cells.nth(n).hover()
            target, weight = sample.locator(".status").inner_text().split(": ")
            assert target == f"Yes attends to {cell}"
            assert share(weight) == pytest.approx(text, abs=1e-3)
        levels = [int((cells.nth(n).get_attribute("class") or "").split("-")[1]) for n in range(3)]
        assert levels == [round(12 * weight**0.7) for weight in (first, 1 - first, 0)]
        label = sample.locator("svg").get_attribute("aria-label") or ""
        assert f"Yes to . {100 * (1 - first):.1f}\u00a0%" in label
    page.mouse.move(0, 0)
    assert sample.locator(".status").inner_text() == ""


def test_a_heat_map_keeps_its_size_while_the_slider_moves(opened: Opened, tmp_path: Path) -> None:
    def attention(n: int) -> dict[str, Any]:
        return {"source": ["▁Ja", "</s>"], "target": ["▁very"] * n, "weights": [[0.5, 0.5]] * n}

    lines = [step_line(40)]
    for step, n in ((20, 40), (40, 3)):
        lines.append(valid_line(step, 3.0, [samples(1)[0] | {"attention": attention(n)}]))
    page = opened(write_run(tmp_path / "run", lines))
    boxes = []
    for place, n in enumerate((40, 3)):
        page.locator("#validation").fill(str(place))
        assert page.locator(".heat-map rect").count() == 2 * n
        boxes.append(page.locator(".heat-map svg").bounding_box())
    assert boxes[0] == boxes[1]


def test_several_runs_show_their_translations_of_a_sentence_together(opened: Opened, run: Path, tmp_path: Path) -> None:
    lines = [step_line(100), valid_line(100, 3.0, samples(3)[:1])]
    page = opened(run, write_run(tmp_path / "other", lines))
    first, second = page.locator(".sample").all()
    page.locator("#validation").fill("0")
    assert page.locator("output[for=validation]").inner_text() == "Step 100"
    assert first.locator(".translation").all_inner_texts() == ["not translated", samples(3)[0]["translation"]]
    page.locator("#validation").fill("2")
    assert first.locator(".translation").all_inner_texts() == [
        samples(2)[0]["translation"],
        samples(3)[0]["translation"],
    ]
    assert second.locator(".translation").all_inner_texts() == [samples(2)[1]["translation"], "not translated"]
    assert [text.strip() for text in first.locator(".label").all_inner_texts()[2:]] == [
        "run step 400",
        "other step 100",
    ]
    assert first.locator(".heat-map:visible").count() == 1


# Data, settings, provenance


def test_settings_can_be_searched_and_filtered(opened: Opened, run: Path) -> None:
    page = opened(run)
    rows = page.get_by_role("region", name="Table: settings").locator("tbody tr")
    status = page.locator("#settings [role=status]")
    n_all = rows.count()
    assert status.inner_text() == f"{n_all} of {n_all} settings"
    page.get_by_role("searchbox").fill("adam BETA2")
    assert [text.split() for text in rows.all_inner_texts()] == [["train.adam_beta2", "0.98", "0.98"]]
    page.get_by_role("searchbox").fill("sinusoid")
    assert rows.count() == 1, "values are searched too"
    page.get_by_role("searchbox").fill("")
    page.get_by_role("radio", name="Not as in the base model").check()
    names = [text.split()[0] for text in rows.all_inner_texts()]
    assert "model.d_model" in names
    assert "model.norm" not in names
    assert page.locator(".badge", has_text="not as in base").count() == len(names) == rows.count()


def test_a_command_can_be_copied(opened: Opened, run: Path) -> None:
    page = opened(run, permissions=["clipboard-read", "clipboard-write"])
    command = page.locator(".command").first
    command.get_by_role("button").click()
    command.get_by_role("button", name=f"Copied: transduce report {run}").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == f"transduce report {run}"


# Accessibility, phones, themes


def full_runs(folder: Path, prepared_folder: Path) -> list[Path]:
    """Two runs with everything that a report can show."""
    runs = []
    for name in ("run", LONG_NAME):
        lines = [*lines_of_a_run(with_attention=True), *EVERY_KIND, end_line(600, samples(4))]
        lines += [{"event": "damaged", "step": 600, "fault": "x" * 200}]
        run = write_run(folder / name, lines)
        write_result(run, steps=600)
        (run / "model").mkdir()
        (run / "model" / "config.json").write_text("{}")
        (run / "model" / "card.json").write_text(json.dumps(CARD))
        shutil.copytree(prepared_folder, run / "prepared")
        report = json.loads((run / "prepared" / "report.json").read_text())
        report["corpora"][0] |= {
            "dropped": {"too long": 3, "empty": 2},
            "examples": {"too long": [7, "a" * 200, "b c"]},
        }
        report["train"]["sha256"] = name
        (run / "prepared" / "report.json").write_text(json.dumps(report))
        runs.append(run)
    return runs


def open_all(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((element) => { element.open = true; })")
    page.wait_for_function(
        "[...document.querySelectorAll('details')].every((element) => element.children.length === 2)"
    )


@pytest.mark.parametrize("n_runs", [1, 2])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_not_blank_and_has_no_accessibility_violations(
    opened: Opened, prepared_folder: Path, tmp_path: Path, scheme: str, n_runs: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe
    from PIL import Image

    page = opened(*full_runs(tmp_path, prepared_folder)[:n_runs], color_scheme=scheme)
    open_all(page)
    hover(page, "Training loss", 0.5)
    violations = Axe().run(page).response["violations"]
    assert [(violation["id"], [node["target"] for node in violation["nodes"]][:3]) for violation in violations] == []
    page.screenshot(path=tmp_path / "page.png")
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
    background = int(np.bincount(picture.ravel()).argmax())
    assert (background > 200) == (scheme == "light")
    assert len(np.unique(picture)) > 50


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_scrolls_only_vertically(opened: Opened, prepared_folder: Path, tmp_path: Path, width: int) -> None:
    runs = full_runs(tmp_path, prepared_folder)
    for shown in (runs[1:], runs):
        page = opened(*shown, viewport={"width": width, "height": 740}, has_touch=True)
        open_all(page)
        plot = chart(page, "Training loss").locator(".plot")
        plot.scroll_into_view_if_needed()
        for x in (60, 200):
            plot.tap(position={"x": x, "y": 100})
            assert chart(page, "Training loss").locator(".tip").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        widths = page.locator(".plot svg").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().right)")
        assert max(widths) <= width


def test_the_button_changes_the_theme(opened: Opened, run: Path) -> None:
    page = opened(run, color_scheme="light")
    colours = []
    for theme in ("auto", "light", "dark", "auto"):
        assert page.locator(".theme").inner_text() == f"Theme: {theme}"
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.locator(".theme").click()
    assert colours[0] == colours[1] == colours[3] != colours[2]


def test_charts_follow_the_width_of_the_window(opened: Opened, run: Path) -> None:
    page = opened(run)
    page.set_viewport_size({"width": 700, "height": 900})
    page.wait_for_function("document.querySelector('.plot svg').clientWidth < 660")
    assert "5.000" in hover(page, "Training loss", 400 / 600)


# Hostile, missing and damaged


def test_html_in_texts_is_shown_and_not_run(opened: Opened, prepared_folder: Path, tmp_path: Path) -> None:
    hostile = "".join(HOSTILE)
    pieces = {"source": HOSTILE, "target": HOSTILE, "weights": np.eye(len(HOSTILE)).tolist()}
    sample = {"source": hostile, "reference": hostile, "translation": hostile, "attention": pieces}
    fault = {"event": "damaged", "step": 20, "fault": hostile}
    lines = [step_line(20), valid_line(20, 3.0, [sample], bleu_signature=hostile), fault]
    run = write_run(tmp_path / "<img src=x onerror=window.ran=1>", lines)
    shutil.copytree(prepared_folder, run / "prepared")
    report = json.loads((run / "prepared" / "report.json").read_text())
    report["corpora"][0] |= {"name": hostile, "dropped": {hostile: 3}, "examples": {hostile: [1, hostile, hostile]}}
    (run / "prepared" / "report.json").write_text(json.dumps(report))
    settled = json.loads((run / "run.json").read_text().replace('"tiny"', json.dumps(hostile)))
    settled["about"]["device"] = hostile
    settled["about"]["data"]["files"] = {hostile: hostile}
    settled["config"]["model"][hostile] = hostile
    (run / "run.json").write_text(json.dumps(settled))
    (run / "model").mkdir()
    (run / "model" / "card.json").write_text(json.dumps(CARD).replace('"test.de"', json.dumps(hostile)))
    for runs in ([run], [run, write_run(tmp_path / "other", lines)]):
        page = opened(*runs)
        open_all(page)
        assert page.locator(".translation").first.text_content() == hostile
        assert hostile in hover(page, "Training loss", 1.0)
        assert page.evaluate("window.ran") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2


def test_a_run_that_has_only_begun_has_a_page(opened: Opened, run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "request.json").write_text("{}")
    page = opened(begun)
    assert page.locator(".pill").inner_text() == "Not started"
    assert "log.jsonl has no event yet" in page.locator(".missing").inner_text()
    assert page.locator(".plot.empty").count() == 8
    assert page.locator("#translations").count() == page.locator("#settings").count() == 0
    assert opened(begun, run).locator(".pill").all_inner_texts() == ["Not started", "Training"]


DAMAGES: list[tuple[str, list[str | int], Any]] = [
    ("run.json", ["config"], None),
    ("run.json", ["config", "model"], []),
    ("run.json", ["config", "train", "max_steps"], "many"),
    ("run.json", ["choices"], None),
    ("run.json", ["about"], []),
    ("run.json", ["about", "versions"], None),
    ("run.json", ["about", "data", "files"], "x"),
    ("run.json", ["about", "forecast", "parameters"], {}),
    ("result.json", ["candidates", "average of the last", "steps"], None),
    ("result.json", ["candidates", "average of the last", "steps"], ["x"]),
    ("result.json", ["candidates", "average of the last", "loss"], "x"),
    ("result.json", ["taken"], "nothing"),
    ("result.json", ["steps"], None),
    ("model/card.json", ["scores", 0, "scores"], None),
    ("model/card.json", ["scores", 0, "passport", "dtype"], 1),
    ("model/card.json", ["scores", 0, "scores", 0, "interval"], "x"),
    ("prepared/report.json", ["corpora", 0, "dropped"], None),
    ("prepared/report.json", ["corpora", 0, "examples"], {"too long": None}),
    ("prepared/report.json", ["corpora", 0, "n_read"], "x"),
    ("prepared/report.json", ["valid"], {}),
]


def test_a_page_of_a_damaged_run_opens(opened: Opened, prepared_folder: Path, tmp_path: Path) -> None:
    run, _ = full_runs(tmp_path, prepared_folder)
    for name, path, value in DAMAGES:
        content = (run / name).read_text()
        values = place = json.loads(content)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        (run / name).write_text(json.dumps(values))
        page = opened(run)
        open_all(page)
        assert page.locator("section h2").count() >= 5, (name, path, value)
        page.context.close()
        (run / name).write_text(content)


def test_the_page_of_a_long_run_opens_within_two_seconds_and_reacts(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", log_lines(2_000_000, validate_every=10_000, samples=samples(2, True)))
    path = tmp_path / "page.html"
    path.write_text(report_of([run, shutil.copytree(run, tmp_path / "other")]), encoding="utf-8")
    seconds = []
    for _ in range(5):  # the machine may be busy: take the fastest of several attempts
        page = browser.new_page()
        page.goto("about:blank")
        began = time.monotonic()
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_selector("[data-drawn=all]")
        page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
        seconds.append(time.monotonic() - began)
        if seconds[-1] < 2:
            break
        page.close()
    assert min(seconds) < 2
    assert hover(page, "Training loss", 0.5).startswith("step 1,0")
    page.close()
