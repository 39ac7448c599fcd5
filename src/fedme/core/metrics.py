"""Evaluation metrics of a model on a split, computed from its outputs and the targets.

Clients often lack classes, so every metric states which classes it averages over and is None where it is undefined.
`MEASURES` lists the metrics of every task type (`core/task_types.py`), the primary one first.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedme.core.task_types import TASK_LOSSES, TaskType, task_type_of

Array = NDArray[Any]

CALIBRATION_BINS = 15  # as in Guo et al. 2017
FEW = 128  # samples up to which every pair is compared
_BIN_EDGES = np.linspace(0.0, 1.0, CALIBRATION_BINS + 1)[1:-1]


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model on a split; None where there are no samples, or where a metric does not belong to the task type.

    `loss` is the mean loss of the task type; it may be NaN or infinite. A sample with a NaN output counts as wrong.

    Classification:
    `accuracy` is the fraction of samples with a correct prediction.
    `balanced_accuracy` is the mean recall over the classes present in the labels.
    `macro_f1` is the mean F1 over the classes present in the labels or the predictions, as in scikit-learn by default.
    `auroc` is the mean one-versus-rest area under the ROC curve over the classes with positive and negative samples;
    None if there is no such class or a probability is NaN.
    `ece` is the expected calibration error of the top probability in 15 bins of equal width; None if one is NaN.

    Multi-label (a label is predicted if its probability exceeds 1/2):
    `accuracy` is the fraction of correct label decisions, `exact_match` the fraction of samples without a wrong one.
    `micro_f1` is the F1 of all decisions, `macro_f1` the mean over the labels that occur or are predicted.
    `auroc` is the mean over the labels with positive and negative samples.

    Regression, in the unit of the targets:
    `rmse` is the root mean squared error over samples and targets, `mae` the mean absolute error.
    `r2` is the coefficient of determination, averaged over the targets that vary.
    """

    samples: int
    correct: int
    classes_present: int
    loss: float | None = None
    accuracy: float | None = None
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    auroc: float | None = None
    ece: float | None = None
    exact_match: float | None = None
    micro_f1: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None

    def __repr__(self) -> str:
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        texts = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in shown.items())
        return f"Metrics({', '.join(text for text in texts if not text.endswith('=None'))})"

    def plain(self, task_type: TaskType) -> dict[str, Any]:
        """The metrics of the task type, as plain data."""
        counts = ("samples",) if task_type == "regression" else ("samples", "correct", "classes_present")
        names = (*counts, "loss", *(m.key for m in MEASURES[task_type] if m.key != "loss"))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Measure:
    """How one field of `Metrics` is displayed and compared."""

    key: str
    title: str
    percent: bool = False
    higher: bool = True  # whether higher is better

    @property
    def heading(self) -> str:
        """The column heading."""
        return f"{self.title} %" if self.percent else self.title

    def text(self, value: float | None, digits: int | None = None) -> str:
        """The formatted value, without a percent sign."""
        if value is None:
            return "-"
        if self.percent:
            return f"{100 * value:.{2 if digits is None else digits}f}"
        return f"{value:.{_digits(value, digits)}f}" if abs(value) < HUGE else f"{value:.2e}"

    def with_title(self, value: float | None, digits: int | None = None) -> str:
        """The formatted value after its title; accuracy is shown without a title."""
        title = "" if self.title == "accuracy" else f"{self.title} "
        return f"{title}{self.text(value, digits)}{' %' if self.percent and value is not None else ''}"

    def gain(self, value: float, other: float) -> float:
        """The improvement over `other`; positive is better."""
        return value - other if self.higher else other - value

    def pooled(self, rows: Sequence[Mapping[str, Any]]) -> float | None:
        """The value over the samples of all rows, for accuracies, losses and `rmse`; None if it is None in any row."""
        counted = [row for row in rows if row["samples"]]
        if not counted or any(row[self.key] is None for row in counted):
            return None
        power = 2 if self.key == "rmse" else 1
        total = sum(row["samples"] for row in counted)
        return float((sum(row[self.key] ** power * row["samples"] for row in counted) / total) ** (1 / power))


HUGE = 1e9  # such a value, mostly of a training that diverged, is written with an exponent


