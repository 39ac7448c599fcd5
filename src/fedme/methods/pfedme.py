"""pFedMe: a personal model near a global one, by Moreau envelopes.

Dinh et al. 2020, Algorithm 1: F_i(w) = min over theta of f_i(theta) + lam/2 |theta - w|^2. On each mini-batch a client
takes K steps of theta, then moves its copy of w towards theta; the server moves w towards the mean of the copies by
`beta`.

Deviations: the authors' code is followed where it differs from the paper: theta is set to w once a round and then
continued, every client trains in every round and only the cohort's copies are averaged (`train_all`), weighted by
samples, and `l2` regularises theta. Batches are shuffled; the authors' fixed order is `train.shuffle = false`.
Momentum, weight decay and clipping of [train] are not used. Inner and outer rates: `inner_lr`, `train.lr`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedme.core import tree
from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Plan, Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately, train
from fedme.learning.local_training import Training, require
from fedme.learning.optimizers import Moreau
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.methods.fedavg import Shared, Up


@dataclass(frozen=True)
class Down:
    """The global model, and whether the client's reply counts: otherwise it trains for its own sake and sends nothing."""

    model: Model
    counts: bool = False


@dataclass(frozen=True)
class State:
    """A client's personal model theta, once it has trained."""

    theta: Model | None = None


@dataclass(frozen=True)
class PFedMe:
    """Personal models tied to a global one by Moreau envelopes."""

    train: Training = field(default_factory=Training)
    lam: float = 15.0  # lambda: how close theta stays to w
    inner_steps: int = 5  # K
    inner_lr: float | None = None  # eta_p; train.lr by default
    beta: float = 1.0  # the server's step towards the mean
    l2: float = 1e-3  # mu
    train_all: bool = True  # clients outside the cohort train too, for their own sake
    defence: Defence = OPEN

    phases = ("round",)
    pooled = False
    own_architectures = False

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", f"must not be negative, not {self.lam}")
        require(self.inner_steps >= 0, "inner_steps", f"must not be negative, not {self.inner_steps}")
        require(self.inner_lr is None or self.inner_lr > 0, "inner_lr", f"must be positive, not {self.inner_lr}")
        require(self.beta > 0, "beta", f"must be positive, not {self.beta}")

    def check(self, task: Task) -> None:
        task.require_common_classes("pfedme")

    def init_server(self, task: Task, key: Key) -> Shared:
        return Shared(Model.init(task.shared, key.at("shared"), task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State())

    def plan(self, server: Shared, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        return self.train.plan(present, key, self.train_all)

    def dispatch(self, task: Task, server: Shared, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Down]]:
        return immediately({client: Down(server.model, client in plan.count) for client in plan.train})

    def client_round(
        self, state: State, down: Down, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Up | None, Report]]:
        lr = self.train.lr_at(when)
        optimizer = Moreau(lr, self.inner_lr or lr, self.lam, self.inner_steps, self.l2)
        start = {"theta": down.model, "w": down.model}
        trained = yield from train(start, optimizer, data.train, self.train.batch_schedule(when), key.at("train"))
        up = Up(trained.models["w"], len(data.train)) if down.counts else None
        return State(trained.models["theta"]), up, Report(trained.losses)

    def aggregate(self, server: Shared, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Shared:
        if not replies:
            return server
        weights = [up.samples for up in replies.values()]
        mean = average([up.model for up in replies.values()], weights, self.defence.combine)
        return Shared(mean.with_params(tree.mix(mean.params, server.model.params, self.beta)))

    def deliver(self, task: Task, server: Shared, client: ClientId) -> Down:
        return Down(server.model)

    def models(self, state: State, delivery: Down, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.theta or delivery.model, "global": delivery.model})
