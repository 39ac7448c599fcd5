"""Every number a run measures, one row a line, in `metrics.jsonl`.

A row says what it is about: round (from 0), client, model ("personal", "global", or a role while training such as "own" and
"guest"), split, and stage:

* "training": the mean loss over the samples seen while the model was changing;
* "trained": after the client's training, before the server's turn (validation scores that a method asked for);
* "round": after the round, as the client would deploy it;
* "finetuned": the same after fine-tuning.

`bytes_up`, `bytes_down` and `client_seconds` are this client's in this round, `server_seconds` the server's; they are
repeated in every row of a client and round. They count the messages of the method, not what evaluation or records need. A
client that did not answer, or was not there to be asked, has a row whose `notes` say so under `missing`. null means: not
defined, or not finite. Which metrics a row has depends on what is predicted (`core/metrics.py`).
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError, finite
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Metrics, task_type_of_row
from fedme.core.task_types import TaskType
from fedme.federation.client_work import ModelScore
from fedme.federation.round import Traffic

NAME = "metrics.jsonl"


class Records:
    """The metrics file of a run; `size` is how many bytes of it are written, `check` is their checksum."""

    def __init__(self, folder: Path, keep: int, check: int | None = None) -> None:
        path = folder / NAME
        before = path.read_bytes()[:keep] if keep and path.exists() else b""
        self.size, self.check = keep, zlib.crc32(before)
        if len(before) < keep:  # filling it up would be no rows
            raise RunError(f"{path}: is shorter than the checkpoint says; restore it, or start a new run")
        if check not in (None, self.check):
            raise RunError(f"{path}: damaged: its checksum is not what the checkpoint says; restore it, or start a new run")
        self.file = path.open("ab")
        self.file.truncate(keep)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; whoever reads along sees whole lines."""
        lines = b"".join(json.dumps(finite(row), ensure_ascii=False).encode() + b"\n" for row in rows)
        self.size += self.file.write(lines)
        self.check = zlib.crc32(lines, self.check)
        self.file.flush()

    def sync(self) -> None:
        """Everything written is on disk when this returns."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def rows(
    t: int,
    traffic: Mapping[ClientId, Traffic],
    scores: Mapping[ClientId, list[ModelScore]],
    samples: Mapping[ClientId, int],
    server_seconds: float,
    kind: TaskType = "classification",
) -> list[dict[str, Any]]:
    """All rows of a round."""
    found = []
    unknown = {} if kind == "regression" else {"correct": None, "classes_present": None}
    for client in dict.fromkeys([*traffic, *scores]):
        mine = traffic.get(client, Traffic())
        cost = {
            "bytes_up": mine.bytes_up,
            "bytes_down": mine.bytes_down,
            "client_seconds": mine.seconds,
            "server_seconds": server_seconds,
        }

        def row(model: str, arch: str | None, split: str, stage: str, metrics: Metrics) -> dict[str, Any]:
            about = {"round": t, "client": client, "model": model, "arch": arch, "split": split, "stage": stage}  # noqa: B023
            return about | metrics.plain(kind) | cost  # noqa: B023

        if client in traffic:
            losses = mine.report.losses or {"": float("nan")}
            for role, loss in losses.items():
                measured = Metrics(samples.get(client, 0), 0, 0, loss=loss)
                found.append(row(role, None, "train", "training", measured) | unknown)
            found[-1]["notes"] = dict(mine.report.notes) | ({} if mine.answered else {"missing": mine.reason or True})
            for role, score in mine.report.scores.items():
                measured = Metrics(score.samples, 0, 0, score.loss, score.accuracy)
                right = {"correct": round(score.accuracy * score.samples)} if kind == "classification" else {}
                found.append(row(role, None, "val", "trained", measured) | unknown | right)
        found += [row(s.model, s.arch, s.split, s.stage, s.metrics) for s in scores.get(client, [])]
    return found


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run, while it runs or afterwards; a last line that is not whole yet is left out."""
    path = folder / NAME
    if not path.exists():
        raise RunError(f"{folder}: not a run directory (no {NAME})")
    with path.open("rb") as file:  # a line may end within a letter
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _checked(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise RunError(f"{path}, line {number}: damaged: {error}") from error


TEXTS = ("client", "model", "split", "stage")
COUNTS = ("round", "samples", "bytes_up", "bytes_down")
NUMBERS = ("client_seconds", "server_seconds")
MAYBE = {kind: [name for name in Metrics(0, 0, 0).plain(kind) if name != "samples"] for kind in MEASURES}


def _checked(row: Any) -> dict[str, Any]:
    """A row that everybody can compute with, or a ValueError."""
    if not isinstance(row, dict):
        raise ValueError("not a table")
    maybe = MAYBE[task_type_of_row(row)]
    for names, kinds, what in (
        (TEXTS, (str,), "text"),
        (COUNTS, (int,), "a whole number"),
        (NUMBERS, (int, float), "a number"),
        (maybe, (int, float, type(None)), "a number or null"),
    ):
        for name in names:
            value = row.get(name, ...)
            if not isinstance(value, kinds) or isinstance(value, bool) or value != value or value in (math.inf, -math.inf):
                raise ValueError(f"'{name}' is not {what}")
    if not isinstance(row.get("arch"), str | None) or not isinstance(row.get("notes", {}), dict):
        raise ValueError("'arch' is not text, or 'notes' is no table")
    if min(row[name] for name in COUNTS) < 0 or max(row[name] for name in COUNTS) > 2**53:
        raise ValueError("a count that cannot be")
    return row
