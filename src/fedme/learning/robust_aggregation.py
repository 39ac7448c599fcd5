"""The `[defence]` table: what protects a federation from single members whose messages are well formed but harmful."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.method import TaskError
from fedme.core.operations import Score
from fedme.core.settings import setting
from fedme.learning.training_settings import require

FEWEST = 5  # copies of a model that a robust average needs


@dataclass(frozen=True)
class Defence:
    """How replies are combined and bounded, which guests are let in, and who is kept out."""

    average: Literal["mean", "median", "trimmed"] = setting("mean", "median and trimmed: per coordinate, equal weights")
    trim: float = setting(0.1, "for 'trimmed': fraction of the values that is discarded at each end")
    norm: float | None = setting(None, "maximum norm of a model's change per round; larger changes are scaled down to it")
    guest: float | None = setting(None, "FedMe: reject a guest whose validation loss exceeds the own model's by more")
    quarantine: int | None = setting(None, "number of rejected messages after which a client is excluded")
    quarantine_rounds: int | None = setting(None, "number of rounds for which it is excluded; permanently by default")

    def __post_init__(self) -> None:
        require(0 <= self.trim < 0.5, "trim", f"must be >= 0 and < 0.5, got {self.trim}")
        require(self.norm is None or self.norm > 0, "norm", f"must be > 0, got {self.norm}")
        require(self.guest is None or self.guest > 0, "guest", f"must be > 0, got {self.guest}")
        require(self.quarantine is None or self.quarantine >= 1, "quarantine", f"must be >= 1, got {self.quarantine}")
        zero = self.average == "trimmed" and self.trim == 0
        require(not zero, "trim", "must be > 0 for average = 'trimmed': nothing would be discarded")
        rounds = self.quarantine_rounds
        require(rounds is None or rounds >= 1, "quarantine_rounds", f"must be >= 1, got {rounds}")

    @property
    def fewest(self) -> int:
        """How many copies of a model must be averaged: of fewer, a robust average protects from nobody."""
        if self.average == "mean":
            return 1
        if self.average == "median":
            return FEWEST
        return next(count for count in itertools.count(FEWEST) if self._discarded(count))

    def combine(self, trees: Sequence[tree.Params], weights: Sequence[float]) -> tree.Params:
        """Combine many sets of weights into one: by a weighted mean, or value by value by a robust one."""
        if self.average == "mean":
            return tree.average(trees, weights)
        first = trees[0]
        return {
            name: self.middle(torch.stack([tree[name] for tree in trees])) if value.is_floating_point() else value
            for name, value in first.items()
        }

    def middle(self, values: Tensor) -> Tensor:
        """The mean, median or trimmed mean over the first axis, where each counts the same."""
        if self.average == "mean":
            return values.mean(0)
        count = len(values)
        out = (count - 1) // 2 if self.average == "median" else self._discarded(count)
        return values.sort(0).values[out : count - out].mean(0)

    def _discarded(self, count: int) -> int:
        """How many of `count` values a trimmed mean discards at each end."""
        return int(self.trim * count)

    def middle_of_known(self, values: Tensor, known: Tensor) -> Tensor:
        """The same where not all have every number: `known` says who has which; zero where nobody has one."""
        if self.average == "mean":
            return torch.where(known, values, 0.0).sum(0) / known.sum(0).clamp(min=1)
        ranked = torch.where(known, values, torch.inf).sort(0).values
        count, place = known.sum(0), torch.arange(len(values)).view(-1, *(1,) * (values.dim() - 1))
        out = (count - 1).clamp(min=0) // 2 if self.average == "median" else (self.trim * count).long()
        kept = (place >= out) & (place < count - out)
        return torch.where(kept, ranked, 0.0).sum(0) / kept.sum(0).clamp(min=1)

    def unwelcome(self, own: Score, guest: Score) -> bool:
        """Whether a guest is so much worse than the own model that it is not trained. Untrained models are equally bad."""
        return self.guest is not None and not guest.loss <= own.loss + self.guest


OPEN = Defence()  # nothing is bounded, nobody is kept out


def defence_of(method: object) -> Defence:
    """The defence that a method averages with; methods that do not average have none."""
    return getattr(method, "defence", OPEN)


def require_enough_copies(defence: Defence, clients: int) -> None:
    """Refuse a robust average if so few clients are in a round that it protects from nobody."""
    if clients < defence.fewest:
        trim = f" with trim = {defence.trim:g}" if defence.average == "trimmed" else ""
        needs = f"'{defence.average}'{trim} needs at least {defence.fewest} clients in a round, got {clients}"
        raise TaskError(f"defence.average: {needs}: of fewer it protects from nobody")
