"""The settings of local training that all methods share: the `[train]` table of an experiment."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import Plan, Round
from fedme.core.operations import BatchSchedule, Objective
from fedme.core.settings import setting
from fedme.learning.optimizers import SGD


def require(condition: bool, field: str, message: str) -> None:
    """Refuse a setting, by name."""
    if not condition:
        raise ValueError(f"{field}: {message}")


@dataclass(frozen=True)
class Training:
    """How clients train locally, and how many of them take part in a round."""

    epochs: int = setting(2, "local epochs per round (E)")
    batch: int = setting(20, "mini-batch size")
    steps: int | None = setting(None, "mini-batches per round, instead of epochs (pFedMe, PFML)")
    shuffle: bool = setting(True, "whether to shuffle the training data in every epoch")
    lr: float = setting(0.1, "learning rate")
    momentum: float = setting(0.0, "momentum of SGD")
    weight_decay: float = setting(0.0, "L2 penalty")
    clip: float | None = setting(None, "maximum gradient norm of a model per step")
    lr_decay: float = setting(1.0, "factor by which the learning rate is multiplied at each point of `lr_decay_at`")
    lr_decay_at: tuple[float, ...] = setting((), "fractions of the rounds, between 0 and 1, at which the learning rate decays")
    cohort: int | None = setting(None, "number of clients sampled per round; all clients by default")

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", f"must be >= 1, got {self.epochs}")
        require(self.batch >= 1, "batch", f"must be >= 1, got {self.batch}")
        require(self.steps is None or self.steps >= 1, "steps", f"must be >= 1, got {self.steps}")
        require(self.lr > 0, "lr", f"must be > 0, got {self.lr}")
        require(0 <= self.momentum < 1, "momentum", f"must be in [0, 1), got {self.momentum}")
        require(self.weight_decay >= 0, "weight_decay", f"must be >= 0, got {self.weight_decay}")
        require(self.clip is None or self.clip > 0, "clip", f"must be > 0, got {self.clip}")
        require(self.lr_decay > 0, "lr_decay", f"must be > 0, got {self.lr_decay}")
        require(all(0 < at < 1 for at in self.lr_decay_at), "lr_decay_at", "must be fractions of the rounds, between 0 and 1")
        require(self.cohort is None or self.cohort >= 1, "cohort", f"must be >= 1, got {self.cohort}")

    def batch_schedule(self, when: Round | None = None) -> BatchSchedule:
        """The batches of a round. Without shuffling, a number of steps goes on where the last round stopped."""
        offset = when.t * self.steps if when is not None and self.steps is not None else 0
        return BatchSchedule(self.epochs, self.batch, self.steps, self.shuffle, offset)

    def lr_at(self, when: Round) -> float:
        """The learning rate of a round."""
        passed = sum(when.t >= at * when.total for at in self.lr_decay_at)
        return float(self.lr * self.lr_decay**passed)

    def sgd(self, objective: Objective, when: Round, prox: float = 0.0, alternating: bool = False) -> SGD:
        """The SGD step of a round."""
        return SGD(objective, self.lr_at(when), self.momentum, self.weight_decay, self.clip, prox, alternating)

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
