"""An engine whose clients are sites: which sites are connected, what each is sent, and what it replied.

Sites may be missing from any round.
"""

import functools
import operator
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedme import networks
from fedme.config.experiment import Experiment
from fedme.core.atomic_files import write_json
from fedme.core.data import ClientId
from fedme.core.foreign_text import one_line
from fedme.core.method import Report, Round, Task, TaskError
from fedme.core.model import Arch
from fedme.core.operations import Computation
from fedme.core.typed import TypedError, build
from fedme.deployment import transfer_log
from fedme.deployment.handshake import Handshake, admit
from fedme.deployment.operator_folder import Settings
from fedme.deployment.reply_sizes import largest_reply
from fedme.deployment.site_settings import with_members
from fedme.deployment.site_state import check_ledger, exchanges_before
from fedme.deployment.submitted_runs import SITES
from fedme.execution.lockstep import T, Timed, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune, ModelScore
from fedme.federation.flower import EngineError
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.flower.reply_limits import SMALLEST, ReplyLimit
from fedme.federation.flower.requests import Failure, GridRequests, Node
from fedme.federation.reply_validation import MessageTypes, check_scores
from fedme.federation.round import ClientStates, NoReply, RejectedReply, Reply
from fedme.learning.accountant import Ledger
from fedme.learning.robust_aggregation import defence_of

