"""The tables of an experiment file. Every default is written here, once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fedme.core.data import ClientId
from fedme.datasets.user_data import ClientFiles
from fedme.execution.device import Device
from fedme.execution.dispatcher import EnginePath
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.local_training import Training, require
from fedme.learning.robust_aggregation import Defence

Log = Literal["tensorboard", "mlflow"]
Spec = str | Mapping[str, Any]  # an architecture: its name, or a table with `name` and options


@dataclass(frozen=True)
class ModelOptions:
    """The `[models]` table: which architectures there are and who has which."""

    pool: tuple[Spec, ...] = ("mlr",)
    assign: str | Mapping[ClientId, str] = "round-robin"  # or "best-local", the name of one, or a table client = name
    shared: Spec | None = None  # the architecture of a model that all clients share; the first of the pool by default
    selection_rounds: int | None = None  # of local training for "best-local"; as many as `rounds` by default
    max_parameters: int | Mapping[ClientId, int] | None = None  # the largest guest a client takes

    def __post_init__(self) -> None:
        require(bool(self.pool), "pool", "must name at least one architecture")
        require(self.selection_rounds is None or self.selection_rounds >= 1, "selection_rounds", "must be at least 1")


@dataclass(frozen=True)
class FinetuneOptions:
    """The `[finetune]` table: epochs of fine-tuning of every personal model, at the end or at every evaluation."""

    epochs: int = 0
    when: Literal["end", "always"] = "end"

    def __post_init__(self) -> None:
        require(self.epochs >= 0, "epochs", f"must not be negative, not {self.epochs}")


@dataclass(frozen=True)
class PrivacyOptions:
    """The `[privacy]` table: differentially private training, and how private it is to be."""

    clip: float = 1.0  # largest norm of one sample's gradient, all models that a client trains in a step together
    noise_multiplier: float | None = None  # deviation of the noise on a sum of gradients, in units of `clip`
    epsilon: float | None = None  # or: the noise that keeps every client within this, over all rounds
    delta: float = 1e-5
    secret: bool = False  # noise from the operating system instead of the seed: it cannot be repeated, nor taken off

    def __post_init__(self) -> None:
        require(self.clip > 0, "clip", f"must be positive, not {self.clip}")
        require(
            (self.noise_multiplier is None) != (self.epsilon is None),
            "noise_multiplier",
            "give either noise_multiplier or epsilon",
        )
        require(
            self.noise_multiplier is None or 0 <= self.noise_multiplier <= 1e6,
            "noise_multiplier",
            f"must be from 0 to a million, not {self.noise_multiplier}",
        )
        require(not self.noise_multiplier or self.clip < math.inf, "clip", "must be finite: noise is in units of it")
        require(self.epsilon is None or 0 < self.epsilon < math.inf, "epsilon", f"must be positive, not {self.epsilon}")
        require(self.epsilon is None or self.clip < math.inf, "clip", "must be finite: noise is in units of it")
        require(0 < self.delta < 1, "delta", f"must be between 0 and 1, not {self.delta}")


@dataclass(frozen=True)
class EngineOptions:
    """The `[engine]` table: what runs the clients."""

    name: Literal["inprocess", "flower"] = "inprocess"  # "flower": clients in processes of Ray, one operation after another
    address: str | None = None  # of a Ray cluster, for "flower"; this machine by default
    path: EnginePath = "auto"  # one path for all operations: "reference", "compiled", "stacked" or "workers"
    device: Device = "cpu"  # where arithmetic is done: "cpu", "cuda" or "mps"
    workers: int | None = None  # processes for networks that are not stacked, such as convolutions; one a processor by default
    threads: int = 1  # of torch in this process; results depend on it in their last bits
    dtype: Literal["float32", "float64"] = "float32"
    memory: float = 2.0  # gigabytes of resting weights kept in memory; the others are in files of the run directory

    def __post_init__(self) -> None:
        require(self.workers is None or self.workers >= 1, "workers", f"must be at least 1, not {self.workers}")
        require(self.threads >= 1, "threads", f"must be at least 1, not {self.threads}")
        require(self.address is None or self.name == "flower", "address", "is that of a Ray cluster, for engine=flower")
        require(self.device != "mps" or self.dtype == "float32", "dtype", "mps has no float64")
        require(self.memory >= 0, "memory", f"must not be negative, not {self.memory}")


@dataclass(frozen=True)
class Settings:
    """The whole file. The tables `method`, `data` and `partition` depend on their `name` and are read after this."""

    name: str = "experiment"
    seed: int = 0
    rounds: int = 30
    output: str | None = None  # the run directory; runs/<name> by default
    evaluate_every: int = 1  # rounds; the last round is always evaluated
    checkpoint_every: int = 1  # rounds
    log: Log | tuple[Log, ...] = ()  # also to TensorBoard or MLflow, or both: "tensorboard", ["tensorboard", "mlflow"]
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedme"})
    data: Mapping[str, Any] = field(default_factory=dict)
    partition: Mapping[str, Any] = field(default_factory=dict)
    models: ModelOptions = ModelOptions()
    train: Training = Training()
    finetune: FinetuneOptions = FinetuneOptions()
    privacy: PrivacyOptions | None = None
    engine: EngineOptions = EngineOptions()
    defence: Defence = Defence()
    attack: Attack = Attack()
    faults: Faults = Faults()
    clients: Mapping[ClientId, ClientFiles] = field(default_factory=dict)  # people's own: each one's samples and model

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", f"must be at least 1, not {self.rounds}")
        require(self.evaluate_every >= 1, "evaluate_every", f"must be at least 1, not {self.evaluate_every}")
        require(self.checkpoint_every >= 1, "checkpoint_every", f"must be at least 1, not {self.checkpoint_every}")
        few, quorum = self.train.cohort, self.faults.quorum
        reachable = few is None or isinstance(quorum, float) or quorum <= few
        require(reachable, "faults.quorum", f"{quorum} replies never come when train.cohort asks for {few}")
        require(bool(self.name) and "/" not in self.name and self.name[0] != ".", "name", "must do as the name of a directory")
