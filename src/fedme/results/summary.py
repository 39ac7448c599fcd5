"""The results of a run by model, split, stage and round: means over clients, and values pooled over samples."""

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

from fedme.config import named_code
from fedme.config.identity import Sources, family_digest
from fedme.core.atomic_files import RunError, sealed, unsealed, write_json
from fedme.core.metrics import LOSS, MEASURES, Measure, task_type_of_row
from fedme.core.task_types import TaskType
from fedme.core.typed import TypedError
from fedme.results import records
from fedme.results.run_directory import recorded_sources, require_readable, similar_run

NAME, CONFIG = "summary.json", named_code.CONFIG
MOST_NAMES = 20  # of runs that an error lists
SAME_MODEL = "same_model_as"  # in the notes of a client's last round: the first client with an identical model

ModelStage = tuple[str, str]
Splits = dict[str, list[dict[str, Any]]]  # the rows of one model and stage in one round, by split


def summarise(rows: Iterable[dict[str, Any]], config: Mapping[str, Any], sources: Sources | None = None) -> dict[str, Any]:
    """Client means and pooled values of the last round and of the best round by validation; rows come round by round."""
    rounds = Rounds()
    rounds.add(rows)
    return rounds.summary(config, sources)


class Rounds:
    """What a summary needs of the rows of a run; only those of the last and the best round are kept."""

    def __init__(self) -> None:
        self.sums = dict.fromkeys(("bytes_up", "bytes_down", "client_seconds"), 0)
        self.server = 0.0
        self.last: dict[ModelStage, tuple[int, Splits]] = {}
        self.best: dict[ModelStage, tuple[float, int, Splits]] = {}
        self.evaluated: Counter[ModelStage] = Counter()
        self.epsilon: dict[str, float | None] = {}
        self.missing: Counter[str] = Counter()
        self.incidents = Incidents()
        self.task: TaskType | None = None

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the rows of whole rounds."""
        for t, round_rows in itertools.groupby(rows, key=lambda row: row["round"]):
            self._add_round(t, round_rows)

    def _add_round(self, t: int, rows: Iterable[dict[str, Any]]) -> None:
        traffic: dict[str, dict[str, Any]] = {}
        scores: dict[ModelStage, Splits] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            self.incidents.add(row)
            traffic.setdefault(row["client"], row)
            self.epsilon |= {row["client"]: row["epsilon"]} if "epsilon" in row else {}  # cumulative: the last value counts
            if reason := row.get("notes", {}).get("missing"):
                self.missing[_category(reason)] += 1
            if row["stage"] in ("round", "finetuned"):
                self.task = self.task or task_type_of_row(row)
                scores[row["model"], row["stage"]][row["split"]].append(row)
        self.sums = {name: total + sum(row[name] for row in traffic.values()) for name, total in self.sums.items()}
        self.server += next(iter(traffic.values()))["server_seconds"]
        malicious = self.incidents.malicious
        for model_stage, splits in scores.items():
            for split, split_rows in splits.items() if malicious else ():  # malicious clients are in no mean
                splits[split] = [row for row in split_rows if row["client"] not in malicious]
            self.evaluated[model_stage] += 1
            self.last[model_stage] = t, splits
            if splits.get("val"):
                merit = _merit(splits["val"])
                if model_stage not in self.best or merit > self.best[model_stage][0]:
                    self.best[model_stage] = merit, t, splits

    def summary(self, config: Mapping[str, Any], sources: Sources | None = None) -> dict[str, Any]:
        """The summary of the rounds so far."""
        last, best, results = self.last, self.best, []
        for model, stage in sorted(last, key=lambda model_stage: (model_stage[1] != "round", model_stage)):
            picks = {"last round": last[model, stage]}
            if (model, stage) in best and self.evaluated[model, stage] > 1:
                picks["best round by validation"] = best[model, stage][1:]
            for selection, (t, splits) in picks.items():
                for split in ("val", "test"):
                    if split in splits:
                        about = {"model": model, "stage": stage, "split": split, "selection": selection, "round": t}
                        results.append(about | means(splits[split]))
        added = dict.fromkeys(
            name for _, splits in last.values() for split_rows in splits.values() for name in added_measures(split_rows)
        )
        private = {"privacy": {"delta": config["privacy"]["delta"], "epsilon": self.epsilon}} if "privacy" in config else {}
        return (
            private
            | {
                "name": config["name"],
                "method": config["method"]["name"],
                "task": self.task or task_type_of_row({}),
                "seed": config["seed"],
                "rounds": config["rounds"],
                "config": family_digest(config, sources),
                "results": results,
                **self.sums,
                "server_seconds": self.server,
                "missing": dict(sorted(self.missing.items())),
            }
            | self.incidents.plain()
            | ({"added": list(added)} if added else {})
            | ({"sources": dict(sources)} if sources else {})
        )


@dataclass
class Incidents:
    """The clients whose replies were refused, the clients in quarantine, and the malicious clients of a simulated attack."""

    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    quarantined: dict[str, dict[str, Any]] = field(default_factory=dict)
    malicious: set[str] = field(default_factory=set)
    diverging: dict[str, dict[str, Any]] = field(default_factory=dict)
    identical: dict[str, list[str]] = field(default_factory=dict)  # by the first client with the same model
    newest: int = -1  # the last round so far

    def add(self, row: Mapping[str, Any]) -> None:
        """Count what a row of the records notes."""
        if row["round"] > self.newest:  # models are compared after the last round; a run may have been extended since
            self.newest, self.identical = row["round"], {}
        if not (notes := row.get("notes")):
            return
        if "malicious" in notes:
            self.malicious.add(row["client"])
        if "diverging" in notes:
            count = self.diverging.setdefault(row["client"], {"rounds": 0, "first": row["round"], "loss": notes["diverging"]})
            count["rounds"] += 1
            count["last"] = row["round"]
        if isinstance(notes.get(SAME_MODEL), str):
            self.identical.setdefault(notes[SAME_MODEL], []).append(row["client"])
        missing = notes.get("missing")
        for word, clients in (("refused", self.refused), ("quarantined", self.quarantined)):
            if isinstance(missing, str) and missing.startswith(word):
                count = clients.setdefault(row["client"], {"rounds": 0, "first": row["round"], "reason": missing})
                count["rounds"] += 1

    def plain(self) -> dict[str, Any]:
        """As plain data, without what did not happen."""
        tables: dict[str, Any] = {"refused": self.refused, "quarantined": self.quarantined}
        tables |= {"malicious": sorted(self.malicious), "diverging": self.diverging, "identical": self.identical}
        return {name: value for name, value in tables.items() if value}


MOST_GROUPS = 10  # of clients with identical models that a sentence names


def trouble(result: Mapping[str, Any]) -> list[str]:
    """Malicious, refused and quarantined clients, diverged trainings and identical models, one line each."""
    lines = []
    for client, count in result.get("diverging", {}).items():
        ended = count.get("last", math.inf) < result["rounds"] - 1  # FedMe's clients may adopt a model that did not diverge
        rounds = f"{count['rounds']} rounds" if count["rounds"] > 1 else "1 round"
        effect = f"but not after round {count['last']}; it may do better if you" if ended else "its results say nothing:"
        lines.append(
            f"client {client}: its training diverged in {rounds}, first in round {count['first']} "
            f"(loss {count['loss']}); {effect} lower train.lr or set train.clip"
        )
    if identical := result.get("identical"):
        groups = sorted(([first, *others] for first, others in identical.items()), key=lambda group: (len(group[0]), group[0]))
        more = f"; and {len(groups) - MOST_GROUPS} more groups" if len(groups) > MOST_GROUPS else ""
        listed = "; ".join(", ".join(group) for group in groups[:MOST_GROUPS])
        lines.append(f"Clients with identical personal models: {listed}{more}.")
    if malicious := result.get("malicious"):
        lines.append(f"Malicious by configuration ([attack]), excluded from all means: client {', '.join(malicious)}.")
    for what in ("refused", "quarantined"):
        for client, count in result.get(what, {}).items():
            lines.append(
                f"client {client}: {what} in {count['rounds']} rounds, first in round {count['first']}: {count['reason']}"
            )
    return lines


def _category(reason: Any) -> str:
    """The reason of a missing reply without its details: "late: it took 7 s" is "late"."""
    return reason.split(":")[0].split(" in round ")[0] if isinstance(reason, str) else "no reply"


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (ddof = 1) of every metric over the clients that have it, and values pooled over samples."""
    measures = MEASURES[task_type_of_row(rows[0])]
    result: dict[str, Any] = {"clients": len(rows), "samples": sum(row["samples"] for row in rows)}
    for measure in measures:
        values = [row[measure.key] for row in rows if row[measure.key] is not None]
        result[measure.key] = _over_clients(values)
    for name in added_measures(rows):
        added = [records.added_numbers(row).get(name) for row in rows]
        result[name] = _over_clients([value for value in added if value is not None])
    for measure in (measures[0], LOSS):
        result[measure.key]["pooled"] = measure.pooled(rows)
    return result


