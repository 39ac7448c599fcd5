"""The settings of local training that all methods share: the `[train]` table of an experiment."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Plan, Round
from fedme.core.operations import BatchSchedule, LastBatch, Objective
from fedme.core.settings import setting
from fedme.learning.class_weights import ClassWeighted
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.optimizers import SGD, Adam


def require(condition: bool, field: str, message: str) -> None:
    """Refuse a setting, by name."""
    if not condition:
        raise ValueError(f"{field}: {message}")


@dataclass(frozen=True)
class Training:
    """How clients train locally, and how many of them take part in a round."""

    epochs: int = setting(2, "local epochs per round (E)")
    batch: int = setting(20, "mini-batch size")
    last_batch: LastBatch = setting(
        "keep", "the incomplete last batch of an epoch; drop: leave it out; scale: multiply its loss by its size / batch"
    )
    steps: int | None = setting(None, "mini-batches per round, instead of epochs (pFedMe, PFML)")
    shuffle: bool = setting(True, "whether to shuffle the training data in every epoch")
    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "as in torch.optim")
    lr: float = setting(None, "learning rate; by default 0.1 for sgd, 0.001 for adam and adamw")  # type: ignore[assignment]
    momentum: float = setting(0.0, "momentum of sgd")
    nesterov: bool = setting(False, "Nesterov momentum of sgd")
    betas: tuple[float, float] = setting((0.9, 0.999), "decay rates of the means of gradient and square in adam and adamw")
    eps: float = setting(1e-8, "added to the denominator of adam and adamw")
    weight_decay: float = setting(  # type: ignore[assignment]
        None, "L2 penalty; decoupled from the gradient in adamw; by default 0, for adamw 0.01"
    )
    clip: float | None = setting(None, "maximum gradient norm of a model per step")
    class_weights: Literal["balanced"] | None = setting(
        None, "balanced: all classes of a client have the same total weight in its training"
    )
    lr_schedule: Literal["constant", "step", "cosine"] = setting("constant", "how the learning rate changes over the rounds")
    lr_decay: float = setting(0.1, "step: factor by which the learning rate is multiplied at each point of `lr_decay_at`")
    lr_decay_at: tuple[float, ...] = setting((), "step: fractions of the rounds, between 0 and 1")
    lr_min: float = setting(0.0, "cosine: the learning rate after the last round")
    warmup: int = setting(0, "rounds at the start in which the learning rate rises linearly")
    cohort: int | None = setting(None, "number of clients sampled per round; all clients by default")

    def __post_init__(self) -> None:
        adam = self.optimizer != "sgd"
        # Defaults that depend on the optimizer are those of PyTorch. A run's configuration has the numbers.
        if self.lr is None:
            object.__setattr__(self, "lr", 0.001 if adam else 0.1)
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.01 if self.optimizer == "adamw" else 0.0)
        require(self.epochs >= 1, "epochs", f"must be >= 1, got {self.epochs}")
        require(self.batch >= 1, "batch", f"must be >= 1, got {self.batch}")
        require(self.steps is None or self.steps >= 1, "steps", f"must be >= 1, got {self.steps}")
        require(self.lr > 0, "lr", f"must be > 0, got {self.lr}")
        require(0 <= self.momentum < 1, "momentum", f"must be in [0, 1), got {self.momentum}")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", f"must be in [0, 1), got {list(self.betas)}")
        require(self.eps > 0, "eps", f"must be > 0, got {self.eps}")
        require(self.weight_decay >= 0, "weight_decay", f"must be >= 0, got {self.weight_decay}")
        require(self.clip is None or self.clip > 0, "clip", f"must be > 0, got {self.clip}")
        require(self.cohort is None or self.cohort >= 1, "cohort", f"must be >= 1, got {self.cohort}")
        self._require_settings_of_the_optimizer()
        self._require_settings_of_the_schedule()

    def _require_settings_of_the_optimizer(self) -> None:
        name, defaults = self.optimizer, {field.name: field.default for field in fields(self)}
        if name == "sgd":
            for only_adam in ("betas", "eps"):
                value = getattr(self, only_adam)
                require(
                    value == defaults[only_adam],
                    only_adam,
                    f"is a setting of adam and adamw, got {value} with optimizer = 'sgd'",
                )
            require(not self.nesterov or self.momentum > 0, "nesterov", "needs momentum: set momentum > 0, for example 0.9")
        else:
            momentum, nesterov = self.momentum, self.nesterov
            require(
                not momentum,
                "momentum",
                f"is a setting of sgd, got {momentum} with optimizer = '{name}'; use betas, or set it to 0",
            )
            require(not nesterov, "nesterov", f"is a setting of sgd, got true with optimizer = '{name}'")

    def _require_settings_of_the_schedule(self) -> None:
        kind = f"lr_schedule is '{self.lr_schedule}'"
        require(self.lr_decay > 0, "lr_decay", f"must be > 0, got {self.lr_decay}")
        at = list(self.lr_decay_at)
        require(
            all(0 < point < 1 for point in at), "lr_decay_at", f"must be fractions of the rounds, between 0 and 1, got {at}"
        )
        steps = self.lr_schedule == "step"
        require(steps or not at, "lr_decay_at", f"is for lr_schedule = 'step', but {kind}")
        require(not steps or bool(at), "lr_decay_at", "must name at least one fraction of the rounds for lr_schedule = 'step'")
        require(0 <= self.lr_min < self.lr, "lr_min", f"must be >= 0 and below lr = {self.lr}, got {self.lr_min}")
        require(not self.lr_min or self.lr_schedule == "cosine", "lr_min", f"is for lr_schedule = 'cosine', but {kind}")
        require(self.warmup >= 0, "warmup", f"must be >= 0, got {self.warmup}")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # every client looks for the optimizer of the round
        return hash(tuple([getattr(self, field.name) for field in fields(self)]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # another process hashes differently

    def batch_schedule(self, when: Round | None = None) -> BatchSchedule:
        """The batches of a round. Without shuffling, a number of steps goes on where the last round stopped."""
        if self.steps is None or when is None:
            return self._first_batches
        return replace(self._first_batches, offset=when.t * self.steps)

    @functools.cached_property
    def _first_batches(self) -> BatchSchedule:
        return BatchSchedule(self.epochs, self.batch, self.steps, self.shuffle, last_batch=self.last_batch)

    def whole_epochs(self, epochs: int, batch: int | None = None) -> BatchSchedule:
        """The batches of a training outside of the rounds, such as fine-tuning: shuffled epochs."""
        return BatchSchedule(epochs, batch or self.batch, last_batch=self.last_batch)

    def lr_at(self, when: Round) -> float:
        """The learning rate of a round."""
        warmup = min(self.warmup, when.total - 1)  # a training of few rounds, such as a selection of architectures
        rising = min(1.0, (when.t + 1) / (warmup + 1))
        if self.lr_schedule == "cosine":
            progress = max(0, when.t - warmup) / (when.total - warmup)
            return rising * (self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * progress)) / 2)
        passed = sum(when.t >= at * when.total for at in self.lr_decay_at)
        return float(rising * self.lr * self.lr_decay**passed)

    def local_optimizer(
        self, objective: Objective, when: Round, prox: float = 0.0, alternating: bool = False, shift: bool = False
    ) -> SGD | Adam:
        """The optimizer of a round; where the loss is a plain value, all clients get the same object."""
        if type(objective) is CrossEntropy or type(objective) is Mutual:
            return _local_optimizer(self, objective, when, prox, alternating, shift)
        return self._new_optimizer(objective, when, prox, alternating, shift)

    def _new_optimizer(self, objective: Objective, when: Round, prox: float, alternating: bool, shift: bool) -> SGD | Adam:
        lr = self.lr_at(when)
        objective = objective if self.class_weights is None else ClassWeighted(objective)
        if self.optimizer == "sgd":
            return SGD(objective, lr, self.momentum, self.weight_decay, self.clip, prox, alternating, self.nesterov, shift)
        decoupled = self.optimizer == "adamw"
        return Adam(objective, lr, self.betas, self.eps, self.weight_decay, self.clip, prox, alternating, decoupled, shift)

    def draw(self, present: Sequence[ClientId], key: Key) -> tuple[ClientId, ...]:
        """The cohort of a round: drawn uniformly without replacement, in the order of `present`."""
        if self.cohort is None or self.cohort >= len(present):
            return tuple(present)
        chosen = key.at("cohort").numpy().choice(len(present), self.cohort, replace=False)
        return tuple(present[index] for index in sorted(chosen))

    def plan(self, present: Sequence[ClientId], key: Key, train_all: bool = False) -> Plan:
        """The cohort counts, and trains; with `train_all` the others train too, for their own sake."""
        cohort = self.draw(present, key)
        return Plan(tuple(present) if train_all else cohort, frozenset(cohort))


_local_optimizer = functools.lru_cache(maxsize=64)(Training._new_optimizer)
