"""Tables on a terminal, as Markdown, CSV or LaTeX."""

import csv
import io
import os
import sys
from collections.abc import Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Format = Literal["table", "markdown", "csv", "latex"]


def wide() -> Console:
    """Standard output; wide enough for tables if it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


def render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], style: Format, console: Console) -> None:
    """Print a table; columns of numbers are right-aligned and never wrapped."""
    if style == "table":
        right = _numeric(header, rows)
        console.print(title, highlight=False, markup=False)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name, align in zip(header, right, strict=True):
            longest = max((len(row[header.index(name)]) for row in rows), default=0)
            least = max(longest, len(name)) if align or longest <= 12 else None  # long names are folded instead
            side: Literal["left", "right"] = "right" if align else "left"
            table.add_column(name, justify=side, no_wrap=longest <= 30, overflow="fold", min_width=least)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    else:
        print(text(header, rows, style), end="")


def text(header: Sequence[str], rows: Sequence[Sequence[str]], style: Literal["markdown", "csv", "latex"]) -> str:
    """A table as text."""
    return {"markdown": _markdown, "csv": _csv, "latex": _latex}[style](header, rows, _numeric(header, rows))


def _numeric(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For every column, whether it holds only numbers."""
    return [all(row[i][:1].isdigit() or row[i][:1] in ("", "-", "+") for row in rows) for i in range(len(header))]


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    lines = [header, ["---:" if numeric else "---" for numeric in right], *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    def line(cells: Sequence[str]) -> str:
        return " & ".join(_escaped(cell) for cell in cells) + " \\\\\n"

    columns = "".join("r" if numeric else "l" for numeric in right)
    body = "".join(line(row) for row in rows)
    return f"\\begin{{tabular}}{{{columns}}}\n\\hline\n{line(header)}\\hline\n{body}\\hline\n\\end{{tabular}}\n"


def _escaped(text: str) -> str:
    for plain, special in (
        ("\\", "\\textbackslash{}"),
        ("&", "\\&"),
        ("%", "\\%"),
        ("_", "\\_"),
        ("#", "\\#"),
        ("±", "$\\pm$"),
    ):
        text = text.replace(plain, special)
    return text
