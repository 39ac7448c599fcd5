"""Run directories as plain values: all that a report says is computed from these, without data sets and without models."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedme.auditing.run_audit import NAME as AUDIT
from fedme.core.atomic_files import RunError, unsealed
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Measure, task_type_of_row
from fedme.results import records, summary
from fedme.running.run import LABELS

Kind = tuple[str, str, str]  # model, stage, split
PERSONAL: Kind = ("personal", "round", "test")
Table = Mapping[int, Mapping[ClientId, Any]]  # by round and client


@dataclass(frozen=True)
class Run:
    """One run directory, finished or not. `scores` are rows of `metrics.jsonl` after a round or after fine-tuning."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    labels: Mapping[str, Any] | None  # None: made before they were recorded
    result: Mapping[str, Any]  # as in summary.json
    clients: tuple[ClientId, ...]
    scores: Mapping[Kind, Table]
    sent: Mapping[int, int]  # bytes, both ways, of a round
    notes: Table  # what the method told of a client's round
    audit: Mapping[str, Any] | None = None  # if there has been one

    @property
    def measures(self) -> tuple[Measure, ...]:
        """What it is measured by, what counts first."""
        return summary.measures_of(self.result)

    @property
    def rounds(self) -> range:
        """The rounds that are behind it."""
        return range(1 + max(self.sent, default=-1))

    def last(self, kind: Kind) -> Mapping[ClientId, Mapping[str, Any]]:
        """The scores of the last round in which these were taken."""
        return self.scores[kind][max(self.scores[kind])] if kind in self.scores else {}

    def same_division(self, other: "Run") -> bool:
        """Whether both runs gave the same samples to the same clients."""
        if self.labels and other.labels:
            return bool(self.labels["digest"] == other.labels["digest"])
        return all(self.config[key] == other.config[key] for key in ("seed", "data", "partition"))


@dataclass(frozen=True)
class Family:
    """Runs that differ only in their seed."""

    label: str
    differs: Mapping[str, Any]  # settings that are not the same in all families
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.runs[0].result["method"])


def read(folder: Path) -> Run:
    """Everything in a run directory that a report needs."""
    result = summary.so_far(folder)
    config = summary.verified_config(folder, result)
    scores: dict[Kind, dict[int, dict[ClientId, Any]]] = defaultdict(lambda: defaultdict(dict))
    notes: dict[int, dict[ClientId, Any]] = defaultdict(dict)
    traffic: dict[int, dict[ClientId, int]] = defaultdict(dict)
    seen: dict[ClientId, None] = {}
    malicious = set(result.get("malicious", ()))  # their numbers mean nothing, whatever they are
    for row in records.read(folder):
        t, client = row["round"], row["client"]
        traffic[t][client] = row["bytes_up"] + row["bytes_down"]
        if row.get("notes"):
            notes[t][client] = row["notes"]
        if row["stage"] in ("round", "finetuned") and client not in malicious:
            seen[client] = None
            kept = {name: row[name] for name in (*(m.key for m in MEASURES[task_type_of_row(row)]), "samples", "arch")}
            scores[row["model"], row["stage"], row["split"]][t][client] = kept
    if not scores:
        raise RunError(f"{folder}: no round of it has been evaluated yet, so there is nothing to report")
    labels = _json(folder / LABELS)
    return Run(
        folder=folder,
        config=config,
        environment=_json(folder / "environment.json") or {},
        labels=labels,
        result=result,
        clients=tuple(labels["clients"] if labels else seen),
        scores=scores,
        sent={t: sum(each.values()) for t, each in traffic.items()},
        notes=notes,
        audit=_json(folder / AUDIT),
    )


def families(folders: Sequence[Path]) -> list[Family]:
    """The runs, those that differ only in their seed together."""
    if not folders:
        raise RunError("a report needs at least one run directory")
    runs = {folder: read(folder) for folder in dict.fromkeys(folders)}
    summary.common_measure([run.result for run in runs.values()])
    groups = summary.families({folder: run.result for folder, run in runs.items()})
    mine = [[runs[family[seed]] for seed in sorted(family)] for family in groups]
    labels = summary.names({each[0].result["config"]: (each[0].result["name"], each[0].result["method"]) for each in mine})
    differs = summary.differing([each[0].config for each in mine])
    return [Family(labels[each[0].result["config"]], d, tuple(each)) for each, d in zip(mine, differs, strict=True)]


def _json(path: Path) -> Any:
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
