"""Confusion matrix, sensitivity, specificity, Brier score and calibration, against scikit-learn."""

import pytest
import torch
from hypothesis import given, strategies as st
from sklearn import metrics

from fedme.core.key import Key
from fedme.results.classification_details import details


@given(st.integers(0, 10**6), st.integers(2, 40))
def test_against_scikit_learn(seed, samples):
    draw = Key(seed).torch()
    y = torch.randint(0, 3, (samples,), generator=draw)
    logits = 2 * torch.randn(samples, 3, generator=draw)
    found = details(logits, y, ["a", "b", "c"])
    predicted, probabilities = logits.argmax(1), logits.double().softmax(1)
    assert [list(row) for row in found.confusion] == metrics.confusion_matrix(y, predicted, labels=[0, 1, 2]).tolist()
    for c, one in enumerate(found.classes):
        truth, said = y == c, predicted == c
        assert one.samples == int(truth.sum())
        if truth.any():
            assert one.sensitivity == pytest.approx(metrics.recall_score(truth, said))
        else:
            assert one.sensitivity is None
        if (~truth).any():
            assert one.specificity == pytest.approx(metrics.recall_score(~truth, ~said))
        if said.any():
            assert one.precision == pytest.approx(metrics.precision_score(truth, said, zero_division=0))
    onehot = torch.nn.functional.one_hot(y, 3)
    assert found.brier == pytest.approx(float((probabilities - onehot).square().sum(1).mean()))
    assert sum(each.samples for each in found.calibration) == samples
    right = sum(each.samples * each.accuracy for each in found.calibration)
    assert right == pytest.approx(int((predicted == y).sum()))


def test_two_classes_by_hand():
    logits = torch.tensor([[0.85, 0.15], [0.25, 0.75], [0.05, 0.95], [0.65, 0.35]]).log()
    found = details(logits, torch.tensor([0, 0, 1, 1]), ["no", "yes"])
    assert found.confusion == ((1, 1), (1, 1))
    assert (found.classes[1].sensitivity, found.classes[1].specificity, found.classes[1].precision) == (0.5, 0.5, 0.5)
    second = metrics.brier_score_loss([0, 0, 1, 1], [0.15, 0.75, 0.95, 0.35])
    assert found.brier == pytest.approx(2 * second)
    bins = {(round(b.low, 1), b.samples, round(b.confidence, 2), b.accuracy) for b in found.calibration}
    assert bins == {(0.6, 1, 0.65, 0.0), (0.7, 1, 0.75, 0.0), (0.8, 1, 0.85, 1.0), (0.9, 1, 0.95, 1.0)}
