"""Data as values: a `Source` holds samples once, a `Split` is a list of its rows, a client holds three splits.

Nothing here copies samples: a federation of a thousand clients shares one source, and a batch is gathered by row numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedme.core.key import Key
from fedme.core.task_types import TaskType

ClientId = str
Inputs = Any  # a tensor, or a dictionary of tensors with a common first axis


class Source(Protocol):
    """All samples of a data set, in memory once."""

    @property
    def labels(self) -> Tensor:
        """What is to be predicted of every sample; its type says what that is (`core/task_types.py`)."""
        ...

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Inputs:
        """The inputs of these rows, ready for a network; `augment` asks for the random changes used in training."""
        ...


@dataclass(frozen=True)
class Scaling:
    """How raw numbers become inputs: ``(raw * factor - mean) / std``; mean and std broadcast against one sample."""

    factor: float = 1.0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    std: Tensor = field(default_factory=lambda: torch.ones(()))

    def __call__(self, raw: Tensor) -> Tensor:
        return raw.to(torch.float32, copy=True).mul_(self.factor).sub_(self.mean).div_(self.std)


@dataclass(frozen=True)
class CropFlip:
    """Random crop after zero padding, and a random horizontal flip: the usual augmentation of small photographs."""

    padding: int
    flip: bool = True

    def __call__(self, x: Tensor, key: Key) -> Tensor:
        count, _, height, width = x.shape
        draw = key.torch()
        top = torch.randint(0, 2 * self.padding + 1, (count, 1), generator=draw)
        left = torch.randint(0, 2 * self.padding + 1, (count, 1), generator=draw)
        mirrored = torch.rand((count, 1), generator=draw) < (0.5 if self.flip else 0.0)
        columns = torch.arange(width).expand(count, width)
        columns = torch.where(mirrored, columns.flip(1), columns) + left
        rows = torch.arange(height) + top
        padded = torch.nn.functional.pad(x, (self.padding,) * 4)
        return padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Arrays:
    """Samples held as one tensor (or a dictionary of tensors); integers may be kept small and scaled when gathered."""

    x: Inputs
    labels: Tensor
    scaling: Scaling | None = None
    augmentation: CropFlip | None = None

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Inputs:
        if isinstance(self.x, Mapping):
            return {name: value[rows] for name, value in self.x.items()}
        x = self.x[rows]
        # Before scaling: what is padded is black, not the mean colour.
        x = self.augmentation(x, augment) if self.augmentation and augment else x
        return self.scaling(x) if self.scaling else x


@dataclass(frozen=True)
class Split:
    """Some rows of a source. `targets`, when given, replaces the labels (a consensus to imitate, another label space)."""

    source: Source
    rows: Tensor
    targets: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def y(self) -> Tensor:
        """What is to be predicted, for every sample of the split."""
        return self.source.labels[self.rows] if self.targets is None else self.targets

    def inputs(self, positions: Tensor | None = None, augment: Key | None = None) -> Inputs:
        """The inputs at these positions of the split (all of them by default)."""
        return self.source.inputs(self.rows if positions is None else self.rows[positions], augment)

    def take(self, positions: Tensor) -> "Split":
        """A part of the split."""
        return Split(self.source, self.rows[positions], None if self.targets is None else self.targets[positions])

    def labelled(self, targets: Tensor) -> "Split":
        """The same inputs with other targets."""
        return replace(self, targets=targets)


def join(splits: list[Split]) -> Split:
    """The splits one after another; they must share a source."""
    if any(split.source is not splits[0].source or split.targets is not None for split in splits):
        raise ValueError("only splits of one source with its own labels can be pooled")
    return Split(splits[0].source, torch.cat([split.rows for split in splits]))


@dataclass(frozen=True)
class ClientData:
    """What one client holds. A setting without a validation part has an empty `val`."""

    id: ClientId
    train: Split
    val: Split
    test: Split
    public: Split | None = None  # labelled data that everybody has (FedMD)


@dataclass(frozen=True)
class Schema:
    """What every sample of a task looks like: agreed at the start, the same for all clients and for unlabeled data."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]  # what the outputs of a network stand for: classes, labels, or numbers to predict
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None  # number of symbols, when inputs are symbols instead of numbers
    task_type: TaskType = "classification"
    unit: tuple[float, ...] = ()  # of numbers to predict: how large 1 is in the unit of each
