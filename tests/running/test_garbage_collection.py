"""Objects that exist before the rounds are left out of garbage collections, and only until the last round."""

import gc
import itertools
import math
import time
import weakref

import pytest

from fedme.running import assembly, garbage_collection
from fedme.running.garbage_collection import existing_objects_left_out, rare_collections
from fedme.running.round_loop import RoundLoop
from fedme_test_runs import do


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


def test_an_inner_block_leaves_out_more_and_the_outer_one_ends_it():
    with existing_objects_left_out():
        outer = gc.get_freeze_count()
        kept = [[] for _ in range(1000)]
        with existing_objects_left_out():
            assert gc.get_freeze_count() >= outer + len(kept)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_before_the_first_run_nothing_is_collected(monkeypatch):
    made = []
    monkeypatch.setattr(garbage_collection, "_runs", itertools.count())
    monkeypatch.setattr(garbage_collection, "_next_collection", 0.0)
    monkeypatch.setattr(garbage_collection.gc, "collect", lambda: made.append(1))
    for number in range(2):
        with existing_objects_left_out():
            assert len(made) == number


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


def test_many_runs_in_one_process_do_not_keep_their_data(tmp_path, monkeypatch):
    made = []
    gather = assembly.gather

    def noted(experiment):
        federation = gather(experiment)
        made.append(weakref.ref(next(iter(federation.clients.values())).train.source))
        return federation

    monkeypatch.setattr(assembly, "gather", noted)
    monkeypatch.setattr(garbage_collection, "SHARE", math.inf)
    monkeypatch.setattr(garbage_collection, "_next_collection", 0.0)
    for number in range(3):
        do(tmp_path / str(number), "method.name=fedavg", "rounds=1", f"seed={number}")
    assert made[0]() is None


def test_collections_between_short_runs_are_rare(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(garbage_collection, "_next_collection", 0.0)
    monkeypatch.setattr(garbage_collection.gc, "collect", lambda: made.append(1) or time.sleep(0.05))
    for _ in range(5):
        with existing_objects_left_out():
            pass
    assert len(made) == 1


def test_a_round_has_few_collections_and_one_at_its_end(monkeypatch):
    monkeypatch.setattr(garbage_collection, "_next_collection", 0.0)
    before, during = gc.get_threshold(), []

    def note(phase, _):
        during.append(phase)

    try:
        with rare_collections(10_000):
            made = circle()
            gc.callbacks.append(note)
            kept = [[] for _ in range(garbage_collection.OBJECTS * 5_000)]
            assert not during
        assert during == ["start", "stop"]
    finally:
        gc.callbacks.remove(note)
    assert made() is None
    assert len(kept) == garbage_collection.OBJECTS * 5_000
    assert gc.get_threshold() == before


def test_a_round_without_collections_stays_without():
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rare_collections(10_000):
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
