"""What went where: one line for every transfer, at the server and at every site. Lines are only ever added."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

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


def _scalars(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {}
    pairs = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: item for name, item in pairs.items() if isinstance(item, bool | int | float | str)}
