"""The reference backend, which every faster one is checked against: one operation after another, by autograd.

Modules that draw from a global generator (`nn.LSTM` with dropout, ``random.random()`` in a forward) get one that is seeded per
operation; the roles of the operation share it.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedme.core import tree
from fedme.core.data import Inputs, Split
from fedme.core.dropout import at_draw
from fedme.core.global_generators import seeded
from fedme.core.key import Key
from fedme.core.model import LARGE_NETWORK, Model, dropout_layers, weight_hooks
from fedme.core.operations import (
    Batch,
    ClassSums,
    Collect,
    EstimateStatistics,
    Evaluate,
    GaussianMechanism,
    Models,
    Objective,
    Op,
    OptState,
    Predict,
    Role,
    Score,
    Train,
    Trained,
)
from fedme.core.running_statistics import estimated, running_statistics
from fedme.core.task_types import TASK_LOSSES, right_answers, task_loss
from fedme.core.tree import Params
from fedme.execution.memory_format import formatted, formatted_inputs, sample_shape
from fedme.execution.routing import Tick, no_tick, run_timed
from fedme.learning.differential_privacy import noise

EVALUATION_BATCH = 512
MOST_ADDED = (1 << 15) - 1  # numbers that torch adds on one thread
DRAWS_PER_STEP = 1 << 20  # dropout masks are numbered step * DRAWS_PER_STEP + draw


class Reference:
    """Runs any operation."""

    name = "reference"

    def supports(self, op: Op) -> str:
        return ""

    def group(self, op: Op) -> Hashable:
        return None

    def run(self, ops: Sequence[Op], tick: Tick = no_tick) -> list[Any]:
        results: list[Any] = []
        for op in ops:
            results.append(COMPUTATIONS[type(op)](op))
            tick()
        return results


def run(op: Op) -> Any:
    """The result of one operation."""
    return Reference().run([op])[0]


def one_by_one(operations: Sequence[Op], tick: Tick = no_tick) -> list[tuple[Any, float]]:
    """An executor without any grouping: the result of every operation and its seconds."""
    return [timed for op in operations for timed in run_timed(Reference(), [op], tick)]


def train(op: Train, private_gradient: "type[PerExample] | None" = None) -> Trained:
    """Let the optimizer take a step on every batch; private gradients may be computed in another way."""
    shape = sample_shape(op.data)
    models: Models = {role: _own(formatted(model, shape)) for role, model in op.models.items()}
    opt: OptState = {role: op.opt.get(role, state) for role, state in op.optimizer.init(models).items()}
    device = next((m.device for m in models.values()), torch.device("cpu"))
    gradient = Autograd(op.optimizer.objective, mask_seeds(models, op.key), Collector(op.collect))
    if op.mechanism is not None:
        gradient = (private_gradient or PerExample)(gradient.objective, gradient.seeds, op=op, mechanism=op.mechanism)
    y = op.data.y.to(device)
    schedule = op.batch_schedule
    batches, sizes = schedule.positions(len(op.data), op.key.at("batches"))
    weights = sizes.double() / schedule.divisors(len(op.data), sizes)
    with seeded_generator(op.key.at("dropout"), device):
        for step, (padded, size, weight) in enumerate(zip(batches, sizes.tolist(), weights.tolist(), strict=True)):
            positions = padded[:size]
            augment = op.key.at("augment", step) if schedule.augment else None
            x: Any = op.data.inputs(positions, augment) if len(positions) else None
            models, opt = op.optimizer(gradient, models, opt, op.frozen, Batch(x, y[positions], step, weight))
    opt = {role: {name: value.contiguous() for name, value in state.items()} for role, state in opt.items()}
    trained = {role: m.with_params({name: p.contiguous() for name, p in m.params.items()}) for role, m in models.items()}
    return Trained(trained, opt, gradient.mean_losses(), gradient.collector.seen)


def evaluate(op: Evaluate) -> Score:
    """Mean loss and accuracy."""
    if not len(op.data):
        return Score(0, float("nan"), float("nan"))
    seconds = seconds_per_sample(op.model, op.data) if op.timed else 0.0
    return score(predict(Predict(op.model, op.data)), op.data.y, seconds)


def result_of(op: Op, logits: Tensor) -> Score | Tensor:
    """The result of an operation, from the logits of its model."""
    return score(logits, op.data.y) if isinstance(op, Evaluate) else logits


def score(logits: Tensor, y: Tensor, seconds: float = 0.0) -> Score:
    """Mean loss and accuracy of logits."""
    task = task_loss(y)
    return Score(len(y), _means(task.loss(task.ready(logits), y).flatten()[None])[0], task.accuracy(logits, y), seconds)


def scores(logits: Sequence[Tensor], data: Sequence[Split]) -> list[Score]:
    """The scores of several models: the same numbers as one after another; classes of one source in few operations."""
    source = data[0].source if data else None
    shared = all(split.source is source and split.targets is None for split in data)
    if source is None or not shared or source.labels.dtype != torch.int64 or len({z.shape[1] for z in logits}) > 1:
        return [score(z, split.y) for z, split in zip(logits, data, strict=True)]
    sizes, task = [len(split) for split in data], TASK_LOSSES["classification"]
    order = sorted(range(len(data)), key=sizes.__getitem__)
    z, y = torch.cat([logits[i] for i in order]), source.labels[torch.cat([data[i].rows for i in order])]
    losses, right = task.loss(task.ready(z), y), right_answers(z, y)
    scored: list[Score] = [Score(0, math.nan, math.nan)] * len(data)
    start = 0
    for n, same_size in itertools.groupby(order, sizes.__getitem__):
        some = list(same_size)
        rows = slice(start, start := start + n * len(some))
        of_each, counts = (values[rows].view(len(some), n) for values in (losses, right))
        for i, loss, count in zip(some, _means(of_each), counts.sum(1).tolist(), strict=True):
            scored[i] = Score(n, loss, count / n)
    return scored


def _means(values: Tensor) -> list[float]:
    """The mean of every row; torch would divide a longer sum among its threads, which decide about the last bits."""
    count = values.shape[1]
    if count <= MOST_ADDED:
        return values.mean(1).tolist()
    sums = torch.stack([part.sum(1, dtype=torch.float64) for part in values.split(MOST_ADDED, 1)], 1)
    return (sums.sum(1) / count).tolist()


def seconds_per_sample(model: Model, data: Split, times: int = 7) -> float:
    """The median time of inference, after one call to warm up."""
    x = cast(next(_chunks(data)), model)
    seconds = []
    with torch.inference_mode():
        for _ in range(times + 1):
            start = time.perf_counter()
            model(x)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / min(len(data), EVALUATION_BATCH)


def predict(op: Predict) -> Tensor:
    """Logits, in evaluation mode."""
    if not len(op.data):
        return torch.empty(0, 0)
    model = _own(formatted(op.model, sample_shape(op.data)))
    # A network that draws random numbers in evaluation mode too draws the same ones every time.
    with torch.inference_mode(), seeded_generator(Key(0).at("predict"), model.device):
        parts = [model(cast(x, model)) for x in _chunks(op.data)]
    return torch.cat(parts).to("cpu", copy=True)


def _own(model: Model) -> Model:
    """The model with copies of its weights, which its forward pass may change. Large networks are not copied."""
    if model.parameters >= LARGE_NETWORK:
        return model
    return model.with_params({name: p.clone() for name, p in model.params.items()})


def estimate_statistics(op: EstimateStatistics) -> Model:
    """The model with running statistics of the whole split: in one batch, or in as few of nearly equal size as possible.

    A batch holds every k-th sample, so that samples in the order of their classes are mixed, and there is never a batch of one.
    A single sample has no variance: the model keeps its statistics.
    """
    samples = len(op.data)
    if samples < 2 or not running_statistics(op.model.arch):
        return op.model
    model, count = _own(formatted(op.model, sample_shape(op.data))), -(-samples // EVALUATION_BATCH)
    batches = (cast(op.data.inputs(torch.arange(i, samples, count)), model) for i in range(count))
    return op.model.with_buffers(estimated(model, batches).buffers)


def _chunks(data: Split) -> Iterator[Inputs]:
    for positions in torch.arange(len(data)).split(EVALUATION_BATCH):
        yield data.inputs(positions)


def cast(x: Inputs, model: Model) -> Inputs:
    """Inputs on the device of the weights and in the memory format of the architecture, floating-point ones in their type."""
    if isinstance(x, Mapping):
        return {name: cast(value, model) for name, value in x.items()}
    x = x.to(model.device, model.dtype) if x.is_floating_point() else x.to(model.device)
    return formatted_inputs(x, model.arch)


def copied(x: Inputs) -> Inputs:
    """A copy of inputs for a forward pass that may change them, where another one will read them."""
    return {name: copied(value) for name, value in x.items()} if isinstance(x, Mapping) else x.clone()


def mask_seeds(models: Models, key: Key) -> dict[Role, dict[str, Tensor]]:
    """A seed for every dropout layer of every role."""
    return {
        role: {
            layer: torch.tensor(key.at("dropout", role, layer).integer(), device=model.device)
            for layer in dropout_layers(model.arch)
        }
        for role, model in models.items()
    }


def seeded_generator(key: Key, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Seed the global generators, and that of a device, by `key`, and restore their states afterwards."""
    return seeded(key.integer(), device_generators(device) if device is not None else ())