def _digits(value: float, digits: int | None) -> int:
    """Digits after the decimal point: 3, more for small values and fewer for large ones."""
    if digits is not None:
        return digits
    size = abs(value)
    return 0 if size >= 10000 else 1 if size >= 100 else 3 if size >= 0.01 or size == 0 else 5


LOSS = Measure("loss", "loss", higher=False)
MEASURES: dict[TaskType, tuple[Measure, ...]] = {
    "classification": (
        Measure("accuracy", "accuracy", percent=True),
        Measure("balanced_accuracy", "balanced", percent=True),
        Measure("macro_f1", "macro F1"),
        Measure("auroc", "AUROC"),
        Measure("ece", "ECE", higher=False),
        LOSS,
    ),
    "multi-label": (
        Measure("accuracy", "label accuracy", percent=True),
        Measure("exact_match", "exact match", percent=True),
        Measure("micro_f1", "micro F1"),
        Measure("macro_f1", "macro F1"),
        Measure("auroc", "AUROC"),
        LOSS,
    ),
    "regression": (
        Measure("rmse", "RMSE", higher=False),
        Measure("mae", "MAE", higher=False),
        Measure("r2", "R2"),
        LOSS,
    ),
}


def task_type_of_row(row: Mapping[str, Any]) -> TaskType:
    """The task type of a run, from the metrics that one of its rows contains."""
    return "regression" if "rmse" in row else "multi-label" if "exact_match" in row else "classification"


def possible(correct: int, samples: int, accuracy: float | None, task_type: TaskType) -> bool:
    """Whether so many predictions can be correct: at most one per sample or, if a sample has several labels, one per label.

    The number of labels is not in the metrics, but must follow from them: `accuracy` is the fraction of all label decisions.
    """
    if task_type != "multi-label" or correct == 0:
        return 0 <= correct <= samples
    if correct < 0 or not samples or not accuracy:
        return False
    labels = correct / (samples * accuracy)
    return 0.5 < labels < sys.maxsize and abs(labels - round(labels)) < 1e-6 * labels


@torch.no_grad()
def measure(logits: Tensor, y: Tensor, unit: Sequence[float] = ()) -> Metrics:
    """All metrics of outputs of shape (samples, classes, labels or targets), computed in double precision.

    `unit` is the standard deviation by which each regression target was divided.
    """
    if not len(logits):
        return Metrics(samples=0, correct=0, classes_present=0)
    task_type = task_type_of(y)
    if task_type == "classification":
        return _classification(logits, y)
    return _multi_label(logits, y) if task_type == "multi-label" else _regression(logits, y, unit)


def _multi_label(logits: Tensor, y: Tensor) -> Metrics:
    z = logits.double()
    predictions = z > 0
    hits = (predictions == y) & ~z.isnan()
    present, predicted = y.sum(0), predictions.sum(0)
    right = (predictions & y).sum(0).double()
    seen = present + predicted > 0
    f1 = 2 * right[seen] / (present + predicted)[seen]
    labelled = [] if bool(z.isnan().any()) else zip(z.T.numpy(force=True), y.long().T.numpy(force=True), strict=True)
    areas = [area for score, label in labelled if (area := _auroc(np.stack((-score, score), 1), label)) is not None]
    return Metrics(
        samples=len(y),
        correct=int(hits.sum()),
        classes_present=int((present > 0).sum()),
        loss=TASK_LOSSES["multi-label"].loss(z, y).mean().item(),
        accuracy=hits.double().mean().item(),
        exact_match=hits.all(1).double().mean().item(),
        micro_f1=float(2 * right.sum() / (present + predicted).sum()) if bool(seen.any()) else None,
        macro_f1=float(f1.mean()) if bool(seen.any()) else None,
        auroc=sum(areas) / len(areas) if areas else None,
    )


def _regression(z: Tensor, y: Tensor, unit: Sequence[float]) -> Metrics:
    error = z.double() - y.double()
    scaled = error * torch.tensor(unit, dtype=torch.float64) if len(unit) else error
    spread = (y.double() - y.double().mean(0)).square().sum(0)
    varied = spread > 0
    return Metrics(
        samples=len(y),
        correct=0,
        classes_present=0,
        loss=TASK_LOSSES["regression"].loss(z.double(), y).mean().item(),
        rmse=scaled.square().mean().sqrt().item(),
        mae=scaled.abs().mean().item(),
        r2=float((1 - error.square().sum(0)[varied] / spread[varied]).mean()) if bool(varied.any()) else None,
    )


