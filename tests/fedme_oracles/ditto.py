"""Ditto: Li, Hu, Beirami, Smith 2021, Ditto: Fair and Robust Federated Learning Through Personalization, ICML.

Objective (1): min over v_i of h_i(v_i; w*) = F_i(v_i) + lambda/2 |v_i - w*|^2, where w* solves the shared problem.
Algorithm 1, in round t, for every participant i:

    w_i <- w^t, then SGD on F_i                                  phase "shared"
    v_i <- v_i - eta (grad F_i(v_i) + lambda (v_i - w^t))         phase "personal"
    w^(t+1) <- w^t + mean of (w_i - w^t)

Choices:
1. The centre of the penalty is w^t as received, not the client's trained copy; the order of the two phases does not matter.
2. The paper's mean is uniform; `weighting="samples"` is the usual FedAvg.
3. v_i begins as the client's first weights and stays with the client; it does not move while the client is absent.
4. The penalty is over parameters; buffers of v_i are the client's own.
5. Both phases have the same optimiser, each a new one every round.
6. The default lambda is 1.
"""

from dataclasses import dataclass

from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, squared_distance, train


@dataclass(frozen=True)
class Settings:
    lambda_: float = 1.0
    sgd: Sgd = Sgd()
    weighting: str = "uniform"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    w = copy_of(problem.server)
    v = [copy_of(state) for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        received, trained = copy_of(w), {}

        def penalised(model, x, y, received=received):
            return F.cross_entropy(model(x), y) + settings.lambda_ / 2 * squared_distance(model, received)

        for i in participants:
            trained[i] = train(load(problem.networks[i], received), problem.batches(t, i, "shared"), settings.sgd)
            v[i] = train(load(problem.networks[i], v[i]), problem.batches(t, i, "personal"), settings.sgd, penalised)
        w = mean(list(trained.values()), problem.weights(participants, settings.weighting))
        history.append(After(copy_of(w), [copy_of(state) for state in v], trained))
    return history
