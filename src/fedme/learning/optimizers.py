"""Local optimizers: SGD and Adam, APFL's mixture, pFedMe's Moreau step and PFML's regularised mutual step.

An optimizer is arithmetic over weights and calls of `gradient`; it runs on the weights of one client or of a stack of clients.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.model import Model
from fedme.core.operations import Batch, Gradient, Models, Objective, OptState
from fedme.core.tree import Params
from fedme.learning.objectives import CrossEntropy, Mutual


class Descent(ABC):
    """Ordinary local descent: a step of every model along its gradient.

    The gradient gets ``prox * (w - w_frozen)``, or with `shift` the frozen weights themselves, and is clipped to norm `clip`
    (one norm per model); `update` does the rest. With `alternating`, roles step one after another and each sees its
    predecessors after their step (the original mutual learning); otherwise all forwards come before all steps.
    """

    objective: Objective
    lr: float
    weight_decay: float
    clip: float | None
    prox: float
    alternating: bool
    shift: bool

    @abstractmethod
    def init_state(self, params: Params) -> Params:
        """The state of one model before its first step; empty if there is none."""

    @abstractmethod
    def update(self, params: Params, grad: Params, state: Params) -> tuple[Params, Params]:
        """The weights and the state of one model after a step."""

    def init(self, models: Models) -> OptState:
        states = {role: self.init_state(model.params) for role, model in models.items()}
        return {role: state for role, state in states.items() if state}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        models, opt = dict(models), dict(opt)
        turns = [(role,) for role in models] if self.alternating else [tuple(models)]
        for draw, turn in enumerate(turns):
            grads, buffers = gradient(models, batch, draw)
            for role in turn:
                model, grad = models[role], grads[role]
                if self.prox and role in frozen:
                    grad = tree.add(grad, tree.sub(model.params, frozen[role].params), self.prox)
                if self.shift:
                    grad = tree.add(grad, frozen[role].params)
                if self.clip is not None:
                    grad = gradient.clip(grad, self.clip)
                params, state = self.update(model.params, grad, opt.get(role, {}))
                models[role] = Model(model.arch, params, buffers[role])
                if state:
                    opt[role] = state
        return models, opt


@dataclass(frozen=True)
class SGD(Descent):
    """SGD with momentum, also Nesterov's, and an L2 penalty, as `torch.optim.SGD`. Its state is the momentum buffer."""

    objective: Objective
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    prox: float = 0.0
    alternating: bool = False
    nesterov: bool = False
    shift: bool = False

    def init_state(self, params: Params) -> Params:
        return tree.zeros(params) if self.momentum else {}

    def update(self, params: Params, grad: Params, state: Params) -> tuple[Params, Params]:
        step = tree.add(grad, params, self.weight_decay) if self.weight_decay else grad
        if self.momentum:
            state = tree.add(step, state, self.momentum)
            step = tree.add(step, state, self.momentum) if self.nesterov else state
        return tree.add(params, step, -self.lr), state


@dataclass(frozen=True)
class Adam(Descent):
    """Adam, as `torch.optim.Adam`; with `decoupled_weight_decay` it is `torch.optim.AdamW`.

    The state has three tensors per weight: the means of the gradient (``.exp_avg``) and of its square (``.exp_avg_sq``), and
    the number of steps (``.step``): clients of a stack may have taken different numbers.
    """

    objective: Objective
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    prox: float = 0.0
    alternating: bool = False
    decoupled_weight_decay: bool = False
    shift: bool = False

    def init_state(self, params: Params) -> Params:
        state: dict[str, Tensor] = {}
        for name, w in params.items():
            state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
            state[f"{name}.step"] = torch.zeros((), dtype=torch.int64, device=w.device)
        return state

    def update(self, params: Params, grad: Params, state: Params) -> tuple[Params, Params]:
        if self.weight_decay and self.decoupled_weight_decay:
            params = tree.scale(params, 1.0 - self.lr * self.weight_decay)
        elif self.weight_decay:
            grad = tree.add(grad, params, self.weight_decay)
        after: dict[str, Tensor] = {}
        new: dict[str, Tensor] = {}
        for name, w in params.items():
            g, mean, square = grad[name], state[f"{name}.exp_avg"], state[f"{name}.exp_avg_sq"]
            new[f"{name}.exp_avg"] = mean = torch.lerp(mean, g, 1.0 - self.betas[0])
            new[f"{name}.exp_avg_sq"] = square = (square * self.betas[1]).addcmul_(g, g, value=1.0 - self.betas[1])
            new[f"{name}.step"] = step = state[f"{name}.step"] + 1
            # One number per client: the first axis of a stack counts clients, and `step` has no other axis.
            step = step.reshape(step.shape + (1,) * (w.dim() - step.dim()))
            bias = [_one_minus_power(beta, step, w.dtype) for beta in self.betas]
            # w - lr (mean / bias[0]) / (sqrt(square / bias[1]) + eps), with few passes over the weights
            inverse = bias[0] / self.lr
            denominator = square.sqrt().mul_(inverse / bias[1].sqrt()).add_(inverse * self.eps)
            after[name] = torch.addcdiv(w, mean, denominator, value=-1.0)
        return after, new


