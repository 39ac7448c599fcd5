"""Prediction targets from the labels of user data: classes, several binary labels, or real numbers.

Strings and integers are classes; fractions are regression targets; a matrix of 0 and 1 is multi-label, any other matrix is
regression with several targets. Floats that are all integers are ambiguous and must be resolved by `data.task`.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import ClientId
from fedme.core.task_types import TaskType
from fedme.core.typed import nearest
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import RawSamples, class_names

TaskName = Literal["auto", "classification", "multi-label", "regression"]
NO_OTHER_CLASSES = "the model has no other classes"
MANY_CLASSES = 20  # more integer labels than this, with fewer samples each than the next two, may be quantities
FEW_SAMPLES, FEW_SAMPLES_NUMBERED = 20, 5
BINS = 5  # of regression targets, when their distribution is counted


@dataclass(frozen=True, eq=False)
class Targets:
    """What the outputs of a network stand for: the names of classes, labels or regression targets."""

    task_type: TaskType
    names: tuple[str, ...]
    remedy: str = "correct it, or add it to data.classes"  # for a class that is not in `names`

    @property
    def integer_classes(self) -> bool:
        """Whether the class names are integers, so that predictions are returned as integers."""
        return self.task_type == "classification" and _all_integers(self.names)

    def encode(self, raw: RawSamples) -> Tensor:
        """The labels as a tensor; regression targets are not scaled."""
        if self.task_type == "classification":
            return self._class_indices(raw)
        labels = _matrix(raw)
        if labels.shape[1] != len(self.names):
            names = ", ".join(self.names[:10])
            raise DataError(f"{raw.where}: {len(self.names)} labels per sample are required ({names}), got {labels.shape[1]}")
        numbers = _numbers(raw, labels, self.names)
        if self.task_type == "regression":
            return torch.from_numpy(numbers)
        if len(wrong := np.argwhere((numbers != 0) & (numbers != 1))):
            row, column = wrong[0].tolist()
            place = f"label '{self.names[column]}' of sample {row} (counted from 0)"
            raise DataError(f"{raw.where}: {place} must be 0 or 1 for multi-label tasks, got {numbers[row, column]:g}")
        return torch.from_numpy(numbers == 1)

    def placeholder(self, count: int) -> Tensor:
        """Labels of unlabeled samples, which are never used."""
        if self.task_type == "classification":
            return torch.full((count,), -1)
        return torch.zeros((count, len(self.names)), dtype=torch.bool if self.task_type == "multi-label" else torch.float64)

    def _class_indices(self, raw: RawSamples) -> Tensor:
        index = {name: i for i, name in enumerate(self.names)}
        names = class_names(raw.labels, raw.where)
        for row, label in enumerate(names):
            if label not in index:
                raise DataError(
                    f"{raw.where}: sample {row} (counted from 0) has the unknown class '{label}'"
                    f"{nearest(str(label), self.names)}; {self.remedy}"
                )
        return torch.tensor([index[str(name)] for name in names], dtype=torch.int64)


def common_targets(raws: Sequence[RawSamples], task: TaskName, names: tuple[str, ...]) -> Targets:
    """The targets of all samples; `task` = "auto" infers the task type from the labels."""
    task_type = _inferred_task_type(raws) if task == "auto" else task
    if task_type == "classification":
        for raw in raws:
            if (shape := _label_shape(raw)) not in ((), (1,)):
                raise DataError(f"{raw.where}: classification needs one label per sample, got {shape[0]}")
        classes = {str(label) for raw in raws for label in class_names(raw.labels, raw.where)} if not names else set()
        return Targets(task_type, names or tuple(sorted(classes, key=int if _all_integers(classes) else None)))
    width = _matrix(raws[0]).shape[1]
    if names and len(names) != width:
        raise DataError(f"data.classes: {width} names are required, one per label of {raws[0].where}, got {len(names)}")
    label_names = raws[0].label_names
    default = label_names if len(label_names) == width else ("y",) if width == 1 else tuple(map(str, range(width)))
    return Targets(task_type, names or default)


def labels_written(raws: Sequence[RawSamples]) -> Set[str]:
    """The classes of a client, as it writes them."""
    return {str(name) for raw in raws for name in class_names(raw.labels, raw.where)}


def coding_notes(sets: Mapping[ClientId, Set[str]]) -> tuple[str, ...]:
    """Compare how clients write classes: an error where one class has two names, a note where a client shares none.

    The same class under two names would silently be two classes. Clients that predict different things are not to be compared.
    """
    spelled: dict[str, tuple[ClientId, str]] = {}
    for client, labels in sets.items():
        for label in sorted(labels):
            other, before = spelled.setdefault(label.casefold(), (client, label))
            if before != label:
                if other == client:
                    problem = f"client {client} has the labels {before} and {label}"
                else:
                    problem = f"{other} {_braces(sets[other])} and {client} {_braces(labels)} write a label in two ways"
                also = [name for name, of_name in sets.items() if _spelled_otherwise(of_name, spelled) and name != client]
                raise DataError(f"{problem}: one coding? {_remedy(client, label, before, also)}")
    numeric = {client: _all_integers(labels) for client, labels in sets.items()}
    if len({*numeric.values()}) == 2:
        one, other = (next(client for client in sets if numeric[client] is kind) for kind in (True, False))
        if not sets[one] & sets[other]:
            problem = f"{one} {_braces(sets[one])} and {other} {_braces(sets[other])} share no label"
            also = [client for client in sets if numeric[client] and client != one]
            raise DataError(f"{problem}: one coding? {_remedy(one, min(sets[one]), min(sets[other]), also)}")
    notes = []
    for client, labels in sets.items():
        others = set().union(*(sets[other] for other in sets if other != client))
        if len(sets) > 1 and not numeric[client] and not labels & others:
            other = next(name for name in sets if name != client)
            problem = f"{client} {_braces(labels)} and {other} {_braces(sets[other])} share no label"
            notes.append(f"{problem}: one coding? If so, {_remedy(client, min(labels), min(sets[other])).partition(';')[0]}")
    return (*notes, *_counted_from_two_numbers(sets))


def _counted_from_two_numbers(sets: Mapping[ClientId, Set[str]]) -> list[str]:
    """A note if clients have equally many consecutive integers, but some begin one higher than the others."""
    if len(sets) < 2 or not all(_all_integers(labels) and len(labels) > 1 for labels in sets.values()):
        return []
    numbers = {client: sorted(map(int, labels)) for client, labels in sets.items()}
    lowest = min(own[0] for own in numbers.values())
    length = len(next(iter(numbers.values())))
    ranges = [list(range(first, first + length)) for first in (lowest, lowest + 1)]
    if any(own not in ranges for own in numbers.values()):
        return []
    low, *_ = (client for client, own in numbers.items() if own == ranges[0])
    high = [client for client, own in numbers.items() if own == ranges[1]]
    if not high:
        return []
    problem = f"{low} {_braces(sets[low])} and {high[0]} {_braces(sets[high[0]])} may count the same classes from two numbers"
    return [f"{problem}. If so, {_remedy(high[0], str(lowest + 1), str(lowest), high[1:]).partition(';')[0]}"]


def _braces(labels: Set[str]) -> str:
    ordered = sorted(labels, key=int if _all_integers(labels) else None)
    return "{" + ", ".join(ordered[:5]) + (", ...}" if len(ordered) > 5 else "}")


def _spelled_otherwise(labels: Set[str], spelled: Mapping[str, tuple[ClientId, str]]) -> bool:
    return any(label.casefold() in spelled and spelled[label.casefold()][1] != label for label in labels)


def _remedy(client: ClientId, label: str, name: str, others: Sequence[ClientId] = ()) -> str:
    also = f", likewise for {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}" if others else ""
    table = f"clients.{client}.rename" if client.isidentifier() else f'clients."{client}".rename'
    return (
        f'set {table} = {{ "{label}" = "{name}", ... }} (in Python: fedme.Client(..., rename={{...}})){also}; '
        "if they are different classes, list all of them in data.classes"
    )


def _inferred_task_type(raws: Sequence[RawSamples]) -> TaskType:
    first = _label_shape(raws[0])
    for raw in raws:
        if (shape := _label_shape(raw)) != first:
            raise DataError(
                f"{raw.where}: labels have shape {shape} per sample, but those of {raws[0].where} have {first}; "
                "all clients need the same"
            )
    labels = [np.asarray(raw.labels) for raw in raws]
    if first not in ((), (1,)):
        return "multi-label" if all(_is_binary(values) for values in labels) else "regression"
    floats = [values for values in labels if values.dtype.kind == "f"]
    if any(not _is_integral(values) for values in floats):
        return "regression"
    if len(floats) == len(labels):
        raise DataError(
            f"{raws[0].where}: the labels are integers stored as floats ({floats[0].flat[0]}), which may be classes or "
            "regression targets; set data.task = 'classification' or 'regression' (in Python: data={'task': ...}), or convert "
            "classes to integers"
        )
    _require_few_classes(raws)
    return "classification"


def _require_few_classes(raws: Sequence[RawSamples]) -> None:
    """Ask for the task type if integers may well be quantities: many different ones with few samples each."""
    if any(np.asarray(raw.labels).dtype.kind not in "iu" for raw in raws):
        return
    labels = np.concatenate([np.asarray(raw.labels).ravel() for raw in raws])
    values = np.unique(labels)
    samples = len(labels) / len(values)  # of a class
    numbered = values[0] in (0, 1) and values[-1] - values[0] == len(values) - 1  # 0, 1, 2, ... are numbers of classes
    if len(values) > MANY_CLASSES and samples < (FEW_SAMPLES_NUMBERED if numbered else FEW_SAMPLES):
        name = f"'{raws[0].label_names[0]}' has" if raws[0].label_names else "the labels have"
        raise DataError(
            f"{name} {len(values)} different integers from {values[0]} to {values[-1]}, with {samples:.1f} samples each: "
            "classes or quantities? Set data.task = 'regression' or 'classification' (in Python: data={'task': ...})"
        )


def _label_shape(raw: RawSamples) -> tuple[int, ...]:
    """The shape of the labels of one sample: () or (labels,)."""
    shape = np.asarray(raw.labels).shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and not shape[1]):
        raise DataError(f"{raw.where}: labels have shape {shape}; one label, or one row of labels, per sample is required")
    return shape[1:]


def _matrix(raw: RawSamples) -> np.ndarray:
    labels = np.asarray(raw.labels)
    return labels if _label_shape(raw) else labels[:, None]


def _is_binary(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "biuf" and bool(np.isin(labels, (0, 1)).all())


def _is_integral(labels: np.ndarray) -> bool:
    """Whether all values are integers; missing values are reported later."""
    finite = labels[np.isfinite(labels)]
    return bool((finite == np.round(finite)).all())


def _numbers(raw: RawSamples, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    try:
        numbers = labels.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{raw.where}: labels must be numbers, got text ({error})") from error
    if len(missing := np.argwhere(~np.isfinite(numbers))):
        row, column = missing[0].tolist()
        place = f"label '{names[column]}' of sample {row} (counted from 0)"
        count = len(set(missing[:, 0].tolist()))
        others = f" ({count} of {len(raw)} samples have such labels)" if count > 1 else ""
        raise DataError(f"{raw.where}: {place} is missing, NaN or infinite{others}; fill it in, or remove the sample")
    return numbers


def _all_integers(names: Collection[str]) -> bool:
    return all(name.removeprefix("-").isdecimal() and str(int(name)) == name for name in names)


def binned_targets(values: Tensor, names: Sequence[str], counted: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Bin the first regression target: the names of the bins, and the bin of every sample.

    The bins are quantiles over the `counted` rows.
    """
    first = values[:, 0].double()
    edges = torch.unique(first[counted].quantile(torch.arange(1, BINS, dtype=torch.float64) / BINS))
    bounds = [f"{float(f'{edge:.4g}'):.10g}" for edge in edges.tolist()]  # four significant digits, without an exponent
    between = [f"{low} to {high}" for low, high in itertools.pairwise(bounds)]
    return (f"{names[0]} ≤ {bounds[0]}", *between, f"> {bounds[-1]}"), torch.bucketize(first, edges)
