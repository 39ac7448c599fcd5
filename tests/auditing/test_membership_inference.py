"""The success of attacks is measured correctly."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fedme.auditing.membership_inference import confidence, evaluate_attack
from fedme.auditing.shadow_models import halves
from fedme.core.key import Key


def test_auc_and_true_positive_rate_are_those_of_the_roc_curve():
    draw = np.random.default_rng(1)
    members, others = draw.normal(0.7, 1.0, 400).round(1), draw.normal(0.0, 1.0, 300).round(1)  # with ties
    result = evaluate_attack(members, others)
    y, scores = np.r_[np.ones(400), np.zeros(300)], np.r_[members, others]
    assert result.auc == pytest.approx(roc_auc_score(y, scores))
    false, true, _ = roc_curve(y, scores, drop_intermediate=False)
    assert result.found == pytest.approx(true[false <= 0.01].max())
    assert result.auc_low < result.auc < result.auc_high
    assert result.found_low < result.found < result.found_high


def test_intervals_have_their_coverage():
    """Of 300 repetitions about 95 % contain the truth."""
    draw = np.random.default_rng(2)
    truth = stats.norm.cdf(0.5 / math.sqrt(2))
    inside = 0
    for _ in range(300):
        result = evaluate_attack(draw.normal(0.5, 1.0, 60), draw.normal(0.0, 1.0, 50))
        inside += result.auc_low <= truth <= result.auc_high
    assert stats.binomtest(inside, 300, 0.95).pvalue > 0.01


def test_guessing_and_certainty():
    same = np.zeros(10)
    assert evaluate_attack(same, same).auc == 0.5
    assert evaluate_attack(same, same).found == 0.0
    sure = evaluate_attack(np.ones(10), same)
    assert (sure.auc, sure.found, sure.found_high) == (1.0, 1.0, 1.0)
    assert 0 <= sure.found_low < 1
    single = evaluate_attack(np.ones(1), np.zeros(1))
    assert single.auc_low < 0.5  # one sample proves nothing


def test_confidence_is_the_logit_of_the_right_class():
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.0, 0.0], [900.0, 0.0, 0.0], [math.nan, 0.0, 0.0]])
    y = torch.tensor([0, 2, 0, 1])
    p = logits.double().softmax(-1)
    scores = confidence(logits, y)
    assert scores[0] == pytest.approx(float((p[0, 0] / (1 - p[0, 0])).log()))
    assert scores[1] == pytest.approx(math.log(0.5))
    assert scores[2] == pytest.approx(900 - math.log(2))  # where p itself is 1
    assert scores[3] == 0.0


def test_half_of_the_shadow_models_are_not_trained_on_a_sample():
    parts = halves(11, 6, Key(1))
    assert len(parts) == 6
    seen = torch.cat(parts).bincount(minlength=11)
    assert seen.tolist() == [3] * 11
    assert not torch.equal(parts[0].sort().values, parts[2].sort().values)
