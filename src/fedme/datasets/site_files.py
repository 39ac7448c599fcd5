"""Deployed federations: every site has its own file on its own machine; the schema of a sample is agreed in advance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedme.core.data import Schema
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require
from fedme.datasets.data_files import read_file
from fedme.datasets.dataset import Dataset
from fedme.datasets.preprocessing import Preparation, Scale, TensorSpec
from fedme.datasets.raw_samples import Table, class_names

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

    def __post_init__(self) -> None:
        shape = list(self.shape)
        require(bool(shape) and min(shape) >= 1, "shape", f"must be a list of integers >= 1, got {shape}")
        require(math.prod(shape) <= MAX_NUMBERS, "shape", f"must describe at most {MAX_NUMBERS} numbers, got {shape}")
        distinct = len(set(self.classes)) == len(self.classes) >= 2
        require(distinct, "classes", f"must be two or more distinct names, got {', '.join(self.classes)}")

    @property
    def schema(self) -> Schema:
        """The schema of every sample."""
        preparation = Preparation(TensorSpec(self.shape, "float32"), scale=Scale(self.scale))
        return Schema(self.shape, self.classes, preparation.plain())

    def read(self, path: Path, label: str | None = None, features: Sequence[str] = ()) -> tuple[Tensor, list[str]]:
        """The samples of a site before scaling, and their class names; without `label` there are none."""
        raw = read_file(path, label, "samples", label is not None, features)
        if isinstance(raw.inputs, dict):
            raise DataError(f"{raw.where}: one array besides the label is required, got {', '.join(raw.inputs)}")
        spec = TensorSpec((len(raw.inputs.columns),), "float32") if isinstance(raw.inputs, Table) else TensorSpec.of(raw.inputs)
        x = Preparation(spec).to_tensors(raw)
        assert isinstance(x, Tensor)
        if x[0].numel() != math.prod(self.shape):
            expected = f"{math.prod(self.shape)} numbers for shape {list(self.shape)}"
            raise DataError(f"{raw.where}: samples must have {expected}, got {x[0].numel()}")
        names = [] if label is None else class_names(raw.labels, raw.where).tolist()
        return (x if x.dtype == torch.uint8 else x.float()).reshape(-1, *self.shape), names

    def load(self, root: Path) -> Dataset:
        """Raise a DataError, because the data is at the sites."""
        raise DataError("data.name = 'sites': the data is at the sites; use `fedme deploy` instead of `fedme run`")
