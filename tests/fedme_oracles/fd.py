"""FD, federated distillation (FedDistill): Jeong, Oh, Kim, Park, Bennis, Kim 2018, Communication-Efficient On-Device Machine
Learning: Federated Distillation and Augmentation under Non-IID Private Data, NeurIPS workshop on mobile devices.
Algorithm 1; with z = the outputs of client i for a sample of class l:

    loss = CE(z, l) + gamma d(z, Z_l of the others)
    Z_l(i) = mean of client i's outputs for its samples of class l;   sends Z(i) and the counts
    Z_l of the others = mean over j != i of Z_l(j)

Choices:
1. d is the mean over the classes of the squared difference of logits (`distance="mse"`, the mean over the batch too), or, as in
   the paper, the cross-entropy of softmax outputs with the others' mean softmax outputs ("cross_entropy"; then Z is of those).
2. Z(i) is of the outputs seen while training, before each step, as in the paper (`collect="training"`), or of the model
   after training over all the client's samples, in evaluation mode ("after").
3. A client's own Z(i) is left out of what it gets (`exclude_own`), as in the paper.
4. The mean is over the clients that have the class, uniform as in the paper; "samples" weights by their counts of the class.
5. A sample without a target (nobody else has its class, or round 1) has no distance; the batch mean is still over all samples.
6. Used are the uploads of the last round only; with `remember` the last upload of every client.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, class_means, copy_of, load, mean_of_class_means


@dataclass(frozen=True)
class Settings:
    gamma: float = 1.0
    distance: str = "mse"
    collect: str = "training"
    exclude_own: bool = True
    weighting: str = "uniform"
    remember: bool = False
    sgd: Sgd = Sgd()


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    models = [copy_of(state) for state in problem.first]
    outputs = (lambda z: z) if settings.distance == "mse" else (lambda z: F.softmax(z, dim=1))
    like = torch.zeros(problem.classes, problem.classes, dtype=torch.float64)
    sent: dict = {}
    history = []
    for t, participants in enumerate(problem.participants):
        replies, targets_of = {}, {}
        for i in participants:
            others = [reply for j, reply in sent.items() if not (settings.exclude_own and j == i)]
            target, there = targets_of[i] = mean_of_class_means(others, settings.weighting, like)
            model = load(problem.networks[i], models[i])
            optimizer = settings.sgd.over(model.parameters())
            seen, labels = [], []
            for x, y in problem.batches(t, i):
                z = model(x)
                if settings.distance == "mse":
                    distances = ((z - target[y]) ** 2).mean(dim=1)
                else:
                    distances = -(target[y] * F.log_softmax(z, dim=1)).sum(dim=1)
                loss = F.cross_entropy(z, y) + settings.gamma * (distances * there[y]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(outputs(z.detach()))
                labels.append(y)
            models[i] = copy_of(model.state_dict())
            if settings.collect == "after":
                with torch.no_grad():
                    seen, labels = [outputs(model.eval()(problem.clients[i][0]))], [problem.clients[i][1]]
            replies[i] = class_means(torch.cat(seen), torch.cat(labels), problem.classes)
        sent = {**sent, **replies} if settings.remember else replies
        server, there = mean_of_class_means(sent.values(), settings.weighting, like)
        kept = {"sent": replies, "targets": targets_of, "classes_there": there}
        history.append(After(server, [copy_of(m) for m in models], {i: copy_of(models[i]) for i in participants}, kept))
    return history
