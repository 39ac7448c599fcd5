"""PFML: a local model near the global one and an auxiliary model near its past learn from each other.

Yang, Tian and Zhang, "Regularized Mutual Learning for Personalized Federated Learning" (ACML 2021), sections 4.2 and 4.3:
Eq. 4 to 11, Algorithm 1. Only the local model travels; the personal model is theta, the last inner copy of the auxiliary
model, which may have an architecture of its own.

Deviations: the sign of Eq. 8 is printed wrong: the gradient of lam/2 |m_prev - m|^2 is lam (m - m_prev). The auxiliary model
persists between rounds (Eq. 6) where Algorithm 1 resets it: ``aux = "reset"`` is Algorithm 1 as printed, "anchored" starts
from the global model but is pulled to the last auxiliary model. At a client's first participation the papers give no auxiliary
model: it is the received global model, or a fresh random one if the client has its own architecture. All clients train, the
cohort's models are averaged (`train_all`), as in the code base the paper builds on. The inner rate is `train.lr` unless
`inner_lr` is given; `l2` is 0 unless given: the paper (section 5.1) calls its logistic regression l2-regularised without saying
how much; pFedMe's 1e-3 is in the presets. Momentum, weight decay and clipping of [train] are not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Report, Round, Task, TaskError
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.optimizers import MutualMoreau
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, TrainAllMethod, TrainRequest, averaged


@dataclass(frozen=True)
class State:
    """What never leaves a client: the auxiliary model (None: not started yet) and the personal model theta."""

    aux: Model | None
    theta: Model | None


@dataclass(frozen=True)
class PFML(TrainAllMethod[State, SharedModel]):
    """Regularised mutual learning of a shared local model and a private auxiliary one."""

    train: Training = field(default_factory=Training)
    lam: float = setting(15.0, "lambda: the pull of both regularisers")
    inner_steps: int = setting(3, "K")
    inner_lr: float | None = setting(None, "train.lr by default")
    beta: float = setting(1.0, "the server's step towards the mean")
    l2: float | tuple[float, float] = setting(
        0.0, "l2 regularisation; a pair: of the local, of the auxiliary model (the paper regularises logistic regression only)"
    )
    aux: Literal["persistent", "anchored", "reset"] = setting("persistent", "what the auxiliary model starts from in a round")
    train_all: bool = setting(True, "clients outside the cohort train too, without sending anything")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = 'R. Yang, J. Tian and Y. Zhang, "Regularized Mutual Learning for Personalized Federated Learning", ACML 2021'
    hides_samples = True
    not_by_name = ""
    own_architectures = True
    own_step = True
    unused_settings = ("train.momentum", "train.nesterov", "train.weight_decay", "train.clip", "defence.guest")

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", f"must be >= 0, got {self.lam}")
        require(self.inner_steps >= 1, "inner_steps", f"must be >= 1, got {self.inner_steps}")
        require(self.inner_lr is None or self.inner_lr > 0, "inner_lr", f"must be > 0, got {self.inner_lr}")
        require(self.beta > 0, "beta", f"must be > 0, got {self.beta}")

    def check(self, task: Task) -> None:
        super().check(task)
        odd = sorted(m.id for m in task.members.values() if m.arch != task.shared)
        if odd and self.aux != "persistent":
            raise TaskError(
                f"method 'pfml' with aux = '{self.aux}' starts the auxiliary model from the global one ({task.shared.name}), "
                f"but these clients have another architecture: {', '.join(odd)}. Use aux = 'persistent'."
            )

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        arch = task.members[me].arch
        own = task.first_model(me, key, arch) if arch != task.shared else None
        return immediately(State(own, own))

    def client_round(
        self, state: State, down: TrainRequest, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, SharedModel | None, Report]]:
        last = state.aux or down.model
        anchor = down.model if self.aux == "reset" else last
        start = last if self.aux == "persistent" else down.model
        lr = self.train.lr_at(when)
        l2, aux_l2 = self.l2 if isinstance(self.l2, tuple) else (self.l2, None)
        trained = yield from train(
            {"aux": start, "local": down.model, "theta": start},
            MutualMoreau(lr, self.inner_lr or lr, self.lam, self.inner_steps, l2, aux_l2=aux_l2),
            data.train,
            self.train.batch_schedule(when),
            key.at("train"),
            frozen={"aux": anchor, "local": down.model},
        )
        up = SharedModel(trained.models["local"]) if down.counts else None
        return State(trained.models["aux"], trained.models["theta"]), up, Report(trained.losses)

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, SharedModel], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, None, self.defence, self.beta)

    def models(self, state: State, delivery: TrainRequest, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.theta or delivery.model, "global": delivery.model})

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples, gradients=self.inner_steps + 1)]
