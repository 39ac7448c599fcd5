"""MAPPER: every client's model is its own mixture of a local and a global model.

Mansour et al. 2020 (model interpolation); in the FedMe papers section 5.1.3. A client tries mixtures
u = lambda h_local + (1 - lambda) h_global, trains each on a third A of its data, keeps the one with the smallest loss on a
third B, and moves the global model by what the best mixture learns on the last third C.

Deviations: the step of the global model is the full difference, as in the FedMe experiments; `scale_global` multiplies it by
1 - lambda, the true gradient of Mansour et al. The local step trains the mixture u itself, as in the FedMe experiments; the
gradient with respect to h_local would be lambda times as long, so this is a step of h_local with the rate over lambda^2.
Buffers such as running statistics are the global model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, Score, evaluate, immediately, in_parallel, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, SharedModelMethod, TrainedCopy, averaged, sample_counts


@dataclass(frozen=True)
class State:
    """The local model, and the three parts of the training data, drawn once."""

    local: Model
    parts: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Mapper(SharedModelMethod[State, SharedModel, TrainedCopy]):
    """Every client mixes a local and a global model in its own proportion."""

    train: Training = field(default_factory=Training)
    lambdas: tuple[float, ...] = setting(
        (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), "weights of the local model that are tried"
    )
    scale_global: bool = setting(False, "multiply the step of the global model by 1 - lambda")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        "Y. Mansour, M. Mohri, J. Ro and A. T. Suresh, "
        '"Three Approaches for Personalization with Applications to Federated Learning", 2020, arXiv:2002.10619'
    )
    not_by_name = ""
    hides_samples = True
    reads_training_scores = True

    def __post_init__(self) -> None:
        require(bool(self.lambdas) and all(0 <= weight <= 1 for weight in self.lambdas), "lambdas", "must lie in [0, 1]")

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        local = task.first_model(me, key, None if self.shared else task.shared)
        return immediately(State(local, thirds(len(data.train), key.at("thirds", me))))

    def client_round(
        self, state: State, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, TrainedCopy, Report]]:
        lam, mixture = yield from self.best_mixture(state, down.model, data, when, key)
        after = state
        if lam > 0:  # u = lam h_local + (1 - lam) h_global, solved for h_local
            pulled = tree.add(mixture.params, down.model.params, lam - 1.0)
            after = replace(state, local=state.local.with_params(tree.scale(pulled, 1.0 / lam)))
        optimizer = self.train.local_optimizer(CrossEntropy(), when)
        last = data.train.take(state.parts[2])
        trained = yield from train({"mixture": mixture}, optimizer, last, self.train.batch_schedule(when), key.at("train"))
        moved = tree.sub(trained.models["mixture"].params, mixture.params)
        share = 1.0 - lam if self.scale_global else 1.0
        new = Model(down.model.arch, tree.add(down.model.params, moved, share), trained.models["mixture"].buffers)
        return after, TrainedCopy(new, len(data.train)), Report(trained.losses, notes={"lambda": lam})

    def best_mixture(
        self, state: State, shared: Model, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[float, Model]]:
        """Train every mixture on part A and keep the one with the smallest loss on part B (lambda = 0 is not trained)."""
        first, second = data.train.take(state.parts[0]), data.train.take(state.parts[1])
        optimizer, local = self.train.local_optimizer(CrossEntropy(), when), self.train.batch_schedule(when)

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

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, sample_counts(replies), self.defence)

    def models(self, state: State, delivery: SharedModel, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        _, mixture = yield from self.best_mixture(state, delivery.model, data, when, key)
        return {"personal": mixture, "global": delivery.model}

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        """Every mixture with a local share on part A, in rounds and at evaluations; the best one on part C."""
        schedule, attempts = self.train.batch_schedule(), sum(share > 0 for share in self.lambdas)
        a, _, c = thirds(samples, Key(0))
        mixtures = PlannedTraining(schedule, len(a), times=attempts)
        return [mixtures, replace(mixtures, when="evaluation"), PlannedTraining(schedule, len(c))]

    def disclosures(self) -> list[str]:
        return ["which mixture a client chooses (decided on a third of its training samples, without noise)"]


def thirds(samples: int, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """Three random parts of nearly equal size. With one or two samples, all three parts hold all of them."""
    everything = torch.arange(samples)
    if samples <= 2:
        return everything, everything, everything
    order = torch.randperm(samples, generator=key.torch())
    first, second, third = order.split([(samples + j) // 3 for j in range(3)])
    return first, second, third
