"""The tables of an experiment file, with the default of every key."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedme.core.data import ClientId
from fedme.core.settings import setting
from fedme.datasets.user_data import ClientFiles
from fedme.execution.device import NAME as DEVICE_NAME, Precision
from fedme.execution.dispatcher import EnginePath
from fedme.federation.failures import Faults
from fedme.federation.malicious_clients import Attack
from fedme.learning.robust_aggregation import Defence
from fedme.learning.training_settings import Training, require

Log = Literal["tensorboard", "mlflow"]
Spec = str | Mapping[str, Any]  # an architecture: its name, or a table with `name` and options


@dataclass(frozen=True)
class ModelOptions:
    """The `[models]` table: the available architectures and their assignment to clients."""

    pool: tuple[Spec, ...] = setting(("mlr",), "architectures of the clients, by name or as tables with `name` and options")
    assign: str | Mapping[ClientId, str] = setting(
        "round-robin", 'or "best-local", one name for all clients, or a table client = name'
    )
    shared: Spec | None = setting(None, "architecture of the model that all clients share; the first of the pool by default")
    selection_rounds: int | None = setting(None, 'rounds of local training for "best-local"; equal to `rounds` by default')
    selection_lr: float | None = setting(None, "learning rate of that training; equal to `train.lr` by default")
    max_parameters: int | Mapping[ClientId, int] | None = setting(None, "largest guest a client accepts; also client = number")
    update_bn: bool = setting(
        True, "batch-norm statistics of personal models from the client's samples, where better on validation data"
    )

    same_start: bool = setting(
        False, "whether clients of one architecture start from the same random weights; each from its own by default"
    )

    def __post_init__(self) -> None:
        require(bool(self.pool), "pool", "must name at least one architecture")
        rounds = self.selection_rounds
        require(rounds is None or rounds >= 1, "selection_rounds", f"must be >= 1, got {rounds}")
        rate = self.selection_lr
        require(rate is None or 0 < rate < math.inf, "selection_lr", f"must be > 0 and finite, got {rate}")


@dataclass(frozen=True)
class FinetuneOptions:
    """The `[finetune]` table: fine-tuning of the personal models on the clients' training data."""

    epochs: int = setting(0, "number of epochs")
    when: Literal["end", "always"] = setting("end", "after the last round, or before every evaluation")

    def __post_init__(self) -> None:
        require(self.epochs >= 0, "epochs", f"must be >= 0, got {self.epochs}")


@dataclass(frozen=True)
class PrivacyOptions:
    """The `[privacy]` table: differentially private training."""

    clip: float = setting(1.0, "maximum gradient norm per sample, over all models that a client trains in one step")
    noise_multiplier: float | None = setting(None, "standard deviation of the noise on a sum of gradients, in units of `clip`")
    epsilon: float | None = setting(None, "privacy budget per client over all rounds; determines the noise multiplier")
    delta: float = setting(1e-5, "delta of (epsilon, delta)-differential privacy")
    secret: bool = setting(False, "noise from the operating system, not the seed: it cannot be reproduced or subtracted")

    def __post_init__(self) -> None:
        noise, epsilon = self.noise_multiplier, self.epsilon
        require(self.clip > 0, "clip", f"must be > 0, got {self.clip}")
        require((noise is None) != (epsilon is None), "noise_multiplier", "set either noise_multiplier or epsilon")
        require(noise is None or 0 <= noise <= 1e6, "noise_multiplier", f"must be between 0 and 1e6, got {noise}")
        require(epsilon is None or 0 < epsilon < math.inf, "epsilon", f"must be positive and finite, got {epsilon}")
        noisy = noise or epsilon is not None
        require(not noisy or self.clip < math.inf, "clip", "must be finite, because the noise is in units of it")
        require(0 < self.delta < 1, "delta", f"must be between 0 and 1, got {self.delta}")


