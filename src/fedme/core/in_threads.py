"""Work on pieces of large arrays, on all processors: the libraries for arrays let other threads of Python run meanwhile."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fedme.core.processors import processors

T = TypeVar("T")
Result = TypeVar("Result")


def in_threads(work: Callable[[T], Result], pieces: Sequence[T]) -> list[Result]:
    """The result of every piece, in order. One piece needs no thread."""
    if len(pieces) < 2:
        return [work(piece) for piece in pieces]
    with ThreadPoolExecutor(processors()) as threads:
        return list(threads.map(work, pieces))
