"""The columns of a table: what the clients have in common, and how values become numbers.

A column is numeric, or it has categories and is one-hot encoded; a category that is not known is "other": none of the known
ones is set. Gaps are NaN in numeric columns and a category of their own in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedme.core.typed import nearest
from fedme.datasets.data_errors import DataError
from fedme.datasets.raw_samples import Columns, RawSamples, Table, gaps

Missing = Literal["error", "median", "mean", "indicator"]
EVERY = "*"  # in a table of `data.missing`: all other columns


@dataclass(frozen=True)
class Column:
    """A column of a table: numeric, or categorical with these categories; the category "" is a gap."""

    name: str
    categories: tuple[str, ...] | None = None
    missing: Missing | None = None  # how gaps are filled; None: they are errors
    value: float | None = None  # what gaps are filled with
    agreed: bool | None = None  # the value is the same for all clients, because the experiment gives it
    na_values: tuple[float, ...] | None = None  # numbers that stand for a gap

    @property
    def width(self) -> int:
        """The number of features, without the indicator of gaps."""
        return 1 if self.categories is None else len(self.categories)

    @property
    def indicates(self) -> bool:
        """Whether another feature says where there was a gap."""
        return self.missing == "indicator" and self.categories is None

    def with_gaps(self, values: np.ndarray) -> np.ndarray:
        """The values of the column, with gaps instead of the numbers that stand for one."""
        if not self.na_values:
            return values
        numbers, _ = as_numbers(values)
        stands = np.isin(numbers, self.na_values)
        if values.dtype == object:
            return np.where(stands, "", values)
        return np.where(stands, np.nan, numbers) if stands.any() else values


@dataclass(frozen=True)
class TableRules:
    """What the experiment says about the columns of tables."""

    ignore: Sequence[str] = ()
    categorical: Sequence[str] = ()
    missing: Missing | Mapping[str, Missing] = "error"
    values: Mapping[str, float] = field(default_factory=dict)
    na_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def missing_of(self, name: str) -> Missing | None:
        """How gaps of a column are filled; None: they are errors."""
        table = self.missing if isinstance(self.missing, Mapping) else {EVERY: self.missing}
        chosen = table.get(name, table.get(EVERY, "error"))
        return None if chosen == "error" else chosen

    def check(self, names: Sequence[str]) -> None:
        """Raise a DataError for names that are no columns."""
        table = self.missing if isinstance(self.missing, Mapping) else {}
        options = {"categorical": self.categorical, "missing": table, "fill": self.values, "na_values": self.na_values}
        for option, given in options.items():
            for name in given:
                if name not in names and name != EVERY:
                    raise DataError(
                        f"data.{option}: unknown column '{name}'{nearest(name, names)}; the columns are {listed(names)}"
                    )
        for name in self.values:
            if self.missing_of(name) is None:
                raise DataError(f"data.fill: '{name}' has a value, but data.missing says that its gaps are errors")


def common_columns(raws: Sequence[RawSamples], rules: TableRules) -> tuple[Column, ...]:
    """The columns that all clients have; a DataError names a client that has other ones."""
    tables = [(raw.where, _columns(raw, rules.ignore)) for raw in raws]
    first, names = raws[0].where, list(tables[0][1])
    for where, table in tables:
        if extra := [name for name in table if name not in names]:
            raise DataError(f"{where}: the column '{extra[0]}' is missing in {first}; add it there, or to data.ignore")
        if missing := [name for name in names if name not in table]:
            raise DataError(f"{where}: the column '{missing[0]}' of {first} is missing; add it, or add it to data.ignore")
    if not names:
        raise DataError(f"{first}: there are no input columns besides the label")
    rules.check(names)
    columns = []
    for name in names:
        marked = Column(name, na_values=rules.na_values.get(name))
        columns.append(_common_column(marked, [(where, marked.with_gaps(table[name])) for where, table in tables], rules))
    return tuple(columns)


def _common_column(column: Column, parts: Sequence[tuple[str, np.ndarray]], rules: TableRules) -> Column:
    """The column as it suits all clients; one without a single value suits every type."""
    name = column.name
    missing, any_gaps = rules.missing_of(name), any(gaps(values).any() for _, values in parts)
    known = [(where, values) for where, values in parts if not gaps(values).all()]
    texts = [where for where, values in known if values.dtype == object]
    if not texts and name not in rules.categorical:
        if missing == "indicator" and not any_gaps:
            missing = "median"  # an indicator that is always 0 says nothing
        return replace(column, missing=missing, value=rules.values.get(name), agreed=True if name in rules.values else None)
    if texts and len(texts) < len(known) and name not in rules.categorical:
        numeric = next(where for where, values in known if values.dtype != object)
        problem = f"column '{name}' contains text, but numbers in {numeric}"
        raise DataError(f"{texts[0]}: {problem}; correct it, or add it to data.categorical")
    if name in rules.values:
        raise DataError(f"data.fill: '{name}' has categories; its gaps are a category of their own")
    categories = {text for _, values in known for text in as_text(values)} - {""}
    return replace(column, categories=(*sorted(categories), *([""] if missing and any_gaps else [])), missing=missing)


def _columns(raw: RawSamples, ignore: Sequence[str]) -> Columns:
    assert isinstance(raw.inputs, Table)
    return {name: values for name, values in raw.inputs.columns.items() if name not in ignore}


EMPTY = "is empty"


def unusable_rows(column: Column, values: np.ndarray | None) -> dict[int, str]:
    """The rows of a column that cannot be used, with the reason."""
    if values is None:
        return {}
    reasons, values = {}, column.with_gaps(values)
    if column.missing is None and not (column.categories and "" in column.categories):
        reasons = dict.fromkeys(gaps(values).nonzero()[0].tolist(), f"in '{column.name}' {EMPTY}")
    if column.categories is None:
        numbers, not_a_number = as_numbers(values)
        for row in not_a_number.nonzero()[0].tolist():
            reasons[row] = f"in '{column.name}' must be a number, got '{values[row]}'"
        for row in np.isinf(numbers).nonzero()[0].tolist():
            reasons[row] = f"in '{column.name}' is infinite"
    return reasons


def as_numbers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A column as numbers, with NaN for gaps, and where there is text that is no number."""
    if values.dtype != object:
        return values, np.zeros(len(values), dtype=bool)
    numbers, wrong = np.full(len(values), np.nan), np.zeros(len(values), dtype=bool)
    for row, text in enumerate(values):
        try:
            numbers[row] = float(text) if text else np.nan
        except ValueError:
            wrong[row] = True
    return numbers, wrong


def one_hot(column: Column, values: np.ndarray) -> np.ndarray:
    """One feature per category; a category that is not known sets none of them."""
    assert column.categories is not None
    index = {category: i for i, category in enumerate(column.categories)}
    places = [index.get(text, len(index)) for text in as_text(values)]
    return np.eye(len(index) + 1)[places, :-1]


def as_text(values: np.ndarray) -> list[str]:
    """The categories of a column; integers have no decimal point, and gaps are empty."""
    if values.dtype == object:
        return [str(value) for value in values]
    return ["" if v != v else str(int(v)) if float(v).is_integer() else str(v) for v in values.tolist()]


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "")
