"""The shared settings of local training."""

import math
import re
from collections import Counter

import pytest

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.operations import BatchSchedule
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD
from fedme.learning.training_settings import Training, require


def test_the_learning_rate_falls_at_fractions_of_the_rounds():
    training = Training(lr=0.8, lr_decay=0.5, lr_decay_at=(0.5, 0.75))
    assert [training.lr_at(Round(t, 8)) for t in range(8)] == pytest.approx([0.8] * 4 + [0.4] * 2 + [0.2] * 2)
    assert [training.lr_at(Round(t, 3)) for t in range(3)] == pytest.approx([0.8, 0.8, 0.4])
    assert training.lr_at(Round(0, 1)) == 0.8
    assert [Training(lr=0.8).lr_at(Round(t, 8)) for t in (0, 7)] == [0.8, 0.8]
    assert Training(lr=0.8, lr_decay_at=(0.5,)).lr_at(Round(7, 8)) == 0.8  # a factor of one by default


def test_sgd_carries_every_setting():
    training = Training(lr=0.4, momentum=0.9, weight_decay=0.01, clip=20.0, lr_decay=0.1, lr_decay_at=(0.5,))
    objective = CrossEntropy()
    assert training.sgd(objective, Round(0, 2)) == SGD(objective, 0.4, 0.9, 0.01, 20.0, 0.0, False)
    assert training.sgd(objective, Round(1, 2), 0.3, True) == SGD(objective, pytest.approx(0.04), 0.9, 0.01, 20.0, 0.3, True)


def test_batches_of_a_round():
    assert Training(epochs=3, batch=7).batch_schedule(Round(5, 9)) == BatchSchedule(3, 7)
    steps = Training(batch=7, steps=4, shuffle=False)
    assert [steps.batch_schedule(Round(t, 9)).offset for t in range(3)] == [0, 4, 8]
    assert steps.batch_schedule().offset == 0
    assert Training(epochs=3, shuffle=False).batch_schedule(Round(5, 9)) == BatchSchedule(3, 20, None, False, 0)


PRESENT = tuple("gcaebdf")  # in the order of the members, not of the alphabet


def test_a_cohort_has_its_size_is_in_order_and_repeats_for_its_key():
    training = Training(cohort=3)
    drawn = [training.draw(PRESENT, Key(0).at("round", t)) for t in range(40)]
    for cohort in drawn:
        assert len(set(cohort)) == 3
        assert list(cohort) == [client for client in PRESENT if client in cohort]
    assert drawn == [training.draw(PRESENT, Key(0).at("round", t)) for t in range(40)]
    assert drawn != [training.draw(PRESENT, Key(1).at("round", t)) for t in range(40)]
    assert len(set(drawn)) > 15  # other rounds, other cohorts


def test_everybody_is_drawn_about_equally_often():
    seen = Counter(c for t in range(1400) for c in Training(cohort=3).draw(PRESENT, Key(0).at("round", t)))
    assert set(seen) == set(PRESENT)
    assert all(525 < count < 675 for count in seen.values())  # 600 +- 4 standard deviations


@pytest.mark.parametrize("cohort", [None, 7, 99])
def test_all_of_them_when_the_cohort_is_not_smaller(cohort):
    assert Training(cohort=cohort).draw(PRESENT, Key(0)) == PRESENT


def test_a_plan_trains_and_counts_the_cohort():
    training = Training(cohort=2)
    plan = training.plan(PRESENT, Key(4))
    assert plan.train == training.draw(PRESENT, Key(4))
    assert plan.count == frozenset(plan.train)
    everybody = training.plan(PRESENT, Key(4), train_all=True)
    assert everybody.train == PRESENT
    assert everybody.count == plan.count


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("batch", 0),
        ("steps", 0),
        ("lr", 0.0),
        ("lr", -0.1),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("weight_decay", -1e-9),
        ("clip", 0.0),
        ("lr_decay", 0.0),
        ("lr_decay_at", (0.5, 1.0)),
        ("lr_decay_at", (0.0,)),
        ("lr_decay_at", (50.0,)),
        ("cohort", 0),
    ],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: must"):
        Training(**{name: value})


@pytest.mark.parametrize(
    "fine",
    [{"steps": None}, {"steps": 1}, {"momentum": 0.0}, {"clip": None}, {"lr_decay": 2.0}, {"cohort": 1}, {"weight_decay": 0.0}],
)
def test_possible_settings_are_not(fine):
    Training(**fine)


def test_require():
    require(True, "x", "never said")
    with pytest.raises(ValueError, match=re.escape("x: is wrong")):
        require(False, "x", "is wrong")
