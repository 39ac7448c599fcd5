"""FedMe: clients exchange models through the server, train their own and the guest together, and keep the better one.

"FedMe: Federated Learning via Model Exchange", Algorithm 1, Eq. 3 to 9. In a round the server clusters the clients' models by
their outputs on unlabeled data and sends every client a guest model of its cluster. The client trains both by deep mutual
learning and adopts the guest if it is better on its validation part. The server averages all trained copies of each model.

Deviations: adoption compares losses on the validation part, as in the authors' code (Eq. 7 says the local data); k-means
re-seeds empty clusters; copies that diverged are not sent back; a client whose cluster has no model within its
`max_parameters` gets one from another cluster. The copies that came back are averaged; an absent client keeps its model.
Choices by measured time (`adopt`) are not repeatable. Without unlabeled data all models are in one cluster. A cohort with
``tuning = false`` and fixed clusters is the first version of the paper. The server keeps personal models: each is uploaded once
per round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, PlannedTraining, Report, Round, Task, TaskError
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, evaluate_each, immediately, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.schedules import most, since
from fedme.learning.training_settings import Training, require
from fedme.methods.fedme.adoption import (
    CRITERIA,
    Candidate,
    Criterion,
    needs_time,
    prefers_guest,
    require_criteria,
    require_meaning,
)
from fedme.methods.fedme.clustering import clustered
from fedme.methods.fedme.exchange import acceptance, admitted_guest, averaged_copies, finite_or_none, lenders, require_lender


@dataclass(frozen=True)
class Server:
    """The personal models that have been trained. The others are drawn from `key` when they are needed."""

    models: Mapping[ClientId, Model]
    key: Key = Key(0)

    def model_of(self, client: ClientId, task: Task) -> Model:
        """A client's personal model."""
        return self.models.get(client) or task.first_model(client, self.key)


@dataclass(frozen=True)
class Down:
    """The client's personal model and, if there is one for it, a guest model with its owner and cluster."""

    own: Model
    guest: Model | None = None
    lender: ClientId | None = None
    cluster: int = 0


@dataclass(frozen=True)
class Up:
    """Both models after training, unless they diverged, and whether the client adopts the guest."""

    own: Model | None
    guest: Model | None
    lender: ClientId | None
    adopts: bool


