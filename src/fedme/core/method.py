"""The protocol of a method: a few pure functions over typed values. A method does not know where it runs.

One round of any method, as every engine runs it::

    plan      = method.plan(server, present, when, key)
    downs     = method.dispatch(task, server, plan, when, key)          # a message for every client that trains
    state, up, report = method.client_round(state, down, data, when, key)   # at the client, next to its data
    server    = method.aggregate(server, ups of plan.count, when, key)  # any client may be missing
    server    = method.refine(task, server, ups, when, key)             # the server may train, on samples of its own

and, whenever models are wanted, ``method.models(state, method.deliver(task, server, client), data, when, key)`` at the client.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import torch

from fedme.core.data import ClientData, ClientId, Schema, Split
from fedme.core.key import Key
from fedme.core.model import Arch, Model, models_in
from fedme.core.operations import BatchSchedule, Computation, Models, Role, Score, immediately

POOL: ClientId = "(pool)"  # the one trainer of methods that pool all data


class TaskError(ValueError):
    """A method cannot work on this task; the message says why and what to change."""


@dataclass(frozen=True)
class Round:
    """The round `t` (from 0) of `total`; `phase` names the exchange within the round."""

    t: int
    total: int
    phase: str = "round"


@dataclass(frozen=True)
class Plan:
    """Who trains in a round, and whose reply the server uses."""

    train: tuple[ClientId, ...]
    count: frozenset[ClientId]

    @classmethod
    def all(cls, clients: Sequence[ClientId]) -> "Plan":
        """Every client trains and every reply counts."""
        return cls(tuple(clients), frozenset(clients))


@dataclass(frozen=True)
class Empty:
    """An empty state or message."""


@dataclass(frozen=True)
class Report:
    """What a client writes to the records about its round. The method does not use it, and its bytes are not counted."""

    losses: Mapping[Role, float]  # mean training loss
    scores: Mapping[Role, Score] = field(default_factory=dict)  # validation scores the method asked for
    notes: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """What the federation knows about a client before training starts."""

    id: ClientId
    arch: Arch  # the architecture of its own model
    labels: tuple[str, ...]  # its label space
    max_parameters: int | None = None  # larger guest models are never sent to it
    accepts: tuple[str, ...] | None = None  # architectures of guest models it accepts; None: any
    lends_to: tuple[ClientId, ...] | None = None  # clients that may receive its model as a guest; None: any


@dataclass(frozen=True)
class Task:
    """What all clients and the server know. It holds no client's data."""

    schema: Schema
    members: Mapping[ClientId, Member]
    shared: Arch  # the architecture of the model that all clients share
    # An architecture by name and number of classes (None: as the name says). A resumed run finds it again by its name.
    resolve: Callable[[str, int | None], Arch] = field(compare=False)
    unlabeled: Split | None = None  # held by the server
    public: int = 0  # number of labelled samples that every client has
    dtype: torch.dtype = torch.float32
    open: bool = False  # more members may join
    same_start: bool = False  # clients of one architecture start from the same random weights (models.same_start)

    def first_model(self, me: ClientId, key: Key, arch: Arch | None = None) -> Model:
        """The model that a client starts from: random weights of its own or, with `same_start`, those of its architecture.

        A client of the shared architecture then starts from the server's first model, which is drawn from the same key.
        """
        return Model.init(
            arch or self.members[me].arch, key.at("shared") if self.same_start else key.at("client", me), self.dtype
        )

    def require_common_classes(self, method: str) -> None:
        """Raise a TaskError that names the clients whose label spaces differ."""
        classes = self.schema.classes
        odd = [f"{m.id} ({len(m.labels)})" for m in self.members.values() if m.labels != classes]
        if odd:
            raise TaskError(
                f"method '{method}' needs one label space of {len(classes)} classes for all clients, but these differ: "
                f"{', '.join(odd)}. Use method 'fml' with `shared` set to the part of the network they can share."
            )


def require_members(task: Task, setting: str, clients: Iterable[ClientId]) -> None:
    """Raise a TaskError if a setting names a client that does not exist."""
    if not task.open and (unknown := sorted(set(clients) - task.members.keys())):
        raise TaskError(f"{setting} names {', '.join(unknown)}, but there is no such client")


S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")


@dataclass(frozen=True)
class PlannedTraining:
    """A training on a client's own samples, announced to the privacy accountant before the first one runs."""

    schedule: BatchSchedule
    samples: int  # how many of the client's training samples it draws its batches from
    gradients: int = 1  # gradients per batch
    when: Literal["start", "round", "evaluation"] = "round"  # once per run, in every round, or at every evaluation
    times: int = 1  # so often at each of these occasions


