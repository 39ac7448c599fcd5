"""Turn a trace into a program: the nodes that the compiled code runs.

`layout.py` has the values and addresses; `lowering_*.py` have the operations of torch that become nodes.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedme.core.model import Arch
from fedme.execution.layout import Layout
from fedme.execution.lowering_functions import FUNCTIONS_OF_TORCH, fuse_relu
from fedme.execution.lowering_layers import LAYERS
from fedme.execution.lowering_reductions import REDUCTIONS
from fedme.execution.lowering_sequences import SEQUENCES
from fedme.execution.program import Program
from fedme.execution.tracing import BATCH, NetworkTrace, Operation, Traced, TraceError, trace

OPERATIONS = {**LAYERS, **REDUCTIONS, **SEQUENCES, **FUNCTIONS_OF_TORCH}
MOVES = {  # operations that only move numbers
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "select", "slice"),
    *("clone", "cat", "stack", "split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "alias", "_reshape_alias"),
    *("unfold", "narrow", "lift_fresh", "view_as", "movedim", "contiguous", "unsafe_split", "unsafe_chunk", "chunk"),
    *("index", "index_select", "gather", "pixel_shuffle", "pixel_unshuffle", "_to_copy", "narrowed"),
    *("transpose_", "t_", "squeeze_", "unsqueeze_"),
}
INDEXED = ("index", "index_select", "gather")  # by constants


@functools.lru_cache(maxsize=256)
def lowered(arch: Arch, shape: tuple[int, ...], symbols: bool, lanes: int, dtype: torch.dtype = torch.float32) -> Program | str:
    """The program of a network of this type for inputs of this shape and vectors of `lanes` numbers, or why there is none.

    Inputs are numbers or symbols.
    """
    try:
        return _program(trace(arch, shape, symbols, dtype), lanes)
    except TraceError as error:
        return str(error)


def _program(network: NetworkTrace, lanes: int) -> Program:
    try:
        return Lowering(network, lanes).program()
    except TraceError:
        raise
    except Exception as error:  # any operation may come with any arguments
        raise TraceError(f"its operations cannot be arranged ({type(error).__name__}: {error})") from error


class Lowering:
    """The program of one trace."""

    def __init__(self, network: NetworkTrace, lanes: int) -> None:
        self.network, self.layout = network, Layout(network, lanes)
        self.counters: list[str] = []
        self.narrowed = network.narrowed

    def program(self) -> Program:
        """Lower all operations that the output needs."""
        needed, layout = self._needed(), self.layout
        for operation in self.network.operations:
            if operation in needed:
                self._lower(operation)
        logits = layout.addresses_of(self.network.output)
        if logits.dim() != 2 or len(logits) != BATCH:
            raise TraceError(f"its output has shape {tuple(self.network.output.shape)}, not samples x classes")
        classes = logits.shape[1]
        logits = layout.copied(logits, classes) if layout.readers(layout.value_of(logits)) else layout.rows(logits)
        output = layout.value_of(logits)
        if not layout.values[output].gradient:
            raise TraceError("its output does not depend on weights")
        fuse_relu(layout)
        written = {0, *(node.output for node in layout.nodes)}
        for index, value in enumerate(layout.values):
            value.size = value.size if index in written else 0
            value.sums = index in layout.partly_read or layout.readers(index) > 1
        self._check_weights()
        used = dict.fromkeys(name for node in layout.nodes for name in node.parameters if name)
        layers = dict.fromkeys(node.layer for node in layout.nodes if node.layer)
        symbols = min((node.numbers[2] for node in layout.nodes if node.type == "embedding"), default=0)
        names = (tuple(used), tuple(layers), tuple(self.counters))
        constants = tuple((name, value) for name, value in layout.constants.items() if name in used)
        return Program(
            tuple(layout.values),
            tuple(layout.nodes),
            output,
            classes,
            *names,
            symbols,
            constants,
            tuple(self.network.assumed.items()),
            self.narrowed,
        )

    def _check_weights(self) -> None:
        """Weights may be used in parts and several times, but as a whole; running statistics only once."""
        for name, times in self.layout.used.items():
            if not bool(times.all()):
                raise TraceError(f"a part of the weight {name} is not used")
        counts = Counter(name for node in self.layout.nodes for name in node.parameters[2:] if node.type == "channel_norm")
        if several := [name for name, count in counts.items() if name and count > 1]:
            raise TraceError(f"the buffer {several[0]} is used several times")

    def _needed(self) -> set[Operation]:
        """Operations that the output depends on, and those that change buffers."""
        needed: set[Operation] = set()
        waiting: list[Any] = [self.network.output]
        for operation in self.network.operations:
            name = operation.name.partition(".")[0]
            if name.endswith("_") and operation.arguments and (weight := self.layout.weight_name(operation.arguments[0])):
                self._count(operation, weight, name)
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Traced) and value.operation is not None and value.operation not in needed:
                needed.add(value.operation)
                waiting.extend((*value.operation.arguments, *value.operation.options.values()))
        return needed

    def _count(self, operation: Operation, weight: str, name: str) -> None:
        if name != "add_" or operation.arguments[0].shape or operation.arguments[1] != 1:
            raise TraceError(f"its forward pass changes {weight}")
        self.counters.append(weight)

    def _lower(self, operation: Operation) -> None:
        name = operation.name.partition(".")[0]
        if name in MOVES:
            results = self._move(name, operation)
        else:
            lower = OPERATIONS.get(name.rstrip("_"))
            if lower is None:
                raise TraceError(f"unsupported operation {name}")
            results = lower(self.layout, *operation.arguments, **operation.options)
        outputs = results if isinstance(results, tuple | list) else [results]
        for traced in self._results(operation):
            if traced.output < len(outputs):
                self.layout.addresses[traced] = outputs[traced.output]

    def _results(self, operation: Operation) -> list[Traced]:
        return self._by_operation.get(operation, [])

    @functools.cached_property
    def _by_operation(self) -> dict[Operation, list[Traced]]:
        results: dict[Operation, list[Traced]] = {}
        waiting: list[Any] = [self.network.output, *(x for op in self.network.operations for x in op.arguments)]
        waiting += [x for op in self.network.operations for x in op.options.values()]
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Traced) and value.operation is not None and id(value) not in seen:
                seen.add(id(value))
                results.setdefault(value.operation, []).append(value)
        return results

    def _move(self, name: str, operation: Operation) -> Any:
        def addresses(value: Any) -> Any:
            if isinstance(value, tuple):
                return [addresses(item) for item in value]
            return self.layout.addresses_of(value) if isinstance(value, Traced) or joined(value) else value

        def joined(value: Any) -> bool:  # a constant among what is joined
            return isinstance(value, Tensor) and name in ("cat", "stack")

        if name in INDEXED and any(isinstance(index, Traced) for index in _flat(operation.arguments[1:])):
            raise TraceError("indices that depend on inputs or weights")
        arguments = addresses(operation.arguments)
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            return arguments[0].reshape(arguments[1])
        if name in ("clone", "alias", "contiguous", "lift_fresh", "_to_copy", "narrowed"):
            self.narrowed |= name == "narrowed"
            return arguments[0]
        if name.endswith("_"):
            arguments[0] = arguments[0].clone()
        moved = operation.function(*arguments, **operation.options)
        return self.layout.with_samples(moved) if name in ("cat", "stack") else moved


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value
