"""A table whose entries come one after another, and are waited for when they are read."""

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Arriving(Mapping[K, V], Generic[K, V]):
    """The entries that an iterator yields. Who reads them in their order has each as soon as it is there."""

    def __init__(self, entries: Iterable[tuple[K, V]]) -> None:
        self._entries, self._arrived = iter(entries), dict[K, V]()

    def __getitem__(self, key: K) -> V:
        if key not in self:
            raise KeyError(key)
        return self._arrived[key]

    def __contains__(self, key: object) -> bool:
        return key in self._arrived or any(arrived == key for arrived in self._coming())

    def __iter__(self) -> Iterator[K]:
        yield from list(self._arrived)
        yield from self._coming()

    def items(self) -> ItemsView[K, V]:
        """The entries, each as soon as it is there."""
        return _Items(self)

    def __len__(self) -> int:
        for _ in self._coming():
            pass
        return len(self._arrived)

    def _coming(self) -> Iterator[K]:
        for key, value in self._entries:
            self._arrived[key] = value
            yield key


class _Items(ItemsView[K, V]):
    """The same entries, without looking each up."""

    def __init__(self, table: Arriving[K, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[K, V]]:
        yield from list(self._table._arrived.items())
        for key in self._table._coming():
            yield key, self._table._arrived[key]
