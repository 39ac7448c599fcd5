"""Any rule over stacked weights: the rule's own arithmetic, with gradients of all clients at once.

A stacked model of a role has an entry "architecture:weight" for each architecture among the clients; its leading axis counts
the clients that have it, in order, so that clients that finish are taken off the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.dropout import at_draw
from fedme.core.model import Arch, Model
from fedme.core.operations import Batch, Models, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution import vmapped
from fedme.execution.batch_gathering import Fetch
from fedme.execution.dense_networks import Chain, chain, forward, gradients
from fedme.execution.reference import DRAWS_A_STEP, mask_seeds
from fedme.execution.stacked_batches import Losses, Schedule
from fedme.learning.objectives import logit_gradients


@dataclass(frozen=True)
class ByHand:
    """Of a chain, as it is written."""

    network: Chain
    weights: Params
    kept: list[Tensor]

    def __call__(self, slope: Tensor) -> dict[str, Tensor]:
        return gradients(self.network, self.weights, self.kept, slope)


@dataclass(frozen=True)
class ByAutograd:
    """Of any network that vmap has run."""

    arch: Arch
    leaves: Params
    x: Tensor
    seeds: Mapping[str, Tensor]
    out: Tensor

    def __call__(self, slope: Tensor) -> dict[str, Tensor]:
        return self._derived(self.out, slope)

    def sample(self, slope: Tensor, i: int) -> dict[str, Tensor]:
        """The gradients of the sample at place `i` of every batch, computed for itself."""
        there = slice(i, i + 1)
        return self._derived(vmapped.logits(self.arch, self.leaves, self.x[:, there], self.seeds, i), slope[:, there])

    def _derived(self, out: Tensor, slope: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(out, list(self.leaves.values()), slope, allow_unused=True, materialize_grads=True)
        return dict(zip(self.leaves, found, strict=True))


Pass = tuple[Role, str, Tensor, ByHand | ByAutograd]  # a role and architecture, the clients that have it, and the way back


@dataclass(frozen=True)
class Layout:
    """Which clients (by rank) have which architecture in one role."""

    groups: Mapping[str, tuple[Arch, Tensor]]

    @classmethod
    def of(cls, models: Sequence[Model]) -> "Layout":
        """The layout of one model a client."""
        archs = {model.arch.name: model.arch for model in models}
        ranks = {name: [i for i, model in enumerate(models) if model.arch == arch] for name, arch in archs.items()}
        device = models[0].device
        return cls({name: (arch, torch.tensor(ranks[name], device=device)) for name, arch in archs.items()})

    def stack(self, trees: Sequence[Params]) -> dict[str, Tensor]:
        """One stacked tree from one tree a client."""
        return {
            f"{name}:{key}": torch.stack([trees[rank][key] for rank in ranks.tolist()])
            for name, (_, ranks) in self.groups.items()
            for key in trees[int(ranks[0])]
        }

    def first(self, tree: Params, active: int) -> dict[str, Tensor]:
        """The part of the first `active` clients."""
        counts = {name: int(torch.searchsorted(ranks, active)) for name, (_, ranks) in self.groups.items()}
        return {key: value[: counts[key.rpartition(":")[0]]] for key, value in tree.items()}

    def row(self, tree: Params, rank: int) -> dict[str, Tensor]:
        """One client's tree."""
        name, place = next((n, int((r == rank).nonzero())) for n, (_, r) in self.groups.items() if bool((r == rank).any()))
        return {key.rpartition(":")[2]: v[place].clone() for key, v in tree.items() if key.rpartition(":")[0] == name}


def train_with_optimizer(
    ops: Sequence[Train], plan: Schedule, fetch: Fetch, by_hand: bool = True, kind: "type[StackedGradient] | None" = None
) -> list[Trained]:
    """Train operations that share a rule and roles; they are in the order of the plan, `fetch` has the inputs.

    `by_hand`: the gradients of chains are those written by hand, otherwise all are those of vmap and autograd. `kind` is how
    gradients of the batch are made; as they are by default.
    """
    optimizer = ops[0].optimizer
    layouts = {role: Layout.of([op.models[role] for op in ops]) for role in ops[0].models}
    anchors = {role: Layout.of([op.frozen[role] for op in ops]) for role in ops[0].frozen}
    models: Models = {role: _stacked(layout, [op.models[role] for op in ops]) for role, layout in layouts.items()}
    frozen = {role: _stacked(layout, [op.frozen[role] for op in ops]) for role, layout in anchors.items()}
    opt: Any = {role: _given(layouts[role], ops, role, fresh) for role, fresh in optimizer.init(models).items()}
    gradient = (kind or StackedGradient)(ops, layouts, plan, fetch, by_hand)
    results: dict[int, tuple[Models, Any]] = {}
    active = len(ops)
    for step, still in enumerate([*plan.active, 0]):
        for rank in range(still, active):
            own = {
                role: Model(ops[rank].models[role].arch, layouts[role].row(m.params, rank), {}) for role, m in models.items()
            }
            results[rank] = own, {role: layouts[role].row(state, rank) for role, state in opt.items()}
        if still == 0:
            break
        if still < active:
            models = {role: m.with_params(layouts[role].first(m.params, still)) for role, m in models.items()}
            frozen = {role: m.with_params(anchors[role].first(m.params, still)) for role, m in frozen.items()}
            opt = {role: layouts[role].first(state, still) for role, state in opt.items()}
            active = still
        batch = Batch(plan.rows[:active, step], plan.targets[:active, step], step)
        models, opt = optimizer(gradient, models, opt, frozen, batch)
    return [Trained(*results[rank], means) for rank, means in enumerate(gradient.losses.means())]


