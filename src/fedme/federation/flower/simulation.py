"""Clients on Flower's simulation runtime: Ray processes on this machine or on a cluster.

A client has no place of its own here: its state travels with every message, so any process can play any client, and what is
saved between rounds is the same as in one process. A process opens the experiment's data once and keeps it.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flwr.simulation
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedme.core.data import ClientId
from fedme.core.method import Report, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation
from fedme.core.typed import TypedError
from fedme.execution.lockstep import T, Timed
from fedme.federation.client_work import Evaluation, Finetune, ModelScore
from fedme.federation.flower import EngineError
from fedme.federation.flower.message_content import Envelope
from fedme.federation.flower.requests import Failure, Link
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import Kinds, check_sent
from fedme.federation.round import ClientStates, NoReply, RejectedReply, Reply
from fedme.learning.accountant import Ledger

PAUSE = 0.02  # seconds between two looks for replies


@dataclass(frozen=True)
class Room:
    """All clients, as one process sees them, and every architecture that may occur."""

    engine: InProcessEngine
    archs: Mapping[str, Arch]


class FlowerSimulation:
    """The clients of `room`, each message played wherever there is a free process."""

    def __init__(self, room: Room, link: Link, tick: Callable[[], None]) -> None:
        self.room, self.link, self.tick = room, link, tick
        self.kinds = Kinds.of(room.engine.method)
        self.clients, self.samples = room.engine.clients, room.engine.samples
        self.states = ClientStates()

    def current_task(self) -> Task:
        """The federation, always the same."""
        return self.room.engine.task

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """Nobody."""
        return {}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Hand every client its message and its state, and collect both."""
        replies = self._ask("train", {client: {"down": down} for client, down in downs.items()}, when)
        answers: dict[ClientId, Reply | NoReply] = {}
        for client, reply in replies.items():
            self.states[client] = reply.read("state", self.kinds.state, self.room.archs)
            try:
                up = reply.read("up", self.kinds.up | None, self.room.archs)
                report, seconds = reply.read("report", Report), reply.read("seconds", float)
                answers[client] = Reply(up, report, seconds, reply.read("when", Round))
            except TypedError as error:
                answers[client] = RejectedReply(f"refused: {error}")
        return answers

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let every client show how its models do."""
        asked = {client: {"delivery": delivery, "finetune": finetune} for client, delivery in deliveries.items()}
        done = {}
        for client, reply in self._ask("evaluate", asked, when).items():
            state = self.states[client] = reply.read("state", self.kinds.state, self.room.archs)
            models = reply.read("models", dict[str, Model], self.room.archs)
            assessment = Evaluation(state, models, reply.read("scores", list[ModelScore]))
            done[client] = Timed(assessment, reply.read("seconds", float))
        return done

    def run_on_server(self, steps: Computation[T]) -> Timed[T]:
        """Run work of the server, here."""
        return self.room.engine.run_on_server(steps)

    def _ask(self, kind: str, asked: Mapping[ClientId, Mapping[str, Any]], when: Round) -> dict[ClientId, Envelope]:
        nodes = self.link.nodes()
        envelopes = {
            client: (nodes[i], Envelope.of(client=client, when=when, **self._own(client), **values))
            for i, (client, values) in enumerate(asked.items())
        }
        replies = {}
        for client, reply in self.link.ask(kind, envelopes, lambda client: self.tick()).items():
            if isinstance(reply, Failure):  # in a simulation nobody is away: something is wrong with the experiment
                raise EngineError(f"client {client}, round {when.t}: {reply.reason}")
            replies[client] = reply
            self.states.ledgers |= {client: ledger} if (ledger := reply.read("spent", Ledger)) else {}
        return replies

    def _own(self, client: ClientId) -> dict[str, Any]:
        """What travels with a client, as it has no place of its own."""
        return {"state": self.states.get(client), "spent": self.states.ledgers.get(client, ())}


def played(room: Room, kind: str, ask: Envelope) -> Envelope:
    """A client's work, in whatever process the message arrived."""
    engine, kinds = room.engine, Kinds.of(room.engine.method)
    client, when = ask.read("client", str), ask.read("when", Round)
    state = ask.read("state", kinds.state | None, room.archs)
    engine.states = ClientStates({} if state is None else {client: state}, {client: ask.read("spent", Ledger)})
    if kind == "train":
        down = ask.read("down", kinds.down, room.archs)
        check_sent(engine.method, engine.task, down, when)
        answer = engine.exchange({client: down}, when)[client]
        own = {"state": engine.states[client], "spent": engine.states.ledgers[client], "when": when}
        return Envelope.of(up=answer.up, report=answer.report, seconds=answer.seconds, **own)
    delivery = ask.read("delivery", kinds.down, room.archs)
    done = engine.evaluate_models({client: delivery}, when, ask.read("finetune", Finetune | None))[client]  # type: ignore[arg-type]
    own = {"state": done.value.state, "spent": engine.states.ledgers[client]}
    return Envelope.of(models=done.value.models, scores=done.value.scores, seconds=done.seconds, **own)


def client_app(opened: Callable[[], Room]) -> ClientApp:
    """What a process does with a message; `opened` gives the room, the same one for every message to a process."""
    app = ClientApp()

    def answer(kind: str, message: Message) -> Message:
        return Message(played(opened(), kind, Envelope.opened(message.content)).content(), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answer("train", message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer("evaluate", message)

    return app


def run(
    work: Callable[[FlowerSimulation], None],
    room: Room,
    opened: Callable[[], Room],
    tick: Callable[[], None],
    stop: Callable[[], None],
    workers: int,
    threads: int,
    address: str | None = None,
) -> None:
    """Do `work` with an engine on Flower: on the Ray cluster at `address`, else on `workers` processes of this machine.

    `tick` is called at every reply, `stop` while waiting for one.
    """
    ended = threading.Event()
    app = ServerApp()

    def alive() -> None:
        stop()
        if ended.is_set():
            raise EngineError("Flower's simulation ended before the run did; its messages above say why")

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(threads)  # the number belongs to the thread
        link = Link(grid, PAUSE, look=alive)
        while len(link.nodes()) < len(room.engine.clients):
            alive()
            ended.wait(PAUSE)
        work(FlowerSimulation(room, link, tick))

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # "local": processes of this run's own, also where a cluster is there that nobody asked for.
    where: dict[str, Any] = {"address": address} if address else {"address": "local", "num_cpus": workers}
    try:
        flwr.simulation.run_simulation(
            app,
            client_app(opened),
            len(room.engine.clients),
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {**where, "log_to_driver": False, "logging_level": logging.ERROR},
            },
        )
    finally:
        ended.set()
