"""pFedMe: a personal model near a global one, by Moreau envelopes.

Dinh et al. 2020, Algorithm 1: F_i(w) = min over theta of f_i(theta) + lam/2 |theta - w|^2. On each mini-batch a client takes K
steps of theta, then moves its copy of w towards theta; the server moves w towards the mean of the copies by `beta`.

Deviations: the authors' code is followed where it differs from the paper: theta is set to w once per round and then
continued, every client trains in every round and only the cohort's copies are averaged (`train_all`), weighted by
samples, and `l2` regularises theta. Batches are shuffled; the authors' fixed order is `train.shuffle = false`.
Momentum, weight decay and clipping of [train] are not used. Inner and outer rates: `inner_lr`, `train.lr`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.optimizers import Moreau
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, TrainAllMethod, TrainedCopy, TrainRequest, averaged, sample_counts


@dataclass(frozen=True)
class State:
    """A client's personal model theta, once it has trained."""

    theta: Model | None = None


@dataclass(frozen=True)
class PFedMe(TrainAllMethod[State, TrainedCopy]):
    """Personal models tied to a global one by Moreau envelopes."""

    train: Training = field(default_factory=Training)
    lam: float = setting(15.0, "lambda: how close theta stays to w")
    inner_steps: int = setting(5, "K")
    inner_lr: float | None = setting(None, "eta_p; train.lr by default")
    beta: float = setting(1.0, "the server's step towards the mean")
    l2: float = setting(1e-3, "mu")
    train_all: bool = setting(True, "clients outside the cohort train too, without sending anything")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        "C. T. Dinh, N. H. Tran and T. D. Nguyen, "
        '"Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, arXiv:2006.08848'
    )
    not_by_name = ""
    hides_samples = True
    own_step = True
    unused_settings = ("train.momentum", "train.nesterov", "train.weight_decay", "train.clip", "defence.guest")

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", f"must be >= 0, got {self.lam}")
        require(self.inner_steps >= 0, "inner_steps", f"must be >= 0, got {self.inner_steps}")
        require(self.inner_lr is None or self.inner_lr > 0, "inner_lr", f"must be > 0, got {self.inner_lr}")
        require(self.beta > 0, "beta", f"must be > 0, got {self.beta}")

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State())

    def client_round(
        self, state: State, down: TrainRequest, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, TrainedCopy | None, Report]]:
        lr = self.train.lr_at(when)
        optimizer = Moreau(lr, self.inner_lr or lr, self.lam, self.inner_steps, self.l2)
        start = {"theta": down.model, "w": down.model}
        trained = yield from train(start, optimizer, data.train, self.train.batch_schedule(when), key.at("train"))
        up = TrainedCopy(trained.models["w"], len(data.train)) if down.counts else None
        return State(trained.models["theta"]), up, Report(trained.losses)

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, sample_counts(replies), self.defence, self.beta)

    def models(self, state: State, delivery: TrainRequest, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.theta or delivery.model, "global": delivery.model})

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples, gradients=max(1, self.inner_steps))]
