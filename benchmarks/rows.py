"""The table to reach, as data: what is run, against whom, and where the bar is. `--quick` shrinks the work, not the table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

BATCH, LR = 10, 0.01  # plain SGD for all
CORES = 2
ENGINE = {"threads": CORES, "workers": CORES}

Config = dict[str, Any]


@dataclass(frozen=True)
class Against:
    """One comparison: with a peer by name, with ourselves (`config`), with the matrix peak, or with rounds alone."""

    peer: str
    bar: float
    reach: float | None = None
    kind: Literal["peer", "ours", "peak"] = "peer"
    config: Config = field(default_factory=dict)
    at_most: bool = False  # ratio = ours / theirs must not exceed the bar; otherwise theirs / ours must reach it
    same_result: bool = True  # both sides must end with the same accuracy
    same_work: bool = True  # both sides must count the same steps and samples


@dataclass(frozen=True)
class Row:
    """One line of work; `model` is what peers call it."""

    name: str
    work: str
    config: Config
    against: tuple[Against, ...]
    model: str = "dense"
    warm: int = 2
    rounds: int = 7
    whole: bool = False  # time a whole run, with everything, instead of its rounds alone
    modules: int = 0  # of a whole run: so many clients of a program, each with a module of its own, instead of an experiment
    allowance: float = 0.0  # seconds of a whole run that do not count
    afresh: bool = False  # every round starts from the first models: adoption would not leave them mixed evenly

    @property
    def total(self) -> int:
        """Rounds in all, on both sides."""
        return self.warm + self.rounds


def mnist(pool: list[Any], quick: bool, method: Mapping[str, Any] | None = None, steps: int = 5240) -> Config:
    """MNIST over 20 clients of very different sizes; what is left of the training images is for validation."""
    val = 0.12
    sizes = {"clients": 4, "least": 20, "most": 120, "steps": 28} if quick else {"steps": steps}
    return {
        "method": dict(method or {"name": "fedavg"}),
        "data": {"name": "mnist", "val": val},
        "partition": {"name": "unequal", "val": val, "batch": BATCH, **sizes},
        "models": {"pool": pool},
        "train": {"epochs": 1, "batch": BATCH, "lr": LR},
        "engine": ENGINE,
    }


def synthetic(quick: bool) -> Config:
    """Synthetic(0.5, 0.5): 100 clients with a classifier of their own."""
    return {
        "method": {"name": "fedavg"},
        "data": {"name": "synthetic", "users": 5 if quick else 100, "val": 0.0, "test": 0.25},
        "partition": {"name": "whole-batches"},
        "models": {"pool": ["dnn-20"]},
        "train": {"epochs": 1, "batch": BATCH, "lr": LR},
        "engine": ENGINE,
    }


def femnist(quick: bool) -> Config:
    """FEMNIST writers with the two-convolution network of the FedMe papers, which has 1.2 million weights."""
    return {
        "method": {"name": "fedavg"},
        "data": {"name": "femnist", "val": 0.0} | ({"limit": 20} if quick else {}),
        "partition": {"name": "natural", "clients": 2 if quick else 40},
        "models": {"pool": ["cnn-2"]},
        "train": {"epochs": 1, "batch": 20, "lr": LR},
        "engine": ENGINE,
    }


def table(quick: bool = False) -> list[Row]:
    """Every row that has a bar."""
    mlr, dnn = ["mlr"], ["dnn-100"]
    fedavg = {"mlr": mnist(mlr, quick), "dnn": mnist(dnn, quick)}
    rows = [
        Row(
            "fedavg-mlr",
            "FedAvg MLR 784-10, batch 10",
            fedavg["mlr"],
            (Against("fedjax", 4.5, 6.0), Against("flower", 15.0), Against("pfl", 18.0)),
        ),
        Row(
            "fedavg-dnn",
            "FedAvg DNN 784-100-10, batch 10",
            fedavg["dnn"],
            (Against("fedjax", 2.4, 3.5), Against("flower", 7.0), Against("pfl", 9.0)),
        ),
        Row(
            "fedavg-synthetic",
            "FedAvg DNN 60-20-10, Synthetic, 100 clients, batch 10",
            synthetic(quick),
            (Against("fedjax", 6.0, 10.0),),
        ),
    ]
    for method, label in (("fedme", "FedMe"), ("fml", "FML")):
        for name, pool in (("mlr", mlr), ("dnn", dnn)):
            own = Against("our FedAvg", 2.2, 1.8, "ours", fedavg[name], at_most=True, same_result=False)
            config = mnist(pool, quick, {"name": method})
            rows.append(Row(f"{method}-{name}", f"{label} {name.upper()}, two models", config, (own,), rounds=21))
    mixed = mnist([f"dnn-{hidden}" for hidden in (50, 100, 150, 200)], quick, {"name": "fedme"})
    same = mnist(["dnn-125"], quick, {"name": "fedme"})
    images = mnist([{"name": "networks:cnn"}], quick)
    rows += [
        Row(
            "fedme-mixed",
            "FedMe DNN 784-h-10, h = 50/100/150/200 mixed",
            mixed,
            (Against("FedMe with h = 125", 1.2, 1.05, "ours", same, at_most=True, same_result=False),),
            afresh=True,
        ),
        Row(
            "fedavg-cnn",
            "FedAvg CNN (two 5x5 convolutions, 582k weights), batch 10",
            images,
            (Against("flower", 1.15, 1.5),),
            model="cnn",
            warm=1,
            rounds=2,
        ),
        Row(
            "femnist-cnn2",
            "FEMNIST CNN-2 training on 2 processors, share of the sgemm peak",
            femnist(quick),
            (Against("sgemm peak", 0.45, 0.60, "peak", same_result=False),),
            warm=1,
            rounds=3,
        ),
        Row(
            "whole-run",
            "whole run of the DNN row: evaluation and checkpoint every 5 rounds, records, summary",
            fedavg["dnn"] | {"evaluate_every": 5, "checkpoint_every": 5},
            (Against("its training alone", 1.15, 1.05, "ours", fedavg["dnn"], at_most=True),),
            warm=1,
            rounds=9 if quick else 59,
            whole=True,
        ),
    ]
    every = mnist(dnn, quick) | {"partition": {"name": "iid", "clients": 4 if quick else 20}}
    every["data"] = {"name": "mnist"} | ({"limit": 400} if quick else {"limit": 12_000})
    del every["engine"]  # these are whole runs as they are by default
    own = {"method": {"name": "fedavg"}, "train": every["train"]}
    alone = (Against("its training alone", 1.3, kind="ours", at_most=True),)
    shape = "evaluation and checkpoint in every round, models; less 1 s"
    rows += [
        Row(f"fit-{clients}", f"fit, {clients} modules 784-100-10 in a program: {shape}", own, alone, modules=count)
        for clients, count in ((20, 4 if quick else 20), (200, 5 if quick else 200))
    ]
    rows += [Row("run-20", f"fedme run, 20 clients, DNN 784-100-10: {shape}", every, alone)]
    rows[-3:] = [replace(row, whole=True, allowance=1.0, warm=1, rounds=4 if quick else 24) for row in rows[-3:]]
    if quick:
        rows = [row if row.whole else shortened(row) for row in rows]
    return rows


def shortened(row: Row) -> Row:
    """The same row with as few rounds as possible."""
    return replace(row, warm=1, rounds=2)
