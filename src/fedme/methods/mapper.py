"""MAPPER: every client's model is its own mixture of a local and a global model.

Mansour et al. 2020 (model interpolation); in the FedMe papers section 5.1.3. A client tries mixtures
u = lambda h_local + (1 - lambda) h_global, trains each on a third A of its data, keeps the one with the smallest loss on a
third B, and moves the global model by what the best mixture learns on the last third C.

Deviations: the step of the global model is the full difference, as in the FedMe experiments; `scale_global` multiplies it by
1 - lambda, the true gradient of Mansour et al. Buffers such as running statistics are the global model's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Plan, Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, Score, evaluate, immediately, in_parallel, train
from fedme.learning.local_training import Training, require
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.methods.fedavg import Shared, Up


@dataclass(frozen=True)
class State:
    """The local model, and the three parts of the training data, drawn once."""

    local: Model
    parts: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Mapper:
    """Every client mixes a local and a global model in its own proportion."""

    train: Training = field(default_factory=Training)
    lambdas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # shares of the local model
    scale_global: bool = False  # multiply the step of the global model by 1 - lambda
    defence: Defence = OPEN

    phases = ("round",)
    pooled = False
    own_architectures = False

    def __post_init__(self) -> None:
        require(bool(self.lambdas) and all(0 <= each <= 1 for each in self.lambdas), "lambdas", "must lie in [0, 1]")

    def check(self, task: Task) -> None:
        task.require_common_classes("mapper")

    def init_server(self, task: Task, key: Key) -> Shared:
        return Shared(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        local = Model.init(task.shared, key.at("client", me), task.dtype)
        return immediately(State(local, thirds(len(data.train), key.at("thirds", me))))

    def plan(self, server: Shared, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return self.train.plan(present, key)

    def dispatch(self, task: Task, server: Shared, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Shared]]:
        return immediately(dict.fromkeys(plan.train, server))

    def client_round(
        self, state: State, down: Shared, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Up, Report]]:
        lam, mixture = yield from self.best_mixture(state, down.model, data, when, key)
        after = state
        if lam > 0:  # u = lam h_local + (1 - lam) h_global, solved for h_local
            pulled = tree.add(mixture.params, down.model.params, lam - 1.0)
            after = replace(state, local=state.local.with_params(tree.scale(pulled, 1.0 / lam)))
        optimizer = self.train.sgd(CrossEntropy(), when)
        last = data.train.take(state.parts[2])
        trained = yield from train({"mixture": mixture}, optimizer, last, self.train.batch_schedule(when), key.at("train"))
        moved = tree.sub(trained.models["mixture"].params, mixture.params)
        share = 1.0 - lam if self.scale_global else 1.0
        new = Model(down.model.arch, tree.add(down.model.params, moved, share), trained.models["mixture"].buffers)
        return after, Up(new, len(data.train)), Report(trained.losses, notes={"lambda": lam})

    def best_mixture(
        self, state: State, shared: Model, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[float, Model]]:
        """Train every mixture on part A and keep the one with the smallest loss on part B (lambda = 0 is not trained)."""
        first, second = data.train.take(state.parts[0]), data.train.take(state.parts[1])
        optimizer, local = self.train.sgd(CrossEntropy(), when), self.train.batch_schedule(when)

        def attempt(index: int, lam: float) -> Computation[tuple[Score, Model]]:
            mixture = shared.with_params(tree.mix(state.local.params, shared.params, lam)) if lam > 0 else shared
            if lam > 0:
                trained = yield from train({"mixture": mixture}, optimizer, first, local, key.at("mixture", index))
                mixture = trained.models["mixture"]
            return (yield from evaluate(mixture, second)), mixture

        attempts = yield from in_parallel([attempt(i, lam) for i, lam in enumerate(self.lambdas)])
        losses = [score.loss for score, _ in attempts]
        best = min(range(len(losses)), key=lambda i: (losses[i] != losses[i], losses[i], i))
        return self.lambdas[best], attempts[best][1]

    def aggregate(self, server: Shared, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Shared:
        if not replies:
            return server
        weights = [up.samples for up in replies.values()]
        return Shared(average([up.model for up in replies.values()], weights, self.defence.combine))

    def deliver(self, task: Task, server: Shared, client: ClientId) -> Shared:
        return server

    def models(self, state: State, delivery: Shared, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        _, mixture = yield from self.best_mixture(state, delivery.model, data, when, key)
        return {"personal": mixture, "global": delivery.model}


def thirds(samples: int, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """Three random parts of nearly equal size; one or two samples are used for all three purposes."""
    everything = torch.arange(samples)
    if samples <= 2:
        return everything, everything, everything
    order = torch.randperm(samples, generator=key.torch())
    first, second, third = order.split([(samples + j) // 3 for j in range(3)])
    return first, second, third
