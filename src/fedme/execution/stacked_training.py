"""Local training over stacked weights: the optimizer's own arithmetic, with the gradients of all clients at once.

A stacked model of a role has an entry "architecture:parameter" for each architecture among the clients. Its first axis counts
the clients that have the architecture, by rank, so that clients that finish are taken off the end.
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
from fedme.execution.dense_layers import dense_layers
from fedme.execution.input_tables import InputTable
from fedme.execution.reference import DRAWS_PER_STEP, mask_seeds
from fedme.execution.stacked_batches import Losses, StackedBatches
from fedme.execution.stacked_dense import DensePass, dense_pass
from fedme.execution.stacked_vmap import VmapPass
from fedme.learning.objectives import logit_gradients


@dataclass(frozen=True)
class StackLayout:
    """The clients, by rank, of every architecture of one role."""

    groups: Mapping[str, tuple[Arch, Tensor]]

    @classmethod
    def of(cls, models: Sequence[Model]) -> "StackLayout":
        """The layout of one model per client."""
        archs = {model.arch.name: model.arch for model in models}
        ranks = {name: [i for i, model in enumerate(models) if model.arch == arch] for name, arch in archs.items()}
        device = models[0].device
        return cls({name: (arch, torch.tensor(ranks[name], device=device)) for name, arch in archs.items()})

    def stack(self, trees: Sequence[Params]) -> dict[str, Tensor]:
        """One stacked tree from one tree per client."""
        return {
            f"{name}:{key}": torch.stack([trees[rank][key] for rank in ranks.tolist()])
            for name, (_, ranks) in self.groups.items()
            for key in trees[int(ranks[0])]
        }

    def stack_models(self, models: Sequence[Model]) -> Model:
        """One stacked model from one model per client."""
        return Model(models[0].arch, self.stack([model.params for model in models]), {})

    def first(self, tree: Params, active: int) -> dict[str, Tensor]:
        """The part of the first `active` clients."""
        counts = {name: int(torch.searchsorted(ranks, active)) for name, (_, ranks) in self.groups.items()}
        return {key: value[: counts[key.rpartition(":")[0]]] for key, value in tree.items()}

    def client(self, tree: Params, rank: int) -> dict[str, Tensor]:
        """One client's tree."""
        name, place = next((n, int((r == rank).nonzero())) for n, (_, r) in self.groups.items() if bool((r == rank).any()))
        return {key: value[place].clone() for key, value in select(tree, name).items()}


def select(tree: Params, name: str) -> dict[str, Tensor]:
    """The entries of one architecture in a stacked tree, by parameter."""
    return {key.rpartition(":")[2]: value for key, value in tree.items() if key.rpartition(":")[0] == name}


