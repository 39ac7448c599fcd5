"""What is to be predicted, from labels as people have them: classes, several labels at once, or numbers.

Text and whole numbers are classes; fractions are numbers to predict; a matrix of 0 and 1 is several labels at once, any other
matrix is several numbers. Floats that are all whole could be either, so they are asked about. `task` says what it is.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedme.core.task_types import TaskType, task_type_of
from fedme.core.typed import nearest
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import Raw, class_names

TaskName = Literal["auto", "classification", "multi-label", "regression"]
KNOWN = "the model knows no others"
RANGES = 5  # of numbers, where they are counted


@dataclass(frozen=True, eq=False)
class Targets:
    """What outputs stand for: classes, labels or numbers, by name."""

    kind: TaskType
    names: tuple[str, ...]
    remedy: str = "correct it, or add it to `classes`"  # of a class that is not among them

    @property
    def whole(self) -> bool:
        """Whether the classes are whole numbers, to be given back as such."""
        return self.kind == "classification" and all_whole(self.names)

    def values(self, raw: Raw) -> Tensor:
        """The labels of these samples as a network learns them; numbers are not scaled."""
        if self.kind == "classification":
            return self._classes(raw)
        labels = _columns(raw)
        if labels.shape[1] != len(self.names):
            raise DataError(f"{raw.where}: {_described(labels)}, expected {len(self.names)}: {', '.join(self.names[:10])}")
        numbers = _numbers(raw, labels, self.names)
        if self.kind == "regression":
            return torch.from_numpy(numbers)
        if len(odd := np.argwhere((numbers != 0) & (numbers != 1))):
            row, column = odd[0].tolist()
            said = f"the label '{self.names[column]}' of sample {row} (from 0) is {numbers[row, column]:g}"
            raise DataError(f"{raw.where}: {said}; several labels at once are 0 or 1")
        return torch.from_numpy(numbers == 1)

    def filler(self, count: int) -> Tensor:
        """Labels of samples that have none; nobody looks at them."""
        if self.kind == "classification":
            return torch.full((count,), -1)
        return torch.zeros((count, len(self.names)), dtype=torch.bool if self.kind == "multi-label" else torch.float64)

    def _classes(self, raw: Raw) -> Tensor:
        place = {name: i for i, name in enumerate(self.names)}
        names = class_names(raw.labels, raw.where)
        for row, label in enumerate(names):
            if label not in place:
                raise DataError(
                    f"{raw.where}: sample {row} (from 0) has the class '{label}', which is not among the classes"
                    f"{nearest(str(label), self.names)}; {self.remedy}"
                )
        return torch.tensor([place[str(name)] for name in names], dtype=torch.int64)


def agreed(raws: Sequence[Raw], task: TaskName, names: tuple[str, ...]) -> Targets:
    """What all of these are to be predicted as: what `task` says, else what their labels look like."""
    kind = _kind(raws) if task == "auto" else task
    if kind == "classification":
        for raw in raws:
            if _shape(raw)[1:] not in ((), (1,)):
                raise DataError(f"{raw.where}: {_described(_columns(raw))}; classification needs one class a sample")
        found = {str(label) for raw in raws for label in class_names(raw.labels, raw.where)} if not names else set()
        return Targets(kind, names or (tuple(sorted(found, key=int)) if all_whole(found) else tuple(sorted(found))))
    width = _columns(raws[0]).shape[1]
    own = raws[0].named if len(raws[0].named) == width else ("y",) if width == 1 else tuple(map(str, range(width)))
    if names and len(names) != width:
        raise DataError(f"classes: {len(names)} names, but {raws[0].where} has {width} labels a sample")
    return Targets(kind, names or own)


def _kind(raws: Sequence[Raw]) -> TaskType:
    """What the labels look like, over all clients."""
    widths = {raw.where: _shape(raw)[1:] for raw in raws}
    first = next(iter(widths.values()))
    for where, shape in widths.items():
        if shape != first:
            raise DataError(
                f"{where}: labels have the shape {shape or 'of one number'} a sample, those of {raws[0].where} "
                f"{first or 'of one number'}; make them alike"
            )
    given = [np.asarray(raw.labels) for raw in raws]
    if first not in ((), (1,)):
        return "multi-label" if all(_is_zero_or_one(each) for each in given) else "regression"
    floats = [each for each in given if each.dtype.kind == "f"]
    if any(not _whole(each) for each in floats):
        return "regression"
    if len(floats) == len(given):
        raise DataError(
            f"{raws[0].where}: the labels are whole numbers given as floats ({floats[0].flat[0]}): are they classes, or "
            "numbers to predict? Say data.task = 'classification' or 'regression' (in Python: data={'task': ...}), or give "
            "classes as integers"
        )
    return "classification"


def _shape(raw: Raw) -> tuple[int, ...]:
    shape = np.asarray(raw.labels).shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and not shape[1]):
        raise DataError(f"{raw.where}: labels have the shape {shape}; give one a sample, or a row of them")
    return shape


def _columns(raw: Raw) -> np.ndarray:
    _shape(raw)
    labels = np.asarray(raw.labels)
    return labels[:, None] if labels.ndim == 1 else labels


def _described(labels: np.ndarray) -> str:
    return f"{labels.shape[1]} labels a sample" if labels.shape[1] > 1 else "1 label a sample"


def _is_zero_or_one(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "biuf" and bool(np.isin(labels, (0, 1)).all())


def _whole(labels: np.ndarray) -> bool:
    """Missing ones are somebody else's to refuse."""
    known = labels[np.isfinite(labels)]
    return bool((known == np.round(known)).all())


def _numbers(raw: Raw, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    try:
        numbers = labels.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{raw.where}: the labels hold text ({error}), where numbers are to be predicted") from error
    if len(missing := np.argwhere(~np.isfinite(numbers))):
        row, column = missing[0].tolist()
        raise DataError(
            f"{raw.where}: '{names[column]}' of sample {row} (from 0) is missing, not a number or infinite; fill it in or "
            "leave it out"
        )
    return numbers


def all_whole(names: Sequence[str] | set[str]) -> bool:
    """Whether all names are whole numbers."""
    return all(name.removeprefix("-").isdecimal() and str(int(name)) == name for name in names)


def in_ranges(labels: Tensor, names: Sequence[str], known: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """What is counted of every client: classes and labels as they are, of numbers the ranges of the first one.

    The ranges have about as many of the `known` rows each. Their names, and the range of every sample.
    """
    if task_type_of(labels) != "regression":
        return tuple(names), labels
    first = labels[:, 0].double()
    edges = torch.unique(first[known].quantile(torch.arange(1, RANGES, dtype=torch.float64) / RANGES))
    bounds = [f"{float(f'{edge:.4g}'):.10g}" for edge in edges.tolist()]  # four digits that count, without an exponent
    between = [f"{low} to {high}" for low, high in itertools.pairwise(bounds)]
    return (f"{names[0]} ≤ {bounds[0]}", *between, f"> {bounds[-1]}"), torch.bucketize(first, edges)
