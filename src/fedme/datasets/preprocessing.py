"""Preprocessing of user data into network inputs: agreed once, shared by all clients, saved with every model.

String columns of a table are one-hot encoded; then numbers are scaled, ``(raw * factor - mean) / std``. Unlabeled data and
unseen clients use the same preprocessing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Arrays, Inputs, Scaling, Source
from fedme.core.typed import TypedError, build
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import Columns, RawSamples, Table

DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64}
DType = Literal["float32", "uint8", "int64"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a sample; uint8 is for images, int64 for symbols."""

    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def of(cls, value: Tensor) -> "TensorSpec":
        """The spec of the samples in a batch."""
        dtype: DType = "uint8" if value.dtype == torch.uint8 else "float32" if value.is_floating_point() else "int64"
        return cls(tuple(value.shape[1:]), dtype)


Specs = TensorSpec | Mapping[str, TensorSpec]


@dataclass(frozen=True)
class Column:
    """A column of a table: numeric, or categorical with these categories."""

    name: str
    categories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Scale:
    """A `Scaling` as plain data; `shape` is the shape of mean and std."""

    factor: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, scaling: Scaling) -> "Scale":
        """Convert a `Scaling`."""
        mean, std = torch.broadcast_tensors(scaling.mean, scaling.std)
        return cls(scaling.factor, tuple(mean.flatten().tolist()), tuple(std.flatten().tolist()), tuple(mean.shape))

    def scaling(self) -> Scaling:
        """Convert back to a `Scaling`."""
        return Scaling(self.factor, torch.tensor(self.mean).reshape(self.shape), torch.tensor(self.std).reshape(self.shape))


