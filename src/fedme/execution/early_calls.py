"""Small operations of compiled code begin before all are known that wait at the same time, and end when their results are read.

Helper threads compute the first ones while Python still prepares the last ones, and the last ones while Python goes on with the
results of the first. Results depend on nothing else that runs. Larger operations are not begun early: they are divided better
when all are known.
"""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, overload

from fedme.core.operations import Op, Train
from fedme.execution.compiled import Compiled
from fedme.execution.routing import Route, Tick, effort, timed_by_effort
from fedme.execution.threads import Running

SMALL = 1e7  # effort of an operation that is not worth being divided with others, about 1 ms
TRAIN_CALL = 8e6  # effort of a call: fewer cost less, smaller ones are sooner at work
PREDICT_CALL = 4e7  # predictions of one call share the weights of a model that they have in common
MANY = 40  # operations of a call, however small
Result = tuple[Any, float]  # with its seconds


class EarlyCall:
    """Operations of one group with their routes. They are collected, then they run, then the results are read."""

    def __init__(self) -> None:
        self.operations: list[Op] = []
        self.routes: list[Route] = []
        self.efforts: list[float] = []
        self.total = 0.0
        self._running: Running[list[Any]] | None = None
        self._seconds = 0.0
        self._results: dict[int, Result] = {}

    def add(self, op: Op, route: Route, takes: float) -> None:
        """Add an operation."""
        self.operations.append(op)
        self.routes.append(route)
        self.efforts.append(takes)
        self.total += takes

    @property
    def complete(self) -> bool:
        """Whether it has enough operations."""
        enough = TRAIN_CALL if isinstance(self.operations[0], Train) else PREDICT_CALL
        return self.total >= enough or len(self.operations) >= MANY

    def start(self) -> None:
        """Let a thread compute the operations."""
        began, backend = time.perf_counter(), self.routes[0].backend
        assert isinstance(backend, Compiled)
        self._running = backend.start(self.operations, self.routes)
        self._seconds = time.perf_counter() - began

    def results(self, tick: Tick) -> Mapping[int, Result]:
        """The results, by the identity of the operation; parts of the seconds of the call, by effort."""
        if self._running is not None:
            running, self._running = self._running, None
            began = time.perf_counter()
            values = running.result()
            seconds = self._seconds + running.call.seconds + time.perf_counter() - began
            self._results = dict(zip(map(id, self.operations), timed_by_effort(values, self.efforts, seconds), strict=True))
            for _ in values:
                tick()
        return self._results


class EarlyCalls:
    """The operations that were offered since calls were taken last."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, EarlyCall] = {}
        self._started: list[EarlyCall] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._started)

    def offer(self, op: Op, route: Route) -> None:
        """Take an operation if it is a small one of compiled code."""
        if not isinstance(route.backend, Compiled) or (takes := effort(op)) > SMALL:
            return
        call = self._waiting.get(route.group)
        if call is None:
            call = self._waiting[route.group] = EarlyCall()
        call.add(op, route, takes)
        if call.complete:
            self._start(self._waiting.pop(route.group))

    def taken(self) -> dict[int, EarlyCall]:
        """The call of every operation, by the identity of the operation; all are started."""
        for call in self._waiting.values():
            self._start(call)
        calls, self._waiting, self._started = self._started, {}, []
        return {id(op): call for call in calls for op in call.operations}

    def _start(self, call: EarlyCall) -> None:
        call.start()
        self._started.append(call)


class Results(Sequence[Result]):
    """The results of operations in order; those of a call are waited for when one of them is read."""

    def __init__(
        self, operations: Sequence[Op], calls: Mapping[int, EarlyCall], others: Mapping[int, Result], tick: Tick
    ) -> None:
        self._operations, self._calls, self._others, self._tick = operations, calls, others, tick

    def __len__(self) -> int:
        return len(self._operations)

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> list[Result]: ...
    def __getitem__(self, place: int | slice) -> Result | list[Result]:
        return self._result(self._operations[place]) if isinstance(place, int) else self._read(self._operations[place])

    def _read(self, operations: Iterable[Op]) -> list[Result]:
        return [self._result(op) for op in operations]

    def _result(self, op: Op) -> Result:
        call = self._calls.get(id(op))
        return self._others[id(op)] if call is None else call.results(self._tick)[id(op)]
