"""FedDF: Lin, Kong, Stich, Jaggi 2020, Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS.
Algorithm 3 (several architectures; with one it is algorithm 1) and equation (1):

    x_k <- SGD on F_k from its architecture's model x_p
    x_p <- sum over the participants of architecture p of n_k / n x_k
    for every batch d of unlabelled samples:
        x_p <- x_p - eta grad KL(softmax(mean over all participants of f(x_k, d)), softmax(f(x_p, d)))

Choices:
1. The teacher is the softmax of the mean logits (`teacher="logits"`, as in the paper), or the mean of the softmax
   outputs ("probabilities"). It is uniform over all participants, of all architectures, with their models as sent.
2. KL(teacher, student) is summed over classes and averaged over the batch. No temperature.
3. The teachers are in evaluation mode; the student is in training mode.
4. The server's optimiser is Adam, a new one for every architecture and round, with a constant rate (the paper's falls along a
   cosine); "sgd" is plain SGD.
5. An architecture without a participant in the round keeps its model, and is distilled like the others.
6. The number of steps is given by the batches of (round, SERVER, architecture).
7. A client's model is its architecture's newest model. `server` has one State per architecture.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fedme_oracles.common import SERVER, After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    server_optimizer: str = "adam"
    server_learning_rate: float = 1e-3
    teacher: str = "logits"
    sgd: Sgd = Sgd()
    weighting: str = "samples"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    of = list(problem.architectures)
    fused = {name: copy_of(state) for name, state in problem.server.items()}
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            trained[i] = train(load(problem.networks[i], fused[of[i]]), problem.batches(t, i), settings.sgd)
        with torch.no_grad():
            outputs = [load(problem.networks[i], trained[i]).eval()(problem.public) for i in participants]
            if settings.teacher == "logits":
                teacher = F.softmax(torch.stack(outputs).mean(dim=0), dim=1)
            else:
                teacher = torch.stack([F.softmax(z, dim=1) for z in outputs]).mean(dim=0)
        averaged = {}
        for name in fused:
            members = [i for i in participants if of[i] == name]
            if members:
                fused[name] = mean([trained[i] for i in members], problem.weights(members, settings.weighting))
            averaged[name] = copy_of(fused[name])
            student = load(problem.networks[of.index(name)], fused[name])
            rate = settings.server_learning_rate
            adam = settings.server_optimizer == "adam"
            optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(student.parameters(), lr=rate)
            for index in problem.orders[t, SERVER, name]:
                p, log_q = teacher[index], F.log_softmax(student(problem.public[index]), dim=1)
                loss = (p * (p.log() - log_q)).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            fused[name] = copy_of(student.state_dict())
        server = {name: copy_of(state) for name, state in fused.items()}
        kept = {"averaged": averaged, "teacher": teacher}
        history.append(After(server, [copy_of(fused[name]) for name in of], trained, kept))
    return history
