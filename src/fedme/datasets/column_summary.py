"""What the columns of the clients' tables contain: types, ranges and gaps, and columns that are far from the others'."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedme.core.data import ClientId
from fedme.datasets.raw_samples import RawSamples, Table, gaps, to_column
from fedme.datasets.table_columns import Column, TableRules, as_text

MIN_VALUES = 5  # a client with fewer values in a column is not compared with others
SHOWN_CATEGORIES = 4


@dataclass(frozen=True)
class ClientColumn:
    """A column at one client; numbers are None for text and for a column without values."""

    samples: int
    gaps: int
    low: float | None = None
    median: float | None = None
    high: float | None = None
    central: tuple[float, float] | None = None  # the quantiles 5 % and 95 %, from `MIN_VALUES` values on
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: np.ndarray) -> "ClientColumn":
        """Summarise the values of a column."""
        missing = gaps(values)
        present = values[~missing]
        counts = len(values), int(missing.sum())
        if not len(present):
            return cls(*counts)
        if values.dtype == object:
            return cls(*counts, categories=tuple(sorted({*as_text(present)})))
        low, start, median, end, high = np.quantile(present.astype(np.float64), (0, 0.05, 0.5, 0.95, 1)).tolist()
        return cls(*counts, low, median, high, (start, end) if len(present) >= MIN_VALUES else None)

    def text(self) -> str:
        """As a table cell: the range and the median, or the categories, and the gaps."""
        if self.categories:
            more = " ..." if len(self.categories) > SHOWN_CATEGORIES else ""
            content = ", ".join(self.categories[:SHOWN_CATEGORIES]) + more
        elif self.low is None or self.high is None:
            content = "no values"
        else:
            content = f"{self.low:g} to {self.high:g}" + (f" ({self.median:g})" if self.median is not None else "")
        return content + (f", {self.gaps} missing" if self.gaps and content != "no values" else "")


@dataclass(frozen=True)
class ColumnSummary:
    """A column at all clients."""

    name: str
    clients: Mapping[ClientId, ClientColumn]
    label: bool = False

    @property
    def kind(self) -> str:
        """Whether it contains numbers or text, and whether it is a label."""
        content = "text" if any(client.categories for client in self.clients.values()) else "number"
        return f"{content}, label" if self.label else content

    def total(self) -> ClientColumn:
        """All clients together; the median is left out."""
        samples, missing = (sum(getattr(client, name) for client in self.clients.values()) for name in ("samples", "gaps"))
        categories = {category for client in self.clients.values() for category in client.categories}
        lows = [client.low for client in self.clients.values() if client.low is not None]
        highs = [client.high for client in self.clients.values() if client.high is not None]
        return ClientColumn(
            samples, missing, min(lows, default=None), None, max(highs, default=None), None, tuple(sorted(categories))
        )

    def far_from_the_others(self) -> list[ClientId]:
        """The clients whose central values do not overlap with those of most other clients."""
        central = {client: column.central for client, column in self.clients.items() if column.central is not None}
        far = []
        for client, (start, end) in central.items():
            others = [interval for other, interval in central.items() if other != client]
            apart = sum(end < low or start > high for low, high in others)
            if 2 * apart > len(others):
                far.append(client)
        return far

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "kind": self.kind, "clients": {client: asdict(c) for client, c in self.clients.items()}}


def summarise(clients: Mapping[ClientId, Sequence[RawSamples]], rules: TableRules) -> tuple[ColumnSummary, ...]:
    """The columns of the clients' tables, labels at the end; none if their samples are no tables."""
    columns: dict[str, dict[ClientId, ClientColumn]] = {}
    for client, raws in clients.items():
        tables = [raw.inputs.columns for raw in raws if isinstance(raw.inputs, Table)]
        for name in tables[0] if tables else ():
            if name not in rules.ignore:
                marked = Column(name, na_values=rules.na_values.get(name))
                values = [marked.with_gaps(table[name]) for table in tables if name in table]
                text = any(part.dtype == object and not gaps(part).all() for part in values)
                parts = [np.array(as_text(part), dtype=object) if text else part.astype(np.float64) for part in values]
                columns.setdefault(name, {})[client] = ClientColumn.of(np.concatenate(parts))
    inputs = [ColumnSummary(name, by_client) for name, by_client in columns.items()]
    return (*inputs, *(_labels(clients) if inputs else ()))


def _labels(clients: Mapping[ClientId, Sequence[RawSamples]]) -> Iterator[ColumnSummary]:
    """The label columns."""
    names = next((raw.label_names for raws in clients.values() for raw in raws), ())
    for i, name in enumerate(names):
        by_client = {}
        for client, raws in clients.items():
            matrices = [np.asarray(raw.labels).reshape(len(raw), -1) for raw in raws if raw.labels is not None]
            parts = [to_column(matrix[:, i]) for matrix in matrices if i < matrix.shape[1]]
            if not parts:  # an error about the number of labels follows
                continue
            text = any(part.dtype == object for part in parts)
            same = [np.array(as_text(part), dtype=object) if text else part.astype(np.float64) for part in parts]
            by_client[client] = ClientColumn.of(np.concatenate(same))
        yield ColumnSummary(name, by_client, label=True)


def range_notes(summaries: Sequence[ColumnSummary]) -> tuple[str, ...]:
    """A note for every client with a column that is far from the others' range, as another unit would be."""
    notes = []
    for summary in summaries:
        if summary.label:  # clients may have different classes
            continue
        far = summary.far_from_the_others()
        for client in far[:1] if len(summary.clients) == 2 else far:
            central = summary.clients[client].central
            others = [c.central for name, c in summary.clients.items() if name != client and c.central is not None]
            assert central is not None
            low, high = min(interval[0] for interval in others), max(interval[1] for interval in others)
            notes.append(
                f"client {client}: '{summary.name}' is mostly between {central[0]:.4g} and {central[1]:.4g}, but between "
                f"{low:.4g} and {high:.4g} at other clients: another unit, or a number that stands for a gap (data.na_values)?"
            )
    return tuple(notes)
