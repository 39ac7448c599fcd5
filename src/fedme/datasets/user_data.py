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
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import Label, read_file
from fedme.datasets.dataset import Dataset, GivenSplits
from fedme.datasets.preprocessing import Preparation, TensorSpec, common_preparation
from fedme.datasets.raw_samples import RawSamples
from fedme.datasets.targets import NO_OTHER_CLASSES, Targets, TaskName, common_targets

MIN_SAMPLES = 2  # of a client: one for training and one for testing


@dataclass(frozen=True)
class ClientSamples:
    """The samples of one client; splits that are None are split off `train`."""

    train: RawSamples
    val: RawSamples | None = None
    test: RawSamples | None = None

    def splits(self) -> dict[str, RawSamples]:
        """The given splits by name; a DataError if there are too few training samples."""
        if len(self.train) < MIN_SAMPLES:
            raise DataError(f"{self.train.where}: at least {MIN_SAMPLES} samples are required, got {len(self.train)}")
        splits = (("train", self.train), ("val", self.val), ("test", self.test))
        return {name: raw for name, raw in splits if raw is not None}


@dataclass(frozen=True)
class UserDataset:
    """How user data becomes inputs and targets."""

    task: TaskName = setting("auto", "classification, multi-label or regression; auto: inferred from the labels")
    classes: tuple[str, ...] = setting((), "label space, in order; default: all labels that occur")
    ignore: tuple[str, ...] = setting((), "columns to ignore, such as a patient number")
    categorical: tuple[str, ...] = setting((), "numeric columns to treat as categories; string columns always are categories")
    scale: Literal["auto", "standard", "none"] = setting("auto", "auto: standard for vectors, images to [0, 1], else none")

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
        splits = [(client, split, raw) for client, samples in clients.items() for split, raw in samples.splits().items()]
        raws = [raw for _, _, raw in splits]
        labelled = [*raws, *([public] if public else [])]
        preparation = common_preparation(raws, self.ignore, self.categorical)
        targets = common_targets(labelled, self.task, self.classes)
        preparation = replace(preparation, whole_labels=targets.integer_classes)
        extra = [raw for raw in (unlabeled, public) if raw is not None]
        x = _concatenated([preparation.to_tensors(raw) for raw in [*raws, *extra]])
        labels = [targets.encode(raw) for raw in labelled]
        if unlabeled is not None:
            labels.insert(len(raws), targets.placeholder(len(unlabeled)))
        rows = iter(torch.arange(sum(map(len, labels))).split([len(part) for part in labels]))
        client_rows: dict[ClientId, dict[str, Tensor]] = {client: {} for client in clients}
        for client, split, _ in splits:
            client_rows[client][split] = next(rows)
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

    def read(self, client: ClientId, label: Label) -> ClientSamples:
        """Read the files of this client; `label` is the default label column."""

        def split(name: str, path: str | None) -> RawSamples | None:
            where = f"client {client}" if name == "data" else f"client {client}, {name}"
            return None if path is None else read_file(Path(path), self.label or label, where)

        train = split("data", self.data)
        assert train is not None
        return ClientSamples(train, split("val", self.val), split("test", self.test))


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
    targets = Targets(schema.task_type, schema.classes, NO_OTHER_CLASSES)
    labels = preparation.scale_targets(torch.cat([targets.encode(raw) for raw in splits.values()]))
    parts = torch.arange(len(labels)).split([len(raw) for raw in splits.values()])
    rows = dict(zip(splits, parts, strict=True))
    none = torch.empty(0, dtype=torch.int64)
    scaling = preparation.scale.scaling() if preparation.scale is not None else None
    return Dataset(
        name="newcomer",
        source=Arrays(_concatenated([preparation.to_tensors(raw) for raw in splits.values()]), labels, scaling),
        schema=schema,
        train=rows["train"],
        test=none,
        owners={client: (rows["train"], none)},
        given_splits={client: GivenSplits(rows.get("val"), rows.get("test"))},
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
    for name, value in {**x, "label": source.labels}.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _concatenated(parts: Sequence[Inputs]) -> Inputs:
    if isinstance(parts[0], Mapping):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(list(parts))


def _vocabulary(x: Inputs) -> int | None:
    """The number of symbols, if samples are sequences of symbols."""
    first = next(iter(x.values())) if isinstance(x, Mapping) else x
    return int(first.max()) + 1 if first.dtype == torch.int64 and len(first) else None