def _classification(logits: Tensor, labels: Tensor) -> Metrics:
    """Uses numpy, which is several times faster than torch for small arrays."""
    samples, classes = logits.shape
    z, y = logits.double().numpy(force=True), labels.numpy(force=True)
    log_probabilities = _log_softmax(z)
    loss = -_mean(log_probabilities[np.arange(samples), y])
    top = np.maximum.reduce(log_probabilities, 1)  # NaN if any entry of the row is
    unknown, predictions = np.isnan(top), z.argmax(1)
    if has_nan := bool(unknown.any()):
        predictions[unknown] = classes
    hits = predictions == y

    support = np.bincount(y, minlength=classes)
    predicted = np.bincount(predictions, minlength=classes + 1)[:classes]
    right = np.bincount(y[hits], minlength=classes)
    present = support > 0
    seen = support + predicted > 0

    correct = int(np.count_nonzero(hits))
    return Metrics(
        samples=samples,
        correct=correct,
        classes_present=int(np.count_nonzero(present)),
        loss=loss,
        accuracy=correct / samples,
        balanced_accuracy=_mean(right[present] / support[present]),
        macro_f1=_mean(2 * right[seen] / (support + predicted)[seen]),
        auroc=None if has_nan else _auroc(log_probabilities, y),
        ece=None if has_nan else _calibration_error(np.exp(top), hits),
    )


def _mean(values: Array) -> float:
    """What ``values.mean()`` is, in half the time for a few values."""
    return float(np.add.reduce(values)) / len(values)


def _log_softmax(logits: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which the metrics report
        shifted: Array = logits - np.maximum.reduce(logits, 1, keepdims=True)
        shifted -= np.log(np.add.reduce(np.exp(shifted), 1, keepdims=True))
    return shifted


def _auroc(scores: Array, labels: Array) -> float | None:
    """The mean AUROC from the ranks of the positive samples of every class (the Mann-Whitney statistic).

    Log-probabilities rank like probabilities, but do not underflow to ties near 0.
    """
    samples = len(labels)
    support = np.bincount(labels, minlength=scores.shape[1])
    classes = support.nonzero()[0]
    if len(classes) < 2:  # a class with all samples has no negative ones
        return None
    positives = support[classes]
    if samples <= FEW:  # every sample with all others is faster than to sort them
        own = scores[np.arange(samples), labels]
        others = scores[:, labels]
        below, not_above = (np.add.reduce(less.view(np.uint8), 0, np.uint8) for less in (others < own, others <= own))
        ranks = np.bincount(labels, weights=(below + not_above.astype(np.float64) + 1) / 2)[classes]
        return _area(ranks, positives, samples)
    class_scores = scores.T[classes]
    order, values = class_scores.argsort(1), np.sort(class_scores, 1)  # several times faster than to gather by `order`
    changes = values[:, 1:] != values[:, :-1]
    places = np.arange(samples)
    positive = labels[order] == classes[:, None]
    if changes.all():
        twice = 2 * places
    else:  # tied samples get the mean of their ranks
        edge = np.ones((len(classes), 1), dtype=bool)
        first = np.maximum.accumulate(np.where(np.hstack((edge, changes)), places, 0), 1)
        last = np.minimum.accumulate(np.where(np.hstack((changes, edge)), places, samples)[:, ::-1], 1)[:, ::-1]
        twice = first + last
    ranks = ((twice + 2) * positive).sum(1) / 2  # ranks start at 1
    return _area(ranks, positives, samples)


def _area(ranks: Array, positives: Array, samples: int) -> float:
    """The mean AUROC from the sum of the ranks of the positive samples of every class, and their number."""
    return _mean((ranks - positives * (positives + 1) / 2) / (positives * (samples - positives)))


def _calibration_error(confidence: Array, hits: Array) -> float:
    """The mean gap between confidence and accuracy, in bins open below and closed above."""
    bins = np.searchsorted(_BIN_EDGES, confidence)
    gaps = np.bincount(bins, weights=hits - confidence, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum()) / len(hits)
