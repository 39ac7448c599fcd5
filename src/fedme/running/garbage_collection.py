"""Python's garbage collector looks at all objects again and again: in rounds of many small clients, a fifth of the time."""

import contextlib
import gc
import time
from collections.abc import Iterator

SHARE = 0.02  # of the time of a process with many runs that whole collections between them may take

_next_collection = 0.0


@contextlib.contextmanager
def existing_objects_left_out() -> Iterator[None]:
    """Garbage is looked for only among the objects that are made from here on, unless somebody else has arranged that.

    What is garbage already is collected first: with many runs in one process, the data of each would stay for a long time.
    """
    arranged = gc.get_freeze_count() > 0
    if not arranged:
        _collect()
        gc.freeze()
    try:
        yield
    finally:
        if not arranged:
            gc.unfreeze()


def _collect() -> None:
    """Collect all garbage, unless short runs follow each other so fast that collections would take most of the time."""
    global _next_collection
    start = time.monotonic()
    if start >= _next_collection:
        gc.collect()
        end = time.monotonic()
        _next_collection = end + (end - start) / SHARE
