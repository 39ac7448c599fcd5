"""The table of `make reliability`: parts try something many times and say how often it held.

A part is a module of this package with one function::

    def rows(display: Display, quick: bool) -> Iterator[Row]: ...

`display` shows progress (`display.start("killing", 120)`, then `display.advance()` for every try). `quick` means: so few tries
that a test can wait for it. A part is added by writing its name into `PARTS`.
"""

import importlib
import json
import os
import platform
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from fedme.core.atomic_files import write_json, write_text
from fedme.running.progress import Display

PARTS: tuple[str, ...] = (
    "dropout",
    "crash",
    "long",
    "fuzz",
    "poison",
    "privacy",
    "chaos",
)


@dataclass(frozen=True)
class Row:
    """A promise, how often it was tried and how often it held; anything less than always fails."""

    what: str
    tried: int
    held: int
    detail: str = ""  # figures, or what went wrong

    @property
    def kept(self) -> bool:
        return self.tried > 0 and self.held == self.tried


def results(names: Sequence[str], quick: bool, console: Console, folder: Path | None = None) -> dict[str, Any]:
    """Run the parts one after another; the table is written after each, so that what was found is not lost."""
    began, found = time.perf_counter(), []
    table: dict[str, Any] = {"machine": machine(), "quick": quick, "minutes": 0.0, "rows": found}
    for name in names:
        for row in tried(name, quick, console):
            found.append({"part": name, **asdict(row), "kept": row.kept})
            console.print(
                f"{name}: {row.what}: {row.held} of {row.tried} {'' if row.kept else 'FAILED '}{row.detail}", soft_wrap=True
            )
            table["minutes"] = round((time.perf_counter() - began) / 60, 1)
            if folder is not None:
                write(table, folder)
    return table


def tried(name: str, quick: bool, console: Console) -> Iterator[Row]:
    """The rows of one part. A part that breaks is a row that failed, and the others go on."""
    some = False
    try:
        with Display(console) as display:
            for row in importlib.import_module(f"fedme_reliability.{name}").rows(display, quick):
                some = True
                yield row
    except Exception as error:
        traceback.print_exc()
        yield Row("the part runs to its end", 1, 0, f"{type(error).__name__}: {error}")
    else:
        if not some:
            yield Row("the part tries something", 1, 0)


def machine() -> dict[str, Any]:
    """What the table was made with."""
    packages = {name: metadata.version(name) for name in ("fedme", "torch", "numpy")}
    return {"processors": os.cpu_count(), "system": platform.system(), "python": platform.python_version(), **packages}


def failed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that did not hold; an empty table has held nothing."""
    return [row for row in table["rows"] if not row["kept"]] if table["rows"] else [{"part": "all", "what": "there are rows"}]


def markdown(table: dict[str, Any]) -> str:
    """The table as people read it."""
    lines = ["| part | what | tried | held | detail |", "|---|---|---:|---:|---|"]
    for row in table["rows"]:
        detail = str(row["detail"]).replace("|", "\\|").replace("\n", " ")
        held = row["held"] if row["kept"] else f"**{row['held']}**"
        lines.append(f"| {row['part']} | {row['what']} | {row['tried']} | {held} | {detail} |")
    made = ", ".join(f"{name} {value}" for name, value in table["machine"].items())
    quick = " Quick: fewer tries than the published table." if table["quick"] else ""
    return "\n".join([*lines, "", f"{table['minutes']} minutes; {made}.{quick}", ""])


def write(table: dict[str, Any], folder: Path) -> None:
    """Leave the table as Markdown and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "reliability.md", markdown(table))
    write_json(folder / "reliability.json", json.loads(json.dumps(table, default=str)))
