"""HeteroFL: Diao, Ding, Tarokh 2021, HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients, ICLR. Algorithm 1; W is the widest model, W_i its leading slice of client i's width:

    W_i <- W[:d_i, :k_i] in every layer;  SGD on F_i
    W   <- every entry: the mean over the participants whose slice has it; an entry that nobody has stays

Choices:
1. Slices are leading ones along every axis, and client i's shapes are those of its network. The first layer's inputs and
   the head's outputs are never cut, because the networks do not cut them.
2. Scalers are layers of the networks: they divide by the rate in training mode (networks.py).
3. The paper's mean counts every participant the same.
4. Masked cross-entropy (`masked`): the logits of classes that the client does not have are replaced by zero before the
   cross-entropy, as the authors do (not by minus infinity).
5. With `head_by_class` the rows of the head (weight and bias) are averaged only over participants that have the class, as in
   the authors' code.
6. Static BatchNorm is not part of it: the networks have no BatchNorm.
7. A client's model is its slice of the newest W, also for absent clients.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, State, copy_of, load, train


@dataclass(frozen=True)
class Settings:
    masked: bool = True
    head_by_class: bool = True
    head: str = "head."
    sgd: Sgd = Sgd()
    weighting: str = "uniform"


def slice_of(widest: State, like: State) -> State:
    return {name: widest[name][tuple(slice(0, size) for size in value.shape)].clone() for name, value in like.items()}


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    widest = copy_of(problem.server)
    has = [torch.tensor([bool((y == c).any()) for c in range(problem.classes)]) for _, y in problem.clients]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        sums = {name: torch.zeros_like(value) for name, value in widest.items()}
        counts = {name: torch.zeros_like(value) for name, value in widest.items()}
        for i, weight in zip(participants, problem.weights(participants, settings.weighting), strict=True):

            def masked(model, x, y, has=has[i]):
                return F.cross_entropy(model(x).masked_fill(~has, 0.0), y)

            model = load(problem.networks[i], slice_of(widest, problem.first[i]))
            trained[i] = train(model, problem.batches(t, i), settings.sgd, masked if settings.masked else None)
            for name, value in trained[i].items():
                where = torch.full_like(value, weight)
                if settings.head_by_class and name.startswith(settings.head):
                    where[~has[i]] = 0.0
                region = tuple(slice(0, size) for size in value.shape)
                sums[name][region] += where * value
                counts[name][region] += where
        for name, value in widest.items():
            widest[name] = torch.where(counts[name] > 0, sums[name] / torch.where(counts[name] > 0, counts[name], 1.0), value)
        personal = [slice_of(widest, state) for state in problem.first]
        history.append(After(copy_of(widest), personal, trained, {"counts": counts}))
    return history
