"""From a data set to a federation: draw unlabeled and public rows, partition the rest, split every client's rows in three.

`splits.py` says how a client's rows are split.

Deviations: FedMe's notebooks split the validation set of Shakespeare off at random; its windows then also occur, shifted by
one character, in the training set, and the choice between models would reward memorisation.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import Arrays, ClientData, ClientId, Split
from fedme.core.key import Key
from fedme.core.settings import setting
from fedme.datasets.data_errors import DataError, require
from fedme.datasets.dataset import ClientRows, Dataset, GivenSplits
from fedme.datasets.missing_values import fill_gaps
from fedme.datasets.partition_result import Partition, Parts
from fedme.datasets.partitioners import Natural, Partitioner, Pool
from fedme.datasets.preprocessing import Preparation, Scale, standard_scaling
from fedme.datasets.splits import Splitting
from fedme.datasets.targets import binned_targets, coding_notes

TEST_FRACTION = 0.25  # for data sets without a published test set
SINGLE_SAMPLE = "a single training sample, which is the validation sample too: add samples, or set data.val = 0"
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DataOptions:
    """Unlabeled and public samples, and the splits of a client."""

    unlabeled: int = setting(0, "unlabeled samples of the server, drawn from the training set and excluded from clients")
    public: int = setting(0, "number of labelled samples shared by all clients, drawn from the training set")
    val: float = setting(0.2, "fraction of a client's training samples used for validation")
    test: float | None = setting(None, "default: the published test set, or 0.25; a fraction: of all samples of every client")
    limit: int | None = setting(None, "maximum number of training samples in total; in a natural partition: per client")
    groups: Mapping[ClientId, Groups] = setting(help="label space of single clients: lists of classes", default_factory=dict)
    stratify: bool = setting(True, "whether the parts of a client have its classes in equal proportions, if there are classes")
    fold: str | None = setting(None, 'test on this part of all samples of every client: "2/5" is the second of five')

    def __post_init__(self) -> None:
        require(self.unlabeled >= 0, "unlabeled", f"must be >= 0, got {self.unlabeled}")
        require(self.public >= 0, "public", f"must be >= 0, got {self.public}")
        require(0 <= self.val < 1, "val", f"must be >= 0 and < 1, got {self.val}")
        require(self.test is None or 0 < self.test < 1, "test", f"must be > 0 and < 1, got {self.test}")
        require(self.limit is None or self.limit >= 1, "limit", f"must be >= 1, got {self.limit}")
        require(self.fold is None or self.test is None, "fold", "decides the test part, and so does data.test: set one of them")
        _ = self.fold_number

    @property
    def fold_number(self) -> tuple[int, int] | None:
        """The number of the test fold, from 0, and the number of folds."""
        if self.fold is None:
            return None
        match = re.fullmatch(r"([1-9][0-9]{0,3})/([1-9][0-9]{0,3})", self.fold)
        number, count = (int(match[1]), int(match[2])) if match else (0, 0)
        require(1 <= number <= count and count >= 2, "fold", f'must be like "2/5", the second of five, got {self.fold!r}')
        return number - 1, count


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set divided among clients."""

    dataset: Dataset
    partition: Partition
    clients: Mapping[ClientId, ClientData]
    unlabeled: Split | None
    public: Split | None
    classes: Mapping[ClientId, int]  # size of the label space of every client
    notes: tuple[str, ...] = ()  # remarks on the partition for readers of the results
    malicious: tuple[ClientId, ...] = ()  # clients of a simulated attack

    def table(self, first: int | None = None) -> tuple[tuple[list[str], list[list[str]]], str]:
        """Sizes and labels of the clients: header and rows, and a caption."""
        names, labels = self._classes_and_labels()
        return self.partition.table(labels, names, first)

    def label_counts(self) -> dict[str, Any]:
        """The number of samples per client, split and label, as plain data."""
        classes, labels = self._classes_and_labels()
        counts = self.partition.counts(labels, len(classes)).tolist()
        clients = {}
        for (client, data), row in zip(self.clients.items(), counts, strict=True):
            sizes = {part: len(getattr(data, part)) for part in ("train", "val", "test")}
            clients[client] = sizes | {"labels": dict(zip(classes, row, strict=True))}
        return {"digest": self.partition.digest(), "clients": clients, "notes": list(self.notes)}

    def _classes_and_labels(self) -> tuple[tuple[str, ...], Tensor]:
        """Names and labels of all rows; regression targets are binned, in their original unit."""
        source, schema = self.dataset.source, self.dataset.schema
        if schema.task_type != "regression":
            return schema.classes, source.labels
        values = Preparation.read(schema.preprocessing).unscale_targets(source.labels)
        return binned_targets(values, schema.classes, torch.cat([parts.all() for parts in self.partition.clients.values()]))


