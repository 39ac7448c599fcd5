"""FedAMP: similar clients attract each other's models; the server mixes a model for every client.

Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm
1, Eq. 3 to 6, with A(z) = 1 - exp(-z / sigma): the server sends client i the mixture u_i = sum_j xi_ij m_j of all clients'
models, where xi_ij = alpha A'(|m_i - m_j|^2) for j != i and xi_ii is the rest to 1. The client minimises F_i(m) plus
lam / (2 alpha) |m - u_i|^2.

Deviations: the minimum is approached by the local epochs of [train], from the client's own model; the pull enters the gradient
before clipping and momentum. If the weights of the others add up to more than 1, they are scaled to 1, because the paper's
mixtures are convex (a small enough alpha): there xi_ii would be negative. All clients start from the same weights, because a
mixture of independent random networks means nothing. A client is mixed with others after its first reply; before, u_i is the
first model. Distances and mixtures are over weights, with `shared` over those that travel; buffers are every client's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedme.core.data import ClientData, ClientId
from fedme.core.key import Key
from fedme.core.method import Method, Plan, Report, Round, Task
from fedme.core.model import Model
from fedme.core.operations import Computation, Models, immediately, train
from fedme.core.settings import setting
from fedme.learning.exchanged_part import SHARED
from fedme.learning.model_mixtures import mixtures, squared_distances
from fedme.learning.objectives import CrossEntropy
from fedme.learning.training_settings import Training, require
from fedme.methods.shared_model import SharedModel


@dataclass(frozen=True)
class Server:
    """The model that all clients start from, and the last model of every client that has replied."""

    first: Model
    models: Mapping[ClientId, Model]


@dataclass(frozen=True)
class State:
    """A client's personal model m_i."""

    personal: Model


@dataclass(frozen=True)
class FedAMP(Method[Server, State, SharedModel, SharedModel]):
    """Similar clients attract each other's models: the server mixes a model for every client to be pulled towards."""

    train: Training = field(default_factory=Training)
    alpha: float = setting(1.0, "weight of the others in a client's mixture; the pull is lam / alpha")
    lam: float = setting(1.0, "lambda: weight of the pull towards the mixture")
    sigma: float = setting(1.0, "squared distance at which the attraction of two models has fallen to 37 %")
    shared: str | tuple[str, ...] = setting((), SHARED)

    paper = (
        "Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei and Y. Zhang, "
        '"Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, arXiv:2007.03797'
    )
    travels = "their personal models; mixtures come back"
    not_by_name = ""
    unused_settings = ("models.same_start", "defence.guest")

    def __post_init__(self) -> None:
        require(self.alpha > 0, "alpha", f"must be > 0, got {self.alpha}")
        require(self.lam >= 0, "lam", f"must be >= 0, got {self.lam}")
        require(self.sigma > 0, "sigma", f"must be > 0, got {self.sigma}")

    def init_server(self, task: Task, key: Key) -> Server:
        return Server(Model.init(task.shared, key.at("shared"), task.dtype), {})

    def init_client(self, task: Task, me: ClientId, data: ClientData, key: Key) -> Computation[State]:
        arch = task.members[me].arch if self.shared else task.shared
        return immediately(State(Model.init(arch, key.at("shared"), task.dtype)))

    def dispatch(
        self, task: Task, server: Server, plan: Plan, when: Round, key: Key
    ) -> Computation[dict[ClientId, SharedModel]]:
        known = [client for client in task.members if client in server.models]
        mixed = dict.fromkeys(plan.train, SharedModel(server.first))
        asked = [i for i, client in enumerate(known) if client in mixed]
        if asked:
            models = [server.models[client] for client in known]
            xi = self.mixing_weights(squared_distances(models, asked), asked)
            for i, params in zip(asked, mixtures(models, xi), strict=True):
                mixed[known[i]] = SharedModel(models[i].with_params(params))
        return immediately(mixed)

    def mixing_weights(self, distances: Tensor, clients: Sequence[int]) -> Tensor:
        """xi, Eq. 3: a row per client with the weights of all models in its mixture, from its squared distances from all."""
        own = torch.arange(len(clients)), torch.tensor(clients)
        xi = self.alpha / self.sigma * torch.exp(-distances / self.sigma)
        xi[own] = 0.0
        xi = xi / xi.sum(1, keepdim=True).clamp(min=1.0)
        xi[own] = 1.0 - xi.sum(1)
        return xi

    def client_round(
        self, state: State, down: SharedModel, data: ClientData, when: Round, key: Key
    ) -> Computation[tuple[State, SharedModel, Report]]:
        optimizer = self.train.local_optimizer(CrossEntropy(), when, prox=self.lam / self.alpha)
        schedule, own = self.train.batch_schedule(when), {"own": state.personal}
        trained = yield from train(own, optimizer, data.train, schedule, key.at("train"), frozen={"own": down.model})
        model = trained.models["own"]
        return State(model), SharedModel(model), Report(trained.losses)

    def aggregate(self, server: Server, replies: Mapping[ClientId, SharedModel], when: Round, key: Key) -> Server:
        return Server(server.first, {**server.models, **{client: up.model for client, up in replies.items()}})

    def deliver(self, task: Task, server: Server, client: ClientId) -> SharedModel:
        return SharedModel(server.models.get(client, server.first))

    def models(self, state: State, delivery: SharedModel, data: ClientData, when: Round, key: Key) -> Computation[Models]:
        return immediately({"personal": state.personal})

    def offers(self, server: Server, task: Task, key: Key) -> Mapping[str, Model]:
        return server.models
