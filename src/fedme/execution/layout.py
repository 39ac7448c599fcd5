"""Where the numbers of a program are: values in memory, and the addresses of the tensors of a trace.

A tensor of the trace is a tensor of addresses: where each of its numbers is. An address has a value (or a weight), a sample of
the batch and a place. Operations that only move numbers, such as views, permutations and concatenations, are applied to the
addresses and need no node. An operation that computes reads a value as it is, if its numbers have the places that the node
expects, and a copy of it otherwise.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from fedme.execution.program import Node, Value
from fedme.execution.tracing import BATCH, NetworkTrace, Traced, TraceError

VALUE_BITS, SAMPLE_BITS = 40, 32  # of an address: the value from bit 40 on, the sample from bit 32 on, the place below
KNOWN = 1 << 39  # set in addresses of weights and zeros that have a sample
PLACE = (1 << SAMPLE_BITS) - 1
OF_ANY = 0x7F  # the sample of a number that is the same for all of them
ANY = OF_ANY << SAMPLE_BITS
MOST_ALONE = 1024  # numbers that are computed from weights alone, for every sample again
FIRST_WEIGHT = 1 << 20  # values from here on are weights
ZERO = 1 << 21  # the value of a constant zero


class Layout:
    """The values and nodes of a program that is being made."""

    def __init__(self, network: NetworkTrace, lanes: int) -> None:
        self.network, self.lanes = network, lanes
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.weights = list(network.weights)
        self.shapes = dict(network.weights)  # of weights and constants
        self.constants: dict[str, Tensor] = {}
        self.used: dict[str, Tensor] = {}  # of every weight, how often each number is used
        self.calls: Counter[str] = Counter()  # of dropout layers
        self.partly_read: set[int] = set()
        self.addresses: dict[Traced, Tensor] = {}
        features = math.prod(network.input.shape[1:])
        self.new_value(1, features)
        places = torch.arange(features).view(1, *network.input.shape[1:]) + samples_of(
            (BATCH,) + (1,) * (len(network.input.shape) - 1)
        )
        self.addresses[network.input] = places

    def padded(self, width: int) -> int:
        return -(-width // self.lanes) * self.lanes

    def new_value(self, rows: int, width: int, gradient: bool = False) -> int:
        padded = self.padded(width)
        self.values.append(Value(rows * padded, width, padded, rows * width, gradient))
        return len(self.values) - 1

    def addresses_of(self, traced: Any) -> Tensor:
        """The addresses of a tensor of the trace."""
        if isinstance(traced, Tensor):
            return self._constant(traced)
        if not isinstance(traced, Traced):
            raise TraceError(f"a number where a tensor is expected: {traced}")
        if traced.weight and traced not in self.addresses:
            self.addresses[traced] = self._all_of(traced.weight)
        if traced not in self.addresses:
            name = traced.operation.name.partition(".")[0] if traced.operation is not None else "an unknown operation"
            raise TraceError(f"it uses a result of {name} that compiled code does not have")
        return self.addresses[traced]

    def _all_of(self, weight: str) -> Tensor:
        number, shape = FIRST_WEIGHT + self.weights.index(weight), self.shapes[weight]
        return (torch.arange(math.prod(shape)) + (number << VALUE_BITS)).view(shape)

    def _constant(self, tensor: Tensor) -> Tensor:
        """The addresses of a tensor that does not depend on inputs or weights; it is kept like a buffer."""
        if not tensor.is_floating_point():
            if tensor.is_complex() or bool((tensor.long().abs() >= 1 << 24).any()):
                raise TraceError("it computes with constants that single precision does not hold")
            tensor = tensor.float()
        # One that is made for every sample of the batch is made once.
        per_sample = tensor.dim() > 1 and len(tensor) == BATCH and bool((tensor == tensor[:1]).all())
        kept = tensor[:1] if per_sample else tensor
        name = f"constant {len(self.constants)}"
        self.constants[name] = kept.detach().clone()
        self.shapes[name] = tuple(kept.shape)
        self.weights.append(name)
        return self._all_of(name).expand(tensor.shape)

    def weight_name(self, traced: Any) -> str | None:
        return traced.weight if isinstance(traced, Traced) and traced.weight else None

    def in_order(self, addresses: Tensor) -> bool:
        """Whether these are addresses one after another."""
        flat = addresses.flatten()
        return torch.equal(flat, torch.arange(len(flat)) + flat[:1])

    def part_of_weight(self, addresses: Tensor) -> tuple[str, int]:
        """The name of the weight that these addresses are in, one after another, and where they begin."""
        if not addresses.numel():
            raise TraceError("an operation on a tensor without numbers")
        first = int(addresses.flatten()[0])
        number = (first >> VALUE_BITS) - FIRST_WEIGHT
        if not 0 <= number < len(self.weights):
            raise TraceError("a weight is computed from others")
        name = self.weights[number]
        if not self.in_order(addresses):
            raise TraceError(f"the weight {name} is used in another order")
        self.use(name, first & PLACE, addresses.numel())
        return name, first & PLACE

    def use(self, name: str, start: int, count: int) -> None:
        """Note that a part of a weight is used."""
        times = self.used.setdefault(name, torch.zeros(math.prod(self.shapes[name]), dtype=torch.int64))
        times[start : start + count] += 1

    def parameter(self, traced: Any) -> str | None:
        """The name of a weight that is used as a whole."""
        if traced is None:
            return None
        name, start = self.part_of_weight(self.addresses_of(traced))
        if start or math.prod(traced.shape) != math.prod(self.shapes[name]):
            raise TraceError(f"a part of the weight {name} is used")
        return name

    def value_of(self, addresses: Tensor) -> int:
        """The value that all addresses are in; -1 if they are in several, or in a weight."""
        if not addresses.numel():
            raise TraceError("an operation on a tensor without numbers")
        values = addresses >> VALUE_BITS
        first = int(values.flatten()[0])
        return first if 0 <= first < FIRST_WEIGHT and bool((values == first).all()) else -1

    def is_whole(self, addresses: Tensor) -> bool:
        """Whether these are all numbers of one value, each once."""
        value = self.value_of(addresses)
        count = self.values[value].elements * BATCH if value >= 0 else -1
        return addresses.numel() == count and len(addresses.unique()) == count

    def readers(self, value: int) -> int:
        return sum(node.inputs.count(value) for node in self.nodes)

    def writer(self, value: int) -> int | None:
        writers = [index for index, node in enumerate(self.nodes) if node.output == value]
        return writers[0] if len(writers) == 1 else None

    def batch(self, addresses: Tensor) -> Tensor:
        """The sample that each number belongs to. Weights belong to none: there the position in the batch dimension decides."""
        unknown, samples = _of_any_sample(addresses), sample_of(addresses)
        if not bool(unknown.any()):
            return samples
        for dimension, size in enumerate(addresses.shape):
            if size == BATCH:
                position = torch.arange(BATCH).view([-1 if d == dimension else 1 for d in range(addresses.dim())])
                if bool(((samples == position) | unknown).all()):
                    return position.expand_as(addresses)
        raise TraceError("it computes with weights alone" if bool(unknown.all()) else "samples of a batch are mixed")

    def with_samples(self, addresses: Tensor) -> Tensor:
        """The same, with the samples of weights and zeros among numbers of values."""
        constant = (addresses >> VALUE_BITS >= FIRST_WEIGHT) | _of_any_sample(addresses)
        if not bool(constant.any()) or bool(constant.all()):
            return addresses
        return _of_samples(addresses, self.batch(addresses))

    def is_alone(self, addresses: Tensor) -> bool:
        """Whether all numbers are those of weights, or computed from weights alone."""
        return addresses.numel() > 0 and bool(_of_any_sample(addresses).all())

    def every(self, addresses: Tensor) -> Tensor:
        """Such numbers once for every sample, so that they can be computed with."""
        if addresses.numel() > MOST_ALONE:
            raise TraceError(f"it computes with more than {MOST_ALONE} numbers of weights alone")
        repeated = addresses.expand(BATCH, *addresses.shape)
        return _of_samples(repeated, torch.arange(BATCH).view(-1, *[1] * addresses.dim()).expand_as(repeated))

    def add(self, node: Node) -> None:
        if self.network.symbols and 0 in node.inputs and node.type != "embedding":
            raise TraceError("it computes with the symbols of its inputs")
        trained = any(name and not self.is_buffer(name) for name in node.parameters)
        self.values[node.output].gradient |= trained or any(self.values[value].gradient for value in node.inputs)
        self.nodes.append(node)

    def is_buffer(self, name: str) -> bool:
        """Whether this is no weight that is trained, as far as is known here."""
        return name in self.constants or name.rpartition(".")[2] in ("running_mean", "running_var")

    def copy(self, addresses: Tensor, targets: Tensor, value: int) -> Tensor:
        """Copy numbers to the places `targets` (with their samples) of a new value; their new addresses."""
        flat, to = addresses.flatten(), targets.flatten()
        source, sample, place, origin = flat >> VALUE_BITS, sample_of(to), to & PLACE, flat & PLACE
        for number in source.unique().tolist():
            if number == ZERO:
                continue
            tables = []
            for b in range(BATCH):
                chosen = (source == number) & (sample == b)
                own = sample_of(flat)[chosen]
                if number < FIRST_WEIGHT and not bool(((own == b) | (own == OF_ANY)).all()):
                    raise TraceError("samples of a batch are mixed")
                order = place[chosen].argsort()
                tables.append((origin[chosen][order], place[chosen][order]))
            if any(not torch.equal(x, y) for table in tables for x, y in zip(table, tables[0], strict=True)):
                raise TraceError("samples of a batch are treated differently")
            table = (*tables[0][0].tolist(), *tables[0][1].tolist())
            if number >= FIRST_WEIGHT:
                name = self.weights[number - FIRST_WEIGHT]
                count = math.prod(self.shapes[name])
                self.use(name, 0, count)
                self.add(Node("broadcast", (), value, (name,), (count,), table=table))
            else:
                if len(table) // 2 != self.values[number].elements or len(set(table[: len(table) // 2])) < len(table) // 2:
                    self.partly_read.add(number)
                self.add(Node("gather", (number,), value, table=table))
        return targets + (value << VALUE_BITS)

    def copied(self, addresses: Tensor, width: int | None = None) -> Tensor:
        """A copy in a new value: the numbers of a sample in their order, in padded rows of `width` numbers."""
        samples = self.batch(addresses)
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
        padded = self.padded(width)
        targets = rank // width * padded + rank % width + (flat << SAMPLE_BITS)
        return self.copy(addresses, targets.view(addresses.shape), self.new_value(count // width, width))

    def rows(self, addresses: Tensor) -> Tensor:
        """The same numbers, or a copy, in a value that is made of these rows: contiguous, padded and in any order."""
        width, value = addresses.shape[-1], self.value_of(addresses)
        if value >= 0 and self.values[value].padded_width == self.padded(width) and self.values[value].width == width:
            starts = addresses[..., :1]
            contiguous = self.is_whole(addresses) and bool((addresses == starts + torch.arange(width)).all())
            if contiguous and not bool(((starts & PLACE) % self.padded(width)).any()):
                return addresses
        return self.copied(addresses, width)

    def channels_last(self, addresses: Tensor) -> Tensor:
        """Samples x channels x positions as rows of channels, one per position and in that order."""
        rows = addresses.flatten(2).transpose(1, 2) if addresses.dim() > 2 else addresses.unsqueeze(1)
        value = self.value_of(rows)
        if value >= 0 and value != 0 and self.is_whole(rows) and self.values[value].width == rows.shape[2]:
            padded = self.padded(rows.shape[2])
            expected = torch.arange(rows.shape[1]).view(-1, 1) * padded + torch.arange(rows.shape[2])
            if torch.equal(rows, expected + samples_of((BATCH, 1, 1)) + (value << VALUE_BITS)):
                return rows
        return self.copied(rows, rows.shape[2])

    def natural(self, addresses: Tensor) -> Tensor:
        return addresses if self.is_whole(addresses) else self.copied(addresses)

    def like(self, addresses: Tensor, value: int) -> Tensor:
        """The same places in another value."""
        return (addresses & ((1 << VALUE_BITS) - 1)) + (value << VALUE_BITS)

    def new_rows(self, rows: int, width: int) -> tuple[int, Tensor]:
        """A new value of padded rows, and its addresses: samples x rows x width."""
        value = self.new_value(rows, width)
        places = torch.arange(rows).view(-1, 1) * self.padded(width) + torch.arange(width)
        return value, places + samples_of((BATCH, 1, 1)) + (value << VALUE_BITS)


def samples_of(shape: tuple[int, ...]) -> Tensor:
    """The samples of a batch in addresses."""
    return (torch.arange(BATCH) << SAMPLE_BITS).view(shape)


def sample_of(addresses: Tensor) -> Tensor:
    """The sample of every address."""
    return (addresses >> SAMPLE_BITS) & OF_ANY


def of_any(addresses: Tensor) -> Tensor:
    """The numbers of the first sample, where all samples have the same."""
    return addresses[0] | ANY


def _of_any_sample(addresses: Tensor) -> Tensor:
    """Which numbers belong to no sample: those of weights, and what is computed from them alone."""
    of_weights = addresses >> VALUE_BITS >= FIRST_WEIGHT
    return torch.where(of_weights, addresses & KNOWN == 0, addresses & ANY == ANY)


def _of_samples(addresses: Tensor, samples: Tensor) -> Tensor:
    """The same, with samples where there are none."""
    of_weights = addresses >> VALUE_BITS >= FIRST_WEIGHT
    named = torch.where(of_weights, addresses + KNOWN, addresses & ~ANY) + (samples << SAMPLE_BITS)
    return torch.where(_of_any_sample(addresses), named, addresses)
