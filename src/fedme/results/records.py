"""The measurements of a run in `metrics.jsonl`, one row per line.

Every row has a round (from 0), a client, a model ("personal", "global", or a role in training such as "own" and "guest"), a
split and a stage:

* "training": the mean loss over the samples during training;
* "trained": after the client's training, before the server aggregates (validation scores that a method computes, or all
  methods with `evaluate_trained`);
* "round": after the round, as the client would deploy the model;
* "finetuned": the same after fine-tuning.

`bytes_up`, `bytes_down` and `client_seconds` are those of the client in this round, `server_seconds` those of the server; all
rows of a client and round repeat them. They count the messages of the method, not those of evaluation and records. A client
that did not reply or was unavailable has a row with the reason in `notes` under `missing`. null means undefined, not
finite, or beyond 1e100. The metrics of a row depend on the task type (`core/metrics.py`). `own` has the metrics that a program
has added, and `callbacks` the numbers that its callbacks returned for the client in this round (`core/callbacks.py`).
"""

import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError, finite
from fedme.core.callbacks import LARGEST, RESERVED, has_form
from fedme.core.data import ClientId
from fedme.core.foreign_text import LONGEST, one_line, safe_name
from fedme.core.metrics import MEASURES, Metrics, task_type_of_row
from fedme.core.task_types import TaskType
from fedme.federation.client_work import ModelScore
from fedme.federation.round import Traffic
from fedme.results.run_directory import similar_run

NAME = "metrics.jsonl"


