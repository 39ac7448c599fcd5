"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer answers than it was handed messages: a client that is missing from a round is normal.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fedme.core.client import Steps
from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Report, Round, Task
from fedme.core.tree import nbytes
from fedme.core.typed import TypedError
from fedme.engines.arrivals import bounded, check_reply, check_report
from fedme.engines.client import AnyMethod, Assessment, Finetune
from fedme.engines.conduct import Conduct, judged, kept_out
from fedme.engines.drive import Done
from fedme.learn.defence import OPEN, Defence

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """A client's reply, what it tells the records, and its seconds."""

    up: Any
    report: Report
    seconds: float
    when: Round | None = None  # the round it says it is about; None: the engine knows it answers what was sent


@dataclass(frozen=True)
class Absent:
    """Why a client that was sent a message did not answer."""

    reason: str


@dataclass(frozen=True)
class Refused(Absent):
    """Why the answer of a client cannot be used. It counts as if it had not come, and as an offence."""


class Engine(Protocol):
    """Where clients and server do their work."""

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """How many samples every client has said it trains on."""
        ...

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

    def note(self, name: str, value: str) -> None:
        """Tell the records something about the client."""
        self.report = replace(self.report, notes={**self.report.notes, name: value})


@dataclass(frozen=True)
class Played:
    """The server's state after a round, and what the round cost."""

    server: Any
    traffic: Mapping[ClientId, Traffic]
    server_seconds: float
    conduct: Mapping[ClientId, Conduct] = field(default_factory=dict)


def play(
    method: AnyMethod,
    task: Task,
    engine: Engine,
    server: Any,
    t: int,
    total: int,
    root: Key,
    defence: Defence = OPEN,
    conduct: Mapping[ClientId, Conduct] | None = None,
) -> Played:
    """All exchanges of round `t`; `conduct` is what is remembered of the clients' messages before it."""
    key = root.at("round", t, "server")
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    conduct = conduct or {}
    out, refused = kept_out(conduct, t), dict[ClientId, str]()
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        present = [client for client in engine.present() if client not in out]
        away = [client for client in task.members if client not in present]
        why = {client: out[client].words() if client in out else "not connected" for client in away}
        traffic.update({client: Traffic(False, why[client]) for client in away if client not in traffic})
        plan = method.plan(server, present, when, key)
        planned = engine.serve(method.dispatch(task, server, plan, when, key)).value
        downs = {client: down for client, down in planned.items() if client not in refused}  # it is out for the round
        seconds += time.perf_counter() - began
        came = engine.exchange(downs, when)
        answers = {
            c: _examined(method, task, downs[c], came[c], when, engine.samples.get(c), defence) for c in downs if c in came
        }
        refused |= {client: answer.reason for client, answer in answers.items() if isinstance(answer, Refused)}
        for client, down in downs.items():
            traffic.setdefault(client, Traffic()).add(down, answers.get(client))
        began = time.perf_counter()
        # Replies may arrive in any order; sums of floating-point numbers need one.
        ordered = {client: answers.get(client) for client in [POOL, *task.members] if client in plan.count}
        counted = {client: each.up for client, each in ordered.items() if isinstance(each, Answer) and each.up is not None}
        server = method.aggregate(server, counted, when, key)
        seconds += time.perf_counter() - began
    return Played(server, traffic, seconds, judged(conduct, refused.items(), t, defence))


def _examined(
    method: AnyMethod, task: Task, down: Any, came: Answer | Absent, when: Round, samples: int | None, defence: Defence
) -> Answer | Absent:
    """The answer, if it can be used, with its changes bounded."""
    if isinstance(came, Absent):
        return came
    try:
        if came.when not in (None, when):
            raise TypedError("when", f"it is about {came.when}, not {when}")
        check_report(came.report, came.seconds)
        if came.up is None:
            return came
        sent = check_reply(method, task, down, came.up, when, samples)
    except TypedError as error:
        return Refused(f"refused: {error}")
    return came if defence.norm is None else replace(came, up=bounded(came.up, sent, defence.norm))
