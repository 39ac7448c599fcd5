"""The page: template, style, scripts and data in one file without external resources."""

import importlib.resources
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from fedme import __version__
from fedme.core.atomic_files import finite

FOLDER = importlib.resources.files("fedme.report") / "page"
# In the order of their dependencies.
SCRIPTS = ("draw", "tips", "lines", "ranked", "bubbles", "exchange", "grid", "pictures", "page")


def render(story: Mapping[str, Any]) -> str:
    """The HTML text. Names of runs and clients are data: the scripts write them as text, never as markup."""
    # "</" and "<!--" could end the script element, so "<" is escaped.
    data = json.dumps(finite(story), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    pieces = {
        "title": escape(str(story["title"])),
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


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
