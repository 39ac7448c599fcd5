"""FedMD: clients agree on outputs for public data instead of on weights.

Li and Wang 2019, Algorithm 1; in the first version of FedMe. Each client first learns the labelled public data, then its own.
A round has two exchanges: clients send their logits for some public samples, the server averages them; clients then fit
their logits to the average ("digest") and train on their own data ("revisit").

Deviations: digest and revisit use the optimizer of the experiment (`train.optimizer`), where the paper has Adam. The paper
trains on the public data "to convergence" without saying what that is: here until the loss on the client's validation part has
not become smaller for `patience` epochs, at most `public_epochs`; a client without a validation part takes all of them. On its
own data a client trains `private_epochs`, and again in every round. Only the clients of the round's cohort contribute to the
average and receive it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedme.core.data import ClientData, ClientId, Split
from fedme.core.key import Key
from fedme.core.method import Method, Plan, PlannedTraining, Report, Round, Task, TaskError
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, OptState, evaluate, immediately, predict, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy, Imitate
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require


@dataclass(frozen=True)
class Server:
    """The average of the round's logits, between its two exchanges."""

    logits: Tensor | None = None


@dataclass(frozen=True)
class Down:
    """Which public samples the round is about and, in the second exchange, the average of the logits for them."""

    rows: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class State:
    """A client's own model."""

    model: Model


@dataclass(frozen=True)
class Up:
    """Logits for the public samples of the round; nothing after the second exchange."""

    logits: Tensor | None


@dataclass(frozen=True)
class FedMD(Method[Server, State, Down, Up]):
    """Clients of any architecture agree on their outputs for public data."""

    train: Training = field(default_factory=Training)
    public_samples: int = setting(5000, "public samples per round; all if there are fewer")
    public_epochs: int = setting(100, "largest number of epochs on the public data before the first round")
    patience: int | None = setting(
        5, "epochs on the public data without a smaller validation loss before a client goes on; none: all `public_epochs`"
    )
    private_epochs: int = setting(2, "epochs on the client's data before the first round")
    digest_epochs: int = setting(1, "epochs of fitting the averaged logits in every round")
    digest_batch: int = setting(256, "batch size of fitting the averaged logits")
    digest_loss: Literal["mae", "mse", "kl"] = "mae"
    defence: Defence = OPEN

    paper = 'D. Li and J. Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", 2019, arXiv:1910.03581'
    phases = ("outputs", "digest")
    own_architectures = True
    not_by_name = "no weights travel"
    uses_shared_model = False
    hides_samples = True
    needs = "labelled public samples"
    travels = "outputs on public data"
    nothing_to_offer = "its clients share outputs on public data, not models; run it again with the new client among them"
    nothing_to_audit = "its clients share outputs on public samples, not models that could be evaluated on other samples"

    def __post_init__(self) -> None:
        for name in ("public_samples", "public_epochs", "private_epochs", "digest_epochs", "digest_batch"):
            require(getattr(self, name) >= 1, name, f"must be >= 1, got {getattr(self, name)}")
        require(self.patience is None or self.patience >= 1, "patience", f"must be >= 1, got {self.patience}")

    def check(self, task: Task) -> None:
        super().check(task)
        if self.digest_loss == "kl" and task.schema.task_type != "classification":
            raise TaskError(
                f"method 'fedmd': digest_loss = 'kl' compares probabilities of classes, and this is "
                f"{task.schema.task_type}; use 'mae' or 'mse'"
            )
        if not task.public:
            where = "data.public (a number) or data.public_file (in Python: fit(public=...))"
            raise TaskError(f"method 'fedmd' needs labelled public data: set {where}")

    def init_server(self, task: Task, key: Key) -> Server:
        return Server()

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        optimizer = self.train.local_optimizer(CrossEntropy(), Round(0, 1))
        own: Models = {"own": task.first_model(me, key)}
        if self.patience is None or not len(data.val):
            local = self.train.whole_epochs(self.public_epochs)
            own = (yield from train(own, optimizer, _public(data), local, key.at("public", me))).models
        else:
            own = yield from self._until_converged(own, self.patience, data, key.at("public", me))
        private = self.train.whole_epochs(self.private_epochs)
        own = (yield from train(own, optimizer, data.train, private, key.at("private", me))).models
        return State(own["own"])

    def _until_converged(self, own: Models, patience: int, data: ClientData, key: Key) -> Computation[Models]:
        """Train on the public data until the validation loss has not become smaller for `patience` epochs."""
        optimizer, epoch = self.train.local_optimizer(CrossEntropy(), Round(0, 1)), self.train.whole_epochs(1)
        opt: OptState = {}
        best, waited = math.inf, 0
        for number in range(self.public_epochs):
            trained = yield from train(own, optimizer, _public(data), epoch, key.at(number), opt)
            own, opt = trained.models, trained.opt
            loss = (yield from evaluate(own["own"], data.val)).loss
            best, waited = (loss, 0) if loss < best else (best, waited + 1)
            if waited == patience:
                break
        return own

    def dispatch(self, task: Task, server: Server, plan: Plan, when: Round, key: Key) -> Computation[dict[ClientId, Down]]:
        order = torch.randperm(task.public, generator=key.at("public").torch())  # the same in both exchanges
        rows = order[: self.public_samples]
        return immediately({client: Down(rows, server.logits if when.phase == "digest" else None) for client in plan.train})

    def client_round(
        self, state: State, down: Down, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, Up, Report]]:
        public = _public(data).take(down.rows)
        if when.phase == "outputs":
            return state, Up((yield from predict(state.model, public))), Report({})
        own: Models = {"own": state.model}
        if down.logits is not None:  # otherwise nobody's logits arrived
            digest = replace(self.train.whole_epochs(self.digest_epochs, self.digest_batch), augment=False)
            optimizer = self.train.local_optimizer(Imitate(self.digest_loss), when)
            own = (yield from train(own, optimizer, public.labelled(down.logits), digest, key.at("digest"))).models
        optimizer = self.train.local_optimizer(CrossEntropy(), when)
        revisited = yield from train(own, optimizer, data.train, self.train.batch_schedule(when), key.at("train"))
        return State(revisited.models["own"]), Up(None), Report(revisited.losses)

    def expects(self, task: Task, down: Down, up: Up, when: Round) -> dict[str, Tensor | None]:
        wanted = torch.zeros((len(down.rows), len(task.schema.classes)), dtype=task.dtype)
        return {"logits": wanted if when.phase == "outputs" else None}

    def aggregate(self, server: Server, replies: Mapping[ClientId, Up], when: Round, key: Key) -> Server:
        logits = [up.logits for up in replies.values() if up.logits is not None]
        return Server(self.defence.middle(torch.stack(logits)) if logits else None)

    def deliver(self, task: Task, server: Server, client: ClientId) -> Down:
        return Down(torch.empty(0, dtype=torch.int64))

    def models(self, state: State, delivery: Down, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.model})

    def disclosures(self) -> list[str]:
        return [] if self.patience is None else ["when a client stops on the public data (decided on its validation samples)"]

    def planned_trainings(self, samples: int) -> list[PlannedTraining]:
        first = PlannedTraining(self.train.whole_epochs(self.private_epochs), samples, when="start")
        return [first, *super().planned_trainings(samples)]


def _public(data: ClientData) -> Split:
    if data.public is None:
        raise TaskError(f"client {data.id} has no public data, which method 'fedmd' needs")
    return data.public
