"""Class weights for clients with skewed classes: every sample counts by the weight of its class.

``train.class_weights = "balanced"`` wraps the objective of every local training. The weights are those of the samples that a
client trains on, n / (classes * n_c) as in scikit-learn: all classes of a client have the same total weight, and the mean
weight of its samples is 1. They stay at the client. The whole loss of a sample is weighted, with its mutual term.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedme.core.data import Split
from fedme.core.operations import Objective, Role
from fedme.learning.objectives import logit_gradients


@dataclass(frozen=True)
class ClassWeighted:
    """Another objective, with every loss multiplied by the weight of the sample's class."""

    objective: Objective
    weights: tuple[float, ...] = ()  # by class; empty before the objective is fitted to samples

    def fitted_to(self, data: Split) -> "ClassWeighted":
        """The same with the weights that balance the classes of these samples; targets that are no classes have none."""
        y = data.y
        if y.dtype != torch.int64 or y.dim() != 1 or not len(y):
            return replace(self, weights=())
        counts = torch.bincount(y)
        weights = torch.where(counts > 0, len(y) / (counts.clamp(min=1) * (counts > 0).sum()), 0.0)
        return replace(self, weights=tuple(weights.tolist()))

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        return {role: loss * self._of(y, loss) for role, loss in self.objective(logits, y).items()}

    def logit_gradients(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        """The derivatives of the losses by the logits."""
        gradients = logit_gradients(self.objective, logits, y)
        return {role: gradient * self._of(y, gradient).unsqueeze(-1) for role, gradient in gradients.items()}

    def _of(self, y: Tensor, like: Tensor) -> Tensor:
        if not self.weights:
            return like.new_ones(y.shape[: 1 if y.is_floating_point() or y.dtype == torch.bool else y.dim()])
        return _tensor(self.weights, like.dtype, like.device)[y]


@functools.lru_cache(maxsize=256)
def _tensor(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=dtype, device=device)