def device_generators(device: torch.device) -> list[torch.Generator]:
    """The global generators that networks on a device draw from, besides that of the processor."""
    if device.type == "cuda":
        return [torch.cuda.default_generators[device.index or 0]]
    return [torch.mps._get_default_mps_generator()] if device.type == "mps" else []


@dataclass
class Collector:
    """Adds up the outputs of models by class, if that is asked for."""

    collect: Collect | None = None
    seen: dict[Role, ClassSums] = field(default_factory=dict)

    def add(self, logits: Mapping[Role, Tensor], y: Tensor) -> None:
        """The outputs of a batch before its step."""
        for role, outputs in logits.items() if self.collect is not None else ():
            assert self.collect is not None
            z, classes = outputs.detach(), self.collect.classes
            z = z.softmax(-1) if self.collect.chances else z
            before = self.seen.get(role) or ClassSums(z.new_zeros((classes, z.shape[1])), y.new_zeros(classes))
            counts = before.counts + torch.bincount(y, minlength=classes)
            self.seen[role] = ClassSums(before.sums.index_add(0, y, z), counts)


@dataclass
class Autograd:
    """The gradient of one client's mean loss, by autograd."""

    objective: Objective
    seeds: Mapping[Role, Mapping[str, Tensor]]
    collector: Collector = field(default_factory=Collector)
    sums: dict[Role, Tensor] = field(default_factory=dict)
    samples: dict[Role, int] = field(default_factory=dict)
    recorded: dict[Role, tuple[int, int]] = field(default_factory=dict)  # step and draw

    def clip(self, grads: Params, limit: float) -> Params:
        return tree.clip(grads, limit)

    def dot(self, a: Params, b: Params) -> Params:
        return dict.fromkeys(a, tree.dot(a, b))

    def __call__(
        self, models: Models, batch: Batch, draw: int = 0, first: int = 0
    ) -> tuple[dict[Role, Params], dict[Role, Params]]:
        leaves = {role: {name: p.detach().requires_grad_() for name, p in m.params.items()} for role, m in models.items()}
        for role, m in models.items():
            for name, hook in weight_hooks(m.arch):
                if name in leaves[role]:
                    leaves[role][name].register_hook(hook)
        buffers = {role: {name: b.clone() for name, b in m.buffers.items()} for role, m in models.items()}
        logits = {
            role: self._forward(role, Model(m.arch, leaves[role], buffers[role]), batch, draw, first)
            for role, m in models.items()
        }
        for role, m in models.items():  # a forward pass may put other numbers into a weight, as a limit of its norm does
            for name, p in m.params.items():
                if leaves[role][name].data_ptr() != p.data_ptr():
                    p.copy_(leaves[role][name].detach())
        if draw == 0:
            self.collector.add(logits, batch.y)
        losses = self.objective(logits, batch.y)
        total = torch.stack([loss.mean() for loss in losses.values()]).sum() * batch.weight
        flat = [leaf for params in leaves.values() for leaf in params.values()]
        grads = iter(torch.autograd.grad(total, flat, allow_unused=True, materialize_grads=True))
        self.record({role: loss.detach() for role, loss in losses.items()}, batch.step, draw)
        return {role: {name: next(grads) for name in params} for role, params in leaves.items()}, buffers  # type: ignore[return-value]

    def _forward(self, role: Role, model: Model, batch: Batch, draw: int, first: int) -> Tensor:
        number = batch.step * DRAWS_PER_STEP + draw
        masks = {layer: at_draw(seed, number) for layer, seed in self.seeds.get(role, {}).items()}
        return model(copied(cast(batch.x, model)), training=True, masks=masks, first=first)

    def record(self, losses: Mapping[Role, Tensor], step: int, draw: int) -> None:
        """Note the losses of samples: those of the first gradient of a role in a step, whichever draw that is."""
        for role, loss in losses.items():
            if self.recorded.get(role, (-1, 0))[0] != step:
                self.recorded[role] = step, draw
            if self.recorded[role] == (step, draw):
                self.samples[role] = self.samples.get(role, 0) + len(loss)
                self.sums[role] = self.sums.get(role, loss.new_zeros(())) + loss.sum()

    def mean_losses(self) -> dict[Role, float]:
        """The mean loss of every role over the samples seen."""
        return {role: (total / self.samples[role]).item() for role, total in self.sums.items()}


