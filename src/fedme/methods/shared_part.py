"""The server keeps a part of a model; clients complete it by a part of their own, train, and send the shared part back.

FedPer, FedRep, LG-FedAvg and FedBN differ in which part is shared (`shared_choice`), and in how a client trains (`trained`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import C, Method, Plan, Report, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, Models, Trained, immediately, train
from fedme.learning.objectives import CrossEntropy
from fedme.learning.partial_model import Choice, Part, all_but, chosen_part, fork, merge
from fedme.learning.robust_aggregation import Defence
from fedme.methods.shared_model import told_samples


@dataclass(frozen=True)
class State:
    """What never leaves a client: its part of the model."""

    arch: Arch
    own: Part


@dataclass(frozen=True)
class Up:
    """The shared part after training."""

    part: Part
    samples: int  # 1 if the mean is not weighted by them


class PartAveraging(Method[Part, C, Part, Up]):
    """The server's side of methods that average a part of the clients' models; FML has only this in common with the others."""

    weighting: Literal["uniform", "samples"]
    defence: Defence

    def dispatch(self, task: Task, server: Part, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Part]]:
        return immediately(dict.fromkeys(plan.train, server))

    def expects(self, task: Task, down: Part, up: Up, when: Round) -> dict[str, Part]:
        return {"part": down}

    def aggregate(self, server: Part, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Part:
        if not replies:
            return server
        weights = [up.samples if self.weighting == "samples" else 1.0 for up in replies.values()]
        return merge([up.part for up in replies.values()], weights, self.defence.combine)

    def deliver(self, task: Task, server: Part, client: ClientId) -> Part:
        return server


class SharedPartMethod(PartAveraging[State]):
    """Defaults for methods whose clients complete the shared part by a part of their own and train both."""

    @abstractmethod
    def shared_choice(self, arch: Arch) -> Choice:
        """Which weights and buffers of a network are shared."""

    def shared_part(self, model: Model) -> Part:
        """The part of a model that travels."""
        return chosen_part(model, self.shared_choice(model.arch))

    def joined(self, state: State, part: Part) -> Model:
        """The client's model: its own part, and the shared one."""
        return fork(state.arch, state.own, part)

    def trained(self, model: Model, data: ClientData, when: Round, key: Key) -> Computation[Trained]:
        """The client's model, in the role "own", after training."""
        optimizer, schedule = self.train.local_optimizer(CrossEntropy(), when), self.train.batch_schedule(when)
        return (yield from train({"own": model}, optimizer, data.train, schedule, key.at("train")))

    def arch_of(self, task: Task, me: ClientId) -> Arch:
        """The architecture of a client."""
        return task.shared

    def init_server(self, task: Task, key: Key) -> Part:
        return self.shared_part(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(self._state(task.first_model(me, key, self.arch_of(task, me))))

    def _state(self, model: Model) -> State:
        return State(model.arch, chosen_part(model, all_but(self.shared_choice(model.arch))))

    def client_round(
        self, state: State, down: Part, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Up, Report]]:
        trained = yield from self.trained(self.joined(state, down), data, when, key)
        model = trained.models["own"]
        return self._state(model), Up(self.shared_part(model), told_samples(self.weighting, data)), Report(trained.losses)

    def models(self, state: State, delivery: Part, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": self.joined(state, delivery)})

    def offers(self, server: Part, task: Task, key: Key) -> dict[str, Model]:
        """The shared part, completed by random weights."""
        return {"global": self.joined(self._state(Model.init(task.shared, key.at("newcomer"), task.dtype)), server)}

    def visible_models(self, message: Part | Up, task: Task) -> Iterator[tuple[str, Model]]:
        state = self._state(Model.init(task.shared, Key(0), task.dtype))
        if not state.own.params:  # a part of the weights cannot be evaluated
            yield "part", self.joined(state, message.part if isinstance(message, Up) else message)
