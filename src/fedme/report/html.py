"""The page: template, style, scripts and data in one file without external resources."""

import importlib.resources
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fedme import __version__
from fedme.core.atomic_files import finite
from fedme.core.foreign_text import one_line

FOLDER = importlib.resources.files("fedme.report") / "page"
LONGEST = 4000  # characters of a text on the page
# In the order of their dependencies.
SCRIPTS = (
    *("state", "format", "draw", "tips", "tables", "rows"),
    *("gain", "clients", "lines", "labels", "exchange", "loans", "architectures", "grid"),
    *("pictures", "first", "page"),
)


def render(story: Mapping[str, Any]) -> str:
    """The HTML text. Names of runs and clients are data: the scripts write them as text, never as markup."""
    # "</" and "<!--" could end the script element, so "<" is escaped.
    data = json.dumps(_safe(finite(story)), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    pieces = {
        "title": escape(one_line(str(story["title"]))),
        "style": _file("page.css"),
        "script": "\n".join(_file(f"{name}.js") for name in SCRIPTS),
        "data": data,
        "version": escape(__version__),
    }
    page = _file("page.html")
    for name, text in pieces.items():
        head, mark, tail = page.partition(f"{{{{{name}}}}}")
        assert mark, name
        page = head + text + tail
    return page


def _safe(value: Any) -> Any:
    """The same data with every text made safe to show."""
    if isinstance(value, str):
        return one_line(value, LONGEST)
    if isinstance(value, dict):
        return {one_line(key, LONGEST): _safe(item) for key, item in value.items()}
    return [_safe(item) for item in value] if isinstance(value, list | tuple) else value


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
