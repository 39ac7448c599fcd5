"""Every metric agrees with scikit-learn where scikit-learn has it, and says None where it has no meaning."""

import dataclasses
import math
import timeit
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score, log_loss, roc_auc_score
from torch import Tensor

from fedme.core.metrics import MEASURES, TOGETHER, Metrics, measure, measure_all


def draw(seed: int, samples: int, classes: int, held: int, repeated: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and labels of a client that has `held` of the classes; `repeated` logits have ties."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randperm(classes, generator=generator)[:held]
    labels = own[torch.randint(0, held, (samples,), generator=generator)]
    logits = torch.randn(samples, classes, generator=generator)
    logits[torch.arange(samples), labels] += 0.7
    if repeated:
        logits = logits[torch.randint(0, samples // 2 + 1, (samples,), generator=generator)]
    return logits, labels


def area(logits: Tensor, labels: Tensor) -> float:
    """The mean of scikit-learn's two-class areas over the classes that have one."""
    scores = logits.double().log_softmax(1).numpy()
    present = [c for c in set(labels.tolist()) if 0 < int((labels == c).sum()) < len(labels)]
    return float(np.mean([roc_auc_score((labels == c).numpy(), scores[:, c]) for c in present]))


def calibration(logits: Tensor, labels: Tensor) -> float:
    """The calibration error, written as its definition."""
    probabilities = logits.double().softmax(1)
    confidence, predictions = probabilities.max(1)
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            accuracy = (predictions == labels)[inside].double().mean()
            total += float(inside.double().mean() * (accuracy - confidence[inside].mean()).abs())
    return total


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("samples", "classes", "held"), [(200, 10, 10), (40, 10, 3), (7, 62, 5), (300, 2, 2), (3, 4, 4)])
@pytest.mark.parametrize("seed", range(3))
def test_agreement_with_sklearn(seed: int, samples: int, classes: int, held: int, repeated: bool) -> None:
    logits, labels = draw(seed, samples, classes, held, repeated)
    predictions = logits.argmax(1)
    result = measure(logits, labels)
    probabilities = logits.double().softmax(1).numpy()
    assert result.samples == samples
    assert result.correct == int((predictions == labels).sum())
    assert result.accuracy == pytest.approx(result.correct / samples)
    assert result.classes_present == len(set(labels.tolist()))
    assert result.loss == pytest.approx(log_loss(labels.numpy(), probabilities, labels=range(classes)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn remarks on predictions of classes that are not among the labels
        assert result.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predictions))
    assert result.macro_f1 == pytest.approx(f1_score(labels, predictions, average="macro", zero_division=0))
    assert result.auroc == pytest.approx(area(logits, labels))
    assert result.ece == pytest.approx(calibration(logits, labels))


def test_area_with_all_classes_is_sklearns_own_one_versus_rest() -> None:
    logits, labels = draw(5, 200, 6, 6)
    expected = roc_auc_score(labels.numpy(), logits.double().softmax(1).numpy(), multi_class="ovr", average="macro")
    assert measure(logits, labels).auroc == pytest.approx(expected)


def test_known_values() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    labels = torch.tensor([0, 1, 1, 0])
    right, wrong = math.exp(2) / (math.exp(2) + 2), 1 / (math.exp(2) + 2)
    result = measure(logits, labels)
    assert result.correct == 2
    assert result.loss == pytest.approx(-(2 * math.log(right) + 2 * math.log(wrong)) / 4)
    assert result.balanced_accuracy == pytest.approx(0.5)
    assert result.macro_f1 == pytest.approx((0.5 + 2 / 3 + 0) / 3)  # class 2 is predicted, never right
    # Class 0: the pairs (inside, outside) are .79 > .11, .79 = .79, .11 = .11, .11 < .79. Class 1: > >, = =.
    assert result.auroc == pytest.approx(((1 + 0.5 + 0.5 + 0) / 4 + (1 + 1 + 0.5 + 0.5) / 4) / 2)
    assert result.ece == pytest.approx(abs(0.5 - right))


def test_equal_scores_for_everything_give_an_area_of_one_half() -> None:
    assert measure(torch.zeros(6, 3), torch.tensor([0, 1, 2, 0, 1, 1])).auroc == 0.5


def test_tiny_probabilities_keep_their_order() -> None:
    # Class 0: all probabilities are 0.0 in double precision, in the right order. Class 1: all are 1.0, a tie.
    logits = torch.tensor([[0.0, 800.0], [0.0, 850.0], [0.0, 900.0], [0.0, 950.0]])
    assert measure(logits, torch.tensor([0, 0, 1, 1])).auroc == (1.0 + 0.5) / 2


def test_one_class_has_no_area() -> None:
    result = measure(torch.eye(3), torch.tensor([1, 1, 1]))
    assert result.auroc is None
    assert result.classes_present == 1
    assert result.balanced_accuracy == pytest.approx(1 / 3)


def test_no_samples_is_no_number() -> None:
    assert measure(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)) == Metrics(samples=0, correct=0, classes_present=0)
    assert measure(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).accuracy is None


@pytest.mark.parametrize(
    "row", [[math.nan, 0.0, 0.0], [9.0, math.nan, 0.0], [math.nan] * 3, [math.inf, 0.0, 0.0], [-math.inf] * 3]
)
def test_a_sample_without_probabilities_is_wrong(row: list[float]) -> None:
    logits = torch.tensor([row, [5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    result = measure(logits, torch.tensor([0, 0, 1]))
    assert result.loss is not None
    assert math.isnan(result.loss)
    assert result.correct == 2
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.balanced_accuracy == pytest.approx(0.75)
    assert result.macro_f1 == pytest.approx((2 / 3 + 1) / 2)
    assert result.auroc is None
    assert result.ece is None


def test_probabilities_of_zero_are_ties() -> None:
    logits = torch.tensor([[-math.inf, 0.0], [-math.inf, 0.0], [0.0, 0.0], [-math.inf, 3.0]])
    assert measure(logits, torch.tensor([0, 1, 0, 1])).auroc == 0.75


def test_a_label_with_no_probability_at_all_costs_infinitely_much() -> None:
    result = measure(torch.tensor([[-math.inf, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]))
    assert result.loss == math.inf
    assert result.correct == 1
    assert result.auroc is not None
    assert result.ece is not None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 90), st.sampled_from([2, 3, 10, 62])), min_size=1, max_size=12))
def test_metrics_do_not_depend_on_what_is_measured_with_them(shapes: list[tuple[int, int, int]]) -> None:
    answers = []
    for seed, samples, classes in shapes:
        logits, labels = draw(seed, samples, classes, 1 + seed % classes, repeated=seed % 3 == 0)
        if seed % 5 == 0:  # one that has diverged
            logits[: samples // 3] = math.nan
        answers.append((logits, labels))
    generator = torch.Generator().manual_seed(len(shapes))
    answers.insert(1, (torch.randn(9, 4, generator=generator), torch.rand(9, 4, generator=generator) > 0.5))
    answers.insert(2, (torch.randn(9, 2, generator=generator), torch.randn(9, 2, generator=generator)))
    for found, (logits, labels) in zip(measure_all(answers), answers, strict=True):
        for name, value in dataclasses.asdict(found).items():  # to the bit; NaN is equal to NaN here
            other = getattr(measure(logits, labels), name)
            assert value == other or (math.isnan(value) and math.isnan(other))


def test_a_single_sample_is_measured_alike_alone_and_with_others() -> None:
    answers = [draw(seed, 1 + seed % 3, 62, 5) for seed in range(60)]
    assert measure_all(answers) == [measure(*answer) for answer in answers]


def test_areas_with_scores_of_infinite_and_equal_size() -> None:
    logits = torch.tensor([[0.0, -math.inf], [0.0, -math.inf], [-math.inf, 0.0], [0.0, -1.0], [0.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 0, 1])
    # Class 1 outside, inside: -inf, -1.3; -inf, 0, -0.7: ties count half.
    expected = sum([0.5, 1, 1, 0, 1, 1]) / 6
    assert measure(logits, labels).auroc == expected
    smaller = (logits[:3], labels[:3])
    assert [each.auroc for each in measure_all([(logits, labels), smaller])] == [expected, measure(*smaller).auroc]


def test_more_than_fits_the_cache_is_measured_in_parts() -> None:
    answers = [draw(seed, TOGETHER // 40, 10, 10) for seed in range(7)]
    assert measure_all(answers) == [measure(*answer) for answer in answers]


def test_values_beyond_all_bounds_are_short() -> None:
    rmse = MEASURES["regression"][0]
    assert [rmse.text(value) for value in (49780301.0, 2.4146866e38, -1.5e75, math.inf)] == [
        "49780301",
        "2.41e+38",
        "-1.50e+75",
        "inf",
    ]


def test_logits_of_a_network_can_be_handed_in_as_they_are() -> None:
    logits = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    assert measure(logits, torch.tensor([0, 1, 2, 0])).samples == 4


def test_measuring_everything_is_cheaper_than_one_area_of_sklearn() -> None:
    logits, labels = draw(0, 100, 10, 10)
    probabilities = logits.double().softmax(1).numpy()

    def fastest(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, number=1, repeat=20))

    scikit_learn = fastest(lambda: roc_auc_score(labels.numpy(), probabilities, multi_class="ovr"))
    assert fastest(lambda: measure(logits, labels)) < scikit_learn
