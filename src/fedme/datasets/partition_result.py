"""The result of partitioning a data set: the rows of every client, as a value that can be saved, compared and printed."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedme.core.data import ClientId
from fedme.datasets.data_errors import DataError

FORMAT = "fedme-partition-1"
MAX_CLASS_COLUMNS = 12  # classes that fit side by side in a terminal
MOST_FREQUENT = 5


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Parts:
    """The training, validation and test rows of one client."""

    train: Tensor
    val: Tensor
    test: Tensor

    def all(self) -> Tensor:
        """Every row once; a client with a single sample has it in two parts."""
        rows: Tensor = torch.unique(torch.cat((self.train, self.val, self.test)))
        return rows


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of every client, and the unlabeled and public rows."""

    clients: Mapping[ClientId, Parts]
    unlabeled: Tensor = field(default_factory=_no_rows)
    public: Tensor = field(default_factory=_no_rows)

    def _all_parts(self) -> list[Tensor]:
        client_parts = [rows for parts in self.clients.values() for rows in (parts.train, parts.val, parts.test)]
        return [self.unlabeled, self.public, *client_parts]

    def digest(self) -> str:
        """A hash of the clients, their order and their rows."""
        parts = self._all_parts()
        head = json.dumps([FORMAT, list(self.clients), [len(rows) for rows in parts]])
        rows = torch.cat(parts).to(torch.int64).numpy().astype("<i8")
        return hashlib.blake2b(head.encode() + rows.tobytes(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        """Write a safetensors file: one tensor of all rows, the size of every part, and the client names in the header."""
        parts = self._all_parts()
        content = {"rows": torch.cat(parts).to(torch.int64), "sizes": torch.tensor([len(rows) for rows in parts])}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_bytes(save(content, {"format": FORMAT, "clients": json.dumps(list(self.clients))}))
        os.replace(unfinished, path)

    @staticmethod
    def load(path: Path) -> "Partition":
        """Read a file written by `save`."""
        try:
            with safe_open(path, framework="pt") as file:
                head = file.metadata() or {}
                rows, sizes = file.get_tensor("rows"), file.get_tensor("sizes")
            names = json.loads(head.get("clients", "null"))
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a readable partition ({error})") from error
        if head.get("format") != FORMAT:
            raise DataError(f"{path}: format must be {FORMAT!r}, got {head.get('format')!r}; create the partition again")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise DataError(f"{path}: the list of clients is damaged; create the partition again")
        if not (
            rows.dtype == sizes.dtype == torch.int64
            and rows.ndim == sizes.ndim == 1
            and len(sizes) == 2 + 3 * len(names)
            and (sizes >= 0).all()
            and sizes.sum() == len(rows)
            and (rows >= 0).all()
        ):
            raise DataError(f"{path}: the rows do not match the {len(names)} clients; create the partition again")
        unlabeled, public, *parts = torch.split(rows, sizes.tolist())
        triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
        clients = {name: Parts(*triple) for name, triple in zip(names, triples, strict=True)}
        return Partition(clients, unlabeled, public)

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """The number of samples per client and class (or label), over all parts: clients x classes."""
        if not self.clients:
            return torch.zeros((0, classes), dtype=torch.int64)
        if labels.dim() == 2:  # multi-label
            return torch.stack([labels[p.all()].sum(0) for p in self.clients.values()])
        rows = [p.all() for p in self.clients.values()]
        client = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(of_client) for of_client in rows]))
        counts = torch.bincount(client * classes + labels[torch.cat(rows)], minlength=len(rows) * classes)
        return counts.reshape(len(rows), classes)

    def table(
        self, labels: Tensor, classes: tuple[str, ...], first: int | None = None
    ) -> tuple[tuple[list[str], list[list[str]]], str]:
        """Sizes and labels of all clients, or of the `first` ones: header and rows, the last of which is the sum; a caption.

        Few classes get one column each; for many, the table shows the number of classes and the most frequent ones.
        """
        counts = self.counts(labels, len(classes))
        names = [_printable(name) for name in classes]
        wide = len(classes) <= MAX_CLASS_COLUMNS
        sizes = [[len(p.train), len(p.val), len(p.test)] for p in self.clients.values()]

        def row(name: str, size: list[int], count: Tensor) -> list[str]:
            labelled = (
                [str(number) if number else "·" for number in count.tolist()]
                if wide
                else [str(int((count > 0).sum())), _frequent(count, names)]
            )
            return [name, *map(str, size), *labelled]

        header = ["client", "train", "val", "test", *(names if wide else ["classes", "most frequent"])]
        shown = len(sizes) if first is None else min(first, len(sizes))
        rows = [row(*line) for line in list(zip(self.clients, sizes, counts, strict=True))[:shown]]
        if shown < len(sizes):
            rows.append([f"... {len(sizes) - shown} more", *[""] * (len(header) - 1)])
        rows.append(row("all", [sum(column) for column in zip(*sizes, strict=True)] or [0, 0, 0], counts.sum(0)))
        return (header, rows), self._caption()

    def _caption(self) -> str:
        shared = (("unlabeled", self.unlabeled), ("public", self.public))
        return f"{len(self.clients)} clients" + "".join(f", {len(rows)} {name}" for name, rows in shared if len(rows))


def _printable(name: str) -> str:
    return name if name.strip() and name.isprintable() else repr(name)


def _frequent(counts: Tensor, names: list[str]) -> str:
    order = counts.argsort(descending=True, stable=True)[:MOST_FREQUENT].tolist()
    return "  ".join(f"{names[c]}:{int(counts[c])}" for c in order if counts[c])