def _one_minus_power(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 - beta ** step``, without the loss of digits of this subtraction in 32 bits."""
    return -torch.expm1(step.to(dtype) * (math.log(beta) if beta else -math.inf))


@dataclass(frozen=True)
class Mixing:
    """APFL's step: "global" (w) by its own gradient, "own" (v) by that of the mixture m = alpha v + (1 - alpha) w.

    `rule` turns gradients into steps. The state of "own" also has the client's alpha, once per weight (``.alpha``), which moves
    along the gradient of f(m) too. All three moves are from the weights as they were before the step.
    """

    objective: Objective
    rule: SGD | Adam
    adapt: Literal["step", "round", "never"]  # when alpha moves: in every step, in the first one of a training, or never

    def init(self, models: Models) -> OptState:
        return self.started(models, 0.5)

    def started(self, models: Models, alpha: float) -> OptState:
        """The state of a client whose mixture has this alpha."""
        states = {role: self.rule.init_state(model.params) for role, model in models.items()}
        numbers = {
            f"{name}{ALPHA}": torch.full((), alpha, dtype=w.dtype, device=w.device) for name, w in models["own"].params.items()
        }
        return {role: state for role, state in {**states, "own": {**states["own"], **numbers}}.items() if state}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        v, w, state = models["own"], models["global"], opt["own"]
        alpha = {name: state[f"{name}{ALPHA}"] for name in v.params}
        # One number per client: the first axis of a stack counts clients, and alpha has no other axis.
        share = {name: a.reshape(a.shape + (1,) * (v.params[name].dim() - a.dim())) for name, a in alpha.items()}
        apart = tree.sub(v.params, w.params)
        mixture = v.with_params({name: w.params[name] + share[name] * d for name, d in apart.items()})
        grads, buffers = gradient({"own": mixture, "global": w}, batch)
        if self.adapt == "step" or (self.adapt == "round" and batch.step == 0):
            derivative = gradient.dot(apart, grads["own"])
            alpha = {name: (a - self.rule.lr * derivative[name]).clamp(0.0, 1.0) for name, a in alpha.items()}
        steps = {"own": {name: share[name] * g for name, g in grads["own"].items()}, "global": grads["global"]}
        after, states = {}, {}
        for role, model in (("own", v), ("global", w)):
            step = gradient.clip(steps[role], self.rule.clip) if self.rule.clip is not None else steps[role]
            params, states[role] = self.rule.update(model.params, step, opt.get(role, {}))
            after[role] = Model(model.arch, params, buffers[role])
        states["own"] = {**states["own"], **{f"{name}{ALPHA}": a for name, a in alpha.items()}}
        return after, {role: state for role, state in states.items() if state}


ALPHA = ".alpha"


@dataclass(frozen=True)
class Moreau:
    """pFedMe's step: `inner` descents of "theta" on f + lam/2 |theta - w|^2 with one batch, then "w" moves towards theta."""

    lr: float  # eta
    inner_lr: float  # eta_p
    lam: float
    inner: int  # K
    l2: float = 0.0  # mu
    objective: Objective = CrossEntropy()

    def init(self, models: Models) -> OptState:
        return {}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        theta, w = models["theta"], models["w"]
        for k in range(self.inner):
            grads, buffers = gradient({"theta": theta}, batch, k)
            theta = _descend(theta, grads["theta"], w, self.inner_lr, self.lam, self.l2).with_buffers(buffers["theta"])
        pulled = tree.add(w.params, tree.sub(w.params, theta.params), -self.lr * self.lam)
        return {"theta": theta, "w": Model(w.arch, pulled, theta.buffers)}, opt


@dataclass(frozen=True)
class MutualMoreau:
    """PFML's step on one batch: `inner` descents of copies of both models, each pulled to its anchor, then the outer step.

    Roles "aux" (m) and "local" (w) are trained; "theta" receives the last inner copy of the auxiliary model, which is the
    personal model. `frozen` holds the anchors: "aux" is the previous auxiliary model, "local" the received global one.
    """

    lr: float  # eta
    inner_lr: float
    lam: float
    inner: int  # K
    l2: float = 0.0
    objective: Objective = Mutual("aux", "local")
    aux_l2: float | None = None  # of the auxiliary model and its copy; `l2` by default

    def init(self, models: Models) -> OptState:
        return {}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        outer = {role: models[role] for role in ("aux", "local")}
        l2 = {"aux": self.l2 if self.aux_l2 is None else self.aux_l2, "local": self.l2}
        copies = dict(outer)
        for k in range(self.inner):
            grads, buffers = gradient(copies, batch, k)
            copies = {
                role: _descend(copy, grads[role], frozen[role], self.inner_lr, self.lam, l2[role]).with_buffers(buffers[role])
                for role, copy in copies.items()
            }
        # One step of size lr on L plus the pull towards the copy: gradients at the pair as it was before the inner loop.
        grads, buffers = gradient(outer, batch, self.inner)
        after = {
            role: _descend(model, grads[role], copies[role], self.lr, self.lam, l2[role]).with_buffers(buffers[role])
            for role, model in outer.items()
        }
        return {**after, "theta": copies["aux"]}, opt


def _descend(model: Model, grad: Params, anchor: Model, lr: float, lam: float, l2: float) -> Model:
    """One step on f(w) + lam/2 |w - anchor|^2 + l2/2 |w|^2, where `grad` is the gradient of f."""
    step = tree.add(grad, tree.sub(model.params, anchor.params), lam)
    step = tree.add(step, model.params, l2) if l2 else step
    return model.with_params(tree.add(model.params, step, -lr))
