"""Ditto: every client has a personal model that is pulled towards the model of FedAvg.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Eq. (Ditto) and
Algorithm 1: v_i minimises F_i(v) + lam/2 |v - w|^2. In a round the client trains a copy of the received model w on F_i, and
its personal model v_i with the pull towards w as it was received. Only the copy of w travels; v_i stays at the client.

Deviations: the pull enters the gradient before clipping and momentum. The personal model takes `personal_epochs`, or as many
steps as [train] says by default, on batches of its own and with a new optimizer in every round. The first personal model has
random weights of its own; the authors start it from the first shared model, which is `models.same_start = true`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import BatchSchedule, Computation, Models, immediately, in_parallel, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, SharedModelMethod, TrainedCopy, averaged, sample_counts, told_samples


@dataclass(frozen=True)
class State:
    """A client's personal model v_i."""

    personal: Model


@dataclass(frozen=True)
class Ditto(SharedModelMethod[State, SharedModel, TrainedCopy]):
    """Every client has a personal model that is pulled towards the model of FedAvg."""

    train: Training = field(default_factory=Training)
    lam: float = setting(1.0, "lambda: weight of the pull of the personal model towards the shared one")
    personal_epochs: int | None = setting(None, "epochs of the personal model per round; as in [train] by default")
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        "T. Li, S. Hu, A. Beirami and V. Smith, "
        '"Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, arXiv:2012.04221'
    )
    not_by_name = ""

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", f"must be >= 0, got {self.lam}")
        epochs = self.personal_epochs
        require(epochs is None or epochs >= 1, "personal_epochs", f"must be >= 1, got {epochs}")

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State(task.first_model(me, key, None if self.shared else task.shared)))

    def client_round(
        self, state: State, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, TrainedCopy, Report]]:
        descent = self.train.local_optimizer(CrossEntropy(), when)
        pulled = self.train.local_optimizer(CrossEntropy(), when, prox=self.lam)
        shared, personal = yield from in_parallel(
            [
                train({"global": down.model}, descent, data.train, self.train.batch_schedule(when), key.at("train")),
                train(
                    {"own": state.personal},
                    pulled,
                    data.train,
                    self._personal_schedule(when),
                    key.at("personal"),
                    frozen={"own": down.model},
                ),
            ]
        )
        up = TrainedCopy(shared.models["global"], told_samples(self.weighting, data))
        return State(personal.models["own"]), up, Report({**shared.losses, **personal.losses})

    def _personal_schedule(self, when: Round | None = None) -> BatchSchedule:
        if self.personal_epochs is None:
            return self.train.batch_schedule(when)
        return self.train.whole_epochs(self.personal_epochs)

    def aggregate(self, server: SharedModel, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> SharedModel:
        return averaged(server, replies, sample_counts(replies) if self.weighting == "samples" else None, self.defence)

    def models(self, state: State, delivery: SharedModel, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.personal, "global": delivery.model})

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        schedules = (self.train.batch_schedule(), self._personal_schedule())
        return [PlannedTraining(schedule, samples) for schedule in schedules]
