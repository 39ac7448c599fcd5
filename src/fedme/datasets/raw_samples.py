"""User data before preprocessing: a table of named columns, one tensor, or a dictionary of tensors.

All containers (arrays, frames, data sets, files) become `RawSamples`; `where` names the client and the split in error messages.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedme.datasets.data_errors import DataError

INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
MARKS = {"", "?", "na", "n/a", "nan", "null", "<na>", "#n/a"}  # what programs write for a missing value, in any case
NUMERIC_MARKS = MARKS | {"none", "-", "."}  # among numbers; in a column of text they may be categories
Columns = Mapping[str, np.ndarray]  # numbers (float64, int64) or strings (object), all of one length
BOOLEANS = {"true": "1", "false": "0"}


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

    def take(self, rows: np.ndarray) -> "RawSamples":
        """The samples at these positions."""
        inputs: RawInputs
        if isinstance(self.inputs, Table):
            inputs = Table({name: values[rows] for name, values in self.inputs.columns.items()})
        elif isinstance(self.inputs, dict):
            inputs = {name: values[torch.from_numpy(rows)] for name, values in self.inputs.items()}
        else:
            inputs = self.inputs[torch.from_numpy(rows)]
        return replace(self, inputs=inputs, labels=None if self.labels is None else self.labels[rows])


def checked(raw: RawSamples) -> RawSamples:
    """Raise a DataError for empty data and inconsistent lengths; return the samples otherwise. Gaps are judged later."""
    count = len(raw)
    if not count:
        raise DataError(f"{raw.where}: there are no samples; add some, or remove it")
    if raw.labels is not None and len(raw.labels) != count:
        raise DataError(f"{raw.where}: {count} samples, but {len(raw.labels)} labels; one label per sample is required")
    named = raw.inputs.columns if isinstance(raw.inputs, Table) else raw.inputs if isinstance(raw.inputs, dict) else {}
    for name, values in named.items():
        if len(values) != count:
            raise DataError(f"{raw.where}: '{name}' has {len(values)} samples, but others have {count}")
    return raw


def gaps(values: np.ndarray) -> np.ndarray:
    """Whether each entry of a column is missing."""
    if values.dtype == object:
        return np.array([value == "" for value in values], dtype=bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)


def to_column(values: object) -> np.ndarray:
    """Values as a numeric column if all of them are numbers, else as strings; missing values become NaN or ""."""
    array = np.asarray(values)
    if array.dtype.kind in "fiub":
        return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    items = [None if _is_missing(value) else value for value in array.tolist()]
    marked = [value for value in items if isinstance(value, str) and value.strip().casefold() in MARKS]
    if marked:  # numbers beside a mark such as "?" are numbers, not categories
        items = [None if isinstance(value, str) and value.strip().casefold() in MARKS else value for value in items]
        if (numbers := _numbers(["" if value is None else str(value) for value in items], ".")) is not None:
            return numbers
    if all(isinstance(value, bool | int) and abs(value) < 2**63 for value in items):
        return np.array(items, dtype=np.int64)
    if all(value is None or isinstance(value, bool | int | float) for value in items):
        return np.array([np.nan if value is None else float(value) for value in items], dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in items], dtype=object)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def parse_column(texts: list[str], decimal: str = ".") -> np.ndarray:
    """A column of a text file: numeric if every entry is a number or a mark for a missing value, else strings.

    "true" and "false" are 1 and 0. Missing values become NaN or "". `decimal` is the decimal separator.
    """
    stripped = [text.strip() for text in texts]
    numbers = _numbers(["" if text.casefold() in NUMERIC_MARKS else text for text in stripped], decimal)
    if numbers is not None:
        return numbers
    return np.array(["" if text.casefold() in MARKS else text for text in stripped], dtype=object)


def _numbers(texts: list[str], decimal: str) -> np.ndarray | None:
    """Texts as numbers, with NaN for an empty text; None if one is not a number."""
    booleans = {**BOOLEANS, "": ""}
    if all(text.lower() in booleans for text in texts):
        texts = [booleans[text.lower()] for text in texts]
    if texts and all(INTEGER.fullmatch(text) for text in texts):
        return np.array([int(text) for text in texts], dtype=np.int64)
    try:
        return np.array([float(text.replace(decimal, ".")) if text else np.nan for text in texts], dtype=np.float64)
    except ValueError:
        return None


def class_names(values: object, where: str) -> np.ndarray:
    """Labels as strings; integers have no decimal point, so that 1, 1.0 and "1" are the same class."""
    labels = np.asarray(values)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{where}: labels have shape {labels.shape}; one class per sample is required")
    if labels.dtype.kind in "biu":
        classes, places = np.unique(labels, return_inverse=True)
        return np.array([str(int(value)) for value in classes.tolist()], dtype=object)[places]
    names = []
    for row, value in enumerate(labels.tolist()):
        if _is_no_label(value):
            missing = sum(map(_is_no_label, labels.tolist()))
            others = f" ({missing} of {len(labels)} samples have none)" if missing > 1 else ""
            raise DataError(
                f"{where}: sample {row} (counted from 0) has no label{others}; label it, remove it, or use it as unlabeled data"
            )
        if isinstance(value, float):
            if not value.is_integer():
                raise DataError(
                    f"{where}: sample {row} (counted from 0) has the label {value}, which is not a class; use class names, "
                    "such as 'low' and 'high', or set data.task = 'regression'"
                )
            value = int(value)
        names.append(_integer_text(value.strip()) if isinstance(value, str) else str(value))
    return np.array(names, dtype=object)


def _is_no_label(value: object) -> bool:
    return _is_missing(value) or (isinstance(value, str) and not value.strip())


def _integer_text(text: str) -> str:
    """The text "1" for "1.0"; other texts unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else text


