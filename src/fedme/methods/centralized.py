"""Centralized: all clients' data is brought to one place and one model is trained on it.

What federated learning is measured against (FedMe section 5.1.3). Training stops when the validation loss of the pooled
validation parts has not improved for `patience` rounds; the model is then tested client by client.

Deviations: none. The last weights are kept, as in the FedMe authors' code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedme.core.client import Models, Steps, at_once
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.model import Model
from fedme.learn.training import Training, require
from fedme.methods.local import State, local_round


@dataclass(frozen=True)
class Shared:
    """The one model: the server's state and every message."""

    model: Model


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

    def init_server(self, task: Task, key: Key) -> Shared:
        task.require_common_classes("centralized")
        return Shared(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Steps[State]:
        return at_once(State(Model.init(task.shared, key.at("shared"), task.dtype), {}))

    def plan(self, server: Shared, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return Plan.all([POOL])

    def dispatch(
        self, task: Task, server: Shared, cohort: Sequence[ClientId], when: Round, key: Key
    ) -> Steps[dict[ClientId, Shared]]:
        return at_once(dict.fromkeys(cohort, server))

    def client_round(
        self, state: State, down: Shared, data: ClientData, when: Round, key: Key
    ) -> Steps[tuple[State, Shared, Report]]:
        if self.patience is not None and state.waited >= self.patience:
            return state, down, Report({}, notes={"stopped": True})
        state, report = yield from local_round(state, data, self.train, when, key, "keep", self.patience)
        return state, Shared(state.model), report

    def aggregate(self, server: Shared, replies: Mapping[ClientId, Shared], when: Round, key: Key) -> Shared:
        return replies.get(POOL, server)

    def deliver(self, server: Shared, client: ClientId) -> Shared:
        return server

    def models(self, state: State, delivery: Shared, data: ClientData, when: Round, key: Key) -> Steps[Models]:
        return at_once({"personal": delivery.model, "global": delivery.model})
