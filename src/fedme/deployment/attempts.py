"""The attempts at a submitted run: when Flower was asked to start its server app, and how the last attempt ended.

A run may need several: its server app can be killed, its machine can be restarted, its disk can be full for a while. The files
are in the run's folder, so that they survive all of that.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from fedme.core.atomic_files import is_locked, locked_patiently, write_json
from fedme.core.foreign_text import one_line
from fedme.core.typed import build

ATTEMPT, STARTED, FAILURE = "attempt.json", "started.json", "failure.json"
STARTING = "starting"  # a folder that is locked while somebody asks Flower to start the server app
MAX_FRUITLESS = 3  # attempts in a row that failed with an error of their own before a further round was done


@dataclass(frozen=True)
class Attempt:
    """The last attempt."""

    number: int
    rounds: int = 0  # done when the attempt was made
    fruitless: int = 0  # failed attempts in a row before this one that finished no round
    flower_run: str = ""  # Flower's id, once Flower has accepted the attempt


@dataclass(frozen=True)
class Failure:
    """Why the last attempt ended early.

    An `outage` passes without a change of the run: a full disk, sites that are away, a server that ends. An `error` may come
    back at once. A run that was `stopped` or `given up` continues only when the operator submits it again.
    """

    reason: str
    kind: Literal["outage", "error", "stopped", "given up"]

    @property
    def final(self) -> bool:
        """Whether the server does not start another attempt."""
        return self.kind in ("stopped", "given up")


def attempt(folder: Path) -> Attempt | None:
    """The last attempt at a run."""
    path = folder / ATTEMPT
    return build(Attempt, json.loads(path.read_text())) if path.exists() else None


@contextmanager
def starting(folder: Path) -> Iterator[None]:
    """Let no other process start an attempt meanwhile: Flower takes some seconds to answer."""
    (folder / STARTING).mkdir(exist_ok=True)
    with locked_patiently(folder / STARTING, seconds=1):
        yield


def being_started(folder: Path) -> bool:
    """Whether somebody is starting an attempt."""
    return (folder / STARTING).exists() and is_locked(folder / STARTING)


def begin(folder: Path, rounds: int) -> Attempt:
    """Record that Flower is asked to start the server app."""
    before, failed = attempt(folder), failure(folder)
    fruitless = 0
    if before is not None and failed is not None and failed.kind == "error" and before.rounds == rounds:
        fruitless = before.fruitless + 1
    (folder / FAILURE).unlink(missing_ok=True)
    made = Attempt(before.number + 1 if before is not None else 1, rounds, fruitless)
    write_json(folder / ATTEMPT, asdict(made))
    return made


def accept(folder: Path, made: Attempt, flower_run: str) -> None:
    """Record that Flower has accepted the attempt."""
    write_json(folder / ATTEMPT, asdict(replace(made, flower_run=flower_run)))


def record_start(folder: Path) -> int:
    """Record that the server app has begun; called by the server app. Returns the number of its attempt."""
    if (last := attempt(folder)) is None:  # Flower was asked by hand
        last = begin(folder, 0)
    (folder / FAILURE).unlink(missing_ok=True)
    write_json(folder / STARTED, {"number": last.number})
    return last.number


def superseded(folder: Path, number: int) -> bool:
    """Whether a later attempt has begun: how an earlier one ends says nothing about it."""
    last = attempt(folder)
    return last is not None and last.number > number


def started(folder: Path) -> bool:
    """Whether the server app of the last attempt has begun."""
    last, path = attempt(folder), folder / STARTED
    return last is not None and path.exists() and bool(json.loads(path.read_text())["number"] == last.number)


def failure(folder: Path) -> Failure | None:
    """Why the last attempt ended early, if it did."""
    path = folder / FAILURE
    return build(Failure, json.loads(path.read_text())) if path.exists() else None


def record_failure(folder: Path, reason: str, kind: Literal["outage", "error", "stopped", "given up"]) -> None:
    """Record why an attempt ended early."""
    write_json(folder / FAILURE, asdict(Failure(one_line(reason), kind)))
