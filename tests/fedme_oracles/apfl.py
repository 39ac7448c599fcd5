"""APFL: Deng, Kamani, Mahdavi 2020, Adaptive Personalized Federated Learning, arXiv:2003.13461.
Algorithm 1 with the adaptive alpha of equation (11); at every step, on one batch, with m = alpha_i v_i + (1 - alpha_i) w_i:

    w_i     <- w_i - eta grad F_i(w_i)
    v_i     <- v_i - eta alpha_i grad F_i(m)                     (the gradient of F_i(m) for v_i)
    alpha_i <- alpha_i - eta <v_i - w_i, grad F_i(m)>, clipped to [0, 1]
    at the end of the round: w <- mean of w_i over the participants; those continue from w

Choices:
1. All three updates use w_i, v_i, alpha_i as they were before the step.
2. alpha moves at every step (`alpha_moves="step"`), at the first step of each round ("round"), or never ("never").
3. The paper's mean is uniform.
4. v_i and alpha_i stay with the client and do not move while it is absent. v_i begins as its first weights.
5. The personal model is alpha_i v_i + (1 - alpha_i) w_i with w_i as the client's training left it, before the mean; `kept`
   has the mixture with the newest w too. A client that has never taken part has the server's first w as w_i.
6. Momentum and weight decay apply to w_i and v_i apart; alpha moves by plain steps with eta of the weights.
7. Buffers are mixed like parameters; those of w_i are updated by its own forward pass only, and v_i's stay its first.
"""

from dataclasses import dataclass

import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedme_oracles.common import After, Problem, Sgd, State, copy_of, load, mean


@dataclass(frozen=True)
class Settings:
    alpha: float = 0.5
    alpha_moves: str = "step"
    sgd: Sgd = Sgd()
    weighting: str = "uniform"


def mixture(alpha: float, v: State, w: State) -> State:
    return {name: alpha * v[name] + (1 - alpha) * w[name] if v[name].is_floating_point() else w[name] for name in w}


def run(problem: Problem, settings: Settings = Settings()) -> list[After]:
    w = copy_of(problem.server)
    w_of = [copy_of(w) for _ in problem.clients]
    v_of = [copy_of(state) for state in problem.first]
    alphas = [settings.alpha for _ in problem.clients]
    history = []
    for t, participants in enumerate(problem.participants):
        trained = {}
        for i in participants:
            shared, private = load(problem.networks[i], w), load(problem.networks[i], v_of[i])
            optimizer, optimizer_v = settings.sgd.over(shared.parameters()), settings.sgd.over(private.parameters())
            for step, (x, y) in enumerate(problem.batches(t, i)):
                alpha = alphas[i]
                mixed = mixture(alpha, copy_of(private.state_dict()), copy_of(shared.state_dict()))
                weights = {name: mixed[name].requires_grad_() for name, _ in shared.named_parameters()}
                loss = F.cross_entropy(functional_call(shared, mixed, (x,)), y)
                gradient = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
                slope = sum(
                    ((v.detach() - s.detach()) * gradient[name]).sum().item()
                    for (name, v), s in zip(private.named_parameters(), shared.parameters(), strict=True)
                )
                optimizer.zero_grad()
                F.cross_entropy(shared(x), y).backward()
                optimizer.step()
                for name, parameter in private.named_parameters():
                    parameter.grad = alpha * gradient[name]
                optimizer_v.step()
                if settings.alpha_moves == "step" or (settings.alpha_moves == "round" and step == 0):
                    alphas[i] = min(1.0, max(0.0, alpha - settings.sgd.learning_rate * slope))
            trained[i] = w_of[i] = copy_of(shared.state_dict())
            v_of[i] = copy_of(private.state_dict())
        w = mean(list(trained.values()), problem.weights(participants, settings.weighting))
        personal = [mixture(a, v, own) for a, v, own in zip(alphas, v_of, w_of, strict=True)]
        with_newest = [copy_of(mixture(a, v, w)) for a, v in zip(alphas, v_of, strict=True)]
        kept = {"alphas": list(alphas), "v": [copy_of(v) for v in v_of], "mixed_with_newest": with_newest}
        history.append(After(copy_of(w), [copy_of(m) for m in personal], trained, kept))
    return history
