"""The table of `make attack`: every attack says what is promised, and what happened when it was tried.

An attack is a function in a module of this package whose name is in `PARTS`::

    @attack(by="server", promise="a site runs no code that a server sends")
    def a_bundle_with_code(federation: Loopback) -> str:
        ...
        return "refused: the bundle is not that of FedMe 0.1.0"

It returns what happened, for the table, and raises an AssertionError if the promise was broken. Its name in the table is that
of the function. `federation` is set up once for all attacks (see `federation.py`); an attack leaves it as it found it:
running, idle, with the same sites and experiment.
"""

import importlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fedme.core.atomic_files import write_json, write_text
from fedme_attacks.federation import Loopback

PARTS: tuple[str, ...] = ("site_requests", "site_code", "server_replies")  # modules of this package
Attacker = Literal["server", "site", "outsider", "file"]  # file: somebody whose saved models or runs are opened


@dataclass(frozen=True)
class Attack:
    """An attack that can be tried; `attempt` returns what happened, and raises if the promise was broken."""

    name: str
    by: Attacker
    promise: str
    attempt: Callable[[Loopback], str]


def attack(by: Attacker, promise: str) -> Callable[[Callable[[Loopback], str]], Attack]:
    """Make a function an attack."""
    return lambda function: Attack(function.__name__.replace("_", " "), by, promise, function)


def attacks(part: str) -> list[Attack]:
    """The attacks of a module, in its order."""
    module = importlib.import_module(f"fedme_attacks.{part}")
    return [value for value in vars(module).values() if isinstance(value, Attack)]


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    part: str
    attack: str
    by: str
    promise: str
    happened: str
    held: bool
    seconds: float


def outcomes(parts: Sequence[str], federation: Loopback) -> Iterator[Outcome]:
    """Try the attacks one after another. One that breaks is a promise that was not kept, and the others go on."""
    for part in parts:
        for tried in attacks(part):
            began, held = time.perf_counter(), True
            try:
                happened = tried.attempt(federation)
            except Exception as error:
                traceback.print_exc()
                held, happened = False, f"{type(error).__name__}: {error}"
            seconds = round(time.perf_counter() - began, 1)
            yield Outcome(part, tried.name, tried.by, tried.promise, happened, held, seconds)


def results(parts: Sequence[str], federation: Loopback, console: Console, folder: Path | None = None) -> dict[str, Any]:
    """Try the attacks and show each outcome; the table is written after each, so that what was found is not lost."""
    rows: list[dict[str, Any]] = []
    table = {"rows": rows}
    for outcome in outcomes(parts, federation):
        rows.append(asdict(outcome))
        console.print(
            f"{'held' if outcome.held else 'BROKEN'}: {outcome.attack} ({outcome.by}): {outcome.happened}", markup=False
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "attacks.md", markdown(table))
            write_json(folder / "attacks.json", table)
    return table


def failed(table: dict[str, Any]) -> list[str]:
    """The attacks whose promise was broken; an empty table has held nothing."""
    return [row["attack"] for row in table["rows"] if not row["held"]] if table["rows"] else ["nothing was tried"]


def markdown(table: dict[str, Any]) -> str:
    """The table as people read it."""
    lines = ["| attack | by | promised | happened | held |", "|---|---|---|---|---|"]
    for row in table["rows"]:
        cells = [row["attack"], row["by"], row["promise"], row["happened"], "yes" if row["held"] else "**no**"]
        lines.append("| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
