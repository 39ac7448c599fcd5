"""What the values of `train.last_batch` do to validation accuracy: the table in docs/experiments.md.

FEDME_DATA=folder python benchmarks/last_batch.py [SEEDS [WORD]]     (WORD chooses settings)

Needs MNIST, FEMNIST, UCI HAR (`har/person_*.npz`) and the four files of the heart disease data (`heart/processed.*.data`).

In the first settings, one of ten clients has 73 batches and one more sample, the others have whole batches. The other settings
are ordinary. Rates and rounds are those of the presets, or were set before: nothing is tuned for a value.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from rich.console import Console

import fedme
from fedme.config.experiment import load
from fedme.core.key import Key
from fedme.core.operations import LastBatch
from fedme.datasets.mnist import Mnist
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display

BATCH, VALIDATION = 32, 500
Accuracies = dict[str, float]  # by client, in the last round
Samples = dict[str, tuple[np.ndarray, np.ndarray]]  # inputs and classes of every client


def odd_client(learner: type[fedme.Learner], model: str, lr: float, folder: Path, seed: int, last_batch: str) -> Accuracies:
    """Nine clients with 20 to 60 whole batches of MNIST, and client "odd" with 73 batches and one sample."""
    data = Mnist().load(Path(os.environ["FEDME_DATA"]))
    sizes = {"odd": 73 * BATCH + 1} | {f"whole-{i}": (20 + 5 * i) * BATCH for i in range(9)}
    order = data.train[torch.from_numpy(Key(seed).at("samples").numpy().permutation(len(data.train)))]
    pieces = order[: sum(sizes.values()) + VALIDATION * len(sizes)].split(
        [n for size in sizes.values() for n in (size, VALIDATION)]
    )
    samples = [(data.source.inputs(rows), data.source.labels[rows]) for rows in pieces]
    clients = [
        fedme.Client(name, samples[2 * i], samples[2 * i + 1], samples[2 * i + 1], model) for i, name in enumerate(sizes)
    ]
    train = {"batch": BATCH, "lr": lr, "momentum": 0.9, "epochs": 2, "last_batch": last_batch}
    learner(rounds=10, seed=seed, train=train, evaluate_every=10).fit(clients, output=folder, quiet=True)
    return accuracies(folder)


def sites(name: str, learner: type[fedme.Learner], folder: Path, seed: int, last_batch: str) -> Accuracies:
    """Persons of UCI HAR, or hospitals: clients as the data has them, a third of whose samples are for validation."""
    clients = []
    for client, (x, y) in {"HAR": _persons, "heart": _hospitals}[name]().items():
        order = Key(seed).at("samples", client).numpy().permutation(len(y))
        kept, held_out = order[len(y) // 3 :], order[: len(y) // 3]
        clients.append(
            fedme.Client(client, (x[kept], y[kept]), (x[held_out], y[held_out]), (x[held_out], y[held_out]), "dnn-64")
        )
    train = {"batch": 20, "lr": 0.05, "momentum": 0.9, "epochs": 2, "last_batch": last_batch}
    learner(rounds=20, seed=seed, train=train, evaluate_every=20).fit(clients, output=folder, quiet=True)
    return accuracies(folder)


@lru_cache
def _persons() -> Samples:
    files = sorted((Path(os.environ["FEDME_DATA"]) / "har").glob("person_*.npz"))
    return {file.stem: (np.load(file)["x"], np.load(file)["y"]) for file in files}


@lru_cache
def _hospitals() -> Samples:
    """Thirteen numbers of a patient, and whether there is a heart disease; a missing number is the mean of all."""
    files = sorted((Path(os.environ["FEDME_DATA"]) / "heart").glob("processed.*.data"))
    tables = {file.stem: np.genfromtxt(file, delimiter=",", missing_values="?") for file in files}
    everything = np.concatenate(list(tables.values()))[:, :13]
    mean, deviation = np.nanmean(everything, 0), np.nanstd(everything, 0)
    return {
        name: (np.nan_to_num((table[:, :13] - mean) / deviation).astype(np.float32), (table[:, 13] > 0).astype(np.int64))
        for name, table in tables.items()
    }


def preset(words: str, folder: Path, seed: int, last_batch: str) -> Accuracies:
    """An ordinary experiment."""
    name, *changes = words.split()
    changes += [
        f"seed={seed}",
        f"train.last_batch={last_batch}",
        f"output={folder}",
        "finetune.epochs=0",
        "data.stratify=false",
    ]
    run.start(load(name, changes)[0], Display(Console(stderr=True), quiet=True))
    return accuracies(folder)


def accuracies(folder: Path) -> Accuracies:
    """Validation accuracy of the personal models after the last round."""
    rows = [row for row in records.read(folder) if (row["model"], row["stage"], row["split"]) == ("personal", "round", "val")]
    last = max(row["round"] for row in rows)
    return {row["client"]: 100 * row["accuracy"] for row in rows if row["round"] == last}


DIRICHLET = "digits-fedavg data.name=mnist data.limit=6000 data.val=0.3 models.pool=['mlp'] rounds=10 evaluate_every=10"
SKEWED = f"{DIRICHLET} partition.alpha_label=0.1"
WRITERS = "femnist-fedavg models.pool=['dnn-64'] rounds=30 evaluate_every=30"
SETTINGS: Mapping[str, Callable[[Path, int, str], Accuracies]] = {
    "odd client, MNIST, local": partial(odd_client, fedme.Local, "cnn-1(width=0.25)", 0.1),
    "odd client, MNIST, FedAvg": partial(odd_client, fedme.FedAvg, "mlp", 0.1),
    "digits-fedme (the demo)": partial(preset, "digits-fedme data.val=0.3 evaluate_every=20"),
    "digits-fedavg": partial(preset, "digits-fedavg data.val=0.3 evaluate_every=20"),
    "MNIST, Dirichlet, FedAvg": partial(preset, DIRICHLET),
    "MNIST, Dirichlet, local": partial(preset, f"{DIRICHLET} method.name=local"),
    **{
        f"MNIST, Dirichlet(0.1), {name}": partial(preset, f"{SKEWED} method.name={name}")
        for name in ("fedavg", "fedme", "local")
    },
    **{
        f"{name}, {learner.__name__}": partial(sites, name, learner)
        for name in ("HAR", "heart")
        for learner in (fedme.FedAvg, fedme.FedMe, fedme.Local)
    },
    "FEMNIST writers, FedAvg": partial(preset, WRITERS),
    "FEMNIST writers, local": partial(preset, f"{WRITERS} method.name=local"),
    "FEMNIST writers, FedAvg, three times the rate": partial(preset, f"{WRITERS} train.lr=0.03"),
    "FEMNIST writers, local, three times the rate": partial(preset, f"{WRITERS} method.name=local train.lr=0.03"),
}


def main(seeds: int, word: str) -> None:
    """Print a table: mean and standard deviation over seeds of the mean over clients, and of the odd client alone."""
    values = get_args(LastBatch)
    print("| setting | clients | " + " | ".join(values) + " | scale - keep, by seed |")
    print("|---" * (len(values) + 3) + "|")
    for name, measure in SETTINGS.items():
        if word not in name:
            continue
        found: dict[str, list[Accuracies]] = {value: [] for value in values}
        for seed in range(seeds):
            for value in values:
                with tempfile.TemporaryDirectory() as folder:
                    found[value].append(measure(Path(folder) / "run", seed, value))
        shown: dict[str, Callable[[Accuracies], float]] = {"mean of all": lambda one: statistics.fmean(one.values())}
        if name.startswith("odd client"):
            shown = {"the odd one": lambda one: one["odd"], "mean of the others": lambda one: _others(one)}
        for label, number in shown.items():
            cells = [[number(one) for one in found[value]] for value in values]
            cells.append([scaled - kept for scaled, kept in zip(cells[2], cells[0], strict=True)])
            texts = [f"{statistics.fmean(cell):.1f} ± {statistics.stdev(cell):.1f}" for cell in cells]
            print(f"| {name} | {label} | {' | '.join(texts)} |", flush=True)


def _others(one: Accuracies) -> float:
    return statistics.fmean(value for client, value in one.items() if client != "odd")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5, sys.argv[2] if len(sys.argv) > 2 else "")
