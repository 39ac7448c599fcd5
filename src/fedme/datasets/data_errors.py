"""Errors of data sets and partitions: a message names the file or the option, the problem and the remedy."""

from collections.abc import Collection
from typing import Any


class DataError(ValueError):
    """A file, an option or a set of samples cannot be used."""

    columns: tuple[Any, ...] = ()  # what the tables contain (`ColumnSummary`), if they could be read


class PartitionError(ValueError):
    """The samples cannot be partitioned as requested."""


def require(condition: bool, option: str, message: str, error: type[ValueError] = DataError) -> None:
    """Raise `error` unless the condition holds; the message begins with the name of the option."""
    if not condition:
        raise error(f"{option}: {message}")


def require_choice(option: str, value: str, choices: Collection[str], error: type[ValueError] = DataError) -> None:
    """Raise `error` unless the value of the option is one of the choices."""
    require(value in choices, option, f"must be one of {', '.join(choices)}, got {value!r}", error)
