"""From samples as people have them to what networks take. Agreed once, shared by all clients, saved with every model.

A table's text columns become one column a category (which one it is: 1, the others: 0); then numbers are scaled,
``(raw * factor - mean) / std``. Unlabeled data, guests and newcomers go through the same preparation.
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
from fedme.datasets.raw_samples import Raw, Table

DTYPES = {"float32": torch.float32, "uint8": torch.uint8, "int64": torch.int64}
Kind = Literal["float32", "uint8", "int64"]


@dataclass(frozen=True)
class Form:
    """What one tensor of a sample looks like; bytes are images, whole numbers are symbols."""

    shape: tuple[int, ...]
    dtype: Kind

    @classmethod
    def of(cls, value: Tensor) -> "Form":
        """The form of the samples in a tensor."""
        kind: Kind = "uint8" if value.dtype == torch.uint8 else "float32" if value.is_floating_point() else "int64"
        return cls(tuple(value.shape[1:]), kind)


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers, or text of these categories."""

    name: str
    categories: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Scale:
    """The numbers of a `Scaling`, as plain data; `shape` is that of mean and std."""

    factor: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, scaling: Scaling) -> "Scale":
        """The numbers of `scaling`."""
        mean, std = torch.broadcast_tensors(scaling.mean, scaling.std)
        return cls(scaling.factor, tuple(mean.flatten().tolist()), tuple(std.flatten().tolist()), tuple(mean.shape))

    def scaling(self) -> Scaling:
        """As tensors."""
        return Scaling(self.factor, torch.tensor(self.mean).reshape(self.shape), torch.tensor(self.std).reshape(self.shape))


@dataclass(frozen=True)
class Preparation:
    """How raw samples become the inputs of a network."""

    form: Form | Mapping[str, Form]  # of the numbers before scaling
    columns: tuple[Column, ...] = ()  # of a table, in order
    scale: Scale | None = None
    whole_labels: bool = False  # classes are whole numbers, and are given back as such
    targets: Scale | None = None  # of numbers to predict

    @classmethod
    def of(cls, source: Source) -> "Preparation":
        """What a source does to its samples, as far as it can be said."""
        if not isinstance(source, Arrays):
            first = source.inputs(torch.zeros(1, dtype=torch.int64))
            return cls(_forms(first), whole_labels=False)
        return cls(_forms(source.x), (), Scale.of(source.scaling) if source.scaling else None)

    @classmethod
    def read(cls, plain: Any) -> "Preparation":
        """From plain data, strictly."""
        try:
            mine = {f.name for f in fields(cls)}  # a built-in data set also says how it was read
            found: Preparation = build(cls, {key: plain[key] for key in plain if key in mine}, "preprocessing")
        except TypedError as error:
            raise DataError(f"{error}; the model was saved without a way to prepare samples") from error
        return found

    def numbers(self, raw: Raw) -> Inputs:
        """Raw samples as tensors, not scaled; what does not fit is refused by name."""
        if isinstance(self.form, Mapping):
            return self._dictionary(raw, self.form)
        if self.columns:
            return self._table(raw)
        if isinstance(raw.inputs, Table):  # unnamed features, in the order of the columns
            given: Any = torch.from_numpy(np.stack([_number(raw, n, c) for n, c in raw.inputs.columns.items()], 1))
        else:
            given = raw.inputs
        if isinstance(given, dict):
            raise DataError(f"{raw.where}: has {', '.join(given)}, but one tensor a sample is expected")
        return _fitted(given, self.form, raw.where)

    def __call__(self, raw: Raw) -> Inputs:
        """Raw samples as a network takes them."""
        x = self.numbers(raw)
        return self.scale.scaling()(x) if self.scale is not None and isinstance(x, Tensor) else x

    def plain(self) -> dict[str, Any]:
        """As plain data, which `read` reads."""
        found: dict[str, Any] = {"form": _plain(self.form), "whole_labels": self.whole_labels}
        if self.columns:
            found["columns"] = [_plain(column) for column in self.columns]
        scales = {"scale": self.scale, "targets": self.targets}
        return found | {name: _plain(scale) for name, scale in scales.items() if scale is not None}

    def scaled(self, scaling: Scaling | None) -> "Preparation":
        """The same with another scale."""
        return replace(self, scale=Scale.of(scaling) if scaling is not None else None)

    def standard(self, labels: Tensor) -> Tensor:
        """Numbers to predict with mean 0 and deviation 1, as networks learn them; other labels as they are."""
        if self.targets is None:
            return labels
        scaling = self.targets.scaling()
        return ((labels - scaling.mean.double()) / scaling.std.double()).float()

    def original(self, outputs: Tensor) -> Tensor:
        """The outputs of a network in the unit of what was to be predicted."""
        if self.targets is None:
            return outputs
        scaling = self.targets.scaling()
        return outputs.double() * scaling.std.double() + scaling.mean.double()

    def _dictionary(self, raw: Raw, forms: Mapping[str, Form]) -> dict[str, Tensor]:
        given = raw.inputs
        if not isinstance(given, dict) or given.keys() != forms.keys():
            there = ", ".join(given) if isinstance(given, dict) else "something else"
            raise DataError(f"{raw.where}: expected the inputs {', '.join(forms)}, but there are {there}")
        return {name: _fitted(given[name], form, f"{raw.where}, '{name}'") for name, form in forms.items()}

    def _table(self, raw: Raw) -> Tensor:
        given = raw.inputs
        if isinstance(given, Tensor) and not any(column.categories for column in self.columns):
            assert isinstance(self.form, Form)
            return _fitted(given, self.form, raw.where)
        if not isinstance(given, Table):
            raise DataError(f"{raw.where}: expected a table with the columns {_listed([c.name for c in self.columns])}")
        parts = []
        for column in self.columns:
            if column.name not in given.columns:
                there = _listed(list(given.columns))
                raise DataError(f"{raw.where}: there is no column '{column.name}', which the others have; there are {there}")
            values = given.columns[column.name]
            if column.categories is None:
                parts.append(_number(raw, column.name, values)[:, None])
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


