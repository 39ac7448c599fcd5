"""How cost grows with the number of clients: time and memory of a round, from 10 clients to 10,000.

    python benchmarks/scale.py [--clients 10 100 ...] [--methods fedavg fedme] [--cohorts all 100] [--rounds 3] [--docs]

Made-up data: 60 features, 20 training samples a client, a network 60-20-10, batches of 10. With the cohort `all`, everybody
trains in every round; with 100, a hundred clients do, however many there are. Every point is a process of its own, so that
peak memory means something. Writes scale.json and, if matplotlib is there (extra `bench`), scale.png; prints the table of
docs/performance.md and, with `--docs`, puts table and picture there.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import protocol
import sides
import torch
from session import Session, parse

import report
from fedme.core.data import Arrays, ClientData, Schema, Split
from fedme.core.key import Key
from fedme.datasets import Dataset, Federation, Partition, Parts

FEATURES, CLASSES = 60, 10
TRAIN, VAL, TEST = 20, 4, 4  # samples of every client
MOST_ROUNDS, CLIENT_ROUNDS = 50, 90_000  # timed rounds of a point, and rounds times the clients that take part


def made_up(clients: int, key: Key) -> Federation:
    """Clients with the same number of samples each; a class is a direction in space, seen through noise."""
    count = TRAIN + VAL + TEST
    draw = key.torch()
    centres = torch.randn(CLASSES, FEATURES, generator=draw)
    labels = torch.randint(0, CLASSES, (clients * count,), generator=draw)
    x = centres[labels] + 2 * torch.randn(len(labels), FEATURES, generator=draw)
    schema = Schema((FEATURES,), tuple(str(c) for c in range(CLASSES)))
    rows = torch.arange(len(labels))
    dataset = Dataset("made up", Arrays(x, labels), schema, rows, rows[:0])
    parts = {str(u): Parts(*mine.split([TRAIN, VAL, TEST])) for u, mine in enumerate(rows.split(count))}
    data = {
        client: ClientData(client, *(Split(dataset.source, part) for part in (mine.train, mine.val, mine.test)))
        for client, mine in parts.items()
    }
    return Federation(dataset, Partition(parts), data, None, None, dict.fromkeys(data, CLASSES))


def megabytes() -> float:
    """The most memory that this process and the largest of its children have had so far."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(who).ru_maxrss for who in whose) / (2**20 if sys.platform == "darwin" else 2**10)


def one(job: dict[str, Any]) -> None:
    """Measure one point."""
    train = {"epochs": 1, "batch": 10, "lr": 0.05} | ({} if job["cohort"] is None else {"cohort": job["cohort"]})
    raw = {"method": {"name": job["method"]}, "models": {"pool": ["dnn-20"]}, "train": train, "rounds": job["rounds"] + 1}
    bare = megabytes()
    with Session(parse(raw), made_up(job["clients"], Key(0))) as session:
        loaded = megabytes()
        count = session.counted()
        seconds = []
        for _ in range(job["rounds"]):
            began = time.perf_counter()
            session.play()
            seconds.append(time.perf_counter() - began)
        after = megabytes()
        memory = {"libraries_mb": round(bare, 1), "ready_mb": round(loaded, 1), "peak_mb": round(after, 1)}
        protocol.answer("fedme", "scale", seconds, count.steps, count.samples, session.accuracy(), **memory)


