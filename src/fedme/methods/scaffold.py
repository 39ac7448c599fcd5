"""SCAFFOLD: FedAvg whose clients correct every gradient by how their data differ from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II: client i takes K steps y <- y - eta (g_i(y) - c_i + c) from the received model x, then sets
c_i to c_i - c + (x - y) / (K eta). The server moves x by eta_g times the mean of y - x, and c by the sum of the changes of c_i
divided by the number of clients N. All control variates c and c_i begin at zero.

Deviations: the changes of c_i do not travel. The server computes them from y, which it gets anyway, and from K, which follows
from the client's number of samples: a message has half the size. N is the number of clients when the run begins. The correction
enters the gradient before clipping and momentum. Buffers are averaged as in FedAvg, without eta_g.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Computation, immediately, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, SharedModelMethod, TrainedCopy, averaged, sample_counts


@dataclass(frozen=True)
class Controlled(SharedModel):
    """The shared model x with the server's control variate c, and the number of clients N: the server's state and message."""

    variate: tree.Params
    clients: int


@dataclass(frozen=True)
class State:
    """A client's control variate c_i: about its mean gradient."""

    variate: tree.Params


@dataclass(frozen=True)
class SCAFFOLD(SharedModelMethod[State, Controlled, TrainedCopy]):
    """FedAvg whose clients correct every gradient by how their data differ from everybody's."""

    train: Training = field(default_factory=Training)
    server_lr: float = setting(1.0, "eta_g: the server's step towards the mean of the trained copies")
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    defence: Defence = OPEN

    paper = (
        "S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich and A. T. Suresh, "
        '"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, arXiv:1910.06378'
    )
    own_step = True
    not_by_name = "the control variates of client and server are those of all weights"
    travels = "copies of one model; a control variate comes back with it"

    def __post_init__(self) -> None:
        require(self.server_lr > 0, "server_lr", f"must be > 0, got {self.server_lr}")

    def init_server(self, task: Task, key: Key) -> Controlled:
        model = super().init_server(task, key).model
        return Controlled(model, tree.zeros(model.params), len(task.members))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State(tree.zeros(Model.init(task.shared, Key(0), task.dtype).params)))

    def client_round(
        self, state: State, down: Controlled, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, TrainedCopy, Report]]:
        optimizer = self.train.local_optimizer(CrossEntropy(), when, shift=True)
        shift = {"global": Model(down.model.arch, tree.sub(down.variate, state.variate), {})}
        trained = yield from train(
            {"global": down.model}, optimizer, data.train, self._schedule(len(data.train), when), key.at("train"), frozen=shift
        )
        y, samples = trained.models["global"], len(data.train)
        if samples:
            state = State(tree.add(state.variate, self._change(down, y, samples, when)))
        return state, TrainedCopy(y, samples), Report(trained.losses)

    def _schedule(self, samples: int, when: Round) -> BatchSchedule:
        """The batches of a round, by their number K: client and server must agree on it, also with Poisson sampling."""
        schedule = self.train.batch_schedule(when)
        return replace(schedule, steps=schedule.count(samples))

    def _change(self, sent: Controlled, y: Model, samples: int, when: Round) -> tree.Params:
        """By how much the control variate of a client changes that got `sent` and trained it to `y`, option II."""
        moved = tree.sub(sent.model.params, y.params)
        return tree.sub(
            tree.scale(moved, 1 / (self._schedule(samples, when).count(samples) * self.train.lr_at(when))), sent.variate
        )

    def aggregate(  # type: ignore[override]
        self, server: Controlled, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key
    ) -> Controlled:
        if not replies:
            return server
        weights = sample_counts(replies) if self.weighting == "samples" else None
        model = averaged(server, replies, weights, self.defence, self.server_lr).model
        changes = [self._change(server, up.model, up.samples, when) for up in replies.values()]
        change = self.defence.combine(changes, [1 / len(changes)] * len(changes))
        return replace(server, model=model, variate=tree.add(server.variate, change, len(changes) / server.clients))

    def hints(self, has_unlabeled: bool) -> list[str]:
        momentum = self.train.momentum
        return (
            [f"with train.momentum = {momentum:g} control variates are {1 / (1 - momentum):.3g} times a gradient"]
            if momentum
            else []
        )

    def disclosures(self) -> list[str]:
        return ["a client's number of samples (its number of steps, and with method.weighting its weight in the mean)"]
