"""The eager backend: SGD by autograd in place, on the parameters of a module that is built once.

It does the arithmetic of the reference backend in the same order and gives the same bits. It saves the work around the
arithmetic: a step copies no weights, builds no dictionaries of tensors and does not put the weights into the module again.
"""

import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedme.core import tree
from fedme.core.data import Inputs
from fedme.core.dropout import KeyedDropout, at_draw, kept
from fedme.core.model import LARGE_NETWORK, Arch, Model, build_template, default_dtype, output_of, template
from fedme.core.operations import Op, Role, Train, Trained
from fedme.core.tree import Params
from fedme.execution.input_tables import InputTables
from fedme.execution.memory_format import Shape, formatted, prefers_channels_last, sample_shape
from fedme.execution.reference import (
    DRAWS_PER_STEP,
    Autograd,
    Collector,
    cast,
    copied,
    mask_seeds,
    run as run_on_reference,
    seeded_generator,
)
from fedme.execution.routing import Tick, models_of
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD

KNOWN = frozenset({"objective", "lr", "momentum", "weight_decay", "clip", "prox", "alternating", "shift"})  # settings of SGD
GATHERED = 1 << 18  # input values that are gathered at once, for several steps: they stay in the cache
MASKS = 1 << 16  # values of dropout masks that are computed at once, for several steps
_CLIP = Autograd(CrossEntropy(), {})  # its method `clip` is that of one client


