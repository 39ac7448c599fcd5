"""Compute operations on several threads of this process, the longest first.

Only what needs no Python is computed on them: threads that run Python would wait for each other most of the time. The thread
that asks prepares the operations, while the others compute what is ready already, and then computes too.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar, cast

from fedme.core.operations import Op
from fedme.execution.worker_processes import effort

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Op)
Computing = Generator[Callable[[], None], None, T]  # prepares, yields what is to be computed, and returns what came of it


def on_threads(ops: Sequence[Kind], begun: Callable[[Kind], Computing[T]], threads: int, tick: Callable[[], None]) -> list[T]:
    """What came of every operation. `tick` is called on this thread, once for each that is done."""
    computing: dict[int, Computing[T]] = {}
    ready: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
    done: list[None] = []  # one for each operation, until it is told of
    failed: list[None] = []  # who fails, or is stopped, stops the others
    helpers = max(min(threads, len(ops)) - 1, 0)

    def compute(tell: Callable[[], None] = lambda: None) -> None:
        with _noted(failed):
            while not failed and (call := ready.get()) is not None:
                call()
                done.append(None)
                tell()

    def prepare() -> None:
        with _noted(failed):
            for index in sorted(range(len(ops)), key=lambda index: -effort(ops[index])):
                computing[index] = begun(ops[index])
                ready.put(next(computing[index]))
                tell()

    def tell() -> None:
        while done:
            done.pop()
            tick()

    with ThreadPoolExecutor(max(helpers, 1)) as pool:
        others = [pool.submit(compute) for _ in range(helpers)]
        try:
            prepare()
        finally:
            for _ in range(helpers + 1):
                ready.put(None)  # the end, for everyone
        compute(tell)
        for other in others:
            other.result()
    tell()
    return [_finished(computing[index]) for index in range(len(ops))]


@contextlib.contextmanager
def _noted(failed: list[None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed.append(None)
        raise


def _finished(computing: Computing[T]) -> T:
    try:
        next(computing)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("an operation is computed once")
