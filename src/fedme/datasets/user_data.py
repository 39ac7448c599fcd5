"""User data as a data set: every client has its own samples; all clients share the preprocessing and the label space.

`FileDataset` reads one file per client (the tables ``[clients.NAME]`` of an experiment); `ObjectDataset` is passed in Python.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core.data import Arrays, ClientId, Inputs, Scaling, Schema
from fedme.core.in_threads import in_threads
from fedme.core.settings import setting
from fedme.datasets.column_summary import ColumnSummary, range_notes, summarise
from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import Label, read_file
from fedme.datasets.dataset import Dataset, GivenSplits
from fedme.datasets.preprocessing import Preparation, TensorSpec, common_preparation
from fedme.datasets.raw_samples import RawSamples, group_numbers, renamed, require_known_names, without_column
from fedme.datasets.table_columns import Missing, TableRules
from fedme.datasets.targets import NO_OTHER_CLASSES, Targets, TaskName, common_targets, labels_written

HASHED = 1 << 20  # numbers that a thread hashes at a time; another size would change fingerprints
MIN_SAMPLES = 2  # of a client: one for training and one for testing


@dataclass(frozen=True)
class ClientSamples:
    """The samples of one client; splits that are None are split off `train`."""

    train: RawSamples
    val: RawSamples | None = None
    test: RawSamples | None = None
    rename: Mapping[str, str] = field(default_factory=dict)  # labels in this client's data = labels of the federation

    def splits(self, rename: Mapping[str, str] | None = None) -> dict[str, RawSamples]:
        """The given splits by name, their labels renamed; a DataError if there are too few training samples."""
        if len(self.train) < MIN_SAMPLES:
            raise DataError(f"{self.train.where}: at least {MIN_SAMPLES} samples are required, got {len(self.train)}")
        splits = (("train", self.train), ("val", self.val), ("test", self.test))
        given = {name: raw for name, raw in splits if raw is not None}
        require_known_names(list(given.values()), self.rename)
        return {name: renamed(raw, self.all_renamed(rename)) for name, raw in given.items()}

    def all_renamed(self, rename: Mapping[str, str] | None = None) -> dict[str, str]:
        """The labels to rename: those of the experiment and those of the client."""
        return {**(rename or {}), **self.rename}


@dataclass(frozen=True)
class UserDataset:
    """How user data becomes inputs and targets."""

    task: TaskName = setting("auto", "classification, multi-label or regression; auto: inferred from the labels")
    classes: tuple[str, ...] = setting((), "label space, in order; default: all labels that occur")
    ignore: tuple[str, ...] = setting((), "columns to ignore, such as a patient number")
    categorical: tuple[str, ...] = setting((), "numeric columns to treat as categories; string columns always are categories")
    scale: Literal["auto", "standard", "none"] = setting("auto", "auto: standard for vectors, images to [0, 1], else none")
    missing: Missing | Mapping[str, Missing] = setting(
        "error", "gaps in tables: error, median, mean, indicator; also column = one of these, and '*' for all others"
    )
    fill: Mapping[str, float] = setting(
        help="column = value for its gaps; default: the median or mean of the client's training part", default_factory=dict
    )
    na_values: Mapping[str, tuple[float, ...]] = setting(
        help="column = numbers that stand for a gap, such as 0 or -9", default_factory=dict
    )
    rename: Mapping[str, str] = setting(help="labels in the data = labels of the federation", default_factory=dict)
    group: str | None = setting(None, "column of persons or groups: nobody is in two parts of a client; not an input")

    @property
    def table_rules(self) -> TableRules:
        """What is said about the columns of tables."""
        return TableRules(self.ignore, self.categorical, self.missing, self.fill, self.na_values)

    def combine(
        self,
        name: str,
        clients: Mapping[ClientId, ClientSamples],
        unlabeled: RawSamples | None = None,
        public: RawSamples | None = None,
    ) -> Dataset:
        """One data set of the samples of all clients."""
        if not clients:
            raise DataError("there are no clients; add at least one")
        named = [(client, split, raw) for client, c in clients.items() for split, raw in c.splits(self.rename).items()]
        groups = None if self.group is None else group_numbers([raw for _, _, raw in named], self.group)
        splits = [(client, split, without_column(raw, self.group)) for client, split, raw in named]
        public = public and renamed(public, self.rename)
        unlabeled, public = (raw and without_column(raw, self.group) for raw in (unlabeled, public))
        by_client = {client: [raw for owner, _, raw in splits if owner == client] for client in clients}
        columns = summarise(by_client, self.table_rules)
        try:
            return self._combined(name, clients, by_client, splits, groups, columns, unlabeled, public)
        except DataError as error:  # `fedme data show` shows the columns although the samples cannot be used yet
            error.columns = columns
            raise

    def _combined(
        self,
        name: str,
        clients: Mapping[ClientId, ClientSamples],
        by_client: Mapping[ClientId, Sequence[RawSamples]],
        splits: Sequence[tuple[ClientId, str, RawSamples]],
        groups: Tensor | None,
        columns: tuple[ColumnSummary, ...],
        unlabeled: RawSamples | None,
        public: RawSamples | None,
    ) -> Dataset:
        raws = [raw for _, _, raw in splits]
        labelled = [*raws, *([public] if public else [])]
        preparation = common_preparation(raws, self.table_rules)
        if self.scale == "standard" or any(_has_negative_integers(raw) for raw in raws):
            preparation = preparation.of_quantities()
        targets = common_targets(labelled, self.task, self.classes)
        is_listed = bool(self.classes) or targets.task_type != "classification"
        written = {} if is_listed else {client: labels_written(parts) for client, parts in by_client.items()}
        preparation = replace(preparation, whole_labels=targets.integer_classes)
        extra = [raw for raw in (unlabeled, public) if raw is not None]
        x = _concatenated([preparation.to_tensors(raw) for raw in [*raws, *extra]])
        labels = [targets.encode(raw) for raw in labelled]
        if unlabeled is not None:
            labels.insert(len(raws), targets.placeholder(len(unlabeled)))
        rows = iter(torch.arange(sum(map(len, labels))).split([len(part) for part in labels]))
        client_rows: dict[ClientId, dict[str, Tensor]] = {client: {} for client in clients}
        for client, part, _ in splits:
            client_rows[client][part] = next(rows)
        row_groups = None if groups is None else torch.cat((groups, torch.full((sum(map(len, extra)),), -1)))
        form = preparation.form
        spec = form if isinstance(form, TensorSpec) else None
        is_vector = spec is not None and len(spec.shape) == 1 and spec.dtype == "float32"
        is_image = spec is not None and spec.dtype == "uint8"
        is_numeric = spec is not None and spec.dtype != "int64"
        scaling = Scaling(1 / 255) if self.scale == "auto" and is_image else None
        shape = (form if isinstance(form, TensorSpec) else next(iter(form.values()))).shape
        preprocessing = preparation.with_scaling(scaling).plain()
        none = torch.empty(0, dtype=torch.int64)
        return Dataset(
            name=name,
            source=Arrays(x, torch.cat(labels), scaling),
            schema=Schema(shape, targets.names, preprocessing, _vocabulary(x), targets.task_type),
            train=torch.cat([splits["train"] for splits in client_rows.values()]),
            test=none,
            owners={client: (splits["train"], none) for client, splits in client_rows.items()},
            given_splits={client: GivenSplits(splits.get("val"), splits.get("test")) for client, splits in client_rows.items()},
            unlabeled=next(rows) if unlabeled is not None else None,
            public=next(rows) if public is not None else None,
            groups=row_groups,
            renamed={client: samples.all_renamed(self.rename) for client, samples in clients.items()},
            written=written,
            columns=columns,
            notes=range_notes(columns),
            standardise=is_numeric and (self.scale == "standard" or (self.scale == "auto" and is_vector)),
        )


@dataclass(frozen=True)
class ClientFiles:
    """A table ``[clients.NAME]``: the files and the model of a client."""

    data: str | None = setting(None, "a file or a folder of images; validation and test sets are split off it unless given")
    val: str | None = setting(None, "a file or folder with the validation set")
    test: str | None = setting(None, "a file or folder with the test set")
    label: Label = setting(None, "label column, or several; default: data.label")
    model: str | Mapping[str, Any] | None = setting(None, "architecture; default: from the pool of [models]")
    rename: Mapping[str, str] = setting(help="labels in this client's data = labels of the federation", default_factory=dict)

    def read(self, client: ClientId, label: Label) -> ClientSamples:
        """Read the files of this client; `label` is the default label column."""

        def split(name: str, path: str | None) -> RawSamples | None:
            where = f"client {client}" if name == "data" else f"client {client}, {name}"
            return None if path is None else read_file(Path(path), self.label or label, where)

        train = split("data", self.data)
        assert train is not None
        return ClientSamples(train, split("val", self.val), split("test", self.test), self.rename)


@dataclass(frozen=True)
class FileDataset(UserDataset):
    """One file, or folder of images, per client, given in the tables [clients.NAME]."""

    label: Label = setting(None, "label column, or several; a client may set its own")
    unlabeled_file: str | None = setting(None, "a file with unlabeled samples of the server")
    public_file: str | None = setting(None, "a file with labelled samples shared by all clients")
    clients: Mapping[ClientId, ClientFiles] = field(default_factory=dict)

    def load(self, root: Path) -> Dataset:
        """Read the files of all clients; `root` is not used."""
        clients = {client: files.read(client, self.label) for client, files in self.clients.items()}
        unlabeled = read_file(Path(self.unlabeled_file), self.label, "unlabeled data", False) if self.unlabeled_file else None
        public = read_file(Path(self.public_file), self.label, "public data") if self.public_file else None
        return self.combine("clients", clients, unlabeled, public)


@dataclass(frozen=True)
class ObjectDataset(UserDataset):
    """Samples passed in Python; they are not on disk, so only the program that passed them can resume the run."""

    fingerprint: str = setting("", "hash of the samples")

    def load(self, root: Path) -> Dataset:
        """Raise a DataError, because there are no files."""
        raise DataError("the samples of this run were passed in Python; call fit again with the same clients and output")


def unseen_client_dataset(schema: Schema, preparation: Preparation, client: ClientId, samples: ClientSamples) -> Dataset:
    """The data set of an unseen client, with the preprocessing and the classes of the trained model."""
    splits = samples.splits()
    preparation = preparation.with_own_values()
    targets = Targets(schema.task_type, schema.classes, NO_OTHER_CLASSES)
    labels = preparation.scale_targets(torch.cat([targets.encode(raw) for raw in splits.values()]))
    parts = torch.arange(len(labels)).split([len(raw) for raw in splits.values()])
    rows = dict(zip(splits, parts, strict=True))
    none = torch.empty(0, dtype=torch.int64)
    scaling = preparation.scale.scaling() if preparation.scale is not None else None
    return Dataset(
        name="newcomer",
        source=Arrays(_concatenated([preparation.to_tensors(raw) for raw in splits.values()]), labels, scaling),
        schema=replace(schema, preprocessing={**schema.preprocessing, **preparation.plain()}),
        train=rows["train"],
        test=none,
        owners={client: (rows["train"], none)},
        given_splits={client: GivenSplits(rows.get("val"), rows.get("test"))},
        renamed={client: samples.rename},
    )


def fingerprint(dataset: Dataset) -> str:
    """A hash of the samples, their order and their clients."""
    digest = hashlib.blake2b(digest_size=16)
    source = dataset.source
    assert isinstance(source, Arrays)
    x = source.x if isinstance(source.x, Mapping) else {"": source.x}
    owners = {
        client: [len(train), repr(dataset.given_splits.get(client))] for client, (train, _) in (dataset.owners or {}).items()
    }
    digest.update(repr((owners, dataset.schema.classes, dataset.schema.preprocessing)).encode())
    grouped = {} if dataset.groups is None else {"group": dataset.groups}
    for name, value in {**x, "label": source.labels, **grouped}.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        pieces = value.contiguous().view(-1).split(HASHED)
        digest.update(b"".join(in_threads(lambda piece: hashlib.sha256(piece.numpy()).digest(), pieces)))
    return digest.hexdigest()


def _has_negative_integers(raw: RawSamples) -> bool:
    """Whether the inputs are integers that cannot be symbols of a vocabulary."""
    x = raw.inputs
    return (
        isinstance(x, Tensor) and x.dtype not in (torch.uint8, torch.bool) and not x.is_floating_point() and bool((x < 0).any())
    )


def _concatenated(parts: Sequence[Inputs]) -> Inputs:
    if isinstance(parts[0], Mapping):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(list(parts))


def _vocabulary(x: Inputs) -> int | None:
    """The number of symbols, if samples are sequences of symbols."""
    first = next(iter(x.values())) if isinstance(x, Mapping) else x
    return int(first.max()) + 1 if first.dtype == torch.int64 and len(first) else None