def _stacked(layout: Layout, models: Sequence[Model]) -> Model:
    return Model(models[0].arch, layout.stack([model.params for model in models]), {})


def _given(layout: Layout, ops: Sequence[Train], role: Role, fresh: Params) -> Params:
    """The optimiser states the operations bring; fresh ones where they bring none."""
    zeros = [layout.row(fresh, rank) for rank in range(len(ops))]
    return layout.stack([op.opt.get(role) or zero for op, zero in zip(ops, zeros, strict=True)])


class StackedGradient:
    """The gradients of all clients at once; a batch's `x` holds row numbers of the table of inputs."""

    def __init__(
        self, ops: Sequence[Train], layouts: Mapping[Role, Layout], plan: Schedule, fetch: Fetch, by_hand: bool = True
    ) -> None:
        self.ops, self.objective, self.layouts, self.plan, self.fetch = ops, ops[0].optimizer.objective, layouts, plan, fetch
        self.by_hand = by_hand
        self.losses = Losses(plan, self.objective)
        self.seeds = {
            (role, name): _seeds([mask_seeds({role: ops[r].models[role]}, ops[r].key)[role] for r in ranks.tolist()])
            for role, layout in layouts.items()
            for name, (_, ranks) in layout.groups.items()
        }

    def clip(self, grads: Params, limit: float) -> Params:
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(key.rpartition(":")[0] for key in grads):
            found |= tree.clip({key: g for key, g in grads.items() if key.rpartition(":")[0] == name}, limit, lead=1)
        return {key: found[key] for key in grads}

    def __call__(self, models: Models, batch: Batch, draw: int = 0) -> tuple[dict[Role, Params], dict[Role, Params]]:
        active = len(batch.y)
        number = batch.step * DRAWS_A_STEP + draw
        logits: dict[Role, Tensor] = {}
        passes: list[Pass] = []
        for role, model in models.items():
            for name, (arch, all_ranks) in self.layouts[role].groups.items():
                ranks = all_ranks[: int(torch.searchsorted(all_ranks, active))]
                if not len(ranks):
                    continue
                weights = {key.rpartition(":")[2]: w for key, w in model.params.items() if key.rpartition(":")[0] == name}
                seeds = {layer: at_draw(seed[: len(ranks)], number) for layer, seed in self.seeds[role, name].items()}
                z, back = self._forward(arch, weights, batch.x[ranks], seeds)
                logits.setdefault(role, z.new_empty((active, *z.shape[1:]))).index_copy_(0, ranks, z)
                passes.append((role, name, ranks, back))
        slope = logit_gradients(self.objective, logits, batch.y)
        if draw == 0:
            self.losses.add(logits, batch.y)
        grads = self._grads(passes, slope, batch, draw)
        # A stack whose clients have all finished has nothing to say, and nobody asks.
        whole = {role: {k: grads[role].get(k, torch.zeros_like(w)) for k, w in m.params.items()} for role, m in models.items()}
        return whole, {role: {} for role in models}  # type: ignore[return-value]

    def _grads(
        self, passes: Sequence[Pass], slope: Mapping[Role, Tensor], batch: Batch, draw: int
    ) -> dict[Role, dict[str, Tensor]]:
        """The gradient of the mean loss of every client."""
        share = self.plan.share[: len(batch.y), batch.step].unsqueeze(-1)
        grads: dict[Role, dict[str, Tensor]] = {role: {} for role in slope}
        for role, name, ranks, back in passes:
            found = back((slope[role] * share)[ranks])
            grads[role] |= {f"{name}:{key}": g for key, g in found.items()}
        return grads

    def _forward(
        self, arch: Arch, weights: Params, rows: Tensor, seeds: Mapping[str, Tensor]
    ) -> tuple[Tensor, ByHand | ByAutograd]:
        """Logits, and what turns their slope into gradients: by hand for chains, by vmap and autograd for the rest."""
        network = chain(arch) if self.by_hand else None
        if network is not None:
            z, kept = forward(network, weights, self.fetch.flat(rows), seeds)
            return z, ByHand(network, weights, kept)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        x = self.fetch.shaped(rows)
        out = vmapped.logits(arch, leaves, x, seeds)
        return out.detach(), ByAutograd(arch, leaves, x, seeds, out)


def _seeds(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {layer: torch.stack([seeds[layer] for seeds in each]) for layer in each[0]}