@dataclass(kw_only=True)
class PerExample(Autograd):
    """The private gradient: clipped per sample over all roles together, then noise on the sum."""

    op: Train
    mechanism: GaussianMechanism

    def __call__(
        self, models: Models, batch: Batch, draw: int = 0, first: int = 0
    ) -> tuple[dict[Role, Params], dict[Role, Params]]:
        total = self.add_clipped(noise(self.op.key, self.mechanism, models, batch.step, draw), models, batch, draw)
        batch_size = min(self.op.batch_schedule.batch, len(self.op.data))
        mean: dict[Role, Params] = {role: tree.scale(params, 1.0 / batch_size) for role, params in total.items()}
        return mean, {role: m.buffers for role, m in models.items()}

    def add_clipped(self, total: Mapping[Role, Params], models: Models, batch: Batch, draw: int) -> Mapping[Role, Params]:
        """Add the clipped gradient of every sample, one after another."""
        for i in range(len(batch.y)):
            sample = slice(i, i + 1)
            x = {n: value[sample] for n, value in batch.x.items()} if isinstance(batch.x, Mapping) else batch.x[sample]
            grads, _ = Autograd.__call__(self, models, Batch(x, batch.y[sample], batch.step), draw, i)
            size = tree.norm({f"{role}:{name}": g for role, params in grads.items() for name, g in params.items()})
            if size.isfinite():  # a sample whose gradient is NaN or infinite adds nothing
                factor = min(1.0, self.mechanism.clip / size.item()) if size else 1.0
                total = {role: tree.add(total[role], params, factor) for role, params in grads.items()}
        return total


COMPUTATIONS: dict[type, Callable[[Any], Any]] = {
    Train: train,
    Evaluate: evaluate,
    Predict: predict,
    EstimateStatistics: estimate_statistics,
}
