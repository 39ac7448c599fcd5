"""The results of a run, each saying exactly what it is: which model, split, stage and round, and over what it is a mean."""

import json
import math
import shlex
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.core.kinds import KindName
from fedme.core.metrics import LOSS, MEASURES, Measure, kind_of_row
from fedme.experiment import records
from fedme.experiment.checkpoint import digest
from fedme.experiment.files import RunError, write_json

NAME = "summary.json"
CONFIG = "config.toml"

Group = tuple[int, str, str, str]  # round, model, stage, split


def summarise(rows: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Client means and pooled values of the last round and of the best round by validation."""
    groups: dict[Group, list[dict[str, Any]]] = defaultdict(list)
    traffic: dict[tuple[int, str], dict[str, Any]] = {}
    server: dict[int, float] = {}
    for row in rows:
        traffic.setdefault((row["round"], row["client"]), row)
        server[row["round"]] = row["server_seconds"]
        if row["stage"] in ("round", "finetuned"):
            groups[row["round"], row["model"], row["stage"], row["split"]].append(row)
    results = []
    kind = kind_of_row(next((rows[0] for rows in groups.values()), {}))
    for model, stage in sorted({(model, stage) for _, model, stage, _ in groups}, key=lambda pair: (pair[1] != "round", pair)):
        evaluated = sorted({t for t, m, s, _ in groups if (m, s) == (model, stage)})
        picks = {"last round": evaluated[-1]}
        validated = {t: means(groups[t, model, stage, "val"]) for t in evaluated if (t, model, stage, "val") in groups}
        if validated and len(evaluated) > 1:
            best = max(validated, key=lambda t: (_merit(validated[t], kind), -t))
            picks["best round by validation"] = best
        for selection, t in picks.items():
            for split in ("val", "test"):
                if (t, model, stage, split) in groups:
                    about = {"model": model, "stage": stage, "split": split, "selection": selection, "round": t}
                    results.append(about | means(groups[t, model, stage, split]))
    return {
        "name": config["name"],
        "method": config["method"]["name"],
        "task": kind,
        "seed": config["seed"],
        "rounds": config["rounds"],
        "config": digest({key: value for key, value in config.items() if key != "seed"}),
        "results": results,
        "bytes_up": sum(row["bytes_up"] for row in traffic.values()),
        "bytes_down": sum(row["bytes_down"] for row in traffic.values()),
        "client_seconds": sum(row["client_seconds"] for row in traffic.values()),
        "server_seconds": sum(server.values()),
    }


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over clients: mean and standard deviation (ddof = 1) of every metric where it is defined, and pooled over samples."""
    measures = MEASURES[kind_of_row(rows[0])]
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


def _merit(result: Mapping[str, Any], kind: KindName) -> float:
    """How good a mean over clients is: larger is better."""
    measure = MEASURES[kind][0]
    value = result[measure.key]["client_mean"]
    return -math.inf if value is None else measure.gain(value, 0.0)


def write(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `summary.json` from the records of a finished run."""
    write_json(folder / NAME, summarise(records.read(folder), config))


def read(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    path = folder / NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except FileNotFoundError:
        raise RunError(f"{folder}: {_why_not(folder)}") from None
    except (OSError, ValueError) as error:
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
        return tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder / CONFIG}: cannot be read: {error}") from error


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
    odd = [key for key in keys if len({repr(each[key]) for each in flat if key in each}) > 1]
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
