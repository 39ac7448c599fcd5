"""The demo: three methods on the bundled digits, their table, and its reading in sentences."""

import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedme.cli.app import Quiet, app, err, examples, out
from fedme.config.experiment import load
from fedme.results import records, summary, views
from fedme.results.tables import print_prose
from fedme.running import run
from fedme.running.progress import Display

DEMO = ("digits-local", "digits-fedavg", "digits-fedme")


@app.command(epilog=examples("fedme demo", "fedme demo --quiet"))
def demo(quiet: Quiet = False) -> None:
    """FedMe with several architectures against Local and FedAvg, with and without fine-tuning, on the bundled digits."""
    folders = []
    for number, name in enumerate(DEMO, 1):
        experiment, _ = load(name)
        with Display(err, quiet) as display:
            display.note(f"{name} ({number} of {len(DEMO)})")
            folders.append(run.start(experiment, display))
    views.comparison(summary.compare(folders), "table", out)
    print_prose(story(*folders), out)


@dataclass(frozen=True)
class Outcome:
    """The personal models of a finished run after its last round, and the cost of the run."""

    folder: Path
    accuracy: Mapping[str, float]  # per client, on its test part; without clients whose model diverged
    architectures: Counter[str]
    samples: int  # test samples of the median client
    megabytes: float
    seconds: float  # of computation, at all clients and the server


def story(local: Path, shared: Path, exchanged: Path) -> list[str]:
    """What a run of FedMe gained over Local, what it lost and cost, which architectures are left, and what to do next.

    The directories are those of Local, of FedAvg and of FedMe, over the same clients.
    """
    local_scores, fedavg, fedme = (outcome(folder) for folder in (local, shared, exchanged))
    gains = {
        client: fedme.accuracy[client] - local_scores.accuracy[client]
        for client in fedme.accuracy
        if client in local_scores.accuracy
    }
    return [
        _gained(gains, local_scores, fedme),
        _lost(gains),
        _cost(fedavg, fedme),
        _architectures(fedme),
        _next(local_scores, fedavg, fedme),
    ]


def outcome(folder: Path) -> Outcome:
    """Read the result of a finished run from its directory."""
    result = summary.read(folder)
    last = result["rounds"] - 1
    wanted = {"round": last, "model": "personal", "stage": "round", "split": "test"}
    rows = [row for row in records.read(folder) if wanted.items() <= row.items()]
    return Outcome(
        folder=folder,
        accuracy={row["client"]: row["accuracy"] for row in rows if row["accuracy"] is not None},
        architectures=Counter(row["arch"] for row in rows),
        samples=round(statistics.median(row["samples"] for row in rows)) if rows else 0,
        megabytes=(result["bytes_up"] + result["bytes_down"]) / 1e6,
        seconds=result["client_seconds"] + result["server_seconds"],
    )


def _gained(gains: Mapping[str, float], local_scores: Outcome, fedme: Outcome) -> str:
    if not gains:
        return "Gained: unknown, no client has a test result in both runs."
    up = {client: gain for client, gain in gains.items() if gain > 0}
    if not up:
        return f"Gained: none of the {len(gains)} clients does better with FedMe than after training alone."
    best = max(up, key=lambda client: up[client])
    change = f"from {100 * local_scores.accuracy[best]:.0f} to {100 * fedme.accuracy[best]:.0f} %"
    mean = statistics.fmean(up.values())
    return (
        f"Gained: {len(up)} of {_count(len(gains), 'client')} {_does(len(up))} better with FedMe than after training alone, "
        f"by {100 * mean:.1f} points on average; client {best} gained most, {change}."
    )


def _lost(gains: Mapping[str, float]) -> str:
    if not gains:
        return "Lost: unknown."
    down = {client: gain for client, gain in gains.items() if gain < 0}
    same = sum(gain == 0 for gain in gains.values())
    if not down:
        return "Lost: no client." if not same else f"Lost: no client; {_count(same, 'client')} stayed the same."
    worst = min(down, key=lambda client: down[client])
    mean = -statistics.fmean(down.values())
    return (
        f"Lost: {_count(len(down), 'client')} {_does(len(down))} worse, by {100 * mean:.1f} points on average, "
        f"client {worst} by {-100 * down[worst]:.1f}; {_count(same, 'client')} stayed the same."
    )


def _cost(fedavg: Outcome, fedme: Outcome) -> str:
    return (
        f"Cost: FedMe sent {fedme.megabytes:.1f} MB and computed for {fedme.seconds:.1f} s, "
        f"FedAvg {fedavg.megabytes:.1f} MB and {fedavg.seconds:.1f} s; training alone sends nothing."
    )


def _architectures(fedme: Outcome) -> str:
    held = fedme.architectures.most_common()
    if len(held) == 1:
        return f"Architectures: all {_count(held[0][1], 'client')} ended with {held[0][0]}."
    listed = [f"{count} with {name}" for name, count in held[1:]]
    first = f"{held[0][1]} ended with {held[0][0]}" if held else "none ended with a model"
    return f"Architectures: of {_count(fedme.architectures.total(), 'client')}, {_listed([first, *listed])}."


def _next(local_scores: Outcome, fedavg: Outcome, fedme: Outcome) -> str:
    folders = " ".join(shlex.quote(str(run.folder)) for run in (local_scores, fedavg, fedme))
    return (
        f"Next: `fedme report {folders}` draws clients and exchanges, and `fedme run {DEMO[-1]} seed=1` repeats the last run: "
        f"with one seed and about {fedme.samples} test samples per client, a difference of a few points means little."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _does(number: int) -> str:
    return "does" if number == 1 else "do"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
