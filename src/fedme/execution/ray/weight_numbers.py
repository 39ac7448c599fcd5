"""The numbers of sets of weights, by which driver and actors know them. A number never means other weights: they are values."""

import weakref
from collections import deque

from fedme.core.held_params import held_params
from fedme.core.tree import Params
from fedme.execution.ray.messages import Number


class WeightNumbers:
    """The number of every set of weights that an actor may have, as long as the set lives in this process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Number, weakref.ref[Params]]] = {}  # by identity
        self._for_now: dict[int, tuple[Number, Params]] = {}  # of dictionaries, whose end nobody notices
        self._next = 0
        self._gone: deque[Number] = deque()

    def of(self, params: Params) -> Number:
        """The number of these weights."""
        held = held_params(params)
        owner = params if held is None else held
        known = self._known.get(id(owner)) or self._for_now.get(id(owner))
        if known is not None:
            return known[0]
        number = self.reserve(1)
        if isinstance(owner, dict):
            self._for_now[id(owner)] = number, owner
        else:
            self.add(owner, number)
        return number

    def add(self, owner: Params, number: Number) -> None:
        """Give weights a number that was reserved."""
        place = id(owner)

        def end(_: object) -> None:
            del self._known[place]
            self._gone.append(number)

        self._known[place] = number, weakref.ref(owner, end)

    def reserve(self, count: int) -> Number:
        """The first of some new numbers."""
        first = self._next
        self._next += count
        return first

    def gone(self) -> list[Number]:
        """The numbers of weights that have ended since the last call; those of dictionaries end with this call."""
        self._gone.extend(number for number, _ in self._for_now.values())
        self._for_now.clear()
        return [self._gone.popleft() for _ in range(len(self._gone))]
