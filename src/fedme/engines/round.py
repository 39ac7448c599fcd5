"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer answers than it was handed messages: a client that is missing from a round is normal.
"""

import time
from collections.abc import Mapping
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


class Engine(Protocol):
    """Where clients and server do their work."""

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Answer]:
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
    """What a client sent, received and computed in a round."""

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    report: Report = field(default_factory=lambda: Report({}))

    def add(self, down: Any, answer: Answer) -> None:
        """Count one exchange of the round."""
        self.bytes_down += nbytes(down)
        self.bytes_up += nbytes(answer.up)
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
    members = list(task.members)
    key = root.at("round", t, "server")
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        plan = method.plan(server, members, when, key)
        downs = engine.serve(method.dispatch(task, server, plan.train, when, key)).value
        seconds += time.perf_counter() - began
        answers = engine.exchange(downs, when)
        for client, answer in answers.items():
            traffic.setdefault(client, Traffic()).add(downs[client], answer)
        began = time.perf_counter()
        # Replies may arrive in any order; sums of floating-point numbers need one.
        counted = {client: answers[client].up for client in [POOL, *members] if client in answers and client in plan.count}
        server = method.aggregate(server, counted, when, key)
        seconds += time.perf_counter() - began
    return Played(server, traffic, seconds)
