"""Test accuracy of personal models with batch normalisation, without and with `models.update_bn`.

    python benchmarks/batch_norm.py har         UCI HAR by person: 30 clients, a dense network on windows of 9 x 128 values
    python benchmarks/batch_norm.py cifar10     CIFAR-10, Dirichlet(0.5), 10 clients, a network of two convolutions

Reads `$FEDME_DATA/har/person_*.npz` (`x`: windows, `y`: activities) or `$FEDME_DATA/cifar-10-batches-bin`.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
from batch_norm_networks import Dense
from rich.console import Console

import fedme
from fedme.config.experiment import parse
from fedme.datasets.download import root
from fedme.results import records
from fedme.running import run
from fedme.running.progress import Display

METHODS = {"FedAvg": fedme.FedAvg, "FedMe": fedme.FedMe, "Local": fedme.Local}


def on_har(method: str, settings: dict, output: str, limit: int | None) -> None:
    """One run on UCI HAR, a client per person."""
    clients = []
    for path in sorted((root() / "har").glob("person_*.npz")):
        with np.load(path) as person:
            clients.append(fedme.Client(path.stem, train=(person["x"], person["y"]), model=fedme.Arch(Dense)))
    data = {"stratify": False} | ({} if limit is None else {"limit": limit})
    METHODS[method](**settings, data=data).fit(clients, output=output, quiet=True)


def on_cifar10(method: str, settings: dict, output: str, limit: int | None) -> None:
    """One run on CIFAR-10."""
    plain = settings | {
        "output": output,
        "method": {"name": method.lower()},
        "models": {**settings["models"], "pool": ["batch_norm_networks:Convolutional"]},
        "data": {"name": "cifar10", "limit": limit or 20000, "stratify": False},
        "partition": {"name": "dirichlet", "clients": 10, "alpha_label": 0.5},
    }
    with Display(Console(stderr=True), quiet=True) as display:
        run.start(parse(plain), display)


def accuracy(folder: str) -> float:
    """The mean test accuracy of the clients' personal models after the last round, in percent."""
    rows = [row for row in records.read(Path(folder)) if (row["model"], row["split"]) == ("personal", "test")]
    return 100 * statistics.fmean(row["accuracy"] for row in rows)


def main() -> None:
    """Print one row per method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=("har", "cifar10"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--limit", type=int, help="samples: per person (har), in total (cifar10, 20,000 by default)")
    options = parser.parse_args()
    start = {"har": on_har, "cifar10": on_cifar10}[options.data]
    print("| method | as averaged or trained | update_bn | difference |\n|---|---:|---:|---:|")
    for method in options.methods:
        found: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(options.seeds):
            for update_bn, values in found.items():
                settings = {
                    "seed": seed,
                    "rounds": options.rounds,
                    "evaluate_every": options.rounds,
                    "train": {"epochs": options.epochs, "batch": options.batch, "lr": options.lr},
                    "models": {"update_bn": update_bn},
                }
                with tempfile.TemporaryDirectory() as folder:
                    start(method, settings, f"{folder}/run", options.limit)
                    values.append(accuracy(f"{folder}/run"))
        gains = [after - before for before, after in zip(found[False], found[True], strict=True)]
        print(f"| {method} | {_cell(found[False])} | {_cell(found[True])} | {_cell(gains)} |", flush=True)


def _cell(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values) if len(values) > 1 else 0:.1f}"


if __name__ == "__main__":
    main()
