"""APFL: every client deploys a mixture of a model of its own and of FedAvg's, and learns how much of each.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1, with the adaptive alpha: for the
mixture m = alpha_i v_i + (1 - alpha_i) w_i, every step on a batch does

    w_i <- w_i - eta grad f_i(w_i),  v_i <- v_i - eta alpha_i grad f_i(m),  alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(m)>

with alpha_i clipped to [0, 1]; the server averages the w_i. v_i and alpha_i stay at the client.

Deviations: alpha moves in every step (`adapt = "step"`) by plain steps with the learning rate of the weights, whatever their
optimizer. The personal model mixes v_i with the newest shared model, which the client has received after the mean. v_i begins
with random weights of its own; `models.same_start = true` starts it from the first shared model. Running statistics: v_i's are
those that the mixture met in training, and the personal model mixes v_i's and w's like weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import ALPHA, Mixing
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, SharedModelMethod, TrainedCopy, averaged, sample_counts, told_samples


@dataclass(frozen=True)
class State:
    """A client's own model v_i, and its share in the mixture."""

    own: Model
    alpha: float


@dataclass(frozen=True)
class APFL(SharedModelMethod[State, SharedModel, TrainedCopy]):
    """Every client deploys a mixture of its own model and the shared one, and learns how much of each."""

    train: Training = field(default_factory=Training)
    alpha: float = setting(0.5, "share of a client's own model in its mixture, at the start")
    adapt: Literal["step", "round", "never"] = setting(
        "step", "when alpha moves: in every step, in the first step of every round, or never"
    )
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = 'Y. Deng, M. M. Kamani and M. Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461'
    not_by_name = ""

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, "alpha", f"must be between 0 and 1, got {self.alpha}")

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State(task.first_model(me, key, None if self.shared else task.shared), self.alpha))

    def client_round(
        self, state: State, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, TrainedCopy, Report]]:
        rule = self.train.local_optimizer(CrossEntropy(), when)
        optimizer, models = Mixing(rule.objective, rule, self.adapt), {"own": state.own, "global": down.model}
        trained = yield from train(
            models,
            optimizer,
            data.train,
            self.train.batch_schedule(when),
            key.at("train"),
            opt=optimizer.started(models, state.alpha),
        )
        alpha = next((trained.opt["own"][f"{name}{ALPHA}"].item() for name in state.own.params), state.alpha)
        up = TrainedCopy(trained.models["global"], told_samples(self.weighting, data))
        return State(trained.models["own"], alpha), up, Report(trained.losses, notes={"alpha": alpha})

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, sample_counts(replies) if self.weighting == "samples" else None, self.defence)

    def models(self, state: State, delivery: SharedModel, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": mixture(state, delivery.model), "global": delivery.model})


def mixture(state: State, shared: Model) -> Model:
    """The mixture alpha v + (1 - alpha) w; at the limits 0 and 1 the model itself."""
    if state.alpha in (0.0, 1.0):
        return state.own if state.alpha else shared
    return average([shared, state.own], [1 - state.alpha, state.alpha])
