"""The output of a data set reader: all samples once, their schema, and the clients they belong to, if any."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor

from fedme.core.data import ClientId, Schema, Source
from fedme.datasets.column_summary import ColumnSummary

ClientRows = Mapping[ClientId, tuple[Tensor, Tensor]]  # training rows and test rows per client


@dataclass(frozen=True, eq=False)
class GivenSplits:
    """The validation and test rows that come with a client; None: they are split off its training rows."""

    val: Tensor | None = None
    test: Tensor | None = None

    def __repr__(self) -> str:
        return ", ".join("none" if rows is None else str(len(rows)) for rows in (self.val, self.test))


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a data set; `train`, `test` and `owners` are row numbers of `source`."""

    name: str
    source: Source
    schema: Schema
    train: Tensor
    test: Tensor  # the published test set; empty if there is none
    owners: ClientRows | None = None  # natural clients; their test rows may be empty
    overlap: int = 0  # rows of an owner are in time order, and each one overlaps with this many rows after it
    given_splits: Mapping[ClientId, GivenSplits] = field(default_factory=dict)
    unlabeled: Tensor | None = None  # rows of the server
    public: Tensor | None = None  # rows that all clients share
    groups: Tensor | None = None  # a number per row; rows with the same number are never in two parts of a client
    renamed: Mapping[ClientId, Mapping[str, str]] = field(default_factory=dict)  # labels that clients call otherwise
    written: Mapping[ClientId, Set[str]] = field(default_factory=dict)  # the classes of clients, to look for two codings of one
    columns: tuple[ColumnSummary, ...] = ()  # of the clients' tables
    notes: tuple[str, ...] = ()  # remarks on the data for its owners
    standardise: bool = False  # scale inputs to mean 0 and standard deviation 1 over the training rows of all clients
