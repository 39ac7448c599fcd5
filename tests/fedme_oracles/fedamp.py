"""FedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang 2021, Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI.
Algorithm 1, equations (3) to (6), with A(z) = 1 - exp(-z / sigma), so A'(z) = exp(-z / sigma) / sigma:

    xi_ij = alpha A'(|m_i - m_j|^2) for j != i,   xi_ii = 1 - sum over j != i of xi_ij
    u_i   = sum over j of xi_ij m_j                                          at the server
    m_i  <- min over m of F_i(m) + lambda / (2 alpha) |m - u_i|^2             at the client

Choices:
1. The minimum is approached by the given SGD steps, from the client's own m_i (`start="own"`) or from u_i ("cloud").
2. xi_ii is what the formula gives; it is negative if alpha is too large for how close the models are.
3. The distance and the mixture are over parameters; buffers are the client's own.
4. Mixed are the last models of all clients (`among="all"`), or of this round's participants only ("participants").
5. The server knows the first weights, so that round 1 mixes them. With `knows_first=False` a client is part of mixtures only
   after its first upload; until then u_i is its own m_i.
6. alpha, lambda and sigma are 1 by default and do not change from round to round.
"""

import math
from dataclasses import dataclass

from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, State, copy_of, load, squared_distance, train


@dataclass(frozen=True)
class Settings:
    alpha: float = 1.0
    lambda_: float = 1.0
    sigma: float = 1.0
    start: str = "own"
    among: str = "all"
    knows_first: bool = True
    sgd: Sgd = Sgd()


def mixing_weights(i: int, models: dict[int, State], names: list[str], settings: Settings) -> dict[int, float]:
    xi = {}
    for j in models:
        if j != i:
            distance = sum(((models[i][name] - models[j][name]) ** 2).sum().item() for name in names)
            xi[j] = settings.alpha * math.exp(-distance / settings.sigma) / settings.sigma
    xi[i] = 1 - sum(xi.values())
    return xi


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    names = [name for name, _ in load(problem.networks[0], problem.first[0]).named_parameters()]
    models = [copy_of(state) for state in problem.first]
    uploaded = {i: copy_of(state) for i, state in enumerate(models)} if settings.knows_first else {}
    history = []
    for t, participants in enumerate(problem.participants):
        seen = {j: m for j, m in uploaded.items() if settings.among == "all" or j in participants}
        trained, clouds, weights = {}, {}, {}
        for i in participants:
            xi = weights[i] = mixing_weights(i, seen, names, settings) if i in seen else {i: 1.0}
            u = clouds[i] = {name: sum(xi[j] * seen.get(j, models[j])[name] for j in xi) for name in names}

            def penalised(model, x, y, u=u):
                penalty = settings.lambda_ / (2 * settings.alpha) * squared_distance(model, u)
                return F.cross_entropy(model(x), y) + penalty

            begin = models[i] if settings.start == "own" else {**models[i], **u}
            trained[i] = train(load(problem.networks[i], begin), problem.batches(t, i), settings.sgd, penalised)
        for i in participants:
            models[i] = trained[i]
            uploaded[i] = copy_of(trained[i])
        kept = {"clouds": clouds, "mixing_weights": weights}
        history.append(After(None, [copy_of(m) for m in models], trained, kept))
    return history
