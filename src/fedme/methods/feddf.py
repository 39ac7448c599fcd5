"""FedDF: FedAvg per architecture, then the server teaches every mean what all clients together say about unlabeled samples.

Lin, Kong, Stich and Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, Algorithm 3
(with one architecture Algorithm 1): clients train copies of their architecture's model, the server averages them by sample
counts, and trains each mean on unlabeled samples towards the softmax of the mean logits of all trained copies, by the
Kullback-Leibler divergence.

Deviations: the learning rate of the server is constant, where the paper's falls along a cosine; it trains a number of epochs,
without early stopping. An architecture that nobody trained in a round keeps its model, and is taught like the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from fedme.core.data import ClientData, ClientId, Split
from fedme.core.key import Key
from fedme.core.method import Empty, Method, Plan, Report, Round, Task, TaskError
from fedme.core.model import Model, average
from fedme.core.operations import Computation, Models, immediately, in_parallel, predict, train
from fedme.core.settings import setting
from fedme.learning.objectives import CrossEntropy, Imitate
from fedme.learning.optimizers import Adam
from fedme.learning.robust_aggregation import OPEN, Defence
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel, TrainedCopy, sample_counts


@dataclass(frozen=True)
class Server:
    """One model per architecture, by its name."""

    models: Mapping[str, Model]


@dataclass(frozen=True)
class FedDF(Method[Server, Empty, SharedModel, TrainedCopy]):
    """One model per architecture; the server teaches each what all clients together say about unlabeled samples."""

    train: Training = field(default_factory=Training)
    distil_epochs: int = setting(1, "epochs of the server over its unlabeled samples in every round")
    distil_batch: int = setting(128, "batch size of the server")
    distil_lr: float = setting(0.001, "learning rate of the server's Adam")
    defence: Defence = OPEN

    paper = (
        "T. Lin, L. Kong, S. U. Stich and M. Jaggi, "
        '"Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, arXiv:2006.07242'
    )
    own_architectures = True
    not_by_name = "its server predicts with whole models"
    uses_shared_model = False
    classes_only = True
    hides_samples = True
    needs = "unlabeled samples at the server"
    travels = "copies of their architecture's model"

    def __post_init__(self) -> None:
        require(self.distil_epochs >= 0, "distil_epochs", f"must be >= 0, got {self.distil_epochs}")
        require(self.distil_batch >= 1, "distil_batch", f"must be >= 1, got {self.distil_batch}")
        require(self.distil_lr > 0, "distil_lr", f"must be > 0, got {self.distil_lr}")

    def check(self, task: Task) -> None:
        super().check(task)
        if self.distil_epochs and not len(task.unlabeled or ()):
            where = "data.unlabeled (a number) or data.unlabeled_file (in Python: fit(unlabeled=...))"
            raise TaskError(f"method 'feddf' needs unlabeled samples at the server: set {where}")

    def init_server(self, task: Task, key: Key) -> Server:
        archs = {member.arch.name: member.arch for member in task.members.values()}
        return Server({name: Model.init(arch, key.at("shared"), task.dtype) for name, arch in archs.items()})

    def dispatch(
        self, task: Task, server: Server, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, SharedModel]]:
        return immediately({client: self.deliver(task, server, client) for client in plan.train})

    def deliver(self, task: Task, server: Server, client: ClientId) -> SharedModel:
        arch = task.members[client].arch
        # An architecture that joins later: all its clients must start from the same weights.
        return SharedModel(server.models.get(arch.name) or Model.init(arch, Key(0).at("joined"), task.dtype))

    def client_round(
        self, state: Empty, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[Empty, TrainedCopy, Report]]:
        optimizer, schedule = self.train.local_optimizer(CrossEntropy(), when), self.train.batch_schedule(when)
        trained = yield from train({"global": down.model}, optimizer, data.train, schedule, key.at("train"))
        return state, TrainedCopy(trained.models["global"], len(data.train)), Report(trained.losses)

    def aggregate(self, server: Server, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key) -> Server:
        models = dict(server.models)
        for name in {up.model.arch.name: None for up in replies.values()}:
            members = {client: up for client, up in replies.items() if up.model.arch.name == name}
            copies = [up.model for up in members.values()]
            models[name] = average(copies, sample_counts(members), self.defence.combine)
        return Server(models)

    def averaged_with(self, up: TrainedCopy) -> str:
        return up.model.arch.name

    def refine(
        self, task: Task, server: Server, replies: Mapping[ClientId, TrainedCopy], when: Round, key: Key
    ) -> Computation[Server]:
        if not self.distil_epochs or not replies or task.unlabeled is None:
            return server
        answers = yield from in_parallel([predict(up.model, task.unlabeled) for up in replies.values()])
        logits = [answer for answer in answers if bool(answer.isfinite().all())]
        if not logits:
            return server
        taught = task.unlabeled.labelled(self.defence.middle(torch.stack(logits)))
        students = list(server.models.items())
        models = yield from in_parallel([self._distilled(model, taught, key.at("distil", name)) for name, model in students])
        return Server({name: model for (name, _), model in zip(students, models, strict=True)})

    def _distilled(self, student: Model, taught: Split, key: Key) -> Computation[Model]:
        """The student after some epochs towards the teachers' logits."""
        schedule = replace(Training().whole_epochs(self.distil_epochs, self.distil_batch), augment=False)
        optimizer = Adam(Imitate("kl"), self.distil_lr)
        return (yield from train({"student": student}, optimizer, taught, schedule, key)).models["student"]

    def models(self, state: Empty, delivery: SharedModel, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": delivery.model, "global": delivery.model})

    def offers(self, server: Server, task: Task, key: Key) -> Mapping[str, Model]:
        return {f"global {name}": model for name, model in server.models.items()}

    def disclosures(self) -> list[str]:
        return ["the weight of a client in the mean (its number of samples)"]
