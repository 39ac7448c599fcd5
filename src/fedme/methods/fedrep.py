"""FedRep: clients share a representation, and each client has a head of its own that is fitted to it first.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1: a client takes tau steps of its head with the received body fixed, then steps of the body with the new head fixed;
the server averages the bodies.

Deviations: steps are epochs (`head_epochs`, `body_epochs`), so `train.epochs` and `train.steps` are not used. Each phase has
a new optimizer. A frozen layer with batch normalisation keeps its weights but updates its running statistics. As in FedPer, the
head is the last linear layer unless `personal` names other layers.
"""

from dataclasses import dataclass
from typing import Literal

from fedme.core.data import ClientData
from fedme.core.key import Key
from fedme.core.method import PlannedTraining, Round
from fedme.core.model import Model
from fedme.core.operations import Computation, Trained, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import require
from fedme.methods.fedper import FedPer


@dataclass(frozen=True)
class FedRep(FedPer):
    """Clients share a representation, and each client fits a head of its own to it before it trains the representation."""

    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or numbers of training samples")
    head_epochs: int = setting(5, "epochs of the head per round, with the body fixed")
    body_epochs: int = setting(1, "epochs of the body per round, with the head fixed")

    paper = (
        "L. Collins, H. Hassani, A. Mokhtari and S. Shakkottai, "
        '"Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, arXiv:2102.07078'
    )
    unused_settings = ("train.epochs", "train.steps", "defence.guest")

    def __post_init__(self) -> None:
        for name in ("head_epochs", "body_epochs"):
            require(getattr(self, name) >= 0, name, f"must be >= 0, got {getattr(self, name)}")
        require(self.head_epochs + self.body_epochs > 0, "head_epochs", "must be >= 1 if body_epochs is 0")

    def trained(self, model: Model, data: ClientData, when: Round, key: Key) -> Computation[Trained]:
        body = tuple(filter(self.shared_choice(model.arch), model.params))
        head = tuple(name for name in model.params if name not in body)
        optimizer, losses = self.train.local_optimizer(CrossEntropy(), when), dict[str, float]()
        for phase, moving, fixed, epochs in (("head", head, body, self.head_epochs), ("body", body, head, self.body_epochs)):
            if epochs and moving:
                schedule = self.train.whole_epochs(epochs)
                frozen = {phase: model.frozen(fixed)}
                trained = yield from train(frozen, optimizer, data.train, schedule, key.at(phase))
                model, losses = trained.models[phase].thawed(fixed), {**losses, **trained.losses}
        return Trained({"own": model}, {}, losses)

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        epochs = (self.head_epochs, self.body_epochs)
        return [PlannedTraining(self.train.whole_epochs(count), samples) for count in epochs if count]