class Records:
    """The metrics file of a run; `size` is the number of bytes written, `check` their checksum."""

    def __init__(self, folder: Path, keep: int, check: int | None = None) -> None:
        path = folder / NAME
        before = path.read_bytes()[:keep] if keep and path.exists() else b""
        self.size, self.check = keep, zlib.crc32(before)
        if len(before) < keep:
            raise RunError(f"{path}: is shorter than the checkpoint says; restore it, or start a new run")
        if check not in (None, self.check):
            raise RunError(f"{path}: damaged: its checksum is not that of the checkpoint; restore it, or start a new run")
        self.file = path.open("ab")
        self.file.truncate(keep)

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows; a concurrent reader sees complete lines."""
        lines = "".join(f"{_as_json(row)}\n" for row in rows).encode()
        self.size += self.file.write(lines)
        self.check = zlib.crc32(lines, self.check)
        self.file.flush()

    def sync(self) -> None:
        """Force everything written to disk."""
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
    task_type: TaskType = "classification",
) -> list[dict[str, Any]]:
    """All rows of a round."""
    result = []
    unknown = {} if task_type == "regression" else {"correct": None, "classes_present": None}
    names = {*traffic, *scores, *samples}
    known: dict[int, dict[str, Any]] = {}  # by the identity of metrics: the personal model is often the global one
    safe = functools.cache(lambda text: _recordable({"": text}, names)[""])
    for client in dict.fromkeys([*traffic, *scores]):
        sent = traffic.get(client, Traffic())
        cost = {
            "bytes_up": sent.bytes_up,
            "bytes_down": sent.bytes_down,
            "client_seconds": sent.seconds,
            "server_seconds": server_seconds,
        }
        cost = _recordable(cost, names)

        def row(model: str, arch: str | None, split: str, stage: str, metrics: dict[str, Any]) -> dict[str, Any]:
            about = {"round": t, "client": client, "model": safe(model), "arch": safe(arch)}  # noqa: B023
            return about | {"split": safe(split), "stage": safe(stage)} | metrics | cost  # noqa: B023

        def plain(metrics: Metrics) -> dict[str, Any]:
            return _recordable(metrics.plain(task_type), names)

        if client in traffic:
            losses = sent.report.losses or {"": float("nan")}
            for role, loss in losses.items():
                measured = plain(Metrics(samples.get(client, 0), 0, 0, loss=loss)) | unknown
                result.append(row(role, None, "train", "training", measured))
            notes = dict(sent.report.notes) | ({} if sent.answered else {"missing": sent.reason or True})
            result[-1]["notes"] = _recordable(notes, names)
            for role, score in sent.report.scores.items():
                measured = plain(Metrics(score.samples, 0, 0, score.loss, score.accuracy)) | unknown
                correct = {"correct": round(score.accuracy * score.samples)} if task_type == "classification" else {}
                result.append(row(role, None, "val", "trained", measured | correct))
        for s in scores.get(client, []):
            if id(s.metrics) not in known:
                known[id(s.metrics)] = plain(s.metrics)
            own = {"own": _recordable(dict(s.own), names)} if s.own else {}
            result.append(row(s.model, s.arch, s.split, s.stage, known[id(s.metrics)]) | own)
    return result


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def _as_json(row: dict[str, Any]) -> str:
    try:
        return _encode(row)
    except ValueError:  # a number that JSON does not know
        return _encode(finite(row))


def _recordable(row: dict[str, Any], names: Collection[ClientId]) -> dict[str, Any]:
    """The row as it is recorded: text of others is made safe, except names of clients, by which records are joined."""
    plain: dict[str, Any] = {}
    for key, value in row.items():
        kind = type(value)  # most values are numbers
        name = key if key in COLUMNS or kind is dict else safe_name(key)
        if kind is float:
            plain[name] = value if abs(value) <= LARGEST else None
        elif kind is str:
            plain[name] = value if value in names else one_line(value, LONGEST)
        else:
            plain[name] = _recordable(value, names) if kind is dict else value
    return plain


def added_numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
    """The metrics and numbers of callbacks that a program has added to a row."""
    return {name: value for table in ADDED for name, value in (row.get(table) or {}).items()}


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run, running or finished; an incomplete last line is left out."""
    path = folder / NAME
    if not path.exists():
        raise RunError(f"{folder}: not a run directory{similar_run(folder)}")
    with path.open("rb") as file:  # an incomplete line may end within a character
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield checked(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise RunError(f"{path}, line {number}: damaged: {error}") from error


TEXTS = ("client", "model", "split", "stage")
COUNTS = ("round", "samples", "bytes_up", "bytes_down")
NUMBERS = ("client_seconds", "server_seconds")
ADDED = ("own", "callbacks")  # numbers that a program has added
NULLABLE = {task: [name for name in Metrics(0, 0, 0).plain(task) if name != "samples"] for task in MEASURES}

COLUMNS = frozenset([*TEXTS, *COUNTS, *NUMBERS, "arch", *itertools.chain(*NULLABLE.values())])
TYPES_OF_COLUMNS = {  # of every task: the types of the values of a valid row, and what they are called
    task: {
        **dict.fromkeys(TEXTS, (frozenset([str]), "text")),
        **dict.fromkeys(COUNTS, (frozenset([int]), "an integer")),
        **dict.fromkeys(NUMBERS, (frozenset([int, float]), "a number")),
        **dict.fromkeys(names, (frozenset([int, float, type(None)]), "a number or null")),
    }
    for task, names in NULLABLE.items()
}


def _is_added(name: str, value: Any) -> bool:
    finite = value is None or (type(value) in (int, float) and abs(value) <= LARGEST)
    return finite and has_form(name) and name not in RESERVED


def checked(row: Any) -> dict[str, Any]:
    """A row with valid types and values, or a ValueError."""
    if not isinstance(row, dict):
        raise ValueError("not a table")
    for name, (types, expected) in TYPES_OF_COLUMNS[task_type_of_row(row)].items():
        value = row.get(name, ...)
        kind = type(value)
        if kind not in types or (kind is float and not math.isfinite(value)):
            raise ValueError(f"'{name}' must be {expected}")
    if not isinstance(row.get("arch"), str | None) or not isinstance(row.get("notes", {}), dict):
        raise ValueError("'arch' must be text and 'notes' a table")
    for table in ADDED:
        added = row.get(table, {})
        if not isinstance(added, dict) or not all(_is_added(name, value) for name, value in added.items()):
            raise ValueError(f"'{table}' must be a table of numbers, with names that no built-in metric has")
    if min(row[name] for name in COUNTS) < 0 or max(row[name] for name in COUNTS) > 2**53:
        raise ValueError("a count must be >= 0 and <= 2**53")
    return row
