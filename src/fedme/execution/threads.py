"""Compute calls of the compiled code on several threads of this process (`compiled_threads.hpp`).

Helpers need no Python: they compute a call from the moment it is started, while this thread prepares the next one. Who waits
for a result computes too.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

from fedme.execution.compiled_calls import Call
from fedme.execution.routing import Tick

T = TypeVar("T")
Item = TypeVar("Item")
Computing = Generator[Call, None, T]  # prepares, yields the call that is to be computed, and returns the result


class Helpers:
    """Threads that wait for calls: it takes longer to start one than to train a small network. They are never ended."""

    def __init__(self, code: ctypes.CDLL, threads: int) -> None:
        self._start, self._finish, self._cancel = code.fedme_start, code.fedme_finish, code.fedme_cancel
        for function in (self._start, self._finish, self._cancel):
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        code.fedme_helpers.argtypes, code.fedme_helpers.restype = (ctypes.c_int64,), ctypes.c_void_p
        self.threads, self._place = threads, code.fedme_helpers(threads - 1)

    @classmethod
    def of(cls, code: ctypes.CDLL, threads: int) -> "Helpers":
        """So many threads, of which the one that waits is one."""
        return _helpers(code, threads)

    def start(self, call: Call) -> None:
        """Let a thread compute a call."""
        self._start(self._place, call.place)

    def finish(self, call: Call) -> None:
        """Wait for a call, and compute what waits in the meantime."""
        while not call.ended:
            self._finish(self._place, call.place)

    def cancel(self, call: Call) -> None:
        """Leave a call that nobody computes yet."""
        self._cancel(self._place, call.place)


_helpers = functools.lru_cache(maxsize=None)(Helpers)
os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork


class Running(Generic[T]):
    """A call that was started. It is ended before it is forgotten, for its threads write to its memory."""

    def __init__(self, computing: Computing[T], helpers: Helpers) -> None:
        self._computing, self._helpers, self.call = computing, helpers, next(computing)
        helpers.start(self.call)

    def result(self) -> T:
        """What was computed."""
        self._helpers.finish(self.call)
        return result_of(self._computing)

    def cancel(self) -> None:
        """Leave what nobody computes yet."""
        self._helpers.cancel(self.call)

    def __del__(self) -> None:
        if hasattr(self, "call") and not self.call.ended:
            self.cancel()
            self._helpers.finish(self.call)


def on_threads(
    pieces: Iterable[Sequence[Item]], prepare: Callable[[Sequence[Item]], Computing[T]], helpers: Helpers, tick: Tick
) -> list[T]:
    """The results of all pieces of work. `tick` is called on this thread, once per item of a piece whose result is there."""
    running: list[tuple[int, Running[T]]] = []
    results = []
    try:
        for piece in pieces:
            running.append((len(piece), Running(prepare(piece), helpers)))
        for size, call in running:
            results.append(call.result())
            for _ in range(size):
                tick()
    finally:
        for _, call in running[len(results) :]:
            call.cancel()
    return results


def result_of(computing: Generator[Any, None, T]) -> T:
    """What a generator returns that has yielded the only thing that it yields."""
    try:
        next(computing)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("one thing is yielded, not two")
