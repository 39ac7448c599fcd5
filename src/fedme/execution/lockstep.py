"""Advance the work of many clients in lockstep: the operations they wait for are executed together."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedme.core.operations import Computation, Op, in_parallel

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
TOGETHER = 8  # operations that an executor hears of at a time
Executor = Callable[[Sequence[Op]], Sequence[tuple[Any, float]]]  # the result of every operation and its seconds


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A finished piece of work and its seconds."""

    value: T
    seconds: float


def run_in_lockstep(work: Mapping[K, Computation[T]], execute: Executor) -> dict[K, Timed[T]]:
    """Run every piece of work to its end. An executor that can `begin` operations early hears of them before all are known."""
    begin = getattr(execute, "begin", None)
    steps = in_parallel([_timed(computation) for computation in work.values()], begin, TOGETHER)
    try:
        operations = next(steps)
        while True:
            operations = steps.send(execute(operations))
    except StopIteration as finished:
        return dict(zip(work, finished.value, strict=True))


def _timed(steps: Computation[T]) -> Computation[Timed[T]]:
    """The same work with the seconds of its operations and of its own code."""
    seconds = 0.0
    answers: Sequence[Any] | None = None
    while True:
        start = time.perf_counter()
        try:
            operations = steps.send(answers)  # type: ignore[arg-type]
        except StopIteration as finished:
            return Timed(finished.value, seconds + time.perf_counter() - start)
        seconds += time.perf_counter() - start
        results = yield operations
        seconds += sum(spent for _, spent in results)
        answers = [value for value, _ in results]
