"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer answers than it was handed messages: a client that is missing from a round is normal.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fedme.core.client import Steps
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Report, Round, Task
from fedme.core.tree import nbytes
from fedme.engines.client import AnyMethod, Assessment, Finetune
from fedme.engines.drive import Done

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A client's reply, what it tells the records, and its seconds."""

    up: Any
    report: Report
    seconds: float


@dataclass(frozen=True)
class Absent:
    """Why a client that was sent a message did not answer."""

    reason: str


class Engine(Protocol):
    """Where clients and server do their work."""

    def muster(self) -> Task:
        """The federation as it is now, looked at before every round: members may have joined."""
        ...

    def present(self) -> Sequence[ClientId]:
        """The members that can be asked now, in their order."""
        ...

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> Mapping[ClientId, Answer | Absent]:
        """Hand clients their messages and collect the replies that come back."""
        ...

    def assess(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Done[Assessment]]:
        """Let clients show how their models do."""
        ...

    def serve(self, steps: Steps[T]) -> Done[T]:
        """Run work of the server."""
        ...


@dataclass
class Traffic:
    """What a client was sent, sent back and computed in a round; `answered` is false if a reply is missing."""

    answered: bool = True
    reason: str = ""  # why it is missing, if that is known
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    report: Report = field(default_factory=lambda: Report({}))

    def add(self, down: Any, answer: Answer | Absent | None) -> None:
        """Count one exchange of the round."""
        self.bytes_down += nbytes(down)
        if answer is None or isinstance(answer, Absent):
            self.answered, self.reason = False, answer.reason if answer else ""
            return
        self.bytes_up += nbytes(answer.up) if answer.up is not None else 0
        self.seconds += answer.seconds
        self.report = Report(
            {**self.report.losses, **answer.report.losses},
            {**self.report.scores, **answer.report.scores},
            {**self.report.notes, **answer.report.notes},
        )


@dataclass(frozen=True)
class Played:
    """The server's state after a round, and what the round cost."""

    server: Any
    traffic: Mapping[ClientId, Traffic]
    server_seconds: float


def play(method: AnyMethod, task: Task, engine: Engine, server: Any, t: int, total: int, root: Key) -> Played:
    """All exchanges of round `t`."""
    key = root.at("round", t, "server")
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        present = engine.present()
        away = [client for client in task.members if client not in present]
        traffic.update({client: Traffic(False, "not connected") for client in away if client not in traffic})
        plan = method.plan(server, present, when, key)
        downs = engine.serve(method.dispatch(task, server, plan, when, key)).value
        seconds += time.perf_counter() - began
        answers = engine.exchange(downs, when)
        for client, down in downs.items():
            traffic.setdefault(client, Traffic()).add(down, answers.get(client))
        began = time.perf_counter()
        # Replies may arrive in any order; sums of floating-point numbers need one.
        came = {client: answers.get(client) for client in [POOL, *task.members] if client in plan.count}
        counted = {client: each.up for client, each in came.items() if isinstance(each, Answer) and each.up is not None}
        server = method.aggregate(server, counted, when, key)
        seconds += time.perf_counter() - began
    return Played(server, traffic, seconds)
