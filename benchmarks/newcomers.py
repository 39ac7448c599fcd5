"""Newcomers: clients held out of training join afterwards. How do they do, beside training alone and FedAvg's model?

Twenty-four clients of the bundled digits, eight of them held out; every method sees the same samples in the same parts.
Prints a Markdown table: the mean over held-out clients of their test accuracy in percent, and its spread over seeds.
"""

import argparse
import statistics

import fedme
from fedme.core.key import Key
from fedme.datasets.digits import Digits
from fedme.datasets.federated_dataset import DataOptions, federate
from fedme.datasets.partitioners import Dirichlet

NETWORKS = ("mlr", "dnn-16", "dnn-64", "dnn-64-32")
CLIENTS, HELD_OUT = 24, 8


def clients(seed: int) -> list[fedme.Client]:
    """All clients, with pixels from 0 to 1, in their parts."""
    dataset = Digits().load(None)  # type: ignore[arg-type]
    partition = Dirichlet(clients=CLIENTS, alpha_label=0.5, alpha_size=10.0, min_samples=10)
    federation = federate(dataset, partition, DataOptions(stratify=False), Key(seed).at("partition"))
    images, labels = dataset.source.x / 16, dataset.source.labels  # type: ignore[attr-defined]
    parts = federation.partition.clients
    return [
        fedme.Client(
            name,
            train=(images[rows.train], labels[rows.train]),
            val=(images[rows.val], labels[rows.val]),
            test=(images[rows.test], labels[rows.test]),
            model=NETWORKS[i % len(NETWORKS)],
        )
        for i, (name, rows) in enumerate(parts.items())
    ]


def accuracies(seed: int, rounds: int) -> dict[str, float]:
    """The mean test accuracy of the held-out clients, by what they have."""
    everybody = clients(seed)
    there, new = everybody[:-HELD_OUT], everybody[-HELD_OUT:]
    settings = {"rounds": rounds, "seed": seed, "evaluate_every": rounds, "data": {"classes": list("0123456789")}}
    shared = {"models": {"shared": "dnn-64"}}
    found = {}
    alone = fedme.Local(**settings).fit(new, quiet=True)
    found["Local, its own network"] = _mean(alone, new, "model")
    for name, learner in {
        "FedAvg": fedme.FedAvg(**settings, **shared),
        "HypCluster": fedme.HypCluster(**settings, **shared),
        "FedMe": fedme.FedMe(**settings),
    }.items():
        result = learner.fit(there, quiet=True)
        for client in new:
            result.join(client, compare=False)
        found[f"{name}, as it came"] = _mean(result, new, "model")
        found[f"{name}, fine-tuned"] = _mean(result, new, "finetuned")
    return found


def _mean(result: fedme.Result, clients: list[fedme.Client], name: str) -> float:
    each = [result.model(client.id, name).about["accuracy"]["test"] for client in clients]
    return 100 * statistics.fmean(each)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--rounds", type=int, default=20)
    asked = arguments.parse_args()
    runs = [accuracies(seed, asked.rounds) for seed in range(asked.seeds)]
    print("| what a held-out client has | test accuracy % |\n|---|---:|")
    for name in runs[0]:
        values = [run[name] for run in runs]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        print(f"| {name} | {statistics.fmean(values):.1f}{spread} |")


if __name__ == "__main__":
    main()
