"""Whether a network does with a batch of one size what it does with batches of others.

A trace is made of one batch. A forward pass may do something else with another one: decide by ``len(x)``, divide by
``x.shape[0]``, take ``x[:8]`` or count samples. So the network runs for every batch size that an operation has, but almost
nothing is computed: every operation must be that of two small batches, whose sizes follow a straight line, and its result is a
tensor of the size that follows, with any numbers in it. Only views, and tensors that depend on neither inputs nor weights, are
computed.
"""

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedme.core.dropout import KeyedDropout
from fedme.core.key import Key
from fedme.core.model import Arch, build_template, default_dtype, has_batchnorm, output_of
from fedme.core.operations import Op, Train
from fedme.execution.reference import EVALUATION_BATCH
from fedme.execution.routing import models_of
from fedme.execution.tracing import FROM_SHAPES, tensors_in

SMALL = 3, 5  # batch sizes of which all is computed
COPIES = ("clone", "_to_copy", "lift_fresh", "alias")  # which are made or not, as strides have it
SAME_VIEW = ("_unsafe_view", "_reshape_alias", "reshape")
TURNED = ("t_", "transpose_", "squeeze_", "unsqueeze_")
SIZED = ("slice", "native_group_norm", "narrow")  # operations with a size that is not in a list
BY_SIZE = "its forward pass depends on the number of samples of a batch"


def sizes_of(op: Op) -> tuple[int, ...]:
    """The sizes of the batches of an operation, as the reference makes them."""
    samples = len(op.data)
    if not isinstance(op, Train):
        batch, drops = EVALUATION_BATCH, False
    elif op.mechanism is not None:
        return (1,)  # the gradient of every sample
    else:
        batch, drops = op.batch_schedule.batch, op.batch_schedule.last_batch == "drop"
    if samples < batch:
        return (samples,) if samples else ()
    return (batch, samples % batch) if samples % batch and not drops else (batch,)


def size_obstacle(op: Op, shape: tuple[int, ...], symbols: bool, others: tuple[int, ...] = ()) -> str:
    """Why the networks of an operation cannot be computed as a trace says, in batches of other sizes too; empty if not."""
    training, sizes = isinstance(op, Train), (*sizes_of(op), *others)
    for model in models_of(op):
        for size in sizes:
            if not same_for(model.arch, shape, symbols, model.dtype, training, size):
                return BY_SIZE
    return ""


@functools.lru_cache(maxsize=1 << 16)
def same_for(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype, training: bool, samples: int) -> bool:
    """Whether the forward pass with so many samples consists of the operations that it has with others."""
    statistics = not (training and samples == 1 and has_batchnorm(arch))
    network = _network(arch, shape, symbols, dtype, training, statistics)
    return network is not None and network.runs_alike(samples)


