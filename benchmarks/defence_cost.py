"""What the bounds that `fedme deploy init` writes cost without an attack: accuracy with and without them, changes of models.

FEDME_DATA=/path/to/data python benchmarks/defence_cost.py [NORM GUEST]

Three data sets (bundled digits, HAR by person, heart disease by hospital), the training of the template, FedMe and FedAvg, with
and without momentum, three seeds. A line per setting: mean test accuracy without and with the bounds, in how many runs
every saved model is identical, and the median and the largest change of a model in a round.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import fedme
from fedme.core import tree
from fedme.federation import round as rounds
from fedme.results import summary

DATA = Path(os.environ["FEDME_DATA"])
MODELS = ("mlr", "dnn-32")
SEEDS = range(3)
moves: list[float] = []


def client(name: str, i: int, x: Any, y: Any) -> fedme.Client:
    """A client with standardised features."""
    x = np.nan_to_num(np.asarray(x, dtype=np.float32))
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    return fedme.Client(name, train=(x, y), model=MODELS[i % 2])


def digits() -> list[fedme.Client]:
    """Ten clients, each with few samples of two classes."""
    data, random = load_digits(), np.random.default_rng(0)
    clients = []
    for i, rows in enumerate(np.array_split(random.permutation(len(data.target)), 10)):
        rare = np.isin(data.target[rows], [i % 10, (i + 3) % 10]) & (random.random(len(rows)) < 0.8)
        rows = rows[~rare]
        clients.append(client(f"d{i}", i, data.data[rows], data.target[rows]))
    return clients


def har() -> list[fedme.Client]:
    """Ten persons."""
    files = [np.load(path) for path in sorted((DATA / "har").glob("*.npz"))[:10]]
    return [client(f"p{i}", i, file["x"].reshape(len(file["x"]), -1), file["y"]) for i, file in enumerate(files)]


def heart() -> list[fedme.Client]:
    """Four hospitals; missing values are zero."""
    clients = []
    for i, path in enumerate(sorted((DATA / "heart").glob("processed.*.data"))):
        table = np.genfromtxt(path, delimiter=",", missing_values="?")
        clients.append(client(path.name.split(".")[1], i, table[:, :-1], (table[:, -1] > 0).astype(int)))
    return clients


def trained(make: Callable[[], list[fedme.Client]], method: str, folder: Path, **settings: Any) -> tuple[float, list[bytes]]:
    """The mean test accuracy of the personal models, and their files."""
    getattr(fedme, method)(rounds=10, **settings).fit(make(), output=folder, quiet=True)
    wanted = {"model": "personal", "stage": "round", "split": "test", "selection": "last round"}
    scores = [row for row in summary.read(folder)["results"] if wanted.items() <= row.items()]
    weights = [path.read_bytes() for path in sorted(folder.glob("clients/*/model.safetensors"))]
    return 100 * scores[0]["accuracy"]["client_mean"], weights


def watch_moves() -> None:
    """Note how far every model of a reply is from what was sent."""
    check = rounds.check_reply

    def checked(method: Any, task: Any, down: Any, up: Any, *rest: Any) -> Any:
        sent = check(method, task, down, up, *rest)
        for name, value in sent.items():
            if hasattr(value, "params"):
                moves.append(float(tree.norm(tree.sub(getattr(up, name).params, value.params))))
        return sent

    rounds.check_reply = checked  # type: ignore[assignment]


def main() -> None:
    """Print the table."""
    norm, guest = (float(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (30.0, 10.0)
    watch_moves()
    print(f"norm = {norm:g}, guest = {guest:g}")
    print("| data | method | momentum | without | with | models identical | median change | largest change |")
    for make in (digits, har, heart):
        for method, momentum in (("FedMe", 0.0), ("FedMe", 0.9), ("FedAvg", 0.0), ("FedAvg", 0.9)):
            moves.clear()
            train = {"epochs": 2, "batch": 20, "lr": 0.1, "momentum": momentum}
            pairs = []
            for seed in SEEDS:
                with tempfile.TemporaryDirectory() as folder:
                    open_run = trained(make, method, Path(folder) / "a", seed=seed, train=train)
                    bounds = {"norm": norm, "guest": guest} if method == "FedMe" else {"norm": norm}
                    pairs.append((open_run, trained(make, method, Path(folder) / "b", seed=seed, train=train, defence=bounds)))
            means = [np.mean([pair[side][0] for pair in pairs]) for side in (0, 1)]
            same = sum(one[1] == other[1] for one, other in pairs)
            numbers = f"{means[0]:.2f} | {means[1]:.2f} | {same} of {len(pairs)} | {np.median(moves):.2f} | {max(moves):.2f}"
            print(f"| {make.__name__} | {method} | {momentum:g} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
