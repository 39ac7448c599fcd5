"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang 2022, FedProto: Federated Prototype Learning across Heterogeneous Clients,
AAAI. Algorithm 1, equations (3), (6) and (7); with f_i the body of client i:

    C_i(l) = 1 / |D_il| sum over its samples of class l of f_i(x)               (3)
    C(l)   = sum over clients of |D_il| / N_l C_i(l)                            (6)
    loss   = CE(head(f_i(x)), y) + lambda |f_i(x) - C(y)|^2                      (7)

Choices:
1. (6) prints a further 1 / |N_l| before the sum, with which prototypes shrink; it is read as the mean weighted by counts.
   `weighting="uniform"` is the mean over the clients that have the class.
2. (7) compares prototypes; as in the authors' code each sample's feature is compared, by the mean over the feature's entries of
   the squared difference, and the mean over the batch (the mean squared error).
3. A sample whose class has no prototype yet has no penalty; the batch mean is still over all samples.
4. C_i is of the model after its training, over all its samples, in evaluation mode (`collect="after"`), or of the features seen
   while training, before each step, in all its epochs ("training").
5. A class that nobody sent in this round keeps its prototype (`remember="classes"`); or it is lost ("nothing"); or the last
   upload of every client counts on ("clients").
6. The personal model predicts by its head; `nearest_prototype` is the paper's rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, class_means, copy_of, load, mean_of_class_means


@dataclass(frozen=True)
class Settings:
    lambda_: float = 1.0
    collect: str = "after"
    weighting: str = "samples"
    remember: str = "classes"
    sgd: Sgd = Sgd()


def nearest_prototype(features: Tensor, prototypes: Tensor, there: Tensor) -> Tensor:
    distances = ((features[:, None, :] - prototypes[None, :, :]) ** 2).sum(dim=2)
    return distances.masked_fill(~there[None, :], float("inf")).argmin(dim=1)


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    models = [copy_of(state) for state in problem.first]
    width = problem.first[0]["head.weight"].shape[1]
    prototypes = torch.zeros(problem.classes, width, dtype=torch.float64)
    there = torch.zeros(problem.classes, dtype=torch.bool)
    sent: dict = {}
    history = []
    for t, participants in enumerate(problem.participants):
        replies = {}
        for i in participants:
            model = load(problem.networks[i], models[i])
            optimizer = settings.sgd.over(model.parameters())
            seen, labels = [], []
            for x, y in problem.batches(t, i):
                features = model.features(x)
                distances = ((features - prototypes[y]) ** 2).mean(dim=1)
                loss = F.cross_entropy(model.head(features), y) + settings.lambda_ * (distances * there[y]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(features.detach())
                labels.append(y)
            models[i] = copy_of(model.state_dict())
            if settings.collect == "after":
                with torch.no_grad():
                    seen, labels = [model.eval().features(problem.clients[i][0])], [problem.clients[i][1]]
            replies[i] = class_means(torch.cat(seen), torch.cat(labels), problem.classes)
        sent = {**sent, **replies} if settings.remember == "clients" else replies
        new, new_there = mean_of_class_means(sent.values(), settings.weighting, prototypes)
        if settings.remember == "classes":
            new = torch.where(new_there[:, None], new, prototypes)
            new_there = new_there | there
        prototypes, there = new, new_there
        kept = {"sent": replies, "classes_there": there}
        history.append(After(prototypes, [copy_of(m) for m in models], {i: copy_of(models[i]) for i in participants}, kept))
    return history
