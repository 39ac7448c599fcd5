"""Advance the work of many clients in lockstep: the operations they wait for are executed together."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fedme.core.operations import Computation, Op
from fedme.core.value_class import value_class

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
TOGETHER = 8  # operations that an executor hears of at a time
Executor = Callable[[Sequence[Op]], Sequence[tuple[Any, float]]]  # the result of every operation and its seconds


@value_class
class Timed(Generic[T]):
    """A finished piece of work and its seconds: of its operations and of its own code."""

    value: T
    seconds: float


def run_in_lockstep(work: Mapping[K, Computation[T]], execute: Executor) -> dict[K, Timed[T]]:
    """Run every piece of work to its end; the results are in the order of the work."""
    results = dict(in_lockstep(work, execute))
    return {key: results[key] for key in work}


def in_lockstep(work: Mapping[K, Computation[T]], execute: Executor) -> Iterator[tuple[K, Timed[T]]]:
    """Run every piece of work to its end, and yield each as it ends.

    An executor that can `begin` operations early hears of them before all are known. What it does not need Python for goes on
    while the caller looks at what has ended.
    """
    begin, clock = getattr(execute, "begin", None), time.perf_counter
    keys, steps, seconds = list(work), list(work.values()), [0.0] * len(work)
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
                yield keys[index], Timed(end.value, spent + clock() - start)
                continue
            seconds[index] = spent + clock() - start
            waiting.append((index, len(operations)))
            wanted.extend(operations)
            if begin is not None and len(wanted) - begun >= TOGETHER:
                begin(wanted[begun:])
                begun = len(wanted)
        if waiting:
            answers = execute(tuple(wanted))
