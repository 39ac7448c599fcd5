"""Losses over outputs: cross-entropy, mutual learning, and fitting another model's outputs.

Every function returns one loss a sample; the engine takes the mean over the batch. A peer's outputs are always detached: a
model learns from its peer, it never pushes the peer. `slopes` gives the derivatives of the losses by the logits in
closed form: (p - y) for cross-entropy, (p - q) for the divergence from a peer q.
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

    def slopes(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        label = y.unsqueeze(-1)
        minus = _constant((-1.0,), label.shape, next(iter(logits.values())))
        return {role: _softmax(z).scatter_add_(-1, label, minus) for role, z in logits.items()}


def _softmax(z: Tensor) -> Tensor:
    """Written out, because torch's own is slow for few classes."""
    p = (z - z.amax(-1, keepdim=True)).exp_()
    return p.div_(p.sum(-1, keepdim=True))


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
        roles = (self.first, self.second)
        logs = [F.log_softmax(logits[role], dim=-1) for role in roles]
        losses = {}
        for role, own, peer, label_share, peer_share in zip(roles, logs, reversed(logs), self.labels, self.peer, strict=True):
            loss = -label_share * own.gather(-1, y.unsqueeze(-1)).squeeze(-1)
            peer = peer.detach()
            losses[role] = loss + peer_share * (peer.exp() * (peer - own)).sum(-1)
        return losses

    def slopes(self, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
        # (labels + peer) p - peer q - labels y, for both roles at once
        p = _softmax(torch.stack((logits[self.first], logits[self.second])))
        label = y.unsqueeze(-1).expand(2, *y.shape, 1)
        shape = (2,) + (1,) * (p.dim() - 1)
        found = p * _constant((self.labels[0] + self.peer[0], self.labels[1] + self.peer[1]), shape, p)
        found = found.sub_(p.flip(0).mul_(_constant(self.peer, shape, p)))
        found.scatter_add_(-1, label, _constant((-self.labels[0], -self.labels[1]), shape, p).expand(label.shape))
        return {self.first: found[0], self.second: found[1]}


def _constant(values: tuple[float, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
    return _made(values, shape, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _made(values: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constants are made once: one number everywhere, or one for every entry of the first axis."""
    given = torch.tensor(values, dtype=dtype, device=device)
    return given.view(shape) if len(values) > 1 else given.expand(shape).contiguous()


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


def slopes(objective: Objective, logits: Mapping[Role, Tensor], y: Tensor) -> Mapping[Role, Tensor]:
    """The derivatives of the losses by the logits (clients x samples x classes): in closed form, or by autograd."""
    closed = getattr(objective, "slopes", None)
    if closed is not None:
        return closed(logits, y)  # type: ignore[no-any-return]
    # An objective may expect samples x classes, so clients and samples become one axis.
    leaves = {role: z.detach().flatten(0, 1).requires_grad_() for role, z in logits.items()}
    losses = objective(leaves, y.flatten(0, 1))
    grads = torch.autograd.grad(torch.stack([loss.sum() for loss in losses.values()]).sum(), list(leaves.values()))
    return {role: grad.view(logits[role].shape) for role, grad in zip(leaves, grads, strict=True)}
