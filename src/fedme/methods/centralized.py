"""Centralized: all clients' data is brought to one place and one model is trained on it.

What federated learning is measured against (FedMe section 5.1.3). Training stops when the validation loss of the pooled
validation parts has not improved for `patience` rounds; the model is then tested client by client.

Deviations: the validation loss is looked at once a round, not once an epoch. The last weights are kept, as in the FedMe
authors' code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, immediately
from fedme.learning.local_training import Training, require
from fedme.methods.local import State, local_round, require_validation


@dataclass(frozen=True)
class Shared:
    """The one model: the server's state and every message."""

    model: Model


@dataclass(frozen=True)
class Trainer:
    """What the place where the data is keeps; nothing at the clients."""

    own: State | None = None


@dataclass(frozen=True)
class Centralized:
    """One model trained on everybody's pooled data."""

    train: Training = field(default_factory=Training)
    patience: int | None = None  # rounds without a better validation loss before training stops

    phases = ("round",)
    pooled = True
    own_architectures = False

    def __post_init__(self) -> None:
        require(self.patience is None or self.patience >= 1, "patience", f"must be at least 1, not {self.patience}")

    def check(self, task: Task) -> None:
        task.require_common_classes("centralized")

    def init_server(self, task: Task, key: Key) -> Shared:
        return Shared(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Trainer]:
        if me != POOL:  # a client only receives the model
            return immediately(Trainer())
        require_validation(self.patience, data)
        return immediately(Trainer(State(Model.init(task.shared, key.at("shared"), task.dtype), {})))

    def plan(self, server: Shared, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return Plan.all([POOL])

    def dispatch(self, task: Task, server: Shared, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Shared]]:
        return immediately(dict.fromkeys(plan.train, server))

    def client_round(
        self, state: Trainer, down: Shared, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Trainer, Shared | None, Report]]:
        if state.own is None or (self.patience is not None and state.own.waited >= self.patience):
            return state, None, Report({}, notes={"stopped": True})
        after, report = yield from local_round(state.own, data, self.train, when, key, "keep", self.patience)
        return Trainer(after), Shared(after.model), report

    def aggregate(self, server: Shared, replies: Mapping[ClientId, Shared], when: Round, key: Key) -> Shared:
        return replies.get(POOL, server)

    def deliver(self, task: Task, server: Shared, client: ClientId) -> Shared:
        return server

    def models(self, state: Trainer, delivery: Shared, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": delivery.model, "global": delivery.model})