RETRY_DELAY = 1.0  # seconds between two polls for sites, and before requests are repeated; the latter doubles every time
MAX_RETRY_DELAY = 30.0  # seconds
REFUSAL_SECONDS = 30.0  # until a refused site may try again
UNREADABLE = (TypedError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
SITE_ERROR = "SiteError: "  # precedes an error text that the site itself has written


@dataclass(frozen=True)
class SiteRecord:
    """What the server remembers of a site across restarts."""

    handshake: Handshake
    version: int  # of its private state, after its last reply
    joined: int  # the round
    has_model: bool = False  # whether it received its model at the end


@dataclass(frozen=True)
class Refusal:
    """Why a node was refused, and when it may try again."""

    until: float
    reason: str  # empty if there was no handshake


@dataclass
class SiteEngine:
    """An engine whose clients are sites."""

    folder: Path
    run: str
    experiment: Experiment
    agreed: Task  # the task without members
    archs: Mapping[str, Arch]
    requests: GridRequests
    settings: Settings
    registered_sites: (
        Callable[[], Mapping[Node, ClientId]] | None
    )  # the site of every registered node; None without authentication
    log: Callable[[str], None]
    public: str = ""  # fingerprint of the server's public samples
    announce_limit: Callable[[ReplyLimit], None] = lambda limit: None  # tells the proxy how large a reply may be
    states: ClientStates = field(default_factory=ClientStates, init=False)  # only ledgers: states stay at the sites

    def __post_init__(self) -> None:
        self.task = self.agreed
        self._method: AnyMethod = self.experiment.method
        self._types = MessageTypes.of(self._method)
        self._records: dict[ClientId, SiteRecord] = {}
        self._nodes: dict[ClientId, Node] = {}  # of the connected sites
        self._refused: dict[Node, Refusal] = {}
        self._round = 0

    @property
    def samples(self) -> dict[ClientId, int]:
        """The number of training samples per site; a site that does not tell counts as the median of those that do."""
        told = [record.handshake.samples for record in self._records.values() if record.handshake.samples]
        median = int(statistics.median(told)) if told else 1
        return {client: record.handshake.samples or median for client, record in self._records.items()}

    def current_task(self) -> Task:
        """Admit new sites, wait for enough of them, and return the task with all members."""
        needed = self._min_replies if self._round else max(self.settings.min_sites, self._min_replies)
        self._wait(lambda: len(self._nodes) >= needed, lambda: f"{len(self._nodes)} of {needed} are connected")
        return self.task

    def wait_for_any(self, clients: Collection[ClientId]) -> None:
        """Wait until one of these sites is connected."""
        self._wait(
            lambda: any(client in self._nodes for client in clients), lambda: f"none of {', '.join(clients)} is connected"
        )

    def without_model(self) -> list[ClientId]:
        """The sites that have not received their model at the end."""
        return [client for client, record in self._records.items() if not record.has_model]

    def restore(self, records: Mapping[str, Any], round_number: int) -> None:
        """Continue in this round with saved site records."""
        self._round = round_number
        self._records = {client: build(SiteRecord, record, client) for client, record in records.items()}
        self._update_members()

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """The members that are not connected."""
        return dict.fromkeys((client for client in self.task.members if client not in self._nodes), "not connected")

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Send every site its message, and repeat it to those that fail until enough have replied."""
        self._round = when.t + 1
        patience = self.settings.patience
        deadline = time.monotonic() + patience
        quorum = self.experiment.settings.faults.needs.needed(len(downs))
        needed, delay = min(max(self._min_replies, quorum), len(downs)), RETRY_DELAY
        replies: dict[ClientId, Reply | NoReply] = {}
        while True:
            missing = [client for client in downs if not isinstance(replies.get(client), Reply)]
            replies |= self._exchange_once({client: downs[client] for client in missing}, when)
            count = sum(isinstance(reply, Reply) for reply in replies.values())
            if count >= needed:
                self._save_records()
                return replies
            if time.monotonic() > deadline:
                raise EngineError(f"round {when.t}: only {count} of {needed} needed replies within {patience:.0f} s")
            self.log(f"round {when.t}: {count} of {needed} needed replies; asking the others again in {delay:.0f} s")
            time.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_DELAY)
            self._update_sites()

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let the sites evaluate their models, which stay there; at the end of the run the sites save them."""
        evaluations = {}
        replies = self._send("evaluate", "delivery", deliveries, when, dict.fromkeys(deliveries, SMALLEST), finetune=finetune)
        for client, reply in replies.items():
            try:
                if isinstance(reply, Failure):
                    raise TypedError("", _reason(reply))
                scores, seconds = reply.read("scores", list[ModelScore]), reply.read("seconds", float)
                check_scores(scores, self.task.schema.task_type)
                self.states.ledgers[client] = check_ledger(reply.read("spent", Ledger))
                evaluations[client] = Timed(Evaluation(None, {}, scores), seconds)
                self._records[client] = replace(self._records[client], has_model=when.t + 1 == when.total)
            except UNREADABLE as error:
                self.log(f"round {when.t}: no scores from {client}: {error}")
        self._save_records()
        return evaluations

    def run_on_server(self, steps: Computation[T]) -> Timed[T]:
        """Run the server's work in this process."""
        return run_in_lockstep({"server": steps}, one_by_one)["server"]

    @property
    def _min_replies(self) -> int:
        """The replies that a round needs. A robust average may need more than the operator's file says."""
        cohort = self.experiment.settings.train.cohort
        return max(min(self.settings.min_replies, cohort or self.settings.min_replies), defence_of(self._method).fewest)

    def _wait(self, enough: Callable[[], bool], situation: Callable[[], str]) -> None:
        """Admit sites until there are enough; log the situation whenever it changes."""

        def missing() -> str:
            return "; refused ".join([situation(), *(refusal.reason for refusal in self._refused.values() if refusal.reason)])

        deadline, logged = time.monotonic() + self.settings.patience, ""
        while True:
            self._update_sites()
            if enough():
                return
            if missing() != logged:
                logged = missing()
                self.log(f"waiting for sites: {logged}")
            if time.monotonic() > deadline:
                raise EngineError(f"waited {self.settings.patience:.0f} s for sites, but {missing()}")
            self.requests.on_poll()
            time.sleep(RETRY_DELAY)

    def _send(
        self,
        message_type: str,
        name: str,
        values: Mapping[ClientId, Any],
        when: Round,
        limits: Mapping[ClientId, ReplyLimit],
        **common: Any,
    ) -> dict[ClientId, MessageContent | Failure]:
        """Send every connected site its value under this name, and collect the replies."""
        requests = {}
        for client, value in values.items():
            if client in self._nodes:
                transfer_log.record(self.folder, "sent", client, self.run, when.t, value)
                requests[client] = self._nodes[client], MessageContent.of(run=self.run, when=when, **{name: value}, **common)
        self.announce_limit(functools.reduce(operator.or_, limits.values(), SMALLEST))
        replies = self.requests.send(message_type, requests, limit=limits.__getitem__)
        return {client: replies.get(client, Failure("not connected")) for client in values}

    def _exchange_once(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        limits = {client: largest_reply(self.task, down) for client, down in downs.items()}
        received = self._send("train", "down", downs, when, limits)
        replies = {client: self._read_reply(client, content, when) for client, content in received.items()}
        for client, reply in replies.items():
            if isinstance(reply, NoReply) and not isinstance(reply, RejectedReply):  # the round loop names those
                self.log(f"round {when.t}: no reply from {client}: {reply.reason}")
        return replies

    def _read_reply(self, client: ClientId, content: MessageContent | Failure, when: Round) -> Reply | NoReply:
        if isinstance(content, Failure):
            return (RejectedReply if content.offence else NoReply)(_reason(content))
        try:
            up = content.read("up", self._types.up | None, self.archs)
            report, seconds = content.read("report", Report), content.read("seconds", float)
            versions = [content.read(name, int) for name in ("before", "after")]
            about = content.read("when", Round)
            self.states.ledgers[client] = check_ledger(content.read("spent", Ledger))
        except UNREADABLE as error:
            return RejectedReply(f"refused: {one_line(str(error))}")
        transfer_log.record(self.folder, "received", client, self.run, when.t, up)
        record, notes = self._records[client], dict(report.notes)
        exchanges = exchanges_before(self._method.phases, when)
        before, after = (min(max(version, 0), exchanges + 1) for version in versions)  # a site may claim any number
        expected = min(record.version, exchanges)
        if before < expected:
            notes["lost_state"] = f"version {before} instead of {expected}"
            self.log(f"round {when.t}: {client} lost its private state: it has {notes['lost_state']}")
        if record.joined == when.t and when.t:
            notes["joined"] = when.t
        if not record.handshake.samples and hasattr(up, "samples"):
            up = replace(up, samples=self.samples[client])
        self._records[client] = replace(record, version=after)
        return Reply(up, replace(report, notes=notes), seconds, about)

    def _update_sites(self) -> None:
        """Drop the sites that have disconnected, and shake hands with new nodes."""
        connected = set(self.requests.nodes())
        for client in [client for client, node in self._nodes.items() if node not in connected]:
            del self._nodes[client]
            self.log(f"{client} disconnected")
        self._refused = {node: refusal for node, refusal in self._refused.items() if node in connected}
        refused = {node for node, refusal in self._refused.items() if refusal.until > time.monotonic()}
        new = sorted(connected - set(self._nodes.values()) - refused)
        if not new:
            return
        content = MessageContent.of(run=self.run, config=self.experiment.plain())
        requests = {node: (node, content) for node in new}
        for node, reply in self.requests.send("query.handshake", requests, limit=lambda node: SMALLEST).items():
            self._admit(node, reply)
        self._update_members()
        self._save_records()

    def _admit(self, node: Node, reply: MessageContent | Failure) -> None:
        registered = self.registered_sites() if self.registered_sites is not None else {}
        try:
            if isinstance(reply, Failure):
                raise TaskError(_reason(reply))
            handshake = reply.read("handshake", Handshake)
            client = handshake.client
            if self.registered_sites is not None and registered.get(node) != client:
                raise TaskError(f"it claims to be '{client}', but has another site's key")
            if handshake.public != self.public:
                raise TaskError("its public samples differ from the server's; use the same data.public_file everywhere")
            if client in self._nodes:
                raise TaskError(f"'{client}' is already connected")
            admit(handshake, self.experiment, self.agreed, self.archs)
        except (TaskError, networks.ArchError, *UNREADABLE) as error:
            unreachable = isinstance(reply, Failure) and not reply.reason.startswith(SITE_ERROR)
            name = registered.get(node, f"node {node}")
            self.log(f"no handshake with {name}: {error}" if unreachable else f"refused {name}: {error}")
            self._refused[node] = Refusal(time.monotonic() + REFUSAL_SECONDS, "" if unreachable else f"{name}: {error}")
            return
        self._refused.pop(node, None)
        previous = self._records.get(client)
        record = previous or SiteRecord(handshake, handshake.version, self._round)
        self._records[client] = replace(record, handshake=handshake)
        self._nodes[client] = node
        late = f", joins in round {self._round}" if self._round and not previous else ""
        count = handshake.samples or "an untold number of"
        self.log(f"{client} connected: {handshake.arch}, {count} training samples{late}")

    def _update_members(self) -> None:
        """Make every site that has ever connected a member of the task."""
        admitted = (admit(site.handshake, self.experiment, self.agreed, self.archs) for site in self._records.values())
        self.task = with_members(self.agreed, {member.id: member for member in admitted})
        self._method.check(self.task)

    def _save_records(self) -> None:
        write_json(self.folder / SITES, {client: asdict(record) for client, record in self._records.items()})


def _reason(failure: Failure) -> str:
    return failure.reason.removeprefix(SITE_ERROR)
