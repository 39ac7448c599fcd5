"""Samples given as objects: arrays, tensors, frames, data sets of torch and of Hugging Face, or the path of a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import Label, arrays, label_names, picture, read, take_label
from fedme.datasets.raw_samples import Raw, RawInputs, Table, checked, column

ACCEPTED = "(inputs, labels) as tensors or arrays, a pandas frame, a torch or Hugging Face data set, or the path of a file"
USUAL = ("label", "labels", "y", "target")  # names of the labels where nobody says which it is


def raw(value: Any, label: Label, where: str, labelled: bool = True) -> Raw:
    """What was given, as named columns or tensors."""
    if isinstance(value, str | Path):
        return read(Path(value), label, where, labelled)
    if labelled and _is_pair(value):
        inputs, labels = value
        return checked(Raw(where, _inputs(inputs, where), _labels(labels), _label_columns(labels)))
    if _is_frame(value):
        return _from_columns({str(name): column(value[name].to_numpy()) for name in value.columns}, label, where, labelled)
    if _is_hugging_face(value):
        return _hugging_face(value, label, where, labelled)
    if isinstance(value, Mapping):
        found = {name: np.asarray(_plain(item)) for name, item in value.items()}
        label = _usual(label, found)
        labels = take_label(found, label, where, labelled)
        return checked(Raw(where, arrays(found, where), labels, label_names(label)))
    if isinstance(value, TorchDataset) or (hasattr(value, "__getitem__") and _is_sequence_of_pairs(value, labelled)):
        return _items(value, label, where, labelled)
    if not labelled:
        return checked(Raw(where, _inputs(value, where)))
    raise DataError(f"{where}: {type(value).__name__} is not understood; give {ACCEPTED}")


def _from_columns(found: dict[str, np.ndarray], label: Label, where: str, labelled: bool) -> Raw:
    labels = take_label(found, label, where, labelled)
    return checked(Raw(where, Table(found), labels, label_names(label)))


def _labels(value: Any) -> np.ndarray:
    """Labels alone: one a sample, or a row of them."""
    if _is_frame(value):
        return np.stack([column(value[name].to_numpy()) for name in value.columns], 1)
    return np.asarray(_plain(value))


def _label_columns(value: Any) -> tuple[str, ...]:
    """The names of labels, where they have any."""
    if _is_frame(value):
        return tuple(map(str, value.columns))
    name = getattr(value, "name", None)  # of a series
    return (name,) if isinstance(name, str) else ()


def _usual(label: Label, found: Mapping[str, Any]) -> Label:
    return label if label is not None else next((name for name in USUAL if name in found), None)


def _is_frame(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "columns")


def _is_hugging_face(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "datasets" and hasattr(value, "column_names")


def _is_pair(value: Any) -> bool:
    """Whether it is (inputs, labels): a list of two pairs is two samples."""
    return isinstance(value, tuple | list) and len(value) == 2 and not (isinstance(value, list) and isinstance(value[0], tuple))


def _is_sequence_of_pairs(value: Any, labelled: bool) -> bool:
    return labelled and isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], tuple) and len(value[0]) == 2


def _plain(value: Any) -> Any:
    """Tensors and series as arrays; everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value.to_numpy() if hasattr(value, "to_numpy") else value


def _inputs(value: Any, where: str) -> RawInputs:
    """The inputs alone."""
    if _is_frame(value):
        return Table({str(name): column(value[name].to_numpy()) for name in value.columns})
    if isinstance(value, Mapping):
        return arrays({str(name): np.asarray(_plain(item)) for name, item in value.items()}, where)
    array = np.asarray(_plain(value))
    if array.ndim < 2:
        raise DataError(
            f"{where}: inputs have the shape {array.shape}; the first axis counts samples, so there must be another"
        )
    return arrays({"": array}, where)


def _items(value: Any, label: Label, where: str, labelled: bool) -> Raw:
    """A data set of torch, sample by sample: pairs of input and label, dictionaries, or inputs alone."""
    if not hasattr(value, "__len__"):
        raise DataError(f"{where}: the data set does not know its length; give one with __len__ and __getitem__")
    items = [value[i] for i in range(len(value))]
    if not items:
        raise DataError(f"{where}: there are no samples; give it some, or leave it out")
    if isinstance(items[0], Mapping):
        found = {str(name): _stacked([item[name] for item in items], where) for name in items[0]}
        label = _usual(label, found)
        labels = take_label(found, label, where, labelled)
        return checked(Raw(where, arrays(found, where), labels, label_names(label)))
    pairs = isinstance(items[0], tuple | list) and len(items[0]) == 2
    if labelled and not pairs:
        raise DataError(f"{where}: the data set must give pairs of input and label; it gives a {type(items[0]).__name__}")
    first = [item[0] for item in items] if pairs else items
    given: Any = (
        {name: _stacked([x[name] for x in first], where) for name in first[0]}
        if isinstance(first[0], Mapping)
        else _stacked(first, where)
    )
    labels = _stacked([item[1] for item in items], where) if labelled else None
    return checked(Raw(where, _inputs(given, where), labels))


def _stacked(values: list[Any], where: str) -> np.ndarray:
    """One array of all samples, which must have one shape."""
    each = [picture(v) if hasattr(v, "convert") and hasattr(v, "mode") else np.asarray(_plain(v)) for v in values]
    for row, value in enumerate(each):
        if value.shape != each[0].shape:
            raise DataError(
                f"{where}: sample {row} (from 0) has the shape {value.shape}, the first one {each[0].shape}; "
                "crop, resize or pad them to one shape"
            )
    return np.stack(each)


def _hugging_face(value: Any, label: Label, where: str, labelled: bool) -> Raw:
    """A data set of Hugging Face: its columns; class names are used where it has them."""
    features = value.features
    label = _usual(label, features)
    names = label_names(label)
    labels = None
    if labelled:
        if label is None or any(name not in features for name in names):
            take_label(dict.fromkeys(features, np.zeros(0)), label, where, True)
        each = [_label_column(value, name) for name in names]
        labels = each[0] if isinstance(label, str) else np.stack(each, 1)
    rest = [name for name in features if name not in names]
    plain = value.with_format(None)
    columns = {name: list(plain[name]) for name in rest}
    if not columns:
        raise DataError(f"{where}: there are no inputs beside the labels")
    if not len(value):
        raise DataError(f"{where}: there are no samples; give it some, or leave it out")
    if all(isinstance(values[0], bool | int | float | str | None) for values in columns.values()):
        return checked(Raw(where, Table({name: column(values) for name, values in columns.items()}), labels, names))
    return checked(
        Raw(where, arrays({name: _stacked(values, where) for name, values in columns.items()}, where), labels, names)
    )


def _label_column(value: Any, name: str) -> np.ndarray:
    """One column of labels, by the names of the classes where there are any."""
    classes = getattr(value.features[name], "names", None)
    found = list(value.with_format(None)[name])
    return np.asarray([classes[i] if classes and isinstance(i, int) else i for i in found])