def added_measures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the metrics and numbers of callbacks that a program has added to these rows."""
    return list(dict.fromkeys(name for row in rows for name in records.added_numbers(row)))


def _over_clients(values: Sequence[float]) -> dict[str, Any]:
    return {
        "client_mean": statistics.fmean(values) if values else None,
        "client_std": statistics.stdev(values) if len(values) > 1 else None,
        "clients": len(values),
    }


def measures_of(result: Mapping[str, Any]) -> tuple[Measure, ...]:
    """The metrics of a run, the primary one first, those of a program last; `result` is its summary."""
    added = (Measure(name, name) for name in result.get("added", ()))
    return (*MEASURES[result.get("task", "classification")], *added)


def _merit(rows: Sequence[Mapping[str, Any]]) -> float:
    """How good the mean over clients is: larger is better."""
    measure = MEASURES[task_type_of_row(rows[0])][0]
    values = [row[measure.key] for row in rows if row[measure.key] is not None]
    return measure.gain(statistics.fmean(values), 0.0) if values else -math.inf


def write(folder: Path, config: Mapping[str, Any], rounds: Rounds | None = None) -> None:
    """Write `summary.json` of a finished run: of its `rounds`, or else of its records."""
    if rounds is None:
        rounds = Rounds()
        rounds.add(records.read(folder))
    write_json(folder / NAME, sealed(rounds.summary(config, recorded_sources(folder))))


def read(folder: Path) -> dict[str, Any]:
    """The summary of a finished run."""
    require_readable(folder)
    path = folder / NAME
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunError(f"{folder}: {_unfinished(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def so_far(folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The summary of a finished run, or of the finished rounds of an unfinished one; `rows` are its records, if known."""
    if (folder / NAME).exists():
        return read(folder)
    if not (folder / CONFIG).exists() or not (folder / records.NAME).exists():
        raise RunError(f"{folder}: {_unfinished(folder)}")
    rows = list(records.read(folder)) if rows is None else rows
    result = summarise(rows, config_of(folder), recorded_sources(folder))
    done = 1 + max((r["round"] for r in rows), default=-1)
    return result | {"unfinished": f"{done} of {result['rounds']} rounds"}


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a run."""
    require_readable(folder)
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for table in ("method", "data", "partition"):
            if not isinstance(config.get(table), dict) or not isinstance(config[table].get("name"), str):
                raise ValueError(f"{table}.name is missing")
        if not isinstance(config.get("name"), str) or not all(type(config.get(key)) is int for key in ("seed", "rounds")):
            raise ValueError("name, seed or rounds is missing")
        return config
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{folder / CONFIG}: cannot be read: {error}") from error


def verified_config(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a run, if it is the one that `result`, its summary, was made with."""
    config = config_of(folder)
    try:
        now = family_digest(config, result.get("sources"))
    except TypedError as error:
        raise RunError(f"{folder / CONFIG}: {error}") from error
    if now != result["config"]:
        raise RunError(f"{folder / CONFIG}: another configuration than that of the results; restore it, or start a new run")
    return config