class Eager:
    """Trains any module by SGD, in place; evaluates and predicts like the reference."""

    name = "eager"

    def __init__(self, tables: InputTables) -> None:
        self.tables = tables
        self.networks: dict[Hashable, TrainedModule] = {}

    def supports(self, op: Op) -> str:
        """Why the operation is left to the reference; empty if it is not."""
        if not isinstance(op, Train):
            return ""
        models = models_of(op)
        if op.mechanism is not None:
            return "private training needs the gradient of every sample"
        if type(op.optimizer) is not SGD:
            return f"the optimizer {type(op.optimizer).__name__} is not SGD"
        if new := [f.name for f in fields(op.optimizer) if f.name not in KNOWN and getattr(op.optimizer, f.name) != f.default]:
            return f"SGD with {', '.join(new)}"
        if op.batch_schedule.scales(len(op.data)):
            return "a scaled last batch"
        if op.optimizer.alternating and any(model.buffers for model in models):
            return "alternating steps of networks with buffers"
        if any(model.device.type != "cpu" for model in models):
            return "the device is not the processor"
        if not all(model.params for model in models):
            return "a network has no weights to train"
        if shared := [model.arch.name for model in models if is_shared(model.arch)]:
            return f"{shared[0]} is built from modules that exist already"
        self._has_table(op)  # before workers are forked, so that they share it
        return ""

    def group(self, op: Op) -> Hashable:
        return None

    def run(self, ops: Sequence[Op], tick: Tick) -> list[Any]:
        results: list[Any] = []
        for op in ops:
            results.append(self.train(op) if isinstance(op, Train) else run_on_reference(op))
            tick()
        return results

    def train(self, op: Train) -> Trained:
        """Take a step of SGD on every batch."""
        rule = op.optimizer
        assert type(rule) is SGD
        networks = {role: self._network(op, role) for role in op.models}
        turns = [(role,) for role in networks] if rule.alternating else [tuple(networks)]
        seen: list[Mapping[Role, Tensor]] = []  # the losses of every step
        single = len(networks) == len(turns) == 1  # no other forward pass reads its inputs
        collector = Collector(op.collect)
        with seeded_generator(op.key.at("dropout")):
            for step, (inputs, y) in enumerate(self._batches(op)):
                for draw, turn in enumerate(turns):
                    number = step * len(turns) + draw
                    logits = {
                        role: network.forward(inputs[role] if single else copied(inputs[role]), len(y), number)
                        for role, network in networks.items()
                    }
                    losses = rule.objective(logits, y)
                    torch.autograd.backward(list(losses.values()), [_mean_slopes(loss) for loss in losses.values()])
                    if draw == 0:
                        collector.add(logits, y)
                        seen.append({role: loss.detach() for role, loss in losses.items()})
                    for role, network in networks.items():
                        grads = network.take_gradients()
                        if role in turn:
                            network.step(grads)
                        del grads  # before the next backward pass makes new ones
        opt = {role: network.opt_state() for role, network in networks.items()} if rule.momentum else {}
        models = {role: network.model() for role, network in networks.items()}
        for network in networks.values():
            network.release()
        return Trained(models, opt, _mean_losses(seen), collector.seen)

    def _network(self, op: Train, role: Role) -> "TrainedModule":
        """The module of a role with its weights; roles of one architecture have modules of their own."""
        model = op.models[role]
        number = [other for other in op.models if op.models[other].arch == model.arch].index(role)
        key = model.arch, model.dtype, number
        if key not in self.networks:
            self.networks[key] = TrainedModule(model.arch, model.dtype)
        self.networks[key].load(op, role)
        return self.networks[key]

    def _batches(self, op: Train) -> Iterator[tuple[Mapping[Role, Inputs], Tensor]]:
        """The inputs of every role and the targets, batch by batch."""
        positions = op.batch_schedule.batches(len(op.data), op.key.at("batches"))
        targets = op.data.y
        size = self._gathered_steps(op)
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            sizes, rows = [len(batch) for batch in part], torch.cat(part)
            augment = op.key.at("augment", start) if op.batch_schedule.augment else None
            if self._has_table(op):
                x: Inputs = self.tables.table(op).shaped(op.data.rows[rows])
            else:
                x = op.data.inputs(rows, augment)
            shape = tuple(x.shape[1:]) if isinstance(x, Tensor) else None
            formats: dict[Hashable, list[Inputs]] = {}  # by type and memory format: roles of equal ones share the inputs
            for model in op.models.values():
                if _format(model, shape) not in formats:
                    formats[_format(model, shape)] = _split(cast(x, model), sizes)
            y = targets[rows].split(sizes)
            for i in range(len(part)):
                yield {role: formats[_format(model, shape)][i] for role, model in op.models.items()}, y[i]

    def _has_table(self, op: Train) -> bool:
        if self.tables.supports(op) or len({model.dtype for model in op.models.values()}) > 1:
            return False
        self.tables.table(op)
        return True

    def _gathered_steps(self, op: Train) -> int:
        """How many batches are gathered at once. A source of another kind may make inputs that depend on the whole batch."""
        if not self._has_table(op):
            return 1
        return max(1, GATHERED // (op.batch_schedule.batch * self.tables.table(op).features))


def _mean_losses(seen: Sequence[Mapping[Role, Tensor]]) -> dict[Role, float]:
    """The mean loss of every role over the samples of all steps, summed in the order of the reference."""
    means = {}
    for role in seen[0] if seen else ():
        losses = [step[role] for step in seen]
        runs = [torch.stack(list(run)).sum(-1) for _, run in itertools.groupby(losses, key=len)]  # steps of equal sizes
        total = functools.reduce(torch.add, torch.cat(runs).unbind())
        means[role] = (total / sum(map(len, losses))).item()
    return means


def _format(model: Model, shape: Shape | None) -> Hashable:
    return model.dtype, prefers_channels_last(model.arch, shape)


def _split(x: Inputs, sizes: list[int]) -> list[Inputs]:
    if not isinstance(x, Mapping):
        return list(x.split(sizes))
    parts = {name: value.split(sizes) for name, value in x.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]


def _mean_slopes(losses: Tensor) -> Tensor:
    """The derivatives of the mean of losses by each of them."""
    return _ones_over(tuple(losses.shape), losses.dtype)


@functools.lru_cache(maxsize=256)
def _ones_over(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    ones = torch.ones(shape, dtype=dtype)
    return ones / ones.numel()


@functools.lru_cache(maxsize=256)
def is_shared(arch: Arch) -> bool:
    """Whether two networks of the architecture have parts in common, so that training one in place changes the other."""
    first, second = template(arch, True), build_template(arch, True)
    return bool({*first.modules(), *first.parameters()} & {*second.modules(), *second.parameters()})


class Masks:
    """The masks of a dropout layer, computed for several draws at once."""

    def __init__(self, seeds: Tensor, p: float) -> None:
        self.seeds, self.p, self.number = seeds, p, 0
        self.block, self.first = torch.empty(0, 0), 0

    def at(self, number: int) -> Tensor:
        """Go to a draw; its seed."""
        self.number = number
        return self.seeds[number]

    def __call__(self, count: int) -> Tensor:
        """Which of `count` values are kept in this draw."""
        place = self.number - self.first
        if not 0 <= place < len(self.block) or self.block.shape[1] < count:
            draws = max(1, MASKS // max(count, 1))
            self.block, self.first, place = kept(self.seeds[self.number : self.number + draws], count, self.p), self.number, 0
        return self.block[place, :count]


class TrainedModule:
    """A module in training mode whose own parameters are trained."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        self.arch, self.module = arch, build_template(arch, training=True).to(dtype)
        self.parameters = dict(self.module.named_parameters())
        self.layers = {name: m for name, m in self.module.named_modules() if isinstance(m, KeyedDropout)}
        self.norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self.buffers = _buffer_places(self.module)
        self.trained: list[nn.Parameter] = []  # in the order of the model
        self.momenta: list[Tensor] = []
        self.masks: dict[str, Masks] = {}

    def load(self, op: Train, role: Role) -> None:
        """Take a copy of the weights of a role, and what its training needs."""
        model, rule = op.models[role], op.optimizer
        assert type(rule) is SGD
        if odd := sorted((self.parameters.keys() | self.buffers.keys()) ^ (model.params.keys() | model.buffers.keys())):
            raise ValueError(f"the weights do not fit the network {self.arch.name}: {', '.join(odd[:5])}")
        self.given, self.dtype, self.anchor, self.rule = model, model.dtype, op.frozen.get(role), rule
        weights = formatted(model, sample_shape(op.data)).params
        for name, p in self.parameters.items():
            p.grad = None
            p.data = (weights[name] if name in weights else model.buffers[name]).detach().clone()
            p.requires_grad_(name in weights)
        for name, places in self.buffers.items():
            value = model.buffers[name].detach().clone()
            for owner, key in places:
                owner._buffers[key] = value
        self.trained = [self.parameters[name] for name in weights]
        self.momenta = [torch.zeros_like(p, requires_grad=False) for p in self.trained] if rule.momentum else []
        for name, value in zip(weights, self.momenta, strict=False) if role in op.opt else ():
            value.copy_(op.opt[role][name])
        turns = len(op.models) if rule.alternating else 1
        numbers = torch.arange(op.batch_schedule.count(len(op.data)))[:, None] * DRAWS_PER_STEP + torch.arange(turns)
        for name, seed in mask_seeds({role: model}, op.key)[role].items():
            self.masks[name] = Masks(at_draw(seed, numbers.flatten()), self.layers[name].p)
            self.layers[name].ahead = self.masks[name]

    def forward(self, x: Inputs, samples: int, number: int) -> Tensor:
        """The logits in training mode; `number` is that of the draw of dropout masks."""
        for name, layer in self.layers.items():
            layer.seed, layer.calls = self.masks[name].at(number), 0
        if samples == 1 and self.norms:  # there are no statistics of one sample
            training = [norm for norm in self.norms if norm.training]  # a network may keep some of them in evaluation mode
            for norm in training:
                norm.eval()
            try:
                return self._logits(x)
            finally:
                for norm in training:
                    norm.train()
        return self._logits(x)

    def _logits(self, x: Inputs) -> Tensor:
        with default_dtype(self.dtype):  # a network may make tensors in its forward pass
            return output_of(self.module(**x) if isinstance(x, Mapping) else self.module(x))

    def take_gradients(self) -> list[Tensor]:
        """The gradients of the trained weights, which the parameters lose."""
        grads = [p.grad for p in self.trained]
        for p in self.trained:
            p.grad = None
        for places in self.buffers.values():  # a module may compute a buffer from its weights
            for owner, key in places:
                if (value := owner._buffers[key]) is not None and value.grad_fn is not None:
                    owner._buffers[key] = value.detach()
        pairs = zip(grads, self.trained, strict=True)
        return [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g, p in pairs]

    def step(self, grads: list[Tensor]) -> None:
        """A step of SGD. Gradients are only read: two of them may share memory."""
        rule = self.rule
        if rule.prox or rule.shift or rule.clip is not None or rule.weight_decay:
            weights = self.given.with_params(
                {name: p.detach() for name, p in zip(self.given.params, self.trained, strict=True)}
            )
            named: Params = dict(zip(self.given.params, grads, strict=True))
            if rule.prox and self.anchor is not None:
                named = tree.add(named, tree.sub(weights.params, self.anchor.params), rule.prox)
            if rule.shift and self.anchor is not None:
                named = tree.add(named, self.anchor.params)
            if rule.clip is not None:
                named = _CLIP.clip(named, rule.clip)
            if rule.weight_decay:
                named = tree.add(named, weights.params, rule.weight_decay)
            grads = list(named.values())
        for grad, momentum in zip(grads, self.momenta, strict=False):
            torch.add(grad, momentum, alpha=rule.momentum, out=momentum)
        with torch.no_grad():
            torch._foreach_add_(tuple(self.trained), self.momenta or grads, alpha=-rule.lr)

    def model(self) -> Model:
        """The trained model."""
        params = {name: p.detach().contiguous() for name, p in zip(self.given.params, self.trained, strict=True)}
        return Model(self.arch, params, {name: self._buffer(name).detach() for name in self.given.buffers})

    def release(self) -> None:
        """Forget the weights of a large network, which others may want to have in a file; `load` brings new ones."""
        if self.arch.parameters < LARGE_NETWORK:
            return
        self.momenta, self.anchor = [], None
        self.given = Model(self.arch, {}, {})
        for p in self.parameters.values():
            p.data = torch.zeros((), dtype=p.dtype).expand(p.shape)

    def _buffer(self, name: str) -> Tensor:
        if name not in self.buffers:
            return self.parameters[name]  # a frozen one
        owner, key = self.buffers[name][0]
        value = owner._buffers[key]
        assert value is not None
        return value

    def opt_state(self) -> dict[str, Tensor]:
        """The momentum of every weight."""
        return {name: value.contiguous() for name, value in zip(self.given.params, self.momenta, strict=True)}


def _buffer_places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where the buffers of a module are, by name; a shared buffer is in several places. Seeds of dropout are left out."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items() if not isinstance(owner, KeyedDropout) else ():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((owner, key))
                names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
    return {names[number]: slots for number, slots in places.items()}
