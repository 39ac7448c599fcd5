"""Small operations of compiled code begin before all are known that wait at the same time, and end when their results are read.

Helper threads compute the first ones while Python still prepares the last ones, and the last ones while Python goes on with the
results of the first. Results depend on nothing else that runs. Larger operations are not begun early: they are divided better
when all are known.
"""

import time
from collections.abc import Hashable, Sequence
from typing import Any, overload

from fedme.core.operations import Evaluate, Op, Train
from fedme.execution.compiled import Compiled, with_scores
from fedme.execution.routing import Route, Tick, timed_by_effort
from fedme.execution.threads import Running

SMALL = 1e7  # effort of an operation that is not worth being divided with others, about 1 ms
TRAIN_CALL = 8e6  # effort of a call: fewer cost less, smaller ones are sooner at work
PREDICT_CALL = 4e7  # predictions of one call share the weights of a model that they have in common
MANY = 40  # operations of a call, however small
Result = tuple[Any, float]  # with its seconds


class EarlyCall:
    """Operations of one group with their routes. They are collected, then they run, then the results are read."""

    def __init__(self, trains: bool, evaluations: "list[EarlyCall]") -> None:
        self.enough = TRAIN_CALL if trains else PREDICT_CALL
        self.operations: list[Op] = []
        self.routes: list[Route] = []
        self.efforts: list[float] = []
        self.total = 0.0
        self.evaluations = evaluations  # calls of the group that wait for scores, which are computed together
        self._running: Running[list[Any]] | None = None
        self._seconds = 0.0
        self.known: list[Result] | None = None  # the results, once they are read

    def add(self, op: Op, route: Route, takes: float) -> int:
        """Add an operation; its place among the results."""
        self.operations.append(op)
        self.routes.append(route)
        self.efforts.append(takes)
        self.total += takes
        return len(self.operations) - 1

    @property
    def complete(self) -> bool:
        """Whether it has enough operations."""
        return self.total >= self.enough or len(self.operations) >= MANY

    def start(self) -> None:
        """Let a thread compute the operations."""
        began, backend = time.perf_counter(), self.routes[0].backend
        assert isinstance(backend, Compiled)
        self._running = backend.start(self.operations, self.routes)
        if any(isinstance(op, Evaluate) for op in self.operations):
            self.evaluations.append(self)
        self._seconds = time.perf_counter() - began

    def results(self, tick: Tick) -> Sequence[Result]:
        """The results with parts of the seconds of the call, by effort."""
        if self.known is None:
            calls = [self]
            if self in self.evaluations:
                calls = list(self.evaluations)
                self.evaluations.clear()
            operations = [op for call in calls for op in call.operations]
            values = [value for call in calls for value in call._ended()]
            began = time.perf_counter()
            values = with_scores(operations, values)
            scoring = (time.perf_counter() - began) / len(operations)
            first = 0
            for call in calls:
                count = len(call.operations)
                seconds = call._seconds + scoring * count
                call.known = timed_by_effort(values[first : first + count], call.efforts, seconds)
                first += count
            for _ in operations:
                tick()
        assert self.known is not None
        return self.known

    def _ended(self) -> list[Any]:
        """What the compiled code has computed."""
        running, self._running = self._running, None
        assert running is not None
        began = time.perf_counter()
        values = running.result()
        self._seconds += running.call.seconds + time.perf_counter() - began
        return values


Place = tuple[EarlyCall, int]  # of an operation: its call, and where in the call it is


class EarlyCalls:
    """The operations that were offered since calls were taken last."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, EarlyCall] = {}
        self._started: list[EarlyCall] = []
        self._evaluations: dict[Hashable, list[EarlyCall]] = {}
        self.places: dict[int, Place] = {}  # by the identity of the operation

    def offer(self, op: Op, route: Route, takes: float) -> None:
        """Take an operation if it is a small one of compiled code; `takes` is its effort."""
        if takes > SMALL or not isinstance(route.backend, Compiled):
            return
        call = self._waiting.get(route.group)
        if call is None:
            evaluations = self._evaluations.setdefault(route.group, [])
            call = self._waiting[route.group] = EarlyCall(isinstance(op, Train), evaluations)
        self.places[id(op)] = call, call.add(op, route, takes)
        if call.complete:
            self._start(self._waiting.pop(route.group))

    def taken(self) -> tuple[list[EarlyCall], dict[int, Place]]:
        """All calls, which are started, and the places of their operations."""
        for call in self._waiting.values():
            self._start(call)
        calls, places = self._started, self.places
        self._waiting, self._started, self._evaluations, self.places = {}, [], {}, {}
        return calls, places

    def _start(self, call: EarlyCall) -> None:
        call.start()
        self._started.append(call)


class Results(Sequence[Result]):
    """The results of operations in order: they are there, or have a place in a call, which is waited for when they are read."""

    def __init__(self, places: Sequence[Place | Result], tick: Tick) -> None:
        self._places, self._tick = places, tick

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> list[Result]: ...
    def __getitem__(self, place: int | slice) -> Result | list[Result]:
        if isinstance(place, int):
            return self._result(*self._places[place])
        return [self._result(first, last) for first, last in self._places[place]]

    def _result(self, first: Any, last: Any) -> Result:
        if not isinstance(first, EarlyCall):
            return first, last
        result: Result = (first.known or first.results(self._tick))[last]
        return result
