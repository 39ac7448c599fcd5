"""Trace a network: the tensor operations of its forward pass, however it is written.

The network runs once, and a dispatch mode sees what reaches torch's kernels. Functions, methods and layers therefore end in the
same few operations. A network whose forward pass depends on the values of its inputs cannot be traced.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedme.core.dropout import KeyedDropout
from fedme.core.global_generators import states
from fedme.core.key import Key
from fedme.core.model import Arch, build_template, default_dtype, hooks_obstacle, output_of
from fedme.core.own_attributes import changing_attribute, plain_attributes

BATCH = 3  # samples of a trace
BY_VALUES = "its forward pass depends on the values of tensors"
READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)  # what hands numbers to Python, without an operation
FROM_SHAPES = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")  # operations that read no number


class TraceError(ValueError):
    """Why a network cannot be traced, or its operations cannot be compiled."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor of a trace: an input (no operation), a weight (a name), or an output of an operation."""

    shape: tuple[int, ...]
    operation: "Operation | None" = None
    output: int = 0
    weight: str = ""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of torch, such as `aten.addmm.default`, or a dropout layer, with its arguments."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    function: Any = None


class Trace(TorchDispatchMode):
    """Records the operations that depend on the inputs or on weights."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it imports it, which takes more than a second

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.tensors: dict[int, Traced] = {}
        self.kept: list[Tensor] = []  # an identity may be used again once its tensor is gone
        self.paused = False

    def know(self, tensor: Tensor, traced: Traced) -> None:
        """`tensor` is `traced` from now on."""
        self.tensors[id(tensor)] = traced
        self.kept.append(tensor)

    def record(
        self, name: str, results: Any, arguments: tuple[Any, ...], options: dict[str, Any], function: Any = None
    ) -> None:
        """Note an operation and its results."""
        given = {key: self._named(value) for key, value in options.items()}
        operation = Operation(name, self._named(arguments), given, function)
        self.operations.append(operation)
        for output, result in enumerate(results if isinstance(results, tuple | list) else (results,)):
            if isinstance(result, Tensor):
                self.know(result, Traced(tuple(result.shape), operation, output))

    def _named(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(self._named(item) for item in value)
        return self.tensors.get(id(value), value) if isinstance(value, Tensor) else value

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        results = function(*arguments, **options)
        if self.paused:
            return results
        # Attention has dropout of its own, which may be off.
        if torch.Tag.nondeterministic_seeded in function.tags and "scaled_dot_product" not in str(function):
            raise TraceError(f"its forward pass draws random numbers ({function.overloadpacket.__name__})")
        if function.overloadpacket.__name__ in FROM_SHAPES:
            return results
        if any(id(tensor) in self.tensors for tensor in _tensors((arguments, tuple(options.values())))):
            if isinstance(results, bool | int | float):  # of `item` or `torch.equal`, for example
                raise TraceError(BY_VALUES)
            self.record(str(function).removeprefix("aten."), results, arguments, options, function)
        return results


class _Reads(TorchFunctionMode):
    """Refuses to hand the numbers of a tensor of the trace to Python."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and id(args[0]) in self.trace.tensors:
            raise TraceError(BY_VALUES)
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _record_dropout(trace: Trace, name: str, own_p: float, x: Tensor, p: float | None = None) -> Tensor:
    """In place of a dropout layer: one operation of the trace."""
    result = x.clone()
    trace.record("dropout", result, (x, name, own_p if p is None else p), {})
    return result


def _record_gru(trace: Trace, layer: nn.GRU, forward: Any, x: Tensor, hidden: Tensor | None = None) -> Any:
    """In place of a GRU, which torch computes step by step: one operation of the trace."""
    if hidden is not None or x.dim() != 3 or (layer.dropout and layer.num_layers > 1):
        return forward(x, hidden)
    trace.paused = True
    results = forward(x)
    trace.paused = False
    sizes = {"layers": layer.num_layers, "bidirectional": layer.bidirectional, "batch_first": layer.batch_first}
    trace.record("gru", results, (x, tuple(layer._flat_weights), layer.hidden_size, layer.bias), sizes)
    return results


def _is_seed(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last == "seed" and isinstance(module.get_submodule(owner), KeyedDropout)


@dataclass(frozen=True, eq=False)
class NetworkTrace:
    """The operations of a network, its input and its output, and the numbers of its weights by name."""

    operations: tuple[Operation, ...]
    input: Traced
    output: Traced
    weights: dict[str, tuple[int, ...]]


def trace(arch: Arch, shape: tuple[int, ...], symbols: bool = False, dtype: torch.dtype = torch.float32) -> NetworkTrace:
    """The operations of a network in training mode, for inputs of this shape: numbers or symbols.

    In evaluation mode it must not depend on the values of tensors or draw random numbers either.
    """
    if reason := hooks_obstacle(arch):
        raise TraceError(reason)  # one that only looks on leaves no operation
    with default_dtype(dtype):  # a network may make tensors in its forward pass
        return [_trace(arch, shape, symbols, dtype, training) for training in (False, True)][1]


def _trace(arch: Arch, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype, training: bool) -> NetworkTrace:
    module, recorded = build_template(arch, training).to(dtype), Trace()
    for name, child in module.named_modules():
        if isinstance(child, KeyedDropout):
            child.forward = functools.partial(_record_dropout, recorded, name, child.p)  # type: ignore[method-assign]
        elif type(child) is nn.GRU:
            child.forward = functools.partial(_record_gru, recorded, child, child.forward)  # type: ignore[method-assign]
    named = [*module.named_parameters(), *((name, b) for name, b in module.named_buffers() if not _is_seed(module, name))]
    for name, weight in named:
        recorded.know(weight, Traced(tuple(weight.shape), weight=name))
    x = torch.randn((BATCH, *shape), generator=Key(0).torch(), dtype=torch.float32).to(dtype)
    x = torch.zeros(x.shape, dtype=torch.int64) if symbols else x
    recorded.know(x, Traced(tuple(x.shape)))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before, attributes = states(), plain_attributes(module)
        with recorded, _Reads(recorded):
            logits = output_of(module(x))
        if states() != before:
            raise TraceError("its forward pass draws random numbers")
        recorded.paused = True
        if name := changing_attribute(module, functools.partial(module, x), attributes):
            raise TraceError(f"its forward pass changes its attribute {name}")
    output = recorded.tensors.get(id(logits))
    if output is None:
        raise TraceError("its output does not depend on its input")
    weights = {name: tuple(weight.shape) for name, weight in named}
    return NetworkTrace(tuple(recorded.operations), recorded.tensors[id(x)], output, weights)
