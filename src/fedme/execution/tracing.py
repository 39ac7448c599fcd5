"""Trace a network: the tensor operations of its forward pass, however it is written.

The network runs once, and a dispatch mode sees what reaches torch's kernels. Functions, methods and layers therefore end in the
same few operations. A network whose forward pass depends on the values of its inputs cannot be traced.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
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

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.narrowed = dtype, False
        self.operations: list[Operation] = []
        self.tensors: dict[int, Traced] = {}
        self.buffers: dict[int, str] = {}  # tensors that are buffers, or parts of them, which the forward pass has not changed
        self.owners: dict[int, str] = {}  # parts of weights and buffers
        self.of_symbols: dict[int, Tensor] = {}  # inputs and functions of single ones: the result for every symbol
        self.assumed: set[str] = set()  # buffers whose numbers are part of the trace
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
        if isinstance(value, Tensor) and id(value) in self.buffers and not value.is_floating_point():
            self.assumed.add(self.buffers[id(value)])
            return value.clone()
        return self.tensors.get(id(value), value) if isinstance(value, Tensor) else value

    def _owner(self, tensor: Tensor) -> str:
        """The weight or buffer that a tensor is a part of; empty if there is none."""
        traced = self.tensors.get(id(tensor))
        return traced.weight if traced is not None and traced.weight else self.owners.get(id(tensor), "")

    def _note_parts(self, tensor: Tensor, parts: Iterable[Tensor]) -> None:
        if owner := self._owner(tensor):
            for part in parts:
                self.owners[id(part)] = owner
                self.kept.append(part)

    def _change(self, changed: Any, given: list[Tensor]) -> None:
        if name := self.owners.get(id(changed)):
            raise TraceError(f"its forward pass changes {name}")
        for tensor in given:
            self.buffers.pop(id(tensor), None)

    def _of_symbols(self, function: Any, given: list[Tensor], results: Any, arguments: Any, options: Any) -> bool:
        """Note a function of single symbols, such as a comparison, as a table with its result for every symbol."""
        by_itself = torch.Tag.pointwise in function.tags or function.overloadpacket.__name__ == "_to_copy"
        if not by_itself or function._schema.is_mutable or not all(id(tensor) in self.of_symbols for tensor in given):
            return False
        others = [tensor for tensor in tensors_in(arguments) if id(tensor) not in self.of_symbols]
        if any(tensor.dim() for tensor in others):
            return False
        table = function(*(self.of_symbols.get(id(value), value) for value in arguments), **options)
        self.record("of_symbols", results, (self.tensors[id(given[0])], table), {})
        self.of_symbols[id(results)] = table
        return True

    def _of_buffers(self, function: Any, given: list[Tensor], results: Any) -> bool:
        """Whether an operation only reads buffers: its results are constants then, as long as the buffers are the same.

        Parts of buffers of numbers stay what they are: they may be large, and nothing is computed.
        """
        if not all(id(tensor) in self.buffers for tensor in given):
            return False
        name = self.buffers[id(given[0])]
        if function.is_view and len(given) == 1 and given[0].is_floating_point():
            for result in tensors_in(results if isinstance(results, tuple | list) else (results,)):
                self.buffers[id(result)] = name
            return False
        self.assumed.update(self.buffers[id(tensor)] for tensor in given)
        return True

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if self.paused:
            return function(*arguments, **options)
        before = arguments
        if function._schema.is_mutable:  # which may change a constant
            before = tuple(x.clone() if isinstance(x, Tensor) and id(x) not in self.tensors else x for x in arguments)
        results = function(*arguments, **options)
        # Attention has dropout of its own, which may be off.
        if torch.Tag.nondeterministic_seeded in function.tags and "scaled_dot_product" not in str(function):
            raise TraceError(f"its forward pass draws random numbers ({function.overloadpacket.__name__})")
        if function.overloadpacket.__name__ in FROM_SHAPES:
            return results
        given = [tensor for tensor in tensors_in((arguments, tuple(options.values()))) if id(tensor) in self.tensors]
        if function._schema.is_mutable:
            self._change(arguments[0] if arguments else None, given)
        elif function.is_view:
            self._note_parts(arguments[0], tensors_in(results if isinstance(results, tuple | list) else (results,)))
        if given and self._of_symbols(function, given, results, arguments, options):
            return results
        if given and not self._of_buffers(function, given, results):
            if isinstance(results, bool | int | float):  # of `item` or `torch.equal`, for example
                raise TraceError(BY_VALUES)
            name = str(function).removeprefix("aten.")
            if name.startswith("_to_copy") and _digits(results) < _digits(arguments[0]):
                name = "narrowed" if results.is_floating_point() else f"to {str(results.dtype).removeprefix('torch.')}"
            self.narrowed |= _loses_digits(function, results, self.dtype)
            self.record(name, results, before, options, function)
        return results


class _Reads(TorchFunctionMode):
    """Refuses to hand the numbers of a tensor of the trace to Python."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and id(args[0]) in self.trace.buffers:
            self.trace.assumed.add(self.trace.buffers[id(args[0])])
        elif func in READS and id(args[0]) in self.trace.tensors:
            raise TraceError(BY_VALUES)
        if func in DATA and id(args[0]) in self.trace.tensors:
            raise TraceError("its forward pass uses .data, which hides what it does with the numbers")
        return func(*args, **(kwargs or {}))


