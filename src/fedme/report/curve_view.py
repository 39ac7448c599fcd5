"""Results against rounds and against traffic: mean over clients, with the spread over seeds."""

import itertools
from collections.abc import Sequence
from typing import Any

from fedme.report.run_data import Family, Run, ScoreKey, client_mean, over_seeds
from fedme.results import summary

TITLES = {"balanced_accuracy": "balanced accuracy", "ece": "calibration error"}  # longer than in tables
PERCENT = ("accuracy", "balanced_accuracy", "exact_match", "macro_f1", "micro_f1", "auroc", "ece")  # metrics drawn in percent
SPLITS = {"test": "test", "val": "validation"}


def view(families: Sequence[Family]) -> dict[str, Any]:
    """A line for every model of every family, with every metric on every split."""
    lines = [line for index, family in enumerate(families) for line in _lines(index, family)]
    present = {split for line in lines for split in line["values"]}
    measures = {measure.key: measure for family in families for measure in family.runs[0].measures}.values()
    metrics = {m.key: {"title": TITLES.get(m.key, m.title), "percent": m.key in PERCENT, "higher": m.higher} for m in measures}
    return {"metrics": metrics, "splits": {split: word for split, word in SPLITS.items() if split in present}, "lines": lines}


def _lines(index: int, family: Family) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    models = {key[:2]: None for run in family.runs for key in run.scores}
    for model, stage in sorted(models, key=lambda key: (key[0] != "personal", key[1] != "round")):
        # Seeds of an unfinished family may have reached different rounds: a mean is over all seeds or left out.
        rounds = sorted(set.intersection(*(_rounds(run, model, stage) for run in family.runs)))
        if not rounds:
            continue
        values = {split: _values(family, (model, stage, split), rounds) for split in SPLITS}
        values = {split: metrics for split, metrics in values.items() if metrics}
        twin = next((line for line in lines if line["values"] == values), None)
        if model == "global" and twin:
            twin["model"] += " = global"
            continue
        name = model if stage == "round" else f"{model}, fine-tuned"
        totals = [list(itertools.accumulate(run.sent.get(t, 0) for t in run.rounds)) for run in family.runs]
        megabytes = [summary.spread([total[t] / 1e6 for total in totals])[0] for t in rounds]
        lines.append({"family": index, "model": name, "rounds": rounds, "megabytes": _rounded(megabytes), "values": values})
    return lines


def _rounds(run: Run, model: str, stage: str) -> set[int]:
    return {t for split in SPLITS for t in run.scores.get((model, stage, split), {})}


def _values(family: Family, key: ScoreKey, rounds: Sequence[int]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if any(key not in run.scores for run in family.runs):
        return values
    for metric in (measure.key for measure in family.runs[0].measures):
        points = [over_seeds([client_mean(run.scores[key].get(t, {}), metric) for run in family.runs]) for t in rounds]
        if any(mean is not None for mean, _ in points):
            values[metric] = {"mean": _rounded([mean for mean, _ in points]), "std": _rounded([std for _, std in points])}
    return values


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]
