"""Who holds which rows: the result of dividing a data set, as a value that can be saved, compared and shown."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedme.core.data import ClientId
from fedme.datasets.data_errors import DataError

FORMAT = "fedme-partition-1"
MOST_COLUMNS = 12  # classes that fit side by side on a terminal
MOST_FREQUENT = 5


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Parts:
    """The rows of one client."""

    train: Tensor
    val: Tensor
    test: Tensor

    def all(self) -> Tensor:
        """Every row once: the only sample of a client with one sample is in two of its parts."""
        rows: Tensor = torch.unique(torch.cat((self.train, self.val, self.test)))
        return rows


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of every client, and those set aside for everybody."""

    clients: Mapping[ClientId, Parts]
    unlabeled: Tensor = field(default_factory=_no_rows)
    public: Tensor = field(default_factory=_no_rows)

    def _pieces(self) -> list[Tensor]:
        mine = [rows for parts in self.clients.values() for rows in (parts.train, parts.val, parts.test)]
        return [self.unlabeled, self.public, *mine]

    def digest(self) -> str:
        """A name for exactly this partition: equal if and only if clients, their order and their rows are equal."""
        pieces = self._pieces()
        head = json.dumps([FORMAT, list(self.clients), [len(rows) for rows in pieces]])
        rows = torch.cat(pieces).to(torch.int64).numpy().astype("<i8")
        return hashlib.blake2b(head.encode() + rows.tobytes(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file: all rows in one tensor, the size of every piece, the clients' names in the header."""
        pieces = self._pieces()
        content = {"rows": torch.cat(pieces).to(torch.int64), "sizes": torch.tensor([len(rows) for rows in pieces])}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_bytes(save(content, {"format": FORMAT, "clients": json.dumps(list(self.clients))}))
        os.replace(unfinished, path)

    @staticmethod
    def load(path: Path) -> "Partition":
        """Read what `save` wrote."""
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                rows, sizes = file.get_tensor("rows"), file.get_tensor("sizes")
            names = json.loads(head.get("clients", "null"))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: is not a readable partition ({error})") from error
        if head.get("format") != FORMAT:
            raise DataError(f"{path}: has the format {head.get('format')!r}, expected {FORMAT!r}; make the partition again")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise DataError(f"{path}: its list of clients is damaged; make the partition again")
        if not (
            rows.dtype == sizes.dtype == torch.int64
            and rows.ndim == sizes.ndim == 1
            and len(sizes) == 2 + 3 * len(names)
            and (sizes >= 0).all()
            and sizes.sum() == len(rows)
            and (rows >= 0).all()
        ):
            raise DataError(f"{path}: its rows do not fit its {len(names)} clients; make the partition again")
        unlabeled, public, *pieces = torch.split(rows, sizes.tolist())
        triples = zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True)
        clients = {name: Parts(*three) for name, three in zip(names, triples, strict=True)}
        return Partition(clients, unlabeled, public)

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """How many samples of every class or label each client holds, all its parts together: clients x classes."""
        if not self.clients:
            return torch.zeros((0, classes), dtype=torch.int64)
        if labels.dim() == 2:  # several at once, each there or not
            return torch.stack([labels[p.all()].sum(0) for p in self.clients.values()])
        return torch.stack([torch.bincount(labels[p.all()], minlength=classes) for p in self.clients.values()])

    def table(self, labels: Tensor, classes: tuple[str, ...], first: int | None = None) -> Table:
        """Sizes and labels of every client (of the `first` ones), for a terminal.

        A few classes get a column each; for many, the number of classes present and the most frequent ones are given.
        """
        counts = self.counts(labels, len(classes))
        names = [_printable(name) for name in classes]
        wide = len(classes) <= MOST_COLUMNS
        table = Table(show_footer=True, caption=self._caption())
        sizes = [(len(p.train), len(p.val), len(p.test)) for p in self.clients.values()]
        table.add_column("client", Text("all", no_wrap=True))
        for position, part in enumerate(("train", "val", "test")):
            total = sum(size[position] for size in sizes)
            table.add_column(part, str(total), justify="right", no_wrap=True)
        if wide:
            for name, total in zip(names, counts.sum(0).tolist(), strict=True):
                table.add_column(Text(name), str(total), justify="right")
        else:
            table.add_column("classes", str(int((counts.sum(0) > 0).sum())), justify="right")
            table.add_column("most frequent", _frequent(counts.sum(0), names))
        shown = len(sizes) if first is None else min(first, len(sizes))
        for name, size, row in list(zip(self.clients, sizes, counts, strict=True))[:shown]:
            labels_of_client = (
                [Text("·" if count == 0 else str(count)) for count in row.tolist()]
                if wide
                else [Text(str(int((row > 0).sum()))), _frequent(row, names)]
            )
            table.add_row(Text(name), *(Text(str(count)) for count in size), *labels_of_client)
        if shown < len(sizes):
            table.add_row(Text(f"... {len(sizes) - shown} more"))
        return table

    def _caption(self) -> str:
        aside = [f"{len(rows)} {name}" for name, rows in (("unlabeled", self.unlabeled), ("public", self.public)) if len(rows)]
        return f"{len(self.clients)} clients" + "".join(f", {one}" for one in aside)


def _printable(name: str) -> str:
    return name if name.strip() and name.isprintable() else repr(name)


def _frequent(counts: Tensor, names: list[str]) -> Text:
    order = counts.argsort(descending=True, stable=True)[:MOST_FREQUENT].tolist()
    return Text("  ".join(f"{names[c]}:{int(counts[c])}" for c in order if counts[c]))
