"""Tables as objects: text in a terminal, HTML in a notebook. Packages that are optional."""

import html
import importlib
import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from fedme.core.foreign_text import one_line
from fedme.results.tables import is_numeric, render

EXTRAS = {"pandas": "frames", "matplotlib": "plots"}  # the extra of this package that installs it
WIDE = 140  # characters of a line where there is no terminal


@dataclass(frozen=True, repr=False)
class Table:
    """A table with a title above and sentences below; ``print`` shows it as text, a notebook as HTML."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    lines: Sequence[str] = ()

    def __repr__(self) -> str:
        file = io.StringIO()
        width = shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() else WIDE
        console = Console(file=file, width=width, force_jupyter=False)  # a notebook would show it at once, beside the HTML
        render(self.title, self.header, self.rows, "table", console)
        for line in self.lines:
            console.print(one_line(line), markup=False, highlight=False, soft_wrap=True)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        numeric = is_numeric(self.header, self.rows)

        def row(cells: Sequence[str], tag: str) -> str:
            sides = ["right" if right else "left" for right in numeric]
            inside = (
                f'<{tag} style="text-align:{s};padding:2px 8px">{_safe(cell)}</{tag}>'
                for s, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(inside)}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        below = "".join(f"<p>{_safe(line)}</p>" for line in self.lines)
        head = f"<p><b>{_safe(self.title)}</b></p>" if self.title else ""
        return f"{head}<table><thead>{row(self.header, 'th')}</thead><tbody>{body}</tbody></table>{below}"


def _safe(text: str) -> str:
    return html.escape(one_line(text))


def optional(package: str, what: str) -> Any:
    """A package that not every installation has."""
    try:
        return importlib.import_module(package)
    except ImportError:
        root = package.partition(".")[0]
        raise ImportError(f"{what} needs {root}: pip install 'fedme[{EXTRAS[root]}]', or pip install {root}") from None
