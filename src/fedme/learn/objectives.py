"""Losses over outputs: cross-entropy, mutual learning, and fitting another model's outputs.

Every function returns one loss a sample; the engine takes the mean over the batch. A peer's outputs are always detached: a
model learns from its peer, it never pushes the peer. `slopes` gives, beside the losses, their derivatives by the
logits in closed form: (p - y) for cross-entropy, (p - q) for the divergence from a peer q.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedme.core.client import Objective, Role


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log p(y), for every sample."""
    return -F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def divergence(peer: Tensor, logits: Tensor) -> Tensor:
    """KL(peer || self), summed over classes, for every sample. The peer is a constant."""
    target = F.log_softmax(peer.detach(), dim=-1)
    return (target.exp() * (target - F.log_softmax(logits, dim=-1))).sum(-1)


@dataclass(frozen=True)
class CrossEntropy:
    """Every role learns the labels, on its own."""

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        return {role: cross_entropy(z, y) for role, z in logits.items()}

    def slopes(self, logits: Mapping[Role, Tensor], y: Tensor) -> tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]]:
        label, losses, found = y.unsqueeze(-1), {}, {}
        for role, z in logits.items():
            losses[role], found[role] = _label_slope(z, label)
        return losses, found


def _label_slope(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """-log p(y) and p - y. Written out, because log_softmax is slow for few classes."""
    shifted = z - z.amax(-1, keepdim=True)
    right = shifted.gather(-1, label)
    p = shifted.exp_()
    total = p.sum(-1, keepdim=True)
    losses = total.log().sub_(right).squeeze(-1)
    return losses, p.div_(total).scatter_add_(-1, label, _minus_one(label.shape, z.dtype, z.device))


@dataclass(frozen=True)
class Mutual:
    """Deep mutual learning: each of two roles learns the labels and imitates the other.

    ``loss(role) = labels[role] * CE + peer[role] * KL(other || role)``; FedMe and PFML use 1 and 1, FML alpha and 1 - alpha.
    """

    first: Role
    second: Role
    labels: tuple[float, float] = (1.0, 1.0)
    peer: tuple[float, float] = (1.0, 1.0)

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        a, b = logits[self.first], logits[self.second]
        return {
            self.first: self.labels[0] * cross_entropy(a, y) + self.peer[0] * divergence(b, a),
            self.second: self.labels[1] * cross_entropy(b, y) + self.peer[1] * divergence(a, b),
        }

    def slopes(self, logits: Mapping[Role, Tensor], y: Tensor) -> tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]]:
        both = torch.stack((logits[self.first], logits[self.second]))
        shifted = both - both.amax(-1, keepdim=True)
        p = shifted.exp()
        total = p.sum(-1, keepdim=True)
        logs, p = shifted.sub_(total.log()), p.div_(total)
        label = y.unsqueeze(-1).expand(2, *y.shape, 1)
        shape = (2,) + (1,) * y.dim()
        labels, peer = (
            torch.tensor(pair, dtype=both.dtype, device=both.device).view(shape) for pair in (self.labels, self.peer)
        )
        imitation = (p.flip(0) * (logs.flip(0) - logs)).sum(-1)
        losses = peer * imitation - labels * logs.gather(-1, label).squeeze(-1)
        labels, peer = labels.unsqueeze(-1), peer.unsqueeze(-1)
        slopes = (p * (labels + peer) - peer * p.flip(0)).scatter_add_(-1, label, -labels.expand(label.shape))
        return dict(zip((self.first, self.second), losses, strict=True)), dict(
            zip((self.first, self.second), slopes, strict=True)
        )


@functools.lru_cache(maxsize=64)
def _minus_one(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, -1.0, dtype=dtype, device=device)


@dataclass(frozen=True)
class Imitate:
    """Fit given outputs (FedMD's digest): the targets are raw logits, and errors are averaged over classes."""

    loss: Literal["mae", "mse", "kl"] = "mae"

    def __call__(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        return {role: self._fit(z, y.to(z.dtype)) for role, z in logits.items()}

    def _fit(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.loss == "kl":
            return divergence(target, logits)
        error = logits - target
        return error.abs().mean(-1) if self.loss == "mae" else error.square().mean(-1)


def slopes(
    objective: Objective, logits: Mapping[Role, Tensor], y: Tensor
) -> tuple[Mapping[Role, Tensor], Mapping[Role, Tensor]]:
    """Losses and their derivatives by the logits (clients x samples x classes): in closed form, or by autograd."""
    closed = getattr(objective, "slopes", None)
    if closed is not None:
        return closed(logits, y)  # type: ignore[no-any-return]
    shape = y.shape[:2]  # an objective may expect samples x classes, so clients and samples become one axis
    leaves = {role: z.detach().flatten(0, 1).requires_grad_() for role, z in logits.items()}
    losses = objective(leaves, y.flatten(0, 1))
    grads = torch.autograd.grad(torch.stack([loss.sum() for loss in losses.values()]).sum(), list(leaves.values()))
    found = {role: grad.view(logits[role].shape) for role, grad in zip(leaves, grads, strict=True)}
    return {role: loss.detach().view(shape) for role, loss in losses.items()}, found
