"""What is predicted: a class, several yes-or-no labels, or numbers. The type of the targets says which it is.

* classification: int64, one class per sample; softmax; the loss is the cross-entropy, the mutual term KL(peer || self).
* multi-label: bool, samples x labels; a Bernoulli variable per label; the loss is the sum over labels of the binary
  cross-entropies, the mutual term the sum over labels of KL(peer || self).
* regression: floats, samples x targets; a Gaussian of variance 1 per target; the loss is half the squared error (the negative
  log-likelihood without its constant), the mutual term KL(peer || self), half the squared difference to the peer's answer.

All three are exponential families in their natural parameter, so derivatives by the outputs have one form: (mean - target)
for the loss, (mean - peer's mean) for the mutual term.
"""

import functools
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TaskType = Literal["classification", "multi-label", "regression"]


class TaskLoss(Protocol):
    """How targets of one kind are learned. `ready` outputs are what the losses take."""

    def ready(self, z: Tensor) -> Tensor:
        """What the losses need of the outputs, computed once for several of them."""
        ...

    def loss(self, ready: Tensor, y: Tensor) -> Tensor:
        """-log likelihood of the targets, for every sample, up to a constant."""
        ...

    def divergence(self, peer: Tensor, ready: Tensor) -> Tensor:
        """KL(peer || self), for every sample."""
        ...

    def mean(self, z: Tensor) -> Tensor:
        """What the model expects, a tensor of its own: probabilities, or numbers."""
        ...

    def subtract_targets(self, values: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
        """`values` minus the weighted targets, in place; several weights belong to the entries of the first axis."""
        ...

    def accuracy(self, z: Tensor, y: Tensor) -> float:
        """The share of right answers; not a number where answers are not right or wrong."""
        ...


@dataclass(frozen=True)
class Classification:
    """One class of several."""

    def ready(self, z: Tensor) -> Tensor:
        return F.log_softmax(z, dim=-1)

    def loss(self, ready: Tensor, y: Tensor) -> Tensor:
        if ready.dim() == 2:  # the same numbers in one operation; a stack of clients has three axes
            return F.nll_loss(ready, y, reduction="none")
        return -ready.gather(-1, y.unsqueeze(-1)).squeeze(-1)

    def divergence(self, peer: Tensor, ready: Tensor) -> Tensor:
        return (peer.exp() * (peer - ready)).sum(-1)

    def mean(self, z: Tensor) -> Tensor:
        p = (z - z.amax(-1, keepdim=True)).exp_()  # written out, because torch's own is slow for few classes
        return p.div_(p.sum(-1, keepdim=True))

    def subtract_targets(self, values: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
        label = y.unsqueeze(-1)
        minus = tuple(-weight for weight in weights)
        if len(weights) == 1:
            return values.scatter_add_(-1, label, constant(minus, tuple(label.shape), values))
        label = label.expand(*values.shape[:-1], 1)
        return values.scatter_add_(-1, label, constant(minus, lead(values), values).expand(label.shape))

    def accuracy(self, z: Tensor, y: Tensor) -> float:
        return right_answers(z, y).double().mean().item()


def right_answers(z: Tensor, y: Tensor) -> Tensor:
    """Whether the largest output is that of the class; no prediction is a wrong one."""
    return (z.argmax(-1) == y) & ~z.isnan().any(-1)


@dataclass(frozen=True)
class MultiLabel:
    """Any number of labels at once, each there or not."""

    def ready(self, z: Tensor) -> Tensor:
        return z

    def loss(self, ready: Tensor, y: Tensor) -> Tensor:
        return (F.softplus(ready) - y.to(ready.dtype) * ready).sum(-1)

    def divergence(self, peer: Tensor, ready: Tensor) -> Tensor:
        # p (peer - own) + log(1 - p) - log(1 - q), where log(1 - sigmoid(z)) = -softplus(z)
        return (peer.sigmoid() * (peer - ready) - F.softplus(peer) + F.softplus(ready)).sum(-1)

    def mean(self, z: Tensor) -> Tensor:
        return z.sigmoid()

    def subtract_targets(self, values: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
        return _subtract_targets(values, y, weights)

    def accuracy(self, z: Tensor, y: Tensor) -> float:
        return (((z > 0) == y) & ~z.isnan()).double().mean().item()


@dataclass(frozen=True)
class Regression:
    """Quantities, each with a Gaussian error of one size."""

    def ready(self, z: Tensor) -> Tensor:
        return z

    def loss(self, ready: Tensor, y: Tensor) -> Tensor:
        return (ready - y.to(ready.dtype)).square().sum(-1) / 2

    def divergence(self, peer: Tensor, ready: Tensor) -> Tensor:
        return (peer - ready).square().sum(-1) / 2

    def mean(self, z: Tensor) -> Tensor:
        return z.clone()

    def subtract_targets(self, values: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
        return _subtract_targets(values, y, weights)

    def accuracy(self, z: Tensor, y: Tensor) -> float:
        return float("nan")


def _subtract_targets(values: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
    target = y.to(values.dtype)
    return values.sub_(target * constant(weights, lead(values), values) if len(weights) > 1 else target * weights[0])


TASK_LOSSES: dict[TaskType, TaskLoss] = {
    "classification": Classification(),
    "multi-label": MultiLabel(),
    "regression": Regression(),
}


def task_type_of(y: Tensor) -> TaskType:
    """Which kind these targets are."""
    return "classification" if y.dtype == torch.int64 else "multi-label" if y.dtype == torch.bool else "regression"


def task_loss(y: Tensor) -> TaskLoss:
    """How these targets are learned."""
    return TASK_LOSSES[task_type_of(y)]


def lead(values: Tensor) -> tuple[int, ...]:
    """The shape of one number for every entry of the first axis."""
    return (len(values),) + (1,) * (values.dim() - 1)


def constant(values: tuple[float, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Constants are made once: one number everywhere, or one for every entry of the first axis."""
    return _made(values, shape, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _made(values: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    given = torch.tensor(values, dtype=dtype, device=device)
    return given.view(shape) if len(values) > 1 else given.expand(shape).contiguous()
