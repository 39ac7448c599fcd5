"""Trace a network: the tensor operations of its forward pass, however it is written.

The network runs once, and a dispatch mode sees what reaches torch's kernels. Functions, methods and layers therefore end in the
same few operations. A network whose forward pass depends on the values of its inputs cannot be traced.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedme.core.key import Key
from fedme.core.model import Arch, output_of

BATCH = 3  # samples of a trace


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


class DropoutMark(nn.Module):
    """Stands for a dropout layer in a traced network."""

    def __init__(self, trace: "Trace", name: str, p: float) -> None:
        super().__init__()
        self.trace, self.name, self.p = trace, name, p

    def forward(self, x: Tensor) -> Tensor:
        result = x.clone()
        self.trace.record("dropout", result, (x, self.name, self.p), {})
        return result


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
        # Attention has dropout of its own, which may be off.
        if torch.Tag.nondeterministic_seeded in function.tags and "scaled_dot_product" not in str(function):
            raise TraceError("its forward pass draws random numbers")
        if any(id(tensor) in self.tensors for tensor in _tensors((arguments, tuple(options.values())))):
            if function is torch.ops.aten._local_scalar_dense.default:
                raise TraceError("its forward pass depends on the values of tensors")
            self.record(str(function).removeprefix("aten."), results, arguments, options, function)
        return results


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True, eq=False)
class NetworkTrace:
    """The operations of a network, its input and its output, and the numbers of its weights by name."""

    operations: tuple[Operation, ...]
    input: Traced
    output: Traced
    weights: dict[str, tuple[int, ...]]


def trace(arch: Arch, shape: tuple[int, ...], symbols: bool = False) -> NetworkTrace:
    """The operations of a network in training mode, for inputs of this shape: numbers or symbols."""
    module = arch.build(Key(0)).train()
    recorded = Trace()
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if type(child) is nn.Dropout and name:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, DropoutMark(recorded, name, child.p))
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, weight in named:
        recorded.know(weight, Traced(tuple(weight.shape), weight=name))
    x = torch.zeros((BATCH, *shape), dtype=torch.int64) if symbols else torch.randn((BATCH, *shape), generator=Key(0).torch())
    recorded.know(x, Traced(tuple(x.shape)))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), recorded:
        logits = output_of(module(x))
    output = recorded.tensors.get(id(logits))
    if output is None:
        raise TraceError("its output does not depend on its input")
    weights = {name: tuple(weight.shape) for name, weight in named}
    return NetworkTrace(tuple(recorded.operations), recorded.tensors[id(x)], output, weights)
