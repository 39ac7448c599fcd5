"""FedBN: Li, Jiang, Zhang, Kamp, Dou 2021, FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR.
Algorithm 1 (appendix): for every layer l that is not BatchNorm, w(l) <- 1/K sum of w_i(l); BatchNorm layers are never averaged.

Choices:
1. A layer is BatchNorm by its type, not by its name. Its weight, bias, running mean and variance and its counter stay.
2. The paper's mean is uniform.
3. A client's model is the newest shared layers with its own BatchNorm layers, also for absent clients.
4. Running statistics are PyTorch's: momentum 0.1, unbiased variance.
"""

from dataclasses import dataclass

from torch.nn.modules.batchnorm import _BatchNorm

from fedme_oracles.common import After, Problem, Sgd, copy_of, load, mean, train


@dataclass(frozen=True)
class Settings:
    sgd: Sgd = Sgd()
    weighting: str = "uniform"


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    modules = load(problem.networks[0], problem.server).named_modules()
    private = tuple(f"{name}." for name, module in modules if isinstance(module, _BatchNorm))
    w = {name: value.clone() for name, value in problem.server.items() if not name.startswith(private)}
    own = [{name: value.clone() for name, value in state.items() if name not in w} for state in problem.first]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            trained[i] = train(load(problem.networks[i], {**w, **own[i]}), problem.batches(t, i), settings.sgd)
            own[i] = {name: trained[i][name] for name in own[i]}
        w = mean(list(trained.values()), problem.weights(participants, settings.weighting), list(w))
        history.append(After(copy_of(w), [copy_of({**w, **layers}) for layers in own], trained))
    return history
