"""Clients on Flower's simulation runtime: Ray processes on this machine or on a cluster.

A client's state travels with every message, so any process can run any client, and checkpoints are the same as for a run in one
process. Each process loads the data of the experiment once.
"""

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flwr.simulation
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedme.core.data import ClientId
from fedme.core.method import Report, Round, Task
from fedme.core.model import Arch, Model
from fedme.core.operations import Computation
from fedme.core.typed import TypedError
from fedme.execution.lockstep import T, Timed
from fedme.execution.ray.cluster import joined
from fedme.federation.client_work import Evaluation, Finetune, ModelScore
from fedme.federation.flower import EngineError
from fedme.federation.flower.flower_apps import client_app
from fedme.federation.flower.message_content import MessageContent
from fedme.federation.flower.requests import Failure, GridRequests
from fedme.federation.in_process import InProcessEngine
from fedme.federation.reply_validation import MessageTypes, check_sent
from fedme.federation.round import ClientStates, NoReply, RejectedReply, Reply
from fedme.learning.accountant import Ledger

POLL_INTERVAL = 0.02  # seconds between two polls for replies


@dataclass(frozen=True)
class ActorContext:
    """What one process needs to run any client: an engine with all clients, and every architecture that may occur."""

    engine: InProcessEngine
    archs: Mapping[str, Arch]


class FlowerSimulation:
    """An engine that sends every client's work to a free process."""

    def __init__(self, actor: ActorContext, requests: GridRequests, on_reply: Callable[[], None]) -> None:
        self._actor, self._requests, self._on_reply = actor, requests, on_reply
        self._types = MessageTypes.of(actor.engine.method)
        self.clients, self.samples = actor.engine.clients, actor.engine.samples
        self.states = ClientStates()

    def current_task(self) -> Task:
        """The task, which never changes."""
        return self._actor.engine.task

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """All clients are available."""
        return {}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply | NoReply]:
        """Send every client its message and its state, and collect the replies and the new states."""
        archs = self._actor.archs
        replies: dict[ClientId, Reply | NoReply] = {}
        for client, content in self._send("train", {client: {"down": down} for client, down in downs.items()}, when).items():
            self.states[client] = content.read("state", self._types.state, archs)
            try:
                up = content.read("up", self._types.up | None, archs)
                report, seconds = content.read("report", Report), content.read("seconds", float)
                replies[client] = Reply(up, report, seconds, content.read("when", Round))
            except TypedError as error:
                replies[client] = RejectedReply(f"refused: {error}")
        return replies

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let every client evaluate its models."""
        requests = {client: {"delivery": delivery, "finetune": finetune} for client, delivery in deliveries.items()}
        evaluations = {}
        for client, content in self._send("evaluate", requests, when).items():
            state = self.states[client] = content.read("state", self._types.state, self._actor.archs)
            models = content.read("models", dict[str, Model], self._actor.archs)
            outputs = content.read("outputs", dict[str, torch.Tensor])
            evaluation = Evaluation(state, models, content.read("scores", list[ModelScore]), outputs)
            evaluations[client] = Timed(evaluation, content.read("seconds", float))
        return evaluations

    def run_on_server(self, steps: Computation[T]) -> Timed[T]:
        """Run the server's work in this process."""
        return self._actor.engine.run_on_server(steps)

    def _send(
        self, message_type: str, requests: Mapping[ClientId, Mapping[str, Any]], when: Round
    ) -> dict[ClientId, MessageContent]:
        nodes = self._requests.nodes()
        contents = {}
        for i, (client, values) in enumerate(requests.items()):
            private = {"state": self.states.get(client), "spent": self.states.ledgers.get(client, ())}
            contents[client] = nodes[i], MessageContent.of(client=client, when=when, **private, **values)
        replies = {}
        for client, reply in self._requests.send(message_type, contents, lambda client: self._on_reply()).items():
            if isinstance(reply, Failure):  # simulated clients are always available: the experiment itself fails
                raise EngineError(f"client {client}, round {when.t}: {reply.reason}")
            replies[client] = reply
            self.states.ledgers |= {client: ledger} if (ledger := reply.read("spent", Ledger)) else {}
        return replies


def handle(
    message_type: str, open_actor: Callable[[], ActorContext], request: MessageContent, node_config: Mapping[str, Any]
) -> MessageContent:
    """Do a client's work in the process that received the message; `open_actor` caches its result per process."""
    actor = open_actor()
    engine, types = actor.engine, MessageTypes.of(actor.engine.method)
    client, when = request.read("client", str), request.read("when", Round)
    state = request.read("state", types.state | None, actor.archs)
    engine.states = ClientStates({} if state is None else {client: state}, {client: request.read("spent", Ledger)})
    if message_type == "train":
        down = request.read("down", types.down, actor.archs)
        check_sent(engine.method, engine.task, down, when)
        reply = engine.exchange({client: down}, when)[client]
        values = {"up": reply.up, "report": reply.report, "seconds": reply.seconds, "when": when}
    else:
        delivery, finetune = request.read("delivery", types.down, actor.archs), request.read("finetune", Finetune | None)  # type: ignore[arg-type]
        evaluation = engine.evaluate_models({client: delivery}, when, finetune)[client]
        done = evaluation.value
        values = {"models": done.models, "scores": list(done.scores), "outputs": done.outputs, "seconds": evaluation.seconds}
    return MessageContent.of(state=engine.states[client], spent=engine.states.ledgers[client], **values)


def run(
    work: Callable[[FlowerSimulation], None],
    actor: ActorContext,
    open_actor: Callable[[], ActorContext],
    on_reply: Callable[[], None],
    on_poll: Callable[[], None],
    workers: int,
    threads: int,
    address: str | None = None,
    modules: Sequence[Path] = (),
    gpus: int = 0,
) -> None:
    """Call `work` with an engine on Flower: on the Ray cluster at `address`, else on `workers` processes of this machine.

    Other machines get the source files of `modules`; a process takes so many `gpus`. `on_reply` is called at every reply,
    `on_poll` while waiting for one; it may raise to stop the run.
    """
    ended = threading.Event()
    app = ServerApp()

    def check_running() -> None:
        on_poll()
        if ended.is_set():
            raise EngineError("Flower's simulation ended before the run did; its messages above say why")

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(threads)  # PyTorch keeps this number per thread
        requests = GridRequests(grid, POLL_INTERVAL, on_poll=check_running)
        while len(requests.nodes()) < len(actor.engine.clients):
            check_running()
            ended.wait(POLL_INTERVAL)
        work(FlowerSimulation(actor, requests, on_reply))

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    try:
        with joined(address, workers, modules, torch.cuda.device_count() if gpus else 0):  # Flower uses a Ray that is there
            flwr.simulation.run_simulation(
                app,
                client_app({name: functools.partial(handle, name, open_actor) for name in ("train", "evaluate")}),
                len(actor.engine.clients),
                backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus}, "init_args": {}},
            )
    finally:
        ended.set()
