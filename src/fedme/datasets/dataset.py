"""A data set as it leaves its reader: all samples once, what they look like, and who they belong to, if anybody."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedme.core.data import ClientId, Schema, Source

Owners = Mapping[ClientId, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples in their publisher's division; `train`, `test` and `owners` are row numbers of `source`."""

    name: str
    source: Source
    schema: Schema
    train: Tensor
    test: Tensor  # the publisher's test part; empty when there is none
    owners: Owners | None = None  # the natural clients: rows for training, rows for testing (possibly none)
    overlap: int = 0  # an owner's rows are in time order and each shares data with this many that follow it