@dataclass(frozen=True)
class EngineOptions:
    """The `[engine]` table: where and how the clients' computations run."""

    name: Literal["inprocess", "ray", "flower"] = setting(
        "inprocess", "'ray' executes operations in Ray processes, 'flower' runs the clients on Flower's simulation"
    )
    address: str | None = setting(None, "address of a Ray cluster, for 'ray' and 'flower'; this machine by default")
    path: EnginePath = setting("auto", "one execution path for all operations")
    device: str = setting(
        "cpu", "device of the arithmetic: cpu, cuda, cuda:N or mps; cuda: another one for every job and process"
    )
    device_memory: float | None = setting(None, "gigabytes of the device that may be used; half of what is free by default")
    precision: Precision | None = setting(None, "lower precision on a device: products in tf32, or networks in bfloat16")
    workers: int | None = setting(
        None, "processes: for networks that are not compiled or stacked, or of Ray; one per processor by default"
    )
    threads: int = setting(1, "torch threads in this process; changes results in their last bits")
    dtype: Literal["float32", "float64"] = setting("float32", "data type of weights and arithmetic")
    memory: float = setting(
        2.0, "gigabytes of weights kept in memory between rounds; the rest is in files of the run directory"
    )

    def __post_init__(self) -> None:
        require(self.workers is None or self.workers >= 1, "workers", f"must be >= 1, got {self.workers}")
        require(self.threads >= 1, "threads", f"must be >= 1, got {self.threads}")
        require(self.address is None or self.name != "inprocess", "address", "is for Ray clusters: set engine.name=ray as well")
        client = self.address is not None and "://" in self.address  # Ray's own protocol for programs outside of a cluster
        require(not client, "address", f"must be host:port of a Ray cluster, or auto, got '{self.address}'")
        named = DEVICE_NAME.fullmatch(self.device) is not None
        require(named, "device", f"must be cpu, mps, cuda or cuda:N, got '{self.device}'")
        exact = self.precision is None
        require(exact or self.device != "cpu", "precision", f"'{self.precision}' is for devices, not for the processor")
        require(exact or self.dtype == "float32", "precision", f"'{self.precision}' is for dtype = 'float32'")
        memory = self.device_memory
        require(memory is None or memory > 0, "device_memory", f"must be > 0, got {memory}")
        require(self.device != "mps" or self.dtype == "float32", "dtype", "must be float32 on mps, which has no float64")
        require(self.memory >= 0, "memory", f"must be >= 0, got {self.memory}")


@dataclass(frozen=True)
class Settings:
    """The whole file. The keys of `method`, `data` and `partition` depend on their `name`; `experiment.parse` reads them."""

    name: str = setting("experiment", "name of the experiment")
    seed: int = setting(0, "seed of all random numbers")
    rounds: int = setting(30, "number of rounds")
    output: str | None = setting(None, "run directory; runs/<name> by default")
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated")
    evaluate_trained: bool = setting(
        False, "whether evaluations include what each client has trained, before the server aggregates (stage `trained`)"
    )
    checkpoint_every: int = setting(1, "rounds between checkpoints")
    save: Literal["all", "none"] = setting("all", "models that are saved at the end: of all clients, or none")
    log: Log | tuple[Log, ...] = setting((), 'additional loggers: one name, or a list such as ["tensorboard", "mlflow"]')
    method: Mapping[str, Any] = setting(help="method and its settings", default_factory=lambda: {"name": "fedme"})
    data: Mapping[str, Any] = setting(help="data set and its settings", default_factory=dict)
    partition: Mapping[str, Any] = setting(help="partition of the data set into clients", default_factory=dict)
    models: ModelOptions = setting(ModelOptions(), "architectures")
    train: Training = setting(Training(), "local training")
    finetune: FinetuneOptions = setting(FinetuneOptions(), "fine-tuning")
    privacy: PrivacyOptions | None = setting(None, "differential privacy; off by default")
    engine: EngineOptions = setting(EngineOptions(), "execution")
    defence: Defence = setting(Defence(), "robust aggregation and quarantine")
    attack: Attack = setting(Attack(), "simulated malicious clients")
    faults: Faults = setting(Faults(), "simulated failures, and the quorum")
    clients: Mapping[ClientId, ClientFiles] = setting(
        help="table [clients.NAME] per client with user data: its samples and model", default_factory=dict
    )

    def __post_init__(self) -> None:
        for name in ("rounds", "evaluate_every", "checkpoint_every"):
            require(getattr(self, name) >= 1, name, f"must be >= 1, got {getattr(self, name)}")
        warmup = self.train.warmup
        require(warmup < self.rounds, "train.warmup", f"must be < rounds, which is {self.rounds}, got {warmup}")
        cohort, quorum = self.train.cohort, self.faults.quorum
        reachable = cohort is None or isinstance(quorum, float) or quorum <= cohort
        require(reachable, "faults.quorum", f"must be <= train.cohort, which is {cohort}, got {quorum}")
        valid = bool(self.name) and "/" not in self.name and self.name[0] != "."
        require(valid, "name", f"must be usable as a directory name, without '/' or a leading '.', got '{self.name}'")
