"""People's own data as a data set like any other: each client has its samples, all share a preparation and a label space.

`Clients` reads a file for each client (the tables ``[clients.NAME]`` of an experiment); `Given` was handed over in Python.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedme.core.data import Arrays, ClientId, Inputs, Scaling, Schema
from fedme.datasets.data_errors import DataError
from fedme.datasets.data_files import Label, read
from fedme.datasets.dataset import Dataset, Kept
from fedme.datasets.preprocessing import Form, Preparation, agreed
from fedme.datasets.raw_samples import Raw
from fedme.datasets.targets import KNOWN, Targets, TaskName
from fedme.datasets.targets import agreed as agreed_targets

LEAST = 2  # samples of a client: one to train on and one to test on


@dataclass(frozen=True)
class Piece:
    """What one client gave; what it did not give is cut from `train`."""

    train: Raw
    val: Raw | None = None
    test: Raw | None = None


@dataclass(frozen=True)
class Own:
    """How people's own samples become inputs and classes."""

    task: TaskName = "auto"  # classes, several labels at once, or numbers to predict; by default what the labels look like
    classes: tuple[str, ...] = ()  # the label space; all labels that occur, in order, by default
    ignore: tuple[str, ...] = ()  # columns to leave out, such as a patient's number
    categorical: tuple[str, ...] = ()  # columns of numbers that are names; columns of text always are
    scale: Literal["auto", "standard", "none"] = "auto"  # auto: standard for rows of numbers, bytes to 0..1, else none

    def combine(
        self, name: str, pieces: Mapping[ClientId, Piece], unlabeled: Raw | None = None, public: Raw | None = None
    ) -> Dataset:
        """One data set of everybody's samples."""
        if not pieces:
            raise DataError("there are no clients; give at least one")
        for client, piece in pieces.items():
            if len(piece.train) < LEAST:
                raise DataError(f"{piece.train.where}: client {client} has {len(piece.train)} sample; give it at least {LEAST}")
        parts = [(client, part, raw) for client, piece in pieces.items() for part, raw in _parts(piece)]
        raws = [raw for _, _, raw in parts]
        extra = [raw for raw in (unlabeled, public) if raw is not None]
        preparation, _ = agreed(raws, self.ignore, self.categorical)
        labelled = [*raws, *([public] if public else [])]
        targets = agreed_targets(labelled, self.task, self.classes)
        preparation = Preparation(preparation.form, preparation.columns, whole_labels=targets.whole)
        x = _joined([preparation.numbers(raw) for raw in [*raws, *extra]])
        labels = [targets.values(raw) for raw in labelled]
        if unlabeled is not None:
            labels.insert(len(raws), targets.filler(len(unlabeled)))
        rows = iter(torch.arange(sum(map(len, labels))).split([len(each) for each in labels]))
        mine: dict[ClientId, dict[str, Tensor]] = {client: {} for client in pieces}
        for client, part, _ in parts:
            mine[client][part] = next(rows)
        form = preparation.form
        vector = isinstance(form, Form) and len(form.shape) == 1 and form.dtype == "float32"
        bytes_to_unit = self.scale == "auto" and isinstance(form, Form) and form.dtype == "uint8"
        numbers = isinstance(form, Form) and form.dtype != "int64"
        scaling = Scaling(1 / 255) if bytes_to_unit else None
        none = torch.empty(0, dtype=torch.int64)
        return Dataset(
            name=name,
            source=Arrays(x, torch.cat(labels), scaling),
            schema=Schema(_shape(form), targets.names, preparation.scaled(scaling).plain(), _vocabulary(x), targets.kind),
            train=torch.cat([each["train"] for each in mine.values()]),
            test=none,
            owners={client: (each["train"], none) for client, each in mine.items()},
            kept={client: Kept(each.get("val"), each.get("test")) for client, each in mine.items()},
            unlabeled=next(rows) if unlabeled is not None else None,
            public=next(rows) if public is not None else None,
            standardise=numbers and (self.scale == "standard" or (self.scale == "auto" and vector)),
        )


