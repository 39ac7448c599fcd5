"""Who borrows whose model: never one's own, within the cluster where possible, and never one that does not fit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from fedme.core.key import Key
from fedme.core.model import Model
from fedme.methods.fedme.exchange import acceptance, lenders
from fedme_test_support import ARCHS, DENSE, LINEAR, WIDE, task


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 99))
def test_never_oneself_and_within_the_cluster_unless_alone_in_it(labels, seed):
    clusters = {str(i): label for i, label in enumerate(labels)}
    chosen = lenders(clusters, None, Key(seed))
    assert chosen == lenders(clusters, lambda b, lender: True, Key(seed))  # everybody is looked at: the slow way
    assert list(chosen) == list(clusters)
    for me, lender in chosen.items():
        assert lender != me
        if len(clusters) == 1:
            assert lender is None
        elif labels.count(clusters[me]) > 1:
            assert clusters[lender] == clusters[me]
        else:
            assert lender in clusters


def test_the_key_and_ones_own_name_decide():
    clusters = dict.fromkeys("abcdefgh", 0)
    first = lenders(clusters, lambda b, lender: True, Key(1))
    assert lenders(clusters, lambda b, lender: True, Key(1)) == first
    assert lenders(clusters, lambda b, lender: True, Key(2)) != first
    # Draws are independent: what others may take does not change mine.
    assert lenders(clusters, lambda b, lender: b != "a", Key(1)) == first | {"a": None}


def test_everybody_is_drawn_about_equally_often():
    clusters = {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1}
    draws = [lenders(clusters, lambda b, lender: True, Key(seed)) for seed in range(1200)]
    for me in "abcd":
        counts = {other: sum(draw[me] == other for draw in draws) for other in "abcd" if other != me}
        assert sum(counts.values()) == 1200
        assert all(330 < count < 470 for count in counts.values())  # 400 +- 4 standard deviations
    alone = [sum(draw["e"] == other for draw in draws) for other in "abcd"]
    assert all(235 < count < 365 for count in alone)  # 300 each: anybody of the cohort
    both = sum(draw["a"] == "b" and draw["b"] == "a" for draw in draws)
    assert 85 < both < 185  # independent: one ninth of the draws


def test_room_limits_are_kept_even_if_the_cluster_has_nothing_else():
    size = {arch.name: arch.parameters for arch in ARCHS.values()}
    archs = (LINEAR, DENSE, WIDE, LINEAR)
    models = {str(i): Model.init(arch, Key(i)) for i, arch in enumerate(archs)}
    setting = task(archs, room={"0": size["dense"], "1": size["linear"], "2": size["linear"] - 1})
    fits = acceptance(setting, models)
    assert fits("0", "1")  # exactly as large as there is room
    assert not fits("0", "2")
    assert not fits("2", "0")
    assert fits("3", "2")  # no limit
    clusters = {"0": 0, "2": 0, "1": 1, "3": 1}
    for seed in range(20):
        chosen = lenders(clusters, fits, Key(seed))
        assert chosen["0"] in ("1", "3")  # the other one of its cluster is too large: somebody else's, then
        assert chosen["1"] == "3"
        assert chosen["2"] is None  # nothing fits
        assert chosen["3"] == "1"


def test_room_is_for_the_model_that_is_lent_now_not_for_the_one_it_started_with():
    setting = task((LINEAR, DENSE), room={"0": DENSE.parameters})
    assert not acceptance(setting, {"0": Model.init(LINEAR, Key(0)), "1": Model.init(WIDE, Key(1))})("0", "1")


@pytest.mark.parametrize("clusters", [{}, {"a": 0}])
def test_a_cohort_of_nobody_or_one(clusters):
    assert lenders(clusters, lambda b, lender: True, Key(0)) == dict.fromkeys(clusters)


def test_no_wishes_no_questions_asked():
    models = {str(i): Model.init(LINEAR, Key(i)) for i in range(2)}
    assert acceptance(task((LINEAR, LINEAR)), models) is None
    for wish in ({"max_parameters": 5}, {"accepts": ("linear",)}, {"lends_to": ("1",)}):
        plain = task((LINEAR, LINEAR))
        members = {**plain.members, "0": replace(plain.members["0"], **wish)}
        assert acceptance(replace(plain, members=members), models) is not None
