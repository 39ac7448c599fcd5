"""Whole runs with many clients: what preparing, rounds, evaluation and saving cost, in processor time.

    python benchmarks/large.py [--clients 1000 10000 50000] [--method fedme] [--cohort 500] [--rounds 2] [--save all]

Made-up data: 64 features, 24 samples a client, a network 64-20-10. Every point is a run in a process of its own, with all
that `fedme run` does: division, checkpoints, records, saved models. Processor time is of all threads and processes of the run;
the files of the run are counted.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedme.config.experiment import Experiment, Supplied, parse
from fedme.core.data import Arrays, Schema
from fedme.core.key import Key
from fedme.datasets.dataset import Dataset
from fedme.running import run
from fedme.running.progress import Display
from fedme.running.round_loop import RoundLoop

FEATURES, CLASSES, SAMPLES = 64, 10, 24


def made_up(clients: int) -> Dataset:
    """Clients with the same number of samples each; a class is a direction in space, seen through noise."""
    draw = Key(0).torch()
    centres = torch.randn(CLASSES, FEATURES, generator=draw)
    labels = torch.randint(0, CLASSES, (clients * SAMPLES,), generator=draw)
    x = centres[labels] + 2 * torch.randn(len(labels), FEATURES, generator=draw)
    rows = torch.arange(len(labels))
    owners = {str(client): (mine, rows[:0]) for client, mine in enumerate(rows.split(SAMPLES))}
    schema = Schema((FEATURES,), tuple(str(c) for c in range(CLASSES)))
    return Dataset("made up", Arrays(x, labels), schema, rows, rows[:0], owners)


def experiment(clients: int, method: str, cohort: int | None, rounds: int, save: str, output: Path) -> Experiment:
    """The experiment of one point."""
    train = {"epochs": 1, "batch": 10, "lr": 0.05} | ({} if cohort is None else {"cohort": cohort})
    raw: dict[str, Any] = {"method": {"name": method}, "models": {"pool": ["dnn-20"]}, "train": train, "rounds": rounds}
    raw |= {"data": {"name": "synthetic"}, "partition": {"name": "natural"}, "output": str(output), "save": save}
    raw |= {"evaluate_every": rounds}
    return dataclasses.replace(parse(raw), supplied=Supplied(made_up(clients), {}))


class Clock(Display):
    """Processor time at the steps of a run."""

    def __init__(self) -> None:
        super().__init__(Console(stderr=True), quiet=True)
        self.began, self.last, self.seconds = spent(), spent(), defaultdict[str, list[float]](list)

    def start(self, label: str, total: int, done: int = 0, by_operation: bool = False) -> None:
        super().start(label, total, done, by_operation)
        self.lap("preparing")

    def advance(self, info: str | None = None) -> None:
        super().advance(info)
        self.lap("round")

    def lap(self, name: str) -> None:
        now = spent()
        self.seconds[name].append(round(now - self.last, 2))
        self.last = now


def spent() -> float:
    """The processor seconds of this process and its finished children."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(time for who in whose for time in resource.getrusage(who)[:2])


def measured(clock: Clock, name: str) -> None:
    """Add the processor time of a method of the round loop to the clock."""
    original = getattr(RoundLoop, name)

    def timed(self: RoundLoop, *arguments: Any) -> Any:
        before = spent()
        try:
            return original(self, *arguments)
        finally:
            clock.seconds[name].append(round(spent() - before, 2))

    setattr(RoundLoop, name, timed)


def one(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one point."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        wanted = experiment(job["clients"], job["method"], job["cohort"], job["rounds"], job["save"], folder)
        clock = Clock()
        for name in ("evaluate_models", "_save_models"):
            measured(clock, name)
        began = time.perf_counter()
        run.start(wanted, clock)
        clock.lap("end")
        files = [path for path in folder.rglob("*") if path.is_file()]
        facts = {"files": len(files), "megabytes": round(sum(path.stat().st_size for path in files) / 1e6, 1)}
        peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        return {**job, **clock.seconds, **facts, "peak_mb": peak, "wall": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Measure all points and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 2000, 4000, 10000, 50000])
    parser.add_argument("--method", default="fedme")
    parser.add_argument("--cohort", type=int, help="clients a round; all by default, and 500 with 50,000 clients")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", default="all")
    asked = parser.parse_args()
    for clients in asked.clients:
        cohort = asked.cohort if asked.cohort is not None else 500 if clients >= 50000 else None
        job = {"clients": clients, "method": asked.method, "cohort": cohort, "rounds": asked.rounds, "save": asked.save}
        done = subprocess.run([sys.executable, __file__, json.dumps(job)], capture_output=True, text=True, check=False)
        print(done.stdout.strip() or done.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(one(json.loads(sys.argv[1]))))
    else:
        main()
