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

from fedme.core import tree
from fedme.core.dropout import at_draw
from fedme.core.model import Arch, Model
from fedme.core.operations import Role, Train, Trained
from fedme.execution.batch_gathering import Fetch
from fedme.execution.dense_networks import Chain, Dropout, Linear, backward, chain, forward, gradients
from fedme.execution.reference import DRAWS_A_STEP, mask_seeds
from fedme.execution.stacked_batches import Losses, Schedule
from fedme.learning.objectives import logit_gradients
from fedme.learning.optimizers import SGD


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
        models = [ops[unit.rank].models[unit.role] for unit in units]
        self.weights = {name: torch.stack([model.params[name] for model in models]) for name in models[0].params}
        names = [layer.name for layer in self.chain.layers if isinstance(layer, Dropout)]
        seeds = [mask_seeds({u.role: ops[u.rank].models[u.role]}, ops[u.rank].key)[u.role] for u in units] if names else []
        self.seeds = {name: torch.stack([seed[name] for seed in seeds]) for name in names}

    def active(self, clients: int) -> int:
        """How many units belong to the first `clients` clients."""
        return bisect_left(self.order, clients)

    def rows(self, plan: Schedule) -> tuple[Tensor, ...]:
        """For every step, the samples of the units at work, one after another."""
        mine = plan.rows[torch.tensor(self.order, device=plan.rows.device)].transpose(0, 1)  # steps x units x batch
        counts = [self.active(clients) for clients in plan.active]
        width = mine.shape[2]
        return tuple(mine[plan.at_work(len(self.order), counts)].reshape(-1).split([count * width for count in counts]))

    def seeds_at(self, count: int, number: int) -> dict[str, Tensor]:
        """Seeds of the dropout masks of one gradient."""
        return {name: at_draw(seed[:count], number) for name, seed in self.seeds.items()}


