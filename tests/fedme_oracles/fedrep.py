"""FedRep: Collins, Hassani, Mokhtari, Shakkottai 2021, Exploiting Shared Representations for Personalized Federated Learning,
ICML. Algorithm 1; in every round, for every participant i with head h_i and the received body phi:

    tau times: h_i <- h_i - eta grad_h F_i(h_i, phi)              phase "head", the body as received
    then:      phi_i <- phi_i - eta grad_phi F_i(h_i, phi_i)      phase "body", the new head fixed
    phi <- mean of phi_i over the participants

Choices:
1. The head's batches and the body's are given apart: 5 epochs and 1 epoch are usual.
2. The paper's mean is uniform.
3. Each phase has a new optimiser; weight decay applies only to the part that is trained.
4. A client's model is the newest phi with its own h_i, also for absent clients.
5. A frozen BatchNorm keeps its weights but, being in training mode, updates its running statistics.
"""

from dataclasses import dataclass

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    personal: tuple[str, ...] = ("head.",)
    sgd: Sgd = Sgd()
    weighting: str = "uniform"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    phi = {name: value.clone() for name, value in problem.server.items() if not name.startswith(settings.personal)}
    heads = [{name: value.clone() for name, value in state.items() if name not in phi} for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            model = load(problem.networks[i], {**phi, **heads[i]})
            train(model, problem.batches(t, i, "head"), settings.sgd, only=lambda name: name.startswith(settings.personal))
            train(model, problem.batches(t, i, "body"), settings.sgd, only=lambda name: not name.startswith(settings.personal))
            trained[i] = copy_of(model.state_dict())
            heads[i] = {name: trained[i][name] for name in heads[i]}
        phi = mean(list(trained.values()), problem.weights(participants, settings.weighting), list(phi))
        history.append(After(copy_of(phi), [copy_of({**phi, **head}) for head in heads], trained))
    return history