@dataclass(frozen=True)
class ClientFiles:
    """A table ``[clients.NAME]``: where a client's samples are, and its model."""

    data: str | None = None  # a file or a folder of images; what is not given below is cut from it
    val: str | None = None
    test: str | None = None
    label: Label = None  # the column with its labels, or several
    model: str | Mapping[str, Any] | None = None  # its architecture; from the pool of [models] by default

    def pieces(self, client: ClientId, label: Label) -> Piece:
        """Read them."""

        def part(name: str, path: str | None) -> Raw | None:
            where = f"client {client}" if name == "data" else f"client {client}, {name}"
            return None if path is None else read(Path(path), self.label or label, where)

        train = part("data", self.data)
        assert train is not None
        return Piece(train, part("val", self.val), part("test", self.test))


@dataclass(frozen=True)
class Clients(Own):
    """A file, or a folder of images, for every client: the tables [clients.NAME] say which."""

    label: Label = None  # the column with the labels (or several), unless a client names its own
    unlabeled_file: str | None = None  # samples of the server, without labels
    public_file: str | None = None  # samples with labels that everybody has
    clients: Mapping[ClientId, ClientFiles] = field(default_factory=dict)

    def load(self, root: Path) -> Dataset:
        """Read every client's files; nothing is read from `root`."""
        pieces = {client: files.pieces(client, self.label) for client, files in self.clients.items()}
        unlabeled = read(Path(self.unlabeled_file), self.label, "unlabeled data", False) if self.unlabeled_file else None
        public = read(Path(self.public_file), self.label, "public data") if self.public_file else None
        return self.combine("clients", pieces, unlabeled, public)


@dataclass(frozen=True)
class Given(Own):
    """Samples that were handed over in Python: not on disk, so that a run is resumed by the program that began it."""

    fingerprint: str = ""  # of the samples

    def load(self, root: Path) -> Dataset:
        """There is nothing to read."""
        raise DataError("the samples of this run were given in Python; call fit again, with the same clients and output")


def newcomer(schema: Schema, preparation: Preparation, client: ClientId, piece: Piece) -> Dataset:
    """The data set of one client that comes later: prepared as the others' were, with their classes."""
    parts = _parts(piece)
    if len(piece.train) < LEAST:
        raise DataError(f"{piece.train.where}: there is {len(piece.train)} sample; at least {LEAST} are needed")
    targets = Targets(schema.task_type, schema.classes, KNOWN)
    labels = preparation.standard(torch.cat([targets.values(raw) for _, raw in parts]))
    rows = torch.arange(len(labels)).split([len(raw) for _, raw in parts])
    mine = dict(zip((part for part, _ in parts), rows, strict=True))
    none = torch.empty(0, dtype=torch.int64)
    scaling = preparation.scale.scaling() if preparation.scale is not None else None
    return Dataset(
        name="newcomer",
        source=Arrays(_joined([preparation.numbers(raw) for _, raw in parts]), labels, scaling),
        schema=schema,
        train=mine["train"],
        test=none,
        owners={client: (mine["train"], none)},
        kept={client: Kept(mine.get("val"), mine.get("test"))},
    )


def fingerprint(dataset: Dataset) -> str:
    """A name for exactly these samples of these clients."""
    found = hashlib.blake2b(digest_size=16)
    source = dataset.source
    assert isinstance(source, Arrays)
    x = source.x if isinstance(source.x, Mapping) else {"": source.x}
    owners = {client: [len(rows[0]), repr(dataset.kept.get(client))] for client, rows in (dataset.owners or {}).items()}
    found.update(repr((owners, dataset.schema.classes, dataset.schema.preprocessing)).encode())
    for name, value in {**x, "label": source.labels}.items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()


def _parts(piece: Piece) -> list[tuple[str, Raw]]:
    parts = (("train", piece.train), ("val", piece.val), ("test", piece.test))
    return [(name, raw) for name, raw in parts if raw is not None]


def _joined(parts: Sequence[Inputs]) -> Inputs:
    if isinstance(parts[0], Mapping):
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return torch.cat(list(parts))


def _shape(form: Form | Mapping[str, Form]) -> tuple[int, ...]:
    return form.shape if isinstance(form, Form) else next(iter(form.values())).shape


def _vocabulary(x: Inputs) -> int | None:
    """How many symbols there are, where samples are symbols."""
    first = next(iter(x.values())) if isinstance(x, Mapping) else x
    return int(first.max()) + 1 if first.dtype == torch.int64 and len(first) else None
