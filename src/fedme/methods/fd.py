"""FD (federated distillation, FedDistill): clients share what they answer on average for samples of each class.

Jeong, Oh, Kim, Park, Bennis and Kim, "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, Algorithm 1: a client sends the mean Z_l of its outputs over its samples of
every class l. Its loss for a sample of class l is the cross-entropy plus gamma times the distance of its output from the mean
of Z_l over all other clients. Architectures are free.

Deviations: the distance is the mean squared error of logits; `distance = "cross-entropy"` is the paper's, with means of
probabilities. As in the paper, means are of the outputs that were seen while training, before every step;
`means = "trained"` takes those of the trained model for all training samples, in evaluation mode. A sample of a class that no
other client sent in the last round has the cross-entropy only. No augmentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Method, Plan, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Collect, Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.class_means import ClassMeans, ClassTargets, class_means, combined, means_seen, outputs_on
from fedme.learning.objectives import TowardsClass
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require


@dataclass(frozen=True)
class Server:
    """What the clients of the last round sent, and targets without anything known."""

    sent: Mapping[ClientId, ClassMeans]
    none: ClassTargets


@dataclass(frozen=True)
class State:
    """A client's own model."""

    model: Model


@dataclass(frozen=True)
class FD(Method[Server, State, ClassTargets, ClassMeans]):
    """Clients of any architecture share their mean outputs for samples of each class."""

    train: Training = field(default_factory=Training)
    gamma: float = setting(1.0, "weight of the distance from the others' mean output")
    distance: Literal["mse", "cross-entropy"] = setting("mse", "of logits, or of probabilities as in the paper")
    weighting: Literal["uniform", "samples"] = setting("uniform", "weights of the mean: equal, or samples of the class")
    means: Literal["training", "trained"] = setting(
        "training", "what means are of: outputs while training, or of the trained model"
    )
    defence: Defence = OPEN

    paper = (
        "E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis and S.-L. Kim, "
        '"Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID '
        'Private Data", 2018, arXiv:1811.11479'
    )
    own_architectures = True
    not_by_name = "no weights travel"
    uses_shared_model = False
    classes_only = True
    travels = "mean outputs per class, and the numbers of samples"
    unused_settings = ("defence.guest", "defence.norm")
    not_private = "its clients send mean outputs of their training samples, without noise, and the sizes of their classes"
    nothing_to_offer = "its clients share mean outputs, not models; run it again with the new client among them"
    nothing_to_audit = "its clients share mean outputs of their classes, not models that could be evaluated on other samples"

    def __post_init__(self) -> None:
        require(self.gamma >= 0, "gamma", f"must be >= 0, got {self.gamma}")

    def init_server(self, task: Task, key: Key) -> Server:
        classes = len(task.schema.classes)
        return Server({}, ClassTargets.none(classes, classes, task.dtype))

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State(task.first_model(me, key)))

    def dispatch(
        self, task: Task, server: Server, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, ClassTargets]]:
        return immediately({client: self.deliver(task, server, client) for client in plan.train})

    def deliver(self, task: Task, server: Server, client: ClientId) -> ClassTargets:
        others = [sent for other, sent in server.sent.items() if other != client]
        return combined(others, self.weighting, self.defence, server.none)

    def client_round(
        self, state: State, down: ClassTargets, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, ClassMeans, Report]]:
        loss = TowardsClass(down.means, down.known, self.gamma, self.distance)
        optimizer, schedule = self.train.local_optimizer(loss, when), self.train.batch_schedule(when)
        classes = len(down.known)
        collect = Collect(classes, self.distance == "cross-entropy") if self.means == "training" else None
        trained = yield from train({"own": state.model}, optimizer, data.train, schedule, key.at("train"), collect=collect)
        model = trained.models["own"]
        if collect is not None:
            up = means_seen(trained.seen.get("own"), classes, classes, model.dtype)
        else:
            up = class_means(self._shown((yield from outputs_on(model, data.train, classes))), data.train.y, classes)
        return State(model), up, Report(trained.losses)

    def _shown(self, logits: Tensor) -> Tensor:
        return logits if self.distance == "mse" else logits.softmax(-1)

    def expects(self, task: Task, down: ClassTargets, up: ClassMeans, when: Round) -> dict[str, Tensor]:
        up.require_possible(2**40)
        return {"means": down.means, "counts": down.known.long()}

    def aggregate(self, server: Server, replies: Mapping[ClientId, ClassMeans], when: Round, key: Key) -> Server:
        return Server(replies, server.none) if replies else server

    def models(self, state: State, delivery: ClassTargets, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.model})
