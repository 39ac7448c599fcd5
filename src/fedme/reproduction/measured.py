"""The measurements of a run for tables and archives: curves, chosen architectures, seconds, numbers of samples.

`take` reads the directory of a finished run once and writes `run-measures.json` there.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedme.config.experiment import parse
from fedme.config.named_code import load_saved
from fedme.core.atomic_files import write_json
from fedme.core.typed import build
from fedme.results import records, summary
from fedme.running import assembly

NAME = "run-measures.json"  # rename it whenever its content changes, so that files of earlier versions are not read
FEW = 5  # up to this many clients, every client has a curve
DIGITS = 6


@dataclass(frozen=True)
class Curve:
    """A measure over the evaluated rounds; accuracies are fractions. NaN means not finite."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]  # over clients
    pooled: tuple[float, ...] = ()  # over samples
    samples: float = 0.0  # of a pooled accuracy in the last round; 0: not an accuracy
    worth: float = 0.0  # the effective number of samples of the client mean


@dataclass(frozen=True)
class Measured:
    """One run. Curves of accuracy are named "model stage split", of loss "loss role", of a client "client 0".

    Before aggregation ("own trained val") the model is a role in training.
    """

    config: Mapping[str, Any]  # every default filled in
    curves: Mapping[str, Curve] = field(default_factory=dict)
    chosen: tuple[int, ...] = ()  # number of clients that begin with each architecture of the pool
    seconds: Mapping[str, float] = field(default_factory=dict)  # of one client and of the server, mean over rounds
    samples: Mapping[str, float] = field(default_factory=dict)  # statistics of client sizes, of runs that only count samples
    # Right answers and samples of every client in the last evaluated round, by the name of a curve on test data.
    clients: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)


def take(folder: Path) -> None:
    """Write the measurements of a finished run."""
    config = load_saved(folder / summary.CONFIG, imports=False).plain()
    accuracy: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    seconds: dict[tuple[int, str], float] = {}
    server: dict[int, float] = {}
    for row in records.read(folder):
        seconds[row["round"], row["client"]] = row["client_seconds"]
        server[row["round"]] = row["server_seconds"]
        if row["stage"] == "training" and row["model"]:
            losses[f"loss {row['model']}", row["round"]].append(_number(row["loss"]))
        elif row["stage"] in ("trained", "round", "finetuned"):
            accuracy[f"{row['model']} {row['stage']} {row['split']}", row["round"]].append(row)
    evaluated = {t for name, t in accuracy if " trained " not in name}
    accuracy = {place: rows for place, rows in accuracy.items() if place[1] in evaluated}  # methods may score every round
    curves = {name: _accuracies(by_round) for name, by_round in _by_name(accuracy).items()}
    curves |= {
        name: Curve(tuple(rounds), tuple(_rounded(statistics.fmean(by_round[t])) for t in rounds))
        for name, by_round in _by_name(losses).items()
        if (rounds := sorted(t for t in by_round if t in evaluated))
    }
    curves |= _of_clients(_by_name(accuracy).get("personal round test", {}))
    busy = [value for value in seconds.values() if value]
    took = {"client": statistics.fmean(busy) if busy else 0.0, "server": statistics.fmean(server.values()) if server else 0.0}
    rounded = {name: _rounded(value, 4) for name, value in took.items()}
    of_clients = {name: _last(by_round) for name, by_round in _by_name(accuracy).items() if name.endswith(" test")}
    write_json(folder / NAME, asdict(Measured(_without_output(config), curves, _chosen(folder), rounded, clients=of_clients)))


def count_samples(config: Mapping[str, Any], folder: Path) -> None:
    """Write the numbers of samples of an experiment's clients, without training anything."""
    clients = assembly.gather(parse(config)).clients.values()
    sizes = {"train": [len(data.train) + len(data.val) for data in clients], "test": [len(data.test) for data in clients]}
    samples: dict[str, float] = {}
    for part, counts in sizes.items():
        numbers = {
            "clients": len(counts),
            "total": sum(counts),
            "mean": statistics.fmean(counts),
            "std": statistics.stdev(counts),
            "max": max(counts),
            "min": min(counts),
        }
        samples |= {f"{part} {name}": _rounded(float(value), 2) for name, value in numbers.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NAME, asdict(Measured(_without_output(config), samples=samples)))


def read(folder: Path) -> Measured | None:
    """The measurements of a run; None if it is not finished. A file that cannot be read is written again."""
    try:
        return from_plain(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        if not (folder / summary.NAME).exists():
            return None
    take(folder)
    return from_plain(json.loads((folder / NAME).read_text(encoding="utf-8")))


def _without_output(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "output"}


def from_plain(plain: Any) -> Measured:
    """Measurements from plain data, with NaN for null."""
    return build(Measured, _with_nan(plain))  # type: ignore[no-any-return]


def _with_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [math.nan if item is None else _with_nan(item) for item in value]
    return value


def _by_name(table: Mapping[tuple[str, int], Any]) -> dict[str, dict[int, Any]]:
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for (name, t), value in table.items():
        by_name[name][t] = value
    return dict(by_name)


def _accuracies(by_round: Mapping[int, Sequence[Mapping[str, Any]]]) -> Curve:
    rounds = sorted(by_round)
    means = [statistics.fmean([_number(row["accuracy"]) for row in by_round[t]]) for t in rounds]
    pooled = [sum(row["correct"] for row in by_round[t]) / sum(row["samples"] for row in by_round[t]) for t in rounds]
    counts = [row["samples"] for row in by_round[rounds[-1]]]
    worth = _rounded(effective_samples(counts), 1)
    return Curve(tuple(rounds), tuple(map(_rounded, means)), tuple(map(_rounded, pooled)), sum(counts), worth)


def _last(by_round: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Right answers and samples of every client in the last round."""
    return {row["client"]: (row["correct"], row["samples"]) for row in by_round[max(by_round)]}


def effective_samples(counts: Sequence[float]) -> float:
    """The number of samples for which a pooled accuracy varies as much as the mean over clients with these sample counts."""
    return len(counts) ** 2 / sum(1 / count for count in counts)


def _of_clients(by_round: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Curve]:
    names = sorted({row["client"] for rows in by_round.values() for row in rows})
    if len(names) > FEW:
        return {}
    curves = {}
    for name in names:
        by_client = {t: row for t, rows in sorted(by_round.items()) for row in rows if row["client"] == name}
        values = tuple(_rounded(_number(row["accuracy"])) for row in by_client.values())
        count = list(by_client.values())[-1]["samples"]
        curves[f"client {name}"] = Curve(tuple(by_client), values, (), count, count)
    return curves


def _chosen(folder: Path) -> tuple[int, ...]:
    """The number of clients that begin with each architecture: the best on validation data, the first one in a tie."""
    path = folder / "selection.json"
    if not path.exists():
        return ()
    scores: Mapping[str, Mapping[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    names = list(next(iter(scores.values())))
    best = Counter(max(client, key=lambda name: (_number(client[name]), -names.index(name))) for client in scores.values())
    return tuple(best[name] for name in names)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _rounded(value: float, digits: int = DIGITS) -> float:
    return round(value, digits)
