"""What an attack comes to is measured right."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fedme.auditing.membership_inference import confidence, measured
from fedme.auditing.shadow_models import halves
from fedme.core.key import Key


def test_the_area_and_the_members_found_are_those_of_the_curve():
    draw = np.random.default_rng(1)
    members, others = draw.normal(0.7, 1.0, 400).round(1), draw.normal(0.0, 1.0, 300).round(1)  # with ties
    found = measured(members, others)
    y, scores = np.r_[np.ones(400), np.zeros(300)], np.r_[members, others]
    assert found.auc == pytest.approx(roc_auc_score(y, scores))
    false, true, _ = roc_curve(y, scores, drop_intermediate=False)
    assert found.found == pytest.approx(true[false <= 0.01].max())
    assert found.auc_low < found.auc < found.auc_high
    assert found.found_low < found.found < found.found_high


def test_intervals_hold_what_they_promise():
    """Of 300 repetitions about 95 % contain the truth."""
    draw = np.random.default_rng(2)
    truth = stats.norm.cdf(0.5 / math.sqrt(2))
    inside = 0
    for _ in range(300):
        found = measured(draw.normal(0.5, 1.0, 60), draw.normal(0.0, 1.0, 50))
        inside += found.auc_low <= truth <= found.auc_high
    assert stats.binomtest(inside, 300, 0.95).pvalue > 0.01


def test_guessing_and_certainty():
    same = np.zeros(10)
    assert measured(same, same).auc == 0.5
    assert measured(same, same).found == 0.0
    sure = measured(np.ones(10), same)
    assert (sure.auc, sure.found, sure.found_high) == (1.0, 1.0, 1.0)
    assert 0 <= sure.found_low < 1
    single = measured(np.ones(1), np.zeros(1))
    assert single.auc_low < 0.5  # one sample proves nothing


def test_confidence_is_the_logit_of_the_right_class():
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0], [900.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    y = torch.tensor([0, 2, 0, 1])
    p = logits.double().softmax(-1)
    found = confidence(logits, y)
    assert found[0] == pytest.approx(float((p[0, 0] / (1 - p[0, 0])).log()))
    assert found[1] == pytest.approx(math.log(0.5))
    assert found[2] == pytest.approx(900 - math.log(2))  # where p itself is 1
    assert found[3] == 0.0


def test_every_sample_is_unknown_to_half_of_the_shadows():
    parts = halves(11, 6, Key(1))
    assert len(parts) == 6
    seen = torch.cat(parts).bincount(minlength=11)
    assert seen.tolist() == [3] * 11
    assert not torch.equal(parts[0].sort().values, parts[2].sort().values)
