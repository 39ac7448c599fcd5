"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer replies than it got messages: a client that misses a round is normal. If too few reply, the missing
clients are asked again; if that does not help, the round does not count.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fedme.core.data import ClientId
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.operations import Computation
from fedme.core.tree import nbytes
from fedme.core.typed import TypedError
from fedme.execution.lockstep import Timed
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune
from fedme.federation.offences import OffenceRecord, quarantined, record_offences
from fedme.federation.reply_validation import bounded, check_reply, check_report
from fedme.learning.accountant import Ledger
from fedme.learning.robust_aggregation import OPEN, Defence

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A client's reply, its report for the records, and the seconds it took."""

    up: Any
    report: Report
    seconds: float
    when: Round | None = None  # the round that the client states; None: the engine knows it


@dataclass(frozen=True)
class NoReply:
    """Why a client did not reply to a message."""

    reason: str


@dataclass(frozen=True)
class RejectedReply(NoReply):
    """Why a reply is invalid. It counts as missing, and as an offence."""


@dataclass(frozen=True)
class Quorum:
    """The replies that a round needs to count."""

    replies: int | float = 1  # a number, or a fraction of the requested replies
    repeats: int = 2  # how often missing clients are asked again

    def needed(self, asked: int) -> int:
        """The number of replies needed out of `asked`, at least 1."""
        return self.replies if isinstance(self.replies, int) else max(1, math.ceil(self.replies * asked - 1e-9))


class ClientStates(dict[ClientId, Any]):
    """The state of every client that has one, and the privacy ledger of every client that trained privately."""

    def __init__(self, states: Mapping[ClientId, Any] | None = None, ledgers: Mapping[ClientId, Ledger] | None = None) -> None:
        super().__init__(states or {})
        self.ledgers: dict[ClientId, Ledger] = dict(ledgers or {})


class Engine(Protocol):
    """Where clients and server do their work."""

    @property
    def states(self) -> ClientStates:
        """What clients keep between rounds, as far as it is not at the clients themselves."""
        ...

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """The number of training samples that every client has announced."""
        ...

    def current_task(self) -> Task:
        """The federation as it is now. Read before every round: members may have joined."""
        ...

    def unavailable(self, when: Round) -> Mapping[ClientId, str]:
        """The members that cannot take part in this round, and why."""
        ...

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> Mapping[ClientId, "Reply | NoReply"]:
        """Send clients their messages and collect the replies that come back."""
        ...

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let clients evaluate their models."""
        ...

    def run_on_server(self, work: Computation[T]) -> Timed[T]:
        """Run work of the server."""
        ...


class EngineWrapper(Engine if TYPE_CHECKING else object):  # type: ignore[misc]
    """An engine that forwards everything to another one. Subclasses change what happens to messages."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Traffic:
    """Bytes and seconds of a client in a round; `answered` is false if a reply is missing."""

    answered: bool = True
    reason: str = ""  # why it is missing, if that is known
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    report: Report = field(default_factory=lambda: Report({}))

    def add(self, down: Any, answer: Reply | NoReply | None) -> None:
        """Count one exchange of the round."""
        self.bytes_down += nbytes(down)
        if answer is None or isinstance(answer, NoReply):
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
        """Add a note about the client to the records."""
        self.report = replace(self.report, notes={**self.report.notes, name: value})


@dataclass(frozen=True)
class RoundResult:
    """The server's state after a round, and what the round cost."""

    server: Any
    traffic: Mapping[ClientId, Traffic]
    server_seconds: float
    short: str = ""  # if the round does not count: how many replies are missing
    offences: Mapping[ClientId, OffenceRecord] = field(default_factory=dict)


