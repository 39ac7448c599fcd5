"""Compute operations on several threads of this process, the longest first.

Helper threads compute only what needs no Python; they would wait for each other otherwise. The calling thread prepares the
operations while the helpers compute those that are ready, and then computes too.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar, cast

from fedme.core.operations import Op
from fedme.execution.routing import Tick, effort, no_tick

T = TypeVar("T")
AnyOp = TypeVar("AnyOp", bound=Op)
Computing = Generator[Callable[[], None], None, T]  # prepares, yields what is to be computed, and returns the result


def on_threads(ops: Sequence[AnyOp], start: Callable[[AnyOp], Computing[T]], threads: int, tick: Tick) -> list[T]:
    """The results of all operations. `tick` is called on this thread, once per finished operation."""
    computing: dict[int, Computing[T]] = {}
    ready: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: nothing follows
    finished: list[None] = []  # one entry per operation, until its tick
    failed: list[None] = []  # an exception on one thread stops the others
    helpers = max(min(threads, len(ops)) - 1, 0)

    def compute(after_each: Tick = no_tick) -> None:
        with _noting(failed):
            while not failed and (call := ready.get()) is not None:
                call()
                finished.append(None)
                after_each()

    def report() -> None:
        while finished:
            finished.pop()
            tick()

    with ThreadPoolExecutor(max(helpers, 1)) as pool:
        futures = [pool.submit(compute) for _ in range(helpers)]
        try:
            with _noting(failed):
                for index in sorted(range(len(ops)), key=lambda index: -effort(ops[index])):
                    computing[index] = start(ops[index])
                    ready.put(next(computing[index]))
                    report()
        finally:
            for _ in range(helpers + 1):
                ready.put(None)
        compute(report)
        for future in futures:
            future.result()
    report()
    return [_result(computing[index]) for index in range(len(ops))]


@contextlib.contextmanager
def _noting(failed: list[None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed.append(None)
        raise


def _result(computing: Computing[T]) -> T:
    try:
        next(computing)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("an operation yields one computation")
