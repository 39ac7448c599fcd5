"""All clients in this process: their data in memory, their states in a dictionary, their work in lockstep."""

from collections.abc import Callable, Mapping
from typing import Any

from fedme.core.data import ClientData, ClientId, join
from fedme.core.key import Key
from fedme.core.method import POOL, Round, Task
from fedme.core.operations import Steps
from fedme.execution.lockstep import Done, Execute, T, drive
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import AnyMethod, Assessment, Finetune, assess, take_part
from fedme.federation.round import Answer
from fedme.learning.accountant import Ledger
from fedme.learning.differential_privacy import Guard, privately


class InProcess:
    """Runs clients' work where they all are: here."""

    def __init__(
        self,
        method: AnyMethod,
        task: Task,
        clients: Mapping[ClientId, ClientData],
        root: Key,
        execute: Execute | None = None,
        private: Callable[[ClientData], Guard] | None = None,
    ) -> None:
        self.method, self.task, self.root, self.private = method, task, root, private
        self.spent: dict[ClientId, Ledger] = {}  # of every client's privacy, if trainings are private
        self.execute = execute or one_by_one()
        self.clients = dict(clients)
        self.states: dict[ClientId, Any] = {}
        if method.pooled:
            parts = list(clients.values())
            pooled = [join([getattr(part, name) for part in parts]) for name in ("train", "val", "test")]
            self.clients[POOL] = ClientData(POOL, *pooled)

    def muster(self) -> Task:
        """The federation, always the same."""
        return self.task

    @property
    def samples(self) -> dict[ClientId, int]:
        """How much every client trains on."""
        return {client: len(data.train) for client, data in self.clients.items()}

    def away(self, when: Round) -> dict[ClientId, str]:
        """Nobody."""
        return {}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Answer]:
        """Hand every client its message and collect the replies."""
        work = {
            client: take_part(self.method, self.task, self.states.get(client), down, self.clients[client], when, self.root)
            for client, down in downs.items()
        }
        done = self._drive(work)
        answers = {}
        for client, result in done.items():
            state, up, report = result.value
            self.states[client] = state
            answers[client] = Answer(up, report, result.seconds)
        return answers

    def assess(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Done[Assessment]]:
        """Let every client show how its models do."""
        work = {
            client: assess(
                self.method, self.task, self.states.get(client), delivery, self.clients[client], when, self.root, finetune
            )
            for client, delivery in deliveries.items()
        }
        done = self._drive(work)
        self.states.update({client: result.value.state for client, result in done.items()})
        return done

    def _drive(self, work: Mapping[ClientId, Steps[T]]) -> dict[ClientId, Done[T]]:
        """Do clients' work, their trainings private if they are to be."""
        if self.private is None:
            return drive(work, self.execute)
        guarded = {}
        for client, steps in work.items():
            data = self.clients[client]
            guarded[client] = privately(steps, data, self.private(data), self.spent.get(client, ()))
        done = drive(guarded, self.execute)
        self.spent |= {client: each.value[1] for client, each in done.items()}
        return {client: Done(each.value[0], each.seconds) for client, each in done.items()}

    def serve(self, steps: Steps[T]) -> Done[T]:
        """Run work of the server."""
        return drive({"server": steps}, self.execute)["server"]
