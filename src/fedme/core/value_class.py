"""Classes whose objects are made many times in a round."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value_class(kind: type[T]) -> type[T]:
    """A dataclass whose fields do not change.

    As with `dataclass(frozen=True)`, type checkers refuse to assign to a field. At run time nothing does: a frozen dataclass
    takes three times as long to make, and a client of a round needs ten of them.
    """
    return dataclass(unsafe_hash=True)(kind)
