"""Deployed federations: every site has its own file on its own machine; the schema of a sample is agreed in advance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedme.core.data import Schema
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require
from fedme.datasets.data_files import read_file
from fedme.datasets.dataset import Dataset
from fedme.datasets.preprocessing import Preparation, Scale, TensorSpec
from fedme.datasets.raw_samples import Table, class_names
from fedme.datasets.table_columns import Column

MAX_NUMBERS = 2**24  # of one sample


@dataclass(frozen=True)
class Sites:
    """Data of deployed sites, for `fedme deploy`: each site reads its own file; the experiment defines only the schema."""

    shape: tuple[int, ...]  # shape of one sample; the columns of a CSV file fill it in order
    classes: tuple[str, ...]  # label space
    scale: float = setting(1.0, "factor by which raw numbers are multiplied")
    unlabeled_file: str | None = setting(None, "a file next to the experiment with unlabeled samples of the server")
    public_file: str | None = setting(None, "a file next to the experiment with labelled samples of the server and all sites")
    public_label: str = setting("y", "array or column with the labels of public_file")
    columns: tuple[str, ...] = setting((), "names of the columns of tables, in order; default: all columns of a file")
    ranges: Mapping[str, tuple[float, float]] = setting(
        help="column = [low, high], the range that a site's values are compared with", default_factory=dict
    )
    missing: Literal["error", "median", "mean"] = setting("error", "gaps in `columns`: error, or of the site's training part")
    fill: Mapping[str, float] = setting(help="column = value for its gaps at every site", default_factory=dict)
    na_values: Mapping[str, tuple[float, ...]] = setting(
        help="column = numbers that stand for a gap, such as 0 or -9", default_factory=dict
    )

    def __post_init__(self) -> None:
        shape = list(self.shape)
        require(bool(shape) and min(shape) >= 1, "shape", f"must be a list of integers >= 1, got {shape}")
        require(math.prod(shape) <= MAX_NUMBERS, "shape", f"must describe at most {MAX_NUMBERS} numbers, got {shape}")
        distinct = len(set(self.classes)) == len(self.classes) >= 2
        require(distinct, "classes", f"must be two or more distinct names, got {', '.join(self.classes)}")
        names = self.columns
        fits = not names or shape == [len(names)] == [len(set(names))]
        require(fits, "columns", f"must name {math.prod(shape)} columns once each, for shape = {shape}, got {len(names)}")
        for option in ("ranges", "fill", "na_values"):
            unknown = next((name for name in getattr(self, option) if name not in names), None)
            require(unknown is None, option, f"'{unknown}' is not in columns, which are {', '.join(names) or 'not given'}")
        require(bool(names) or self.missing == "error", "missing", "needs the names of the columns: set columns")
        filled = self.missing != "error" or not self.fill
        require(filled, "fill", 'gaps are errors: set missing = "median" or "mean" as well')

    @property
    def schema(self) -> Schema:
        """The schema of every sample."""
        return Schema(self.shape, self.classes, self.preparation.plain())

    @property
    def preparation(self) -> Preparation:
        """The preprocessing that the sites agreed on."""
        missing = None if self.missing == "error" else self.missing
        columns = [
            Column(name, None, missing, self.fill.get(name), name in self.fill or None, self.na_values.get(name))
            for name in self.columns
        ]
        return Preparation(TensorSpec(self.shape, "float32"), tuple(columns), scale=Scale(self.scale))

    def with_values(self, x: Tensor, train: Tensor) -> Preparation:
        """The preprocessing of a site: gaps are filled with values of its own training rows where none are agreed."""
        own = self.preparation.with_values(x[train], torch.full(self.shape, torch.nan))
        if empty := [column.name for column in own.columns if column.value != column.value]:
            raise DataError(f"column '{empty[0]}' has no values in the training part of this site; agree on one in data.fill")
        return own

    def range_notes(self, x: Tensor) -> list[str]:
        """A note for every column most of whose values are outside of the agreed range, as in another unit."""
        notes = []
        for at, name in enumerate(self.columns):
            if name in self.ranges:
                (low, high), values = self.ranges[name], x[:, at][~x[:, at].isnan()].double()
                outside = int(((values < low) | (values > high)).sum())
                if 2 * outside > len(values):
                    start, end = values.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
                    notes.append(
                        f"'{name}' is mostly between {start:.4g} and {end:.4g}, but the experiment says {low:g} to {high:g}: "
                        "another unit, or a number that stands for a gap?"
                    )
        return notes

    def read(self, path: Path, label: str | None = None, features: Sequence[str] = ()) -> tuple[Tensor, list[str]]:
        """The samples of a site before scaling, and their class names; without `label` there are none."""
        raw = read_file(path, label, "samples", label is not None, features or self.columns)
        if isinstance(raw.inputs, dict):
            raise DataError(f"{raw.where}: one array besides the label is required, got {', '.join(raw.inputs)}")
        spec = TensorSpec((len(raw.inputs.columns),), "float32") if isinstance(raw.inputs, Table) else TensorSpec.of(raw.inputs)
        renamed = dict(zip(features, self.columns, strict=False)) if features else {}  # a site may have other names
        if self.columns and isinstance(raw.inputs, Table):
            raw = replace(raw, inputs=Table({renamed.get(name, name): v for name, v in raw.inputs.columns.items()}))
        x = (self.preparation if self.columns else Preparation(spec)).to_tensors(raw)
        assert isinstance(x, Tensor)
        if x[0].numel() != math.prod(self.shape):
            expected = f"{math.prod(self.shape)} numbers for shape {list(self.shape)}"
            raise DataError(f"{raw.where}: samples must have {expected}, got {x[0].numel()}")
        names = [] if label is None else class_names(raw.labels, raw.where).tolist()
        return (x if x.dtype == torch.uint8 else x.float()).reshape(-1, *self.shape), names

    def load(self, root: Path) -> Dataset:
        """Raise a DataError, because the data is at the sites."""
        raise DataError("data.name = 'sites': the data is at the sites; use `fedme deploy` instead of `fedme run`")
