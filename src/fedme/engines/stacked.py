"""Training dense networks of many clients as one program over stacked weights.

Clients are sorted by their number of steps, so that those still at work are always the first ones and nobody waits for, or
computes with, clients that have finished. Models are stacked by architecture over all clients and roles: two models of a
client meet only through their logits, so four mixed architectures cost about as much as one.

This is SGD, whose gradients go straight into the stacks; `stacked_rules` runs every other rule.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedme.core.client import Role, Train, Trained
from fedme.core.dropout import at_draw
from fedme.core.model import Arch, Model
from fedme.engines.alone import DRAWS_A_STEP, mask_seeds
from fedme.engines.dense import Chain, Dropout, Linear, backward, chain, clip_factor, forward, gradients
from fedme.engines.gather import Fetch
from fedme.engines.schedule import Losses, Schedule, slopes
from fedme.learn.rules import Sgd


@dataclass(frozen=True)
class Unit:
    """One model of one client: the client's place in the order, and the role of the model."""

    rank: int
    role: Role


class Lane:
    """The stacked weights of all units of one architecture, in the order of their clients."""

    def __init__(self, arch: Arch, units: list[Unit], ops: Sequence[Train]) -> None:
        self.arch, self.units = arch, units
        found = chain(arch)
        assert found is not None
        self.chain: Chain = found
        self.order = [unit.rank for unit in units]
        self.ranks = torch.tensor(self.order)
        models = [ops[unit.rank].models[unit.role] for unit in units]
        self.weights = {name: torch.stack([model.params[name] for model in models]) for name in models[0].params}
        self.places = {role: torch.tensor([i for i, unit in enumerate(units) if unit.role == role]) for role in ops[0].models}
        seeds = [mask_seeds({unit.role: ops[unit.rank].models[unit.role]}, ops[unit.rank].key)[unit.role] for unit in units]
        names = [layer.name for layer in self.chain.layers if isinstance(layer, Dropout)]
        self._count, self._first = len(units), self.weights
        self._regular = units == [Unit(rank, role) for rank, op in enumerate(ops) for role in op.models]
        self.seeds = {name: torch.stack([seed[name] for seed in seeds]) for name in names}

    @property
    def regular(self) -> bool:
        """Whether every client has all its models in this lane: client by client, roles in order."""
        return self._regular

    def active(self, clients: int) -> int:
        """How many units belong to the first `clients` clients."""
        return bisect_left(self.order, clients)

    def first(self, count: int) -> Mapping[str, Tensor]:
        """The weights of the first `count` units."""
        if count != self._count:
            self._count, self._first = count, {name: w[:count] for name, w in self.weights.items()}
        return self._first

    def every_client_once(self, clients: int) -> bool:
        """Whether the lane holds exactly one model of each client."""
        return len(self.units) == clients and len({unit.rank for unit in self.units}) == clients

    def seeds_at(self, count: int, number: int) -> dict[str, Tensor]:
        """Seeds of the dropout masks of one gradient."""
        return {name: at_draw(seed[:count], number) for name, seed in self.seeds.items()}


def train_sgd(ops: Sequence[Train], plan: Schedule, fetch: Fetch) -> list[Trained]:
    """Train operations that share an SGD rule and roles; they are in the order of the plan, `fetch` has the inputs."""
    rule = ops[0].rule
    assert isinstance(rule, Sgd)
    return _InPlace(ops, _lanes(ops), plan, fetch, rule).run()


def _lanes(ops: Sequence[Train]) -> list[Lane]:
    units: dict[Arch, list[Unit]] = {}
    for rank, op in enumerate(ops):
        for role, model in op.models.items():
            units.setdefault(model.arch, []).append(Unit(rank, role))
    return [Lane(arch, members, ops) for arch, members in units.items()]