def _forms(x: Inputs) -> Form | Mapping[str, Form]:
    return {name: Form.of(value) for name, value in x.items()} if isinstance(x, Mapping) else Form.of(x)


def _fitted(value: Tensor, form: Form, where: str) -> Tensor:
    if tuple(value.shape[1:]) != form.shape:
        raise DataError(
            f"{where}: samples have the shape {tuple(value.shape[1:])}, expected {form.shape}; bring them to that shape"
        )
    if form.dtype != "float32" and value.is_floating_point() and not bool((value == value.round()).all()):
        raise DataError(f"{where}: samples are fractions, where whole numbers are expected; do not scale them")
    if form.dtype == "uint8" and value.dtype != torch.uint8 and not bool(((value >= 0) & (value <= 255)).all()):
        raise DataError(f"{where}: samples are bytes, from 0 to 255; there is something outside")
    return value.to(DTYPES[form.dtype])


def _number(raw: Raw, name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype == object:
        row = next(i for i, value in enumerate(values) if not _is_number(value))
        raise DataError(f"{raw.where}: column '{name}', sample {row} (from 0): '{values[row]}' is not a number")
    return values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _one_hot(raw: Raw, column: Column, values: np.ndarray) -> np.ndarray:
    assert column.categories is not None
    texts = as_text(values)
    place = {category: i for i, category in enumerate(column.categories)}
    for row, text in enumerate(texts):
        if text not in place:
            known = _listed(list(column.categories))
            raise DataError(f"{raw.where}: column '{column.name}', sample {row} (from 0): '{text}' is none of {known}")
    return np.eye(len(place))[[place[text] for text in texts]]


def as_text(values: np.ndarray) -> list[str]:
    """Entries of a column of categories; whole numbers without a point."""
    if values.dtype == object:
        return [str(value) for value in values]
    return [str(int(value)) if float(value).is_integer() else str(value) for value in values.tolist()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")


def agreed(raws: Sequence[Raw], ignore: Sequence[str] = (), categorical: Sequence[str] = ()) -> tuple[Preparation, list[Raw]]:
    """The preparation that suits all of these, and the samples without the columns to ignore."""
    tables = [raw for raw in raws if isinstance(raw.inputs, Table)]
    if tables and len(tables) < len(raws):
        odd = next(raw for raw in raws if not isinstance(raw.inputs, Table))
        raise DataError(f"{odd.where}: is no table, but {tables[0].where} is; give all clients the same kind of data")
    if tables:
        raws = [_without(raw, ignore) for raw in raws]
        columns = _columns(raws, categorical)
        width = sum(1 if column.categories is None else len(column.categories) for column in columns)
        return Preparation(Form((width,), "float32"), columns), list(raws)
    first = raws[0]
    forms = _forms(first.inputs)
    for raw in raws:
        mine = _forms(raw.inputs)
        if mine == forms:
            continue
        if (
            isinstance(mine, Form)
            and isinstance(forms, Form)
            and mine.shape == forms.shape
            and "int64" in (mine.dtype, forms.dtype)
        ):
            forms = Form(mine.shape, "float32")  # whole numbers here, fractions there: quantities
            continue
        raise DataError(
            f"{raw.where}: samples are {_described(mine)}, but those of {first.where} are {_described(forms)}; make them alike"
        )
    return Preparation(forms), list(raws)


def _described(forms: Form | Mapping[str, Form]) -> str:
    if isinstance(forms, Mapping):
        return "{" + ", ".join(f"{name}: {_described(form)}" for name, form in forms.items()) + "}"
    return f"of shape {forms.shape} ({forms.dtype})"


def _without(raw: Raw, ignore: Sequence[str]) -> Raw:
    assert isinstance(raw.inputs, Table)
    return replace(raw, inputs=Table({name: values for name, values in raw.inputs.columns.items() if name not in ignore}))


def _columns(raws: Sequence[Raw], categorical: Sequence[str]) -> tuple[Column, ...]:
    names = list(_table_of(raws[0]))
    for raw in raws:
        if extra := [name for name in _table_of(raw) if name not in names]:
            raise DataError(
                f"{raw.where}: has a column '{extra[0]}', which {raws[0].where} has not; add it there, or to data.ignore"
            )
        if lacking := [name for name in names if name not in _table_of(raw)]:
            raise DataError(
                f"{raw.where}: there is no column '{lacking[0]}', which {raws[0].where} has; add it, or to data.ignore"
            )
    if not names:
        raise DataError(f"{raws[0].where}: there are no columns to learn from beside the label")
    if unknown := [name for name in categorical if name not in names]:
        raise DataError(f"data.categorical names '{unknown[0]}', but the columns are {_listed(names)}")
    found = []
    for name in names:
        texts = [raw for raw in raws if _table_of(raw)[name].dtype == object]
        if not texts and name not in categorical:
            found.append(Column(name))
            continue
        if texts and len(texts) < len(raws) and name not in categorical:
            odd = next(raw for raw in raws if _table_of(raw)[name].dtype != object)
            raise DataError(
                f"{texts[0].where}: column '{name}' holds text, but numbers in {odd.where}; mend it, or see data.categorical"
            )
        found.append(Column(name, tuple(sorted({text for raw in raws for text in as_text(_table_of(raw)[name])}))))
    return tuple(found)


def _table_of(raw: Raw) -> Mapping[str, np.ndarray]:
    assert isinstance(raw.inputs, Table)
    return raw.inputs.columns


def standardised(x: Tensor) -> Scaling:
    """Mean 0 and deviation 1 of every number of a sample; what never changes is only moved."""
    values = x.double()
    std = values.std(0, correction=0)
    return Scaling(1.0, values.mean(0).float(), torch.where(std > 0, std, 1.0).float())
