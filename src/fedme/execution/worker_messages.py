"""Operations and results as messages between a process and its workers.

Tensors travel as numpy arrays. Sources and architectures, which may be anything, do not travel: both sides know them by number
since the worker was forked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Source, Split
from fedme.core.model import Arch, Model
from fedme.core.operations import EstimateStatistics, Evaluate, Op, Predict, Train, Trained


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

    def pack(self, value: Any) -> Any:
        """The message of a value."""
        if isinstance(value, Tensor):
            return value.numpy()
        if isinstance(value, Model):
            return _Model(self.numbers[id(value.arch)], self.pack(value.params), self.pack(value.buffers))
        if isinstance(value, Split):
            return _Split(self.numbers[id(value.source)], self.pack(value.rows), self.pack(value.targets))
        return _map_fields(value, self.pack)

    def unpack(self, value: Any) -> Any:
        """The value of a message."""
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value).clone()  # in torch's own memory, aligned as if it had been computed here
        if isinstance(value, _Model):
            return Model(self.objects[value.arch], self.unpack(value.params), self.unpack(value.buffers))
        if isinstance(value, _Split):
            return Split(self.objects[value.source], self.unpack(value.rows), self.unpack(value.targets))
        return _map_fields(value, self.unpack)


def _map_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, Train | Trained | Evaluate | Predict | EstimateStatistics):
        return replace(value, **{field.name: change(getattr(value, field.name)) for field in fields(value)})
    return value