class _InPlace:
    """SGD over lanes: gradients go straight into the weights, or into momentum buffers."""

    def __init__(self, ops: Sequence[Train], lanes: list[Lane], plan: Schedule, fetch: Fetch, rule: Sgd) -> None:
        self.ops, self.lanes, self.plan, self.fetch, self.rule = ops, lanes, plan, fetch, rule
        self.speeds = [self._momentum(lane) for lane in lanes]
        self.anchors = [self._anchors(lane) for lane in lanes]

    def _momentum(self, lane: Lane) -> dict[str, Tensor]:
        if not self.rule.momentum:
            return {}
        zeros = {name: torch.zeros_like(w) for name, w in lane.weights.items()}
        for i, unit in enumerate(lane.units):
            for name, value in self.ops[unit.rank].opt.get(unit.role, {}).items():
                zeros[name][i] = value
        return zeros

    def _anchors(self, lane: Lane) -> dict[str, Tensor]:
        if not self.rule.prox:
            return {}
        frozen = [self.ops[unit.rank].frozen.get(unit.role) for unit in lane.units]
        if any(model is None for model in frozen):
            raise ValueError("a proximal pull needs an anchor for every model")
        return {name: torch.stack([model.params[name] for model in frozen if model]) for name in lane.weights}

    def run(self) -> list[Trained]:
        losses = Losses(self.plan.share)
        roles = list(self.ops[0].models)
        for step, active in enumerate(self.plan.active):
            share = self.plan.share[:active, step]
            y = self.plan.targets[:active, step]
            rows = self.plan.rows[:active, step]
            at_work = [i for i, lane in enumerate(self.lanes) if lane.active(active)]
            lanes = [self.lanes[i] for i in at_work]
            passes = [self._forward(lane, rows, active, step) for lane in lanes]
            logits = _by_role(roles, lanes, [z for z, _, _ in passes], active)
            step_losses, step_slopes = slopes(self.rule.objective, logits, y)
            losses.add(step_losses, step)
            weighted = {role: slope * share.unsqueeze(-1) for role, slope in step_slopes.items()}
            for i, (z, kept, count) in zip(at_work, passes, strict=True):
                slope = _by_lane(self.lanes[i], weighted, z, active)
                self._backward(self.lanes[i], self.speeds[i], self.anchors[i], slope, kept, count)
        return [self._result(rank, means) for rank, means in enumerate(losses.means())]

    def _forward(self, lane: Lane, rows: Tensor, active: int, step: int) -> tuple[Tensor, list[Tensor], int]:
        count = lane.active(active)
        mine = rows if lane.every_client_once(len(self.ops)) else rows[lane.ranks[:count]]
        x = self.fetch.flat(mine)
        seeds = lane.seeds_at(count, step * DRAWS_A_STEP)
        z, kept = forward(lane.chain, lane.first(count), x, seeds)
        return z, kept, count

    def _backward(
        self, lane: Lane, speed: dict[str, Tensor], anchor: dict[str, Tensor], slope: Tensor, kept: list[Tensor], count: int
    ) -> None:
        rule = self.rule
        weights = lane.first(count)
        if rule.clip is None:

            def use(layer: Linear, slope: Tensor, x: Tensor) -> None:
                self._change(weights[layer.weight], speed.get(layer.weight), anchor.get(layer.weight), (slope, x), count)
                if layer.bias:
                    self._change(weights[layer.bias], speed.get(layer.bias), anchor.get(layer.bias), slope.sum(1), count)

            backward(lane.chain, weights, kept, slope, use)
            return
        grads = gradients(lane.chain, weights, kept, slope)
        if rule.prox:
            grads = {name: g + rule.prox * (weights[name] - anchor[name][:count]) for name, g in grads.items()}
        factor = clip_factor(grads, rule.clip)
        for name, grad in grads.items():
            scaled = grad * factor.view(-1, *(1,) * (grad.dim() - 1))
            self._change(weights[name], speed.get(name), None, scaled, count)

    def _change(
        self, w: Tensor, speed: Tensor | None, anchor: Tensor | None, grad: Tensor | tuple[Tensor, Tensor], count: int
    ) -> None:
        """One SGD step of one stacked weight; `grad` is the gradient, or the two factors of it."""
        rule = self.rule
        pull = rule.prox if anchor is not None else 0.0
        if speed is None:
            if pull or rule.weight_decay:
                moved = w.mul(1.0 - rule.lr * (pull + rule.weight_decay))
                w.copy_(moved.add_(anchor[:count], alpha=rule.lr * pull) if anchor is not None else moved)
            _add(w, grad, -rule.lr)
            return
        v = speed[:count]
        v.mul_(rule.momentum)
        if pull or rule.weight_decay:
            v.add_(w, alpha=pull + rule.weight_decay)
        if anchor is not None:
            v.add_(anchor[:count], alpha=-pull)
        _add(v, grad, 1.0)
        w.add_(v, alpha=-rule.lr)

    def _result(self, rank: int, losses: Mapping[Role, float]) -> Trained:
        models, opt = {}, {}
        for lane, speed in zip(self.lanes, self.speeds, strict=True):
            for i, unit in enumerate(lane.units):
                if unit.rank == rank:
                    models[unit.role] = Model(lane.arch, {name: w[i].clone() for name, w in lane.weights.items()}, {})
                    opt[unit.role] = {name: v[i].clone() for name, v in speed.items()}
        ordered = {role: models[role] for role in self.ops[rank].models}
        return Trained(ordered, opt if self.rule.momentum else {}, losses)


def _add(w: Tensor, grad: Tensor | tuple[Tensor, Tensor], factor: float) -> None:
    if isinstance(grad, tuple):
        slope, x = grad
        w.baddbmm_(slope.transpose(1, 2), x, alpha=factor)
    else:
        w.add_(grad, alpha=factor)


def _by_role(roles: Sequence[Role], lanes: Sequence[Lane], outputs: Sequence[Tensor], active: int) -> dict[Role, Tensor]:
    """The logits of every role, client by client, from those of every lane."""
    if lanes[0].regular:
        each = outputs[0].view(active, len(roles), *outputs[0].shape[1:])
        return {role: each[:, i] for i, role in enumerate(roles)}
    found = {role: outputs[0].new_empty((active, *outputs[0].shape[1:])) for role in roles}
    for lane, z in zip(lanes, outputs, strict=True):
        for role in roles:
            places = lane.places[role][lane.places[role] < len(z)]
            if len(places):
                found[role].index_copy_(0, lane.ranks[places], z[places])
    return found


def _by_lane(lane: Lane, values: Mapping[Role, Tensor], like: Tensor, active: int) -> Tensor:
    """The reverse: one tensor for the units of a lane."""
    if lane.regular:
        return torch.stack(list(values.values()), 1).view(like.shape) if len(values) > 1 else next(iter(values.values()))
    found = torch.empty_like(like)
    for role, value in values.items():
        places = lane.places[role][lane.places[role] < len(like)]
        if len(places):
            found.index_copy_(0, places, value[lane.ranks[places]])
    return found
