"""Python's garbage collector looks at all objects again and again: in rounds of many small clients, a fifth of the time."""

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator

SHARE = 0.01  # of the time of a process that whole collections between rounds and between runs may take
OBJECTS = 100  # that are made for a client in a round and live until its end, at least

_next_collection = 0.0
_runs = itertools.count()
_inside = 0  # how many blocks of `existing_objects_left_out` have begun and not ended


@contextlib.contextmanager
def existing_objects_left_out() -> Iterator[None]:
    """Garbage is looked for only among the objects that are made from here on, unless somebody else has arranged that.

    What is garbage already is collected first: with many runs in one process, the data of each would stay for a long time.
    Before the first run there is little of it, and many objects to look at. An inner block leaves out what was made since.
    """
    global _inside
    if gc.get_freeze_count() > 0 and not _inside:
        yield
        return
    if not _inside and next(_runs):
        _collect()
    gc.freeze()
    _inside += 1
    try:
        yield
    finally:
        _inside -= 1
        if not _inside:
            gc.unfreeze()


@contextlib.contextmanager
def rare_collections(clients: int) -> Iterator[None]:
    """A round of so many clients: garbage is looked for once as many objects were made as they have, and after the round.

    Most of these objects live until the end of the round. To look at them again and again took a third of a round of 10,000.
    """
    before = gc.get_threshold()
    if before[0]:  # else there are no collections
        gc.set_threshold(max(before[0], OBJECTS * clients), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
    if before[0]:
        _collect()


def _collect() -> None:
    """Collect all garbage, unless short rounds or runs follow so fast that collections would take much of the time."""
    global _next_collection
    start = time.monotonic()
    if start >= _next_collection:
        gc.collect()
        end = time.monotonic()
        _next_collection = end + (end - start) / SHARE
