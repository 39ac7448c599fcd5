"""Rewrite the archive of measured runs (docs/reproduction/*.jsonl) to the present names of settings; run once per renaming.

python tools/convert_archive.py docs/reproduction/*.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

RENAMED = {
    "train": {"decay": "lr_decay", "decay_at": "lr_decay_at"},
    "method": {"momentum": "optimizer_state"},
    "privacy": {"noise": "noise_multiplier"},
}


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with every setting under its present name, in the same order, and what its runs did said explicitly."""
    renamed = {
        table: {names.get(key, key): value for key, value in value.items()} if (names := RENAMED.get(table)) else value
        for table, value in config.items()
    }
    train = {"last_batch": "keep", **_with_schedule(renamed["train"])}
    return renamed | {"train": train, "data": {"stratify": False, **renamed["data"]}}


def _with_schedule(train: dict[str, Any]) -> dict[str, Any]:
    """The settings of training with the learning-rate schedule by name; the factor of a constant rate had no effect."""
    if "lr_schedule" in train:
        return train
    if train["lr_decay_at"]:
        return train | {"lr_schedule": "step"}
    return {key: value for key, value in train.items() if key != "lr_decay"} | {"lr_schedule": "constant"}


def main(files: list[str]) -> None:
    """Rewrite every file in place."""
    for path in map(Path, files):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [row | {"config": converted(row["config"])} for row in rows]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
