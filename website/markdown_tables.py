"""Tables of settings and text that Markdown does not interpret."""

import re
from collections.abc import Iterable
from typing import Any

from fedme.config.setting_help import settings_of


def first_line(entry: type[Any]) -> str:
    """The first line of a docstring."""
    return (entry.__doc__ or "").splitlines()[0]


def settings_table(entry: type[Any]) -> str:
    """The settings of a dataclass with their defaults."""
    rows = settings_of(entry)
    return table(("key", "default", "about"), rows) if rows else "No additional settings.\n"


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    head = list(header)
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escaped(text: str) -> str:
    """Plain text with escapes for characters that Markdown would interpret, as in <id>."""
    return re.sub(r"([|<>*_])", r"\\\1", text) if "`" not in text and "](" not in text else text.replace("|", "\\|")


def _cell(value: Any) -> str:
    return escaped(
        value if isinstance(value, str) else ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
    )
