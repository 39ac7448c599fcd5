"""FedAvg: clients train copies of one model, the server averages them.

McMahan et al. 2017, Algorithm 1; in the FedMe papers section 5.1.3, in FML Eq. 2.

Deviations: none. Weights are the clients' numbers of training samples; `weighting = "uniform"` is Eq. 4 of the first
version of FedMe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Plan, Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately, train
from fedme.learning.local_training import Training
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence


@dataclass(frozen=True)
class Shared:
    """The one model: the server's state and the message down."""

    model: Model


@dataclass(frozen=True)
class Up:
    """A trained copy, and on how many samples it was trained."""

    model: Model
    samples: int


@dataclass(frozen=True)
class FedAvg:
    """Clients train copies of one model, the server averages them."""

    train: Training = field(default_factory=Training)
    weighting: Literal["samples", "uniform"] = "samples"
    defence: Defence = OPEN

    phases = ("round",)
    pooled = False
    own_architectures = False

    def check(self, task: Task) -> None:
        task.require_common_classes(type(self).__name__.lower())

    def init_server(self, task: Task, key: Key) -> Shared:
        return Shared(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Empty]:
        return immediately(Empty())

    def plan(self, server: Shared, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return self.train.plan(present, key)

    def dispatch(self, task: Task, server: Shared, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Shared]]:
        return immediately(dict.fromkeys(plan.train, server))

    def client_round(
        self, state: Empty, down: Shared, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, Up, Report]]:
        optimizer = self.train.sgd(CrossEntropy(), when, prox=self.proximal())
        trained = yield from train(
            {"global": down.model},
            optimizer,
            data.train,
            self.train.batch_schedule(when),
            key.at("train"),
            frozen={"global": down.model},
        )
        return state, Up(trained.models["global"], len(data.train)), Report(trained.losses)

    def proximal(self) -> float:
        """How strongly a copy is pulled back to the model it came from: not at all."""
        return 0.0

    def aggregate(self, server: Shared, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Shared:
        if not replies:
            return server
        weights = [up.samples for up in replies.values()] if self.weighting == "samples" else None
        return Shared(average([up.model for up in replies.values()], weights, self.defence.combine))

    def deliver(self, task: Task, server: Shared, client: ClientId) -> Shared:
        return server

    def models(self, state: Empty, delivery: Shared, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": delivery.model, "global": delivery.model})
