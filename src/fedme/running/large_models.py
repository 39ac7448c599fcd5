"""Rounds with large networks: the weights of messages, replies and states rest in the store, one client is at work at a time.

Operations of large networks run alone anyway (`execution/dispatcher.py`), so the results are those of all clients together.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import TypeVar

from fedme.core.data import ClientId
from fedme.federation.round import ClientStates
from fedme.running.weight_store import Store

T = TypeVar("T")
NEVER = -1  # the time of use of weights that nobody has read yet
PART = 4  # 1 / PART of the memory budget may rest in memory while a client is at work, which needs memory too


class LargeModels:
    """The weights of a round, of which at most a part of the budget is in memory. `large` are clients with large networks."""

    def __init__(self, store: Store, large: frozenset[ClientId], states: ClientStates) -> None:
        self.store, self.large, self.states = store, large, states

    def groups(self, downs: Mapping[ClientId, T]) -> Iterator[Mapping[ClientId, T]]:
        """Clients with large networks one by one, then all others together."""
        for client in downs:
            if client in self.large:
                yield {client: downs[client]}
        if others := {client: down for client, down in downs.items() if client not in self.large}:
            yield others

    def keep(self, value: T) -> T:
        """The same value with its weights in the store. New ones are the first to be written to files: they have to wait."""
        before = set(self.store.known)
        kept = self.store.keep(value)
        self.states.update({client: self.store.keep(state) for client, state in self.states.items()})
        for weights in set(self.store.known) - before:
            weights.used = NEVER
        self.store.settle(self.store.budget // PART, scratch=True)
        _return_freed_memory()
        return kept


def _return_freed_memory() -> None:
    """Give freed memory back to the system: the C library keeps that of layers below 32 MB, and pieces of it fit nothing."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