class Method(ABC, Generic[S, C, D, U]):
    """A federated method over server state S, client state C, message down D and message up U.

    A subclass is a frozen dataclass of hyper-parameters. All four types are frozen dataclasses of models, tensors and plain
    scalars. What a method must define is abstract here; the rest has defaults. In the second half a method describes itself:
    privacy accounting, audits, unseen clients, hints and documentation read it. No code outside `methods/` knows a method by
    its name.
    """

    train: Any  # the settings of local training (`learning.training_settings.Training`), a field of every method

    phases: ClassVar[tuple[str, ...]] = ("round",)  # the exchanges of a round, in order
    pooled: ClassVar[bool] = False  # whether all data is brought to one place
    own_architectures: ClassVar[bool] = False  # whether clients may have their own architecture, else all have `task.shared`

    @classmethod
    def name(cls) -> str:
        """The name in configuration files and messages."""
        return cls.__name__.lower()

    # The algorithm.

    def check(self, task: Task) -> None:
        """Refuse, with a TaskError, a task that the method cannot do. Called before anything expensive is done."""
        task.require_common_classes(self.name())
        if self.classes_only and (given := task.schema.task_type) != "classification":
            raise TaskError(f"method '{self.name()}' is for classification, and this is {given}; use another method")

    @abstractmethod
    def init_server(self, task: Task, key: Key) -> S:
        """The server's state before the first round."""

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[C]:
        """A client's state at its first participation: nothing by default. It may train."""
        return immediately(cast(C, Empty()))

    def plan(self, server: S, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        """Who trains and whose reply counts: by default a random cohort."""
        return self.train.plan(present, key)  # type: ignore[no-any-return]

    @abstractmethod
    def dispatch(self, task: Task, server: S, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, D]]:
        """A message for every client that trains."""

    @abstractmethod
    def client_round(
        self, state: C, down: D, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[C, U | None, Report]]:
        """The client's work: its new state, its reply (None if it does not count), and what it tells the records."""

    def expects(self, task: Task, down: D, up: U, when: Round) -> Mapping[str, Any]:
        """Values that fields of a reply must resemble: the same architecture, names, shapes and types.

        By default a field of the reply is compared with the field of the same name in the message sent down. An override adds
        to that, and raises a TypedError naming the field for an impossible reply. `defence.norm` bounds changes from these.
        """
        return {}

    @abstractmethod
    def aggregate(self, server: S, replies: Mapping[ClientId, U], when: Round, key: Key) -> S:
        """The server's new state. Replies come in the order of the members; any may be missing, even all."""

    def averaged_with(self, up: U) -> Hashable:
        """Replies of the same value are averaged with each other: by default all of them."""
        return None

    def refine(self, task: Task, server: S, replies: Mapping[ClientId, U], when: Round, key: Key) -> Computation[S]:
        """Further work of the server after `aggregate`, which may train and predict on its own samples: by default none."""
        return immediately(server)

    @abstractmethod
    def deliver(self, task: Task, server: S, client: ClientId) -> D:
        """What the client is handed when its models are wanted."""

    @abstractmethod
    def models(self, state: C, delivery: D, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        """The models the client has: "personal", which it would deploy, and "global" where there is one."""

    def kept_model(self, up: U) -> Model | None:
        """With `exchanged`: the model in a reply whose other weights the client keeps, by default the first."""
        return next((model for _, model in models_in(up)), None)

    # What the method says about itself.

    not_by_name: ClassVar[str] = "it chooses itself what travels"  # why weights that travel cannot be named; empty: `shared`

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Patterns of the names of weights: only these travel, and the others stay at the clients. Empty: whole models."""
        shared: str | Sequence[str] = () if self.not_by_name else getattr(self, "shared", ())
        return ((shared,) if isinstance(shared, str) else tuple(shared)) if shared else ()

    paper: ClassVar[str] = ""  # authors, title, venue and arXiv number, for the documentation
    travels: ClassVar[str] = "see its source"  # what clients send, in a few words
    unused_settings: ClassVar[tuple[str, ...]] = ("defence.guest",)  # settings outside [method] that have no effect
    own_step: ClassVar[bool] = False  # whether the method defines its local step, so that `train.optimizer` has no meaning
    classes_only: ClassVar[bool] = False  # whether the method is for classification only
    isolated: ClassVar[bool] = False  # whether every client trains alone: the baseline that gains are measured against
    uses_shared_model: ClassVar[bool] = True  # whether `models.shared` has an effect
    hides_samples: ClassVar[bool] = False  # whether a client may keep its number of samples: only `samples` of `up` tells it
    reads_training_scores: ClassVar[bool] = False  # whether clients evaluate models on training samples; see `disclosures`
    offer_chosen_on: ClassVar[Literal["train", "val"]] = "val"  # the part on which an unseen client compares `offers`
    not_private: ClassVar[str] = ""  # why [privacy] cannot bound what clients send, and is refused, if so
    needs: ClassVar[Literal["", "labelled public samples", "unlabeled samples at the server"]] = ""  # beside clients' samples
    nothing_to_offer: ClassVar[str] = ""  # why there is nothing for unseen clients, if so
    nothing_to_audit: ClassVar[str] = ""  # why a membership-inference audit makes no sense, if so

    def hints(self, has_unlabeled: bool) -> list[str]:
        """What a user should know about the method's own settings that have no effect."""
        return []

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        """Every training of a client with `samples` training samples, for the privacy accountant.

        Under [privacy] the noise is calibrated for these, and a training beyond them is refused.
        """
        return [PlannedTraining(self.train.batch_schedule(), samples)]

    def depends_on_rounds(self) -> str:
        """Why a round depends on the number of all rounds (`when.total`), if so: then a finished run cannot be extended."""
        return ""

    def disclosures(self) -> list[str]:
        """What a client gives away about its samples beyond the trained models that epsilon bounds.

        By default its weight in the mean, if the method has the setting `weighting = "samples"`.
        """
        weighted = getattr(self, "weighting", None) == "samples"
        return ["the weight of a client in the mean (its number of samples)"] if weighted else []

    def offers(self, server: S, task: Task, key: Key) -> Mapping[str, Model]:
        """The models of the server that an unseen client may start from. A personal model has the name of its client."""
        return {}

    def visible_models(self, message: Any, task: Task) -> Iterator[tuple[str, Model]]:
        """Every whole model in a message, with its place: what an audit attacks."""
        return models_in(message)