def federate(dataset: Dataset, partition: Partitioner, options: DataOptions, key: Key) -> Federation:
    """Divide a data set among clients; the same key gives the same federation.

    `unlabeled` and `public` rows are drawn first, from the training rows, and belong to no client. In a natural partition
    they are drawn from owners who are not clients; if these have too few, the rest is taken from the training rows of the
    clients, and a note says so. `limit` counts the training rows of all clients (with `test` set: all rows), and the
    published test set shrinks in proportion; in a natural partition `limit` applies to every client and all its splits.
    """
    for name, given, count in (("unlabeled", dataset.unlabeled, options.unlabeled), ("public", dataset.public, options.public)):
        if given is not None and count:
            raise DataError(f"data.{name} = {count}, but the data set has its own {name} samples; remove one of the two")
    if options.groups and dataset.schema.task_type != "classification":
        raise DataError(f"data.groups is for classification, but the task is {dataset.schema.task_type}; remove data.groups")
    fold = options.fold_number
    pool = _pool(dataset, options.test is not None or fold is not None)
    natural = isinstance(partition, Natural)
    compared = {client: labels for client, labels in dataset.written.items() if client not in options.groups}
    try:
        notes = coding_notes(compared) + dataset.notes  # a client of data.groups has a task of its own
    except DataError as error:
        error.columns = dataset.columns
        raise
    if natural:
        client_rows = partition(pool, key.at("partition"))
        unlabeled, public, client_rows, remarks = _draw_from_owners(pool, client_rows, partition.min_samples, options, key)
        notes += remarks
        unlabeled = unlabeled if dataset.unlabeled is None else dataset.unlabeled
        public = public if dataset.public is None else dataset.public
    else:
        unlabeled, rest = _draw("unlabeled", pool.train, options.unlabeled, key)
        public, rest = _draw("public", rest, options.public, key)
        client_rows = partition(_limited(Pool(pool.labels, rest, pool.test), options.limit, key), key.at("partition"))
    _check_groups(options.groups, client_rows, len(dataset.schema.classes))

    splitting = Splitting(
        test_fraction=(options.test or TEST_FRACTION) if not len(pool.test) else None,
        val_fraction=options.val,
        gap=dataset.overlap if natural else 0,
        classes=pool.labels if options.stratify and dataset.schema.task_type == "classification" else None,
        groups=dataset.groups,
        fold=fold,
    )
    all_parts, data, classes = {}, {}, {}
    public_split = Split(dataset.source, public) if len(public) else None
    for client, rows in client_rows.items():
        groups = options.groups.get(client)
        given_splits = dataset.given_splits.get(client, GivenSplits())
        if groups is not None:
            rows = _client_rows_in_groups(client, pool.labels, rows, groups)
            pair = (given_splits.val, given_splits.test)
            given_splits = GivenSplits(*(part if part is None else _in_groups(pool.labels, part, groups) for part in pair))
        if natural and options.limit is not None and fold is not None:  # before the folds are made, so that they are disjoint
            rows = _limited_rows(rows, given_splits, options.limit, key.at("client", client, "limit"))
            given_splits = GivenSplits()
        parts = splitting(client, rows, key.at("client", client), given_splits)
        if natural and options.limit is not None and fold is None:
            parts = _subsampled(parts, options.limit, key.at("client", client, "limit"))
        all_parts[client] = parts
        train, val, test = (_split(dataset, part, groups) for part in (parts.train, parts.val, parts.test))
        data[client] = ClientData(client, train, val, test, public=public_split)
        classes[client] = len(dataset.schema.classes) if groups is None else len(groups)
    if fold is not None and not any(len(parts.test) for parts in all_parts.values()):
        raise DataError(f"data.fold = {options.fold!r}: no client has {fold[0] + 1} samples or groups; use fewer folds")
    single = [client for client, parts in all_parts.items() if len(parts.val) and torch.equal(parts.train, parts.val)]
    if single:
        names = f"client {single[0]} has" if len(single) == 1 else f"{len(single)} clients ({', '.join(single[:5])} ...) have"
        notes += (f"{names} {SINGLE_SAMPLE}",)
    federation = Federation(
        dataset=dataset,
        partition=Partition(all_parts, unlabeled, public),
        clients=data,
        unlabeled=Split(dataset.source, unlabeled) if len(unlabeled) else None,
        public=public_split,
        classes=classes,
        notes=notes,
    )
    return _prepared(federation)


