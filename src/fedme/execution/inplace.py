"""One training on a module of its own, whose weights change in place: what `alone` does, bit for bit, without its copies.

For networks without buffers and tied weights that learn by SGD, which convolutions and recurrent networks mostly are. The
time it saves is that of handing weights to a module at every step, and of new memory for them.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedme.core import tree
from fedme.core.data import Inputs
from fedme.core.dropout import at_draw
from fedme.core.model import Arch, Model, begin, build_template, has_batchnorm, has_ties, output_of
from fedme.core.operations import Op, Role, Train, Trained
from fedme.execution import reference
from fedme.learning.optimizers import SGD


def run(op: Op) -> Any:
    """The result of one operation."""
    return train(op) if isinstance(op, Train) and suits(op) else reference.run(op)


def suits(op: Train) -> bool:
    """Whether the operation can be done here."""
    plain = type(op.optimizer) is SGD and not op.optimizer.alternating and op.mechanism is None
    return plain and not any(m.buffers or has_ties(m.arch) or has_batchnorm(m.arch) for m in op.models.values())


def train(op: Train) -> Trained:
    """Go through the batches; every role has its own module."""
    optimizer = op.optimizer
    assert isinstance(optimizer, SGD)
    trainees = {role: Trainee(op, role, place) for place, role in enumerate(op.models)}
    gradient = reference.Autograd(optimizer.objective, reference.mask_seeds(op.models, op.key))
    flat = [weight for each in trainees.values() for weight in each.weights.values()]
    y = op.data.y.to(flat[0].device if flat else "cpu")
    with reference.own_randomness(op.key.at("dropout")):
        for step, x, positions in reference.batches(op):
            logits = {role: each.forward(x, gradient.seeds[role], step) for role, each in trainees.items()}
            losses = optimizer.objective(logits, y[positions])
            total = torch.stack([loss.mean() for loss in losses.values()]).sum()
            grads = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
            gradient.remember(losses, len(positions))
            with torch.no_grad():
                for each in trainees.values():
                    each.descend(optimizer, gradient, {name: next(grads) for name in each.weights})
    models = {role: each.model for role, each in trainees.items()}
    speeds = {role: each.speed for role, each in trainees.items()} if optimizer.momentum else {}
    return Trained(models, speeds, gradient.mean_losses())


class Trainee:
    """One role of an operation."""

    def __init__(self, op: Train, role: Role, place: int) -> None:
        self.given, self.anchor = reference.arranged(op.models[role]), op.frozen.get(role)
        self.module = _module(self.given.arch, place)
        self.weights = {name: p for name, p in self.module.named_parameters() if name in self.given.params}
        for name, p in self.weights.items():
            p.data = self.given.params[name].detach().clone()
        start = op.opt.get(role) or tree.zeros(self.given.params)
        self._speed = {name: value.clone() for name, value in start.items()}

    def forward(self, x: Inputs, seeds: Mapping[str, Tensor], step: int) -> Tensor:
        """The logits of a batch."""
        begin(self.module, seeds)
        for layer, seed in seeds.items():
            self.module.get_submodule(layer).seed = at_draw(seed, step * reference.DRAWS_A_STEP)
        x = reference.cast(x, self.given)
        return output_of(self.module(**x) if isinstance(x, Mapping) else self.module(x))

    def descend(self, optimizer: SGD, gradient: reference.Autograd, grads: tree.Params) -> None:
        """One step of SGD, as in `learning/optimizers.py`, on the weights themselves."""
        steps = optimizer.step(gradient, grads, self.given.with_params(self.weights), self.anchor)
        for name, weight in self.weights.items():
            step = (
                torch.add(steps[name], self._speed[name], alpha=optimizer.momentum, out=self._speed[name])
                if optimizer.momentum
                else steps[name]
            )
            weight.add_(step, alpha=-optimizer.lr)

    @property
    def model(self) -> Model:
        """As it is now."""
        return self.given.with_params({name: self.weights[name].detach().contiguous() for name in self.given.params})

    @property
    def speed(self) -> dict[str, Tensor]:
        """Its momentum."""
        return {name: value.contiguous() for name, value in self._speed.items()}


@functools.lru_cache(maxsize=32)
def _module(arch: Arch, place: int) -> nn.Module:
    """A module for the role that stands at this place; its weights are replaced at the beginning of every operation."""
    return build_template(arch, training=True)
