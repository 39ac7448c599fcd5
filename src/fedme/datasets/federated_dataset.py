"""From a data set to a federation: set rows aside for everybody, divide the rest, cut every client into its three parts.

Rules of cutting. A client's n rows become int((1 - share) n) and the rest; a client with two rows gets one and one, and the
only row of a client with one is both its training and its validation part. Cuts are random, except where an owner's rows are
overlapping windows in time order (`Dataset.overlap`): there both the validation and the test part are the later ones, and
the rows before them that share text with them are left out, though never more than half of the rows kept for training.

Deviations: FedMe's notebooks cut the validation part of Shakespeare at random; its windows then also occur, one character
away, in the training part, and the choice between models would reward memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from fedme.core.data import Arrays, ClientData, ClientId, Split
from fedme.core.key import Key
from fedme.datasets.data_errors import DataError
from fedme.datasets.dataset import Dataset, Kept
from fedme.datasets.partitioners import Natural, Partition, Partitioner, Parts, Pool, Shares
from fedme.datasets.preprocessing import Preparation, Scale, standardised
from fedme.datasets.targets import in_ranges

TEST_SHARE = 0.25  # where the publisher has no test part
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DataOptions:
    """What is set aside, and how a client's samples are cut."""

    unlabeled: int = 0  # samples that every client knows without labels
    public: int = 0  # samples that every client knows with labels
    val: float = 0.2  # share of a client's training samples
    test: float | None = None  # None: the publisher's test part, if there is one; a share: pool both parts and cut clients
    limit: int | None = None  # use only so many training samples in all; in a natural partition, so many of every client
    groups: Mapping[ClientId, Groups] = field(default_factory=dict)  # a client's own label space: groups of classes

    def __post_init__(self) -> None:
        if self.unlabeled < 0 or self.public < 0:
            raise DataError(f"unlabeled = {self.unlabeled}, public = {self.public}; they cannot be negative")
        if not 0 <= self.val < 1:
            raise DataError(f"val = {self.val}; it must be at least 0 and less than 1")
        if self.test is not None and not 0 < self.test < 1:
            raise DataError(f"test = {self.test}; it must lie between 0 and 1, or be left out for the publisher's test part")
        if self.limit is not None and self.limit < 1:
            raise DataError(f"limit = {self.limit}; at least one sample is needed")


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set in the hands of clients."""

    dataset: Dataset
    partition: Partition
    clients: Mapping[ClientId, ClientData]
    unlabeled: Split | None
    public: Split | None
    classes: Mapping[ClientId, int]  # size of each client's label space
    notes: tuple[str, ...] = ()  # what a reader of the results should know about the division
    malicious: tuple[ClientId, ...] = ()  # of a simulated attack

    def table(self, first: int | None = None) -> Table:
        """Sizes and labels of the clients, for a terminal."""
        names, labels = self._counted()
        return self.partition.table(labels, names, first)

    def division(self) -> dict[str, Any]:
        """Who has how many samples of what, as plain data."""
        classes, labels = self._counted()
        counts = self.partition.counts(labels, len(classes)).tolist()
        clients = {}
        for (client, data), row in zip(self.clients.items(), counts, strict=True):
            sizes = {part: len(getattr(data, part)) for part in ("train", "val", "test")}
            clients[client] = sizes | {"labels": dict(zip(classes, row, strict=True))}
        return {"digest": self.partition.digest(), "clients": clients, "notes": list(self.notes)}

    def _counted(self) -> tuple[tuple[str, ...], Tensor]:
        """What is counted: classes, labels, or ranges of numbers in their own unit."""
        source, schema = self.dataset.source, self.dataset.schema
        if schema.task_type != "regression":
            return schema.classes, source.labels
        numbers = Preparation.read(schema.preprocessing).original(source.labels)
        return in_ranges(numbers, schema.classes, torch.cat([parts.all() for parts in self.partition.clients.values()]))


def federate(dataset: Dataset, partition: Partitioner, options: DataOptions, key: Key) -> Federation:
    """Divide a data set among clients; the same key gives the same federation.

    `unlabeled` and `public` rows are drawn first, from the training rows, and belong to no client. In a natural partition
    they are drawn from the owners who are not clients; what these lack is taken from the clients' training rows, and a note
    says so. `limit` counts the clients' training rows (with `test` given: all rows), the publisher's test part shrinks in
    proportion; in a natural partition every client with more rows than `limit` keeps so many, of each part in proportion.
    """
    _check_aside(dataset, options)
    if options.groups and dataset.schema.task_type != "classification":
        raise DataError(f"groups are of classes, and this is {dataset.schema.task_type}; leave data.groups out")
    pool = _pool(dataset, options.test is not None)
    natural = isinstance(partition, Natural)
    notes: tuple[str, ...] = ()
    if natural:
        shares = partition(pool, key.at("partition"))
        unlabeled, public, shares, notes = _set_aside_from_owners(pool, shares, partition.min_samples, options, key)
        unlabeled = unlabeled if dataset.unlabeled is None else dataset.unlabeled
        public = public if dataset.public is None else dataset.public
    else:
        unlabeled, rest = _draw("unlabeled", pool.train, options.unlabeled, key)
        public, rest = _draw("public", rest, options.public, key)
        shares = partition(_limited(Pool(pool.labels, rest, pool.test), options.limit, key), key.at("partition"))
    _check_groups(options.groups, shares, len(dataset.schema.classes))

    gap = dataset.overlap if natural else 0
    test_share = (options.test or TEST_SHARE) if not len(pool.test) else None
    parts, data, classes = {}, {}, {}
    common = Split(dataset.source, public) if len(public) else None
    for client, rows in shares.items():
        groups = options.groups.get(client)
        kept = dataset.kept.get(client, Kept())
        if groups is not None:
            rows = _keep_classes(client, pool.labels, rows, groups)
            kept = Kept(*(part if part is None else _of_groups(pool.labels, part, groups) for part in (kept.val, kept.test)))
        mine = parts_of(client, rows, test_share, options.val, gap, key.at("client", client), kept)
        if natural and options.limit is not None:
            mine = _thinned(mine, options.limit, key.at("client", client, "limit"))
        parts[client] = mine
        train, val, test = (_split(dataset, part, groups) for part in (mine.train, mine.val, mine.test))
        data[client] = ClientData(client, train, val, test, public=common)
        classes[client] = len(dataset.schema.classes) if groups is None else len(groups)
    federation = Federation(
        dataset=dataset,
        partition=Partition(parts, unlabeled, public),
        clients=data,
        unlabeled=Split(dataset.source, unlabeled) if len(unlabeled) else None,
        public=common,
        classes=classes,
        notes=notes,
    )
    return _standardised(federation) if dataset.standardise or dataset.schema.task_type == "regression" else federation


def _standardised(federation: Federation) -> Federation:
    """The same federation with inputs, and numbers to predict, scaled by the training rows of all clients."""
    dataset = federation.dataset
    source, schema = dataset.source, dataset.schema
    assert isinstance(source, Arrays)
    rows = torch.cat([parts.train for parts in federation.partition.clients.values()])
    preparation = Preparation.read(schema.preprocessing)
    if dataset.standardise:
        scaling = standardised(source.x[rows])
        source, preparation = replace(source, scaling=scaling), preparation.scaled(scaling)
    if schema.task_type == "regression":
        preparation = replace(preparation, targets=Scale.of(standardised(source.labels[rows])))
        assert preparation.targets is not None
        source = replace(source, labels=preparation.standard(source.labels))
        schema = replace(schema, unit=preparation.targets.std)
    schema = replace(schema, preprocessing=preparation.plain())

    def moved(split: Split | None) -> Any:
        return None if split is None else replace(split, source=source)

    clients = {
        client: ClientData(client, moved(data.train), moved(data.val), moved(data.test), moved(data.public))
        for client, data in federation.clients.items()
    }
    unlabeled, public = moved(federation.unlabeled), moved(federation.public)
    dataset = replace(dataset, source=source, schema=schema)
    return replace(federation, dataset=dataset, clients=clients, unlabeled=unlabeled, public=public)


def _check_aside(dataset: Dataset, options: DataOptions) -> None:
    for name, rows, count in (("unlabeled", dataset.unlabeled, options.unlabeled), ("public", dataset.public, options.public)):
        if rows is not None and count:
            raise DataError(f"{name} = {count}, but there are {name} samples of their own; leave one of the two out")


def _pool(dataset: Dataset, together: bool) -> Pool:
    if not together:
        return Pool(dataset.source.labels, dataset.train, dataset.test, dataset.owners)
    none = dataset.test[:0]
    owners = dataset.owners and {owner: (torch.cat(rows), none) for owner, rows in dataset.owners.items()}
    return Pool(dataset.source.labels, torch.cat((dataset.train, dataset.test)), none, owners)


def _draw(name: str, rows: Tensor, count: int, key: Key) -> tuple[Tensor, Tensor]:
    """`count` of the rows, and the others."""
    if count > len(rows):
        raise DataError(f"{name} = {count}, but only {len(rows)} samples can be set aside; lower {name}")
    order = torch.randperm(len(rows), generator=key.at(name).torch())
    return rows[order[:count].sort().values], rows[order[count:].sort().values]


def _limited(pool: Pool, limit: int | None, key: Key) -> Pool:
    if limit is None or limit >= len(pool.train):
        return pool
    tested = max(1, round(len(pool.test) * limit / len(pool.train))) if len(pool.test) else 0
    train, _ = _draw("limit", pool.train, limit, key.at("train"))
    test, _ = _draw("limit", pool.test, tested, key.at("test"))
    return Pool(pool.labels, train, test)


def _set_aside_from_owners(
    pool: Pool, shares: Shares, min_samples: int, options: DataOptions, key: Key
) -> tuple[Tensor, Tensor, Shares, tuple[str, ...]]:
    wanted = options.unlabeled + options.public
    outside = [rows for owner, (rows, _) in (pool.owners or {}).items() if owner not in shares]
    spare = torch.cat(outside) if outside else pool.train[:0]
    notes: tuple[str, ...] = ()
    if wanted > (others := len(spare)):
        keep = max(min_samples, 2)
        for client, (rows, _) in shares.items():
            order = torch.randperm(len(rows), generator=key.at("spare", client).torch())
            spare = torch.cat((spare, rows[order[keep:]]))
        if wanted > len(spare):
            raise DataError(
                f"unlabeled + public = {wanted}, but only {len(spare)} samples can be set aside without leaving a client "
                f"fewer than {keep}; lower unlabeled or public"
            )
        lacking, _ = _draw("unlabeled", spare[others:], wanted - others, key.at("clients"))
        spare = torch.cat((spare[:others], lacking))
        taken = torch.zeros(len(pool.labels), dtype=torch.bool)
        taken[lacking] = True
        shares = {client: (rows[~taken[rows]], test) for client, (rows, test) in shares.items()}
        notes = (
            f"{len(lacking)} of the {wanted} unlabeled and public samples were taken from the clients' training samples: "
            f"the owners outside the federation have {others}",
        )
    unlabeled, rest = _draw("unlabeled", spare, options.unlabeled, key)
    public, _ = _draw("public", rest, options.public, key)
    return unlabeled, public, shares, notes


def _check_groups(groups: Mapping[ClientId, Groups], shares: Shares, classes: int) -> None:
    for client, label_space in groups.items():
        if client not in shares:
            raise DataError(f"groups: there is no client {client!r}; the clients are {', '.join(list(shares)[:5])}, ...")
        members = [c for group in label_space for c in group]
        if not label_space or not all(label_space):
            raise DataError(f"groups: client {client} has no groups, or a group without classes")
        if len(set(members)) != len(members) or not all(0 <= c < classes for c in members):
            raise DataError(f"groups: client {client} names a class twice, or one outside 0..{classes - 1}")


def _of_groups(labels: Tensor, rows: Tensor, groups: Groups) -> Tensor:
    """The rows whose class is in one of the groups."""
    return rows[torch.isin(labels[rows], torch.tensor([c for group in groups for c in group]))]


def _keep_classes(client: ClientId, labels: Tensor, rows: tuple[Tensor, Tensor], groups: Groups) -> tuple[Tensor, Tensor]:
    train, test = (_of_groups(labels, part, groups) for part in rows)
    if not len(train) or (len(rows[1]) and not len(test)):
        raise DataError(f"groups: client {client} has no samples of these classes, or none to test on; choose other classes")
    return train, test


def parts_of(
    client: ClientId,
    rows: tuple[Tensor, Tensor],
    test_share: float | None,
    val: float,
    gap: int,
    key: Key,
    kept: Kept = Kept(),
) -> Parts:
    """A client's training and test rows as its three parts; without a test part one is cut by `test_share`."""
    train, test = rows
    if kept.test is not None:
        test = kept.test
    elif test_share is not None:
        if len(train) < 2:
            raise DataError(f"client {client} has {len(train)} sample, too few to train and to test; raise min_samples to 2")
        train, test = _cut(train, test_share, gap, key.at("test"))
    if kept.val is not None or val == 0:
        return Parts(train, kept.val if kept.val is not None else train[:0], test)
    if len(train) == 1:
        return Parts(train, train, test)
    train, validation = _cut(train, val, gap, key.at("val"))
    return Parts(train, validation, test)


