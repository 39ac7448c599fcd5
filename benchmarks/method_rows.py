"""A round of every method as a multiple of our FedAvg's, and against fluke's where it has the method.

A bar is what the method computes, in rounds of FedAvg, and a tenth more: a step of one model with something beside it may cost
1.2 (prototypes, control variates, a proximal term), two models 2.2. A forward pass is about half of a training step of the
dense network and a third of one of the convolutional network, which is what FedRep's further epochs of the head cost.
"""

from dataclasses import dataclass, field
from typing import Any

from rows import Against, Config, Row, mnist, shortened

FLUKE_BAR = 8.0  # with the dense network
CNN_STEPS = {"least": 50, "most": 300, "steps": 280}  # fewer steps, so that all methods take some minutes


@dataclass(frozen=True)
class MethodBars:
    """A method, the most rounds of FedAvg that its round may take with each network, and whether fluke has it."""

    name: str
    label: str
    dnn: float = 1.2
    cnn: float = 1.2
    fluke: bool = True
    settings: Config = field(default_factory=dict)  # of the method
    data: Config = field(default_factory=dict)


METHODS: tuple[MethodBars, ...] = (
    MethodBars("ditto", "Ditto, two models", 2.2, 2.2),
    MethodBars("scaffold", "SCAFFOLD"),
    MethodBars("fedper", "FedPer"),
    MethodBars("fedrep", "FedRep, five more epochs of the head", 3.9, 2.9),
    MethodBars("lg-fedavg", "LG-FedAvg"),
    MethodBars("fedbn", "FedBN"),
    MethodBars("apfl", "APFL, two models", 2.2, 2.2),
    MethodBars("fedamp", "FedAMP"),
    MethodBars("fd", "FD, mean outputs per class", fluke=False),
    MethodBars("fedproto", "FedProto, prototypes"),
    # 20 models predict 500 samples, a third of a step each, and one model learns them; FedAvg trains the CNN on 2,800 samples.
    MethodBars("feddf", "FedDF, distillation on 500 samples", 1.3, 2.6, fluke=False, data={"unlabeled": 500}),
    MethodBars("heterofl", "HeteroFL, one width", fluke=False),
)


def configuration(network: str, method: Config, data: Config, quick: bool) -> Config:
    """MNIST over 20 clients: as in the other rows, or with fewer steps for the convolutional network."""
    pool: list[Any] = ["dnn-100"] if network == "dnn" else [{"name": "networks:cnn"}]
    config = mnist(pool, quick, method, steps=5190)  # a few less than elsewhere: the server may have samples too
    if network == "cnn" and not quick:
        config["partition"] |= CNN_STEPS
    return config | {"data": config["data"] | data}


def method_rows(quick: bool = False) -> list[Row]:
    """Every method beside our FedAvg, with both networks."""
    rows = []
    for network, about in (("dnn", "DNN 784-100-10"), ("cnn", "CNN")):
        for each in METHODS:
            config = configuration(network, {"name": each.name} | each.settings, each.data, quick)
            beside = configuration(network, {"name": "fedavg"}, each.data, quick)
            bar = each.dnn if network == "dnn" else each.cnn
            own = Against("our FedAvg", bar, None, "ours", beside, at_most=True, same_result=False, same_work=False)
            rounds = 21 if network == "dnn" else 5
            rows.append(Row(f"methods-{each.name}-{network}", f"{each.label}, {about}", config, (own,), rounds=rounds))
    return [shortened(row) for row in rows] if quick else rows


def fluke_rows(quick: bool = False) -> list[Row]:
    """FedAvg and the methods that fluke has, with the dense network; only FedAvg ends with one model that both sides test."""
    rows = []
    for name, label in (("fedavg", "FedAvg"), *((each.name, each.label) for each in METHODS if each.fluke)):
        config = configuration("dnn", {"name": name}, {}, quick)
        both = name == "fedavg"
        against = Against("fluke", FLUKE_BAR, same_result=both, same_work=both)
        rows.append(Row(f"fluke-{name}", f"{label}, DNN 784-100-10", config, (against,), rounds=3))
    return [shortened(row) for row in rows] if quick else rows
