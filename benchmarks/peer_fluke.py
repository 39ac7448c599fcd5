"""fluke's own methods: its clients, servers and channels in one process, models in memory, evaluation switched off.

One thread: a plain PyTorch loop over networks this small is no faster with two. A round trains as many epochs as ours; where
fluke's method is not the paper's (docs/errata.md), it is timed as it is.
"""

import time
from typing import Any

import protocol
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.apfl import APFL
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedamp import FedAMP
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedbn import FedBN
from fluke.algorithms.fedper import FedPer
from fluke.algorithms.fedproto import FedProto
from fluke.algorithms.fedrep import FedRep
from fluke.algorithms.lg_fedavg import LGFedAVG
from fluke.algorithms.scaffold import SCAFFOLD
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver
from torch import nn

import networks

CLASSES = 10
# The class, and its settings of clients and server: as many epochs as ours.
METHODS: dict[str, tuple[type[CentralizedFL], dict[str, Any], dict[str, Any]]] = {
    "fedavg": (FedAVG, {}, {}),
    "ditto": (Ditto, {"tau": 1, "lam": 1.0}, {}),
    "scaffold": (SCAFFOLD, {}, {"global_step": 1.0}),
    "fedper": (FedPer, {}, {}),
    "fedrep": (FedRep, {"local_epochs": 5, "tau": 1}, {}),
    "lg-fedavg": (LGFedAVG, {}, {}),
    "fedbn": (FedBN, {}, {}),
    "apfl": (APFL, {"lam": 0.5}, {"tau": 1}),
    "fedamp": (FedAMP, {"lam": 1.0}, {"sigma": 1.0, "alpha": 1.0}),
    "fedproto": (FedProto, {"lam": 1.0, "n_protos": CLASSES}, {"n_protos": CLASSES}),
}
SHARED_PART = {"fedper": "encoder", "fedrep": "encoder", "lg-fedavg": "head"}  # what the server has
WITH_MODEL = ("ditto", "fedper", "fedrep", "lg-fedavg", "apfl", "fedamp", "fedproto")  # clients are given one


class CountingLoader(FastDataLoader):
    """fluke's loader, which counts the batches and samples that it gave out."""

    steps = samples = 0

    def __next__(self) -> Any:
        batch = super().__next__()
        CountingLoader.steps += 1
        CountingLoader.samples += len(batch[1])
        return batch


class Clock(FederationObserver):
    """How long every round took."""

    def __init__(self) -> None:
        self.began, self.seconds = 0.0, list[float]()

    def start_round(self, round: int, global_model: Any) -> None:
        """The start of a round."""
        self.began = time.perf_counter()

    def end_round(self, round: int) -> None:
        """The end of a round."""
        self.seconds.append(time.perf_counter() - self.began)


def network(model: str, weights: list[Any]) -> EncoderHeadNet:
    """The network in two parts, as fluke's methods want it."""
    layers = list(networks.build(model, weights))  # type: ignore[call-overload]
    return EncoderHeadNet(nn.Sequential(*layers[:-1]), layers[-1])


def main() -> None:
    """Do the job on the command line."""
    job = protocol.job()
    torch.set_num_threads(1)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    data, weights = protocol.read(job.data), protocol.read_weights(job.weights)
    loaders = [
        CountingLoader(
            torch.from_numpy(each.x),
            torch.from_numpy(each.y),
            num_labels=CLASSES,
            batch_size=job.batch,
            shuffle=True,
            skip_singleton=False,
        )
        for each in data.clients
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * len(loaders), None, CLASSES))
    method, clients, server = METHODS[job.method]
    client = {
        "batch_size": job.batch,
        "local_epochs": job.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": job.lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    } | clients
    if job.method in WITH_MODEL:
        client["model"] = network(job.model, weights)
    shared: nn.Module = network(job.model, weights)
    if job.method in SHARED_PART:
        shared = getattr(shared, SHARED_PART[job.method])
    settings = DDict(client=client, server={"weighted": True} | server, model=shared)
    algorithm, clock, rounds = method(len(loaders), splitter, settings), Clock(), job.warm + job.rounds
    algorithm.set_callbacks(clock)
    algorithm.run(rounds, 1.0)
    right = None
    if job.method == "fedavg":
        right = networks.accuracy(algorithm.server.model.eval(), torch.from_numpy(data.test.x), torch.from_numpy(data.test.y))
    steps, samples = CountingLoader.steps // rounds, CountingLoader.samples // rounds
    protocol.answer("fluke", job.work, clock.seconds[job.warm :], steps, samples, right)


if __name__ == "__main__":
    main()
