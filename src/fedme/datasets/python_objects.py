"""Samples given as Python objects: arrays, tensors, frames, data sets of torch and Hugging Face, or the path of a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset as TorchDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import Label, image_to_array, label_names, read_file, take_label, to_inputs
from fedme.datasets.raw_samples import RawInputs, RawSamples, Table, checked, to_column

ACCEPTED = (
    "(inputs, labels) as tensors or arrays, a pandas frame, a torch data set or DataLoader, a Hugging Face data set, or the "
    "path of a file"
)
DEFAULT_LABELS = ("label", "labels", "y", "target")  # names of the label column if `label` is not given


def read_object(value: Any, label: Label, where: str, labelled: bool = True) -> RawSamples:
    """Convert any supported object to raw samples; `label` names the label column."""
    if isinstance(value, str | Path):
        return read_file(Path(value), label, where, labelled)
    if labelled and _is_pair(value):
        inputs, labels = value
        return checked(RawSamples(where, _inputs(inputs, where), _labels(labels), _names_of_labels(labels)))
    if _is_frame(value):
        columns = _frame_columns(value)
        frame_labels = take_label(columns, label, where, labelled)
        return checked(RawSamples(where, Table(columns), frame_labels, label_names(label)))
    if _is_hugging_face(value):
        return _hugging_face(value, label, where, labelled)
    if isinstance(value, DataLoader):
        return _torch_dataset(_samples_of_loader(value, where), label, where, labelled)
    if isinstance(value, Mapping):
        return _from_arrays({name: np.asarray(_to_array(item)) for name, item in value.items()}, label, where, labelled)
    if isinstance(value, TorchDataset) or (hasattr(value, "__getitem__") and _is_sequence_of_pairs(value, labelled)):
        return _torch_dataset(value, label, where, labelled)
    if not labelled:
        return checked(RawSamples(where, _inputs(value, where)))
    raise DataError(f"{where}: unsupported type {type(value).__name__}; use {ACCEPTED}")


def _from_arrays(arrays: dict[str, np.ndarray], label: Label, where: str, labelled: bool) -> RawSamples:
    label = _label_or_default(label, arrays)
    labels = take_label(arrays, label, where, labelled)
    return checked(RawSamples(where, to_inputs(arrays, where), labels, label_names(label)))


def _frame_columns(frame: Any) -> dict[str, np.ndarray]:
    return {str(name): to_column(frame[name].to_numpy()) for name in frame.columns}


def _labels(value: Any) -> np.ndarray:
    """One label, or one row of labels, per sample."""
    return np.stack(list(_frame_columns(value).values()), 1) if _is_frame(value) else np.asarray(_to_array(value))


def _names_of_labels(value: Any) -> tuple[str, ...]:
    """The column names of a frame, or the name of a series."""
    if _is_frame(value):
        return tuple(map(str, value.columns))
    name = getattr(value, "name", None)
    return (name,) if isinstance(name, str) else ()


def _label_or_default(label: Label, columns: Mapping[str, Any]) -> Label:
    return label if label is not None else next((name for name in DEFAULT_LABELS if name in columns), None)


def _is_frame(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "columns")


def _is_hugging_face(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "datasets" and hasattr(value, "column_names")


def _is_pair(value: Any) -> bool:
    """Whether the value is (inputs, labels); a list of two pairs is two samples."""
    return isinstance(value, tuple | list) and len(value) == 2 and not (isinstance(value, list) and isinstance(value[0], tuple))


def _is_sequence_of_pairs(value: Any, labelled: bool) -> bool:
    return labelled and isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], tuple) and len(value[0]) == 2


def _to_array(value: Any) -> Any:
    """Tensors and series as arrays; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return value.to_numpy() if hasattr(value, "to_numpy") else value


def _inputs(value: Any, where: str) -> RawInputs:
    if _is_frame(value):
        return Table(_frame_columns(value))
    if isinstance(value, Mapping):
        return to_inputs({str(name): np.asarray(_to_array(item)) for name, item in value.items()}, where)
    array = np.asarray(_to_array(value))
    if array.ndim < 2:
        raise DataError(f"{where}: inputs must have at least 2 dimensions, samples first, got shape {array.shape}")
    return to_inputs({"": array}, where)


