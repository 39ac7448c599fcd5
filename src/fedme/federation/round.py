"""One round of any method over any engine, and what an engine must offer.

An engine may return fewer replies than it got messages: a client that misses a round is normal. If too few reply, the missing
clients are asked again; if that does not help, the round does not count.
"""

import functools
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fedme.core.data import ClientId
from fedme.core.foreign_text import one_line
from fedme.core.key import Key
from fedme.core.method import POOL, Plan, Report, Round, Task
from fedme.core.operations import Computation
from fedme.core.tree import nbytes
from fedme.core.typed import TypedError
from fedme.core.value_class import value_class
from fedme.execution.lockstep import Timed
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune
from fedme.federation.offences import OffenceRecord, quarantined, record_offences
from fedme.federation.reply_agreement import different_from_most, full_form, tensor_kinds
from fedme.federation.reply_validation import Changes, bounded, changes, check_reply, check_report, moved
from fedme.learning.accountant import Ledger
from fedme.learning.exchanged_part import exchanged_part
from fedme.learning.robust_aggregation import OPEN, Defence, defence_of

T = TypeVar("T")
NOTHING = Report({})
Examine = Callable[[ClientId, Any, "Reply | NoReply"], tuple["Reply | NoReply", Changes]]  # client, message, what came


@value_class
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
    least: int = 1  # a number that is needed in any case, by a robust average

    def needed(self, asked: int) -> int:
        """The number of replies needed out of `asked`, at least `least`."""
        return max(self.least, self.replies if isinstance(self.replies, int) else math.ceil(self.replies * asked - 1e-9))


class ClientStates(dict[ClientId, Any]):
    """The state of every client that has one, and the privacy ledger of every client that trained privately."""

    def __init__(self, states: Mapping[ClientId, Any] | None = None, ledgers: Mapping[ClientId, Ledger] | None = None) -> None:
        super().__init__(states or {})
        self.ledgers: dict[ClientId, Ledger] = dict(ledgers or {})


