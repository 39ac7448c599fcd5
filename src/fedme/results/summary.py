"""The results of a run, each saying exactly what it is: which model, split, stage and round, and over what it is a mean."""

import itertools
import json
import math
import shlex
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedme.config.identity import digest
from fedme.core.atomic_files import RunError, sealed, unsealed, write_json
from fedme.core.metrics import LOSS, MEASURES, Measure, task_type_of_row
from fedme.core.task_types import TaskType
from fedme.core.typed import TypedError
from fedme.results import records

NAME = "summary.json"
CONFIG = "config.toml"

TaskLoss = tuple[str, str]  # model, stage
Splits = dict[str, list[dict[str, Any]]]  # the rows of one kind in one round, by split


def summarise(rows: Iterable[dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Client means and pooled values of the last round and of the best round by validation.

    Rows come round by round, and no more than the rounds that are wanted in the end are kept.
    """
    sums = dict.fromkeys(("bytes_up", "bytes_down", "client_seconds"), 0)
    server = 0.0
    last: dict[TaskLoss, tuple[int, Splits]] = {}
    best: dict[TaskLoss, tuple[float, int, Splits]] = {}
    evaluated: Counter[TaskLoss] = Counter()
    epsilon: dict[str, float | None] = {}
    missing: Counter[str] = Counter()
    trouble = Trouble()
    task: TaskType | None = None
    for t, together in itertools.groupby(rows, key=lambda row: row["round"]):
        traffic: dict[str, dict[str, Any]] = {}
        found: dict[TaskLoss, Splits] = defaultdict(lambda: defaultdict(list))
        for row in together:
            trouble.look(row)
            traffic.setdefault(row["client"], row)
            epsilon |= {row["client"]: row["epsilon"]} if "epsilon" in row else {}  # it only grows: the last is that of all
            if why := row.get("notes", {}).get("missing"):
                missing[_sort_of(why)] += 1
            if row["stage"] in ("round", "finetuned"):
                task = task or task_type_of_row(row)
                found[row["model"], row["stage"]][row["split"]].append(row)
        sums = {name: total + sum(row[name] for row in traffic.values()) for name, total in sums.items()}
        server += next(iter(traffic.values()))["server_seconds"]
        for kind, splits in found.items():
            for split, mine in splits.items() if trouble.malicious else ():  # their numbers mean nothing, whatever they are
                splits[split] = [row for row in mine if row["client"] not in trouble.malicious]
            evaluated[kind] += 1
            last[kind] = t, splits
            if splits.get("val"):
                merit = _merit(means(splits["val"]))
                if kind not in best or merit > best[kind][0]:
                    best[kind] = merit, t, splits
    results = []
    for model, stage in sorted(last, key=lambda kind: (kind[1] != "round", kind)):
        picks = {"last round": last[model, stage]}
        if (model, stage) in best and evaluated[model, stage] > 1:
            picks["best round by validation"] = best[model, stage][1:]
        for selection, (t, splits) in picks.items():
            for split in ("val", "test"):
                if split in splits:
                    about = {"model": model, "stage": stage, "split": split, "selection": selection, "round": t}
                    results.append(about | means(splits[split]))
    private = {"privacy": {"delta": config["privacy"]["delta"], "epsilon": epsilon}} if "privacy" in config else {}
    return (
        private
        | {
            "name": config["name"],
            "method": config["method"]["name"],
            "task": task or task_type_of_row({}),
            "seed": config["seed"],
            "rounds": config["rounds"],
            "config": digest({key: value for key, value in config.items() if key != "seed"}),
            "results": results,
            **sums,
            "server_seconds": server,
            "missing": dict(sorted(missing.items())),
        }
        | trouble.plain()
    )


@dataclass
class Trouble:
    """Who sent what could not be used, who was kept out because of it, and who was hostile on purpose."""

    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantined: dict[str, dict[str, Any]] = field(default_factory=dict)
    malicious: set[str] = field(default_factory=set)

    def look(self, row: Mapping[str, Any]) -> None:
        """Note what a row of the records tells."""
        notes = row.get("notes") or {}
        if "malicious" in notes:
            self.malicious.add(row["client"])
        missing = notes.get("missing")
        for word, found in (("refused", self.refused), ("quarantined", self.quarantined)):
            if isinstance(missing, str) and missing.startswith(word):
                mine = found.setdefault(row["client"], {"rounds": 0, "first": row["round"], "reason": missing})
                mine["rounds"] += 1

    def plain(self) -> dict[str, Any]:
        """What there is to tell; nothing if nothing happened."""
        told = {"refused": self.refused, "quarantined": self.quarantined, "malicious": sorted(self.malicious)}
        return {name: value for name, value in told.items() if value}


def trouble(result: Mapping[str, Any]) -> list[str]:
    """What went wrong with whom, one line each."""
    lines = []
    if malicious := result.get("malicious"):
        lines.append(f"Hostile on purpose, and in none of the means: client {', '.join(malicious)}.")
    for what in ("refused", "quarantined"):
        for client, told in result.get(what, {}).items():
            lines.append(
                f"client {client}: {what} in {told['rounds']} rounds, first in round {told['first']}: {told['reason']}"
            )
    return lines


def _sort_of(reason: Any) -> str:
    """What happened, without when and how much: "late: it took 7 s" is "late"."""
    return reason.split(":")[0].split(" in round ")[0] if isinstance(reason, str) else "no reply"


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over clients: mean and standard deviation (ddof = 1) of every metric where it is defined, and pooled over samples."""
    measures = MEASURES[task_type_of_row(rows[0])]
    found: dict[str, Any] = {"clients": len(rows), "samples": sum(row["samples"] for row in rows)}
    for measure in measures:
        values = [row[measure.key] for row in rows if row[measure.key] is not None]
        found[measure.key] = {
            "client_mean": statistics.fmean(values) if values else None,
            "client_std": statistics.stdev(values) if len(values) > 1 else None,
            "clients": len(values),
        }
    for measure in (measures[0], LOSS):
        found[measure.key]["pooled"] = measure.pooled(rows)
    return found


def measures_of(result: Mapping[str, Any]) -> tuple[Measure, ...]:
    """What a run is measured by, the number that counts first; `result` is its summary."""
    return MEASURES[result.get("task", "classification")]


def _merit(result: Mapping[str, Any]) -> float:
    """How good a mean over clients is: larger is better."""
    measure = MEASURES[task_type_of_row(result)][0]
    value = result[measure.key]["client_mean"]
    return -math.inf if value is None else measure.gain(value, 0.0)


def write(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `summary.json` from the records of a finished run."""
    write_json(folder / NAME, sealed(summarise(records.read(folder), config)))


def read(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    path = folder / NAME
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(f"{folder}: {_why_not(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def so_far(folder: Path) -> dict[str, Any]:
    """The summary of a finished run, or of the rounds that an unfinished one has behind it."""
    if (folder / NAME).exists():
        return read(folder)
    if not (folder / CONFIG).exists() or not (folder / records.NAME).exists():
        raise RunError(f"{folder}: {_why_not(folder)}")
    result = summarise(records.read(folder), config_of(folder))
    done = 1 + max((r["round"] for r in records.read(folder)), default=-1)
    return result | {"unfinished": f"{done} of {result['rounds']} rounds"}


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a run."""
    try:
        found = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for table in ("method", "data", "partition"):
            if not isinstance(found.get(table), dict) or not isinstance(found[table].get("name"), str):
                raise ValueError(f"there is no {table}.name")
        if not isinstance(found.get("name"), str) or not all(type(found.get(key)) is int for key in ("seed", "rounds")):
            raise ValueError("there is no name, seed or rounds")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / CONFIG}: cannot be read: {error}") from error


def verified_config(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run, if it is the one that `result`, its summary, was made with."""
    config = config_of(folder)
    try:
        now = digest({key: value for key, value in config.items() if key != "seed"})
    except TypedError as error:
        raise RunError(f"{folder / CONFIG}: {error}") from error
    if now != result["config"]:
        raise RunError(f"{folder / CONFIG}: was changed after the run; restore it")
    return config


def _why_not(folder: Path) -> str:
    if (folder / CONFIG).exists():
        return f"the run is not finished; `fedme resume {shlex.quote(str(folder))}` continues it"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
    return f"not a run directory; it holds {len(inside)}: {', '.join(inside[:5])}" if inside else "not a run directory"


@dataclass(frozen=True)
class Line:
    """One line of a comparison: a model of runs that differ only in their seed, measured by `measure`, one number a seed."""

    name: str
    method: str
    differs: Mapping[str, Any]  # settings that are not the same in all runs compared
    folders: tuple[str, ...]
    config: str  # fingerprint of everything but the seed
    model: str
    stage: str
    split: str
    selection: str
    seeds: tuple[int, ...]
    measure: Measure
    client_mean: tuple[float | None, ...]  # None where models diverged
    pooled: tuple[float | None, ...]
    bytes: float  # both ways, all clients and rounds, mean over seeds


def compare(folders: Sequence[Path], split: str = "test", selection: str = "last round") -> list[Line]:
    """Runs that differ only in their seed become one line a model and stage."""
    runs = {folder: read(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)}
    groups = families(runs)
    measure = common_measure(list(runs.values()))
    lines = []
    for family, differs in zip(groups, differing([config_of(next(iter(family.values()))) for family in groups]), strict=True):
        mine = [runs[folder] for folder in family.values()]
        kinds = [(r["model"], r["stage"]) for r in mine[0]["results"] if (r["split"], r["selection"]) == (split, selection)]
        for model, stage in kinds:
            wanted = {"model": model, "stage": stage, "split": split, "selection": selection}
            found = [r for run in mine for r in run["results"] if wanted.items() <= r.items()]
            lines.append(
                Line(
                    name=mine[0]["name"],
                    method=mine[0]["method"],
                    differs=differs,
                    folders=tuple(str(folder) for folder in family.values()),
                    config=mine[0]["config"],
                    **wanted,
                    seeds=tuple(family),
                    measure=measure,
                    client_mean=tuple(r[measure.key]["client_mean"] for r in found),
                    pooled=tuple(r[measure.key]["pooled"] for r in found),
                    bytes=statistics.fmean(run["bytes_up"] + run["bytes_down"] for run in mine),
                )
            )
    return lines


def common_measure(results: Sequence[Mapping[str, Any]]) -> Measure:
    """What all of these runs are measured by; runs that predict different things cannot be compared."""
    tasks = {result.get("task", "classification"): str(result["name"]) for result in results}
    if len(tasks) > 1:
        raise RunError(
            f"runs of different tasks cannot be compared: {', '.join(f'{name} is {t}' for t, name in tasks.items())}"
        )
    return measures_of(results[0])[0]


def families(runs: Mapping[Path, Mapping[str, Any]]) -> list[dict[int, Path]]:
    """Runs that differ only in their seed, by seed; `runs` are the summaries of run directories."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for folder, run in runs.items():
        other = found[run["config"]].setdefault(run["seed"], folder)
        if other != folder:
            raise RunError(f"{other} and {folder} are the same experiment with the same seed; compare one of them")
    return list(found.values())


def names(families: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """A name for every family of runs, given its name and method.

    Those of the same name are told apart by their methods, and numbered if these are the same too.
    """
    found = {}
    for config, (name, method) in families.items():
        methods = {other[1] for other in families.values() if other[0] == name}
        twins = [each for each, other in families.items() if other == (name, method)]
        full = name if len(methods) == 1 else f"{name} ({method})"
        found[config] = full if len(twins) == 1 else f"{full} #{twins.index(config) + 1}"
    return found


def differing(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every configuration, the settings in which they are not all the same; what only one method has does not count."""
    flat = [flattened(config) for config in configs]
    skip = ("seed", "output", "name", "method.name", "log")
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key not in skip]
    odd = [
        key
        for key in keys
        if len({repr(each[key]) for each in flat if key in each}) > 1
        or (key.startswith("privacy.") and not all(key in each for each in flat))  # to be private or not is a difference
    ]
    return [{key: each[key] for key in odd if key in each} for each in flat]


def flattened(value: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Tables within tables as one, with dotted keys."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flattened(item, f"{at}{key}.") if isinstance(item, Mapping) else {f"{at}{key}": item}
    return found


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (ddof = 1) over seeds."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
