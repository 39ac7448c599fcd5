"""The audit log: one line per transfer, at the server and at every site. Lines are only appended."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError
from fedme.core.foreign_text import safe_name
from fedme.core.model import models_in
from fedme.core.tree import nbytes
from fedme.deployment import append_only

NAME = "audit.jsonl"
HEADER = ("time", "run", "round", "what", "models", "bytes", "with")


def record(
    folder: Path, what: str, peer: str, run: str, round_number: int | None, value: Any, also: Mapping[str, Any] | None = None
) -> None:
    """Log that `value` was "sent" to or "received" from `peer`: its models, its scalar fields and its size.

    `also` names what else is in the message. The line is on disk when this returns.
    """
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    told = {field.name: getattr(value, field.name) for field in fields} | dict(also or {})
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "what": what,
        "peer": peer,
        "run": run,
        "round": round_number,
        "bytes": nbytes(value) if value is not None else 0,
        "models": [{"as": at, "arch": model.arch.name} for at, model in models_in(value)],
        "with": {name: _short(item) for name, item in told.items() if isinstance(item, bool | int | float | str)},
    }
    append_only.append(folder / NAME, line)


def _short(value: bool | int | float | str) -> bool | int | float | str:
    return safe_name(value) if isinstance(value, str) else value


def read(folder: Path) -> list[dict[str, Any]]:
    """All logged transfers, oldest first."""
    path = folder / NAME
    if not path.exists():
        raise RunError(f"{folder}: no {NAME} here; it is in a run's directory at the server, and in a site's `records`")
    return append_only.lines(path)


def cells(transfers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The transfers as rows of a table."""
    return [
        [
            transfer["time"],
            transfer["run"],
            "" if transfer["round"] is None else str(transfer["round"]),
            f"{transfer['what']} {'to' if transfer['what'] == 'sent' else 'from'} {transfer['peer']}",
            ", ".join(f"{model['as']}: {model['arch']}" for model in transfer["models"]) or "none",
            str(transfer["bytes"]),
            ", ".join(f"{name} {value}" for name, value in transfer["with"].items()),
        ]
        for transfer in transfers
    ]
