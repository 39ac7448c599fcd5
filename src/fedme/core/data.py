"""Data: a `Source` holds all samples once, a `Split` is a list of rows of a source, a client has three splits.

Samples are not copied: all clients share one source, and a batch is gathered by row numbers.
"""

import functools
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
        """The targets of all samples; their dtype determines the type of task (`core/task_types.py`)."""
        ...

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Inputs:
        """The inputs of these rows, ready for a network; `augment` seeds the random augmentation used in training."""
        ...


@dataclass(frozen=True)
class Scaling:
    """Scaling of raw inputs: ``(raw * factor - mean) / std``; mean and std broadcast against one sample."""

    factor: float = 1.0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    std: Tensor = field(default_factory=lambda: torch.ones(()))

    def __call__(self, raw: Tensor) -> Tensor:
        return self.in_place(raw.to(torch.float32, copy=True))

    def in_place(self, raw: Tensor) -> Tensor:
        """The same without a copy of numbers that are float32 already."""
        return raw.to(torch.float32).mul_(self.factor).sub_(self.mean).div_(self.std)


@dataclass(frozen=True)
class CropFlip:
    """Random crop after zero padding and a random horizontal flip: the usual augmentation of small images."""

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
    """Samples in one tensor or a dictionary of tensors; small integers can be stored as such and scaled when gathered."""

    x: Inputs
    labels: Tensor
    scaling: Scaling | None = None
    augmentation: CropFlip | None = None

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Inputs:
        if isinstance(self.x, Mapping):
            return {name: value[rows] for name, value in self.x.items()}
        x = self.x[rows]
        # Before scaling, so that the padding is black and not the mean colour.
        x = self.augmentation(x, augment) if self.augmentation and augment else x
        if self.scaling is None:
            return x
        return self.scaling.in_place(x) if rows.dim() else self.scaling(x)  # one number as an index makes no copy


@dataclass(frozen=True, eq=False)
class Windows:
    """Samples of `length` symbols that begin at the positions `starts` of one text of symbols (uint8).

    They may overlap, and a window is cut when a batch is gathered.
    """

    text: Tensor
    starts: Tensor
    labels: Tensor
    length: int

    def inputs(self, rows: Tensor, augment: Key | None = None) -> Tensor:
        """The symbols of these windows as int64, for an embedding; text is never augmented."""
        return self.text[self.starts[rows][:, None] + torch.arange(self.length)].to(torch.int64)


@dataclass(frozen=True)
class Split:
    """Rows of a source. `targets` replaces the labels, for example by averaged logits or another label space."""

    source: Source
    rows: Tensor
    targets: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.numel()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "derived"}

    @functools.cached_property
    def derived(self) -> dict[str, Any]:
        """What others have made of these samples and need in every round; it lives as long as they do."""
        return {}

    @property
    def y(self) -> Tensor:
        """The targets of all samples of the split."""
        if self.targets is not None:
            return self.targets
        if "y" not in self.derived:
            self.derived["y"] = self.source.labels[self.rows]
        return self.derived["y"]  # type: ignore[no-any-return]

    def inputs(self, positions: Tensor | None = None, augment: Key | None = None) -> Inputs:
        """The inputs at these positions of the split; all by default."""
        return self.source.inputs(self.rows if positions is None else self.rows[positions], augment)

    def take(self, positions: Tensor) -> "Split":
        """The samples at these positions, as a split."""
        return Split(self.source, self.rows[positions], None if self.targets is None else self.targets[positions])

    def labelled(self, targets: Tensor) -> "Split":
        """The same inputs with other targets."""
        return replace(self, targets=targets)


def join(splits: list[Split]) -> Split:
    """Concatenated splits of one source."""
    if any(split.source is not splits[0].source or split.targets is not None for split in splits):
        raise ValueError("only splits of one source with its own labels can be pooled")
    return Split(splits[0].source, torch.cat([split.rows for split in splits]))


@dataclass(frozen=True)
class ClientData:
    """The data of one client. Without validation data, `val` is empty."""

    id: ClientId
    train: Split
    val: Split
    test: Split
    public: Split | None = None  # labelled data that all clients have (FedMD)
    preprocessing: Mapping[str, Any] | None = field(default=None, kw_only=True)  # its own, if not that of the schema


@dataclass(frozen=True)
class Schema:
    """The form of samples and targets, the same for all clients and for unlabeled data."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]  # what the outputs of a network stand for: classes, labels, or regression targets
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None  # number of symbols, if inputs are symbols
    task_type: TaskType = "classification"
    unit: tuple[float, ...] = ()  # regression: the size of 1 in the unit of each target
