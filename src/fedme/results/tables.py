"""Tables on a terminal, as Markdown, CSV or LaTeX."""

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedme.core.foreign_text import one_line

Format = Literal["table", "markdown", "csv", "latex"]

WHOLE = 30  # characters; longer text may be folded
FOLDED = 12  # characters to which it is folded if there is no more space
GAP = 3  # between columns
LONGEST = 4000  # characters of a line, which may quote the text of others
WORD = re.compile(r"(?:`[^`]*`|\S)+")


def wide() -> Console:
    """Standard output; wide enough for tables if it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140)


def render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], style: Format, console: Console) -> None:
    """Print a table; columns of numbers are right-aligned and never wrapped. Cells may have the text of others.

    Columns for which a terminal is too narrow are printed below the others, beside the columns that tell the rows apart.
    """
    title, header, rows = one_line(title), [one_line(cell) for cell in header], _safe(rows)
    if style == "table":
        right = is_numeric(header, rows)
        console.print(title, highlight=False, markup=False)
        longest = [max((len(row[i]) for row in rows), default=0) for i in range(len(header))]
        folded = [not right[i] and longest[i] > WHOLE for i in range(len(header))]  # long text
        least = [max(FOLDED if folded[i] else longest[i], len(name)) for i, name in enumerate(header)]
        for columns in _side_by_side(least, console.width, _names_of_rows(rows)):
            table = Table(box=SIMPLE_HEAD, pad_edge=False)
            for i in columns:
                side: Literal["left", "right"] = "right" if right[i] else "left"
                table.add_column(header[i], justify=side, no_wrap=not folded[i], overflow="fold", min_width=least[i])
            for row in rows:
                table.add_row(*(Text(row[i]) for i in columns))
            console.print(table)
    else:
        print(text(header, rows, style), end="")


def print_prose(lines: Iterable[str], console: Console, style: str | None = None) -> None:
    """Print sentences, one per line. A terminal gets them wrapped between words; a command in backticks stays whole."""
    for line in lines:
        console.print(wrapped(line, console), markup=False, highlight=False, soft_wrap=True, style=style)


def wrapped(line: str, console: Console) -> str:
    """The line for a console, with breaks between words in a terminal or notebook. A command is one word, and can be copied."""
    text, rows = one_line(line, LONGEST), [""]
    if not (console.is_terminal or console.is_jupyter):
        return text
    for word in WORD.findall(text):
        longer = f"{rows[-1]} {word}".lstrip()
        if rows[-1] and len(longer) > console.width:
            rows.append(word)
        else:
            rows[-1] = longer
    return "\n".join(rows)


def _names_of_rows(rows: Sequence[Sequence[str]]) -> int:
    """How many of the first columns tell the rows apart; 1 if none do."""
    columns = range(1, len(rows[0]) if rows else 1)
    return next((count for count in columns if len({tuple(row[:count]) for row in rows}) == len(rows)), 1)


def _side_by_side(widths: Sequence[int], available: int, names: int) -> list[list[int]]:
    """The columns of each table, so that they fit into the available width if they can.

    The first columns are in all tables: `names` of them, or one if these took more than half of the width.
    """
    names = names if sum(widths[:names]) + GAP * names <= available / 2 else 1
    first = list(range(names))
    tables, used = [first.copy()], sum(widths[:names]) + GAP * names
    for i, width in enumerate(widths[names:], names):
        if used + width + GAP > available and len(tables[-1]) > names:
            tables.append(first.copy())
            used = sum(widths[:names]) + GAP * names
        tables[-1].append(i)
        used += width + GAP
    return tables


def text(header: Sequence[str], rows: Sequence[Sequence[str]], style: Literal["markdown", "csv", "latex"]) -> str:
    """A table as text."""
    header, rows = [one_line(cell) for cell in header], _safe(rows)
    return {"markdown": _markdown, "csv": _csv, "latex": _latex}[style](header, rows, is_numeric(header, rows))


def _safe(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[one_line(cell) for cell in row] for row in rows]


def is_numeric(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For every column, whether it holds only numbers."""
    return [all(row[i][:1].isdigit() or row[i][:1] in ("", "-", "+", "·") for row in rows) for i in range(len(header))]


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
