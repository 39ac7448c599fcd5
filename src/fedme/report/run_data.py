"""Run directories as plain values. A report is computed from these alone, without datasets and models."""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedme.auditing.run_audit import NAME as AUDIT
from fedme.core.atomic_files import RunError, unsealed
from fedme.core.data import ClientId
from fedme.core.metrics import MEASURES, Measure, task_type_of_row
from fedme.results import records, summary, usable_records, verdicts
from fedme.results.verdicts import Verdict
from fedme.running.run import LABELS

ScoreKey = tuple[str, str, str]  # model, stage, split
PERSONAL: ScoreKey = ("personal", "round", "test")
MOST_SHOWN = 1000  # clients that a page shows one by one
LEAST_SHOWN, MOST_MOMENTS = 100, 200_000  # fewer in long runs: a page has a few bytes for every client and round
Table = Mapping[int, Mapping[ClientId, Any]]  # by round and client


@dataclass(frozen=True)
class Run:
    """One run directory, finished or not. `scores` are rows of `metrics.jsonl` after a round or after fine-tuning."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    labels: Mapping[str, Any] | None  # None if the run did not record them
    result: Mapping[str, Any]  # as in summary.json
    clients: tuple[ClientId, ...]
    scores: Mapping[ScoreKey, Table]
    sent: Mapping[int, int]  # bytes per round, both directions
    notes: Table  # what the method recorded of a client's round
    audit: Mapping[str, Any] | None = None
    unusable: tuple[str, ...] = ()  # records that were left out, and why
    verdicts: tuple[Verdict, ...] = ()  # whether joining helped every client, if that was computed

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The metrics of the run's task, the headline metric first."""
        return summary.measures_of(self.result)

    @property
    def isolated(self) -> bool:
        """Whether nothing was sent: every client trained alone, which gains are measured against."""
        return not self.result["bytes_up"] + self.result["bytes_down"]

    @property
    def rounds(self) -> range:
        """The finished rounds."""
        return range(1 + max(self.sent, default=-1))

    def last(self, key: ScoreKey) -> Mapping[ClientId, Mapping[str, Any]]:
        """The scores of the last evaluated round."""
        return self.scores[key][max(self.scores[key])] if key in self.scores else {}

    def same_division(self, other: "Run") -> bool:
        """Whether both runs gave the same samples to the same clients."""
        if self.labels and other.labels:
            return bool(self.labels["digest"] == other.labels["digest"])
        return all(self.config[key] == other.config[key] for key in ("seed", "data", "partition"))


@dataclass(frozen=True)
class Family:
    """Runs that differ only in their seed."""

    label: str
    differs: Mapping[str, Any]  # the settings that differ between families
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.runs[0].result["method"])


def read(folder: Path) -> Run:
    """Read a run directory. Records that cannot be used are left out and listed."""
    labels = _json(folder / LABELS)
    clients = None if labels is None else labels["clients"]
    rows, unusable = None, list[str]()
    if (folder / summary.CONFIG).exists() and (folder / records.NAME).exists():
        rows, unusable = usable_records.read(folder, summary.config_of(folder)["rounds"], clients)
    result = summary.so_far(folder, rows)
    config = summary.verified_config(folder, result)
    scores: dict[ScoreKey, dict[int, dict[ClientId, Any]]] = defaultdict(lambda: defaultdict(dict))
    notes: dict[int, dict[ClientId, Any]] = defaultdict(dict)
    traffic: dict[int, dict[ClientId, int]] = defaultdict(dict)
    evaluated: dict[ClientId, None] = {}
    malicious = set(result.get("malicious", ()))  # their results are meaningless
    for row in rows or ():
        t, client = row["round"], row["client"]
        traffic[t][client] = row["bytes_up"] + row["bytes_down"]
        if row.get("notes"):
            notes[t][client] = row["notes"]
        if row["stage"] in ("round", "finetuned") and client not in malicious:
            evaluated[client] = None
            score = {name: row[name] for name in (*(m.key for m in MEASURES[task_type_of_row(row)]), "samples", "arch")}
            scores[row["model"], row["stage"], row["split"]][t][client] = score | records.added_numbers(row)
    if not scores:
        why = f"none of its records can be used: {unusable[0]}" if unusable else "no round has been evaluated yet"
        raise RunError(f"{folder}: {why}, so there is nothing to report")
    return Run(
        folder=folder,
        config=config,
        environment=_json(folder / "environment.json") or {},
        labels=labels,
        result=result,
        clients=tuple(labels["clients"] if labels else evaluated),
        scores=scores,
        sent={t: sum(clients.values()) for t, clients in traffic.items()},
        notes=notes,
        audit=_json(folder / AUDIT),
        unusable=tuple(unusable),
        verdicts=tuple(verdicts.strongest(folder) or ()),
    )


