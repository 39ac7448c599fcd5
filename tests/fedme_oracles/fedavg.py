"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas 2017, Communication-Efficient Learning of Deep Networks from
Decentralized Data, AISTATS. Algorithm 1:

    w_i <- w, then for every batch b: w_i <- w_i - eta grad l(w_i; b)
    w <- sum over i in S_t of n_i / n w_i, where n is the sum of the participants' n_i

Choices:
1. The mean is over the participants of the round.
2. Everybody's model is the new w.
3. Buffers (BatchNorm) are averaged like weights.
"""

from dataclasses import dataclass

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    sgd: Sgd = Sgd()
    weighting: str = "samples"


def run(problem: Problem, settings: Settings = Settings(), phase: str = "train") -> list[After]:
    w = copy_of(problem.server)
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            trained[i] = train(load(problem.networks[i], w), problem.batches(t, i, phase), settings.sgd)
        w = mean(list(trained.values()), problem.weights(participants, settings.weighting))
        history.append(After(copy_of(w), [copy_of(w) for _ in problem.clients], trained))
    return history
