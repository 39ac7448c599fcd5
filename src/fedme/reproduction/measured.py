"""What a run measured, small enough to keep: curves over the evaluated rounds, choices of architectures, seconds, sizes.

`take` reads a run directory once, when the run has finished, and leaves `measurements.json` there.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedme.config.experiment import load, parse
from fedme.core.atomic_files import write_json
from fedme.core.typed import build
from fedme.results import records, summary
from fedme.running import assembly

NAME = "measurements.json"  # another name whenever there is more in it: what older versions left is taken again
FEW = 5  # clients up to which every one has a curve of its own
DIGITS = 6


@dataclass(frozen=True)
class Curve:
    """A number over the evaluated rounds; accuracies are fractions. NaN: not finite."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]  # over clients
    pooled: tuple[float, ...] = ()  # over samples
    samples: float = 0.0  # behind a pooled accuracy, in the last round; 0: not an accuracy
    worth: float = 0.0  # samples that would make a pooled accuracy as sure as the mean over clients is


@dataclass(frozen=True)
class Measured:
    """One run. Curves of accuracy are named "model stage split", those of loss "loss role", a client's "client 0"."""

    config: Mapping[str, Any]  # every default filled in
    curves: Mapping[str, Curve] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()  # clients that begin with each architecture of the pool
    seconds: Mapping[str, float] = field(default_factory=dict)  # of one client and of the server, mean over rounds
    samples: Mapping[str, float] = field(default_factory=dict)  # sizes of clients, where only data was looked at


def take(folder: Path) -> None:
    """Extract what a finished run measured."""
    config = load(folder / summary.CONFIG)[0].plain()
    accuracy: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    seconds: dict[tuple[int, str], float] = {}
    server: dict[int, float] = {}
    for row in records.read(folder):
        seconds[row["round"], row["client"]] = row["client_seconds"]
        server[row["round"]] = row["server_seconds"]
        if row["stage"] == "training" and row["model"]:
            losses[f"loss {row['model']}", row["round"]].append(_number(row["loss"]))
        elif row["stage"] in ("round", "finetuned"):
            accuracy[f"{row['model']} {row['stage']} {row['split']}", row["round"]].append(row)
    evaluated = {t for _, t in accuracy}
    curves = {name: _accuracies(by_round) for name, by_round in _by_name(accuracy).items()}
    curves |= {
        name: Curve(tuple(kept), tuple(_rounded(statistics.fmean(by_round[t])) for t in kept))
        for name, by_round in _by_name(losses).items()
        if (kept := sorted(t for t in by_round if t in evaluated))
    }
    curves |= _of_clients(_by_name(accuracy).get("personal round test", {}))
    busy = [value for value in seconds.values() if value]
    took = {"client": statistics.fmean(busy) if busy else 0.0, "server": statistics.fmean(server.values()) if server else 0.0}
    found = Measured(_told(config), curves, _chosen(folder), {name: _rounded(value, 4) for name, value in took.items()})
    write_json(folder / NAME, asdict(found))


def look(config: Mapping[str, Any], folder: Path) -> None:
    """Extract the sizes of an experiment's clients, without training anything."""
    clients = assembly.gather(parse(config)).clients.values()
    sizes = {"train": [len(each.train) + len(each.val) for each in clients], "test": [len(each.test) for each in clients]}
    found: dict[str, float] = {}
    for part, counts in sizes.items():
        numbers = {
            "clients": len(counts),
            "total": sum(counts),
            "mean": statistics.fmean(counts),
            "std": statistics.stdev(counts),
            "max": max(counts),
            "min": min(counts),
        }
        found |= {f"{part} {name}": _rounded(float(value), 2) for name, value in numbers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NAME, asdict(Measured(_told(config), samples=found)))


def read(folder: Path) -> Measured | None:
    """What a run measured; None if it is not finished. A file that cannot be read is made again."""
    try:
        return from_plain(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        if not (folder / summary.NAME).exists():
            return None
    take(folder)
    return from_plain(json.loads((folder / NAME).read_text(encoding="utf-8")))


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the place where it was run."""
    return {key: value for key, value in config.items() if key != "output"}


def from_plain(plain: Any) -> Measured:
    """What was measured, from plain data; null stands for numbers that are not finite."""
    return build(Measured, _finite(plain))  # type: ignore[no-any-return]


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [math.nan if item is None else _finite(item) for item in value]
    return value


def _by_name(table: Mapping[tuple[str, int], Any]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for (name, t), value in table.items():
        found[name][t] = value
    return dict(found)


def _accuracies(by_round: Mapping[int, Sequence[Mapping[str, Any]]]) -> Curve:
    rounds = sorted(by_round)
    means = [statistics.fmean([_number(row["accuracy"]) for row in by_round[t]]) for t in rounds]
    pooled = [sum(row["correct"] for row in by_round[t]) / sum(row["samples"] for row in by_round[t]) for t in rounds]
    counts = [row["samples"] for row in by_round[rounds[-1]]]
    return Curve(
        tuple(rounds), tuple(map(_rounded, means)), tuple(map(_rounded, pooled)), sum(counts), _rounded(worth(counts), 1)
    )


def worth(counts: Sequence[float]) -> float:
    """A mean over clients with these many samples varies as an accuracy over so many: few samples of one client count much."""
    return len(counts) ** 2 / sum(1 / count for count in counts)


def _of_clients(by_round: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Curve]:
    names = sorted({row["client"] for rows in by_round.values() for row in rows})
    if len(names) > FEW:
        return {}
    found = {}
    for name in names:
        mine = {t: row for t, rows in sorted(by_round.items()) for row in rows if row["client"] == name}
        values = tuple(_rounded(_number(row["accuracy"])) for row in mine.values())
        count = list(mine.values())[-1]["samples"]
        found[f"client {name}"] = Curve(tuple(mine), values, (), count, count)
    return found


def _chosen(folder: Path) -> tuple[int, ...]:
    """How many clients begin with each architecture: the best on validation data, ties to the first, the smallest."""
    path = folder / "selection.json"
    if not path.exists():
        return ()
    scores: Mapping[str, Mapping[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    names = list(next(iter(scores.values())))
    picked = Counter(max(mine, key=lambda name: (_number(mine[name]), -names.index(name))) for mine in scores.values())
    return tuple(picked[name] for name in names)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _rounded(value: float, digits: int = DIGITS) -> float:
    return round(value, digits)
