"""All clients in this process: their data in memory, their states in a dictionary, their work in lockstep."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from fedme.core.arriving import Arriving
from fedme.core.data import ClientData, ClientId, join
from fedme.core.key import Key
from fedme.core.method import POOL, Round, Task
from fedme.core.operations import Computation
from fedme.execution.lockstep import Executor, T, Timed, in_lockstep, run_in_lockstep
from fedme.execution.reference import one_by_one
from fedme.federation.client_work import AnyMethod, Evaluation, Finetune, evaluate_models, participate, scored
from fedme.federation.round import ClientStates, Reply
from fedme.learning.accountant import Ledger, added
from fedme.learning.differential_privacy import PrivacyPolicy, guarded, with_privacy

Occasion = Literal["start", "round", "evaluation"]
Policies = Callable[[ClientData, frozenset[Occasion]], PrivacyPolicy]  # how a client's work at these occasions is made private


class InProcessEngine:
    """Runs clients' work in this process.

    `policies` makes their trainings private. With `update_bn`, unless their trainings are private, clients use and compare
    models with running statistics of their own samples (`learning/own_statistics.py`). Every `score_trained_every` rounds, and
    in the last one, they report validation scores of the models that they have trained.
    """

    def __init__(
        self,
        method: AnyMethod,
        task: Task,
        clients: Mapping[ClientId, ClientData],
        root: Key,
        execute: Executor | None = None,
        policies: Policies | None = None,
        states: ClientStates | None = None,
        update_bn: bool = True,
        score_trained_every: int | None = None,
    ) -> None:
        self.method, self.task, self.root, self.policies = method, task, root, policies
        self.update_bn = update_bn and policies is None  # statistics without noise would be outside epsilon
        self.score_trained_every = score_trained_every
        self.execute = execute or one_by_one
        self.clients = dict(clients)
        self.states = states if states is not None else ClientStates()
        self._round_costs: dict[ClientId, tuple[int, Ledger]] = {}  # what a client spent in the round it is in
        self._started: dict[ClientId, int] = {}  # the round in which a client got its state
        if method.pooled:
            self.clients[POOL] = pooled(clients)

    @functools.cached_property
    def samples(self) -> dict[ClientId, int]:
        """The number of training samples of every client."""
        return {client: len(data.train) for client, data in self.clients.items()}

    @property
    def clients_at_a_time(self) -> int | None:
        """As many as the executor likes; None: all."""
        return getattr(self.execute, "clients_at_a_time", None)

    def current_task(self) -> Task:
        """The federation, which does not change."""
        return self.task

    def unavailable(self, when: Round) -> dict[ClientId, str]:
        """No client is ever unavailable."""
        return {}

    def exchange(self, downs: Mapping[ClientId, Any], when: Round) -> Mapping[ClientId, Reply]:
        """Let every client do its part of the round. Its work ends, at the latest, when its reply is read."""
        every, last = self.score_trained_every, when.t + 1 == when.total
        scored = every is not None and (last or (when.t + 1) % every == 0)
        work = {
            client: participate(
                self.method,
                self.task,
                self.states.get(client),
                down,
                self._data(client),
                when,
                self.root,
                self.update_bn,
                scored,
            )
            for client, down in downs.items()
        }
        return Arriving(self._replies(in_lockstep(self._made_private(work, "round", when.t), self.execute), when.t))

    def _replies(self, results: Iterable[tuple[ClientId, Timed[Any]]], t: int) -> Iterator[tuple[ClientId, Reply]]:
        for client, result in self._with_costs_recorded(results, "round", t):
            self.states[client], up, report = result.value
            yield client, Reply(up, report, result.seconds)

    def evaluate_models(
        self, deliveries: Mapping[ClientId, Any], when: Round, finetune: Finetune | None = None
    ) -> dict[ClientId, Timed[Evaluation]]:
        """Let every client evaluate its models."""
        work = {
            client: evaluate_models(
                self.method,
                self.task,
                self.states.get(client),
                delivery,
                self._data(client),
                when,
                self.root,
                finetune,
                self.update_bn,
            )
            for client, delivery in deliveries.items()
        }
        results = run_in_lockstep(self._made_private(work, "evaluation", when.t), self.execute)
        evaluations = dict(self._with_costs_recorded(results.items(), "evaluation", when.t))
        complete = scored([result.value for result in evaluations.values()], self.task.schema.unit)
        self.states.update({client: evaluation.state for client, evaluation in zip(evaluations, complete, strict=True)})
        return {c: Timed(e, evaluations[c].seconds) for c, e in zip(evaluations, complete, strict=True)}

    def run_on_server(self, work: Computation[T]) -> Timed[T]:
        """Run work of the server."""
        return run_in_lockstep({"server": work}, self.execute)["server"]

    def _data(self, client: ClientId) -> ClientData:
        return self.clients[client] if self.policies is None else guarded(self.clients[client])

    def _made_private(self, work: Mapping[ClientId, Computation[Any]], occasion: Occasion, t: int) -> Mapping[ClientId, Any]:
        """The same work with private trainings, if there is a privacy policy."""
        if self.policies is None:
            return work
        private = {}
        for client, computation in work.items():
            if client not in self.states:
                self._started[client] = t
            started = client not in self.states or (occasion == "round" and self._started.get(client) == t)
            occasions: set[Occasion] = {occasion, "start"} if started else {occasion}
            policy = self.policies(self.clients[client], frozenset(occasions))
            ledger, used = self.states.ledgers.get(client, ()), self._costs_of_round(client, occasion, t)
            private[client] = with_privacy(computation, client, policy, ledger, used)
        return private

    def _with_costs_recorded(
        self, results: Iterable[tuple[ClientId, Timed[Any]]], occasion: Occasion, t: int
    ) -> Iterable[tuple[ClientId, Timed[Any]]]:
        """The results of the work, after the privacy costs that came with them have entered the ledgers."""
        if self.policies is None:
            return results
        return ((client, self._with_cost_recorded(client, result, occasion, t)) for client, result in results)

    def _with_cost_recorded(self, client: ClientId, result: Timed[Any], occasion: Occasion, t: int) -> Timed[Any]:
        value, costs = result.value
        if occasion == "round":
            self._round_costs[client] = t, added(self._costs_of_round(client, occasion, t), costs)
        self.states.ledgers[client] = added(self.states.ledgers.get(client, ()), costs)
        return Timed(value, result.seconds)

    def _costs_of_round(self, client: ClientId, occasion: Occasion, t: int) -> Ledger:
        last, costs = self._round_costs.get(client, (t, ()))
        return costs if last == t and occasion == "round" else ()


def pooled(clients: Mapping[ClientId, ClientData]) -> ClientData:
    """The data of all clients as that of one."""
    parts = list(clients.values())
    train, val, test = (join([getattr(part, name) for part in parts]) for name in ("train", "val", "test"))
    return ClientData(POOL, train, val, test)