def _samples_of_loader(loader: DataLoader[Any], where: str) -> Any:
    """The samples that a loader goes through, in the order of its data set: batches are drawn by the run, not by the loader."""
    rows = None
    if isinstance(loader.sampler, SubsetRandomSampler):
        rows = sorted(int(row) for row in loader.sampler.indices)
    elif isinstance(loader.sampler, RandomSampler) and not loader.sampler.replacement:
        pass
    elif not isinstance(loader.sampler, SequentialSampler):
        raise DataError(f"{where}: a DataLoader with {type(loader.sampler).__name__} may repeat samples; give its data set")
    if type(loader.batch_sampler) is not BatchSampler:
        raise DataError(f"{where}: a DataLoader with its own batch_sampler may repeat samples; give its data set")
    if loader.collate_fn is not default_collate:
        raise DataError(
            f"{where}: a DataLoader with its own collate_fn changes samples by batch; give a data set of its samples"
        )
    return loader.dataset if rows is None else Subset(loader.dataset, rows)


def _torch_dataset(value: Any, label: Label, where: str, labelled: bool) -> RawSamples:
    """A map-style data set of (input, label) pairs, of dictionaries, or of inputs only."""
    if not hasattr(value, "__len__"):
        raise DataError(f"{where}: the data set has no length; use one with __len__ and __getitem__")
    items = [value[i] for i in range(len(value))]
    if not items:
        raise DataError(f"{where}: there are no samples; add some, or remove it")
    if isinstance(items[0], Mapping):
        arrays = {str(name): _stacked([item[name] for item in items], where) for name in items[0]}
        return _from_arrays(arrays, label, where, labelled)
    pairs = isinstance(items[0], tuple | list) and len(items[0]) == 2
    if labelled and not pairs:
        raise DataError(f"{where}: the data set must return (input, label) pairs, got {type(items[0]).__name__}")
    xs = [item[0] for item in items] if pairs else items
    inputs: Any = (
        {name: _stacked([x[name] for x in xs], where) for name in xs[0]} if isinstance(xs[0], Mapping) else _stacked(xs, where)
    )
    labels = _stacked([item[1] for item in items], where) if labelled else None
    return checked(RawSamples(where, _inputs(inputs, where), labels))


def _stacked(values: list[Any], where: str) -> np.ndarray:
    """One array of all samples, which must have the same shape."""
    samples = [image_to_array(v) if hasattr(v, "convert") and hasattr(v, "mode") else np.asarray(_to_array(v)) for v in values]
    for row, sample in enumerate(samples):
        if sample.shape != samples[0].shape:
            raise DataError(
                f"{where}: sample {row} (counted from 0) has shape {sample.shape}, but sample 0 has {samples[0].shape}; "
                "crop, resize or pad them to one shape"
            )
    return np.stack(samples)


def _hugging_face(value: Any, label: Label, where: str, labelled: bool) -> RawSamples:
    """The columns of a Hugging Face data set; labels are class names if it has any."""
    features = value.features
    label = _label_or_default(label, features)
    names = label_names(label)
    labels = None
    if labelled:
        if label is None or any(name not in features for name in names):
            take_label(dict.fromkeys(features, np.zeros(0)), label, where, True)  # raises
        label_columns = [_label_column(value, name) for name in names]
        labels = label_columns[0] if isinstance(label, str) else np.stack(label_columns, 1)
    plain = value.with_format(None)
    columns = {name: list(plain[name]) for name in features if name not in names}
    if not columns:
        raise DataError(f"{where}: there are no inputs besides the labels")
    if not len(value):
        raise DataError(f"{where}: there are no samples; add some, or remove it")
    is_table = all(isinstance(values[0], bool | int | float | str | None) for values in columns.values())
    inputs: RawInputs = (
        Table({name: to_column(values) for name, values in columns.items()})
        if is_table
        else to_inputs({name: _stacked(values, where) for name, values in columns.items()}, where)
    )
    return checked(RawSamples(where, inputs, labels, names))


def _label_column(value: Any, name: str) -> np.ndarray:
    classes = getattr(value.features[name], "names", None)
    labels = list(value.with_format(None)[name])
    return np.asarray([classes[i] if classes and isinstance(i, int) else i for i in labels])