def _unfinished(folder: Path) -> str:
    """Why a directory has no summary."""
    if (folder / CONFIG).exists():
        return f"the run is not finished; `fedme resume {shlex.quote(str(folder))}` continues it"
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}")) if folder.is_dir() else []
    if inside:
        more = f" and {len(inside) - MOST_NAMES} more" if len(inside) > MOST_NAMES else ""
        listed = f"{', '.join(inside[:MOST_NAMES])}{more}"
        return f"not a run directory, but it holds {len(inside)}: {listed}; name one, as in {folder / inside[0]}"
    return f"not a run directory{similar_run(folder)}"


@dataclass(frozen=True)
class Line:
    """One line of a comparison: a model of runs that differ only in their seed, with one value of `measure` per seed."""

    name: str
    method: str
    differs: Mapping[str, Any]  # settings that differ between the runs compared
    folders: tuple[str, ...]
    config: str  # the family digest
    model: str
    stage: str
    split: str
    selection: str
    seeds: tuple[int, ...]
    measure: Measure
    client_mean: tuple[float | None, ...]  # None if models diverged
    pooled: tuple[float | None, ...]
    bytes: float  # sent in both directions by all clients in all rounds, mean over seeds


def compare(folders: Sequence[Path], split: str = "test", selection: str = "last round") -> list[Line]:
    """One line per model and stage for runs that differ only in their seed."""
    runs = {folder: read(folder) for folder in dict.fromkeys(folder.resolve() for folder in folders)}
    groups = families(runs)
    measure = common_measure(list(runs.values()))
    lines = []
    for family, differs in zip(groups, differing([config_of(next(iter(family.values()))) for family in groups]), strict=True):
        summaries = [runs[folder] for folder in family.values()]
        first = summaries[0]
        stages = [(r["model"], r["stage"]) for r in first["results"] if (r["split"], r["selection"]) == (split, selection)]
        for model, stage in stages:
            wanted = {"model": model, "stage": stage, "split": split, "selection": selection}
            values = [r[measure.key] for run in summaries for r in run["results"] if wanted.items() <= r.items()]
            lines.append(
                Line(
                    name=first["name"],
                    method=first["method"],
                    differs=differs,
                    folders=tuple(str(folder) for folder in family.values()),
                    config=first["config"],
                    **wanted,
                    seeds=tuple(family),
                    measure=measure,
                    client_mean=tuple(value["client_mean"] for value in values),
                    pooled=tuple(value["pooled"] for value in values),
                    bytes=statistics.fmean(run["bytes_up"] + run["bytes_down"] for run in summaries),
                )
            )
    return lines