def families(folders: Sequence[Path]) -> list[Family]:
    """Read run directories and group those that differ only in their seed."""
    if not folders:
        raise RunError("a report needs at least one run directory")
    runs = {folder: read(folder) for folder in dict.fromkeys(folders)}
    summary.common_measure([run.result for run in runs.values()])
    groups = summary.families({folder: run.result for folder, run in runs.items()})
    members = [tuple(runs[group[seed]] for seed in sorted(group)) for group in groups]
    results = [family[0].result for family in members]
    labels = summary.names({result["config"]: (result["name"], result["method"]) for result in results})
    differs = summary.differing([family[0].config for family in members])
    return [Family(labels[r["config"]], d, family) for r, d, family in zip(results, differs, members, strict=True)]


def shown(families: Sequence[Family]) -> list[Family]:
    """The same runs with the clients that a page shows one by one: all, or of many the best, the worst and some others.

    Runs with the same clients show the same ones, so that they can be compared. Means and counts are to be taken of the whole.
    """
    chosen: dict[tuple[ClientId, ...], tuple[ClientId, ...]] = {}

    def reduced(run: Run) -> Run:
        if run.clients not in chosen:
            chosen[run.clients] = _chosen(run)
        return replace(run, clients=chosen[run.clients])

    return [replace(family, runs=tuple(map(reduced, family.runs))) for family in families]


def most_shown(run: Run) -> int:
    """How many clients of a run a page shows one by one."""
    return max(LEAST_SHOWN, min(MOST_SHOWN, MOST_MOMENTS // max(1, len(run.rounds))))


def _chosen(run: Run) -> tuple[ClientId, ...]:
    """The clients to show, in the order of the run: a third the best in the last round, a third the worst, a third others."""
    most = most_shown(run)
    if len(run.clients) <= most:
        return run.clients
    key, measure = PERSONAL if PERSONAL in run.scores else next(iter(run.scores)), run.measures[0]
    scores = {client: score[measure.key] for client, score in run.last(key).items() if score[measure.key] is not None}
    ranked = sorted(scores, key=lambda client: measure.gain(scores[client], 0.0))
    third = most // 3
    ends = {*ranked[:third], *ranked[-third:]}
    others = [client for client in run.clients if client not in ends]
    between = others[:: max(1, len(others) // (most - len(ends)))][: most - len(ends)]
    kept = {*ends, *between}
    return tuple(client for client in run.clients if client in kept)


def sample_note(run: Run) -> str:
    """What a page says if it does not show every client; else empty."""
    if len(run.clients) <= most_shown(run):
        return ""
    return (
        f"Of {len(run.clients):,} clients, {most_shown(run)} are shown one by one: a third of them the best in the last round, "
        "a third the worst, and others in between; loans and lineages are among these. Means and counts are over all."
    )


def client_mean(scores: Mapping[ClientId, Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric over the clients for which it is defined."""
    values = [score[metric] for score in scores.values() if score.get(metric) is not None]
    return statistics.fmean(values) if values else None


def over_seeds(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation; neither if a value is missing, because the models of that seed diverged."""
    known = [value for value in values if value is not None]
    return summary.spread(known) if known and len(known) == len(values) else (None, None)


def _json(path: Path) -> Any:
    try:
        return unsealed(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
