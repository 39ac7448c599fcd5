"""User data before preprocessing: a table of named columns, one tensor, or a dictionary of tensors.

All containers (arrays, frames, data sets, files) become `RawSamples`; `where` names the client and the split in error messages.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedme.datasets.data_errors import DataError

INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
Columns = Mapping[str, np.ndarray]  # numbers (float64, int64) or strings (object), all of one length


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of numbers or strings."""

    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


RawInputs = Table | Tensor | dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class RawSamples:
    """Samples as given by the user; `labels` is None for unlabeled samples."""

    where: str
    inputs: RawInputs
    labels: np.ndarray | None = None
    label_names: tuple[str, ...] = ()  # names of the label columns, if they have any

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values()), ()) if isinstance(self.inputs, dict) else self.inputs)


def checked(raw: RawSamples) -> RawSamples:
    """Raise a DataError for empty data, inconsistent lengths and missing values; return the samples otherwise."""
    count = len(raw)
    if not count:
        raise DataError(f"{raw.where}: there are no samples; add some, or remove it")
    if raw.labels is not None and len(raw.labels) != count:
        raise DataError(f"{raw.where}: {count} samples, but {len(raw.labels)} labels; one label per sample is required")
    for name, values in _named(raw.inputs).items():
        if len(values) != count:
            raise DataError(f"{raw.where}: '{name}' has {len(values)} samples, but others have {count}")
        if (row := _first_missing(values)) is not None:
            place = f"sample {row} (counted from 0)" + (f" in '{name}'" if name else "")
            if isinstance(values, np.ndarray) and values.dtype == object:
                raise DataError(f"{raw.where}: {place} is empty; write a category, such as 'unknown', or remove the sample")
            raise DataError(f"{raw.where}: {place} is NaN, infinite or empty; fill it in, or remove the sample")
    return raw


def _named(inputs: RawInputs) -> dict[str, np.ndarray | Tensor]:
    """All columns or tensors by name; a single tensor has the empty name."""
    if isinstance(inputs, Table):
        return dict(inputs.columns)
    return dict(inputs) if isinstance(inputs, dict) else {"": inputs}


def _first_missing(values: np.ndarray | Tensor) -> int | None:
    """The first sample with a NaN, an infinite value or an empty string."""
    if isinstance(values, Tensor):
        if not values.is_floating_point() or math.isfinite(float(values.sum())):  # a sum is fast
            return None
        finite = torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else torch.isfinite(values)
        return None if bool(finite.all()) else int((~finite).nonzero()[0])
    missing = np.array([value == "" for value in values]) if values.dtype == object else ~np.isfinite(values)
    return int(missing.nonzero()[0][0]) if missing.any() else None


def to_column(values: object) -> np.ndarray:
    """Values as a numeric column if all of them are numbers, else as strings; missing values become NaN or ""."""
    array = np.asarray(values)
    if array.dtype.kind in "fiub":
        return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    items = [None if _is_missing(value) else value for value in array.tolist()]
    if all(isinstance(value, bool | int) and abs(value) < 2**63 for value in items):
        return np.array(items, dtype=np.int64)
    if all(value is None or isinstance(value, bool | int | float) for value in items):
        return np.array([np.nan if value is None else float(value) for value in items], dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in items], dtype=object)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def parse_column(texts: list[str]) -> np.ndarray:
    """A column of a text file: numeric if every entry is a number (true and false are 1 and 0), else strings."""
    booleans = {"true": 1, "false": 0}
    stripped = [text.strip() for text in texts]
    if all(text.lower() in booleans for text in stripped):
        return np.array([booleans[text.lower()] for text in stripped], dtype=np.int64)
    if stripped and all(INTEGER.fullmatch(text) for text in stripped):
        return np.array([int(text) for text in stripped], dtype=np.int64)
    try:
        return np.array([float(text) if text else np.nan for text in stripped], dtype=np.float64)
    except ValueError:
        return np.array(stripped, dtype=object)


def class_names(values: object, where: str) -> np.ndarray:
    """Labels as strings; integers have no decimal point, so that 1, 1.0 and "1" are the same class."""
    labels = np.asarray(values)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{where}: labels have shape {labels.shape}; one class per sample is required")
    if labels.dtype.kind in "biu":
        return np.array([str(int(value)) for value in labels.tolist()], dtype=object)
    names = []
    for row, value in enumerate(labels.tolist()):
        if _is_missing(value) or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{where}: sample {row} (counted from 0) has no label; label it, or use it as unlabeled data")
        if isinstance(value, float):
            if not value.is_integer():
                raise DataError(
                    f"{where}: sample {row} (counted from 0) has the label {value}, which is not a class; use class names, "
                    "such as 'low' and 'high', or set data.task = 'regression'"
                )
            value = int(value)
        names.append(_integer_text(value.strip()) if isinstance(value, str) else str(value))
    return np.array(names, dtype=object)


def _integer_text(text: str) -> str:
    """The text "1" for "1.0"; other texts unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else text
