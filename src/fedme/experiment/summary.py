"""The results of a run, each saying exactly what it is: which model, split, stage and round, and over what it is a mean."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.experiment import records
from fedme.experiment.checkpoint import digest
from fedme.experiment.files import RunError, write_json

NAME = "summary.json"
MEANS = ("loss", "accuracy", "balanced_accuracy", "macro_f1", "auroc", "ece")

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
    for model, stage in sorted({(model, stage) for _, model, stage, _ in groups}, key=lambda pair: (pair[1] != "round", pair)):
        evaluated = sorted({t for t, m, s, _ in groups if (m, s) == (model, stage)})
        picks = {"last round": evaluated[-1]}
        validated = {t: means(groups[t, model, stage, "val"]) for t in evaluated if (t, model, stage, "val") in groups}
        if validated and len(evaluated) > 1:
            best = max(validated, key=lambda t: (validated[t]["accuracy"]["client_mean"] or -math.inf, -t))
            picks["best round by validation"] = best
        for selection, t in picks.items():
            for split in ("val", "test"):
                if (t, model, stage, split) in groups:
                    about = {"model": model, "stage": stage, "split": split, "selection": selection, "round": t}
                    results.append(about | means(groups[t, model, stage, split]))
    return {
        "name": config["name"],
        "method": config["method"]["name"],
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
    write_json(folder / NAME, summarise(records.read(folder), config))


def read(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    path = folder / NAME
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except FileNotFoundError:
        started = (folder / "config.toml").exists()
        hint = f"the run is not finished; `fedme resume {folder}` continues it" if started else "not a run directory"
        raise RunError(f"{folder}: {hint}") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Line:
    """One line of a comparison: a method's model over seeds."""

    name: str
    method: str
    config: str  # fingerprint of everything but the seed
    model: str
    stage: str
    selection: str
    seeds: tuple[int, ...]
    client_mean: tuple[float, ...]  # accuracy, one value a seed
    pooled: tuple[float, ...]
    megabytes: float  # both ways, all clients and rounds, mean over seeds


def compare(summaries: Sequence[Mapping[str, Any]], split: str = "test", selection: str = "last round") -> list[Line]:
    """Runs that differ only in their seed become one line a model and stage."""
    families: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for each in summaries:
        families[each["config"]].append(each)
    lines = []
    for runs in families.values():
        kinds = [(r["model"], r["stage"]) for r in runs[0]["results"] if r["split"] == split and r["selection"] == selection]
        for model, stage in kinds:
            wanted = {"model": model, "stage": stage, "split": split, "selection": selection}
            found = [r for run in runs for r in run["results"] if wanted.items() <= r.items()]
            lines.append(
                Line(
                    name=runs[0]["name"],
                    method=runs[0]["method"],
                    config=runs[0]["config"],
                    model=model,
                    stage=stage,
                    selection=selection,
                    seeds=tuple(run["seed"] for run in runs),
                    client_mean=tuple(100 * r["accuracy"]["client_mean"] for r in found),
                    pooled=tuple(100 * r["accuracy"]["pooled"] for r in found),
                    megabytes=statistics.fmean((run["bytes_up"] + run["bytes_down"]) / 1e6 for run in runs),
                )
            )
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation (ddof = 1) over seeds."""
    mean = statistics.fmean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"