def plot(points: list[dict[str, Any]], path: Path) -> bool:
    """Two panels, one line a method and cohort; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    kinds = list(dict.fromkeys((point["method"], point["cohort"]) for point in points))
    for panel, what, label in zip(panels, ("seconds", "peak_mb"), ("seconds a round", "peak memory, MB"), strict=True):
        for method, cohort in kinds:
            mine = [point for point in points if (point["method"], point["cohort"]) == (method, cohort)]
            name = f"{method}, {'everybody' if cohort is None else cohort} a round"
            style = "o-" if cohort is None else "s--"
            panel.plot([point["clients"] for point in mine], [point[what] for point in mine], style, label=name)
        panel.set(xscale="log", xlabel="clients", ylabel=label)
        panel.grid(alpha=0.3)
    panels[0].set(yscale="log")
    panels[1].set_ylim(bottom=0)
    panels[0].legend()
    figure.savefig(path, dpi=120)
    return True


SHOWN = (10, 100, 1000, 10000)  # clients, in the table of the documentation
NAMES = {"fedavg": "FedAvg", "fedme": "FedMe"}
TABLE = "| method | clients per round | 10 clients"


def table(points: list[dict[str, Any]]) -> str:
    """The table of docs/performance.md."""
    lines = [f"{TABLE} | 100 | 1,000 | 10,000 |", "|---|---|---:|---:|---:|---:|"]
    found = {(point["method"], point["cohort"], point["clients"]): point for point in points}
    for method, cohort in dict.fromkeys((point["method"], point["cohort"]) for point in points):
        mine = [found.get((method, cohort, clients)) for clients in SHOWN]
        cells = [f"{point['seconds']:.2g} s, {point['peak_mb']:.0f} MB" if point else "" for point in mine]
        lines.append(f"| {NAMES.get(method, method)} | {cohort or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def put_into_docs(points: list[dict[str, Any]], docs: Path) -> None:
    """Replace the table and the picture of the documentation."""
    page = docs / "performance.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(TABLE)
    if not begin:
        sys.exit(f"{page}: has no table that begins with '{TABLE}'")
    _, end, after = rest.partition("\n\n")
    page.write_text(before + table(points) + end + after, encoding="utf-8")
    plot(points, docs / "pictures" / "growth.png")


def main() -> None:
    """Measure all points, print a table, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10000])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedme"])
    parser.add_argument("--cohorts", nargs="+", default=["all", "100"], help="`all`, or a number of clients a round")
    parser.add_argument("--rounds", type=int, default=3, help="timed at least, after one that is not; more with few clients")
    parser.add_argument("--out", type=Path, default=sides.HERE / "results")
    parser.add_argument("--docs", action="store_true", help="put the table and the picture into the documentation")
    asked = parser.parse_args()
    cohorts = [None if cohort == "all" else int(cohort) for cohort in asked.cohorts]
    points = []
    print(f"{'method':8} {'cohort':>8} {'clients':>8} {'s a round':>10} {'peak MB':>9}")
    for method in asked.methods:
        for cohort in cohorts:
            for clients in asked.clients:
                if cohort is not None and clients < cohort:
                    continue
                # Rounds of few clients are short, and a median of few of them would be a matter of chance.
                rounds = max(asked.rounds, min(MOST_ROUNDS, CLIENT_ROUNDS // (cohort or clients)))
                job = {"method": method, "cohort": cohort, "clients": clients, "rounds": rounds}
                try:
                    found = sides.run(Path(__file__).name, job)
                except sides.Failed as error:
                    print(f"{method:8} {cohort or 'all':>8} {clients:>8} {error}", flush=True)
                    continue
                points.append(job | found | {"seconds": statistics.median(found["seconds_per_round"])})
                shown = points[-1]
                print(
                    f"{method:8} {cohort or 'all':>8} {clients:>8} {shown['seconds']:>10.4f} {shown['peak_mb']:>9.0f}",
                    flush=True,
                )
    asked.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": report.machine(), "started": report.now(), "points": points}
    (asked.out / "scale.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not plot(points, asked.out / "scale.png"):
        print("no scale.png: matplotlib is missing (pip install 'fedme[bench]')", file=sys.stderr)
    print(table(points))
    many = {point["clients"]: point["seconds"] for point in points if point["method"] == "fedme" and point["cohort"] is None}
    if {1000, 10000} <= many.keys():
        print(f"fedme, all: 10,000 clients take {many[10000] / many[1000]:.2f} times as long as 1,000 (at most 10.5)")
    if asked.docs:
        put_into_docs(points, sides.HERE.parent / "docs")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        one(json.loads(sys.argv[1]))
    else:
        main()
