"""Charts of results as SVG files, which a browser and GitHub display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
"""Margins in pixels. The right margin holds the names of the lines."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""The palette of Okabe and Ito, which colour-blind people can distinguish."""


def line_chart(path: Path, title: str, x_name: str, y_name: str, lines: Mapping[str, Points]) -> None:
    """Both axes are logarithmic, so that proportional growth is a straight line."""
    points = [point for line in lines.values() for point in line]
    xs, ys = ([math.log10(point[axis]) for point in points] for axis in (0, 1))
    x_low, x_high, y_low, y_high = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / max(x_high - x_low, 1e-9)
        up = (math.log10(y) - y_low) / max(y_high - y_low, 1e-9)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    drawn = [
        *frame(HEIGHT, LEFT + (WIDTH - LEFT - RIGHT) / 2, title, x_name),
        f'<g transform="rotate(-90)">{text(-HEIGHT / 2, 16, y_name, "middle")}</g>',
    ]
    for power in range(y_low, y_high + 1):
        _, y = place(10**x_low, 10.0**power)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        drawn.append(text(LEFT - 6, y + 4, f"{10.0**power:g}", "end"))
    for x in sorted({x for line in lines.values() for x, _ in line}):
        across, _ = place(x, 10.0**y_low)
        drawn.append(text(across, HEIGHT - BOTTOM + 18, short(x), "middle"))
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        places = [place(*point) for point in line]
        path_data = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        drawn.append(f'<path d="{path_data}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        drawn.append(text(places[-1][0] + 8, places[-1][1] + 4, name, "start", colour=colour))
    path.write_text("\n".join([*drawn, "</svg>\n"]), encoding="utf-8")


def dot_chart(path: Path, title: str, x_name: str, rows: Mapping[str, Sequence[float]], mark: float) -> None:
    """One row for each name, with its values as dots and their mean as a short vertical line. `mark` is the value of a
    dashed line through all rows."""
    left, right, step = 210, 30, 22
    values = [value for row in rows.values() for value in row]
    low, high = (math.floor(min(*values, mark)), math.ceil(max(*values, mark)))
    height = TOP + step * len(rows) + BOTTOM

    def across(value: float) -> float:
        return left + (value - low) / max(high - low, 1e-9) * (WIDTH - left - right)

    drawn = frame(height, left + (WIDTH - left - right) / 2, title, x_name)
    for i in range(5):
        x = across(tick := low + (high - low) * i / 4)
        drawn.append(f'<path d="M{x:.1f} {TOP}V{height - BOTTOM}" stroke="#ddd"/>')
        drawn.append(text(x, height - BOTTOM + 18, f"{tick:g}", "middle"))
    drawn.append(
        f'<path d="M{across(mark):.1f} {TOP}V{height - BOTTOM}" stroke="{COLOURS[1]}" stroke-dasharray="4 3"/>'
    )
    for i, (name, row) in enumerate(rows.items()):
        y, mean = TOP + step * (i + 0.5), across(sum(row) / len(row))
        drawn.append(text(left - 10, y + 4, name, "end"))
        drawn.append(f'<path d="M{mean:.1f} {y - 8:.1f}v16" stroke="{COLOURS[0]}" stroke-width="2"/>')
        drawn += [
            f'<circle cx="{across(value):.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[0]}" fill-opacity="0.5"/>'
            for value in row
        ]
    path.write_text("\n".join([*drawn, "</svg>\n"]), encoding="utf-8")


def frame(height: float, middle: float, title: str, x_name: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(middle, TOP / 2, title, "middle", 14),
        text(middle, height - 10, x_name, "middle"),
    ]


def text(x: float, y: float, words: str, anchor: str, size: int = 12, colour: str = "#222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {where}>{escape(words)}</text>"


def short(x: float) -> str:
    """For example, 25.6k for 25600."""
    return next((f"{x / unit:.3g}{name}" for unit, name in ((1e6, "M"), (1e3, "k")) if x >= unit), f"{x:g}")