def _loses_digits(function: Any, results: Any, dtype: torch.dtype) -> bool:
    """Whether an operation computes with fewer digits than the weights of the network have."""
    exact = function.is_view or function.overloadpacket.__name__ in ("_to_copy", "clone")
    made = tensors_in(results if isinstance(results, tuple | list) else (results,))
    return not exact and any(0 < _digits(result) < torch.finfo(dtype).bits for result in made)


def _digits(x: Tensor) -> int:
    return torch.finfo(x.dtype).bits if x.is_floating_point() else 0


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def _record_dropout(trace: Trace, name: str, own_p: float, x: Tensor, p: float | None = None) -> Tensor:
    """In place of a dropout layer: one operation of the trace."""
    result = x.clone()
    trace.record("dropout", result, (x, name, own_p if p is None else p), {})
    return result


def _record_gru(trace: Trace, layer: nn.GRU, forward: Any, x: Tensor, hidden: Tensor | None = None) -> Any:
    """In place of a GRU, which torch computes step by step: one operation of the trace."""
    if hidden is not None or not isinstance(x, Tensor) or x.dim() != 3 or (layer.dropout and layer.num_layers > 1):
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
    symbols: bool  # whether the input consists of them, instead of numbers
    narrowed: bool  # whether it computes with fewer digits than its weights have
    assumed: dict[str, Tensor]  # the numbers of buffers that decided about operations or constants


def trace(arch: Arch, shape: tuple[int, ...], symbols: bool = False, dtype: torch.dtype = torch.float32) -> NetworkTrace:
    """The operations of a network in training mode, for inputs of this shape: numbers or symbols.

    In evaluation mode it must not depend on the values of tensors or draw random numbers either.
    """
    if reason := hooks_obstacle(arch):
        raise TraceError(reason)  # one that only looks on leaves no operation
    modules = [build_template(arch, training).to(dtype) for training in (False, True)]
    with default_dtype(dtype):  # a network may make tensors in its forward pass
        evaluated, trained = (_trace(module, shape, symbols, dtype) for module in modules)
    return replace(trained, assumed=evaluated.assumed | trained.assumed)


def _trace(module: nn.Module, shape: tuple[int, ...], symbols: bool, dtype: torch.dtype) -> NetworkTrace:
    recorded = Trace(dtype)
    for name, child in module.named_modules():
        if isinstance(child, KeyedDropout):
            child.forward = functools.partial(_record_dropout, recorded, name, child.p)  # type: ignore[method-assign]
        elif type(child) is nn.GRU:
            child.forward = functools.partial(_record_gru, recorded, child, child.forward)  # type: ignore[method-assign]
    named = [*module.named_parameters(), *((name, b) for name, b in module.named_buffers() if not _is_seed(module, name))]
    for name, weight in named:
        recorded.know(weight, Traced(tuple(weight.shape), weight=name))
    recorded.buffers |= {id(buffer): name for name, buffer in module.named_buffers() if not _is_seed(module, name)}
    held = {name: buffer.clone() for name, buffer in module.named_buffers()}
    x = torch.randn((BATCH, *shape), generator=Key(0).torch(), dtype=torch.float32).to(dtype)
    x = torch.zeros(x.shape, dtype=torch.int64) if symbols else x
    given = Traced(tuple(x.shape))
    recorded.know(x, given)
    tables = [child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)]
    if symbols and tables:
        recorded.of_symbols[id(x)] = torch.arange(min(tables))
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
    assumed = {name: held[name] for name in sorted(recorded.assumed)}
    return NetworkTrace(tuple(recorded.operations), given, output, weights, symbols, recorded.narrowed, assumed)