@dataclass(frozen=True)
class Preparation:
    """How raw samples become network inputs, and how targets are scaled."""

    form: Specs  # of the tensors before scaling
    columns: tuple[Column, ...] = ()  # of a table, in order
    scale: Scale | None = None
    whole_labels: bool = False  # class names are integers, and predictions are returned as integers
    targets: Scale | None = None  # of regression targets

    @classmethod
    def of(cls, source: Source) -> "Preparation":
        """The preprocessing of a source, as far as it can be described."""
        if not isinstance(source, Arrays):
            return cls(_specs(source.inputs(torch.zeros(1, dtype=torch.int64))))
        return cls(_specs(source.x), (), Scale.of(source.scaling) if source.scaling else None)

    @classmethod
    def read(cls, plain: Any) -> "Preparation":
        """From plain data; unknown keys are ignored, because built-in data sets add keys of their own."""
        names = {f.name for f in fields(cls)}
        try:
            preparation: Preparation = build(cls, {key: plain[key] for key in plain if key in names}, "preprocessing")
        except TypedError as error:
            raise DataError(f"{error}; the model was saved without its preprocessing") from error
        return preparation

    def to_tensors(self, raw: RawSamples) -> Inputs:
        """Raw samples as tensors, before scaling; a DataError names what does not match."""
        if isinstance(self.form, Mapping):
            return self._dictionary(raw, self.form)
        if self.columns:
            return self._table(raw, self.form)
        if isinstance(raw.inputs, Table):  # the model was trained on unnamed features: use the order of the columns
            columns = [_numeric(raw, name, values) for name, values in raw.inputs.columns.items()]
            return _converted(torch.from_numpy(np.stack(columns, 1)), self.form, raw.where)
        if isinstance(raw.inputs, dict):
            raise DataError(f"{raw.where}: one tensor per sample is required, got {', '.join(raw.inputs)}")
        return _converted(raw.inputs, self.form, raw.where)

    def __call__(self, raw: RawSamples) -> Inputs:
        """Raw samples as network inputs."""
        x = self.to_tensors(raw)
        return self.scale.scaling()(x) if self.scale is not None and isinstance(x, Tensor) else x

    def plain(self) -> dict[str, Any]:
        """As plain data for `read`."""
        plain: dict[str, Any] = {"form": _plain(self.form), "whole_labels": self.whole_labels}
        if self.columns:
            plain["columns"] = [_plain(column) for column in self.columns]
        scales = {"scale": self.scale, "targets": self.targets}
        return plain | {name: _plain(scale) for name, scale in scales.items() if scale is not None}

    def with_scaling(self, scaling: Scaling | None) -> "Preparation":
        """The same with another scale."""
        return replace(self, scale=Scale.of(scaling) if scaling is not None else None)

    def scale_targets(self, labels: Tensor) -> Tensor:
        """Regression targets with mean 0 and standard deviation 1; other labels unchanged."""
        if self.targets is None:
            return labels
        scaling = self.targets.scaling()
        return ((labels - scaling.mean.double()) / scaling.std.double()).float()

    def unscale_targets(self, outputs: Tensor) -> Tensor:
        """Regression outputs in the original unit; other outputs unchanged."""
        if self.targets is None:
            return outputs
        scaling = self.targets.scaling()
        return outputs.double() * scaling.std.double() + scaling.mean.double()

    def _dictionary(self, raw: RawSamples, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        inputs = raw.inputs
        if not isinstance(inputs, dict) or inputs.keys() != specs.keys():
            got = ", ".join(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise DataError(f"{raw.where}: inputs must be {', '.join(specs)}, got {got}")
        return {name: _converted(inputs[name], spec, f"{raw.where}, '{name}'") for name, spec in specs.items()}

    def _table(self, raw: RawSamples, spec: TensorSpec) -> Tensor:
        inputs = raw.inputs
        if isinstance(inputs, Tensor) and not any(column.categories for column in self.columns):
            return _converted(inputs, spec, raw.where)
        if not isinstance(inputs, Table):
            raise DataError(f"{raw.where}: a table with the columns {_listed([c.name for c in self.columns])} is required")
        parts = []
        for column in self.columns:
            if column.name not in inputs.columns:
                present = _listed(list(inputs.columns))
                raise DataError(f"{raw.where}: the column '{column.name}' is missing; the columns are {present}")
            values = inputs.columns[column.name]
            if column.categories is None:
                parts.append(_numeric(raw, column.name, values)[:, None])
            else:
                parts.append(_one_hot(raw, column, values))
        return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        pairs = {f.name: getattr(value, f.name) for f in fields(value)}
        return {name: _plain(item) for name, item in pairs.items() if item is not None}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _specs(x: Inputs) -> Specs:
    return {name: TensorSpec.of(value) for name, value in x.items()} if isinstance(x, Mapping) else TensorSpec.of(x)


def _converted(value: Tensor, spec: TensorSpec, where: str) -> Tensor:
    if tuple(value.shape[1:]) != spec.shape:
        raise DataError(f"{where}: samples must have shape {spec.shape}, got {tuple(value.shape[1:])}; reshape them")
    if spec.dtype != "float32" and value.is_floating_point() and not bool((value == value.round()).all()):
        raise DataError(f"{where}: samples must be integers, got fractions; do not scale them")
    if spec.dtype == "uint8" and value.dtype != torch.uint8 and not bool(((value >= 0) & (value <= 255)).all()):
        raise DataError(f"{where}: samples must be between 0 and 255")
    return value.to(DTYPES[spec.dtype])


def _numeric(raw: RawSamples, name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype == object:
        row = next(i for i, value in enumerate(values) if not _is_number(value))
        raise DataError(f"{raw.where}: column '{name}', sample {row} (counted from 0): must be a number, got '{values[row]}'")
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _one_hot(raw: RawSamples, column: Column, values: np.ndarray) -> np.ndarray:
    assert column.categories is not None
    texts = _as_text(values)
    index = {category: i for i, category in enumerate(column.categories)}
    for row, text in enumerate(texts):
        if text not in index:
            place = f"column '{column.name}', sample {row} (counted from 0)"
            raise DataError(f"{raw.where}: {place}: must be one of {_listed(list(column.categories))}, got '{text}'")
    return np.eye(len(index))[[index[text] for text in texts]]


def _as_text(values: np.ndarray) -> list[str]:
    """The categories of a column; integers have no decimal point."""
    if values.dtype == object:
        return [str(value) for value in values]
    return [str(int(value)) if float(value).is_integer() else str(value) for value in values.tolist()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")


def common_preparation(raws: Sequence[RawSamples], ignore: Sequence[str] = (), categorical: Sequence[str] = ()) -> Preparation:
    """The preprocessing that suits all of these samples, without the columns to ignore."""
    first = raws[0]
    tables = [raw for raw in raws if isinstance(raw.inputs, Table)]
    if tables and len(tables) < len(raws):
        other = next(raw for raw in raws if not isinstance(raw.inputs, Table))
        raise DataError(f"{other.where}: not a table, but {tables[0].where} is; all clients need the same type of data")
    if tables:
        columns = _common_columns(raws, ignore, categorical)
        width = sum(1 if column.categories is None else len(column.categories) for column in columns)
        return Preparation(TensorSpec((width,), "float32"), columns)
    common = _specs(first.inputs)
    for raw in raws:
        specs = _specs(raw.inputs)
        if specs == common:
            continue
        if not (
            isinstance(specs, TensorSpec)
            and isinstance(common, TensorSpec)
            and specs.shape == common.shape
            and "int64" in (specs.dtype, common.dtype)
        ):
            raise DataError(
                f"{raw.where}: samples have {_described(specs)}, but those of {first.where} have {_described(common)}; "
                "all clients need the same"
            )
        common = TensorSpec(specs.shape, "float32")  # integers at one client and fractions at another are quantities
    return Preparation(common)


def _described(specs: Specs) -> str:
    if isinstance(specs, Mapping):
        return "{" + ", ".join(f"{name}: {_described(spec)}" for name, spec in specs.items()) + "}"
    return f"shape {specs.shape} ({specs.dtype})"


def _common_columns(raws: Sequence[RawSamples], ignore: Sequence[str], categorical: Sequence[str]) -> tuple[Column, ...]:
    tables = [(raw.where, _columns(raw, ignore)) for raw in raws]
    first, names = raws[0].where, list(tables[0][1])
    for where, table in tables:
        if extra := [name for name in table if name not in names]:
            raise DataError(f"{where}: the column '{extra[0]}' is missing in {first}; add it there, or to data.ignore")
        if missing := [name for name in names if name not in table]:
            raise DataError(f"{where}: the column '{missing[0]}' of {first} is missing; add it, or add it to data.ignore")
    if not names:
        raise DataError(f"{first}: there are no input columns besides the label")
    if unknown := [name for name in categorical if name not in names]:
        raise DataError(f"data.categorical: unknown column '{unknown[0]}'; the columns are {_listed(names)}")
    columns = []
    for name in names:
        texts = [where for where, table in tables if table[name].dtype == object]
        if not texts and name not in categorical:
            columns.append(Column(name))
            continue
        if texts and len(texts) < len(tables) and name not in categorical:
            numeric = next(where for where, table in tables if table[name].dtype != object)
            problem = f"column '{name}' contains text, but numbers in {numeric}"
            raise DataError(f"{texts[0]}: {problem}; correct it, or add it to data.categorical")
        columns.append(Column(name, tuple(sorted({text for _, table in tables for text in _as_text(table[name])}))))
    return tuple(columns)


def _columns(raw: RawSamples, ignore: Sequence[str]) -> Columns:
    assert isinstance(raw.inputs, Table)
    return {name: values for name, values in raw.inputs.columns.items() if name not in ignore}


def standard_scaling(x: Tensor) -> Scaling:
    """Scale every feature to mean 0 and standard deviation 1; constant features are only shifted."""
    values = x.double()
    std = values.std(0, correction=0)
    return Scaling(1.0, values.mean(0).float(), torch.where(std > 0, std, 1.0).float())
