"""Losses over outputs: fitting the targets, mutual learning, and fitting another model's outputs.

What a loss is depends on what is predicted (`core/task_types.py`): cross-entropy and divergence of classes, of yes-or-no
labels, or of numbers with a Gaussian error. Every function returns one loss per sample; the engine takes the mean over the
batch. A peer's outputs are always detached: a model learns from its peer, it never pushes the peer. `logit_gradients` gives the
derivatives of the losses by the outputs in closed form: (p - y) for the targets, (p - q) for the divergence from a peer q, both
of them means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedme.core.operations import Objective, Role
from fedme.core.task_types import TASK_LOSSES, constant, lead, task_loss


@dataclass(frozen=True)
class CrossEntropy:
    """Every role learns the targets, on its own: for numbers, the cross-entropy of a Gaussian is half the squared error."""

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        task = task_loss(y)
        return {role: task.loss(task.ready(z), y) for role, z in logits.items()}

    def logit_gradients(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        task = task_loss(y)
        return {role: task.subtract_targets(task.mean(z), y, (1.0,)) for role, z in logits.items()}


@dataclass(frozen=True)
class MaskedCrossEntropy:
    """Every role learns the classes; the logits of those that are not `present` are replaced by zero (HeteroFL)."""

    present: tuple[bool, ...]

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        task = TASK_LOSSES["classification"]
        absent = {role: ~torch.tensor(self.present, device=z.device) for role, z in logits.items()}
        return {role: task.loss(task.ready(z.masked_fill(absent[role], 0.0)), y) for role, z in logits.items()}


@dataclass(frozen=True)
class Mutual:
    """Deep mutual learning: each of two roles learns the targets and imitates the other.

    ``loss(role) = labels[role] * CE + peer[role] * KL(other || role)``; FedMe and PFML use 1 and 1, FML alpha and 1 - alpha.
    """

    first: Role
    second: Role
    labels: tuple[float, float] = (1.0, 1.0)
    peer: tuple[float, float] = (1.0, 1.0)

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        task, roles = task_loss(y), (self.first, self.second)
        ready = [task.ready(logits[role]) for role in roles]
        losses = {}
        for role, own, peer, label_share, peer_share in zip(roles, ready, reversed(ready), self.labels, self.peer, strict=True):
            losses[role] = _times(label_share, task.loss(own, y)) + _times(peer_share, task.divergence(peer.detach(), own))
        return losses

    def logit_gradients(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        # (labels + peer) p - peer q - labels y, for both roles at once
        task = task_loss(y)
        p = task.mean(torch.stack((logits[self.first], logits[self.second])))
        gradients = p * constant((self.labels[0] + self.peer[0], self.labels[1] + self.peer[1]), lead(p), p)
        gradients = gradients.sub_(p.flip(0).mul_(constant(self.peer, lead(p), p)))
        gradients = task.subtract_targets(gradients, y.unsqueeze(0), self.labels)
        return {self.first: gradients[0], self.second: gradients[1]}


def _times(share: float, loss: Tensor) -> Tensor:
    return loss if share == 1.0 else share * loss


@dataclass(frozen=True)
class Imitate:
    """Fit given outputs (FedMD's digest): the targets are raw logits, and errors are averaged over classes."""

    loss: Literal["mae", "mse", "kl"] = "mae"

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        return {role: self._fit(z, y.to(z.dtype)) for role, z in logits.items()}

    def _fit(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.loss == "kl":
            classes = TASK_LOSSES["classification"]
            return classes.divergence(classes.ready(target), classes.ready(logits))
        error = logits - target
        return error.abs().mean(-1) if self.loss == "mae" else error.square().mean(-1)


@dataclass(frozen=True, eq=False)
class TowardsClass:
    """Learn the classes, and come close to a given vector per class: loss + weight * distance(outputs, target of the class).

    The distance is the mean squared error of logits, or the cross-entropy with given probabilities; a class without a target
    has none. Every client has its own targets, so objectives are equal only if they are the same object.
    """

    targets: Tensor  # classes x outputs
    known: Tensor  # for which classes there is a target
    weight: float
    distance: Literal["mse", "cross-entropy"] = "mse"

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        classes = TASK_LOSSES["classification"]
        return {role: classes.loss(classes.ready(z), y) + self.weight * self._distance(z, y) for role, z in logits.items()}

    def _distance(self, logits: Tensor, y: Tensor) -> Tensor:
        target = self.targets.to(logits.device, logits.dtype)[y]
        errors = (logits - target).square().mean(-1) if self.distance == "mse" else -(target * logits.log_softmax(-1)).sum(-1)
        return errors * self.known.to(logits.device)[y]


@dataclass(frozen=True, eq=False)
class TowardsPrototype:
    """Learn the classes with features close to the prototype of the class (FedProto): loss + weight * MSE(features, prototype).

    Outputs are logits followed by features (`learning/features.py`). A class without a prototype has no distance. Every client
    may have its own prototypes, so objectives are equal only if they are the same object.
    """

    prototypes: Tensor  # classes x features
    known: Tensor  # for which classes there is a prototype
    weight: float

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        task, classes = TASK_LOSSES["classification"], len(self.known)
        losses = {}
        for role, outputs in logits.items():
            z, features = outputs[..., :classes], outputs[..., classes:]
            errors = (features - self.prototypes.to(z.device, z.dtype)[y]).square().mean(-1)
            losses[role] = task.loss(task.ready(z), y) + self.weight * errors * self.known.to(z.device)[y]
        return losses


def logit_gradients(objective: Objective, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
    """The derivatives of the losses by the logits (clients x samples x classes): in closed form, or by autograd."""
    closed = getattr(objective, "logit_gradients", None)
    if closed is not None:
        return closed(logits, y)  # type: ignore[no-any-return]
    # An objective may expect samples x classes, so clients and samples become one axis.
    leaves = {role: z.detach().flatten(0, 1).requires_grad_() for role, z in logits.items()}
    losses = objective(leaves, y.flatten(0, 1))
    grads = torch.autograd.grad(torch.stack([loss.sum() for loss in losses.values()]).sum(), list(leaves.values()))
    return {role: grad.view(logits[role].shape) for role, grad in zip(leaves, grads, strict=True)}
