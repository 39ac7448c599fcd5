"""The architectures that clients choose by training alone ("best-local"), computed once for runs beside each other.

The choice does not depend on the method, and often takes longer than the rounds that follow. Runs that differ in nothing else
read it from a file in `.local/` beside their directories; one that finds another at work on it waits.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import InUse, locked, sealed, unsealed, write_json
from fedme.core.data import ClientId
from fedme.core.typed import build

NAME = "chosen-architectures.json"
POLL = 0.2  # seconds


@dataclass(frozen=True)
class ChosenArchitectures:
    """The name of every client's architecture, and its validation score with each one."""

    names: Mapping[ClientId, str]
    scores: Mapping[ClientId, Mapping[str, float | None]]  # None: not finite


def nothing(*_: Any) -> None:
    """The default for calls that nobody wants."""


@dataclass(frozen=True)
class SharedChoices:
    """Where choices are kept. `begin` is called with the number of operations before clients train, `tick` while waiting."""

    folder: Path
    begin: Callable[[int], None] = nothing
    tick: Callable[[], None] = nothing
    note: Callable[[str], None] = nothing

    def get(self, name: str, choose: Callable[[], ChosenArchitectures]) -> ChosenArchitectures:
        """The choice with this name: read, or made and kept for other runs."""
        place = self.folder / name
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError:  # nobody may write beside the run directory: the choice is not kept
            return choose()
        while True:
            if (known := _read(place / NAME)) is not None:
                self.note("the clients chose their architectures in an earlier run with the same settings")
                return known
            try:
                with locked(place):
                    if _read(place / NAME) is not None:  # another run has just ended with it
                        continue
                    made = choose()
                    write_json(place / NAME, sealed(asdict(made)))
                return made
            except InUse:
                self.tick()
                time.sleep(POLL)


def _read(path: Path) -> ChosenArchitectures | None:
    """The choice in a file; None if there is none, or if it is damaged: then it is made again."""
    try:
        return build(ChosenArchitectures, unsealed(json.loads(path.read_text(encoding="utf-8"))))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None
