"""The server's side of a deployment: who is there, what each is sent, what came back. A site that is missing is normal."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedme import networks
from fedme.config.experiment import Experiment
from fedme.core.atomic_files import write_json
from fedme.core.data import ClientId
from fedme.core.method import Member, Report, Round, Task, TaskError
from fedme.core.model import Arch
from fedme.core.operations import Computation
from fedme.core.tree import nbytes
from fedme.core.typed import TypedError, build
from fedme.deployment import transfer_log
from fedme.deployment.handshake import Hello, admitted
from fedme.deployment.operator_folder import Settings
from fedme.deployment.site_settings import with_members
from fedme.deployment.site_state import claimed, exchanges
from fedme.deployment.submitted_runs import SITES
from fedme.execution.lockstep import T, Timed, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune, ModelScore
from fedme.federation.flower import EngineError
from fedme.federation.flower.message_content import Envelope
from fedme.federation.flower.requests import Failure, Link, Node
from fedme.federation.reply_validation import Kinds, check_scores
from fedme.federation.round import NoReply, RejectedReply, Reply
from fedme.learning.accountant import Ledger

ROOM = 1 << 26  # bytes that a site may send beside twice what it was sent: outputs, reports
WAIT = 1.0  # seconds between two looks for sites, and until a round is asked for again; every time twice as long, up to ...
LONGEST = 30.0
AGAIN = 30.0  # seconds until a site that was refused is asked again


@dataclass(frozen=True)
class Known:
    """What the server remembers of a site through restarts."""

    hello: Hello
    version: int  # of its private state, after its last reply
    joined: int  # the round
    has_model: bool = False  # whether it was handed its model at the end


@dataclass
class SiteEngine:
    """An engine whose clients are sites."""

    folder: Path
    run: str
    experiment: Experiment
    agreed: Task  # without members
    archs: Mapping[str, Arch]
    link: Link
    settings: Settings
    names: Callable[[], Mapping[Node, ClientId]] | None  # whose key a node has; None without authentication
    say: Callable[[str], None]
    public: str = ""  # what tells the server's public samples from others
    states: dict[ClientId, Any] = field(default_factory=dict)  # they are at the sites
    spent: dict[ClientId, Ledger] = field(default_factory=dict)  # of their privacy, as the sites say
    known: dict[ClientId, Known] = field(default_factory=dict)
    nodes: dict[ClientId, Node] = field(default_factory=dict)  # who is connected
    refused: dict[Node, float] = field(default_factory=dict)  # when they may be asked again
    round: int = 0

    def __post_init__(self) -> None:
        self.method: AnyMethod = self.experiment.method
        self.kinds = Kinds.of(self.method)
        self.task = self.agreed

    @property
    def samples(self) -> dict[ClientId, int]:
        """How much every site trains on."""
        return {client: known.hello.samples for client, known in self.known.items()}

    @property
    def needed(self) -> int:
        """How many replies make a round count."""
        cohort = self.experiment.settings.train.cohort
        return min(self.settings.min_replies, cohort or self.settings.min_replies)

    def current_task(self) -> Task:
        """Look who is there; whoever is new is asked who it is. Waits for enough sites."""
        needed = self.needed if self.round else max(self.settings.min_sites, self.needed)
        self._wait(lambda: len(self.nodes) >= needed, lambda: f"{len(self.nodes)} of {needed} are there")
        return self.task

    def wait_for(self, clients: Collection[ClientId]) -> None:
        """Wait until one of these is there."""
        self._wait(lambda: any(client in self.nodes for client in clients), lambda: f"{', '.join(clients)} must come back")

    def without_model(self) -> list[ClientId]:
        """Who was not handed its model at the end."""
        return [client for client, known in self.known.items() if not known.has_model]

    def _wait(self, enough: Callable[[], bool], state: Callable[[], str]) -> None:
        until, said = time.monotonic() + self.settings.patience, ""
        while True:
            self._meet()
            if enough():
                return
            if state() != said:
                said = state()
                self.say(f"waiting for sites: {said}")
            if time.monotonic() > until:
                raise EngineError(f"waited {self.settings.patience:.0f} s for sites, but {state()}")
            self.link.look()
            time.sleep(WAIT)

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """The members that are not connected."""
        return dict.fromkeys((client for client in self.task.members if client not in self.nodes), "not connected")

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Send every site its message; those that fail are asked again until enough have answered."""
        self.round = when.t + 1
        until = time.monotonic() + self.settings.patience
        quorum = self.experiment.settings.faults.needs.needed(len(downs))
        needed, pause = min(max(self.needed, quorum), len(downs)), WAIT
        answers: dict[ClientId, Reply | NoReply] = {}
        while True:
            missing = [client for client in downs if not isinstance(answers.get(client), Reply)]
            answers |= self._exchange({client: downs[client] for client in missing}, when)
            came = sum(isinstance(answer, Reply) for answer in answers.values())
            if came >= needed:
                self._remember()
                return answers
            if time.monotonic() > until:
                patience = self.settings.patience
                raise EngineError(f"round {when.t}: only {came} of {needed} needed replies within {patience:.0f} s")
            self.say(f"round {when.t}: {came} of {needed} needed replies; asking the others again in {pause:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
            self._meet()

    def _exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        found: dict[ClientId, Reply | NoReply] = {
            client: NoReply("not connected") for client in downs if client not in self.nodes
        }
        asked = {}
        for client, down in downs.items():
            if client in self.nodes:
                transfer_log.note(self.folder, "sent", client, self.run, when.t, down)
                asked[client] = (self.nodes[client], Envelope.of(run=self.run, when=when, down=down))
        for client, reply in self.link.ask("train", asked, most=lambda client: ROOM + 2 * nbytes(downs[client])).items():
            found[client] = self._answer(client, reply, when)
        for client, answer in found.items():
            if isinstance(answer, NoReply):
                self.say(f"round {when.t}: {client} is missing: {answer.reason}")
        return found

    def _answer(self, client: ClientId, reply: Envelope | Failure, when: Round) -> Reply | NoReply:
        if isinstance(reply, Failure):
            return RejectedReply(_said(reply)) if reply.offence else NoReply(_said(reply))
        try:
            up = reply.read("up", self.kinds.up | None, self.archs)
            report, seconds = reply.read("report", Report), reply.read("seconds", float)
            before, after = reply.read("before", int), reply.read("after", int)
            about = reply.read("when", Round)
            self.spent[client] = claimed(reply.read("spent", Ledger))
        except TypedError as error:
            return RejectedReply(f"refused: {error}")
        transfer_log.note(self.folder, "received", client, self.run, when.t, up)
        known, notes = self.known[client], dict(report.notes)
        expected = min(known.version, exchanges(self.method.phases, when))
        if before < expected:
            notes["lost_state"] = f"version {before} instead of {expected}"
            self.say(f"round {when.t}: {client} lost its private state: it has version {before} instead of {expected}")
        if known.joined == when.t and when.t:
            notes["joined"] = when.t
        self.known[client] = replace(known, version=after)
        return Reply(up, replace(report, notes=notes), seconds, about)

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let the sites score their models, which stay where they are; at the end they keep them."""
        asked = {}
        for client, delivery in deliveries.items():
            if client in self.nodes:
                transfer_log.note(self.folder, "sent", client, self.run, when.t, delivery)
                envelope = Envelope.of(run=self.run, when=when, delivery=delivery, finetune=finetune)
                asked[client] = (self.nodes[client], envelope)
            else:
                self.say(f"round {when.t}: no scores from {client}: not connected")
        done = {}
        for client, reply in self.link.ask("evaluate", asked, most=lambda client: ROOM).items():
            try:
                if isinstance(reply, Failure):
                    raise TypedError("", _said(reply))
                scores, seconds = reply.read("scores", list[ModelScore]), reply.read("seconds", float)
                check_scores(scores)
                self.spent[client] = claimed(reply.read("spent", Ledger))
                done[client] = Timed(Evaluation(None, {}, scores), seconds)
                self.known[client] = replace(self.known[client], has_model=when.t + 1 == when.total)
            except TypedError as error:
                self.say(f"round {when.t}: no scores from {client}: {error}")
        self._remember()
        return done

    def run_on_server(self, steps: Computation[T]) -> Timed[T]:
        """Run work of the server."""
        return run_in_lockstep({"server": steps}, one_by_one)["server"]

    def _meet(self) -> None:
        """Notice who left, and ask whoever is new for its hello."""
        there = set(self.link.nodes())
        for client, node in list(self.nodes.items()):
            if node not in there:
                del self.nodes[client]
                self.say(f"{client} left")
        refused = {node for node, until in self.refused.items() if until > time.monotonic()}
        strangers = sorted(there - set(self.nodes.values()) - refused)
        if not strangers:
            return
        ask = Envelope.of(run=self.run, config=self.experiment.plain())
        for node, reply in self.link.ask(
            "query.hello", {node: (node, ask) for node in strangers}, most=lambda node: ROOM
        ).items():
            self._welcome(node, reply)
        self._enrol()
        self._remember()

    def _enrol(self) -> None:
        """Everybody who ever came is a member."""
        members: dict[ClientId, Member] = {}
        for client, known in self.known.items():
            members[client] = admitted(known.hello, self.experiment, self.agreed, self.archs)
        self.task = with_members(self.agreed, members)
        self.method.check(self.task)

    def _welcome(self, node: Node, reply: Envelope | Failure) -> None:
        names = self.names() if self.names is not None else {}
        called = names.get(node, f"node {node}")
        try:
            if isinstance(reply, Failure):
                raise TaskError(_said(reply))
            hello = reply.read("hello", Hello)
            if self.names is not None and names.get(node) != hello.client:
                raise TaskError(f"it calls itself '{hello.client}', but has another site's key")
            if hello.public != self.public:
                raise TaskError("its public samples are not the server's: all need the same data.public_file")
            if hello.client in self.nodes:
                raise TaskError(f"there is a '{hello.client}' already")
            admitted(hello, self.experiment, self.agreed, self.archs)
        except (TaskError, TypedError, networks.ArchError, ValueError) as error:
            unheard = isinstance(reply, Failure) and reply.reason == _said(reply)  # it could not even be asked
            self.say(f"no hello from {called}: {error}" if unheard else f"refused {called}: {error}")
            self.refused[node] = time.monotonic() + AGAIN
            return
        before = self.known.get(hello.client)
        version, joined = (before.version, before.joined) if before else (hello.version, self.round)
        self.known[hello.client] = Known(hello, version, joined, before is not None and before.has_model)
        self.nodes[hello.client] = node
        late = f", joining in round {self.round}" if self.round and not before else ""
        self.say(f"{hello.client} is there: {hello.arch}, {hello.samples} training samples{late}")

    def _remember(self) -> None:
        write_json(self.folder / SITES, {client: asdict(known) for client, known in self.known.items()})

    def recall(self, plain: Mapping[str, Any], at: int) -> None:
        """Go on in round `at` with what was remembered."""
        self.round = at
        self.known = {client: build(Known, each, client) for client, each in plain.items()}
        self._enrol()


def _said(failure: Failure) -> str:
    """A site's own words, without the name of the exception they came in."""
    return failure.reason.removeprefix("SiteError: ")