def train_stacked(
    ops: Sequence[Train], batches: StackedBatches, table: InputTable, gradient_type: "type[StackedGradient]"
) -> list[Trained]:
    """Train operations that share an optimizer and roles; they are in the order of the batches."""
    optimizer = ops[0].optimizer
    layouts = {role: StackLayout.of([op.models[role] for op in ops]) for role in ops[0].models}
    anchors = {role: StackLayout.of([op.frozen[role] for op in ops]) for role in ops[0].frozen}
    models: Models = {role: layout.stack_models([op.models[role] for op in ops]) for role, layout in layouts.items()}
    frozen = {role: layout.stack_models([op.frozen[role] for op in ops]) for role, layout in anchors.items()}
    states = [{**optimizer.init(op.models), **op.opt} for op in ops]
    opt: Any = {role: layouts[role].stack([state[role] for state in states]) for role in optimizer.init(ops[0].models)}
    gradient = gradient_type(ops, layouts, batches, table)
    results: dict[int, tuple[Models, Any]] = {}
    active = len(ops)
    for step, still_active in enumerate([*batches.active, 0]):
        for rank in range(still_active, active):
            own = {role: layouts[role].client(m.params, rank) for role, m in models.items()}
            trained = {role: ops[rank].models[role].with_params(params) for role, params in own.items()}
            results[rank] = trained, {role: layouts[role].client(state, rank) for role, state in opt.items()}
        if still_active == 0:
            break
        if still_active < active:
            models = {role: m.with_params(layouts[role].first(m.params, still_active)) for role, m in models.items()}
            frozen = {role: m.with_params(anchors[role].first(m.params, still_active)) for role, m in frozen.items()}
            opt = {role: layouts[role].first(state, still_active) for role, state in opt.items()}
            active = still_active
        batch = Batch(batches.rows[:active, step], batches.targets[:active, step], step)
        models, opt = optimizer(gradient, models, opt, frozen, batch)
    return [Trained(*results[rank], means) for rank, means in enumerate(gradient.mean_losses())]


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of the models of one role and architecture, and the ranks of their clients."""

    role: Role
    name: str  # of the architecture
    ranks: Tensor
    run: DensePass | VmapPass


class StackedGradient:
    """The gradients of all clients at once; the `x` of a batch holds row numbers of the table of inputs."""

    def __init__(
        self, ops: Sequence[Train], layouts: Mapping[Role, StackLayout], batches: StackedBatches, table: InputTable
    ) -> None:
        self.ops, self.layouts, self.batches, self.table = ops, layouts, batches, table
        self.objective = ops[0].optimizer.objective
        self.losses: dict[int, Losses] = {}  # by draw: of roles whose first gradient in a step has this draw
        self.recorded: dict[Role, int] = {}  # the step
        self.fixed = {role: layout.stack([op.models[role].buffers for op in ops]) for role, layout in layouts.items()}
        self.seeds = {
            (role, name): _stacked_seeds([mask_seeds({role: ops[r].models[role]}, ops[r].key)[role] for r in ranks.tolist()])
            for role, layout in layouts.items()
            for name, (_, ranks) in layout.groups.items()
        }

    def clip(self, grads: Params, limit: float) -> Params:
        clipped: dict[str, Tensor] = {}
        for name in dict.fromkeys(key.rpartition(":")[0] for key in grads):
            clipped |= tree.clip({key: g for key, g in grads.items() if key.rpartition(":")[0] == name}, limit, lead=1)
        return {key: clipped[key] for key in grads}

    def dot(self, a: Params, b: Params) -> Params:
        names: dict[str, list[str]] = {}
        for key in a:
            names.setdefault(key.rpartition(":")[0], []).append(key)
        return {
            key: total for keys in names.values() for total in [tree.dot({k: a[k] for k in keys}, b, lead=1)] for key in keys
        }

    def __call__(self, models: Models, batch: Batch, draw: int = 0) -> tuple[dict[Role, Params], dict[Role, Params]]:
        passes = [forward for role, model in models.items() for forward in self._forward(role, model, batch, draw)]
        logits: dict[Role, Tensor] = {}
        for forward in passes:
            z = forward.run.logits
            if len(forward.ranks) == len(batch.y):
                logits[forward.role] = z
            else:
                logits.setdefault(forward.role, z.new_empty((len(batch.y), *z.shape[1:]))).index_copy_(0, forward.ranks, z)
        if any(self.recorded.get(role) != batch.step for role in models):
            self.recorded |= dict.fromkeys(models, batch.step)
            self.losses.setdefault(draw, Losses(self.batches, self.objective)).add(logits, batch.y)
        grads = self.gradients(passes, logit_gradients(self.objective, logits, batch.y), batch, draw)
        for role, model in models.items():  # architectures whose clients have all finished have empty stacks
            grads[role] = {
                key: grads[role][key] if key in grads[role] else torch.zeros_like(w) for key, w in model.params.items()
            }
        return grads, {role: {} for role in models}  # type: ignore[return-value]

    def mean_losses(self) -> list[dict[Role, float]]:
        """The mean loss of every role over the samples seen, for every client."""
        means: list[dict[Role, float]] = [{} for _ in self.ops]
        for _, losses in sorted(self.losses.items()):
            means = [{**new, **known} for known, new in zip(means, losses.means(), strict=True)]
        return means

    def gradients(
        self, passes: Sequence[ForwardPass], logit_gradients: Mapping[Role, Tensor], batch: Batch, draw: int
    ) -> dict[Role, dict[str, Tensor]]:
        """The gradient of the mean loss of every client."""
        weights = self.batches.weights[: len(batch.y), batch.step].unsqueeze(-1)
        grads: dict[Role, dict[str, Tensor]] = {role: {} for role in logit_gradients}
        for forward in passes:
            gradients = forward.run.gradients((logit_gradients[forward.role] * weights)[forward.ranks])
            grads[forward.role] |= {f"{forward.name}:{key}": g for key, g in gradients.items()}
        return grads

    def _forward(self, role: Role, model: Model, batch: Batch, draw: int) -> list[ForwardPass]:
        passes = []
        for name, (arch, all_ranks) in self.layouts[role].groups.items():
            ranks = all_ranks[: int(torch.searchsorted(all_ranks, len(batch.y)))]
            if not len(ranks):
                continue
            weights, rows = select(model.params, name), batch.x[ranks]
            number = batch.step * DRAWS_PER_STEP + draw
            seeds = {layer: at_draw(seed[: len(ranks)], number) for layer, seed in self.seeds[role, name].items()}
            layers = dense_layers(arch, self.table.shape) if not self.table.symbols else ""
            run: DensePass | VmapPass
            if isinstance(layers, str):
                run = VmapPass(arch, weights, self.table.shaped(rows), seeds)
            else:
                fixed = {key: value[: len(ranks)] for key, value in select(self.fixed[role], name).items()}
                run = dense_pass(layers, weights, self.table.flat(rows), seeds, fixed)
            passes.append(ForwardPass(role, name, ranks, run))
        return passes


def _stacked_seeds(seeds: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {layer: torch.stack([client[layer] for client in seeds]) for layer in seeds[0]}
