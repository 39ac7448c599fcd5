"""Data that stays where it is: every client has a file of its own on its own machine, and all agree on what a sample is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedme.core.data import Schema
from fedme.datasets import data_files
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset
from fedme.datasets.preprocessing import Form, Preparation, Scale
from fedme.datasets.raw_samples import Table, class_names

MOST_NUMBERS = 2**24  # of one sample


@dataclass(frozen=True)
class Sites:
    """Every client's own file, on its own machine, for `fedme deploy`; here is only what a sample looks like."""

    shape: tuple[int, ...]  # of one sample; the columns of a CSV file fill it in their order
    classes: tuple[str, ...]  # the label space
    scale: float = 1.0  # raw numbers are multiplied by this
    unlabeled_file: str | None = None  # the server's own samples without labels, in a file beside the experiment
    public_file: str | None = None  # labelled samples that server and sites all have, in a file beside the experiment
    public_label: str = "y"  # the array or the column of its labels

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise DataError(f"shape = {list(self.shape)}; it must be one or more positive numbers")
        if math.prod(self.shape) > MOST_NUMBERS:
            raise DataError(f"shape = {list(self.shape)}: a sample of more than {MOST_NUMBERS} numbers")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise DataError("classes: at least two different names are needed")

    @property
    def schema(self) -> Schema:
        """What every sample looks like."""
        preparation = Preparation(Form(self.shape, "float32"), scale=Scale(self.scale))
        return Schema(self.shape, self.classes, preparation.plain())

    def read(self, path: Path, label: str | None = None, features: Sequence[str] = ()) -> tuple[Tensor, list[str]]:
        """The samples of a site's file as they are before scaling, and the class of each; without a `label` there are none."""
        raw = data_files.read(path, label, "samples", label is not None, features)
        if isinstance(raw.inputs, dict):
            raise DataError(f"{raw.where}: has the arrays {', '.join(raw.inputs)} beside the label; there must be one")
        form = Form((len(raw.inputs.columns),), "float32") if isinstance(raw.inputs, Table) else Form.of(raw.inputs)
        x = Preparation(form).numbers(raw)
        assert isinstance(x, Tensor)
        if x[0].numel() != math.prod(self.shape):
            wanted = f"shape {list(self.shape)} needs {math.prod(self.shape)}"
            raise DataError(f"{raw.where}: samples of {x[0].numel()} numbers, where {wanted}")
        names = [] if label is None else class_names(raw.labels, raw.where).tolist()
        return (x if x.dtype == torch.uint8 else x.float()).reshape(-1, *self.shape), names

    def load(self, root: Path) -> Dataset:
        """There is nothing to load here."""
        raise DataError(
            "data.name = 'sites': the data is at the sites, so `fedme deploy` runs this experiment, not `fedme run`"
        )
