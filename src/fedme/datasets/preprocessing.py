"""Preprocessing of user data into network inputs: agreed once, shared by all clients, saved with every model.

1. A table becomes a matrix: text columns are one-hot encoded, and a gap in a numeric column is NaN (`to_tensors`). A category
   that is not known is "other": none of the known ones is set.
2. Gaps are filled, with values of the client's own training part unless the experiment gives them; columns with
   ``missing = "indicator"`` get another feature, 1 where there was a gap (`fill`).
3. Numbers are scaled, ``(raw * factor - mean) / std``. Categories and indicators are not: they are 0 or 1. Divided by its
   standard deviation, a category that one row in a thousand has would be 32, far more than any number.

Unlabeled data and unseen clients use the same preprocessing.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedme.core.data import Arrays, Inputs, Scaling, Source
from fedme.core.in_threads import in_threads
from fedme.core.typed import TypedError, build
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import RawSamples, Table
from fedme.datasets.table_columns import (
    EMPTY,
    Column,
    TableRules,
    as_numbers,
    as_text,
    common_columns,
    listed,
    one_hot,
    unusable_rows,
)

CHUNK = 1 << 18  # numbers that are read at a time, so that what is computed from them stays in the processor's cache
CHUNKS = 8  # that are read into the same memory: new memory takes longer than what is computed
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
    rename: Mapping[str, str] = field(default_factory=dict)  # labels in the client's data = labels of the federation
    scale: Scale | None = None
    whole_labels: bool = False  # class names are integers, and predictions are returned as integers
    targets: Scale | None = None  # of regression targets

    @classmethod
    def of(cls, source: Source) -> "Preparation":
        """The preprocessing of a source, as far as it can be described."""
        if not isinstance(source, Arrays):
            return cls(_specs(source.inputs(torch.zeros(1, dtype=torch.int64))))
        return cls(_specs(source.x), scale=Scale.of(source.scaling) if source.scaling else None)

    @classmethod
    def read(cls, plain: Any) -> "Preparation":
        """From plain data; unknown keys are ignored, because built-in data sets add keys of their own."""
        names = {f.name for f in fields(cls)}
        try:
            preparation: Preparation = build(cls, {key: plain[key] for key in plain if key in names}, "preprocessing")
        except TypedError as error:
            raise DataError(f"{error}; the model was saved without its preprocessing") from error
        return preparation

    @property
    def fills(self) -> bool:
        """Whether gaps are filled."""
        return any(column.missing is not None for column in self.columns)

    @property
    def matrix(self) -> TensorSpec:
        """The tensor of one sample before gaps are filled; of a single tensor without columns, its form."""
        assert isinstance(self.form, TensorSpec)
        return TensorSpec((sum(c.width for c in self.columns),), self.form.dtype) if self.columns else self.form

    def numeric_columns(self) -> list[tuple[int, Column]]:
        """The numeric columns, with their positions in the matrix."""
        starts = itertools.accumulate((column.width for column in self.columns), initial=0)
        return [(at, column) for at, column in zip(starts, self.columns, strict=False) if column.categories is None]

    def category_features(self) -> list[int]:
        """The positions of one-hot encoded categories in the matrix."""
        numeric = {at for at, _ in self.numeric_columns()}
        return [at for at in range(sum(column.width for column in self.columns)) if at not in numeric]

    def fill(self, x: Inputs) -> Inputs:
        """Fill the gaps of the matrix, and append the indicators."""
        if not self.fills:
            return x
        gap = x.isnan()
        values = torch.zeros(x.shape[1])
        for at, column in self.numeric_columns():
            values[at] = column.value or 0.0
        indicators = [at for at, column in self.numeric_columns() if column.indicates]
        return torch.cat((torch.where(gap, values, x), gap[:, indicators].to(x.dtype)), 1)

    def with_values(self, train: Tensor, otherwise: Tensor) -> "Preparation":
        """The same with values for gaps: medians or means of training rows, or `otherwise` where there is no value."""
        columns = {column.name: column for column in self.columns}
        for at, column in self.numeric_columns():
            if column.missing is not None and not column.agreed:
                present = train[:, at][~train[:, at].isnan()].double()
                middle = present.mean() if column.missing == "mean" else present.quantile(0.5) if len(present) else present
                value = float(middle) if len(present) else float(otherwise[at])
                columns[column.name] = replace(column, value=value)
        return replace(self, columns=tuple(columns.values()))

    def with_own_values(self) -> "Preparation":
        """The same for another client: without values for gaps that belong to one client, and without its names of labels."""
        columns = tuple(column if column.agreed else replace(column, value=None) for column in self.columns)
        return replace(self, columns=columns, rename={})

    def of_quantities(self) -> "Preparation":
        """The same, with integers taken as quantities instead of symbols."""
        if isinstance(self.form, TensorSpec) and self.form.dtype == "int64":
            return replace(self, form=replace(self.form, dtype="float32"))
        return self

    def unusable(self, raw: RawSamples) -> dict[int, str]:
        """The samples that cannot be used, with the reason."""
        if isinstance(raw.inputs, Tensor) and self.columns and raw.inputs.shape[1:] == self.matrix.shape:
            matrix = raw.inputs.double().numpy()
            raw = replace(raw, inputs=Table({column.name: matrix[:, at] for at, column in self.numeric_columns()}))
        if isinstance(self.form, Mapping) or not isinstance(raw.inputs, Table):
            tensors = raw.inputs if isinstance(raw.inputs, dict) else {"": raw.inputs}
            reasons: dict[int, str] = {}
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    reasons |= dict.fromkeys(_not_finite(tensor), "is NaN or infinite" + (f" in '{name}'" if name else ""))
            return reasons
        columns = self.columns or tuple(Column(name) for name in raw.inputs.columns)
        return {
            row: reason for c in reversed(columns) for row, reason in unusable_rows(c, raw.inputs.columns.get(c.name)).items()
        }

    def unknown_categories(self, raw: RawSamples) -> dict[str, list[str]]:
        """The categories of every column that are not known, and taken as "other"."""
        columns = raw.inputs.columns if isinstance(raw.inputs, Table) else {}
        unknown = {}
        for column in self.columns:
            if column.categories is not None and column.name in columns:
                unknown[column.name] = sorted({*as_text(columns[column.name])} - {*column.categories, ""})
        return {name: other for name, other in unknown.items() if other}

    def _require_usable(self, raw: RawSamples) -> None:
        bad = self.unusable(raw)
        if not bad:
            return
        row, reason = min(bad.items())
        others = f" ({len(bad)} of {len(raw)} samples have such gaps or values)" if len(bad) > 1 else ""
        remedy = "fill it in, or remove the sample"
        if isinstance(raw.inputs, Table) and reason.endswith(EMPTY):
            remedy = 'set data.missing = "median", "mean" or "indicator", for all columns or by column, or remove the sample'
        elif not isinstance(raw.inputs, Table):
            remedy = "fill it in, remove the sample, or give a table (a frame or a CSV file) and set data.missing"
        raise DataError(f"{raw.where}: sample {row} (counted from 0) {reason}{others}; {remedy}")

    def to_tensors(self, raw: RawSamples) -> Inputs:
        """Raw samples as tensors before gaps are filled and before scaling; a DataError names what does not match."""
        if isinstance(raw.inputs, Table) and not isinstance(self.form, Mapping):
            for column in self.columns:
                if column.name not in raw.inputs.columns:
                    present = listed(list(raw.inputs.columns))
                    raise DataError(f"{raw.where}: the column '{column.name}' is missing; the columns are {present}")
        self._require_usable(raw)
        if isinstance(self.form, Mapping):
            return self._dictionary(raw, self.form)
        if self.columns:
            return self._table(raw)
        if isinstance(raw.inputs, Table):  # the model was trained on unnamed features: use the order of the columns
            columns = [as_numbers(values)[0] for values in raw.inputs.columns.values()]
            return _converted(torch.from_numpy(np.stack(columns, 1)), self.form, raw.where)
        if isinstance(raw.inputs, dict):
            raise DataError(f"{raw.where}: one tensor per sample is required, got {', '.join(raw.inputs)}")
        return _converted(raw.inputs, self.form, raw.where)

    def __call__(self, raw: RawSamples) -> Inputs:
        """Raw samples as network inputs."""
        x = self.fill(self.to_tensors(raw))
        return self.scale.scaling()(x) if self.scale is not None and isinstance(x, Tensor) else x

    def plain(self) -> dict[str, Any]:
        """As plain data for `read`."""
        plain: dict[str, Any] = {"form": _plain(self.form), "whole_labels": self.whole_labels}
        if self.columns:
            plain["columns"] = [_plain(column) for column in self.columns]
        if self.rename:
            plain["rename"] = dict(self.rename)
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

    def _table(self, raw: RawSamples) -> Tensor:
        inputs = raw.inputs
        if isinstance(inputs, Tensor) and not any(column.categories for column in self.columns):
            x = _converted(inputs, self.matrix, raw.where)
            stands = [(at, value) for at, column in self.numeric_columns() for value in column.na_values or ()]
            x = x.clone() if stands else x
            for at, value in stands:
                x[:, at] = torch.where(x[:, at] == value, torch.nan, x[:, at])
            return x
        if not isinstance(inputs, Table):
            raise DataError(f"{raw.where}: a table with the columns {listed([c.name for c in self.columns])} is required")
        parts = []
        for column in self.columns:
            values = column.with_gaps(inputs.columns[column.name])
            parts.append(as_numbers(values)[0][:, None] if column.categories is None else one_hot(column, values))
        return torch.from_numpy(np.concatenate(parts, 1).astype(np.float32))


def _not_finite(tensor: Tensor) -> list[int]:
    """The samples with a NaN or an infinite value."""
    if not tensor.is_floating_point() or not len(tensor) or math.isfinite(float(tensor.sum())):  # a sum is fast
        return []
    finite = torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor)
    return (~finite).nonzero().flatten().tolist()


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


def common_preparation(raws: Sequence[RawSamples], rules: TableRules = TableRules()) -> Preparation:
    """The preprocessing that suits all of these samples, without the columns to ignore."""
    first = raws[0]
    tables = [raw for raw in raws if isinstance(raw.inputs, Table)]
    if tables and len(tables) < len(raws):
        other = next(raw for raw in raws if not isinstance(raw.inputs, Table))
        raise DataError(f"{other.where}: not a table, but {tables[0].where} is; all clients need the same type of data")
    if tables:
        columns = common_columns(raws, rules)
        width = sum(column.width + column.indicates for column in columns)
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


def standard_scaling(x: Tensor, rows: Tensor, unscaled: Sequence[int] = (), indicators: int = 0) -> Scaling:
    """Scale every feature to mean 0 and standard deviation 1 over `rows`; constant ones are only shifted, NaN is left out.

    The features at the positions `unscaled` stay as they are, and so do the `indicators`, so many features that follow.
    """
    count = torch.zeros(x.shape[1:], dtype=torch.float64)
    mean, variance = torch.zeros_like(count), torch.zeros_like(count)
    size = max(1, CHUNK // max(1, count.numel()))
    pieces = in_threads(lambda piece: _moments(x, piece.split(size)), rows.split(CHUNKS * size) if len(rows) else ())
    for more, its_mean, its_variance in itertools.chain(*pieces):
        total, gap = (count + more).clamp(min=1.0), its_mean - mean
        variance = (count * variance + more * its_variance) / total + count * more * (gap / total).square()
        mean, count = mean + gap * (more / total), count + more
    std = torch.where(variance > 0, variance.sqrt(), 1.0)
    mean[list(unscaled)], std[list(unscaled)] = 0.0, 1.0
    return Scaling(1.0, _extended(mean, 0.0, indicators).float(), _extended(std, 1.0, indicators).float())


def _moments(x: Tensor, chunks: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every chunk of rows and feature, how many samples have it, their mean and variance: exactly zero if they are equal."""
    raw = np.empty((len(chunks[0]), *x.shape[1:]), x.numpy().dtype)
    numbers, moments = np.empty(raw.shape), []
    for rows in chunks:
        given, above = raw[: len(rows)], numbers[: len(rows)]
        np.take(x.numpy(), rows.numpy(), 0, given, "clip")
        np.subtract(given, given[0], above, dtype=np.float64)
        middle = np.add.reduce(above) / len(rows)
        above -= middle
        above *= above
        mean, variance = (torch.as_tensor(values) for values in (given[0] + middle, np.add.reduce(above) / len(rows)))
        count = torch.full_like(mean, len(rows))
        for at in mean.isnan().nonzero().tolist():
            feature = torch.from_numpy(given)[(slice(None), *at)].double()
            present = feature[~feature.isnan()]
            count[tuple(at)], mean[tuple(at)], variance[tuple(at)] = len(present), 0.0, 0.0
            if len(present):
                variance[tuple(at)], mean[tuple(at)] = torch.var_mean(present, correction=0)
        moments.append((count, mean, variance))
    return moments


def _extended(values: Tensor, value: float, count: int) -> Tensor:
    return torch.cat((values, torch.full((count,), value, dtype=values.dtype))) if count else values
