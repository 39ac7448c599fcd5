"""Compute pieces of work on several threads of this process, in order. A piece is one operation or several small ones.

Helper threads compute only what needs no Python; they would wait for each other otherwise. The calling thread prepares the
pieces while the helpers compute those that are ready, and then computes too.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from fedme.execution.routing import Tick, no_tick

T = TypeVar("T")
Item = TypeVar("Item")
Computing = Generator[Callable[[], None], None, T]  # prepares, yields what is to be computed, and returns the result


def on_threads(
    pieces: Sequence[Sequence[Item]], start: Callable[[Sequence[Item]], Computing[T]], threads: int, tick: Tick
) -> list[T]:
    """The results of all pieces. `tick` is called on this thread, once per item of a finished piece."""
    computing: list[Computing[T]] = []
    ready: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()  # None: nothing follows
    finished: list[int] = []  # the sizes of finished pieces, until their ticks
    failed: list[None] = []  # an exception on one thread stops the others
    helpers = max(min(threads, len(pieces)) - 1, 0)

    def compute(after_each: Tick = no_tick) -> None:
        with _noting(failed):
            while not failed and (item := ready.get()) is not None:
                size, call = item
                call()
                finished.append(size)
                after_each()

    def report() -> None:
        while finished:
            for _ in range(finished.pop()):
                tick()

    futures = [_helpers(helpers).submit(compute) for _ in range(helpers)]
    try:
        try:
            with _noting(failed):
                for piece in pieces:
                    computing.append(start(piece))
                    ready.put((len(piece), next(computing[-1])))
                    if len(computing) <= 2 * helpers:
                        time.sleep(0)  # let go of the interpreter, so that a helper can take the piece
                    report()
        finally:
            for _ in range(helpers + 1):
                ready.put(None)
        compute(report)
    finally:
        wait(futures)  # what they compute is in the memory of this call
    for future in futures:
        future.result()
    report()
    return [result_of(computation) for computation in computing]


@functools.lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads that wait for work: it takes longer to start one than to train a small network."""
    return ThreadPoolExecutor(count, "fedme-helper")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork


@contextlib.contextmanager
def _noting(failed: list[None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        failed.append(None)
        raise


def result_of(computing: Generator[Any, None, T]) -> T:
    """What a generator returns that has yielded the only thing that it yields."""
    try:
        next(computing)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("one thing is yielded, not two")
