"""Python's garbage collector looks at all objects again and again: in rounds of many small clients, a fifth of the time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def existing_objects_left_out() -> Iterator[None]:
    """Garbage is looked for only among the objects that are made from here on, unless somebody else has arranged that."""
    arranged = gc.get_freeze_count() > 0
    if not arranged:
        gc.freeze()
    try:
        yield
    finally:
        if not arranged:
            gc.unfreeze()
