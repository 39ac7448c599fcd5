"""Local optimizers: SGD, pFedMe's Moreau step and PFML's regularised mutual step.

An optimizer is arithmetic over weights and calls of `gradient`; it runs on the weights of one client or of a stack of clients.
"""

from dataclasses import dataclass

from fedme.core import tree
from fedme.core.model import Model
from fedme.core.operations import Batch, Gradient, Models, Objective, OptState
from fedme.core.tree import Params
from fedme.learning.objectives import CrossEntropy, Mutual


@dataclass(frozen=True)
class SGD:
    """SGD with momentum, weight decay, gradient clipping and a proximal pull, in that order from the outside in.

    The gradient gets ``prox * (w - w_frozen)``, is clipped to norm `clip` (one norm per model), gets ``weight_decay * w`` and
    enters the momentum buffer, as in PyTorch. With `alternating`, roles step one after another and each sees its
    predecessors after their step (the original mutual learning); otherwise all forwards come before all steps.
    """

    objective: Objective
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    prox: float = 0.0
    alternating: bool = False

    def init(self, models: Models) -> OptState:
        return {role: tree.zeros(model.params) for role, model in models.items()} if self.momentum else {}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        models, opt = dict(models), dict(opt)
        turns = [(role,) for role in models] if self.alternating else [tuple(models)]
        for draw, turn in enumerate(turns):
            grads, buffers = gradient(models, batch, draw)
            for role in turn:
                model = models[role]
                step = self.step(gradient, grads[role], model, frozen.get(role))
                if self.momentum:
                    opt[role] = step = tree.add(step, opt[role], self.momentum)
                models[role] = Model(model.arch, tree.add(model.params, step, -self.lr), buffers[role])
        return models, opt

    def step(self, gradient: Gradient, grad: Params, model: Model, anchor: Model | None) -> Params:
        """What enters the momentum."""
        if self.prox and anchor is not None:
            grad = tree.add(grad, tree.sub(model.params, anchor.params), self.prox)
        if self.clip is not None:
            grad = gradient.clip(grad, self.clip)
        return tree.add(grad, model.params, self.weight_decay) if self.weight_decay else grad


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

    def init(self, models: Models) -> OptState:
        return {}

    def __call__(
        self, gradient: Gradient, models: Models, opt: OptState, frozen: Models, batch: Batch
    ) -> tuple[Models, OptState]:
        outer = {role: models[role] for role in ("aux", "local")}
        copies = dict(outer)
        for k in range(self.inner):
            grads, buffers = gradient(copies, batch, k)
            copies = {
                role: _descend(copy, grads[role], frozen[role], self.inner_lr, self.lam, self.l2).with_buffers(buffers[role])
                for role, copy in copies.items()
            }
        # One step of size lr on L plus the pull towards the copy: gradients at the pair as it was before the inner loop.
        grads, buffers = gradient(outer, batch, self.inner)
        after = {
            role: _descend(model, grads[role], copies[role], self.lr, self.lam, self.l2).with_buffers(buffers[role])
            for role, model in outer.items()
        }
        return {**after, "theta": copies["aux"]}, opt


def _descend(model: Model, grad: Params, anchor: Model, lr: float, lam: float, l2: float) -> Model:
    """One step on f(w) + lam/2 |w - anchor|^2 + l2/2 |w|^2, where `grad` is the gradient of f."""
    step = tree.add(grad, tree.sub(model.params, anchor.params), lam)
    step = tree.add(step, model.params, l2) if l2 else step
    return model.with_params(tree.add(model.params, step, -lr))
