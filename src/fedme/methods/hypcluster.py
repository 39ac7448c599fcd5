"""HypCluster: the server keeps several models, each client trains the one that fits its training data best.

Mansour et al. 2020 (hypothesis-based clustering); in the FedMe papers section 5.1.3 with two clusters.

Deviations: the best model is the one with the smallest training loss (ties to the first), where the FedMe text says highest
accuracy; a true argmin, where the released notebook takes the last model that beats the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, Report, Round, Task
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, evaluate_each, immediately, train
from fedme.core.settings import setting
from fedme.core.typed import TypedError
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require


@dataclass(frozen=True)
class Hypotheses:
    """All cluster models: the server's state and the message down."""

    models: tuple[Model, ...]


@dataclass(frozen=True)
class Up:
    """Which cluster the client chose, and its trained model."""

    cluster: int
    model: Model
    samples: int


@dataclass(frozen=True)
class HypCluster(Method[Hypotheses, Empty, Hypotheses, Up]):
    """Several global models; each client trains the one that fits it best."""

    train: Training = field(default_factory=Training)
    clusters: int = setting(2, "global models")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        "Y. Mansour, M. Mohri, J. Ro and A. T. Suresh, "
        '"Three Approaches for Personalization with Applications to Federated Learning", 2020, arXiv:2002.10619'
    )
    not_by_name = ""
    hides_samples = True
    travels = "copies of one of several models"
    reads_training_scores = True
    offer_chosen_on = "train"

    def __post_init__(self) -> None:
        require(self.clusters >= 1, "clusters", f"must be >= 1, got {self.clusters}")

    def init_server(self, task: Task, key: Key) -> Hypotheses:
        # The first model starts as FedAvg's does, so that one cluster is FedAvg.
        keys = [key.at("shared")] + [key.at("shared", k) for k in range(1, self.clusters)]
        return Hypotheses(tuple(Model.init(task.shared, fresh, task.dtype) for fresh in keys))

    def dispatch(
        self, task: Task, server: Hypotheses, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, Hypotheses]]:
        return immediately(dict.fromkeys(plan.train, server))

    def client_round(
        self, state: Empty, down: Hypotheses, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, Up, Report]]:
        k = yield from best(down.models, data)
        trained = yield from train(
            {"global": down.models[k]},
            self.train.local_optimizer(CrossEntropy(), when),
            data.train,
            self.train.batch_schedule(when),
            key.at("train"),
        )
        return state, Up(k, trained.models["global"], len(data.train)), Report(trained.losses, notes={"cluster": k})

    def expects(self, task: Task, down: Hypotheses, up: Up, when: Round) -> dict[str, Model]:
        if not 0 <= up.cluster < len(down.models):
            raise TypedError("cluster", f"must be from 0 to {len(down.models) - 1}, got {up.cluster}")
        return {"model": down.models[up.cluster]}

    def aggregate(self, server: Hypotheses, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Hypotheses:
        models = list(server.models)  # a cluster without members keeps its model
        for k in range(len(models)):
            members = [up for up in replies.values() if up.cluster == k]
            if members:
                models[k] = average([up.model for up in members], [up.samples for up in members], self.defence.combine)
        return Hypotheses(tuple(models))

    def averaged_with(self, up: Up) -> int:
        return up.cluster

    def deliver(self, task: Task, server: Hypotheses, client: ClientId) -> Hypotheses:
        return server

    def models(self, state: Empty, delivery: Hypotheses, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        k = yield from best(delivery.models, data)
        return {"personal": delivery.models[k]}

    def disclosures(self) -> list[str]:
        return ["which cluster a client chooses (decided on its training samples, without noise)"]

    def offers(self, server: Hypotheses, task: Task, key: Key) -> dict[str, Model]:
        return {f"cluster {k}": model for k, model in enumerate(server.models)}


def best(models: Sequence[Model], data: ClientData) -> Computation[int]:
    """The index of the model with the smallest training loss; NaN never wins."""
    scores = yield from evaluate_each(models, data.train)
    return min(range(len(models)), key=lambda k: (scores[k].loss != scores[k].loss, scores[k].loss, k))
