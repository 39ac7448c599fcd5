"""Advance the work of many clients in lockstep: the operations they wait for are executed together."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedme.core.operations import Computation, Op

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
TOGETHER = 8  # operations that an executor hears of at a time
Executor = Callable[[Sequence[Op]], Sequence[tuple[Any, float]]]  # the result of every operation and its seconds


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A finished piece of work and its seconds: of its operations and of its own code."""

    value: T
    seconds: float


def run_in_lockstep(work: Mapping[K, Computation[T]], execute: Executor) -> dict[K, Timed[T]]:
    """Run every piece of work to its end. An executor that can `begin` operations early hears of them before all are known."""
    begin, clock = getattr(execute, "begin", None), time.perf_counter
    steps, seconds = list(work.values()), [0.0] * len(work)
    finished: list[Any] = [None] * len(work)
    waiting = [(index, -1) for index in range(len(steps))]  # what has not ended, and for how many operations it waits
    answers: Sequence[tuple[Any, float]] = ()
    while waiting:
        pending, waiting, begun, first = waiting, [], 0, 0
        wanted: list[Op] = []
        for index, count in pending:
            values, spent = None, seconds[index]
            if count >= 0:
                values = []
                for value, took in answers[first : first + count]:
                    values.append(value)
                    spent += took
                first += count
            start = clock()
            try:
                operations = steps[index].send(values)
            except StopIteration as end:
                finished[index] = Timed(end.value, spent + clock() - start)
                continue
            seconds[index] = spent + clock() - start
            waiting.append((index, len(operations)))
            wanted.extend(operations)
            if begin is not None and len(wanted) - begun >= TOGETHER:
                begin(wanted[begun:])
                begun = len(wanted)
        if waiting:
            answers = execute(tuple(wanted))
    return dict(zip(work, finished, strict=True))