class Engine(Protocol):
    """Where clients and server do their work.

    With an attribute `clients_at_a_time`, messages are exchanged with so many clients, then with the next.
    """

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
        """Send clients their messages and collect the replies that come back, at the latest when they are read."""
        ...

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let clients evaluate their models."""
        ...

    def run_on_server(self, work: Computation[T]) -> Timed[T]:
        """Run work of the server."""
        ...


class AtRest(Protocol):
    """Where the weights of a round are while nobody computes with them; for models that do not fit in memory together."""

    def groups(self, downs: Mapping[ClientId, T]) -> Iterator[Mapping[ClientId, T]]:
        """The messages, those first that are worked on together."""
        ...

    def keep(self, value: T) -> T:
        """The same value, with weights that may be in a file until they are read."""
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
    report: Report = NOTHING
    moved: float | None = None  # the largest change of a model that the client sent

    def add(self, bytes_down: int, answer: Reply | NoReply | None) -> None:
        """Count one exchange of the round: the size of the message, and what came."""
        self.bytes_down += bytes_down
        if answer is None or isinstance(answer, NoReply):
            self.answered, self.reason = False, answer.reason if answer else ""
            return
        self.bytes_up += nbytes(answer.up) if answer.up is not None else 0
        self.seconds += answer.seconds
        self.report = (
            answer.report
            if self.report is NOTHING
            else Report(
                {**self.report.losses, **answer.report.losses},
                {**self.report.scores, **answer.report.scores},
                {**self.report.notes, **answer.report.notes},
            )
        )

    def add_distance(self, moved: float | None) -> None:
        """Count that a model of the client moved so far."""
        if moved is not None and (self.moved is None or moved > self.moved):
            self.moved = moved

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
    not_averaged: Mapping[ClientId, str] = field(default_factory=dict)  # why a robust average left a reply out


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
    rest: AtRest | None = None,
) -> RoundResult:
    """All exchanges of round `t`. If one of them is below the quorum, the server stays as it was before the round.

    `offences` records the invalid replies of earlier rounds. With `rest`, messages and replies are handed to it.
    """
    key, before, part = root.at("round", t, "server"), server, exchanged_part(method, task)
    traffic: dict[ClientId, Traffic] = {}
    seconds = 0.0
    offences = offences or {}
    out, refused, left_out = quarantined(offences, t), dict[ClientId, str](), dict[ClientId, str]()
    for phase in method.phases:
        when = Round(t, total, phase)
        began = time.perf_counter()
        unavailable = {**engine.unavailable(when), **{client: record.words() for client, record in out.items()}}
        traffic.update({client: Traffic(False, why) for client, why in unavailable.items() if client not in traffic})
        plan = method.plan(server, [client for client in task.members if client not in unavailable], when, key)
        planned = engine.run_on_server(method.dispatch(task, server, plan, when, key)).value if plan.train else {}
        planned = part.stripped(planned) if part is not None else planned
        planned = rest.keep(planned) if rest is not None else planned
        downs = {client: down for client, down in planned.items() if client not in refused}
        seconds += time.perf_counter() - began
        examine = functools.partial(_examined, method, task, engine.samples, defence, when)
        answers, short = _collect_replies(engine, downs, when, plan, quorum, traffic, examine, rest)
        refused |= {client: answer.reason for client, answer in answers.items() if isinstance(answer, RejectedReply)}
        if short:
            _discount(traffic, short)
            return RoundResult(before, traffic, seconds, short, record_offences(offences, refused.items(), t, defence))
        began = time.perf_counter()
        # Replies arrive in any order; floating-point sums need a fixed one.
        ordered = {client: answers.get(client) for client in [POOL, *task.members] if client in plan.count}
        counted = {client: reply.up for client, reply in ordered.items() if isinstance(reply, Reply) and reply.up is not None}
        server, odd, few = _aggregated(method, server, counted, when, key)
        heard = {client: up for client, up in counted.items() if client not in odd}
        server = engine.run_on_server(method.refine(task, server, heard, when, key)).value
        for client, reason in odd.items():
            refused[client] = reason
            traffic[client].answered, traffic[client].reason = False, reason
        for client, reason in few.items():
            left_out[client] = reason
            traffic[client].note("not_averaged", reason)
        seconds += time.perf_counter() - began
    return RoundResult(server, traffic, seconds, "", record_offences(offences, refused.items(), t, defence), left_out)


def _aggregated(
    method: AnyMethod, server: Any, replies: Mapping[ClientId, Any], when: Round, key: Key
) -> tuple[Any, dict[ClientId, str], dict[ClientId, str]]:
    """The server's new state, the replies that were left out because they have another form than most, or too few copies."""
    reason = "refused: its reply has not the form of the others"
    odd = dict.fromkeys(different_from_most(replies, tensor_kinds), reason)
    kept = {client: reply for client, reply in replies.items() if client not in odd} if odd else replies
    few = _too_few(method, kept)
    kept = {client: reply for client, reply in kept.items() if client not in few} if few else kept
    try:
        return method.aggregate(server, kept, when, key), odd, few
    except Exception as error:
        others = different_from_most(kept, full_form)
        if not others:
            raise
        odd |= dict.fromkeys(others, f"{reason}: {type(error).__name__}: {error}")
        kept = {client: reply for client, reply in kept.items() if client not in odd}
        few |= _too_few(method, kept)
        return method.aggregate(server, {c: reply for c, reply in kept.items() if c not in few}, when, key), odd, few


def _too_few(method: AnyMethod, replies: Mapping[ClientId, Any]) -> dict[ClientId, str]:
    """The replies that a robust average cannot use: too few others are averaged with them. Their model stays as it is."""
    robust = defence_of(method)
    if robust.fewest == 1:
        return {}
    groups = {client: method.averaged_with(reply) for client, reply in replies.items()}
    copies = Counter(groups.values())
    return {
        client: f"{copies[group]} copies of this model came, and '{robust.average}' needs {robust.fewest}"
        for client, group in groups.items()
        if copies[group] < robust.fewest
    }


