"""The `[defence]` table: what protects a federation from single members whose messages are well formed but harmful."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.operations import Score
from fedme.core.settings import setting
from fedme.learning.training_settings import require


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
        require(0 <= self.trim < 0.5, "trim", f"must be in [0, 0.5), not {self.trim}")
        require(self.norm is None or self.norm > 0, "norm", f"must be > 0, got {self.norm}")
        require(self.guest is None or self.guest > 0, "guest", f"must be > 0, got {self.guest}")
        require(self.quarantine is None or self.quarantine >= 1, "quarantine", f"must be >= 1, got {self.quarantine}")
        rounds = self.quarantine_rounds
        require(rounds is None or rounds >= 1, "quarantine_rounds", f"must be >= 1, got {rounds}")

    def combine(self, trees: Sequence[tree.Params], weights: Sequence[float]) -> dict[str, Tensor]:
        """One set of weights for many: the mean weighted by `shares`, or what is in the middle, value by value."""
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
        out = (count - 1) // 2 if self.average == "median" else int(self.trim * count)
        return values.sort(0).values[out : count - out].mean(0)

    def unwelcome(self, own: Score, guest: Score) -> bool:
        """Whether a guest is so much worse than the own model that it is not trained. Untrained models are equally bad."""
        return self.guest is not None and not guest.loss <= own.loss + self.guest


OPEN = Defence()  # nothing is bounded, nobody is kept out
