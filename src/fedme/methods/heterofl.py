"""HeteroFL: clients train slices of one wide network, as wide as they can afford; the server averages weight by weight.

Diao, Ding and Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR
2021, Algorithm 1: client i gets the leading rows and columns of every layer of the global model, as many as its width has, and
trains them. Every weight of the global model becomes the mean over the clients whose slice has it. Scalers divide the outputs
of hidden layers by the client's width while training. With masked cross-entropy the logits of classes that a client does not
have are zero, and the rows of the head are averaged over the clients that have the class.

Deviations: the widest network is the largest one that a client has (`models.shared` in a deployment, which all others must be
slices of). A layer's rate is its own number of units by that of the widest network. Widths do not change from round to round.
Static batch normalisation: running statistics are not kept in training and not sent, and are estimated when a model is wanted;
by every client on its own training samples, where the paper adds up those of all clients. With `static_bn = false` they are
averaged like weights; those of a narrow client are then of outputs that its scalers have divided.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, Report, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation, Models, Objective, estimate_statistics, immediately, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy, MaskedCrossEntropy
from fedme.learning.partial_model import head_of
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training
from fedme.learning.width_slices import narrowed, rates, region, require_slice, scaled
from fedme.methods.shared_model import SharedModel


@dataclass(frozen=True)
class Slice(SharedModel):
    """A client's slice of the global model, and the rates of its scalers."""

    rates: Mapping[str, float]


@dataclass(frozen=True)
class TrainedSlice(SharedModel):
    """A trained slice, and which classes the client has."""

    classes: Tensor


@dataclass(frozen=True)
class HeteroFL(Method[SharedModel, Empty, Slice, TrainedSlice]):
    """Clients train slices of one wide network, as wide as they can afford."""

    train: Training = field(default_factory=Training)
    masked: bool = setting(True, "logits of classes that a client does not have are zero, and their weights are not averaged")
    scalers: bool = setting(True, "divide the outputs of hidden layers by the width while training")
    static_bn: bool = setting(
        True, "batch normalisation: clients estimate statistics on their own samples and do not send them"
    )
    defence: Defence = OPEN

    paper = (
        "E. Diao, J. Ding and V. Tarokh, "
        '"HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR 2021, '
        "arXiv:2010.01264"
    )
    own_architectures = True
    not_by_name = "it sends slices by width"
    uses_shared_model = False
    classes_only = True
    travels = "slices of one wide model, and which classes they have"
    not_private = "its clients send which classes their training samples have, without noise"

    def check(self, task: Task) -> None:
        super().check(task)
        for client, member in task.members.items():
            require_slice(member.arch, self._widest(task), client)

    def _widest(self, task: Task) -> Arch:
        if task.open:
            return task.shared
        return max((member.arch for member in task.members.values()), key=lambda arch: arch.parameters)

    def init_server(self, task: Task, key: Key) -> SharedModel:
        return SharedModel(Model.init(self._widest(task), key.at("shared"), task.dtype))

    def dispatch(
        self, task: Task, server: SharedModel, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, Slice]]:
        return immediately({client: self.deliver(task, server, client) for client in plan.train})

    def deliver(self, task: Task, server: SharedModel, client: ClientId) -> Slice:
        arch = task.members[client].arch
        return Slice(narrowed(server.model, arch), rates(arch, server.model.arch) if self.scalers else {})

    def client_round(
        self, state: Empty, down: Slice, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, TrainedSlice, Report]]:
        count = len(down.model.params[f"{head_of(down.model.arch)}weight"])
        present = torch.bincount(data.train.y, minlength=count) > 0
        unmasked = not self.masked or bool(present.all())
        loss: Objective = CrossEntropy() if unmasked else MaskedCrossEntropy(tuple(present.tolist()))
        optimizer, schedule = self.train.local_optimizer(loss, when), self.train.batch_schedule(when)
        received = {"global": scaled(down.model, down.rates)}
        trained = yield from train(received, optimizer, data.train, schedule, key.at("train"))
        model = trained.models["global"]
        buffers = down.model.buffers if self.static_bn else model.buffers
        up = TrainedSlice(Model(down.model.arch, model.params, buffers), present)
        return state, up, Report(trained.losses)

    def expects(self, task: Task, down: Slice, up: TrainedSlice, when: Round) -> dict[str, Tensor]:
        return {"classes": torch.zeros(len(task.schema.classes), dtype=torch.bool)}

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedSlice], when: Round, key: Key) -> SharedModel:
        if not replies:
            return server
        widest, ups = server.model, list(replies.values())
        head = head_of(widest.arch)
        params, buffers = (
            {
                name: self._mean(value, [getattr(up.model, of)[name] for up in ups], ups, name.startswith(head))
                for name, value in old
            }
            for of, old in (("params", widest.params.items()), ("buffers", widest.buffers.items()))
        )
        return SharedModel(Model(widest.arch, params, buffers))

    def _mean(self, old: Tensor, slices: list[Tensor], ups: list[TrainedSlice], by_class: bool) -> Tensor:
        """Every number's mean over the clients that have it; a number that nobody has stays."""
        if not old.is_floating_point():
            return slices[0]
        values = old.new_zeros((len(slices), *old.shape))
        known = torch.zeros(values.shape, dtype=torch.bool)
        for i, (value, up) in enumerate(zip(slices, ups, strict=True)):
            values[i][region(value)] = value
            known[i][region(value)] = True
            if by_class and self.masked:
                known[i][~up.classes] = False
        return torch.where(known.any(0), self.defence.middle_of_known(values, known), old)

    def models(self, state: Empty, delivery: Slice, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        model = delivery.model
        if self.static_bn:
            model = yield from estimate_statistics(model, data.train)
        return {"personal": model, "global": model}

    def offers(self, server: SharedModel, task: Task, key: Key) -> dict[str, Model]:
        return {"global": server.model}
