"""Measure this library against its peers and against itself: every row of the table that must be reached, in one run.

    python benchmarks/bench.py [--quick] [--only NAME ...] [--no-peers] [--fluke] [--out DIR]

Each side is a process of its own, one at a time; ours runs before and after the others, so that a machine that changes its
speed is noticed. Where both sides are ours, they play their rounds in turns; so do we and the plain loop, over networks as
people write them. MNIST, FEMNIST, CIFAR-10 and Shakespeare are looked for in $FEDME_DATA.
The first run installs the peers, each in an environment of its own under benchmarks/.venvs.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import against_plain
import sides
from method_rows import fluke_rows, method_rows
from rows import CORES, Against, Row, table
from user_rows import METHODS, flower_rows

import report


def measure(row: Row, folder: Path, peers: bool, quick: bool) -> list[dict[str, Any]]:
    """All comparisons of a row."""

    def ours() -> dict[str, Any]:
        def timed(config: Mapping[str, Any]) -> dict[str, Any]:
            return {**config, "rounds": row.total}

        job = {"work": row.work, "config": timed(row.config), "warm": row.warm, "rounds": row.rounds, "afresh": row.afresh}
        job |= {"modules": row.modules, "allowance": row.allowance}
        job["beside"] = next((timed(each.config) for each in row.against if each.kind == "ours"), None)
        return sides.run("whole.py" if row.whole else "ours.py", job)

    def theirs(against: Against) -> dict[str, Any]:
        if against.kind == "ours":
            return beside
        if against.kind == "peak":
            return sides.run("peak.py", {"work": row.work, **matrices(quick)})
        if not peers:
            raise sides.Failed("peers were left out")
        job = {"work": row.work, "model": row.model, "data": str(folder / "data.npz"), "weights": str(folder / "weights.npz")}
        if not Path(job["data"]).exists():
            config = dict(row.config) | {"method": {"name": "fedavg"}}  # whose first model peers begin with
            sides.run("export.py", {"config": config, "data": job["data"], "weights": job["weights"]})
        training = {
            key: row.config["train"][key] for key in ("batch", "lr", "epochs", "momentum") if key in row.config["train"]
        }
        settings = training | {"warm": row.warm, "rounds": row.rounds, "method": row.config["method"]["name"]}
        return sides.run(f"peer_{against.peer}.py", job | settings, against.peer)

    def attempt(side: Any, *arguments: Any) -> dict[str, Any] | str:
        try:
            return side(*arguments)
        except (sides.Failed, OSError) as error:
            return str(error)

    first = attempt(ours)
    if isinstance(first, str):
        return [report.empty(row, against, f"our side failed: {first}") for against in row.against]
    beside = first["beside"]
    answers = [attempt(theirs, against) for against in row.against]
    second = attempt(ours) if not quick else ""
    if not isinstance(second, str):
        for side, again in ((first, second), (beside, second["beside"])):
            if side is not None:
                side["seconds_per_round"] += again["seconds_per_round"]
    return [
        report.unanswered(row, against, first, answer) if isinstance(answer, str) else report.judge(row, against, first, answer)
        for against, answer in zip(row.against, answers, strict=True)
    ]


def matrices(quick: bool) -> dict[str, int]:
    """How the peak is measured."""
    return {"size": 256 if quick else 2048, "times": 20, "threads": CORES}


def versions() -> dict[str, str]:
    """Of ourselves, of what we stand on, and of the peers."""
    found = {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in ("fedme", "torch", "numpy")}
    for peer in sides.PEERS:
        pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (sides.HERE / "requirements" / f"{peer}.txt").read_text(), re.M))
        found |= {name: pinned[name] for name in ("fedjax", "jax", "flwr", "ray", "pfl", "fluke-fl") if name in pinned}
    return found


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny work: shows that everything runs, its numbers mean nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="rows whose name begins so; may be given again")
    parser.add_argument("--no-peers", action="store_true", help="compare with ourselves and the machine only")
    parser.add_argument("--out", type=Path, default=sides.HERE / "results", help="where results.json and results.md go")
    parser.add_argument("--fluke", action="store_true", help="also compare methods with fluke, which is 6 GB large")
    asked = parser.parse_args()
    rows = [*table(asked.quick), *method_rows(asked.quick), *flower_rows(asked.quick)]
    rows += fluke_rows(asked.quick) if asked.fluke else []
    networks = {f"networks-{name}-{method}": (name, method) for name in against_plain.NAMES for method in METHODS}
    names = [*(row.name for row in rows), *networks]
    if unknown := [name for name in asked.only or [] if not any(each.startswith(name) for each in names)]:
        parser.error(f"no row is called {', '.join(unknown)}; there are {', '.join(names)}")
    wanted = [name for name in names if not asked.only or name.startswith(tuple(asked.only))]

    began, started = time.perf_counter(), report.now()
    try:
        gemm = sides.run("peak.py", {"work": "", **matrices(asked.quick)})["gflops"]
    except sides.Failed as error:
        gemm = {}
        print(error, file=sys.stderr)
    results: dict[str, Any] = {"machine": report.machine(), "versions": versions(), "gemm": gemm, "quick": asked.quick}
    results |= {"started": started, "minutes": 0.0, "rows": [], "networks": []}
    for number, name in enumerate(wanted, 1):
        minutes = (time.perf_counter() - began) / 60
        print(f"[{number}/{len(wanted)}, {minutes:.0f} min] {name} ...", file=sys.stderr, flush=True)
        if name in networks:
            rounds = (2, 1) if asked.quick else (against_plain.ROUNDS, against_plain.WARM)
            results["networks"].append(against_plain.measure(*networks[name], *rounds, asked.quick))
        else:
            row = next(row for row in rows if row.name == name)
            with tempfile.TemporaryDirectory() as folder:
                results["rows"] += measure(row, Path(folder), not asked.no_peers, asked.quick)
        results["minutes"] = (time.perf_counter() - began) / 60
        report.write(results, asked.out)  # what is measured is not lost if something stops the rest
    print(report.markdown(results))


if __name__ == "__main__":
    main()
