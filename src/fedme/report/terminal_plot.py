"""Curves in a terminal: every character is a field of two by four dots."""

import itertools
from collections.abc import Mapping, Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
COLOURS = ("bright_blue", "orange3", "green3", "magenta")

Points = Sequence[tuple[float, float]]


def plot(series: Mapping[str, Points], width: int, height: int, last: float) -> Text:
    """Lines over 0 to `last`, with the highest and the lowest value at the left and a legend above."""
    values = [y for points in series.values() for _, y in points]
    low, high = min(values), max(values)
    margin = max(6, len(_short(low)), len(_short(high)))
    inner = max(10, width - margin - 2)
    dots: dict[tuple[int, int], tuple[int, str]] = {}
    for (_, points), colour in zip(series.items(), COLOURS, strict=False):
        for x, y in _path(points, inner * 2, height * 4, last, low, high):
            cell = (y // 4, x // 2)
            dots[cell] = (dots.get(cell, (0, ""))[0] | DOTS[y % 4][x % 2], colour)
    text = Text(" " * (margin + 2))
    for name, colour in zip(series, COLOURS, strict=False):
        text.append("━ ", colour).append(f"{name}  ")
    for row in range(height):
        number = {0: high, height - 1: low}.get(row)
        text.append("\n" + ("" if number is None else _short(number)).rjust(margin) + " │", "dim")
        for column in range(inner):
            bits, colour = dots.get((row, column), (0, ""))
            text.append(chr(0x2800 + bits), colour)
    return text.append("\n" + " " * (margin + 1) + "└" + "─" * inner, "dim")


def _path(points: Points, wide: int, tall: int, last: float, low: float, high: float) -> list[tuple[int, int]]:
    """The dots of a line, joined between its points."""

    def place(x: float, y: float) -> tuple[float, float]:
        share = (y - low) / (high - low) if high > low else 0.5
        return x / max(last, 1) * (wide - 1), (1 - share) * (tall - 1)

    ends = [place(x, y) for x, y in points]
    found = [(round(x), round(y)) for x, y in ends]
    for (a, b), (c, d) in itertools.pairwise(ends):
        steps = round(max(abs(c - a), abs(d - b), 1))
        found += [(round(a + (c - a) * i / steps), round(b + (d - b) * i / steps)) for i in range(steps)]
    return found


def _short(number: float) -> str:
    return f"{number:.4g}"
