"""The shared settings of local training."""

import inspect
import math
import pickle
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.optim import lr_scheduler

from fedme.core.key import Key
from fedme.core.method import Round
from fedme.core.operations import BatchSchedule
from fedme.learning.objectives import CrossEntropy
from fedme.learning.optimizers import SGD, Adam
from fedme.learning.training_settings import Training, require


def test_the_learning_rate_falls_at_fractions_of_the_rounds():
    training = Training(lr=0.8, lr_schedule="step", lr_decay=0.5, lr_decay_at=(0.5, 0.75))
    assert [training.lr_at(Round(t, 8)) for t in range(8)] == pytest.approx([0.8] * 4 + [0.4] * 2 + [0.2] * 2)
    assert [training.lr_at(Round(t, 3)) for t in range(3)] == pytest.approx([0.8, 0.8, 0.4])
    assert training.lr_at(Round(0, 1)) == 0.8
    assert [Training(lr=0.8).lr_at(Round(t, 8)) for t in (0, 7)] == [0.8, 0.8]
    assert Training(lr=0.8, lr_schedule="step", lr_decay_at=(0.5,)).lr_at(Round(7, 8)) == pytest.approx(0.08)  # by a tenth


def torch_rates(training, rounds, warmup):
    """The rates of PyTorch's schedulers, one step per round."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=training.lr)
    # The milestones of MultiStepLR count from the end of the warm-up.
    points = [math.ceil(at * rounds) - warmup for at in training.lr_decay_at]
    after = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, 1.0),
        "step": lambda: lr_scheduler.MultiStepLR(optimizer, points, training.lr_decay),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, rounds - warmup, training.lr_min),
    }[training.lr_schedule]
    schedulers = [lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)] if warmup else []
    scheduler = lr_scheduler.SequentialLR(optimizer, [*schedulers, after()], [warmup] if warmup else [])
    rates = []
    for _ in range(rounds):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"lr_schedule": "step", "lr_decay": 0.3, "lr_decay_at": (0.5, 0.75)},
        {"lr_schedule": "cosine"},
        {"lr_schedule": "cosine", "lr_min": 0.02},
    ],
)
def test_learning_rates_are_those_of_pytorchs_schedulers(schedule, warmup):
    training = Training(lr=0.8, warmup=warmup, **schedule)
    rates = [training.lr_at(Round(t, 12)) for t in range(12)]
    assert rates == pytest.approx(torch_rates(training, 12, warmup), rel=1e-12)
    assert max(rates) == 0.8
    assert all(rate < 0.8 for rate in rates[:warmup])


def test_a_warm_up_is_shorter_than_a_training_of_few_rounds():
    training = Training(lr=0.8, warmup=5, lr_schedule="cosine")
    assert training.lr_at(Round(0, 1)) == 0.8
    assert [training.lr_at(Round(t, 2)) for t in range(2)] == pytest.approx([0.4, 0.8])


STEP = {"weight_decay": 0.01, "clip": 20.0, "lr_schedule": "step", "lr_decay_at": (0.5,)}


def test_sgd_carries_every_setting():
    training = Training(lr=0.4, momentum=0.9, nesterov=True, **STEP)
    objective = CrossEntropy()
    assert training.local_optimizer(objective, Round(0, 2)) == SGD(objective, 0.4, 0.9, 0.01, 20.0, 0.0, False, True)
    late = SGD(objective, pytest.approx(0.04), 0.9, 0.01, 20.0, 0.3, True, True)
    assert training.local_optimizer(objective, Round(1, 2), 0.3, True) == late


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_carries_every_setting(name):
    training = Training(optimizer=name, lr=0.4, betas=(0.8, 0.98), eps=1e-6, **STEP)
    objective, decoupled = CrossEntropy(), name == "adamw"
    expected = Adam(objective, 0.4, (0.8, 0.98), 1e-6, 0.01, 20.0, 0.0, False, decoupled)
    assert training.local_optimizer(objective, Round(0, 2)) == expected
    late = Adam(objective, pytest.approx(0.04), (0.8, 0.98), 1e-6, 0.01, 20.0, 0.3, True, decoupled)
    assert training.local_optimizer(objective, Round(1, 2), 0.3, True) == late


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_defaults_of_an_optimizer_are_pytorchs(name):
    torchs = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    expected = {key: p.default for key, p in inspect.signature(torchs).parameters.items()}
    training = Training(optimizer=name)
    for setting in ("momentum", "nesterov", "weight_decay") if name == "sgd" else ("lr", "betas", "eps", "weight_decay"):
        assert getattr(training, setting) == expected[setting]
    assert Training(optimizer=name, lr=0.3, weight_decay=0.2) == replace(training, lr=0.3, weight_decay=0.2)
    assert Training().lr == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nesterov": True}, "nesterov: needs momentum: set momentum > 0, for example 0.9"),
        ({"betas": (0.8, 0.9)}, "betas: is a setting of adam and adamw, got (0.8, 0.9) with optimizer = 'sgd'"),
        ({"eps": 1e-6}, "eps: is a setting of adam and adamw, got 1e-06 with optimizer = 'sgd'"),
        (
            {"optimizer": "adam", "momentum": 0.9},
            "momentum: is a setting of sgd, got 0.9 with optimizer = 'adam'; use betas, or set it to 0",
        ),
        ({"optimizer": "adamw", "nesterov": True}, "nesterov: is a setting of sgd, got true with optimizer = 'adamw'"),
        ({"lr_decay_at": (0.5,)}, "lr_decay_at: is for lr_schedule = 'step', but lr_schedule is 'constant'"),
        (
            {"lr_schedule": "step"},
            "lr_decay_at: must name at least one fraction of the rounds for lr_schedule = 'step'",
        ),
        ({"lr_min": 0.01}, "lr_min: is for lr_schedule = 'cosine', but lr_schedule is 'constant'"),
        ({"lr_schedule": "cosine", "lr_min": 0.1}, "lr_min: must be >= 0 and below lr = 0.1, got 0.1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Training(**settings)


def test_batches_of_a_round():
    assert Training(epochs=3, batch=7).batch_schedule(Round(5, 9)) == BatchSchedule(3, 7)
    steps = Training(batch=7, steps=4, shuffle=False)
    assert [steps.batch_schedule(Round(t, 9)).offset for t in range(3)] == [0, 4, 8]
    assert steps.batch_schedule().offset == 0
    assert Training(epochs=3, shuffle=False).batch_schedule(Round(5, 9)) == BatchSchedule(3, 20, None, False, 0)


@pytest.mark.parametrize("last", ["keep", "drop", "scale"])
def test_the_last_batch_is_treated_alike_in_rounds_and_outside_of_them(last):
    training = Training(epochs=3, batch=7, last_batch=last)
    assert training.batch_schedule(Round(5, 9)) == BatchSchedule(3, 7, last_batch=last)
    assert training.whole_epochs(4) == BatchSchedule(4, 7, last_batch=last)
    assert training.whole_epochs(4, 9) == BatchSchedule(4, 9, last_batch=last)


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
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("eps", 0.0),
        ("lr_min", -0.1),
        ("warmup", -1),
        ("cohort", 0),
    ],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: must"):
        Training(**{name: value})


@pytest.mark.parametrize(
    "fine",
    [
        {"steps": None},
        {"steps": 1},
        {"momentum": 0.0},
        {"clip": None},
        {"betas": (0.0, 0.0), "optimizer": "adam"},
        {"lr_decay": 2.0},
        {"cohort": 1},
        {"weight_decay": 0.0},
    ],
)
def test_possible_settings_are_not(fine):
    Training(**fine)


def test_require():
    require(True, "x", "never said")
    with pytest.raises(ValueError, match=re.escape("x: is wrong")):
        require(False, "x", "is wrong")


def test_equal_settings_have_one_hash_which_does_not_travel():
    one, same = Training(lr=0.3), Training(lr=0.3)
    assert (one, hash(one)) == (same, hash(same))
    assert hash(one) != hash(Training(lr=0.4))
    copy = pickle.loads(pickle.dumps(one))
    assert (copy, vars(copy)) == (one, {name: value for name, value in vars(one).items() if name != "_hash"})
