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

from fedme.core.typed import TypedError
from fedme.experiment import records
from fedme.experiment.checkpoint import digest
from fedme.experiment.files import RunError, sealed, unsealed, write_json

NAME = "summary.json"
CONFIG = "config.toml"
MEANS = ("loss", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece")

Kind = tuple[str, str]  # model, stage
Splits = dict[str, list[dict[str, Any]]]  # the rows of one kind in one round, by split


def summarise(rows: Iterable[dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """Client means and pooled values of the last round and of the best round by validation.

    Rows come round by round, and no more than the rounds that are wanted in the end are kept.
    """
    sums = dict.fromkeys(("bytes_up", "bytes_down", "client_seconds"), 0)
    server = 0.0
    last: dict[Kind, tuple[int, Splits]] = {}
    best: dict[Kind, tuple[float, int, Splits]] = {}
    evaluated: Counter[Kind] = Counter()
    missing: Counter[str] = Counter()
    trouble = Trouble()
    for t, together in itertools.groupby(rows, key=lambda row: row["round"]):
        traffic: dict[str, dict[str, Any]] = {}
        found: dict[Kind, Splits] = defaultdict(lambda: defaultdict(list))
        for row in together:
            trouble.look(row)
            traffic.setdefault(row["client"], row)
            if why := row.get("notes", {}).get("missing"):
                missing[_sort_of(why)] += 1
            if row["stage"] in ("round", "finetuned"):
                found[row["model"], row["stage"]][row["split"]].append(row)
        sums = {name: total + sum(row[name] for row in traffic.values()) for name, total in sums.items()}
        server += next(iter(traffic.values()))["server_seconds"]
        for kind, splits in found.items():
            for split, mine in splits.items() if trouble.hostile else ():  # their numbers mean nothing, whatever they are
                splits[split] = [row for row in mine if row["client"] not in trouble.hostile]
            evaluated[kind] += 1
            last[kind] = t, splits
            if "val" in splits:
                accuracy = means(splits["val"])["accuracy"]["client_mean"] or -math.inf
                if kind not in best or accuracy > best[kind][0]:
                    best[kind] = accuracy, t, splits
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
    return {
        "name": config["name"],
        "method": config["method"]["name"],
        "seed": config["seed"],
        "rounds": config["rounds"],
        "config": digest({key: value for key, value in config.items() if key != "seed"}),
        "results": results,
        **sums,
        "server_seconds": server,
        "missing": dict(sorted(missing.items())),
    } | trouble.plain()


@dataclass
class Trouble:
    """Who sent what could not be used, who was kept out because of it, and who was hostile on purpose."""

    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantined: dict[str, dict[str, Any]] = field(default_factory=dict)
    hostile: set[str] = field(default_factory=set)

    def look(self, row: Mapping[str, Any]) -> None:
        """Note what a row of the records tells."""
        notes = row.get("notes") or {}
        if "hostile" in notes:
            self.hostile.add(row["client"])
        missing = notes.get("missing")
        for word, found in (("refused", self.refused), ("quarantined", self.quarantined)):
            if isinstance(missing, str) and missing.startswith(word):
                mine = found.setdefault(row["client"], {"rounds": 0, "first": row["round"], "reason": missing})
                mine["rounds"] += 1

    def plain(self) -> dict[str, Any]:
        """What there is to tell; nothing if nothing happened."""
        told = {"refused": self.refused, "quarantined": self.quarantined, "hostile": sorted(self.hostile)}
        return {name: value for name, value in told.items() if value}


def trouble(result: Mapping[str, Any]) -> list[str]:
    """What went wrong with whom, one line each."""
    lines = []
    if hostile := result.get("hostile"):
        lines.append(f"Hostile on purpose, and in none of the means of `fedme show`: client {', '.join(hostile)}.")
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
    total = sum(row["samples"] for row in rows)
    found: dict[str, Any] = {"clients": len(rows), "samples": total}
    for metric in MEANS:
        values = [row[metric] for row in rows if row[metric] is not None]
        found[metric] = {
            "client_mean": statistics.fmean(values) if values else None,
            "client_std": statistics.stdev(values) if len(values) > 1 else None,
            "clients": len(values),
        }
    found["accuracy"]["pooled"] = sum(row["correct"] for row in rows) / total if total else None
    finite = all(row["loss"] is not None for row in rows)
    found["loss"]["pooled"] = sum(row["loss"] * row["samples"] for row in rows) / total if total and finite else None
    return found


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
    """One line of a comparison: a model of runs that differ only in their seed. Accuracies are fractions, one a seed."""

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
    client_mean: tuple[float, ...]
    pooled: tuple[float, ...]
    bytes: float  # both ways, all clients and rounds, mean over seeds


def compare(folders: Sequence[Path], split: str = "test", selection: str = "last round") -> list[Line]:
    """Runs that differ only in their seed become one line a model and stage."""
    runs = {folder: read(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)}
    groups = families(runs)
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
                    client_mean=tuple(r["accuracy"]["client_mean"] for r in found),
                    pooled=tuple(r["accuracy"]["pooled"] for r in found),
                    bytes=statistics.fmean(run["bytes_up"] + run["bytes_down"] for run in mine),
                )
            )
    return lines


def families(runs: Mapping[Path, Mapping[str, Any]]) -> list[dict[int, Path]]:
    """Runs that differ only in their seed, by seed; `runs` are the summaries of run directories."""
    found: dict[str, dict[int, Path]] = defaultdict(dict)
    for folder, run in runs.items():
        other = found[run["config"]].setdefault(run["seed"], folder)
        if other != folder:
            raise RunError(f"{other} and {folder} are the same experiment with the same seed; compare one of them")
    return list(found.values())


def names(families: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """A name for every family of runs, given its name and method; those of the same name and method are numbered."""
    found = {}
    for config, family in families.items():
        twins = [each for each, other in families.items() if other == family]
        found[config] = family[0] if len(twins) == 1 else f"{family[0]} #{twins.index(config) + 1}"
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