def _cut(rows: Tensor, share: float, gap: int, key: Key) -> tuple[Tensor, Tensor]:
    # The small number undoes binary fractions: 10 rows and a share of 0.9 leave 1, not 0.
    kept = max(1, int((1 - share) * len(rows) + 1e-9))
    if gap:
        return rows[: kept - min(gap, kept // 2)], rows[kept:]
    order = torch.randperm(len(rows), generator=key.torch())
    return rows[order[:kept].sort().values], rows[order[kept:].sort().values]


def _thinned(parts: Parts, limit: int, key: Key) -> Parts:
    total = len(parts.train) + len(parts.val) + len(parts.test)
    if total <= limit:
        return parts
    kept = {}
    for name, rows in (("train", parts.train), ("val", parts.val), ("test", parts.test)):
        count = max(1, round(len(rows) * limit / total)) if len(rows) else 0
        kept[name], _ = _draw("limit", rows, count, key.at(name))
    return Parts(**kept)


def _split(dataset: Dataset, rows: Tensor, groups: Groups | None) -> Split:
    if groups is None:
        return Split(dataset.source, rows)
    number = torch.full((len(dataset.schema.classes),), -1)
    for position, group in enumerate(groups):
        number[list(group)] = position
    return Split(dataset.source, rows, number[dataset.source.labels[rows]])
