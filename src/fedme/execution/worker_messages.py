"""Operations and results on their way between a process and its workers.

Numbers travel as plain arrays; data and architectures, which may be anything and are never copied, by the number that both
sides have known them by since the worker was forked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Source, Split
from fedme.core.model import Arch, Model
from fedme.core.operations import Evaluate, Op, Predict, Train, Trained


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


class Shared:
    """What both sides have: objects by number. It may only grow while there are no workers."""

    def __init__(self) -> None:
        self.things: list[Source | Arch] = []
        self.numbers: dict[int, int] = {}  # by identity; the objects are kept, so identities stay theirs

    def lacks(self, ops: Iterable[Op]) -> bool:
        """Whether the operations need anything that is not shared yet; it is noted, for the workers to come."""
        count = len(self.things)
        for op in ops:
            models = [*op.models.values(), *op.frozen.values()] if isinstance(op, Train) else [op.model]
            things: list[Source | Arch] = [op.data.source, *(model.arch for model in models)]
            for thing in things:
                if id(thing) not in self.numbers:
                    self.numbers[id(thing)] = len(self.things)
                    self.things.append(thing)
        return len(self.things) > count

    def packed(self, value: Any) -> Any:
        """A value as it travels."""
        if isinstance(value, Tensor):
            return value.numpy()
        if isinstance(value, Model):
            return _Model(self.numbers[id(value.arch)], self.packed(value.params), self.packed(value.buffers))
        if isinstance(value, Split):
            return _Split(self.numbers[id(value.source)], self.packed(value.rows), self.packed(value.targets))
        return self._inside(value, self.packed)

    def unpacked(self, value: Any) -> Any:
        """The value again."""
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value).clone()  # memory of torch's own, as if it had been computed here
        if isinstance(value, _Model):
            return Model(self.things[value.arch], self.unpacked(value.params), self.unpacked(value.buffers))  # type: ignore[arg-type]
        if isinstance(value, _Split):
            return Split(self.things[value.source], self.unpacked(value.rows), self.unpacked(value.targets))  # type: ignore[arg-type]
        return self._inside(value, self.unpacked)

    def _inside(self, value: Any, change: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: change(item) for key, item in value.items()}
        if isinstance(value, Train | Trained | Evaluate | Predict):
            return replace(value, **{field.name: change(getattr(value, field.name)) for field in fields(value)})
        return value
