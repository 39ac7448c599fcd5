"""What a method is: a few pure functions over typed values. It does not know where it runs.

One round of any method, as every engine runs it::

    plan      = method.plan(server, present, when, key)
    downs     = method.dispatch(task, server, plan, when, key)          # a message for every client that trains
    state, up, report = method.client_round(state, down, data, when, key)   # at the client, next to its data
    server    = method.aggregate(server, ups of plan.count, when, key)  # any client may be missing

and, whenever models are wanted, ``method.models(state, method.deliver(task, server, client), data, when, key)`` at the client.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from fedme.core.data import ClientData, ClientId, Schema, Split
from fedme.core.key import Key
from fedme.core.model import Arch
from fedme.core.operations import Computation, Models, Role, Score

POOL: ClientId = "(pool)"  # the one trainer of methods that pool all data


class TaskError(ValueError):
    """A method cannot work on this task; the message says why and what to change."""


@dataclass(frozen=True)
class Round:
    """Which round it is, from 0, of how many; `phase` names the exchange within the round."""

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
        """Everybody who trains counts."""
        return cls(tuple(clients), frozenset(clients))


@dataclass(frozen=True)
class Empty:
    """An empty state or message."""


@dataclass(frozen=True)
class Report:
    """What a client tells the records about its round. It is no part of the method, and its bytes are not counted."""

    losses: Mapping[Role, float]  # mean training loss
    scores: Mapping[Role, Score] = field(default_factory=dict)  # validation scores the method asked for
    notes: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """What the federation knows of a client before it starts."""

    id: ClientId
    arch: Arch  # the architecture of its own model
    labels: tuple[str, ...]  # its label space
    max_parameters: int | None = None  # larger guests are never sent to it
    accepts: tuple[str, ...] | None = None  # the architectures of guests it takes; any by default
    lends_to: tuple[ClientId, ...] | None = None  # who may have its model as a guest; anybody by default


@dataclass(frozen=True)
class Task:
    """What the federation has agreed on. No client's data is in here."""

    schema: Schema
    members: Mapping[ClientId, Member]
    shared: Arch  # the architecture of a model that all clients have in common
    # An architecture by name and number of classes (None: as the name says). A resumed run finds it again by its name.
    resolve: Callable[[str, int | None], Arch] = field(compare=False)
    unlabeled: Split | None = None  # the server's own
    public: int = 0  # how many labelled samples everybody has
    dtype: torch.dtype = torch.float32
    open: bool = False  # more members may come

    def require_common_classes(self, method: str) -> None:
        """Refuse clients whose label spaces differ, by name."""
        classes = self.schema.classes
        odd = [f"{m.id} ({len(m.labels)})" for m in self.members.values() if m.labels != classes]
        if odd:
            raise TaskError(
                f"method '{method}' needs one label space of {len(classes)} classes for all clients, but these differ: "
                f"{', '.join(odd)}. Use method 'fml' with `shared` set to the part of the network they can share."
            )


def require_members(task: Task, setting: str, clients: Iterable[ClientId]) -> None:
    """Refuse a setting that names somebody who is not there."""
    if not task.open and (unknown := sorted(set(clients) - task.members.keys())):
        raise TaskError(f"{setting} names {', '.join(unknown)}, but there is no such client")


S = TypeVar("S")
C = TypeVar("C")
D = TypeVar("D")
U = TypeVar("U")


class Method(Protocol[S, C, D, U]):
    """A federated method over server state S, client state C, message down D and message up U.

    All four are frozen dataclasses of models, tensors and plain scalars.
    """

    @property
    def phases(self) -> tuple[str, ...]:
        """The exchanges of a round, in order."""
        ...

    @property
    def pooled(self) -> bool:
        """Whether all data is brought to one place."""
        ...

    @property
    def own_architectures(self) -> bool:
        """Whether clients have models of their own architecture; otherwise `task.shared` is everybody's."""
        ...

    def check(self, task: Task) -> None:
        """Refuse, with a TaskError, a task that the method cannot do. Called before anything expensive is done."""
        ...

    def init_server(self, task: Task, key: Key) -> S:
        """The server's state before the first round."""
        ...

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[C]:
        """A client's state at its first participation. It may train."""
        ...

    def plan(self, server: S, present: Sequence[ClientId], when: Round, key: Key) -> Plan:
        """Who trains and whose reply counts."""
        ...

    def dispatch(self, task: Task, server: S, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, D]]:
        """A message for every client that trains."""
        ...

    def client_round(
        self, state: C, down: D, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[C, U | None, Report]]:
        """The client's work: its new state, its reply (None if it does not count), and what it tells the records."""
        ...

    def aggregate(self, server: S, replies: Mapping[ClientId, U], when: Round, key: Key) -> S:
        """The server's new state. Replies come in the order of the members; any may be missing, even all."""
        ...

    def deliver(self, task: Task, server: S, client: ClientId) -> D:
        """What the client is handed when its models are wanted."""
        ...

    def models(self, state: C, delivery: D, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        """The models the client has: "personal", which it would deploy, and "global" where there is one."""
        ...


@runtime_checkable
class ReplyExpectations(Protocol):
    """A method that knows more about its replies than their types say.

    Without it, a field of a reply that has the name of a field of the message sent down must look like that one: the same
    architecture, names, shapes and types.
    """

    def expects(self, task: Task, down: Any, up: Any, when: Round) -> Mapping[str, Any]:
        """What fields of a reply must look like; of models, the one that was sent, by which a change is measured.

        Raises a TypedError for a reply that cannot be, naming the field. The types of plain numbers and texts are right.
        """
        ...
