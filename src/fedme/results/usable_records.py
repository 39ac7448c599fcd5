"""The records of a run as far as they can be used, and a list of what cannot: nothing in them stops a report."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError
from fedme.core.callbacks import LARGEST
from fedme.core.foreign_text import safe_name
from fedme.core.metrics import possible, task_type_of_row
from fedme.results import records

STAGES = {"training": ("train",), "trained": ("val",), "round": ("val", "test"), "finetuned": ("val", "test")}
NOTES: Mapping[str, type | tuple[type, ...]] = {
    "cluster": int,
    "lender": str,
    "adopts": (bool, int),
    "own": str,
    "guest": str,
    "missing": (str, bool),
    "malicious": str,
}
CLUSTERS = 10_000  # a cluster's number must be below it
SHOWN = 20  # reasons that are listed; the rest is counted


def read(folder: Path, rounds: int, clients: Collection[str] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """The usable rows in the order of rounds, and what could not be used; `clients` are those of the run, if they are known."""
    path = folder / records.NAME
    if not path.exists():
        raise RunError(f"{folder}: not a run directory (no {records.NAME})")
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    task = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = records.checked(json.loads(line))
                _require_usable(row, rounds, clients)
                if row["stage"] in ("round", "finetuned"):
                    task = task or task_type_of_row(row)
                    if task_type_of_row(row) != task:
                        raise ValueError("its metrics are those of another task")
            except (ValueError, RecursionError, OverflowError) as error:
                problems.append(f"line {number}: {error}")
                continue
            problems += [f"line {number}: {problem}" for problem in _mend(row)]
            rows.append(row)
    rows.sort(key=lambda row: int(row["round"]))
    shown = [safe_name(problem) for problem in problems[:SHOWN]]
    return rows, shown + ([f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else [])


def _require_usable(row: Mapping[str, Any], rounds: int, clients: Collection[str] | None) -> None:
    if row["round"] >= rounds:
        raise ValueError(f"'round' must be at most {rounds - 1}")
    if row["split"] not in STAGES.get(row["stage"], ()):
        raise ValueError("'stage' and 'split' are not those of a record")
    if row["stage"] in ("round", "finetuned") and not isinstance(row["arch"], str):
        raise ValueError("'arch' must be text")
    if clients is not None and row["client"] not in clients:
        raise ValueError(f"'client' is not one of the run: {row['client']}")
    for key, value in row.items():
        if isinstance(value, int | float) and abs(value) > LARGEST:
            raise ValueError(f"'{key}' must be at most {LARGEST:g}")
    if row["samples"] == 0 and row["stage"] in ("round", "finetuned"):
        raise ValueError("'samples' must be >= 1")
    for key in ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1", "auroc", "ece", "exact_match"):
        value = row.get(key)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"'{key}' must be between 0 and 1")
    if row.get("correct") is not None and not possible(
        row["correct"], row["samples"], row.get("accuracy"), task_type_of_row(row)
    ):
        raise ValueError("'correct' must be between 0 and 'samples', times the number of labels, and fit 'accuracy'")


def _mend(row: dict[str, Any]) -> Iterator[str]:
    """Remove what is not needed and cannot be used; say what it was."""
    epsilon = row.get("epsilon")
    if type(epsilon) not in (int, float, type(None)) or (isinstance(epsilon, float) and not math.isfinite(epsilon)):
        del row["epsilon"]
        yield "'epsilon' must be a number or null"
    notes = row.get("notes", {})
    for key, value in list(notes.items()):
        expected = NOTES.get(key, (str, int, float, bool, type(None)))
        usable = isinstance(value, expected) and not (expected is int and isinstance(value, bool))
        if usable and isinstance(value, int | float) and not abs(value) <= LARGEST:
            usable = False
        if not usable or (key == "cluster" and not 0 <= value < CLUSTERS):
            del notes[key]
            yield f"the note '{key}' has an unusable value"
    if notes.get("adopts") and not {"guest", "lender"} <= notes.keys():
        del notes["adopts"]
        yield "the note 'adopts' names no lender or no guest"
