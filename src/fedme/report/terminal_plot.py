"""Curves in a terminal: every braille character holds two by four dots."""

import itertools
from collections.abc import Mapping, Sequence

from rich.text import Text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, by row and column
COLOURS = ("bright_blue", "orange3", "green3", "magenta")
DASHES = (("━━━", 1, 0), ("╍╍╍", 4, 4), ("┅┅┅", 2, 2), ("┉┉┉", 1, 3))  # sign, and dots drawn and left out

Points = Sequence[tuple[float, float]]


def plot(series: Mapping[str, Points], width: int, height: int, last: float) -> Text:
    """Lines over rounds from 0 to `last`, with values on the left, rounds below and a legend above.

    Lines differ in their dashes too, for terminals without colours.
    """
    values = [y for points in series.values() for _, y in points]
    low, high = min(values), max(values)
    margin = max(6, len(_short(low)), len(_short(high)))
    inner = max(10, width - margin - 2)
    dots: dict[tuple[int, int], tuple[int, str]] = {}
    for (_, points), colour, (_, drawn, gap) in zip(series.items(), COLOURS, DASHES, strict=False):
        for x, y in _path(points, inner * 2, height * 4, last, low, high):
            if x % (drawn + gap) >= drawn:
                continue
            cell = (y // 4, x // 2)
            dots[cell] = (dots.get(cell, (0, ""))[0] | DOTS[y % 4][x % 2], colour)
    text = Text(" " * (margin + 2))
    for name, colour, (sign, _, _) in zip(series, COLOURS, DASHES, strict=False):
        text.append(f"{sign} ", colour).append(f"{name}  ")
    for row in range(height):
        number = {0: high, height // 2: (high + low) / 2, height - 1: low}.get(row) if high > low else {0: high}.get(row)
        text.append("\n" + ("" if number is None else _short(number)).rjust(margin) + " │", "dim")
        for column in range(inner):
            bits, colour = dots.get((row, column), (0, ""))
            text.append(chr(0x2800 + bits), colour)
    text.append("\n" + " " * (margin + 1) + "└" + "─" * inner, "dim")
    first, final = "round 1", str(round(last) + 1)
    below = first + final.rjust(inner - len(first)) if len(first) + len(final) < inner else final.rjust(inner)
    return text.append("\n" + " " * (margin + 2) + below, "dim")


def _path(points: Points, width: int, height: int, last: float, low: float, high: float) -> list[tuple[int, int]]:
    """The dots of a line, with its points joined."""

    def scaled(x: float, y: float) -> tuple[float, float]:
        fraction = (y - low) / (high - low) if high > low else 0.5
        return x / max(last, 1) * (width - 1), (1 - fraction) * (height - 1)

    ends = [scaled(x, y) for x, y in points]
    dots = [(round(x), round(y)) for x, y in ends]
    for (a, b), (c, d) in itertools.pairwise(ends):
        steps = round(max(abs(c - a), abs(d - b), 1))
        dots += [(round(a + (c - a) * i / steps), round(b + (d - b) * i / steps)) for i in range(steps)]
    return dots


def _short(number: float) -> str:
    return f"{number:.4g}"
