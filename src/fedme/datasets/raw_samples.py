"""People's own samples before they are numbers: a table of named columns, one tensor, or a dictionary of tensors.

Whatever was given (arrays, frames, data sets, files) becomes a `Raw`; `where` names the client and the part in every error.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedme.datasets.data_errors import DataError

WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
Columns = Mapping[str, np.ndarray]  # numbers (float64, int64) or text (object), all of one length


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns: numbers, or text."""

    columns: Columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


RawInputs = Table | Tensor | dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Raw:
    """Samples as they were given; `labels` too, or None."""

    where: str
    inputs: RawInputs
    labels: np.ndarray | None = None
    named: tuple[str, ...] = ()  # the columns that the labels were

    def __len__(self) -> int:
        return samples(self.inputs)


def samples(inputs: RawInputs) -> int:
    """How many there are."""
    return len(next(iter(inputs.values()), ())) if isinstance(inputs, dict) else len(inputs)


def checked(raw: Raw) -> Raw:
    """Refuse what no network can learn from: nothing, parts of different lengths, missing numbers."""
    count = len(raw)
    if not count:
        raise DataError(f"{raw.where}: there are no samples; give it some, or leave it out")
    if raw.labels is not None and len(raw.labels) != count:
        raise DataError(f"{raw.where}: {count} samples, but {len(raw.labels)} labels; give one label a sample")
    for name, values in named(raw.inputs).items():
        if len(values) != count:
            raise DataError(f"{raw.where}: '{name}' has {len(values)} samples where others have {count}")
        if (row := first_missing(values)) is not None:
            part = f" in '{name}'" if name else ""
            text = isinstance(values, np.ndarray) and values.dtype == object
            what = (
                "is empty; write what it is, for example 'unknown',"
                if text
                else "is not a number, infinite or empty; fill it in"
            )
            raise DataError(f"{raw.where}: sample {row} (from 0){part} {what} or leave it out")
    return raw


def named(inputs: RawInputs) -> dict[str, np.ndarray | Tensor]:
    """Every column or tensor with its name; one tensor alone has none."""
    if isinstance(inputs, Table):
        return dict(inputs.columns)
    return dict(inputs) if isinstance(inputs, dict) else {"": inputs}


def first_missing(values: np.ndarray | Tensor) -> int | None:
    """The first sample that is not whole: not a number, infinite, or no text."""
    if isinstance(values, Tensor):
        if not values.is_floating_point():
            return None
        whole = torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else torch.isfinite(values)
        return None if bool(whole.all()) else int((~whole).nonzero()[0])
    missing = np.array([value == "" for value in values]) if values.dtype == object else ~np.isfinite(values)
    return int(missing.nonzero()[0][0]) if missing.any() else None


def column(values: object) -> np.ndarray:
    """A column as numbers if all of it is, else as text; nothing becomes not a number, or no text."""
    given = np.asarray(values)
    if given.dtype.kind in "fiub":
        return given.astype(np.float64 if given.dtype.kind == "f" else np.int64)
    items = [None if _is_nothing(value) else value for value in given.tolist()]
    if all(isinstance(value, bool | int) and abs(value) < 2**63 for value in items):
        return np.array(items, dtype=np.int64)
    if all(value is None or isinstance(value, bool | int | float) for value in items):
        return np.array([np.nan if value is None else float(value) for value in items], dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in items], dtype=object)


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def parsed(texts: list[str]) -> np.ndarray:
    """A column of a text file: numbers if every entry is one (true and false count as 1 and 0), else text."""
    words = {"true": 1, "false": 0}
    stripped = [text.strip() for text in texts]
    if all(text.lower() in words for text in stripped):
        return np.array([words[text.lower()] for text in stripped], dtype=np.int64)
    if stripped and all(WHOLE.fullmatch(text) for text in stripped):
        return np.array([int(text) for text in stripped], dtype=np.int64)
    try:
        return np.array([float(text) if text else np.nan for text in stripped], dtype=np.float64)
    except ValueError:
        return np.array(stripped, dtype=object)


def class_names(values: object, where: str) -> np.ndarray:
    """Labels as text: whole numbers without a point, so that 1, 1.0 and "1" are one class."""
    given = np.asarray(values)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim != 1:
        raise DataError(f"{where}: labels have the shape {given.shape}; give one class a sample")
    if given.dtype.kind in "biu":
        return np.array([str(int(value)) for value in given.tolist()], dtype=object)
    names = []
    for row, value in enumerate(given.tolist()):
        if _is_nothing(value) or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{where}: sample {row} (from 0) has no label; label it, or give it as unlabeled data")
        if isinstance(value, float):
            if not value.is_integer():
                raise DataError(
                    f"{where}: the label of sample {row} (from 0) is {value}, which is no class; name classes, for "
                    "example 'low' and 'high', or say data.task = 'regression'"
                )
            value = int(value)
        names.append(_whole(value.strip()) if isinstance(value, str) else str(value))
    return np.array(names, dtype=object)


def _whole(text: str) -> str:
    """The class 1 where the text is 1.0."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else text
