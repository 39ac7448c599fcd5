"""Turn a trace into a program: the nodes that the compiled code runs, over values with a fixed layout in memory.

A tensor of the trace is a tensor of addresses: where each of its numbers is. An address has a value (or a weight), a sample of
the batch and a place. Operations that only move numbers, such as views, permutations and concatenations, are applied to the
addresses and need no node. An operation that computes reads a value as it is, if its numbers have the places that the node
expects, and a copy of it otherwise.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedme.core.model import Arch
from fedme.execution.tracing import BATCH, NetworkTrace, Operation, Traced, TraceError, trace

VALUE_BITS, SAMPLE_BITS = 40, 32  # of an address: the value from bit 40 on, the sample from bit 32 on, the place below
KNOWN = 1 << 39  # set in addresses of weights and zeros that have a sample
PLACE = (1 << SAMPLE_BITS) - 1
FIRST_WEIGHT = 1 << 20  # values from here on are weights
ZERO = 1 << 21  # the value of a constant zero

NODE_TYPES = (
    *("dense", "convolution", "depthwise", "pool", "elementwise", "binary", "dropout", "gather", "broadcast"),
    *("channel_norm", "row_norm", "softmax", "matrix_product", "embedding", "lstm"),
)
FUNCTIONS = (
    *("affine", "relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "relu6", "leaky_relu", "elu"),
    *("hardswish", "hardsigmoid"),
)
MOVES = {  # operations that only move numbers
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "select", "slice"),
    *("clone", "cat", "stack", "split", "split_with_sizes", "unbind", "flip", "roll", "repeat", "alias", "_reshape_alias"),
    *("unfold", "narrow", "lift_fresh", "view_as", "movedim", "contiguous"),
}
RELU_AT = {"dense": 1, "convolution": 15, "depthwise": 15, "binary": 1, "channel_norm": 3}  # where `numbers` say ReLU follows


@dataclass
class Value:
    """A value: its size per sample with padding, and the layout of its rows."""

    size: int
    width: int  # of a row
    padded_width: int
    elements: int  # without padding
    gradient: bool = False
    sums: bool = False


@dataclass(frozen=True)
class Node:
    """A node of the compiled code; `compiled_*.hpp` say what its numbers mean."""

    type: str
    inputs: tuple[int, ...]
    output: int
    parameters: tuple[str | None, ...] = ()
    numbers: tuple[int, ...] = ()
    reals: tuple[float, ...] = ()
    table: tuple[int, ...] = ()
    layer: str | None = None  # a dropout layer


@dataclass(frozen=True)
class Program:
    """The nodes of a network in the order they run. The first value is the input."""

    values: tuple[Value, ...]
    nodes: tuple[Node, ...]
    output: int
    classes: int
    parameters: tuple[str, ...]
    layers: tuple[str, ...]  # dropout layers
    counters: tuple[str, ...]  # buffers that count batches
    symbols: int  # that an embedding knows; 0: the inputs are numbers


@functools.lru_cache(maxsize=256)
def lowered(arch: Arch, shape: tuple[int, ...], symbols: bool, lanes: int) -> Program | str:
    """The program of a network for inputs of this shape and vectors of `lanes` numbers, or why there is none.

    Inputs are numbers or symbols.
    """
    try:
        return Lowering(trace(arch, shape, symbols), lanes).program()
    except TraceError as error:
        return str(error)


class Lowering:
    """The program of one trace."""

    def __init__(self, network: NetworkTrace, lanes: int) -> None:
        self.network, self.lanes = network, lanes
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.weights = list(network.weights)
        self.calls: Counter[str] = Counter()
        self.counters: list[str] = []
        self.partly_read: set[int] = set()
        self.addresses: dict[Traced, Tensor] = {}
        features = math.prod(network.input.shape[1:])
        self._value(1, features)
        places = torch.arange(features).view(1, *network.input.shape[1:]) + _samples(
            (BATCH,) + (1,) * (len(network.input.shape) - 1)
        )
        self.addresses[network.input] = places

    def program(self) -> Program:
        """Lower all operations that the output needs."""
        needed = self._needed()
        for operation in self.network.operations:
            if operation in needed:
                self._lower(operation)
        logits = self._of(self.network.output)
        if logits.dim() != 2 or len(logits) != BATCH:
            raise TraceError(f"its output has shape {tuple(self.network.output.shape)}, not samples x classes")
        classes = logits.shape[1]
        logits = self._copied(logits, classes) if self._readers(self._value_of(logits)) else self._rows(logits)
        output = self._value_of(logits)
        if not self.values[output].gradient:
            raise TraceError("its output does not depend on weights")
        self._fuse_relu()
        written = {0, *(node.output for node in self.nodes)}
        for index, value in enumerate(self.values):
            value.size = value.size if index in written else 0
            value.sums = index in self.partly_read or self._readers(index) > 1
        used = [name for node in self.nodes for name in node.parameters if name]
        if tied := sorted(name for name, count in Counter(used).items() if count > 1):
            raise TraceError(f"the weight {tied[0]} is used several times")
        layers = dict.fromkeys(node.layer for node in self.nodes if node.layer)
        symbols = min((node.numbers[2] for node in self.nodes if node.type == "embedding"), default=0)
        names = (tuple(used), tuple(layers), tuple(self.counters))
        return Program(tuple(self.values), tuple(self.nodes), output, classes, *names, symbols)

    def _needed(self) -> set[Operation]:
        """Operations that the output depends on, and those that change buffers."""
        needed: set[Operation] = set()
        waiting: list[Any] = [self.network.output]
        for operation in self.network.operations:
            if operation.name.startswith("add_.") and self._weight_name(operation.arguments[0]):
                self._count(operation)
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend(value)
            elif isinstance(value, Traced) and value.operation is not None and value.operation not in needed:
                needed.add(value.operation)
                waiting.extend((*value.operation.arguments, *value.operation.options.values()))
        return needed

    def _count(self, operation: Operation) -> None:
        target, amount = operation.arguments[:2]
        if len(target.shape) or amount != 1:
            raise TraceError(f"its forward pass changes the buffer {target.weight}")
        self.counters.append(target.weight)

    # Values and addresses.

    def _padded(self, width: int) -> int:
        return -(-width // self.lanes) * self.lanes

    def _value(self, rows: int, width: int, gradient: bool = False) -> int:
        padded = self._padded(width)
        self.values.append(Value(rows * padded, width, padded, rows * width, gradient))
        return len(self.values) - 1

    def _of(self, traced: Any) -> Tensor:
        """The addresses of a tensor of the trace."""
        if not isinstance(traced, Traced):
            raise TraceError("it computes with a constant tensor")
        if traced.weight and traced not in self.addresses:
            number = FIRST_WEIGHT + self.weights.index(traced.weight)
            count = math.prod(traced.shape)
            self.addresses[traced] = (torch.arange(count) + (number << VALUE_BITS)).view(traced.shape)
        if traced not in self.addresses:
            raise TraceError("it uses a result that is not known")
        return self.addresses[traced]

    def _weight_name(self, traced: Any) -> str | None:
        return traced.weight if isinstance(traced, Traced) and traced.weight else None

    def _whole_weight(self, addresses: Tensor) -> str:
        """The name of the weight that these addresses are, in its order."""
        first = int(addresses.flatten()[0])
        number = (first >> VALUE_BITS) - FIRST_WEIGHT
        if not 0 <= number < len(self.weights):
            raise TraceError("a weight is computed from others")
        name = self.weights[number]
        expected = torch.arange(addresses.numel()) + ((FIRST_WEIGHT + number) << VALUE_BITS)
        if addresses.numel() != math.prod(self.network.weights[name]) or not torch.equal(addresses.flatten(), expected):
            raise TraceError(f"a part of the weight {name} is used, or in another order")
        return name

    def _parameter(self, traced: Any) -> str | None:
        return None if traced is None else self._whole_weight(self._of(traced))

    def _value_of(self, addresses: Tensor) -> int:
        """The value that all addresses are in; -1 if they are in several, or in a weight."""
        values = addresses >> VALUE_BITS
        first = int(values.flatten()[0])
        return first if 0 <= first < FIRST_WEIGHT and bool((values == first).all()) else -1

    def _is_whole(self, addresses: Tensor) -> bool:
        """Whether these are all numbers of one value, each once."""
        value = self._value_of(addresses)
        count = self.values[value].elements * BATCH if value >= 0 else -1
        return addresses.numel() == count and len(addresses.unique()) == count

    def _readers(self, value: int) -> int:
        return sum(node.inputs.count(value) for node in self.nodes)

    def _writer(self, value: int) -> int | None:
        writers = [index for index, node in enumerate(self.nodes) if node.output == value]
        return writers[0] if len(writers) == 1 else None

    def _batch(self, addresses: Tensor) -> Tensor:
        """The sample that each number belongs to. Weights belong to none: there the position in the batch dimension decides."""
        unknown = (addresses >> VALUE_BITS >= FIRST_WEIGHT) & (addresses & KNOWN == 0)
        samples = _sample(addresses)
        if not bool(unknown.any()):
            return samples
        for dimension, size in enumerate(addresses.shape):
            if size == BATCH:
                position = torch.arange(BATCH).view([-1 if d == dimension else 1 for d in range(addresses.dim())])
                if bool(((samples == position) | unknown).all()):
                    return position.expand_as(addresses)
        raise TraceError("samples of a batch are mixed")

    def _with_samples(self, addresses: Tensor) -> Tensor:
        """The same, with the samples of weights and zeros among numbers of values."""
        constant = addresses >> VALUE_BITS >= FIRST_WEIGHT
        if not bool(constant.any()) or bool(constant.all()):
            return addresses
        return torch.where(
            constant & (addresses & KNOWN == 0), addresses + KNOWN + (self._batch(addresses) << SAMPLE_BITS), addresses
        )

    def _add(self, node: Node) -> None:
        trained = any(name and not self._is_buffer(name) for name in node.parameters)
        self.values[node.output].gradient |= trained or any(self.values[value].gradient for value in node.inputs)
        self.nodes.append(node)

    def _is_buffer(self, name: str) -> bool:
        return name.rpartition(".")[2] in ("running_mean", "running_var")

    def _copy(self, addresses: Tensor, targets: Tensor, value: int) -> Tensor:
        """Copy numbers to the places `targets` (with their samples) of a new value; their new addresses."""
        flat, to = addresses.flatten(), targets.flatten()
        source, sample, place, origin = flat >> VALUE_BITS, _sample(to), to & PLACE, flat & PLACE
        for number in source.unique().tolist():
            if number == ZERO:
                continue
            tables = []
            for b in range(BATCH):
                chosen = (source == number) & (sample == b)
                if number < FIRST_WEIGHT and not bool((_sample(flat)[chosen] == b).all()):
                    raise TraceError("samples of a batch are mixed")
                order = place[chosen].argsort()
                tables.append((origin[chosen][order], place[chosen][order]))
            if any(not torch.equal(x, y) for table in tables for x, y in zip(table, tables[0], strict=True)):
                raise TraceError("samples of a batch are treated differently")
            table = (*tables[0][0].tolist(), *tables[0][1].tolist())
            if number >= FIRST_WEIGHT:
                name = self.weights[number - FIRST_WEIGHT]
                count = math.prod(self.network.weights[name])
                self._add(Node("broadcast", (), value, (name,), (count,), table=table))
            else:
                if len(table) // 2 != self.values[number].elements or len(set(table[: len(table) // 2])) < len(table) // 2:
                    self.partly_read.add(number)
                self._add(Node("gather", (number,), value, table=table))
        return targets + (value << VALUE_BITS)

    def _copied(self, addresses: Tensor, width: int | None = None) -> Tensor:
        """A copy in a new value: the numbers of a sample in their order, in padded rows of `width` numbers."""
        samples = self._batch(addresses)
        flat = samples.flatten()
        count = addresses.numel() // BATCH
        if not torch.equal(flat.bincount(minlength=BATCH), torch.full((BATCH,), count)):
            raise TraceError("samples of a batch are mixed")
        if width is None:
            last = samples if samples.dim() else samples.view(1)
            width = addresses.shape[-1] if bool((last == last[..., :1]).all()) else count
        order = flat.argsort(stable=True)
        rank = torch.empty_like(flat)
        rank[order] = torch.arange(count).repeat(BATCH)
        padded = self._padded(width)
        targets = rank // width * padded + rank % width + (flat << SAMPLE_BITS)
        return self._copy(addresses, targets.view(addresses.shape), self._value(count // width, width))

    def _rows(self, addresses: Tensor) -> Tensor:
        """The same numbers, or a copy, in a value that is made of these rows: contiguous, padded and in any order."""
        width, value = addresses.shape[-1], self._value_of(addresses)
        if value >= 0 and self.values[value].padded_width == self._padded(width) and self.values[value].width == width:
            starts = addresses[..., :1]
            contiguous = self._is_whole(addresses) and bool((addresses == starts + torch.arange(width)).all())
            if contiguous and not bool(((starts & PLACE) % self._padded(width)).any()):
                return addresses
        return self._copied(addresses, width)

    def _channels_last(self, addresses: Tensor) -> Tensor:
        """Samples x channels x positions as rows of channels, one per position and in that order."""
        rows = addresses.flatten(2).transpose(1, 2) if addresses.dim() > 2 else addresses.unsqueeze(1)
        value = self._value_of(rows)
        if value >= 0 and value != 0 and self._is_whole(rows) and self.values[value].width == rows.shape[2]:
            padded = self._padded(rows.shape[2])
            expected = torch.arange(rows.shape[1]).view(-1, 1) * padded + torch.arange(rows.shape[2])
            if torch.equal(rows, expected + _samples((BATCH, 1, 1)) + (value << VALUE_BITS)):
                return rows
        return self._copied(rows, rows.shape[2])

    def _natural(self, addresses: Tensor) -> Tensor:
        return addresses if self._is_whole(addresses) else self._copied(addresses)

    def _like(self, addresses: Tensor, value: int) -> Tensor:
        """The same places in another value."""
        return (addresses & ((1 << VALUE_BITS) - 1)) + (value << VALUE_BITS)

    def _new_rows(self, rows: int, width: int) -> tuple[int, Tensor]:
        """A new value of padded rows, and its addresses: samples x rows x width."""
        value = self._value(rows, width)
        places = torch.arange(rows).view(-1, 1) * self._padded(width) + torch.arange(width)
        return value, places + _samples((BATCH, 1, 1)) + (value << VALUE_BITS)

    # Operations.

    def _lower(self, operation: Operation) -> None:
        name = operation.name.partition(".")[0]
        if name in MOVES:
            results = self._move(name, operation)
        else:
            lower: Callable[..., Tensor] | None = getattr(self, f"_lower_{name.rstrip('_')}", None)
            if lower is None:
                raise TraceError(f"unsupported operation {name}")
            results = lower(*operation.arguments, **operation.options)
        outputs = results if isinstance(results, tuple | list) else [results]
        for traced in self._results(operation):
            if traced.output < len(outputs):
                self.addresses[traced] = outputs[traced.output]

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
            return self._of(value) if isinstance(value, Traced) else value

        arguments = addresses(operation.arguments)
        if name in ("view", "_unsafe_view", "_reshape_alias"):
            return arguments[0].reshape(arguments[1])
        if name in ("clone", "alias", "contiguous", "lift_fresh"):
            return arguments[0]
        moved = operation.function(*arguments, **operation.options)
        return self._with_samples(moved) if name in ("cat", "stack") else moved

    def _lower_constant_pad_nd(self, x: Traced, pad: Sequence[int], value: float = 0) -> Tensor:
        if value:
            raise TraceError("padding with other numbers than zero")
        return self._with_samples(torch.nn.functional.pad(self._of(x), list(pad), value=ZERO << VALUE_BITS))

    def _linear(self, x: Traced, weight: Traced, bias: Traced | None) -> Tensor:
        matrix = self._of(weight)
        name, offset = self._whole_weight(matrix.t()), self._of(x)
        if offset.dim() != 2:
            raise TraceError("a product of tensors that are not matrices")
        samples = self._batch(offset)
        if not bool((samples == samples[:, :1]).all()):
            raise TraceError("samples of a batch are mixed")
        inputs, outputs = matrix.shape
        per_sample = len(offset) // BATCH
        parameters = (name, self._parameter(bias))
        if per_sample == 1:
            offset = self._natural(offset)
            value = self._value_of(offset)
            table = (offset[samples[:, 0] == 0][0] & PLACE).tolist()
            result, places = self._new_rows(1, outputs)
            self._add(Node("dense", (value,), result, parameters, (outputs, 0), table=tuple(table)))
        else:
            offset = self._rows(offset)
            value = self._value_of(offset)
            result, places = self._new_rows(per_sample, outputs)
            padded = self._padded(inputs)
            numbers = (inputs, 1, per_sample, 1, per_sample * padded, padded, outputs, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1)
            self._add(Node("convolution", (value,), result, parameters, numbers))
        row = (offset[:, 0] & PLACE) // self._padded(inputs) if per_sample > 1 else torch.zeros(len(offset), dtype=torch.int64)
        return places[samples[:, 0], row]

    def _lower_addmm(self, bias: Traced, x: Traced, weight: Traced, beta: float = 1, alpha: float = 1) -> Tensor:
        if (beta, alpha) != (1, 1):
            raise TraceError("a scaled matrix product")
        return self._linear(x, weight, bias)

    def _lower_mm(self, x: Traced, weight: Traced) -> Tensor:
        return self._linear(x, weight, None)

    def _lower_convolution(
        self,
        x: Traced,
        weight: Traced,
        bias: Traced | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Tensor:
        offset = self._of(x)
        shape = weight.shape
        if transposed or len(shape) not in (3, 4):
            raise TraceError("a transposed or three-dimensional convolution")
        if len(shape) == 3:  # one dimension: a map of one row
            offset = offset.unsqueeze(2)
            stride, padding, dilation = ((given, *values) for given, values in ((1, stride), (0, padding), (1, dilation)))
            shape = (*shape[:2], 1, shape[2])
        if max(stride) > 1 and max(dilation) > 1:
            raise TraceError("a convolution with both stride and dilation")
        outputs, channels, rows, columns = shape[0], *offset.shape[1:]
        depthwise = groups > 1 and groups == channels == outputs
        if groups > 1 and not depthwise:
            raise TraceError("a convolution with groups that are not single channels")
        size = [
            (n + 2 * p - (k - 1) * d - 1) // s + 1
            for n, k, p, s, d in zip((rows, columns), shape[2:], padding, stride, dilation, strict=True)
        ]
        value, steps, natural = self._value_of(offset), self._steps(offset), 0
        if value != 0 or steps is None:
            value, natural = self._value_of(self._channels_last(offset)), 1
            steps = (1, columns * self._padded(channels), self._padded(channels))
        result, places = self._new_rows(size[0] * size[1], outputs)
        numbers = (channels, rows, columns, *steps, outputs, *shape[2:], *padding, *stride, *dilation, 0, natural)
        parameters = (self._parameter(weight), self._parameter(bias))
        self._add(Node("depthwise" if depthwise else "convolution", (value,), result, parameters, numbers))
        maps: Tensor = places.transpose(1, 2).unflatten(2, size)
        return maps if len(weight.shape) == 4 else maps.squeeze(2)

    def _steps(self, addresses: Tensor) -> tuple[int, int, int] | None:
        """The strides of samples x channels x rows x columns, if they begin at place 0."""
        places = addresses[0] & PLACE
        steps = [int(places.select(d, 1).flatten()[0] - places.flatten()[0]) if places.shape[d] > 1 else 0 for d in range(3)]
        grids = [torch.arange(size).view([-1 if d == i else 1 for i in range(3)]) for d, size in enumerate(places.shape)]
        expected = torch.stack([step * grid.expand_as(places) for step, grid in zip(steps, grids, strict=True)]).sum(0)
        same = torch.equal(places, expected) and torch.equal(addresses, addresses[:1] + _samples((BATCH, 1, 1, 1)))
        return (steps[0], steps[1], steps[2]) if same else None

    # Normalisation.

    def _channel_norm(self, x: Traced, names: Sequence[Traced | None], groups: int, reals: tuple[float, float]) -> Tensor:
        rows = self._channels_last(self._of(x))
        result = self._value(rows.shape[1], rows.shape[2])
        parameters = tuple(self._parameter(name) for name in names)
        numbers = (rows.shape[1], rows.shape[2], groups, 0, int(len(parameters) > 2 and parameters[2] is not None))
        self._add(Node("channel_norm", (self._value_of(rows),), result, parameters, numbers, reals))
        return self._like(rows, result).transpose(1, 2).reshape(x.shape)

    def _lower_native_batch_norm(
        self, x: Traced, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
    ) -> list[Tensor]:
        if not training:
            raise TraceError("batch normalisation with fixed statistics")
        return [self._channel_norm(x, (weight, bias, mean, variance), 0, (eps, momentum))]

    def _lower_native_group_norm(
        self, x: Traced, weight: Any, bias: Any, samples: int, channels: int, positions: int, groups: int, eps: float
    ) -> list[Tensor]:
        return [self._channel_norm(x, (weight, bias), groups, (eps, 0.0))]

    def _lower_native_layer_norm(self, x: Traced, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[Tensor]:
        flat = self._of(x).flatten(-len(shape))
        rows = self._rows(flat)
        value, width = self._value_of(rows), flat.shape[-1]
        result = self._value(self.values[value].elements // width, width)
        parameters = (self._parameter(weight), self._parameter(bias))
        numbers = (self.values[value].elements // width, width)
        self._add(Node("row_norm", (value,), result, parameters, numbers, (eps,)))
        return [self._like(rows, result).view(x.shape)]

    def _softmax(self, addresses: Tensor, dimension: int, logarithm: bool = False, causal: int = 0) -> Tensor:
        rows = self._rows(addresses.movedim(dimension, -1))
        value, width = self._value_of(rows), rows.shape[-1]
        count = self.values[value].elements // width
        result = self._value(count, width)
        self._add(Node("softmax", (value,), result, numbers=(count, width, int(logarithm), causal)))
        return self._like(rows, result).movedim(-1, dimension)

    def _lower__log_softmax(self, x: Traced, dimension: int, half: bool) -> Tensor:
        return self._softmax(self._of(x), dimension, True)

    def _lower__softmax(self, x: Traced, dimension: int, half: bool) -> Tensor:
        return self._softmax(self._of(x), dimension)

    def _lower__safe_softmax(self, x: Traced, dimension: int, dtype: Any = None) -> Tensor:
        return self._softmax(self._of(x), dimension)

    # Products of values, attention, embeddings and recurrent layers.

    def _lower_bmm(self, x: Traced, y: Traced) -> Tensor:
        return self._product(self._of(x), self._of(y), 1.0)

    def _product(self, x: Tensor, y: Tensor, factor: float) -> Tensor:
        """Matrices x rows x inner times matrices x inner x columns."""
        first, second = self._matrices(x, True), self._matrices(y, False)
        groups, rows, inner = len(x) // BATCH, *x.shape[1:]
        result, places = self._new_rows(groups * rows, y.shape[2])
        numbers = (groups, rows, y.shape[2], inner, *first[1][:3], *second[1])
        self._add(Node("matrix_product", (first[0], second[0]), result, numbers=numbers, reals=(factor,)))
        self.partly_read |= {first[0], second[0]}  # its gradients are always added
        samples = self._batch(x)[:, 0, 0]
        group = torch.stack([(samples[:i] == samples[i]).sum() for i in range(len(x))])
        by_matrix: Tensor = places.unflatten(1, (groups, rows))
        return by_matrix[samples, group]

    def _matrices(self, addresses: Tensor, contiguous: bool) -> tuple[int, tuple[int, int, int, int]]:
        """The value that matrices are in: the place of the first, and the distances of matrices, rows and columns."""
        for attempt in (addresses, None):
            known = attempt if attempt is not None else self._copied(addresses, addresses.shape[-1])
            samples = self._batch(known)[:, 0, 0]
            if not bool((samples.bincount(minlength=BATCH) == len(known) // BATCH).all()):
                raise TraceError("samples of a batch are mixed")
            value, own = self._value_of(known), known[samples == 0] & PLACE
            steps = [int(own.select(d, 1).flatten()[0] - own.flatten()[0]) if own.shape[d] > 1 else 0 for d in range(3)]
            grids = [torch.arange(size).view([-1 if d == i else 1 for i in range(3)]) for d, size in enumerate(own.shape)]
            expected = own.flatten()[0] + torch.stack(
                [s * grid.expand_as(own) for s, grid in zip(steps, grids, strict=True)]
            ).sum(0)
            alike = all(torch.equal(known[samples == b] & PLACE, own) for b in range(BATCH))
            if value >= 0 and alike and torch.equal(own, expected) and (not contiguous or steps[2] in (0, 1)):
                return value, (int(own.flatten()[0]), *steps)  # type: ignore[return-value]
        raise TraceError("a product of matrices that are not regular")

    def _lower__scaled_dot_product_flash_attention_for_cpu(
        self,
        query: Traced,
        key: Traced,
        value: Traced,
        dropout: float = 0.0,
        causal: bool = False,
        attn_mask: Any = None,
        scale: float | None = None,
    ) -> list[Tensor]:
        if dropout or attn_mask is not None:
            raise TraceError("attention with dropout or a mask")
        q, k, v = (self._of(x).flatten(0, 1) for x in (query, key, value))
        scores = self._product(q, k.transpose(1, 2), scale if scale is not None else query.shape[-1] ** -0.5)
        chances = self._softmax(scores, -1, causal=query.shape[-2] if causal else 0)
        return [self._product(chances, v, 1.0).view(query.shape[:-1] + value.shape[-1:])]

    def _lower_embedding(
        self, weight: Traced, symbols: Traced, padding: int = -1, scale: bool = False, sparse: bool = False
    ) -> Tensor:
        places = self._of(symbols)
        if symbols is not self.network.input:
            raise TraceError("an embedding of something else than the inputs")
        length = math.prod(symbols.shape[1:])
        known, width = weight.shape
        result, addresses = self._new_rows(length, width)
        self._add(Node("embedding", (0,), result, (self._parameter(weight),), (length, width, known, padding)))
        return addresses.view(*places.shape, width)

    def _lower_mkldnn_rnn_layer(
        self,
        x: Traced,
        input_weight: Traced,
        recurrent_weight: Traced,
        input_bias: Any,
        recurrent_bias: Any,
        hidden: Any,
        cell: Any,
        reverse: bool,
        batch_sizes: Sequence[int],
        mode: int,
        units: int,
        layers: int,
        biases: bool,
        bidirectional: bool,
        batch_first: bool,
        train: bool,
    ) -> list[Tensor]:
        zeros = all(isinstance(state, Tensor) and not bool(state.any()) for state in (hidden, cell))
        if reverse or bidirectional or batch_sizes or mode != 2 or not zeros:
            raise TraceError("a recurrent layer that is not a plain LSTM")
        steps = self._channels_last(self._of(x).movedim(1, 0).transpose(1, 2)) if self._value_of(self._of(x)) else None
        if steps is None:
            steps = self._copied(self._of(x).transpose(0, 1), x.shape[2])
        length, inputs = steps.shape[1:]
        result, places = self._new_rows(length, units)
        given = (input_weight, recurrent_weight, input_bias, recurrent_bias)
        parameters = tuple(self._parameter(weight) if biases or i < 2 else None for i, weight in enumerate(given))
        self._add(Node("lstm", (self._value_of(steps),), result, parameters, (length, inputs, units)))
        outputs = places.transpose(0, 1)
        return [outputs, outputs[-1]]

    # Pooling.

    def _pool(self, x: Tensor, rows: list[range], columns: list[range], divisors: list[int]) -> Tensor:
        """Samples x channels x rows x columns; no divisors: the maximum."""
        maps = self._channels_last(x)
        value = self._value_of(maps)
        result, places = self._new_rows(len(rows) * len(columns), x.shape[1])
        numbers = (x.shape[3], x.shape[1], len(rows), len(columns), int(bool(divisors)))
        table = [*(r.start for r in rows), *(r.stop for r in rows), *(c.start for c in columns), *(c.stop for c in columns)]
        self._add(Node("pool", (value,), result, numbers=numbers, table=(*table, *divisors)))
        pooled: Tensor = places.transpose(1, 2).unflatten(2, (len(rows), len(columns)))
        return pooled

    def _lower_max_pool2d_with_indices(
        self,
        x: Traced,
        window: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        ceil: bool = False,
    ) -> list[Tensor]:
        if max(dilation) > 1:
            raise TraceError("max-pooling with dilation")
        maps = _as_maps(self._of(x))
        lines = [_windows(*given, ceil) for given in _by_direction(maps, window, stride or window, padding)]
        return [self._pool(maps, lines[0][0], lines[1][0], []).reshape(self._pooled_shape(x, lines))]

    def _lower_avg_pool2d(
        self,
        x: Traced,
        window: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0, 0),
        ceil: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Tensor:
        maps = _as_maps(self._of(x))
        lines = [_windows(*given, ceil) for given in _by_direction(maps, window, stride or window, padding)]
        (rows, padded_rows), (columns, padded_columns) = lines
        divisors = [
            divisor or (padded_rows[r] * padded_columns[c] if count_include_pad else len(rows[r]) * len(columns[c]))
            for r in range(len(rows))
            for c in range(len(columns))
        ]
        return self._pool(maps, rows, columns, divisors).reshape(self._pooled_shape(x, lines))

    def _pooled_shape(self, x: Traced, lines: Sequence[tuple[list[range], list[int]]]) -> tuple[int, ...]:
        return (*x.shape[:-2], len(lines[0][0]), len(lines[1][0]))

    def _lower__adaptive_avg_pool2d(self, x: Traced, size: Sequence[int]) -> Tensor:
        maps = _as_maps(self._of(x))
        lines = [
            [range(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]
            for n, out in zip(maps.shape[2:], size, strict=True)
        ]
        divisors = [len(r) * len(c) for r in lines[0] for c in lines[1]]
        return self._pool(maps, lines[0], lines[1], divisors).reshape(*x.shape[:-2], *size)

    def _lower_mean(self, x: Traced, dimensions: Sequence[int] | None = None, keep: bool = False, dtype: Any = None) -> Tensor:
        offset = self._of(x)
        if dimensions is None or 0 in (reduced := sorted(d % offset.dim() for d in dimensions)):
            raise TraceError("a mean over samples")
        kept = [d for d in range(1, offset.dim()) if d not in reduced]
        counts = [offset.shape[d] for d in reduced]
        moved = offset.permute(0, *kept, *reduced).reshape(BATCH, math.prod(offset.shape[d] for d in kept), -1, 1)
        positions = math.prod(counts)
        means = self._pool(moved, [range(positions)], [range(1)], [positions])
        shape = [1 if d in reduced else size for d, size in enumerate(offset.shape)]
        return means.reshape(shape if keep else [size for d, size in enumerate(offset.shape) if d not in reduced])

    # Functions of single numbers, sums and products.

    def _function(self, x: Traced, name: str, a: float = 0.0, b: float = 0.0) -> Tensor:
        offset = self._natural(self._of(x))
        source = self._value_of(offset)
        layout = self.values[source]
        self.values.append(replace(layout, gradient=False, sums=False))
        result = len(self.values) - 1
        numbers = (FUNCTIONS.index(name), layout.width, layout.padded_width)
        self._add(Node("elementwise", (source,), result, numbers=numbers, reals=(float(a), float(b))))
        return self._like(offset, result)

    def _lower_relu(self, x: Traced) -> Tensor:
        return self._function(x, "relu")

    def _lower_tanh(self, x: Traced) -> Tensor:
        return self._function(x, "tanh")

    def _lower_sigmoid(self, x: Traced) -> Tensor:
        return self._function(x, "sigmoid")

    def _lower_silu(self, x: Traced) -> Tensor:
        return self._function(x, "silu")

    def _lower_hardswish(self, x: Traced) -> Tensor:
        return self._function(x, "hardswish")

    def _lower_hardsigmoid(self, x: Traced) -> Tensor:
        return self._function(x, "hardsigmoid")

    def _lower_gelu(self, x: Traced, approximate: str = "none") -> Tensor:
        return self._function(x, "gelu_tanh" if approximate == "tanh" else "gelu")

    def _lower_leaky_relu(self, x: Traced, negative_slope: float = 0.01) -> Tensor:
        return self._function(x, "leaky_relu", negative_slope)

    def _lower_elu(self, x: Traced, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
        if (scale, input_scale) != (1, 1):
            raise TraceError("unsupported operation selu")
        return self._function(x, "elu", alpha)

    def _lower_hardtanh(self, x: Traced, low: float = -1.0, high: float = 1.0) -> Tensor:
        if (low, high) != (0, 6):
            raise TraceError("unsupported operation hardtanh")
        return self._function(x, "relu6")

    def _lower_neg(self, x: Traced) -> Tensor:
        return self._function(x, "affine", -1.0)

    def _lower_add(self, x: Any, y: Any, alpha: float = 1) -> Tensor:
        return self._sum(x, y, float(alpha))

    def _lower_sub(self, x: Any, y: Any, alpha: float = 1) -> Tensor:
        return self._sum(x, y, -float(alpha))

    def _lower_rsub(self, x: Any, y: Any, alpha: float = 1) -> Tensor:
        if (number := _number(y)) is None or alpha != 1:
            raise TraceError("unsupported operation rsub")
        return self._function(x, "affine", -1.0, number)

    def _lower_div(self, x: Any, y: Any) -> Tensor:
        if (number := _number(y)) is None:
            raise TraceError("a quotient of tensors")
        return self._function(x, "affine", 1.0 / number)

    def _lower_mul(self, x: Any, y: Any) -> Tensor:
        for tensor, other in ((x, y), (y, x)):
            if (number := _number(other)) is not None:
                return self._function(tensor, "affine", number)
        return self._binary(x, y, 1, 1.0)

    def _sum(self, x: Any, y: Any, factor: float) -> Tensor:
        if (number := _number(y)) is not None:
            return self._function(x, "affine", 1.0, factor * number)
        if (number := _number(x)) is not None:
            return self._function(y, "affine", factor, number)
        return self._binary(x, y, 0, factor)

    def _binary(self, x: Traced, y: Traced, operation: int, factor: float) -> Tensor:
        pair: tuple[Tensor, Tensor] = torch.broadcast_tensors(self._of(x), self._of(y))
        first, second = pair
        if operation == 0 and factor == 1.0:
            for numbers, weight in ((first, y), (second, x)):
                if self._gives_bias(numbers, weight):
                    return numbers
        if not self._is_whole(first) and self._is_whole(second) and (operation == 1 or factor == 1.0):
            first, second = second, first
        first = self._natural(first)
        source = self._value_of(first)
        layout = self.values[source]
        mask = (1 << VALUE_BITS) - 1
        other = self._value_of(second)
        alike = other >= 0 and self.values[other].size == layout.size and torch.equal(first & mask, second & mask)
        if not (alike and self._is_whole(second)):
            self.values.append(replace(layout, gradient=False, sums=False))
            other = len(self.values) - 1
            self._copy(second, first & mask, other)
        self.values.append(replace(layout, gradient=False, sums=False))
        result = len(self.values) - 1
        self._add(Node("binary", (source, other), result, numbers=(operation, 0), reals=(factor,)))
        return self._like(first, result)

    def _gives_bias(self, addresses: Tensor, other: Traced) -> bool:
        """Make a weight the bias of the linear layer that computes these numbers, if it is one without."""
        value, name = self._value_of(addresses), self._weight_name(other)
        writer = self._writer(value) if value > 0 else None
        if not name or writer is None or other.shape != addresses.shape[-1:] or self._readers(value):
            return False
        node = self.nodes[writer]
        if node.type not in ("dense", "convolution") or node.parameters[1] or self.values[value].width != other.shape[0]:
            return False
        column = (addresses & PLACE) % self.values[value].padded_width
        if not bool((column == torch.arange(addresses.shape[-1])).all()):
            return False
        self.nodes[writer] = replace(node, parameters=(node.parameters[0], name))
        return True

    def _lower_dropout(self, x: Traced, layer: str, p: float) -> Tensor:
        offset = self._of(x)
        if not p:
            return offset
        offset = self._natural(offset)
        position = torch.arange(BATCH).view(-1, *[1] * (offset.dim() - 1))
        if len(offset) != BATCH or not bool((_sample(offset) == position).all()):
            raise TraceError("dropout of a tensor whose first dimension is not the batch")
        source = self._value_of(offset)
        layout = self.values[source]
        order = torch.zeros(layout.size, dtype=torch.int64)
        order[offset[0].flatten() & PLACE] = torch.arange(offset[0].numel())
        self.values.append(replace(layout, gradient=False, sums=False))
        result = len(self.values) - 1
        numbers = (self.calls[layer], offset[0].numel())
        self.calls[layer] += 1
        self._add(Node("dropout", (source,), result, numbers=numbers, reals=(p,), table=tuple(order.tolist()), layer=layer))
        return self._like(offset, result)

    def _fuse_relu(self) -> None:
        """Let the node before a ReLU compute it, if nothing else reads its result."""
        for node in [node for node in self.nodes if node.type == "elementwise" and node.numbers[0] == FUNCTIONS.index("relu")]:
            source = node.inputs[0]
            writer = self._writer(source)
            if writer is None or self._readers(source) > 1 or source in self.partly_read:
                continue
            before = self.nodes[writer]
            place = RELU_AT.get(before.type)
            if place is None:
                continue
            numbers = tuple(1 if i == place else number for i, number in enumerate(before.numbers))
            self.nodes[writer] = replace(before, numbers=numbers, output=node.output)
            self.nodes.remove(node)


def _samples(shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(BATCH) << SAMPLE_BITS).view(shape)


def _sample(addresses: Tensor) -> Tensor:
    return (addresses >> SAMPLE_BITS) & 0x7F


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, int | float) else None


def _as_maps(addresses: Tensor) -> Tensor:
    """Samples x channels x rows x columns."""
    if addresses.dim() != 4:
        raise TraceError("pooling of tensors that are not samples x channels x rows x columns")
    return addresses


def _by_direction(
    maps: Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    return [(maps.shape[2 + d], *(given[d if len(given) > 1 else 0] for given in (window, stride, padding))) for d in (0, 1)]  # type: ignore[misc]


def _windows(n: int, window: int, stride: int, padding: int, ceil: bool) -> tuple[list[range], list[int]]:
    """The windows along one direction without padding, and their sizes with it."""
    rest = n + 2 * padding - window
    count = (-(-rest // stride) if ceil else rest // stride) + 1
    if ceil and (count - 1) * stride >= n + padding:
        count -= 1  # no window begins behind the padding
    starts = [i * stride - padding for i in range(count)]
    inside = [range(max(start, 0), min(start + window, n)) for start in starts]
    return inside, [min(start + window, n + padding) - start for start in starts]
