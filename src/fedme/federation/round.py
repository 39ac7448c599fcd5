"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer answers than it was handed messages: a client that is missing from a round is normal. A round for
which too few answer is not: those missing are asked again, and if that does not help the round does not count.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.operations import Steps
from fedme.core.tree import nbytes
from fedme.core.typed import TypedError
from fedme.execution.lockstep import Done
from fedme.federation.client_work import AnyMethod, Assessment, Finetune
from fedme.federation.offences import Conduct, judged, kept_out
from fedme.federation.reply_validation import bounded, check_reply, check_report
from fedme.learning.robust_aggregation import OPEN, Defence

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


@dataclass(frozen=True)
class Quorum:
    """What a round needs to count."""

    replies: int | float = 1  # a number, or a share of those asked for
    repeats: int = 2  # how often those who did not reply are asked again

    def needed(self, asked: int) -> int:
        """How many of `asked` replies have to come; nobody is never enough."""
        return self.replies if isinstance(self.replies, int) else max(1, math.ceil(self.replies * asked - 1e-9))


class Engine(Protocol):
    """Where clients and server do their work."""

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """How many samples every client has said it trains on."""
        ...

    def muster(self) -> Task:
        """The federation as it is now, looked at before every round: members may have joined."""
        ...

    def away(self, when: Round) -> Mapping[ClientId, str]:
        """The members that cannot be asked in this round, and why."""
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
    short: str = ""  # if the round does not count: how many replies it was short of
    conduct: Mapping[ClientId, Conduct] = field(default_factory=dict)


def play(
    method: AnyMethod,
    task: Task,
    engine: Engine,
    server: Any,
    t: int,
    total: int,
    root: Key,
    quorum: Quorum = Quorum(),
    defence: Defence = OPEN,
    conduct: Mapping[ClientId, Conduct] | None = None,
) -> Played:
    """All exchanges of round `t`. If one of them is below the quorum, the server stays as it was before the round.

    `conduct` is what is remembered of the clients' messages before it.
    """
    key, before = root.at("round", t, "server"), server
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    conduct = conduct or {}
    out, refused = kept_out(conduct, t), dict[ClientId, str]()
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        away = {**engine.away(when), **{client: each.words() for client, each in out.items()}}
        traffic.update({client: Traffic(False, why) for client, why in away.items() if client not in traffic})
        plan = method.plan(server, [client for client in task.members if client not in away], when, key)
        planned = engine.serve(method.dispatch(task, server, plan, when, key)).value if plan.train else {}
        downs = {client: down for client, down in planned.items() if client not in refused}  # it is out for the round
        seconds += time.perf_counter() - began
        examine = functools.partial(_examined, method, task, engine.samples, defence, when)
        answers, short = _gather(engine, downs, when, plan, quorum, traffic, examine)
        refused |= {client: answer.reason for client, answer in answers.items() if isinstance(answer, Refused)}
        if short:
            _discount(traffic, short)
            return Played(before, traffic, seconds, short, judged(conduct, refused.items(), t, defence))
        began = time.perf_counter()
        # Replies may arrive in any order; sums of floating-point numbers need one.
        ordered = {client: answers.get(client) for client in [POOL, *task.members] if client in plan.count}
        counted = {client: each.up for client, each in ordered.items() if isinstance(each, Answer) and each.up is not None}
        server = method.aggregate(server, counted, when, key)
        seconds += time.perf_counter() - began
    return Played(server, traffic, seconds, "", judged(conduct, refused.items(), t, defence))


def _examined(
    method: AnyMethod,
    task: Task,
    samples: Mapping[ClientId, int],
    defence: Defence,
    when: Round,
    client: ClientId,
    down: Any,
    came: Answer | Absent,
) -> Answer | Absent:
    """The answer, if it can be used, with its changes bounded."""
    if isinstance(came, Absent):
        return came
    try:
        if came.when not in (None, when):
            raise TypedError("when", f"it is about {came.when}, not {when}")
        check_report(came.report, came.seconds, task.schema.kind)
        if came.up is None:
            return came
        sent = check_reply(method, task, down, came.up, when, samples.get(client))
    except TypedError as error:
        return Refused(f"refused: {error}")
    return came if defence.norm is None else replace(came, up=bounded(came.up, sent, defence.norm))


def _gather(
    engine: Engine,
    downs: Mapping[ClientId, Any],
    when: Round,
    plan: Plan,
    quorum: Quorum,
    traffic: dict[ClientId, Traffic],
    examine: Callable[[ClientId, Any, Answer | Absent], Answer | Absent],
) -> tuple[dict[ClientId, Answer | Absent], str]:
    """The replies of an exchange, and what it is short of when everybody has been asked often enough."""
    answers: dict[ClientId, Answer | Absent] = {}
    needed, came, asked = quorum.needed(len(plan.count)), 0, 0
    while downs and came < needed and asked <= quorum.repeats:
        missing = {client: down for client, down in downs.items() if not isinstance(answers.get(client), Answer | Refused)}
        for client, down in missing.items() if asked else ():  # the first time is counted below
            traffic.setdefault(client, Traffic()).bytes_down += nbytes(down)
        found = engine.exchange(missing, when)
        answers |= {client: examine(client, down, found[client]) for client, down in missing.items() if client in found}
        came, asked = sum(isinstance(answers.get(client), Answer) for client in plan.count), asked + 1
    for client, down in downs.items():
        traffic.setdefault(client, Traffic()).add(down, answers.get(client))
    times = "nobody could be asked" if not downs else f"after asking {asked} times" if asked > 1 else "after asking once"
    return answers, f"{came} of {needed} needed replies came, {times}" if came < needed else ""


def _discount(traffic: Mapping[ClientId, Traffic], short: str) -> None:
    """Whoever replied in vain is told so in the records."""
    for each in traffic.values():
        if each.answered:
            each.answered, each.reason = False, f"the round does not count: {short}"
