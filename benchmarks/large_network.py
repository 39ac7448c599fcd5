"""A round of clients with a large network, which run one after another, beside a plain PyTorch loop.

    python benchmarks/large_network.py [--weights 25e6] [--methods fedavg fedme] [--rounds 3]

Four clients train a dense network on digits, as in memory.py. The plain loop of turns_plain.py trains them one after another
with two torch threads, or in two processes of one thread. Every side is a process of its own; the first round does not count.
Needs memory for about 20 models.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import memory
import protocol
import sides
import torch
import turns_plain
from session import Session

SIDES = ("ours", "ours, engine.threads = 2", "plain, two threads", "plain, two processes")


class Here:
    """In place of a pool of processes: this one."""

    def imap_unordered(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> list[Any]:
        """The results, one after another."""
        return [function(task) for task in tasks]


def one(job: dict[str, Any]) -> None:
    """Play one side."""
    network = memory.network_of(job["weights"])[0]
    config = {
        "method": {"name": job["method"]},
        "rounds": job["rounds"] + 1,
        "data": {"name": "digits", "limit": 400},
        "partition": {"name": "iid", "clients": 4},
        "models": {"pool": [network], "shared": network},
        "train": {"epochs": 1, "batch": 25},
        "engine": {"workers": 2} | ({"threads": 2} if job["side"].endswith("= 2") else {}),
    }
    torch.set_num_threads(1)  # before anything is computed: forked processes must not inherit threads
    with Session.of(config) as session:
        if job["side"].startswith("ours"):
            timed(session.play, job)
            return
        turns_plain.plain = turns_plain.prepared(session)
    if job["side"].endswith("threads"):
        torch.set_num_threads(2)
        timed(lambda: turns_plain.plain.round(Here()), job)
        return
    with torch.multiprocessing.get_context("fork").Pool(2) as pool:
        timed(lambda: turns_plain.plain.round(pool), job)


def timed(play: Callable[[], None], job: dict[str, Any]) -> None:
    """Play all rounds, and say how long they took."""
    seconds = []
    for _ in range(job["rounds"] + 1):
        began = time.perf_counter()
        play()
        seconds.append(time.perf_counter() - began)
    protocol.answer("fedme", "large", seconds[1:], 0, 0, 0.0)


def main() -> None:
    """Play all sides and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=25e6)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedme"])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{'method':8} {'side':26} {'s per round':>12}")
    for method in asked.methods:
        for side in SIDES:
            job = {"method": method, "side": side, "weights": asked.weights, "rounds": asked.rounds}
            seconds = statistics.median(sides.run(Path(__file__).name, job)["seconds_per_round"])
            print(f"{method:8} {side:26} {seconds:>12.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        one(json.loads(sys.argv[1]))
    else:
        main()
