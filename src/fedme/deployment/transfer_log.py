"""What went where: one line for every transfer, at the server and at every site. Lines are only ever added."""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedme.core.atomic_files import RunError
from fedme.core.model import models_in
from fedme.core.tree import nbytes

NAME = "audit.jsonl"


def note(folder: Path, what: str, peer: str, run: str, round_number: int, value: Any) -> None:
    """Write down that `value` was "sent" to or "received" from `peer`: which models, what else, how many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "what": what,
        "peer": peer,
        "run": run,
        "round": round_number,
        "bytes": nbytes(value) if value is not None else 0,
        "models": [{"as": at, "arch": model.arch.name} for at, model in models_in(value)],
        "with": _scalars(value),
    }
    with (folder / NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """Every transfer that was written down, the oldest first."""
    path = folder / NAME
    if not path.exists():
        raise RunError(f"{folder}: no {NAME} here; it is in a run's directory at the server, and in a site's state directory")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


HEADER = ("time", "run", "round", "what", "models", "bytes", "with")


def cells(transfers: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The same for a table."""
    return [
        [
            each["time"],
            each["run"],
            str(each["round"]),
            f"{each['what']} {'to' if each['what'] == 'sent' else 'from'} {each['peer']}",
            ", ".join(f"{model['as']}: {model['arch']}" for model in each["models"]) or "none",
            str(each["bytes"]),
            ", ".join(f"{name} {value}" for name, value in each["with"].items()),
        ]
        for each in transfers
    ]


def _scalars(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {}
    pairs = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: item for name, item in pairs.items() if isinstance(item, bool | int | float | str)}
