"""One operation, alone: the plain reference that every faster path is checked against.

One client's models, ordinary autograd, one batch after another. Modules that draw from the global generator (``F.dropout`` in a
forward, `nn.LSTM` with dropout) get one that is seeded for the operation; the roles of the operation share it.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.data import Inputs, Split
from fedme.core.dropout import at_draw
from fedme.core.key import Key
from fedme.core.model import Model, dropout_layers
from fedme.core.operations import (
    Batch,
    Evaluate,
    GaussianMechanism,
    Models,
    Objective,
    Op,
    Predict,
    Role,
    Score,
    Train,
    Trained,
)
from fedme.core.task_types import task_loss
from fedme.core.tree import Params
from fedme.execution.lockstep import Executor
from fedme.learning.differential_privacy import noise

EVALUATION_BATCH = 512
DRAWS_A_STEP = 1 << 20  # masks are numbered step * this + draw


def run(op: Op) -> Any:
    """The result of one operation."""
    if isinstance(op, Train):
        return train(op)
    return evaluate(op) if isinstance(op, Evaluate) else predict(op)


def one_by_one(tick: Callable[[], None] = lambda: None, execute_one: Callable[[Op], Any] | None = None) -> Executor:
    """Execute operations one after another; `tick` is called after each, for progress and for stopping."""

    def execute(operations: Sequence[Op]) -> list[tuple[Any, float]]:
        results = []
        for operation in operations:
            start = time.perf_counter()
            results.append(((execute_one or run)(operation), time.perf_counter() - start))
            tick()
        return results

    return execute


def train(op: Train) -> Trained:
    """Go through the batches and let the rule take a step on each."""
    models: Models = {role: arranged(model) for role, model in op.models.items()}
    fresh = op.optimizer.init(models)
    opt = {role: op.opt.get(role, state) for role, state in fresh.items()}
    device = next((m.device for m in models.values()), torch.device("cpu"))
    gradient = Autograd(op.optimizer.objective, mask_seeds(models, op.key))
    if op.mechanism is not None:
        gradient = PerExample(gradient.objective, gradient.seeds, op=op, mechanism=op.mechanism)
    y = op.data.y.to(device)
    with own_randomness(op.key.at("dropout")):
        for step, x, positions in batches(op):
            models, opt = op.optimizer(gradient, models, opt, op.frozen, Batch(x, y[positions], step))  # type: ignore[assignment]
    opt = {role: {name: value.contiguous() for name, value in state.items()} for role, state in opt.items()}
    done = {role: m.with_params({name: p.contiguous() for name, p in m.params.items()}) for role, m in models.items()}
    return Trained(done, opt, gradient.mean_losses())


def batches(op: Train) -> Iterator[tuple[int, Any, Tensor]]:
    """The number of every step, the inputs of its batch and where they stand in the data."""
    for step, positions in enumerate(op.batch_schedule.batches(len(op.data), op.key.at("batches"))):
        augment = op.key.at("augment", step) if op.batch_schedule.augment else None
        yield step, _arranged(op.data.inputs(positions, augment)) if len(positions) else None, positions


def evaluate(op: Evaluate) -> Score:
    """Mean loss and accuracy."""
    if not len(op.data):
        return Score(0, float("nan"), float("nan"))
    seconds = seconds_a_sample(op.model, op.data) if op.timed else 0.0
    return score(predict(Predict(op.model, op.data)), op.data.y, seconds)


def score(logits: Tensor, y: Tensor, seconds: float = 0.0) -> Score:
    """How good outputs are for these targets."""
    kind = task_loss(y)
    return Score(len(y), kind.loss(kind.ready(logits), y).mean().item(), kind.accuracy(logits, y), seconds)


def seconds_a_sample(model: Model, data: Split, times: int = 7) -> float:
    """The median time of inference, after the first call has warmed up."""
    x = cast(next(_chunks(data)), model)
    spent = []
    with torch.inference_mode():
        for _ in range(times + 1):
            start = time.perf_counter()
            model(x)
            spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:]) / min(len(data), EVALUATION_BATCH)


def predict(op: Predict) -> Tensor:
    """Logits, in evaluation mode."""
    if not len(op.data):
        return torch.empty(0, 0)
    model = arranged(op.model)
    with torch.inference_mode():
        parts = [model(cast(_arranged(x), model)) for x in _chunks(op.data)]
    return torch.cat(parts).to("cpu", copy=True)


def _chunks(data: Split) -> Iterator[Inputs]:
    for positions in torch.arange(len(data)).split(EVALUATION_BATCH):
        yield data.inputs(positions)


def arranged(model: Model) -> Model:
    """The weights of convolutions with their channels last in memory, which is faster; the numbers are the same."""
    if not any(p.dim() == 4 for p in model.params.values()):
        return model
    return model.with_params({name: _arranged(p) for name, p in model.params.items()})


def _arranged(x: Inputs) -> Inputs:
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x
    if x.shape[1] == 1 and x.is_contiguous():  # both orders at once: say which one is meant
        return x.as_strided(x.shape, (x.shape[2] * x.shape[3], 1, x.shape[3], 1))
    return x.contiguous(memory_format=torch.channels_last)


def cast(x: Inputs, model: Model) -> Inputs:
    """Numbers in the type of the weights, symbols whole; where the weights are."""
    if isinstance(x, Mapping):
        return {name: cast(value, model) for name, value in x.items()}
    return x.to(model.device, model.dtype) if x.is_floating_point() else x.to(model.device)


def mask_seeds(models: Models, key: Key) -> dict[Role, dict[str, Tensor]]:
    """A seed for every dropout layer of every role."""
    found: dict[Role, dict[str, Tensor]] = {}
    for role, model in models.items():
        numbers = {layer: key.at("dropout", role, layer).integer() for layer in dropout_layers(model.arch)}
        found[role] = {layer: torch.tensor(number, device=model.device) for layer, number in numbers.items()}
    return found


@contextmanager
def own_randomness(key: Key) -> Iterator[None]:
    """Modules that draw from the global generator get one seeded by `key`; afterwards it is as it was."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key.integer())
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@dataclass
class Autograd:
    """The gradient of one client's mean loss, by autograd."""

    objective: Objective
    seeds: Mapping[Role, Mapping[str, Tensor]]
    sums: dict[Role, Tensor] = field(default_factory=dict)
    samples: int = 0

    def clip(self, grads: Params, limit: float) -> Params:
        return tree.clip(grads, limit)

    def __call__(
        self, models: Models, batch: Batch, draw: int = 0, first: int = 0
    ) -> tuple[dict[Role, Params], dict[Role, Params]]:
        leaves = {role: {name: p.detach().requires_grad_() for name, p in m.params.items()} for role, m in models.items()}
        buffers = {role: {name: b.clone() for name, b in m.buffers.items()} for role, m in models.items()}
        logits = {
            role: self._forward(role, Model(m.arch, leaves[role], buffers[role]), batch, draw, first)
            for role, m in models.items()
        }
        losses = self.objective(logits, batch.y)
        total = torch.stack([loss.mean() for loss in losses.values()]).sum()
        flat = [leaf for each in leaves.values() for leaf in each.values()]
        grads = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
        if draw == 0:
            self.remember(losses, len(batch.y))
        return {role: {name: next(grads) for name in each} for role, each in leaves.items()}, buffers  # type: ignore[return-value]

    def _forward(self, role: Role, model: Model, batch: Batch, draw: int, first: int) -> Tensor:
        number = batch.step * DRAWS_A_STEP + draw
        masks = {layer: at_draw(seed, number) for layer, seed in self.seeds.get(role, {}).items()}
        return model(cast(batch.x, model), training=True, masks=masks, first=first)

    def remember(self, losses: Mapping[Role, Tensor], samples: int) -> None:
        """Count the losses of a batch."""
        self.samples += samples
        for role, loss in losses.items():
            self.sums[role] = self.sums.get(role, loss.new_zeros(())) + loss.detach().sum()

    def mean_losses(self) -> dict[Role, float]:
        """The mean loss of every role over the samples seen."""
        return {role: (total / self.samples).item() for role, total in self.sums.items()}


