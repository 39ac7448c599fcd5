"""Centralized: all clients' data is brought to one place and one model is trained on it.

What federated learning is measured against (FedMe section 5.1.3). Training stops when the validation loss of the pooled
validation parts has not improved for `patience` rounds; the model is then tested client by client.

Deviations: the validation loss is computed once per round, not once per epoch. The last weights are kept, as in the FedMe
authors' code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, immediately
from fedme.core.settings import setting
from fedme.learning.training_settings import Training, require
from fedme.methods.local import State, local_round, require_validation
from fedme.methods.shared_model import SharedModel, SharedModelMethod


@dataclass(frozen=True)
class Trainer:
    """The training state of the pool; clients have none."""

    own: State | None = None


@dataclass(frozen=True)
class Centralized(SharedModelMethod[Trainer, SharedModel, SharedModel]):
    """One model trained on the pooled data of all clients."""

    train: Training = field(default_factory=Training)
    patience: int | None = setting(None, "rounds without a better validation loss before training stops")

    pooled = True
    travels = "their data"
    not_by_name = "no weights travel"
    nothing_to_audit = "its clients give away the samples themselves; there is nothing left to infer"

    def __post_init__(self) -> None:
        require(self.patience is None or self.patience >= 1, "patience", f"must be >= 1, got {self.patience}")

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Trainer]:
        if me != POOL:  # a client only receives the model
            return immediately(Trainer())
        require_validation(self.patience, data)
        return immediately(Trainer(State(Model.init(task.shared, key.at("shared"), task.dtype), {})))

    def plan(self, server: SharedModel, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return Plan.all([POOL])

    def client_round(
        self, state: Trainer, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Trainer, SharedModel | None, Report]]:
        if state.own is None or (self.patience is not None and state.own.waited >= self.patience):
            return state, None, Report({}, notes={"stopped": True})
        after, report = yield from local_round(state.own, data, self.train, when, key, "keep", self.patience)
        return Trainer(after), SharedModel(after.model), report

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, SharedModel], when: Round, key: Key) -> SharedModel:
        return replies.get(POOL, server)

    def disclosures(self) -> list[str]:
        return [] if self.patience is None else ["when training stops (decided on validation samples)"]
