"""FedProto: clients of any architecture share prototypes, the mean features of their samples of each class.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
Algorithm 1: a client sends the mean of its features over its samples of every class. The server averages these prototypes class
by class, weighted by the numbers of samples. A client minimises the cross-entropy plus lam times the distance between the
feature of a sample and the prototype of its class. Bodies may differ, if their features have one width.

Deviations: as in the authors' code, the feature of every sample is compared with the prototype, by the mean squared error over
its entries (the equation compares prototypes). As in the algorithm, means are of the features that were seen while training,
before every step; `means = "trained"` takes those of the trained model for all training samples, in evaluation mode. The
equation for the server divides by the number of clients once more, which would shrink prototypes; it is read as a weighted
mean. A class that nobody sent in a round keeps its prototype. Features are the inputs of the last linear layer. The personal
model predicts by its head; with `predict = "prototype"` by the nearest prototype, as in the paper.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Method, Plan, Report, Round, Task, TaskError
from fedme.core.model import Arch, Model
from fedme.core.operations import Collect, Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.class_means import ClassMeans, ClassTargets, class_means, combined, means_seen, outputs_on
from fedme.learning.features import feature_width, require_head_bias, widened, with_prototypes
from fedme.learning.objectives import TowardsPrototype
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require


@dataclass(frozen=True)
class State:
    """A client's own model."""

    model: Model


@dataclass(frozen=True)
class FedProto(Method[ClassTargets, State, ClassTargets, ClassMeans]):
    """Clients of any architecture share the mean features of their samples of each class."""

    train: Training = field(default_factory=Training)
    lam: float = setting(1.0, "lambda: weight of the distance between features and prototypes")
    weighting: Literal["samples", "uniform"] = setting("samples", "weights of the mean: samples of the class, or equal")
    means: Literal["training", "trained"] = setting(
        "training", "what means are of: features while training, or of the trained model"
    )
    predict: Literal["head", "prototype"] = setting(
        "head", "what the personal model predicts by: its head, or the nearest prototype"
    )
    defence: Defence = OPEN

    paper = (
        "Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang and C. Zhang, "
        '"FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, arXiv:2105.00243'
    )
    own_architectures = True
    not_by_name = "no weights travel"
    uses_shared_model = False
    classes_only = True
    travels = "mean features per class, and the numbers of samples"
    unused_settings = ("defence.guest", "defence.norm")
    not_private = "its clients send mean features of their training samples, without noise, and the sizes of their classes"
    nothing_to_offer = "its clients share mean features, not models; run it again with the new client among them"
    nothing_to_audit = "its clients share mean features of their classes, not models that could be evaluated on other samples"

    def __post_init__(self) -> None:
        require(self.lam >= 0, "lam", f"must be >= 0, got {self.lam}")

    def check(self, task: Task) -> None:
        super().check(task)
        first = self._first_arch(task)
        for client, member in task.members.items():
            if (width := feature_width(member.arch)) != (wanted := feature_width(first)):
                raise TaskError(
                    f"client {client} cannot share prototypes: {member.arch.name} has {width} features, the inputs of its last "
                    f"linear layer, expected {wanted} as in {first.name}; use networks whose last layers have as many inputs"
                )
            if self.predict == "prototype":
                require_head_bias(member.arch, client)

    def _first_arch(self, task: Task) -> Arch:
        """The architecture that says how wide prototypes are: the first client's, or the shared one if clients join later."""
        return task.shared if task.open else next(iter(task.members.values())).arch

    def init_server(self, task: Task, key: Key) -> ClassTargets:
        return ClassTargets.none(len(task.schema.classes), feature_width(self._first_arch(task)), task.dtype)

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        return immediately(State(task.first_model(me, key)))

    def dispatch(
        self, task: Task, server: ClassTargets, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, ClassTargets]]:
        return immediately(dict.fromkeys(plan.train, server))

    def client_round(
        self, state: State, down: ClassTargets, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, ClassMeans, Report]]:
        optimizer = self.train.local_optimizer(TowardsPrototype(down.means, down.known, self.lam), when)
        own, schedule = {"own": widened(state.model)}, self.train.batch_schedule(when)
        classes, width = down.means.shape
        collect = Collect(classes) if self.means == "training" else None
        trained = yield from train(own, optimizer, data.train, schedule, key.at("train"), collect=collect)
        model = trained.models["own"]
        if collect is not None:
            up = means_seen(trained.seen.get("own"), classes, width, model.dtype, first=classes)
        else:
            features = (yield from outputs_on(model, data.train, classes + width))[:, classes:]
            up = class_means(features, data.train.y, classes)
        return State(Model(state.model.arch, model.params, model.buffers)), up, Report(trained.losses)

    def expects(self, task: Task, down: ClassTargets, up: ClassMeans, when: Round) -> dict[str, Tensor]:
        up.require_possible(2**40)
        return {"means": down.means, "counts": down.known.long()}

    def aggregate(self, server: ClassTargets, replies: Mapping[ClientId, ClassMeans], when: Round, key: Key) -> ClassTargets:
        return combined(list(replies.values()), self.weighting, self.defence, server)

    def deliver(self, task: Task, server: ClassTargets, client: ClientId) -> ClassTargets:
        return server

    def models(self, state: State, delivery: ClassTargets, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        by_prototype = self.predict == "prototype" and bool(delivery.known.any())
        return immediately(
            {"personal": with_prototypes(state.model, delivery.means, delivery.known) if by_prototype else state.model}
        )