@dataclass(kw_only=True)
class PerExample(Autograd):
    """The private gradient: sample after sample, each clipped over all roles together, then noise on the sum."""

    op: Train
    mechanism: GaussianMechanism

    def __call__(
        self, models: Models, batch: Batch, draw: int = 0, first: int = 0
    ) -> tuple[dict[Role, Params], dict[Role, Params]]:
        total = noise(self.op.key, self.mechanism, models, batch.step, draw)
        for i in range(len(batch.y)):
            one = Batch(_one(batch.x, i), batch.y[i : i + 1], batch.step)
            grads, _ = super().__call__(models, one, draw, i)
            size = tree.norm({f"{role}:{name}": g for role, each in grads.items() for name, g in each.items()})
            if size.isfinite():  # a sample whose gradient is not a number says nothing
                factor = min(1.0, self.mechanism.clip / size.item()) if size else 1.0
                total = {role: tree.add(total[role], each, factor) for role, each in grads.items()}
        whole = min(self.op.batch_schedule.batch, len(self.op.data))
        return {role: tree.scale(each, 1.0 / whole) for role, each in total.items()}, {
            role: m.buffers for role, m in models.items()
        }


def _one(x: Inputs, i: int) -> Inputs:
    return {name: value[i : i + 1] for name, value in x.items()} if isinstance(x, Mapping) else x[i : i + 1]
