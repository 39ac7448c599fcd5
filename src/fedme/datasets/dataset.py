"""A data set as it leaves its reader: all samples once, what they look like, and who they belong to, if anybody."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedme.core.data import ClientId, Schema, Source

Owners = Mapping[ClientId, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Kept:
    """Rows that an owner keeps apart for validation and for testing; None: they are cut from its other rows."""

    val: Tensor | None = None
    test: Tensor | None = None

    def __repr__(self) -> str:
        return ", ".join("none" if rows is None else str(len(rows)) for rows in (self.val, self.test))


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
    kept: Mapping[ClientId, Kept] = field(default_factory=dict)  # of owners who cut their rows themselves
    unlabeled: Tensor | None = None  # rows that are the server's from the beginning
    public: Tensor | None = None  # rows that are everybody's from the beginning
    standardise: bool = False  # scale to mean 0 and deviation 1 of the clients' training rows, once these are known