def changes_weights(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> bool:
    """Whether the forward pass changes weights in place."""
    networks = (_network(arch, shape, symbols, dtype, training, True) for training in (False, True))
    return any(network is not None and network.changes_weights for network in networks)


@functools.lru_cache(maxsize=64)
def _network(
    arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype, training: bool, statistics: bool
) -> "_Network | None":
    try:
        return _Network(build_template(arch, training, statistics).to(dtype), shape, symbols, dtype)
    except Exception:  # a user's network may raise anything, also for small batches
        return None


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, order of strides and type of a tensor


@dataclass(frozen=True)
class _Step:
    """An operation with its arguments and the forms of its results."""

    name: str
    arguments: Any
    results: tuple[Form | None, ...]


class _Other(Exception):
    """The forward pass goes another way."""


class _Network:
    """A network with its operations for two small batches."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> None:
        self.module, self.shape, self.symbols, self.dtype = module, shape, symbols, dtype
        for child in self.module.modules():
            if isinstance(child, KeyedDropout):
                child.forward = functools.partial(_drop, child)  # type: ignore[method-assign]
        self.steps: list[list[_Step]] = []
        self.changes_weights = False
        for samples in SMALL:
            run = self._run(samples)
            self.steps.append(run.steps)
            self.changes_weights |= run.changes_weights
        if len(self.steps[0]) != len(self.steps[1]):
            raise _Other

    def runs_alike(self, samples: int) -> bool:
        """Whether so many samples lead to the same operations."""
        try:
            if len(self._run(samples, self.steps).steps) == len(self.steps[0]):
                return True
        except Exception:  # a user's network may raise anything
            pass
        return samples == 1 and self._one_alike()

    def _one_alike(self) -> bool:
        """Whether a single sample has the output that it has among others; its strides may lead to other operations."""
        x = torch.zeros((SMALL[0], *self.shape), dtype=torch.int64)
        x = x if self.symbols else torch.randn(x.shape, generator=Key(0).torch()).to(self.dtype)
        tolerance = 1e-9 if self.dtype == torch.float64 else 1e-4
        try:
            with default_dtype(self.dtype), torch.random.fork_rng(devices=[]), torch.no_grad():
                single, among = output_of(self.module(x[:1].clone())), output_of(self.module(x.clone()))[:1]
        except Exception:  # a user's network may raise anything
            return False
        return single.shape == among.shape and torch.allclose(single, among, tolerance, tolerance, equal_nan=True)

    def _run(self, samples: int, known: Sequence[list[_Step]] = ()) -> "_Recorder":
        x = torch.zeros((samples, *self.shape), dtype=torch.int64 if self.symbols else self.dtype)
        recorder = _Recorder(self.module, x, samples, known)
        with default_dtype(self.dtype), torch.random.fork_rng(devices=[]), torch.no_grad(), recorder:
            logits = output_of(self.module(x))
        if logits.dim() and len(logits) != samples:
            raise _Other
        return recorder


def _drop(layer: KeyedDropout, x: Tensor, p: float | None = None) -> Tensor:
    return x * (layer.p if p is None else p) if layer.training else x


class _Recorder(TorchDispatchMode):
    """Records operations, or follows those that are known from two small batches."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in tracing.py

    def __init__(self, module: nn.Module, x: Tensor, samples: int, known: Sequence[list[_Step]]) -> None:
        super().__init__()
        self.samples, self.known = samples, known
        self.steps: list[_Step] = []
        self.weights = {id(p) for p in module.parameters()}  # and their parts
        self.changes_weights = False
        self.names: dict[int, Hashable] = {id(x): "input"}
        self.names |= {id(p): name for name, p in (*module.named_parameters(), *module.named_buffers())}
        self.real = set(self.names) - {id(x)}  # tensors that do not depend on the inputs; operations on them are computed
        self.kept: list[Tensor] = []  # an identity may be used again once its tensor is gone

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options, name = options or {}, function.overloadpacket.__name__
        given = [tensor for tensor in tensors_in((arguments, tuple(options.values()))) if id(tensor) in self.names]
        if not given or name in FROM_SHAPES:
            return function(*arguments, **options)
        of_weight = id(given[0]) in self.weights
        in_place = name.endswith("_") and function._schema.is_mutable
        self.changes_weights |= of_weight and in_place
        if name in COPIES:
            real = id(given[0]) in self.real
            result = function(*arguments, **options) if real or not self.known else _like(given[0], options)
            self._name([result], self.names[id(given[0])])
            self.real |= {id(result)} if real else set()
            return result
        name = "view" if name in SAME_VIEW else name
        # The shape of a view says what its arguments say, in which one size may be -1.
        described = self._described(arguments[:1] if name == "view" else (arguments, tuple(sorted(options.items()))))
        laws = self._laws(name, described) if self.known else None
        real = all(id(tensor) in self.real for tensor in given)
        if laws is None or real or function.is_view or name in TURNED:
            results = function(*arguments, **options)
        elif in_place:
            results = arguments[0]
        else:
            pairs = zip(laws[0].results, laws[1].results, strict=True)
            results = [None if first is None or second is None else self._empty(first, second) for first, second in pairs]
            results = results if len(results) > 1 or len(function._schema.returns) > 1 else results[0]
        made = results if isinstance(results, tuple | list) else (results,)
        if not real and not any(isinstance(result, Tensor) for result in made):
            raise _Other  # a number for Python
        step = _Step(name, described, tuple(_form(result) if isinstance(result, Tensor) else None for result in made))
        if laws is not None:
            for first, second, own in zip(laws[0].results, laws[1].results, step.results, strict=True):
                if first is not None and second is not None and own is not None:
                    _require(self._follows(first[0], second[0], own[0]))
        self._name(made, len(self.steps))
        tensors = {id(result) for result in made if isinstance(result, Tensor)}
        self.real |= tensors if real else set()
        self.weights |= tensors if of_weight and function.is_view else set()
        self.steps.append(step)
        return results

    def _name(self, results: Sequence[Any], name: Hashable) -> None:
        for output, result in enumerate(results):
            if isinstance(result, Tensor):
                self.names[id(result)] = (name, output) if len(results) > 1 else name
                self.kept.append(result)

    def _described(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [self._described(item) for item in value] if isinstance(value, list) else tuple(map(self._described, value))
        if not isinstance(value, Tensor):
            return value
        return (self.names[id(value)],) if id(value) in self.names else value.clone()

    def _laws(self, name: str, described: Any) -> tuple[_Step, _Step]:
        """The same operation for the two small batches, after a check that this one follows from them."""
        place = len(self.steps)
        _require(place < len(self.known[0]))
        first, second = self.known[0][place], self.known[1][place]
        _require(name == first.name == second.name)
        _require(self._alike(first.arguments, second.arguments, described, name))
        return first, second

    def _alike(self, a: Any, b: Any, current: Any, name: str, sizes: bool = False) -> bool:
        """Whether arguments follow from those of the two small batches."""
        if isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(current, Tensor):
            return self._constants_alike(a, b, current, name)
        if type(a) is not type(b) or type(b) is not type(current):
            return False
        if isinstance(a, tuple | list):
            inside = sizes or isinstance(a, list) or name in SIZED
            return len(a) == len(b) == len(current) and all(
                self._alike(*three, name, inside) for three in zip(a, b, current, strict=True)
            )
        if type(a) is int and sizes:
            return self._follows((a,), (b,), (current,))
        return bool(a == b == current)

    def _constants_alike(self, a: Tensor, b: Tensor, current: Tensor, name: str) -> bool:
        if not a.dim() == b.dim() == current.dim() or not self._follows(a.shape, b.shape, current.shape):
            return False
        if name == "index" and all(torch.equal(t, torch.arange(len(t))) for t in (a, b, current) if t.dim() == 1):
            return a.dim() == 1  # every sample, by its number
        for dimension in (d for d in range(a.dim()) if a.shape[d] != b.shape[d]):
            if any(not torch.equal(t, t.narrow(dimension, 0, 1).expand_as(t)) for t in (a, b, current)):
                return False
            a, b, current = (t.narrow(dimension, 0, 1) for t in (a, b, current))
        return torch.equal(a, b) and torch.equal(b, current)

    def _follows(self, a: Sequence[int], b: Sequence[int], current: Sequence[int]) -> bool:
        return len(a) == len(b) == len(current) and all(
            SMALL_STEP * (size - x) == (self.samples - SMALL[0]) * (y - x) for x, y, size in zip(a, b, current, strict=True)
        )

    def _empty(self, first: Form, second: Form) -> Tensor:
        """A result of the size that follows from those of the two small batches, with strides in the same order."""
        shape = [x + (self.samples - SMALL[0]) * (y - x) // SMALL_STEP for x, y in zip(first[0], second[0], strict=True)]
        result = torch.empty([shape[d] for d in first[1]], dtype=first[2])
        return result.permute([first[1].index(d) for d in range(len(shape))])


SMALL_STEP = SMALL[1] - SMALL[0]


def _require(condition: bool) -> None:
    if not condition:
        raise _Other


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), _order(tensor), tensor.dtype


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the largest stride to the smallest."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: -strides[d]))


def _like(tensor: Tensor, options: Mapping[str, Any]) -> Tensor:
    order = options.get("memory_format") or torch.preserve_format
    return torch.empty_like(tensor, dtype=options.get("dtype"), memory_format=order)