def _examined(
    method: AnyMethod,
    task: Task,
    samples: Mapping[ClientId, int],
    defence: Defence,
    when: Round,
    client: ClientId,
    down: Any,
    came: Reply | NoReply,
) -> tuple[Reply | NoReply, Changes]:
    """The reply if it is valid, with its changes bounded, and what it changed; else why it is rejected."""
    if isinstance(came, NoReply):
        return came, []
    try:
        if came.when not in (None, when):
            raise TypedError("when", f"expected {when}, got {came.when}")
        check_report(came.report, came.seconds, task.schema.task_type, task.members)
        if came.up is None:
            return came, []
        sent = check_reply(method, task, down, came.up, when, samples.get(client))
    except TypedError as error:
        return RejectedReply(f"refused: {error}"), []
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # A method's `expects` meets what no honest client sends.
        return RejectedReply(f"refused: {type(error).__name__}: {one_line(str(error))}"), []
    changed = changes(came.up, sent)
    return (came if defence.norm is None else replace(came, up=bounded(came.up, sent, defence.norm))), changed


def _collect_replies(
    engine: Engine,
    downs: Mapping[ClientId, Any],
    when: Round,
    plan: Plan,
    quorum: Quorum,
    traffic: dict[ClientId, Traffic],
    examine: Examine,
    rest: AtRest | None = None,
) -> tuple[dict[ClientId, Reply | NoReply], str]:
    """The replies of an exchange, and a description of what is missing to the quorum."""
    answers: dict[ClientId, Reply | NoReply] = {}
    needed, came, asked = quorum.needed(len(plan.count)), 0, 0
    size = getattr(engine, "clients_at_a_time", None)
    for client in downs:
        traffic.setdefault(client, Traffic())
    while downs and came < needed and asked <= quorum.repeats:
        missing = {client: down for client, down in downs.items() if not isinstance(answers.get(client), Reply | RejectedReply)}
        for client, down in missing.items() if asked else ():  # the first time is counted with what came of it
            traffic[client].bytes_down += nbytes(down)
        for group in rest.groups(missing) if rest is not None else in_groups(missing, size):
            came_now = _exchange(engine, group, when, traffic, examine)
            answers |= rest.keep(came_now) if rest is not None else came_now
            del came_now  # the weights of the last group need not wait for the next
        came, asked = sum(isinstance(answers.get(client), Reply) for client in plan.count), asked + 1
    for client, down in downs.items():
        if not isinstance(answers.get(client), Reply):
            traffic[client].add(nbytes(down), answers.get(client))
    times = "nobody could be asked" if not downs else f"after asking {asked} times" if asked > 1 else "after asking once"
    return answers, f"{came} of {needed} needed replies came, {times}" if came < needed else ""


def _exchange(
    engine: Engine, downs: Mapping[ClientId, Any], when: Round, traffic: Mapping[ClientId, Traffic], examine: Examine
) -> dict[ClientId, Reply | NoReply]:
    """What comes of these messages. While it is counted, clients whose replies were not read yet may still compute."""
    answers, changed = dict[ClientId, Reply | NoReply](), dict[ClientId, Changes]()
    sizes: dict[int, int] = {}  # of messages by their identity: many clients may get the same one
    for client, came in engine.exchange(downs, when).items():
        if client not in downs:
            continue
        down = downs[client]
        answer, changed[client] = examine(client, down, came)
        answers[client] = answer
        if isinstance(answer, Reply):
            if (size := sizes.get(id(down))) is None:
                size = sizes[id(down)] = nbytes(down)
            traffic[client].add(size, answer)
    for client, distance in zip(changed, moved(list(changed.values())), strict=True):
        traffic[client].add_distance(distance)
    return answers


def in_groups(downs: Mapping[ClientId, T], size: int | None) -> Iterator[Mapping[ClientId, T]]:
    """The messages in groups of at most `size`."""
    if size is None or len(downs) <= size:
        yield downs
        return
    rest = iter(downs.items())
    while group := dict(itertools.islice(rest, size)):
        yield group


def _discount(traffic: Mapping[ClientId, Traffic], short: str) -> None:
    """Mark the clients that replied in a round that does not count."""
    for client in traffic.values():
        if client.answered:
            client.answered, client.reason = False, f"the round does not count: {short}"
