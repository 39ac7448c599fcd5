"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary 2019, Federated Learning with Personalization Layers, arXiv:1912.00818.
Algorithms 1 (client) and 2 (server), with base layers W_B and the client's personal layers W_P(i):

    (W_B(i), W_P(i)) <- SGD on F_i, both together, from (W_B, W_P(i))
    W_B <- sum of n_i / n W_B(i)

Choices:
1. Personal are the entries whose names begin with one of `personal`: the head by default (K_P = 1).
2. The mean is over the participants of the round, by sample counts.
3. A client's model is the newest W_B with its own W_P(i), also for absent clients. `trained` has the model before the mean.
"""

from dataclasses import dataclass

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    personal: tuple[str, ...] = ("head.",)
    sgd: Sgd = Sgd()
    weighting: str = "samples"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    base = {name: value.clone() for name, value in problem.server.items() if not name.startswith(settings.personal)}
    own = [{name: value.clone() for name, value in state.items() if name not in base} for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            trained[i] = train(load(problem.networks[i], {**base, **own[i]}), problem.batches(t, i), settings.sgd)
            own[i] = {name: trained[i][name] for name in own[i]}
        base = mean(list(trained.values()), problem.weights(participants, settings.weighting), list(base))
        history.append(After(copy_of(base), [copy_of({**base, **layers}) for layers in own], trained))
    return history