class Crossing:
    """From units, lane by lane, to roles, client by client, and back: where the models of a client meet."""

    def __init__(self, lanes: Sequence[Lane], roles: Sequence[Role]) -> None:
        self.lanes, self.roles = lanes, list(roles)
        self.straight = len(lanes) == 1 and len(self.roles) == 1
        self._ways: dict[int, tuple[Tensor, Tensor]] = {}

    def _way(self, active: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each role of each client stands among the units at work, and the reverse."""
        if active not in self._ways:
            units = [unit for lane in self.lanes for unit in lane.units[: lane.active(active)]]
            to_units = torch.tensor([self.roles.index(unit.role) * active + unit.rank for unit in units])
            to_roles = torch.empty_like(to_units)
            to_roles[to_units] = torch.arange(len(units))
            self._ways[active] = to_roles.to(device), to_units.to(device)
        return self._ways[active]

    def logits(self, outputs: Sequence[Tensor], active: int) -> dict[Role, Tensor]:
        """The logits of every role, client by client."""
        if self.straight:
            return {self.roles[0]: outputs[0]}
        whole = torch.cat(list(outputs)) if len(outputs) > 1 else outputs[0]
        each = whole.index_select(0, self._way(active, whole.device)[0]).view(len(self.roles), active, *whole.shape[1:])
        return dict(zip(self.roles, each, strict=True))

    def logit_gradients(
        self, values: Mapping[Role, Tensor], share: Tensor, counts: Sequence[int], active: int
    ) -> Sequence[Tensor]:
        """The slope of the mean loss for the units of every lane at work."""
        if self.straight:
            return [next(iter(values.values())).mul_(share)]
        whole = torch.stack([values[role] for role in self.roles]).mul_(share)
        return list(whole.flatten(0, 1).index_select(0, self._way(active, whole.device)[1]).split(list(counts)))


def train_sgd(ops: Sequence[Train], plan: Schedule, fetch: Fetch) -> list[Trained]:
    """Train operations that share an SGD rule and roles; they are in the order of the plan, `fetch` has the inputs."""
    optimizer = ops[0].optimizer
    assert isinstance(optimizer, SGD)
    return _InPlace(ops, _lanes(ops), plan, fetch, optimizer).run()


def _lanes(ops: Sequence[Train]) -> list[Lane]:
    units: dict[Arch, list[Unit]] = {}
    for rank, op in enumerate(ops):
        for role, model in op.models.items():
            units.setdefault(model.arch, []).append(Unit(rank, role))
    return [Lane(arch, members, ops) for arch, members in units.items()]


class _InPlace:
    """SGD over lanes: gradients go straight into the weights, or into momentum buffers."""

    def __init__(self, ops: Sequence[Train], lanes: list[Lane], plan: Schedule, fetch: Fetch, optimizer: SGD) -> None:
        self.ops, self.lanes, self.plan, self.fetch, self.optimizer = ops, lanes, plan, fetch, optimizer
        self.speeds = [self._momentum(lane) for lane in lanes]
        self.anchors = [self._anchors(lane) for lane in lanes]

    def _momentum(self, lane: Lane) -> dict[str, Tensor]:
        if not self.optimizer.momentum:
            return {}
        zeros = {name: torch.zeros_like(w) for name, w in lane.weights.items()}
        for i, unit in enumerate(lane.units):
            for name, value in self.ops[unit.rank].opt.get(unit.role, {}).items():
                zeros[name][i] = value
        return zeros

    def _anchors(self, lane: Lane) -> dict[str, Tensor]:
        if not self.optimizer.prox:
            return {}
        frozen = [self.ops[unit.rank].frozen[unit.role] for unit in lane.units]
        return {name: torch.stack([model.params[name] for model in frozen]) for name in lane.weights}

    def run(self) -> list[Trained]:
        objective, width = self.optimizer.objective, self.plan.rows.shape[2]
        losses = Losses(self.plan, objective)
        crossing = Crossing(self.lanes, list(self.ops[0].models))
        rows = [lane.rows(self.plan) for lane in self.lanes]
        fronts: list[Front] = []
        before = 0
        for step, (active, y, share) in enumerate(zip(self.plan.active, *self.plan.packed(), strict=True)):
            if active != before:
                fronts, before = self._fronts(active), active
            passes = [front.forward(self.fetch.flat(rows[front.number][step]), width, step) for front in fronts]
            logits = crossing.logits([z for z, _ in passes], active)
            values = logit_gradients(objective, logits, y)
            losses.add(logits, y)
            ready = crossing.logit_gradients(values, share, [front.count for front in fronts], active)
            for front, slope, (_, kept) in zip(fronts, ready, passes, strict=True):
                front.backward(slope, kept)
        return [self._result(rank, means) for rank, means in enumerate(losses.means())]

    def _fronts(self, active: int) -> list["Front"]:
        """The units at work of every lane that has any."""
        counts = [lane.active(active) for lane in self.lanes]
        return [
            Front(number, self.lanes[number], count, self.optimizer, self.speeds[number], self.anchors[number])
            for number, count in enumerate(counts)
            if count
        ]

    def _result(self, rank: int, losses: Mapping[Role, float]) -> Trained:
        models, opt = {}, {}
        for lane, speed in zip(self.lanes, self.speeds, strict=True):
            for i, unit in enumerate(lane.units):
                if unit.rank == rank:
                    models[unit.role] = Model(lane.arch, {name: w[i].clone() for name, w in lane.weights.items()}, {})
                    opt[unit.role] = {name: v[i].clone() for name, v in speed.items()}
        ordered = {role: models[role] for role in self.ops[rank].models}
        return Trained(ordered, opt if self.optimizer.momentum else {}, losses)


class Front:
    """The first units of a lane, those still at work: one step of SGD over their part of the stacks."""

    def __init__(
        self, number: int, lane: Lane, count: int, optimizer: SGD, speed: Mapping[str, Tensor], anchor: Mapping[str, Tensor]
    ) -> None:
        self.number, self.lane, self.count, self.optimizer = number, lane, count, optimizer
        self.weights, self.speed, self.anchor = (
            {name: value[:count] for name, value in each.items()} for each in (lane.weights, speed, anchor)
        )

    def forward(self, x: Tensor, width: int, step: int) -> tuple[Tensor, list[Tensor]]:
        """Logits, and what the way back needs."""
        seeds = self.lane.seeds_at(self.count, step * DRAWS_A_STEP)
        return forward(self.lane.chain, self.weights, x.view(self.count, width, -1), seeds)

    def backward(self, slope: Tensor, kept: list[Tensor]) -> None:
        """Change the weights by the gradients that belong to the slope of the logits."""
        optimizer = self.optimizer
        if optimizer.clip is None:
            backward(self.lane.chain, self.weights, kept, slope, self._use)
            return
        grads = gradients(self.lane.chain, self.weights, kept, slope)
        if optimizer.prox:
            grads = {name: g + optimizer.prox * (self.weights[name] - self.anchor[name]) for name, g in grads.items()}
        for name, grad in tree.clip(grads, optimizer.clip, lead=1).items():
            self._change(self.weights[name], self.speed.get(name), None, grad)

    def _use(self, layer: Linear, slope: Tensor, x: Tensor) -> None:
        for name in (layer.weight, layer.bias) if layer.bias else (layer.weight,):
            grad = (slope, x) if name == layer.weight else slope.sum(1)
            self._change(self.weights[name], self.speed.get(name), self.anchor.get(name), grad)

    def _change(self, w: Tensor, speed: Tensor | None, anchor: Tensor | None, grad: Tensor | tuple[Tensor, Tensor]) -> None:
        """One SGD step of one stacked weight; `grad` is the gradient, or the two factors of it."""
        optimizer = self.optimizer
        pull = optimizer.prox if anchor is not None else 0.0
        if speed is None:
            if pull or optimizer.weight_decay:
                moved = w.mul(1.0 - optimizer.lr * (pull + optimizer.weight_decay))
                w.copy_(moved.add_(anchor, alpha=optimizer.lr * pull) if anchor is not None else moved)
            _add(w, grad, -optimizer.lr)
            return
        v = speed
        v.mul_(optimizer.momentum)
        if pull or optimizer.weight_decay:
            v.add_(w, alpha=pull + optimizer.weight_decay)
        if anchor is not None:
            v.add_(anchor, alpha=-pull)
        _add(v, grad, 1.0)
        w.add_(v, alpha=-optimizer.lr)


def _add(w: Tensor, grad: Tensor | tuple[Tensor, Tensor], factor: float) -> None:
    if isinstance(grad, tuple):
        slope, x = grad
        w.baddbmm_(slope.transpose(1, 2), x, alpha=factor)
    else:
        w.add_(grad, alpha=factor)
