"""Tables of real sites: accuracy or RMSE of Local, FedAvg, FedMe, and the majority class or mean, on the sites' test parts.

FEDME_DATA=DIRECTORY python benchmarks/site_tables.py heart 5

docs/site-tables.md describes the data sets and says where they come from.
"""

import gzip
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
from fedme.core.metrics import MEASURES, Measure, task_type_of_row
from fedme.results import records, verdicts

ROOT = Path(os.environ.get("FEDME_DATA", "."))
HEART = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "ill"]
Clients = list[fedme.Client]
ROUNDS = 20
POOLS = {name: ["dnn-64", "mlr", "dnn-16"] for name in ("har", "fashion")}  # all clients start with the first
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


def fashion() -> tuple[Clients, dict[str, Any]]:
    """Ten clients with 300 pictures of clothes each, with skewed labels; they are the same for all seeds."""

    def read(name: str, start: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((ROOT / "fashion-mnist" / name).read_bytes()), np.uint8, offset=start)

    x = read("train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28).astype(np.float32) / 255
    y = read("train-labels-idx1-ubyte.gz", 8)
    draw = np.random.default_rng(0)
    clients = []
    for number in range(10):
        weights = draw.dirichlet(np.full(10, 0.3))[y]
        rows = draw.choice(len(y), 300, replace=False, p=weights / weights.sum())
        clients.append(fedme.Client(f"client-{number}", train=(x[rows], y[rows].astype(np.int64))))
    return clients, {}


def diabetes() -> tuple[Clients, dict[str, Any]]:
    """Five clients by age with 80 to 94 patients each; how far has the disease progressed after a year?"""
    from sklearn.datasets import load_diabetes

    table = load_diabetes(as_frame=True, scaled=False).frame
    table["fifth"] = pandas.qcut(table["age"], 5, labels=False)
    return _by(table, "fifth", "target"), {"task": "regression"}


def sleep() -> tuple[Clients, dict[str, Any]]:
    """Eighteen persons without enough sleep, measured on ten days; how fast do they react?"""
    return _by(pandas.read_csv(ROOT / "sleepstudy.csv"), "Subject", "Reaction"), {"task": "regression"}


def exam() -> tuple[Clients, dict[str, Any]]:
    """Sixty-five schools of London with 2 to 198 pupils; the result of an examination at the age of 16, standardised."""
    table = pandas.read_csv(ROOT / "exam.csv").drop(columns="student")
    return _by(table, "school", "normexam"), {"task": "regression"}


def _by(table: pandas.DataFrame, column: str, label: str) -> Clients:
    """One client per value of a column."""
    sites = table.groupby(column)
    return [fedme.Client(f"{column}-{int(name)}", train=rows.drop(columns=column), label=label) for name, rows in sites]


SETS: dict[str, Callable[[], tuple[Clients, dict[str, Any]]]] = {
    "heart": heart,
    "har": har,
    "lung": lung,
    "contraception": contraception,
    "fashion": fashion,
    "diabetes": diabetes,
    "sleep": sleep,
    "exam": exam,
}


Found = dict[str, tuple[float, float | None]]


def measured(name: str, seed: int, folder: Path) -> Found:
    """Accuracy in percent or RMSE over all test samples, and the mean AUROC of the clients that have one, by method."""
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
        measure = MEASURES[task_type_of_row(rows[0])][0]
        for stage, title in (("round", method), ("finetuned", f"{method}, fine-tuned")):
            of_stage = [row for row in rows if row["stage"] == stage]
            aurocs = [row["auroc"] for row in of_stage if row.get("auroc") is not None]
            found[title] = _pooled(measure, of_stage), statistics.fmean(aurocs) if aurocs else None
        if method != "Local":
            _judge(method, result, found)
    return found


def _judge(method: str, result: fedme.Result, found: Found) -> None:
    """The model that every client uses, the best of the pool alone, the most frequent class or mean, and the verdicts."""
    judged = result.verdicts(quiet=True)

    def pooled(value: Callable[[verdicts.Verdict], float | None]) -> float:
        measure = judged[0].measure
        return _pooled(measure, [{measure.key: value(verdict), "samples": verdict.samples} for verdict in judged])

    used = pooled(lambda verdict: verdict.local if result[verdict.client].name == "local" else verdict.value)
    found[f"{method}, the model that every client uses"] = used, None
    found["Local, best of the pool"] = pooled(lambda verdict: verdict.local), None
    found["always the most frequent class, or the mean, of the client"] = pooled(lambda verdict: verdict.constant), None
    summary = verdicts.overall(judged)
    for word, group in (("better", summary.better), ("worse", summary.worse), ("open", summary.open)):
        found[f"{method}, clients clearly {word}" if word != "open" else f"{method}, cannot tell"] = len(group), None
    found[f"{method}, of these equivalent within 5 %"] = len(summary.equivalent), None


def _pooled(measure: Measure, rows: list[dict[str, Any]]) -> float:
    """The value over the samples of all rows, in percent where it is a fraction."""
    value = measure.pooled(rows)
    if value is None:
        raise SystemExit(f"a client has no {measure.title}")
    return 100 * value if measure.percent else value


def main(name: str, seeds: int) -> None:
    """Print a table."""
    with tempfile.TemporaryDirectory() as folder:
        results = [measured(name, seed, Path(folder)) for seed in range(seeds)]
    print(f"| {name}, {seeds} seeds | test accuracy % or RMSE | mean AUROC |\n|---|---:|---:|")
    for method in results[0]:
        values = [result[method][0] for result in results]
        aurocs = [auroc for result in results if (auroc := result[method][1]) is not None]
        spread = f" ± {statistics.stdev(values):.3g}" if seeds > 1 else ""
        auroc = f"{statistics.fmean(aurocs):.3f}" if aurocs else ""
        print(f"| {method} | {statistics.fmean(values):.4g}{spread} | {auroc} |")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
