"""Objects that exist before the rounds are left out of garbage collections, and only until the last round."""

import gc
import weakref

import pytest

from fedme.running.garbage_collection import existing_objects_left_out
from fedme.running.round_loop import RoundLoop


class Node:
    """Something that can refer to itself."""


def circle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_garbage_that_is_made_inside_is_collected():
    with existing_objects_left_out():
        assert gc.get_freeze_count() > 0
        made = circle()
        gc.collect()
        assert made() is None
    assert gc.get_freeze_count() == 0


def test_they_are_looked_at_again_after_an_error():
    with pytest.raises(ValueError, match="stop"), existing_objects_left_out():
        raise ValueError("stop")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen():
    gc.freeze()
    try:
        with existing_objects_left_out():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_rounds_are_played_like_that():
    seen = []

    class Stopped(RoundLoop):
        def __init__(self):
            pass

        @property
        def experiment(self):
            seen.append(gc.get_freeze_count())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopped().run(None, {})
    assert seen[0] > 0
    assert gc.get_freeze_count() == 0