def run_round(
    method: AnyMethod,
    task: Task,
    engine: Engine,
    server: Any,
    t: int,
    total: int,
    root: Key,
    quorum: Quorum = Quorum(),
    defence: Defence = OPEN,
    offences: Mapping[ClientId, OffenceRecord] | None = None,
) -> RoundResult:
    """All exchanges of round `t`. If one of them is below the quorum, the server stays as it was before the round.

    `conduct` is what is remembered of the clients' messages before it.
    """
    key, before = root.at("round", t, "server"), server
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    offences = offences or {}
    out, refused = quarantined(offences, t), dict[ClientId, str]()
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        unavailable = {**engine.unavailable(when), **{client: record.words() for client, record in out.items()}}
        traffic.update({client: Traffic(False, why) for client, why in unavailable.items() if client not in traffic})
        plan = method.plan(server, [client for client in task.members if client not in unavailable], when, key)
        planned = engine.run_on_server(method.dispatch(task, server, plan, when, key)).value if plan.train else {}
        downs = {client: down for client, down in planned.items() if client not in refused}
        seconds += time.perf_counter() - began
        examine = functools.partial(_examined, method, task, engine.samples, defence, when)
        answers, short = _collect_replies(engine, downs, when, plan, quorum, traffic, examine)
        refused |= {client: answer.reason for client, answer in answers.items() if isinstance(answer, RejectedReply)}
        if short:
            _discount(traffic, short)
            return RoundResult(before, traffic, seconds, short, record_offences(offences, refused.items(), t, defence))
        began = time.perf_counter()
        # Replies arrive in any order; floating-point sums need a fixed one.
        ordered = {client: answers.get(client) for client in [POOL, *task.members] if client in plan.count}
        counted = {client: reply.up for client, reply in ordered.items() if isinstance(reply, Reply) and reply.up is not None}
        server = method.aggregate(server, counted, when, key)
        seconds += time.perf_counter() - began
    return RoundResult(server, traffic, seconds, "", record_offences(offences, refused.items(), t, defence))


def _examined(
    method: AnyMethod,
    task: Task,
    samples: Mapping[ClientId, int],
    defence: Defence,
    when: Round,
    client: ClientId,
    down: Any,
    came: Reply | NoReply,
) -> Reply | NoReply:
    """The reply if it is valid, with its changes bounded; else why it is rejected."""
    if isinstance(came, NoReply):
        return came
    try:
        if came.when not in (None, when):
            raise TypedError("when", f"it is about {came.when}, not {when}")
        check_report(came.report, came.seconds, task.schema.task_type)
        if came.up is None:
            return came
        sent = check_reply(method, task, down, came.up, when, samples.get(client))
    except TypedError as error:
        return RejectedReply(f"refused: {error}")
    return came if defence.norm is None else replace(came, up=bounded(came.up, sent, defence.norm))


def _collect_replies(
    engine: Engine,
    downs: Mapping[ClientId, Any],
    when: Round,
    plan: Plan,
    quorum: Quorum,
    traffic: dict[ClientId, Traffic],
    examine: Callable[[ClientId, Any, Reply | NoReply], Reply | NoReply],
) -> tuple[dict[ClientId, Reply | NoReply], str]:
    """The replies of an exchange, and a description of what is missing to the quorum."""
    answers: dict[ClientId, Reply | NoReply] = {}
    needed, came, asked = quorum.needed(len(plan.count)), 0, 0
    while downs and came < needed and asked <= quorum.repeats:
        missing = {client: down for client, down in downs.items() if not isinstance(answers.get(client), Reply | RejectedReply)}
        for client, down in missing.items() if asked else ():  # the first time is counted below
            traffic.setdefault(client, Traffic()).bytes_down += nbytes(down)
        replies = engine.exchange(missing, when)
        answers |= {client: examine(client, down, replies[client]) for client, down in missing.items() if client in replies}
        came, asked = sum(isinstance(answers.get(client), Reply) for client in plan.count), asked + 1
    for client, down in downs.items():
        traffic.setdefault(client, Traffic()).add(down, answers.get(client))
    times = "nobody could be asked" if not downs else f"after asking {asked} times" if asked > 1 else "after asking once"
    return answers, f"{came} of {needed} needed replies came, {times}" if came < needed else ""


def _discount(traffic: Mapping[ClientId, Traffic], short: str) -> None:
    """Mark the clients that replied in a round that does not count."""
    for client in traffic.values():
        if client.answered:
            client.answered, client.reason = False, f"the round does not count: {short}"
