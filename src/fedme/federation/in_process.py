"""All clients in this process: their data in memory, their states in a dictionary, their work in lockstep."""

from collections.abc import Callable, Mapping
from typing import Any

from fedme.core.data import ClientData, ClientId, join
from fedme.core.key import Key
from fedme.core.method import POOL, Round, Task
from fedme.core.operations import Computation
from fedme.execution.lockstep import Executor, T, Timed, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune, evaluate_models, participate
from fedme.federation.round import Reply
from fedme.learning.accountant import Ledger
from fedme.learning.differential_privacy import PrivacyPolicy, with_privacy


class InProcessEngine:
    """Runs clients' work where they all are: here."""

    def __init__(
        self,
        method: AnyMethod,
        task: Task,
        clients: Mapping[ClientId, ClientData],
        root: Key,
        execute: Executor | None = None,
        private: Callable[[ClientData], PrivacyPolicy] | None = None,
    ) -> None:
        self.method, self.task, self.root, self.private = method, task, root, private
        self.spent: dict[ClientId, Ledger] = {}  # of every client's privacy, if trainings are private
        self.execute = execute or one_by_one
        self.clients = dict(clients)
        self.states: dict[ClientId, Any] = {}
        if method.pooled:
            parts = list(clients.values())
            pooled = [join([getattr(part, name) for part in parts]) for name in ("train", "val", "test")]
            self.clients[POOL] = ClientData(POOL, *pooled)

    def current_task(self) -> Task:
        """The federation, always the same."""
        return self.task

    @property
    def samples(self) -> dict[ClientId, int]:
        """How much every client trains on."""
        return {client: len(data.train) for client, data in self.clients.items()}

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """Nobody."""
        return {}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> dict[ClientId, Reply]:
        """Hand every client its message and collect the replies."""
        work = {
            client: participate(self.method, self.task, self.states.get(client), down, self.clients[client], when, self.root)
            for client, down in downs.items()
        }
        done = self._drive(work)
        answers = {}
        for client, result in done.items():
            state, up, report = result.value
            self.states[client] = state
            answers[client] = Reply(up, report, result.seconds)
        return answers

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let every client show how its models do."""
        work = {
            client: evaluate_models(
                self.method, self.task, self.states.get(client), delivery, self.clients[client], when, self.root, finetune
            )
            for client, delivery in deliveries.items()
        }
        done = self._drive(work)
        self.states.update({client: result.value.state for client, result in done.items()})
        return done

    def _drive(self, work: Mapping[ClientId, Computation[T]]) -> dict[ClientId, Timed[T]]:
        """Do clients' work, their trainings private if they are to be."""
        if self.private is None:
            return run_in_lockstep(work, self.execute)
        guarded = {}
        for client, steps in work.items():
            data = self.clients[client]
            guarded[client] = with_privacy(steps, data, self.private(data), self.spent.get(client, ()))
        done = run_in_lockstep(guarded, self.execute)
        self.spent |= {client: each.value[1] for client, each in done.items()}
        return {client: Timed(each.value[0], each.seconds) for client, each in done.items()}

    def run_on_server(self, steps: Computation[T]) -> Timed[T]:
        """Run work of the server."""
        return run_in_lockstep({"server": steps}, self.execute)["server"]
