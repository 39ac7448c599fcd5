"""What every oracle is given and what it returns.

Everything is float64. Nothing is random: first weights, participants and the order of the batches are part of the problem.

A phase is a name for one training of one client in one round. Most methods have one, "train". Ditto has "shared" and
"personal", FedRep "head" and "body". The server of FedDF has the client number SERVER and one phase per architecture.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = dict[str, Tensor]
SERVER = -1


@dataclass(frozen=True)
class Sgd:
    """The local optimiser: `torch.optim.SGD`. A new one for every phase of every round, so momentum never crosses rounds."""

    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def over(self, parameters: Iterable[Tensor]) -> torch.optim.SGD:
        return torch.optim.SGD(list(parameters), self.learning_rate, self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Problem:
    clients: Sequence[tuple[Tensor, Tensor]]  # samples (float64) and labels (integers) of each client
    networks: Sequence[Callable[[], nn.Module]]  # builds the network of each client; `body` and `head`, see networks.py
    first: Sequence[State]  # first weights of each client
    participants: Sequence[Sequence[int]]  # of each round: the clients that take part
    orders: Mapping[
        tuple[int, int, str], Sequence[Tensor]
    ]  # (round, client, phase): the batches in order, each the indices of its samples
    server: Any = None  # first weights of the server: a State; for FedDF one State per architecture
    classes: int = 3
    architectures: Sequence[str] = ()  # FedDF: the name of each client's architecture
    public: Tensor | None = None  # FedDF: the server's unlabelled samples

    def batches(self, round: int, client: int, phase: str = "train") -> list[tuple[Tensor, Tensor]]:
        x, y = self.clients[client]
        return [(x[index], y[index]) for index in self.orders[round, client, phase]]

    def weights(self, clients: Iterable[int], weighting: str) -> list[float]:
        """Weights of a mean over clients: their sample counts, or all the same."""
        if weighting not in ("samples", "uniform"):
            raise ValueError(f"weighting must be 'samples' or 'uniform', got {weighting!r}")
        return [float(len(self.clients[i][1])) if weighting == "samples" else 1.0 for i in clients]


@dataclass(frozen=True)
class After:
    """What there is after one round. `run` returns one per round."""

    server: Any  # what the server holds: a State unless the method's file says otherwise
    personal: list[State]  # of every client, also of those that did not take part
    trained: dict[int, State]  # of each participant: its model when its training ended, before anything came from the server
    kept: dict[str, Any] = field(default_factory=dict)  # anything else: control variates, alphas, prototypes, counts


def copy_of(state: Mapping[str, Tensor]) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def load(network: Callable[[], nn.Module], state: State) -> nn.Module:
    """A network with these weights, in training mode."""
    model = network().double()
    model.load_state_dict(state)
    return model.train()


def mean(states: Sequence[State], weights: Sequence[float], names: Iterable[str] | None = None) -> State:
    """The weighted mean, entry by entry. Buffers are averaged like parameters, except integers (BatchNorm's counter of
    batches), which no computation uses: the first state's stay."""
    result = {}
    for name in states[0] if names is None else names:
        if states[0][name].is_floating_point():
            total = torch.zeros_like(states[0][name])
            for state, weight in zip(states, weights, strict=True):
                total += weight / sum(weights) * state[name]
            result[name] = total
        else:
            result[name] = states[0][name].clone()
    return result


def train(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    sgd: Sgd,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    only: Callable[[str], bool] | None = None,
) -> State:
    """SGD on the loss (cross-entropy by default, the mean over the batch), over the parameters whose names `only` accepts."""
    trained = [parameter for name, parameter in model.named_parameters() if only is None or only(name)]
    optimizer = sgd.over(trained)
    for x, y in batches:
        value = F.cross_entropy(model(x), y) if loss is None else loss(model, x, y)
        model.zero_grad()
        value.backward()
        optimizer.step()
    return copy_of(model.state_dict())


def squared_distance(model: nn.Module, centre: State) -> Tensor:
    """The squared Euclidean distance of all parameters (buffers are not part of it) from fixed ones; it has a gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.named_parameters():
        total = total + ((parameter - centre[name].detach()) ** 2).sum()
    return total


def class_means(rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean row of each class (zeros for a class without samples), and the counts."""
    sums = torch.zeros(classes, rows.shape[1], dtype=rows.dtype)
    counts = torch.zeros(classes, dtype=torch.int64)
    for row, label in zip(rows.detach(), labels, strict=True):
        sums[label] += row
        counts[label] += 1
    return sums / counts.clamp(min=1)[:, None], counts


def mean_of_class_means(sent: Iterable[tuple[Tensor, Tensor]], weighting: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the clients' class means, class by class over the clients that have the class, weighted by their counts of
    the class ("samples") or all the same ("uniform"); and which classes there are."""
    sums, total = torch.zeros_like(like), torch.zeros(len(like), dtype=like.dtype)
    for means, counts in sent:
        weight = counts.to(like.dtype) if weighting == "samples" else (counts > 0).to(like.dtype)
        sums += weight[:, None] * means
        total += weight
    return sums / torch.where(total > 0, total, 1.0)[:, None], total > 0