@dataclass(frozen=True)
class FedMe(Method[Server, Empty, Down, Up]):
    """Clients of any architecture exchange models, learn mutually and keep the better model."""

    train: Training = field(default_factory=Training)
    clusters: int | Mapping[int, int] = setting(1, "K^t: number of clusters, or a table {from round = number}: {0 = 1, 15 = 2}")
    cluster_on: Literal["logits", "softmax"] = setting("logits", "outputs that clusters are made of; softmax: probabilities")
    tuning: bool = setting(True, "MT: a client adopts the guest model if it is better")
    mutual: bool = setting(True, "DML: own and guest model learn from each other, not only from the labels")
    clustering: bool = setting(True, "MC: guests come from models with similar outputs")
    adopt: str | Criterion = setting("loss", f"criterion of 'better': {', '.join(CRITERIA)}, or a cost function")
    adopt_by: Mapping[ClientId, str | Criterion] = setting(help="criteria of single clients", default_factory=dict)
    order: Literal["simultaneous", "alternating"] = setting("simultaneous", "whether own and guest step in turns")
    shared: str | tuple[str, ...] = setting((), SHARED)
    defence: Defence = OPEN

    paper = (
        'K. Matsuda, Y. Sasaki, C. Xiao and M. Onizuka, "FedMe: Federated Learning via Model Exchange", 2021, arXiv:2110.07868'
    )
    own_architectures = True
    uses_shared_model = False
    unused_settings = ()
    hides_samples = True
    not_by_name = ""
    travels = "their personal models, with each other"

    def kept_model(self, up: Up) -> Model | None:
        return up.guest if up.adopts else up.own

    def __post_init__(self) -> None:
        table = self.clusters if isinstance(self.clusters, Mapping) else {0: self.clusters}
        require(
            all(t >= 0 and k >= 1 for t, k in table.items()), "clusters", "rounds must be >= 0 and numbers of clusters >= 1"
        )
        own = {f"adopt_by.{client}": criterion for client, criterion in self.adopt_by.items()}
        require_criteria({"adopt": self.adopt} | own)

    def check(self, task: Task) -> None:
        super().check(task)
        if self.defence.average != "mean":
            # There are two copies for every client, its own and its guest: some model always has two or fewer.
            raise TaskError(
                f"defence.average: '{self.defence.average}' needs at least {self.defence.fewest} copies of a model, but method "
                f"'{self.name()}' averages two on average, one by its client and one by a borrower; use 'mean' with "
                f"defence.norm and defence.guest"
            )
        require_meaning(task, self.adopt, self.adopt_by)
        if self.exchanged and self.clustering and most(self.clusters) > 1 and task.unlabeled is not None:
            raise TaskError(
                "method.clusters: the server compares outputs of whole models, and with method.shared it has parts; set it to 1"
            )

    def init_server(self, task: Task, key: Key) -> Server:
        return Server({}, key)

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Empty]:
        if self.tuning and not len(data.val):
            raise TaskError(f"client {me} has no validation data to compare models on; set `val` in [data], or tuning = false")
        return immediately(Empty())

    def dispatch(self, task: Task, server: Server, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Down]]:
        count = since(self.clusters, when.t) if self.clustering else 1  # K^t
        cohort = {me: server.model_of(me, task) for me in plan.train}
        clusters = yield from clustered(cohort, task.unlabeled, count, self.cluster_on, key.at("cluster"))
        chosen = lenders(clusters, acceptance(task, cohort), key.at("exchange"))
        return {me: Down(cohort[me], cohort[lender] if lender else None, lender, clusters[me]) for me, lender in chosen.items()}

    def client_round(
        self, state: Empty, down: Down, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, Up, Report]]:
        taken, why = yield from admitted_guest(down.own, down.guest, data.val, self.defence)
        pair = {"own": down.own, "guest": taken} if taken else {"own": down.own}
        objective = Mutual("own", "guest") if self.mutual and taken else CrossEntropy()
        optimizer = self.train.local_optimizer(objective, when, alternating=self.order == "alternating")
        trained = yield from train(pair, optimizer, data.train, self.train.batch_schedule(when), key.at("train"))
        own, guest = trained.models["own"], finite_or_none(trained.models.get("guest"))
        scores, adopts, criterion = {}, False, self.adopt_by.get(data.id, self.adopt)
        if guest is not None and self.tuning:
            both = yield from evaluate_each((own, guest), data.val, needs_time(criterion))
            scores = {"own": both[0], "guest": both[1]}
            adopts = prefers_guest(criterion, Candidate(both[0], own.parameters), Candidate(both[1], guest.parameters))
        notes = why | {"lender": down.lender or "", "guest": guest.arch.name if guest else "", "own": own.arch.name}
        report = Report(trained.losses, scores, notes | {"cluster": down.cluster, "adopts": adopts})
        return state, Up(finite_or_none(own), guest, down.lender, adopts), report

    def expects(self, task: Task, down: Down, up: Up, when: Round) -> dict[str, Model | None]:
        require_lender(down.lender, up.lender, up.guest is not None, up.adopts)
        return {"own": down.own, "guest": down.guest}

    def aggregate(self, server: Server, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Server:
        copies = [(client, up.own) for client, up in replies.items()] + [(up.lender, up.guest) for up in replies.values()]
        models = averaged_copies(server.models, copies)
        adopted = {client: models[up.lender] for client, up in replies.items() if up.adopts and up.lender in models}
        return Server({**models, **adopted}, server.key)

    def deliver(self, task: Task, server: Server, client: ClientId) -> Down:
        return Down(server.model_of(client, task))

    def models(self, state: Empty, delivery: Down, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": delivery.own})

    def hints(self, has_unlabeled: bool) -> list[str]:
        if most(self.clusters) == 1 or has_unlabeled:
            return []
        return ["without unlabeled data all models are in one cluster, whatever method.clusters says; set data.unlabeled"]

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        return [PlannedTraining(self.train.batch_schedule(), samples, gradients=2 if self.order == "alternating" else 1)]

    def disclosures(self) -> list[str]:
        return ["which model a client adopts (decided on its validation samples)"] if self.tuning else []

    def offers(self, server: Server, task: Task, key: Key) -> Mapping[str, Model]:
        return server.models
