"""Errors of data sets and partitions: a message names the file or the option, the problem and the remedy."""

import os
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


def require_memory(option: str, value: int, samples: int, bytes_each: int, remedy: str) -> None:
    """Raise a DataError if that many samples are more than the memory of this machine: they would end the program."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = samples * bytes_each
    takes = f"{value} makes {samples:,} samples, which take {needed / 1e9:,.1f} GB"
    require(needed < memory, option, f"{takes}, and this machine has {memory / 1e9:.1f} GB of memory; {remedy}")