def _prepared(federation: Federation) -> Federation:
    """Scale the inputs, and regression targets, over the training rows of all clients, and fill the gaps of every client."""
    dataset = federation.dataset
    source, schema = dataset.source, dataset.schema
    names = any(dataset.renamed.values())
    if not isinstance(source, Arrays) or "form" not in schema.preprocessing:  # a published data set, which has no gaps
        return federation
    preparation = Preparation.read(schema.preprocessing)
    if not (dataset.standardise or schema.task_type == "regression" or preparation.fills or names):
        return federation
    rows = torch.cat([parts.train for parts in federation.partition.clients.values()])
    if dataset.standardise:
        indicators = sum(column.indicates for column in preparation.columns)
        scaling = standard_scaling(source.x, rows, preparation.category_features(), indicators)
        source, preparation = replace(source, scaling=scaling), preparation.with_scaling(scaling)
    if schema.task_type == "regression" and preparation.targets is None:
        preparation = replace(preparation, targets=Scale.of(standard_scaling(source.labels, rows)))
        assert preparation.targets is not None
        source = replace(source, labels=preparation.scale_targets(source.labels))
        schema = replace(schema, unit=preparation.targets.std)
    own = dict.fromkeys(federation.clients, preparation)
    if preparation.fills:
        x, preparation, own = fill_gaps(source.x, preparation, federation.partition)
        source = replace(source, x=x)
    schema = replace(schema, preprocessing={**schema.preprocessing, **preparation.plain()})

    def moved(split: Split | None) -> Any:
        return None if split is None else replace(split, source=source)

    clients = {}
    for client, data in federation.clients.items():
        preprocessing = None
        if preparation.fills or dataset.renamed.get(client):
            preprocessing = replace(own[client], rename=dataset.renamed.get(client, {})).plain()
        train, val, test, public = (moved(part) for part in (data.train, data.val, data.test, data.public))
        clients[client] = ClientData(client, train, val, test, public, preprocessing=preprocessing)
    unlabeled, public = moved(federation.unlabeled), moved(federation.public)
    dataset = replace(dataset, source=source, schema=schema)
    return replace(federation, dataset=dataset, clients=clients, unlabeled=unlabeled, public=public)


def _pool(dataset: Dataset, merge_test: bool) -> Pool:
    if not merge_test:
        return Pool(dataset.source.labels, dataset.train, dataset.test, dataset.owners)
    none = dataset.test[:0]
    owners = dataset.owners and {owner: (torch.cat(rows), none) for owner, rows in dataset.owners.items()}
    return Pool(dataset.source.labels, torch.cat((dataset.train, dataset.test)), none, owners)


def _draw(name: str, rows: Tensor, count: int, key: Key) -> tuple[Tensor, Tensor]:
    """`count` random rows, and the others."""
    if count > len(rows):
        raise DataError(f"data.{name} must be at most {len(rows)}, the number of available samples, got {count}")
    order = torch.randperm(len(rows), generator=key.at(name).torch())
    return rows[order[:count].sort().values], rows[order[count:].sort().values]


def _limited(pool: Pool, limit: int | None, key: Key) -> Pool:
    if limit is None or limit >= len(pool.train):
        return pool
    test_limit = max(1, round(len(pool.test) * limit / len(pool.train))) if len(pool.test) else 0
    train, _ = _draw("limit", pool.train, limit, key.at("train"))
    test, _ = _draw("limit", pool.test, test_limit, key.at("test"))
    return Pool(pool.labels, train, test)


