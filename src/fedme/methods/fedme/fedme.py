"""FedMe: clients exchange models through the server, train their own and the guest together, and keep the better one.

"FedMe: Federated Learning via Model Exchange", Algorithm 1, Eq. 3 to 9. A round: the server groups the clients' models by their
outputs on unlabeled data and lends every client a model of its group; the client trains both by deep mutual learning and adopts
the guest if it does better on its validation part; the server averages all trained copies of each model.

Deviations: adoption compares losses on the validation part, as in the authors' code (Eq. 7 says the local data); k-means
re-seeds empty clusters; copies that diverged are not sent back; a client whose cluster has no model within its
`max_parameters` borrows from another. The copies that came back are averaged, an absent client keeps its model. Choices by
measured time (`adopt`) cannot be repeated exactly. Without unlabeled data all models are in one cluster. A cohort with ``tuning
= false`` and fixed clusters is the first version of the paper. The server keeps personal models: each is uploaded once a round.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, PlannedTraining, Report, Round, Task, TaskError
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, evaluate, immediately, in_parallel, train
from fedme.learning.local_training import Training, require
from fedme.learning.objectives import CrossEntropy, Mutual
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.schedules import most, since
from fedme.methods.fedme.adoption import Candidate, Criterion, needs_time, prefers_guest, require_criteria, require_meaning
from fedme.methods.fedme.clustering import clustered
from fedme.methods.fedme.exchange import lenders, merged, require_lender, room_for, sound, welcomed


@dataclass(frozen=True)
class Server:
    """The personal models that have been trained; the others are still as they are drawn from `key`."""

    models: Mapping[ClientId, Model]
    key: Key = Key(0)

    def model_of(self, client: ClientId, task: Task) -> Model:
        """A client's personal model."""
        fresh = self.key.at("client", client)
        return self.models.get(client) or Model.init(task.members[client].arch, fresh, task.dtype)


@dataclass(frozen=True)
class Down:
    """The client's personal model and, if there is one for it, a guest: whose it is and from which cluster."""

    own: Model
    guest: Model | None = None
    lender: ClientId | None = None
    cluster: int = 0


@dataclass(frozen=True)
class Up:
    """Both models after training, unless they diverged, and whether the client prefers the guest from now on."""

    own: Model | None
    guest: Model | None
    lender: ClientId | None
    adopts: bool


@dataclass(frozen=True)
class FedMe(Method[Server, Empty, Down, Up]):
    """Clients of any architecture exchange models, learn mutually and keep the better model."""

    train: Training = field(default_factory=Training)
    clusters: int | Mapping[int, int] = 1  # K^t: a number, or from which round on how many, as {0 = 1, 15 = 2}
    cluster_on: Literal["logits", "softmax"] = "logits"  # of several labels at once, softmax is each one's probability
    tuning: bool = True  # MT: adopt the guest if it is better
    mutual: bool = True  # DML: learn from each other, not only from the labels
    clustering: bool = True  # MC: lend models of similar outputs
    adopt: str | Criterion = "loss"  # what "better" means: a name of methods.fedme.adoption.CRITERIA, or a cost function
    adopt_by: Mapping[ClientId, str | Criterion] = field(default_factory=dict)  # a client's own criterion
    order: Literal["simultaneous", "alternating"] = "simultaneous"
    defence: Defence = OPEN

    own_architectures = True
    uses_shared_model = False
    unused_settings = ()
    travels = "their personal models, with each other"

    def __post_init__(self) -> None:
        table = self.clusters if isinstance(self.clusters, Mapping) else {0: self.clusters}
        require(all(t >= 0 and k >= 1 for t, k in table.items()), "clusters", "rounds count from 0, clusters from 1")
        require_criteria({"adopt": self.adopt} | {f"adopt_by.{client}": each for client, each in self.adopt_by.items()})

    def check(self, task: Task) -> None:
        super().check(task)
        require_meaning(task, self.adopt, self.adopt_by)

    def init_server(self, task: Task, key: Key) -> Server:
        return Server({}, key)

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[Empty]:
        if self.tuning and not len(data.val):
            raise TaskError(f"client {me} has no validation data to compare models on: set `val` in [data], or tuning = false")
        return immediately(Empty())

    def dispatch(self, task: Task, server: Server, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Down]]:
        count = since(self.clusters, when.t) if self.clustering else 1  # K^t
        cohort = {me: server.model_of(me, task) for me in plan.train}
        clusters = yield from clustered(cohort, task.unlabeled, count, self.cluster_on, key.at("cluster"))
        chosen = lenders(clusters, room_for(task, cohort), key.at("exchange"))
        return {me: Down(cohort[me], cohort[lender] if lender else None, lender, clusters[me]) for me, lender in chosen.items()}

    def client_round(
        self, state: Empty, down: Down, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, Up, Report]]:
        taken, why = yield from welcomed(down.own, down.guest, data.val, self.defence)
        pair = {"own": down.own, "guest": taken} if taken else {"own": down.own}
        objective = Mutual("own", "guest") if self.mutual and taken else CrossEntropy()
        optimizer = self.train.sgd(objective, when, alternating=self.order == "alternating")
        trained = yield from train(pair, optimizer, data.train, self.train.batch_schedule(when), key.at("train"))
        own, guest = trained.models["own"], sound(trained.models.get("guest"))
        scores, adopts, criterion = {}, False, self.adopt_by.get(data.id, self.adopt)
        if guest is not None and self.tuning:
            both = yield from in_parallel([evaluate(each, data.val, needs_time(criterion)) for each in (own, guest)])
            scores = {"own": both[0], "guest": both[1]}
            adopts = prefers_guest(criterion, Candidate(both[0], own.parameters), Candidate(both[1], guest.parameters))
        notes = why | {"lender": down.lender or "", "guest": guest.arch.name if guest else "", "own": own.arch.name}
        report = Report(trained.losses, scores, notes | {"cluster": down.cluster, "adopts": adopts})
        return state, Up(sound(own), guest, down.lender, adopts), report

    def expects(self, task: Task, down: Down, up: Up, when: Round) -> dict[str, Model | None]:
        require_lender(down.lender, up.lender, up.guest is not None, up.adopts)
        return {"own": down.own, "guest": down.guest}

    def aggregate(self, server: Server, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Server:
        copies = [(client, up.own) for client, up in replies.items()] + [(up.lender, up.guest) for up in replies.values()]
        models = merged(server.models, copies, self.defence.combine)
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