def common_measure(results: Sequence[Mapping[str, Any]]) -> Measure:
    """The primary metric of these runs; runs of different task types cannot be compared."""
    tasks = {result.get("task", "classification"): str(result["name"]) for result in results}
    if len(tasks) > 1:
        raise RunError(
            f"runs of different tasks cannot be compared: {', '.join(f'{name} is {t}' for t, name in tasks.items())}"
        )
    return measures_of(results[0])[0]


def families(runs: Mapping[Path, Mapping[str, Any]]) -> list[dict[int, Path]]:
    """Runs that differ only in their seed, by seed; `runs` are the summaries of run directories."""
    groups: dict[str, dict[int, Path]] = defaultdict(dict)
    for folder, run in runs.items():
        other = groups[run["config"]].setdefault(run["seed"], folder)
        if other != folder:
            raise RunError(f"{other} and {folder} are the same experiment with the same seed; compare one of them")
    return list(groups.values())


def names(families: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """A name for every family of runs, given its name and method.

    Families of the same name get their method added, and a number if the methods are the same too.
    """
    labels = {}
    for config, (name, method) in families.items():
        methods = {other[1] for other in families.values() if other[0] == name}
        twins = [twin for twin, other in families.items() if other == (name, method)]
        full = name if len(methods) == 1 else f"{name} ({method})"
        labels[config] = full if len(twins) == 1 else f"{full} #{twins.index(config) + 1}"
    return labels


def differing(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every configuration, the settings that differ between them; settings that only one method has do not count."""
    tables = [flattened(config) for config in configs]
    skip = ("seed", "output", "name", "method.name", "log", "save")
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key not in skip]
    differing_keys = [
        key
        for key in keys
        if len({repr(table[key]) for table in tables if key in table}) > 1
        or (key.startswith("privacy.") and not all(key in table for table in tables))  # private or not is a difference
    ]
    return [{key: table[key] for key in differing_keys if key in table} for table in tables]


def flattened(value: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested tables as one table with dotted keys."""
    table: dict[str, Any] = {}
    for key, item in value.items():
        table |= flattened(item, f"{at}{key}.") if isinstance(item, Mapping) else {f"{at}{key}": item}
    return table


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (ddof = 1) over seeds."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
