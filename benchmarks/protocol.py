"""What every side of a comparison reads and says; needs NumPy only, so that it runs in any peer's environment.

A side is a script that is given one job as JSON on its command line and prints one line of JSON, its answer, at the end.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MARK = "answer: "  # peers print all sorts of things; this line is the one that counts


@dataclass(frozen=True)
class Job:
    """What a side is to do: `warm` rounds that do not count, then `rounds` rounds that are timed."""

    work: str
    model: str  # "dense", "cnn", or a class of user_networks.py
    data: str  # .npz made by export.py: samples and who has which
    weights: str  # .npz made by export.py: the weights to begin with, in order
    batch: int
    lr: float
    warm: int
    rounds: int
    epochs: int = 1
    momentum: float = 0.0
    method: str = "fedavg"


@dataclass(frozen=True)
class Samples:
    """Inputs, scaled, and labels."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Data:
    """What the clients train on and what the global model is tested on."""

    clients: list[Samples]
    test: Samples


def job() -> Job:
    """The job on the command line."""
    return Job(**json.loads(sys.argv[1]))


def read(path: str) -> Data:
    """The clients' samples as every side must use them."""
    with np.load(path) as file:
        x, y, rows, sizes, test = (file[name] for name in ("x", "y", "rows", "sizes", "test"))
        factor, shape = float(file["factor"]), tuple(file["shape"])
        mean, std = file["mean"], file["std"]

    def pick(chosen: np.ndarray) -> Samples:
        inputs = (x[chosen].astype(np.float32) * np.float32(factor)).reshape(-1, *shape)
        return Samples((inputs - mean) / std, y[chosen].astype(np.int64))

    return Data([pick(mine) for mine in np.split(rows, np.cumsum(sizes)[:-1])], pick(test))


def read_weights(path: str) -> list[np.ndarray]:
    """The weights to begin with, in the order of the layers, as PyTorch stores them."""
    with np.load(path) as file:
        return [file[f"w{index}"] for index in range(len(file.files))]


def answer(
    peer: str, work: str, seconds: Sequence[float], steps: int | None, samples: int | None, accuracy: float | None, **more: Any
) -> None:
    """Say how it went."""
    tell(peer, work, side(seconds, steps, samples, accuracy), **more)


def side(seconds: Sequence[float], steps: int | None, samples: int | None, accuracy: float | None) -> dict[str, Any]:
    """How it went: seconds of every timed round; if known, steps and samples of one round and accuracy after the last."""
    rounds = [round(each, 6) for each in seconds]
    right = None if accuracy is None else round(accuracy, 5)
    return {"seconds_per_round": rounds, "steps": steps, "samples": samples, "accuracy": right}


def tell(peer: str, work: str, how: dict[str, Any], **more: Any) -> None:
    """Print the line that counts."""
    print(MARK + json.dumps({"peer": peer, "work": work} | how | more), flush=True)


def heard(output: str) -> dict[str, Any] | None:
    """The answer in what a side printed."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1][len(MARK) :]) if lines else None


def middle(seconds: Sequence[float], mean: bool = False) -> float:
    """What stands for many rounds: their median, or their mean where rounds are meant to differ."""
    return statistics.fmean(seconds) if mean else statistics.median(seconds)
