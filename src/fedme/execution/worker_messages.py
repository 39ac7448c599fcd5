"""Operations and results as messages between a process and its workers.

Tensors are written to memory that both processes share; those that are small, or do not fit, travel as numpy arrays. Sources
and architectures, which may be anything, do not travel: both sides know them by number since the worker was forked.
"""

import math
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Source, Split
from fedme.core.flat_params import FlatParams, Shapes, flat_layout, flat_params, layout_of
from fedme.core.model import Arch, Model
from fedme.core.operations import ClassSums, EstimateStatistics, Evaluate, Op, Predict, Train, Trained
from fedme.core.tree import Params

SMALL = 4096  # bytes of a tensor up to which an array in the message is as fast
ALIGNMENT = 64  # bytes, as torch aligns its own tensors: vector instructions round differently at the ends otherwise


@dataclass(frozen=True)
class _Tensor:
    """A tensor in shared memory."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Flat:
    """Weights in shared memory, as they are in one tensor (`core/flat_params.py`)."""

    start: int
    shapes: Shapes
    dtype: torch.dtype


class SharedMemory:
    """Memory of a process and one worker, for the tensors of one message at a time. It must exist before the fork."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self.used = 0

    def clear(self) -> None:
        """Begin a new message."""
        self.used = 0

    def write(self, value: Tensor) -> _Tensor | np.ndarray:
        """The tensor as a part of a message."""
        size = value.numel() * value.element_size()
        if size <= SMALL or self.used + size > len(self.bytes):
            array: np.ndarray = value.numpy()
            return array
        place = _Tensor(self.used, tuple(value.shape), value.dtype)
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        self.read(place).copy_(value)
        return place

    def read(self, place: _Tensor) -> Tensor:
        """The tensor of a message, which changes with the next message."""
        size = math.prod(place.shape) * place.dtype.itemsize
        return self.bytes[place.start : place.start + size].view(place.dtype).view(place.shape)

    def write_flat(self, params: Params) -> _Flat | None:
        """Weights as a part of a message, if they can be in one tensor and fit."""
        layout = flat_layout(params)
        if layout is None or layout.size * layout.dtype.itemsize > len(self.bytes) - self.used:
            return None
        place = _Flat(self.used, tuple(layout.shapes.items()), layout.dtype)
        self.used += layout.size * layout.dtype.itemsize
        layout.fill(self.read_flat(place).flat, params)
        return place

    def read_flat(self, place: _Flat) -> FlatParams:
        """The weights of a message, which change with the next message."""
        layout = layout_of(place.shapes, place.dtype)
        return FlatParams(layout, self.read(_Tensor(place.start, (layout.size,), place.dtype)))


def needed_memory(ops: Iterable[Op]) -> int:
    """Bytes that are enough for the tensors of operations, and for their results except predictions."""
    total = 0
    for op in ops:
        total += _tensor_bytes(op.data.rows) + (0 if op.data.targets is None else _tensor_bytes(op.data.targets))
        if isinstance(op, Train):
            weights = sum(_model_bytes(model) for model in op.models.values())
            states = sum(_nbytes(state) for state in op.opt.values())
            total += weights + max(weights, states) + sum(_model_bytes(model) for model in op.frozen.values())
        else:
            total += _model_bytes(op.model)
    return total + total // 32  # what alignment costs tensors that are not small, at most


def _model_bytes(model: Model) -> int:
    return _nbytes(model.params) + _nbytes(model.buffers)


def _nbytes(params: Params) -> int:
    flat = flat_params(params)
    return sum(map(_tensor_bytes, params.values())) if flat is None else flat.layout.size * flat.layout.dtype.itemsize


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class _Model:
    arch: int
    params: Any
    buffers: Any


@dataclass(frozen=True)
class _Split:
    source: int
    rows: Any
    targets: Any


class SharedObjects:
    """The objects that both sides have, by number. They may only grow while there are no workers."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # by identity; the objects are kept, so identities stay valid

    def add_missing(self, ops: Iterable[Op]) -> bool:
        """Add what the operations need; whether anything was missing."""
        count = len(self.objects)
        for op in ops:
            models = [*op.models.values(), *op.frozen.values()] if isinstance(op, Train) else [op.model]
            needed: list[Source | Arch] = [op.data.source, *(model.arch for model in models)]
            for item in needed:
                if id(item) not in self.numbers:
                    self.numbers[id(item)] = len(self.objects)
                    self.objects.append(item)
        return len(self.objects) > count

    def pack(self, values: Sequence[Any], memory: SharedMemory) -> list[Any]:
        """The message of values, whose tensors are in `memory`."""
        memory.clear()
        return [self._pack(value, memory) for value in values]

    def unpack(self, message: Sequence[Any], memory: SharedMemory, copy: bool) -> list[Any]:
        """The values of a message; without a copy they are valid until the next message."""
        return [self._unpack(value, memory, copy) for value in message]

    def _pack(self, value: Any, memory: SharedMemory) -> Any:
        if isinstance(value, Tensor):
            return memory.write(value)
        if isinstance(value, Model):
            number = self.numbers[id(value.arch)]
            params = memory.write_flat(value.params) or self._pack(value.params, memory)
            return _Model(number, params, self._pack(value.buffers, memory))
        if isinstance(value, Split):
            number = self.numbers[id(value.source)]
            return _Split(number, self._pack(value.rows, memory), self._pack(value.targets, memory))
        return _map_fields(value, lambda item: self._pack(item, memory))

    def _unpack(self, value: Any, memory: SharedMemory, copy: bool) -> Any:
        if isinstance(value, _Tensor):
            return memory.read(value).clone() if copy else memory.read(value)
        if isinstance(value, _Flat):
            return memory.read_flat(value).copy() if copy else memory.read_flat(value)
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value).clone()  # in torch's own memory, aligned as if it had been computed here
        if isinstance(value, _Model):
            params, buffers = (self._unpack(part, memory, copy) for part in (value.params, value.buffers))
            return Model(self.objects[value.arch], params, buffers)
        if isinstance(value, _Split):
            rows, targets = (self._unpack(part, memory, copy) for part in (value.rows, value.targets))
            return Split(self.objects[value.source], rows, targets)
        return _map_fields(value, lambda item: self._unpack(item, memory, copy))


def _map_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, Train | Trained | ClassSums | Evaluate | Predict | EstimateStatistics):
        return replace(value, **{field.name: change(getattr(value, field.name)) for field in fields(value)})
    return value
