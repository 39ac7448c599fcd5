"""A whole run as `fedme run` or `fit` does it: data, rounds, evaluation, checkpoints, records, models, summary."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import protocol
import torch
from rich.console import Console
from session import parse
from torch import nn

import fedme
from fedme.datasets.download import root as data_root
from fedme.datasets.mnist import Mnist
from fedme.federation.round import RoundResult, run_round
from fedme.results import summary
from fedme.running import round_loop, run
from fedme.running.progress import Display


class Clock:
    """The rounds of a run as they are, with a clock around each: their training, without what a run does besides."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run_round(self, *args: Any, **kwargs: Any) -> RoundResult:
        """One round."""
        began = time.perf_counter()
        played = run_round(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        return played


class Watch(Display):
    """A silent display that notices when the rounds begin."""

    began = 0.0

    def start(self, label: str, total: int, done: int = 0, by_operation: bool = False) -> None:
        """Remember the time."""
        self.began = time.perf_counter()
        super().start(label, total, done, by_operation)


def main() -> None:
    """Do the job on the command line; a round's seconds are those of the whole run divided by its rounds.

    `startup` is the part before the first round: reading data and dividing it. `beside` is the training of the same rounds in a
    second run that does nothing besides: the first makes records of a round while clients compute the next, which slows both.
    """
    job, clock = json.loads(sys.argv[1]), Clock()
    play = fitted if job["modules"] else ran
    rounds = job["config"]["rounds"]
    alone = job | {"config": job["config"] | {"evaluate_every": rounds, "checkpoint_every": rounds}}
    with tempfile.TemporaryDirectory() as folder:
        seconds, startup, where = play(job, Path(folder) / "run")
        accuracy = pooled_accuracy(summary.read(where)["results"])
        round_loop.run_round = clock.run_round
        play(alone, Path(folder) / "alone")
    counted = max(seconds - job["allowance"], 0.0)
    whole, training = (protocol.side([spent / rounds], None, None, accuracy) for spent in (counted, clock.seconds))
    protocol.tell("fedme", job["work"], whole, startup=round(startup, 4), beside=training)


def ran(job: dict[str, Any], output: Path) -> tuple[float, float, Path]:
    """Run an experiment: its seconds, those before the first round, and its directory."""
    experiment = parse(job["config"] | {"output": str(output)})
    with Watch(Console(stderr=True), quiet=True) as display:
        began = time.perf_counter()
        where = run.start(experiment, display)
        return time.perf_counter() - began, display.began - began, where


def fitted(job: dict[str, Any], output: Path) -> tuple[float, float, Path]:
    """Call `fit` for clients with 600 images of MNIST and a module each; the images begin again where they end."""
    source, count = Mnist().load(data_root()).source, job["modules"]
    rows = torch.arange(600 * count).remainder(len(source.labels)).view(count, 600)
    clients = [
        fedme.Client(
            str(number),
            train=(source.inputs(mine).flatten(1), source.labels[mine]),
            model=nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
        )
        for number, mine in enumerate(rows)
    ]
    learner = fedme.FedAvg(**{key: value for key, value in job["config"].items() if key != "method"})
    began = time.perf_counter()
    result = learner.fit(clients, output=output, quiet=True)
    return time.perf_counter() - began, 0.0, result.folder


def pooled_accuracy(results: list[dict[str, Any]]) -> float:
    """The accuracy of the personal models over all test samples after the last round."""
    wanted = {"model": "personal", "stage": "round", "split": "test", "selection": "last round"}
    return float(next(each["accuracy"]["pooled"] for each in results if wanted.items() <= each.items()))


if __name__ == "__main__":
    main()
