"""Small runs for tests, ways to stop them, and what it means that two of them are the same."""

import hashlib
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedme.config.experiment import load
from fedme.core.atomic_files import read_tensors
from fedme.results import records, summary
from fedme.running import checkpoint, run
from fedme.running.progress import Display
from fedme.running.weight_store import FOLDER, TYPES

TINY = [
    "rounds=3",
    "partition.name=iid",
    "partition.clients=4",
    "data.limit=120",
    "data.unlabeled=20",
    "data.public=20",
    "models.pool=['mlr','dnn-8']",
    "models.assign=round-robin",
    "train.batch=16",
    "engine.threads=1",
]


class Killed(BaseException):
    """As good as a power cut."""


class Watching(Display):
    """A display that can pull the plug after so many operations."""

    def __init__(self, fuse=None):
        super().__init__(Console(file=io.StringIO()), quiet=True)
        self.fuse = fuse

    def tick(self):
        super().tick()
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                raise Killed


class CutAfterOneRound(Watching):
    """Pulls the plug when the first round is in the checkpoint, which another thread writes."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def advance(self, info=None):
        if info is None:  # on a slow machine also called within a round
            return
        deadline = time.monotonic() + 60
        while rounds_saved(self.folder) < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        raise Killed


def rounds_saved(folder: Path) -> int:
    """How many rounds the checkpoint of a run has."""
    file = folder / checkpoint.NAME
    return json.loads(file.read_text())["header"]["round"] if file.exists() else 0


ONE_WIDTH = ["models.assign=dnn-8"]  # for LG-FedAvg and FedProto, whose networks must have as many features


def do(folder, *words, fuse=None):
    own = (
        ONE_WIDTH
        if {word.split("=")[-1] for word in words if word.startswith("method")} & {"lg-fedavg", "fedproto", "heterofl"}
        else []
    )
    experiment, _ = load("digits-fedme", [*TINY, *own, *words, f"output={folder}"])
    return run.start(experiment, Watching(fuse))


def timeless(folder):
    return [{k: v for k, v in row.items() if not k.endswith("seconds")} for row in records.read(folder)]


def models(folder):
    found = {}
    for path in sorted(folder.glob("clients/*/*.safetensors")):
        tensors, _ = read_tensors(path)
        found.update({f"{path.parent.name}/{path.name}/{name}": tensor for name, tensor in tensors.items()})
    return found


def standing(folder: Path) -> Any:
    """Where a run stands by its checkpoint: every set of weights by its layout and its bytes, wherever they lie."""
    plain = json.loads((folder / checkpoint.NAME).read_text())
    layouts = plain.pop("layouts")

    def read(value):
        if isinstance(value, dict) and value.keys() == {"layout", "place"}:
            layout, place = layouts[value["layout"]], value["place"]
            size = sum(TYPES[kind].itemsize * math.prod(shape) for _, kind, shape in layout)
            data = (folder / FOLDER / f"{place['segment']:06}.bin").read_bytes()[place["offset"] :][:size]
            return [layout, hashlib.sha256(data).hexdigest()]
        if isinstance(value, dict):
            return {key: read(item) for key, item in value.items()}
        return [read(item) for item in value] if isinstance(value, list) else value

    for key in ("metrics_bytes", "metrics_check"):  # the rows have seconds in them, whose digits differ
        plain["header"].pop(key)
    plain.pop("check")
    return read(plain)


def difference(a: Path, b: Path) -> str:
    """In what two finished runs differ, other than in seconds; empty if in nothing."""
    if timeless(a) != timeless(b):
        return "records"
    first, second = models(a), models(b)
    if not first or first.keys() != second.keys() or not all(torch.equal(first[name], second[name]) for name in first):
        return "models"
    if not all(path.read_bytes() == (b / path.relative_to(a)).read_bytes() for path in a.glob("clients/*/*.safetensors")):
        return "bytes of models"
    if standing(a) != standing(b):
        return "checkpoint"
    return "" if summary.read(a)["results"] == summary.read(b)["results"] else "summary"


def identical(a: Path, b: Path) -> bool:
    return difference(a, b) == ""
