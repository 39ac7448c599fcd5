"""Local: every client trains its own model on its own data, and nobody sends anything.

The baseline of all papers ("Local Data Only"; FedMe section 5.1.3). One round is E epochs, so rounds x E is the largest
number of epochs; `patience` stops a client whose validation loss has not improved for that many rounds.

Deviations: the validation loss is computed once per round, not once per epoch. The last weights are kept, not the best
ones, as in the FedMe authors' code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, Report, Round, Task, TaskError
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, OptState, evaluate, immediately, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training, require


@dataclass(frozen=True)
class State:
    """A client's model, the state of its optimizer, and how its validation loss goes."""

    model: Model
    opt: OptState
    best: float = math.inf
    waited: int = 0  # rounds since the best validation loss


@dataclass(frozen=True)
class Local(Method[Empty, State, Empty, Empty]):
    """Every client trains its own model on its own data."""

    train: Training = field(default_factory=Training)
    optimizer_state: Literal["keep", "reset"] = setting("keep", "the state of the optimizer (momentum) between rounds")
    patience: int | None = setting(None, "rounds without a better validation loss before a client stops")

    own_architectures = True
    isolated = True
    uses_shared_model = False
    hides_samples = True
    travels = "nothing"
    not_by_name = "no weights travel"
    nothing_to_offer = "its clients share nothing; train the new client alone with method 'local'"
    nothing_to_audit = "its clients share nothing, so there is nothing to attack"

    def __post_init__(self) -> None:
        require(self.patience is None or self.patience >= 1, "patience", f"must be >= 1, got {self.patience}")

    def check(self, task: Task) -> None:
        """Every task is possible: label spaces may differ."""

    def init_server(self, task: Task, key: Key) -> Empty:
        return Empty()

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        require_validation(self.patience, data)
        return immediately(State(task.first_model(me, key), {}))

    def dispatch(self, task: Task, server: Empty, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Empty]]:
        return immediately({client: Empty() for client in plan.train})

    def client_round(
        self, state: State, down: Empty, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Empty, Report]]:
        if self.patience is not None and state.waited >= self.patience:
            return state, Empty(), Report({}, notes={"stopped": True})
        state, report = yield from local_round(state, data, self.train, when, key, self.optimizer_state, self.patience)
        return state, Empty(), report

    def aggregate(self, server: Empty, replies: Mapping[ClientId, Empty], when: Round, key: Key) -> Empty:
        return server

    def deliver(self, task: Task, server: Empty, client: ClientId) -> Empty:
        return Empty()

    def models(self, state: State, delivery: Empty, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.model})

    def disclosures(self) -> list[str]:
        return [] if self.patience is None else ["when a client stops (decided on its validation samples)"]


def require_validation(patience: int | None, data: ClientData) -> None:
    """Raise a TaskError for a client that has no validation data for `patience`."""
    if patience is not None and not len(data.val):
        raise TaskError(f"client {data.id} has no validation data, which `patience` needs: set `val` in [data]")


def local_round(
    state: State,
    data: ClientData,
    training: Training,
    when: Round,
    key: Key,
    optimizer_state: Literal["keep", "reset"],
    patience: int | None,
) -> Computation[tuple[State, Report]]:
    """E epochs on the training part, then the validation loss if `patience` needs it."""
    trained = yield from train(
        {"own": state.model},
        training.local_optimizer(CrossEntropy(), when),
        data.train,
        training.batch_schedule(when),
        key.at("train"),
        state.opt if optimizer_state == "keep" else None,
    )
    after = replace(state, model=trained.models["own"], opt=trained.opt)
    if patience is None:
        return after, Report(trained.losses)
    score = yield from evaluate(after.model, data.val)
    better = score.loss < state.best
    after = replace(after, best=score.loss if better else state.best, waited=0 if better else state.waited + 1)
    return after, Report(trained.losses, {"own": score})
