"""A table whose entries come one after another, and are waited for when they are read."""

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Arriving(Mapping[K, V], Generic[K, V]):
    """The entries that an iterator yields, in its order. Who reads them in this order has each as soon as it is there.

    If the iterator raises an error, every read of what has not come raises it.
    """

    def __init__(self, entries: Iterable[tuple[K, V]]) -> None:
        self._entries, self._order, self._arrived = iter(entries), list[K](), dict[K, V]()
        self._error: BaseException | None = None

    def __getitem__(self, key: K) -> V:
        if key not in self:
            raise KeyError(key)
        return self._arrived[key]

    def get(self, key: K, default: Any = None) -> Any:
        """The entry, or `default` if none comes; not if what it is waited for raises a KeyError."""
        return self._arrived[key] if key in self else default

    def __contains__(self, key: object) -> bool:
        while key not in self._arrived:
            if not self._one_more():
                return False
        return True

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.items())

    def items(self) -> ItemsView[K, V]:
        """The entries, each as soon as it is there."""
        return _Items(self)

    def __len__(self) -> int:
        while self._one_more():
            pass
        return len(self._arrived)

    def _one_more(self) -> bool:
        """Wait for an entry; false if there are no more."""
        if self._error is not None:
            raise self._error
        try:
            entry = next(self._entries, None)
        except BaseException as error:
            self._error = error
            raise
        if entry is None:
            return False
        if entry[0] not in self._arrived:
            self._order.append(entry[0])
        self._arrived[entry[0]] = entry[1]
        return True


class _Items(ItemsView[K, V]):
    """The same entries, without looking each up."""

    def __init__(self, table: Arriving[K, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[K, V]]:
        table, place = self._table, 0
        while place < len(table._order) or table._one_more():
            key = table._order[place]
            yield key, table._arrived[key]
            place += 1
