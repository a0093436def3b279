"""Charts are complete SVG files, and points have the positions of their values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from experiments.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, dot_chart, line_chart, short

SVG = "{http://www.w3.org/2000/svg}"


def test_points_have_the_positions_of_their_logarithms(tmp_path: Path) -> None:
    line_chart(tmp_path / "a.svg", "T & t", "x", "y", {"<one>": [(10, 1), (100, 10), (1000, 100)], "two": [(10, 100)]})
    root = ET.parse(tmp_path / "a.svg").getroot()
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")]
    middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    assert places == [(LEFT, HEIGHT - BOTTOM), middle, (WIDTH - RIGHT, TOP), (LEFT, TOP)]
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"T & t", "<one>", "two", "x", "y", "10", "100", "1k"} <= set(words)


def test_dots_have_the_positions_of_their_values(tmp_path: Path) -> None:
    rows = {"a < b": [10.0, 20.0], "c": [15.0]}
    dot_chart(tmp_path / "a.svg", "T", "PPL", rows, mark=18.0)
    root = ET.parse(tmp_path / "a.svg").getroot()
    (ten, first), (twenty, same), (fifteen, second) = (
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.iter(f"{SVG}circle")
    )
    assert first == same < second
    assert fifteen == (ten + twenty) / 2
    lines = [path.attrib["d"] for path in root.iter(f"{SVG}path")]
    assert f"M{fifteen} {first - 8}v16" in lines, "the mean of the first row"
    assert any(line.startswith(f"M{ten + 0.8 * (twenty - ten):.1f} ") for line in lines), "the mark"
    assert {"a < b", "c", "T", "PPL", "10", "20"} <= {element.text for element in root.iter(f"{SVG}text")}


def test_numbers_are_short() -> None:
    assert [short(x) for x in (512, 25_600, 200_704, 63_045_632)] == ["512", "25.6k", "201k", "63M"]