def renamed(raw: RawSamples, names: Mapping[str, str]) -> RawSamples:
    """The samples with other names for these labels."""
    if not names or raw.labels is None:
        return raw
    labels, names = class_names(raw.labels, raw.where), _with_booleans(names)
    return replace(raw, labels=np.array([names.get(label, label) for label in labels], dtype=object))


def require_known_names(raws: Sequence[RawSamples], names: Mapping[str, str]) -> None:
    """Refuse to rename labels none of which a client has: it would have no effect."""
    if names:
        present = dict.fromkeys(label for raw in raws if raw.labels is not None for label in class_names(raw.labels, raw.where))
        if not _with_booleans(names).keys() & present.keys():
            known = ", ".join(map(str, list(present)[:5]))
            raise DataError(f"{raws[0].where}: rename has {', '.join(names)}, but the labels are {known}; correct it")


def _with_booleans(names: Mapping[str, str]) -> Mapping[str, str]:
    """Columns of "true" and "false", in any case, are read as 1 and 0; they can be renamed as they are written."""
    return {BOOLEANS.get(label.lower(), label): name for label, name in names.items()} | dict(names)


def without_column(raw: RawSamples, name: str | None) -> RawSamples:
    """The samples without this column, if they have it."""
    if isinstance(raw.inputs, Table) and name in raw.inputs.columns:
        return replace(raw, inputs=Table({key: values for key, values in raw.inputs.columns.items() if key != name}))
    if isinstance(raw.inputs, dict) and name in raw.inputs:
        rest = {key: values for key, values in raw.inputs.items() if key != name}
        return replace(raw, inputs=next(iter(rest.values())) if len(rest) == 1 else rest)
    return raw


def group_numbers(raws: Sequence[RawSamples], name: str) -> Tensor:
    """The group of every sample, as a number: the values of the column `name`."""
    values: list[object] = []
    for raw in raws:
        columns: Mapping[str, np.ndarray | Tensor] = (
            raw.inputs.columns if isinstance(raw.inputs, Table) else raw.inputs if isinstance(raw.inputs, dict) else {}
        )
        if name not in columns:
            present = ", ".join(columns) or "a single array"
            raise DataError(f"{raw.where}: data.group = '{name}', but there is no such column; there are {present}")
        column = columns[name]
        if (empty := gaps(column if isinstance(column, np.ndarray) else column.numpy())).any():
            row = int(empty.nonzero()[0][0])
            raise DataError(f"{raw.where}: sample {row} (counted from 0) has no '{name}', which data.group names; fill it in")
        values += column.tolist()
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([numbers[value] for value in values])
