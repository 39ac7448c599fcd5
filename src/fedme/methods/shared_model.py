"""The common case: the server keeps one model, clients train copies of it, and the server averages what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import C, Method, Plan, Round, Task, U
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately
from fedme.learning.robust_aggregation import Defence


@dataclass(frozen=True)
class SharedModel:
    """The shared model: the server's state and the message to clients."""

    model: Model


@dataclass(frozen=True)
class TrainedCopy(SharedModel):
    """A trained copy of the shared model, and the number of samples it was trained on; 1 if the mean is not weighted by it."""

    samples: int


@dataclass(frozen=True)
class TrainRequest(SharedModel):
    """The shared model, and whether the client's reply counts. If not, the client trains for itself and sends nothing."""

    counts: bool = False


M = TypeVar("M", bound=SharedModel)


class SharedModelMethod(Method[SharedModel, C, M, U]):
    """Defaults for methods whose server keeps one model and sends it to every client that trains."""

    travels = "copies of one model"

    def init_server(self, task: Task, key: Key) -> SharedModel:
        return SharedModel(Model.init(task.shared, key.at("shared"), task.dtype))

    def dispatch(self, task: Task, server: SharedModel, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, M]]:
        return immediately(dict.fromkeys(plan.train, cast(M, server)))

    def deliver(self, task: Task, server: SharedModel, client: ClientId) -> M:
        return cast(M, server)

    def models(self, state: C, delivery: M, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": delivery.model, "global": delivery.model})

    def offers(self, server: SharedModel, task: Task, key: Key) -> dict[str, Model]:
        return {"global": server.model}


class TrainAllMethod(SharedModelMethod[C, TrainRequest, U]):
    """The same for methods in which clients outside the cohort train too, without sending anything (`train_all`)."""

    train_all: bool

    def plan(self, server: SharedModel, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return self.train.plan(present, key, self.train_all)  # type: ignore[no-any-return]

    def dispatch(
        self, task: Task, server: SharedModel, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, TrainRequest]]:
        return immediately({client: TrainRequest(server.model, client in plan.count) for client in plan.train})

    def deliver(self, task: Task, server: SharedModel, client: ClientId) -> TrainRequest:
        return TrainRequest(server.model)


def averaged(
    server: SharedModel,
    replies: Mapping[ClientId, SharedModel],
    weights: Sequence[float] | None,
    defence: Defence,
    step: float = 1.0,
) -> SharedModel:
    """The server after a step of size `step` from its model towards the weighted mean of the replies."""
    if not replies:
        return server
    mean = average([reply.model for reply in replies.values()], weights, defence.combine)
    if step != 1.0:
        mean = mean.with_params(tree.mix(mean.params, server.model.params, step))
    return SharedModel(mean)


def told_samples(weighting: Literal["uniform", "samples"], data: ClientData) -> int:
    """The number of samples that a client tells: its own only if the mean is weighted by it."""
    return len(data.train) if weighting == "samples" else 1


def sample_counts(replies: Mapping[ClientId, TrainedCopy]) -> list[int]:
    """The number of training samples behind every reply."""
    return [reply.samples for reply in replies.values()]