def _draw_from_owners(
    pool: Pool, client_rows: ClientRows, min_samples: int, options: DataOptions, key: Key
) -> tuple[Tensor, Tensor, ClientRows, tuple[str, ...]]:
    """Draw unlabeled and public rows from owners who are not clients, and then from the clients."""
    count = options.unlabeled + options.public
    outside = [rows for owner, (rows, _) in (pool.owners or {}).items() if owner not in client_rows]
    spare = torch.cat(outside) if outside else pool.train[:0]
    notes: tuple[str, ...] = ()
    if count > (others := len(spare)):
        keep = max(min_samples, 2)
        for client, (rows, _) in client_rows.items():
            order = torch.randperm(len(rows), generator=key.at("spare", client).torch())
            spare = torch.cat((spare, rows[order[keep:]]))
        if count > len(spare):
            raise DataError(
                f"data.unlabeled + data.public must be at most {len(spare)}, so that every client keeps {keep} samples, "
                f"got {count}"
            )
        from_clients, _ = _draw("unlabeled", spare[others:], count - others, key.at("clients"))
        spare = torch.cat((spare[:others], from_clients))
        taken = torch.zeros(len(pool.labels), dtype=torch.bool)
        taken[from_clients] = True
        client_rows = {client: (rows[~taken[rows]], test) for client, (rows, test) in client_rows.items()}
        notes = (
            f"{len(from_clients)} of the {count} unlabeled and public samples were taken from the training samples of the "
            f"clients: the owners outside the federation have only {others}",
        )
    unlabeled, rest = _draw("unlabeled", spare, options.unlabeled, key)
    public, _ = _draw("public", rest, options.public, key)
    return unlabeled, public, client_rows, notes


def _check_groups(groups: Mapping[ClientId, Groups], clients: Collection[ClientId], classes: int) -> None:
    for client, label_space in groups.items():
        members = [c for group in label_space for c in group]
        if client not in clients:
            raise DataError(f"data.groups: unknown client {client!r}; the clients are {', '.join(list(clients)[:5])}, ...")
        if not label_space or not all(label_space):
            raise DataError(f"data.groups: client {client} needs at least one group, and every group at least one class")
        if len(set(members)) != len(members) or not all(0 <= c < classes for c in members):
            raise DataError(f"data.groups: classes of client {client} must be distinct and between 0 and {classes - 1}")


def _in_groups(labels: Tensor, rows: Tensor, groups: Groups) -> Tensor:
    """The rows whose class is in one of the groups."""
    return rows[torch.isin(labels[rows], torch.tensor([c for group in groups for c in group]))]


def _client_rows_in_groups(
    client: ClientId, labels: Tensor, rows: tuple[Tensor, Tensor], groups: Groups
) -> tuple[Tensor, Tensor]:
    train, test = (_in_groups(labels, part, groups) for part in rows)
    if not len(train) or (len(rows[1]) and not len(test)):
        raise DataError(f"data.groups: client {client} has no training or no test samples of these classes; choose others")
    return train, test


def _subsampled(parts: Parts, limit: int, key: Key) -> Parts:
    total = len(parts.train) + len(parts.val) + len(parts.test)
    if total <= limit:
        return parts
    subsampled = {}
    for name, rows in (("train", parts.train), ("val", parts.val), ("test", parts.test)):
        count = max(1, round(len(rows) * limit / total)) if len(rows) else 0
        subsampled[name], _ = _draw("limit", rows, count, key.at(name))
    return Parts(**subsampled)


def _limited_rows(rows: tuple[Tensor, Tensor], given: GivenSplits, limit: int, key: Key) -> tuple[Tensor, Tensor]:
    every = torch.cat([part for part in (rows[0], given.val, given.test) if part is not None])
    return _draw("limit", every, min(limit, len(every)), key)[0], rows[1]


def _split(dataset: Dataset, rows: Tensor, groups: Groups | None) -> Split:
    if groups is None:
        return Split(dataset.source, rows)
    group_of_class = torch.full((len(dataset.schema.classes),), -1)
    for position, group in enumerate(groups):
        group_of_class[list(group)] = position
    return Split(dataset.source, rows, group_of_class[dataset.source.labels[rows]])
