"""Tables of real sites: accuracy of Local, FedAvg and FedMe, and of the majority class, on the sites' test parts.

FEDME_DATA=DIRECTORY python benchmarks/site_tables.py heart 5

The data sets: `heart` (UCI, four hospitals), `har` (UCI, 30 persons), `lung` (R package survival, 18 institutions), and
`contraception` (R package mlmRev, 60 districts of Bangladesh); docs/site-tables.md says where they come from.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas

import fedme
from fedme.artifacts import outputs
from fedme.results import records, verdicts

ROOT = Path(os.environ.get("FEDME_DATA", "."))
HEART = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "ill"]
Clients = list[fedme.Client]
ROUNDS = 20
POOLS = {"har": ["dnn-64", "mlr", "dnn-16"]}  # all clients start with the first
POOL = ["dnn-16", "mlr", "dnn-64"]
LEARNERS = {"Local": fedme.Local, "FedAvg": fedme.FedAvg, "FedMe": fedme.FedMe}


def heart() -> tuple[Clients, dict[str, Any]]:
    """Four hospitals with many gaps; 0 stands for a gap of cholesterol and pressure."""
    clients = []
    for path in sorted((ROOT / "heart").glob("processed.*.data")):
        table = pandas.read_csv(path, header=None, names=HEART)
        table["ill"] = np.where(table["ill"] > 0, "yes", "no")
        clients.append(fedme.Client(path.suffixes[-2].strip("."), train=table, label="ill"))
    categories = ["cp", "restecg", "slope", "thal"]
    return clients, {"missing": "indicator", "categorical": categories, "na_values": {"chol": [0], "trestbps": [0]}}


def har() -> tuple[Clients, dict[str, Any]]:
    """Thirty persons with a telephone, six activities."""
    clients = []
    for path in sorted((ROOT / "har").glob("person_*.npz")):
        with np.load(path) as person:
            clients.append(fedme.Client(path.stem, train=(person["x"], person["y"])))
    return clients, {}


def lung() -> tuple[Clients, dict[str, Any]]:
    """Eighteen institutions with 2 to 36 patients with lung cancer; who died during the study?"""
    table = pandas.read_csv(ROOT / "lung.csv").dropna(subset="inst").drop(columns="time")
    table["status"] = table["status"].map({1: "alive", 2: "died"})
    return _by(table, "inst", "status"), {"missing": "median"}


def contraception() -> tuple[Clients, dict[str, Any]]:
    """Sixty districts with 2 to 118 women; who uses contraception? Two of three columns are text."""
    table = pandas.read_csv(ROOT / "contraception.csv").drop(columns="woman")
    return _by(table, "district", "use"), {}


def _by(table: pandas.DataFrame, column: str, label: str) -> Clients:
    """One client per value of a column."""
    sites = table.groupby(column)
    return [fedme.Client(f"{column}-{int(name)}", train=rows.drop(columns=column), label=label) for name, rows in sites]


SETS: dict[str, Callable[[], tuple[Clients, dict[str, Any]]]] = {
    "heart": heart,
    "har": har,
    "lung": lung,
    "contraception": contraception,
}


Found = dict[str, tuple[float, float | None]]


def measured(name: str, seed: int, folder: Path) -> Found:
    """Accuracy in percent over all test samples, and the mean AUROC of the clients that have one, by method."""
    clients, data = SETS[name]()
    found: Found = {}
    pool = POOLS.get(name, POOL)
    models = {"pool": pool, "assign": pool[0]}
    for method, learner in LEARNERS.items():
        output = folder / f"{method}-{seed}"
        settings = {"rounds": ROUNDS, "seed": seed, "finetune": {"epochs": 2}, "train": {"lr": 0.05}, "models": models}
        result = learner(**settings, data=data).fit(clients, output=output, quiet=True)
        last = [row for row in records.read(output) if row["round"] == ROUNDS - 1]
        rows = [row for row in last if (row["model"], row["split"]) == ("personal", "test")]
        for stage, title in (("round", method), ("finetuned", f"{method}, fine-tuned")):
            of_stage = [row for row in rows if row["stage"] == stage]
            samples = sum(row["samples"] for row in of_stage)
            aurocs = [row["auroc"] for row in of_stage if row.get("auroc") is not None]
            accuracy = 100 * sum(row["accuracy"] * row["samples"] for row in of_stage) / samples
            found[title] = accuracy, statistics.fmean(aurocs) if aurocs else None
        if method != "Local":
            _judge(method, result, found)
    found["always the most frequent class of the client"] = 100 * _majority(clients, data, seed), None
    return found


def _judge(method: str, result: fedme.Result, found: Found) -> None:
    """The model that every client uses, the best of the pool alone, and the verdicts."""
    judged = result.verdicts(quiet=True)
    samples = sum(v.samples for v in judged)
    right = 0
    for client in result:
        answers, targets = outputs.of_split(outputs.read(result[client].folder), "test")
        if targets is None:
            continue
        name = result[client].name
        if name == "local":
            right += round(next(v.local or 0.0 for v in judged if v.client == client) * len(targets))
        else:
            right += int((answers[name].argmax(1) == targets).sum())
    found[f"{method}, the model that every client uses"] = 100 * right / samples, None
    found["Local, best of the pool"] = 100 * sum((v.local or 0.0) * v.samples for v in judged) / samples, None
    summary = verdicts.overall(judged)
    for word, group in (("better", summary.better), ("worse", summary.worse), ("open", summary.open)):
        found[f"{method}, clients clearly {word}" if word != "open" else f"{method}, cannot tell"] = len(group), None
    found[f"{method}, of these equivalent within 5 points"] = len(summary.equivalent), None


def _majority(clients: Clients, data: dict[str, Any], seed: int) -> float:
    """The accuracy of the most frequent class of every client's training part, over all test samples."""
    from fedme.running.assembly import gather

    right = total = 0
    for part in gather(fedme.Local(seed=seed, data=data).experiment(clients)).clients.values():
        right += int((part.test.y == part.train.y.mode().values).sum())
        total += len(part.test)
    return right / total


def main(name: str, seeds: int) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        results = [measured(name, seed, Path(folder)) for seed in range(seeds)]
    print(f"| {name}, {seeds} seeds | test accuracy % | mean AUROC |\n|---|---:|---:|")
    for method in results[0]:
        accuracies = [result[method][0] for result in results]
        aurocs = [auroc for result in results if (auroc := result[method][1]) is not None]
        spread = f" ± {statistics.stdev(accuracies):.1f}" if seeds > 1 else ""
        auroc = f"{statistics.fmean(aurocs):.3f}" if aurocs else ""
        print(f"| {method} | {statistics.fmean(accuracies):.1f}{spread} | {auroc} |")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
