"""LG-FedAvg: Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency 2020, Think Locally, Act Globally: Federated
Learning with Local and Global Representations, arXiv:2001.01523. Algorithm 1:

    each client has a local body l_i, of any architecture, and a copy g of the global model on top of it
    (l_i, g_i) <- SGD on F_i, both together, from (l_i, g)
    g <- sum of n_i / n g_i

Choices:
1. Shared are the entries whose names begin with one of `shared`: the head by default. They have one shape in all networks.
2. The mean is over the participants of the round, by sample counts.
3. A client's model is its own body with the newest g, also for absent clients (the paper's local test).
4. The paper begins with some rounds of FedAvg where architectures allow them; here there are none.
"""

from dataclasses import dataclass

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    shared: tuple[str, ...] = ("head.",)
    sgd: Sgd = Sgd()
    weighting: str = "samples"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    g = {name: value.clone() for name, value in problem.server.items() if name.startswith(settings.shared)}
    bodies = [{name: value.clone() for name, value in state.items() if name not in g} for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            trained[i] = train(load(problem.networks[i], {**bodies[i], **g}), problem.batches(t, i), settings.sgd)
            bodies[i] = {name: trained[i][name] for name in bodies[i]}
        g = mean(list(trained.values()), problem.weights(participants, settings.weighting), list(g))
        history.append(After(copy_of(g), [copy_of({**body, **g}) for body in bodies], trained))
    return history
