"""SCAFFOLD: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML. Algorithm 1 with option II for the control variates; in every round, for every participant i:

    y_i <- x, then K times: y_i <- y_i - eta_l (g_i(y_i) - c_i + c)
    c_i+ <- c_i - c + (x - y_i) / (K eta_l)
    sends (dy_i, dc_i) = (y_i - x, c_i+ - c_i);  c_i <- c_i+
    x <- x + eta_g / |S| sum of dy_i
    c <- c + 1 / N sum of dc_i                                   (|S| / N times the mean of dc_i)

Choices:
1. All variates begin at zero.
2. K is the number of steps that this client took in this round; it may differ from client to client.
3. The mean is uniform, as in the paper. `weighting="samples"` weights dy_i by sample counts; c is always by 1 / N.
4. With momentum or weight decay the shifted gradient g - c_i + c is what SGD gets. Option II then is the paper's formula still,
   though it no longer is the mean gradient.
5. Variates are for parameters. Buffers are averaged like FedAvg's, without eta_g.
6. Everybody's model is the new x. A client without a step in this round keeps c_i and sends zeros.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean


@dataclass(frozen=True)
class Settings:
    server_learning_rate: float = 1.0  # eta_g
    sgd: Sgd = Sgd()  # its learning rate is eta_l
    weighting: str = "uniform"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    x = copy_of(problem.server)
    names = [name for name, _ in load(problem.networks[0], x).named_parameters()]
    c = {name: torch.zeros_like(x[name]) for name in names}
    c_of = [copy_of(c) for _ in problem.clients]
    history = []
    for t, participants in enumerate(problem.participants):
        trained, change_of_c = {}, []
        for i in participants:
            model = load(problem.networks[i], x)
            optimizer = settings.sgd.over(model.parameters())
            steps = 0
            for features, labels in problem.batches(t, i):
                optimizer.zero_grad()
                F.cross_entropy(model(features), labels).backward()
                for name, parameter in model.named_parameters():
                    parameter.grad = parameter.grad - c_of[i][name] + c[name]
                optimizer.step()
                steps += 1
            y = trained[i] = copy_of(model.state_dict())
            if steps:
                scale = 1 / (steps * settings.sgd.learning_rate)
                new = {name: c_of[i][name] - c[name] + scale * (x[name] - y[name]) for name in names}
                change_of_c.append({name: new[name] - c_of[i][name] for name in names})
                c_of[i] = new
        mean_y = mean(list(trained.values()), problem.weights(participants, settings.weighting))
        for name in names:
            mean_y[name] = x[name] + settings.server_learning_rate * (mean_y[name] - x[name])
            for change in change_of_c:
                c[name] = c[name] + change[name] / len(problem.clients)
        x = mean_y
        kept = {"server_variate": copy_of(c), "client_variates": [copy_of(variate) for variate in c_of]}
        history.append(After(copy_of(x), [copy_of(x) for _ in problem.clients], trained, kept))
    return history
