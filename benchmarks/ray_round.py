"""A round on Ray beside the same round in one process and on Flower's simulation: seconds, messages and bytes.

    python benchmarks/ray_round.py [--clients 200] [--workers 2] [--rounds 6] [--method fedme] [--no-flower] [--out DIR]

Digits, divided among the clients; four architectures. Every side is a process of its own with as many processors; the first
round does not count, and neither does the last, which saves all models. "training" is a run without evaluations in between,
"whole" evaluates in every round, as by default. The sides are also compared in their results: Ray's must be those of one
process, to the bit. "flower, reference" is Flower's engine as it was when its processes had no executor. Writes ray_round.json.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import protocol
import sides
from rich.console import Console

import report
from fedme.config.experiment import parse
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display

ARCHITECTURES = ["mlr", "dnn-16", "dnn-32", "dnn-32-16"]
SIDES = {
    "in one process": {"name": "inprocess"},
    "ray": {"name": "ray"},
    "flower": {"name": "flower"},
    "flower, reference": {"name": "flower", "path": "reference"},
}


class Watch(Display):
    """Notes when every round ends."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), quiet=True)
        self.ends: list[float] = []

    def advance(self, info: str | None = None) -> None:
        """A round has ended."""
        self.ends.append(time.perf_counter())
        super().advance(info)


def one(job: dict[str, Any]) -> None:
    """Play one side."""
    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "rounds": job["rounds"],
            "evaluate_every": job["rounds"] if job["what"] == "training" else 1,
            "output": f"{folder}/run",
            "method": {"name": job["method"]},
            "data": {"name": "digits"},
            "partition": {"name": "iid", "clients": job["clients"]},
            "models": {"pool": ARCHITECTURES, "shared": "dnn-16"},
            "train": {"epochs": 5, "batch": 5, "momentum": 0.9},
            "engine": SIDES[job["side"]] | {"workers": job["workers"]},
        }
        watch = Watch()
        began = time.perf_counter()
        done = run.start(parse(raw, "benchmark"), watch)
        seconds = [later - earlier for earlier, later in zip(watch.ends[:-2], watch.ends[1:-1], strict=True)]
        digest = hashlib.sha256()
        saved = sorted(done.glob("clients/**/*.safetensors"))  # of many clients, a few files
        if not saved:
            sys.exit("no models were saved")
        for path in saved:
            digest.update(path.read_bytes())
        log = (done / "engine.log").read_text().splitlines()
        said = next((line for line in log if line.startswith("on Ray: ")), "")
        rounds = {(row["round"], row["client"]): row for row in records.read(done)}  # several rows say the same
        sent = {name: round(sum(row[name] for row in rounds.values()) / 1e6, 1) for name in ("bytes_down", "bytes_up")}
        facts = {"start_s": round(watch.ends[0] - began, 2), "models": digest.hexdigest(), "said": said, "method_mb": sent}
    protocol.answer("fedme", "ray", seconds, 0, 0, 0.0, **facts)


def main() -> None:
    """Play all sides, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--method", default="fedme")
    parser.add_argument("--no-flower", action="store_true", help="only Ray and one process")
    parser.add_argument("--out", type=Path, default=sides.HERE / "results")
    asked = parser.parse_args()
    points = []
    print(f"{'what':9} {'side':20} {'s per round':>12} {'first round after, s':>21}")
    for what in ("training", "whole"):
        found = {}
        for side in SIDES:
            if side.startswith("flower") and asked.no_flower:
                continue
            job = {"what": what, "side": side, "clients": asked.clients, "workers": asked.workers}
            job |= {"rounds": asked.rounds, "method": asked.method}
            try:
                found[side] = sides.run(Path(__file__).name, job, timeout=1800)
            except sides.Failed as error:
                print(f"{what:9} {side:20} {error}", flush=True)
                continue
            found[side]["seconds"] = statistics.median(found[side]["seconds_per_round"])
            points.append(job | found[side])
            print(f"{what:9} {side:20} {found[side]['seconds']:>12.3f} {found[side]['start_s']:>21.1f}", flush=True)
        if "ray" in found and "in one process" in found:
            equal = found["ray"]["models"] == found["in one process"]["models"]
            print(f"{what:9} the method itself sends {found['ray']['method_mb']} MB")
            print(f"{what:9} {found['ray']['said']}; models {'equal to the bit' if equal else 'DIFFER'}")
            ratio = found["ray"]["seconds"] / found["in one process"]["seconds"]
            print(f"{what:9} ray / in one process: {ratio:.2f} (at most 1.5)")
        if "ray" in found and "flower, reference" in found:
            ratio = found["flower, reference"]["seconds"] / found["ray"]["seconds"]
            print(f"{what:9} flower, reference / ray: {ratio:.1f} (at least 4)")
    asked.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": report.machine(), "started": report.now(), "points": points}
    (asked.out / "ray_round.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        one(json.loads(sys.argv[1]))
    else:
        main()
