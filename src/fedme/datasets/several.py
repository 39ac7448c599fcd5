"""Clients with different data sets in one run: every client has one of several image data sets, and its own classes.

The images must have the same shape (data sets may be padded). A method must accept clients with different classes, such as FML
with `shared`, whose clients keep the last layers for themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedme.core.data import Arrays, ClientId, Schema
from fedme.core.settings import setting
from fedme.core.typed import build
from fedme.datasets.cifar import Cifar10, Cifar100
from fedme.datasets.data_errors import DataError, require
from fedme.datasets.dataset import Dataset
from fedme.datasets.digits import Digits
from fedme.datasets.mnist import FashionMnist, Mnist

SETS: dict[str, tuple[type[Any], int]] = {
    "digits": (Digits, 10),
    "mnist": (Mnist, 10),
    "fashion-mnist": (FashionMnist, 10),
    "cifar10": (Cifar10, 10),
    "cifar100": (Cifar100, 100),
}  # with their numbers of classes


@dataclass(frozen=True)
class Several:
    """Several image data sets of one shape: every client has one of them, and tells its classes apart."""

    sets: Mapping[ClientId, Mapping[str, Any]] = setting(
        help="client = data set: a table with `name` and the options of the data set, such as { name = 'mnist', pad = 2 }",
        default_factory=lambda: {"mnist": {"name": "mnist"}, "fashion-mnist": {"name": "fashion-mnist"}},
    )

    def __post_init__(self) -> None:
        require(len(self.sets) >= 2, "sets", "must have two or more clients, each with a data set")
        for client, table in self.sets.items():
            known = table.get("name") in SETS
            require(known, f"sets.{client}", f"must have a name, one of {', '.join(SETS)}, got {table.get('name')!r}")
            self._reader(client)

    def _reader(self, client: ClientId) -> Any:
        table = dict(self.sets[client])
        return build(SETS[table.pop("name")][0], table, f"data.sets.{client}")

    @property
    def groups(self) -> dict[ClientId, tuple[tuple[int, ...], ...]]:
        """The label space of every client: the classes of its data set, which are numbered one client after the other."""
        first = 0
        groups: dict[ClientId, tuple[tuple[int, ...], ...]] = {}
        for client, table in self.sets.items():
            count = SETS[table["name"]][1]
            groups[client] = tuple((first + c,) for c in range(count))
            first += count
        return groups

    def load(self, root: Path) -> Dataset:
        """Read all data sets."""
        parts = {client: self._reader(client).load(root) for client in self.sets}
        shapes = {client: part.schema.shape for client, part in parts.items()}
        if len(set(shapes.values())) > 1:
            told = ", ".join(f"{client} {' x '.join(map(str, shape))}" for client, shape in shapes.items())
            raise DataError(f"data.sets: images must have one shape, got {told}; use `pad`")
        images, labels, owners, classes = list[Tensor](), list[Tensor](), dict[ClientId, tuple[Tensor, Tensor]](), list[str]()
        for client, part in parts.items():
            at = sum(len(before) for before in labels)
            owners[client] = (part.train + at, part.test + at)
            labels.append(part.source.labels + len(classes))
            images.append(part.source.inputs(torch.arange(len(part.source.labels))))
            classes += [f"{client} {label}" for label in part.schema.classes]
        preprocessing = {client: dict(part.schema.preprocessing) for client, part in parts.items()}
        return Dataset(
            name="several",
            source=Arrays(torch.cat(images), torch.cat(labels)),
            schema=Schema(next(iter(shapes.values())), tuple(classes), {"sets": preprocessing}),
            train=torch.cat([train for train, _ in owners.values()]),
            test=torch.cat([test for _, test in owners.values()]),
            owners=owners,
        )
