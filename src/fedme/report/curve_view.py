"""Results against rounds and against what was sent: the mean over clients, and its spread over seeds."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fedme.report.run_data import Family, Kind, Run
from fedme.results import summary

TITLES = {"balanced_accuracy": "balanced accuracy", "ece": "calibration error"}  # where there is room for the whole name
SHARES = ("accuracy", "balanced_accuracy", "exact_match", "macro_f1", "micro_f1", "auroc", "ece")  # drawn in percent
SPLITS = {"test": "test", "val": "validation"}


def view(families: Sequence[Family]) -> dict[str, Any]:
    """A line for every model of every family, with every metric on every split."""
    lines = [line for index, family in enumerate(families) for line in _lines(index, family)]
    there = {split for line in lines for split in line["values"]}
    measures = families[0].runs[0].measures
    metrics = {m.key: {"title": TITLES.get(m.key, m.title), "percent": m.key in SHARES, "higher": m.higher} for m in measures}
    return {"metrics": metrics, "splits": {key: word for key, word in SPLITS.items() if key in there}, "lines": lines}


def _lines(index: int, family: Family) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    kinds = {kind[:2]: None for run in family.runs for kind in run.scores}
    for model, stage in sorted(kinds, key=lambda kind: (kind[0] != "personal", kind[1] != "round")):
        # Seeds of an unfinished family may have come to different rounds: a mean is over all of them or not there.
        rounds = sorted(set.intersection(*(_rounds(run, model, stage) for run in family.runs)))
        if not rounds:
            continue
        values = {split: _values(family, (model, stage, split), rounds) for split in SPLITS}
        values = {split: each for split, each in values.items() if each}
        if model == "global" and any(line["values"] == values for line in found):
            next(line for line in found if line["values"] == values)["model"] += " = global"
            continue
        word = model if stage == "round" else f"{model}, fine-tuned"
        totals = [list(itertools.accumulate(run.sent.get(t, 0) for t in run.rounds)) for run in family.runs]
        mega = [summary.spread([total[t] / 1e6 for total in totals])[0] for t in rounds]
        found.append({"family": index, "model": word, "rounds": rounds, "megabytes": _short(mega), "values": values})
    return found


def _rounds(run: Run, model: str, stage: str) -> set[int]:
    return {t for split in SPLITS for t in run.scores.get((model, stage, split), {})}


def _values(family: Family, kind: Kind, rounds: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if any(kind not in run.scores for run in family.runs):
        return found
    for metric in (measure.key for measure in family.runs[0].measures):
        points = [_point([_mean(run.scores[kind].get(t, {}), metric) for run in family.runs]) for t in rounds]
        if any(mean is not None for mean, _ in points):
            found[metric] = {"mean": _short([mean for mean, _ in points]), "std": _short([std for _, std in points])}
    return found


def _mean(scores: Mapping[str, Mapping[str, Any]], metric: str) -> float | None:
    values = [score[metric] for score in scores.values() if score[metric] is not None]
    return sum(values) / len(values) if values else None


def _point(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return summary.spread(known) if known and len(known) == len(values) else (None, None)


def _short(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]
