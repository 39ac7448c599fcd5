"""Evaluation metrics of a model on a split, computed from its outputs and the targets.

Clients often lack classes, so every metric states which classes it averages over and is None where it is undefined.
`MEASURES` lists the metrics of every task type (`core/task_types.py`), the primary one first.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedme.core.task_types import TASK_LOSSES, TaskType, task_type_of

Array = NDArray[Any]

CALIBRATION_BINS = 15  # as in Guo et al. 2017
TOGETHER = 1 << 15  # numbers that are measured together, so that they stay in the cache
LAST = np.uint64(2**64 - 2)  # as a key of `_areas`
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
    return measure_all([(logits, y)], unit)[0]


@torch.no_grad()
def measure_all(answers: Sequence[tuple[Tensor, Tensor]], unit: Sequence[float] = ()) -> list[Metrics]:
    """The metrics of several models or parts, given their outputs and targets.

    Those of one do not depend on the others, but together they take a fraction of the time.
    """
    measured: dict[int, Metrics] = {}
    labelled = []
    for number, (logits, y) in enumerate(answers):
        if not len(logits):
            measured[number] = Metrics(samples=0, correct=0, classes_present=0)
        elif (task_type := task_type_of(y)) == "classification":
            labelled.append(number)
        else:
            measured[number] = _multi_label(logits, y) if task_type == "multi-label" else _regression(logits, y, unit)
    for group in _groups(labelled, [answers[number][0].shape for number in labelled]):
        measured.update(zip(group, _classification([answers[number] for number in group]), strict=True))
    return [measured[number] for number in range(len(answers))]


def _groups(numbers: Sequence[int], shapes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The numbers in groups with equally many classes and similarly many samples, small enough for the cache."""
    group: list[int] = []
    first, taken = 0, 0
    for classes, samples, number in sorted((shape[1], shape[0], number) for shape, number in zip(shapes, numbers, strict=True)):
        taken += classes * samples
        if group and (classes != first or taken > TOGETHER):
            yield group
            group, taken = [], classes * samples
        first = classes
        group.append(number)
    if group:
        yield group


def _multi_label(logits: Tensor, y: Tensor) -> Metrics:
    z = logits.double()
    predictions = z > 0
    hits = (predictions == y) & ~z.isnan()
    present, predicted = y.sum(0), predictions.sum(0)
    right = (predictions & y).sum(0).double()
    seen = present + predicted > 0
    f1 = 2 * right[seen] / (present + predicted)[seen]
    positives, negatives = present.numpy(force=True), (len(y) - present).numpy(force=True)
    scores, positive = z.T.numpy(force=True), y.bool().T.numpy(force=True)
    order, values = scores.argsort(-1), np.sort(scores, -1)  # several times faster than to gather by `order`
    ranks = _rank_sums(values, np.take_along_axis(positive, order, -1))
    areas = _means(
        (ranks - positives * (positives + 1) / 2)[None], (positives * negatives)[None], (positives * negatives > 0)[None]
    )
    return Metrics(
        samples=len(y),
        correct=int(hits.sum()),
        classes_present=int((present > 0).sum()),
        loss=TASK_LOSSES["multi-label"].loss(z, y).mean().item(),
        accuracy=hits.double().mean().item(),
        exact_match=hits.all(1).double().mean().item(),
        micro_f1=float(2 * right.sum() / (present + predicted).sum()) if bool(seen.any()) else None,
        macro_f1=float(f1.mean()) if bool(seen.any()) else None,
        auroc=None if bool(z.isnan().any()) or np.isnan(areas[0]) else float(areas[0]),
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


def _classification(answers: Sequence[tuple[Tensor, Tensor]]) -> list[Metrics]:
    """The metrics of answers with equally many classes. All samples are the columns of one array, one answer after another.

    Uses numpy, which is several times faster than torch for small arrays.
    """
    z = torch.cat([logits for logits, _ in answers]).double().numpy(force=True)
    y = torch.cat([labels for _, labels in answers]).numpy(force=True)
    classes, count = z.shape[1], len(answers)
    samples = np.array([len(labels) for _, labels in answers])
    first = np.cumsum(samples) - samples
    answer = np.repeat(np.arange(count), samples)  # of every column

    def counts(of: Array, values: int) -> Array:
        """How often every value from 0 on occurs in every answer; `of` are answer * values + value."""
        return np.bincount(of, minlength=count * values).reshape(count, values)

    log_probabilities = _log_softmax(np.ascontiguousarray(z.T))
    loss = -np.add.reduceat(log_probabilities[y, np.arange(len(y))], first) / samples
    top = np.maximum.reduce(log_probabilities)  # NaN if any entry of the column is
    unknown, predictions = np.isnan(top), z.argmax(1)
    predictions[unknown] = classes
    hits = predictions == y
    support = counts(answer * classes + y, classes)
    predicted = counts(answer * (classes + 1) + predictions, classes + 1)[:, :classes]
    right = counts((answer * classes + y)[hits], classes)
    correct = right.sum(1)
    present = support > 0
    balanced = _means(right, support, present)
    f1 = _means(2 * right, support + predicted, support + predicted > 0)
    valued = counts(answer[unknown], 1)[:, 0] == 0
    areas = _areas(log_probabilities, y, answer, first, support)
    bins = np.searchsorted(_BIN_EDGES, confidence := np.exp(top))
    gaps = np.bincount(answer * CALIBRATION_BINS + bins, hits - confidence, count * CALIBRATION_BINS)
    ece = np.abs(gaps.reshape(count, CALIBRATION_BINS)).sum(1) / samples
    columns = samples, correct, np.count_nonzero(present, 1), loss, correct / samples, balanced, f1
    optional = np.where(valued, areas, np.nan), np.where(valued, ece, np.nan)  # NaN is None
    rows = zip(*(column.tolist() for column in (*columns, *optional)), strict=True)
    return [Metrics(*row, *(None if value != value else value for value in (area, error))) for *row, area, error in rows]


def _means(over: Array, under: Array, counted: Array) -> Array:
    """The mean of every row of ``over / under`` where `counted`; NaN where nothing is."""
    ratios = np.divide(over, under, out=np.zeros(over.shape), where=counted)
    number = np.count_nonzero(counted, 1)
    means: Array = np.divide(ratios.sum(1), number, out=np.full(len(over), np.nan), where=number > 0)
    return means


def _log_softmax(logits: Array) -> Array:
    """Over the first axis."""
    with np.errstate(invalid="ignore"):  # infinite logits give NaN, which the metrics report
        shifted: Array = logits - np.maximum.reduce(logits)
        # `np.add.reduce` adds in another order if there is one column.
        shifted -= np.log(np.add.accumulate(np.exp(shifted))[-1])
    return shifted


def _areas(scores: Array, labels: Array, answer: Array, first: Array, support: Array) -> Array:
    """The mean AUROC of every answer over its classes with positive and negative samples; NaN if there is no such class.

    Log-probabilities rank like probabilities, but do not underflow to ties near 0. They have a bit to spare, the sign, which is
    always the same: its place is used for whether a sample is positive, so that only numbers have to be sorted.
    """
    count, classes = support.shape
    longest = int(support.sum(1).max())
    keys = scores.view(np.uint64) << 1  # larger for smaller scores
    keys[labels, np.arange(len(labels))] |= 1
    if len(labels) == count * longest:  # equally many samples in every answer
        padded = keys.reshape(classes, count, longest)
    else:
        padded = np.empty((classes, count, longest), np.uint64)
        padded[:] = LAST - 2 * np.arange(longest, dtype=np.uint64)  # behind every score, without ties: no rank changes
        padded[:, answer, np.arange(len(labels)) - first[answer]] = keys
    padded.sort(-1)
    ranks = _rank_sums(padded >> 1, padded & 1).T
    negatives = support.sum(1, keepdims=True) - support
    return _means(support * negatives + support * (support + 1) / 2 - ranks, support * negatives, support * negatives > 0)


def _rank_sums(values: Array, positive: Array) -> Array:
    """The sum of the ranks of the positive samples along the last axis, from which the area follows (Mann and Whitney).

    The `values` are in ascending order.
    """
    samples = values.shape[-1]
    places = np.arange(samples)
    twice = 2 * places  # ranks without ties
    changes = values[..., 1:] != values[..., :-1]
    if not changes.all():  # tied samples get the mean of their ranks
        edge = np.ones((*values.shape[:-1], 1), dtype=bool)
        start = np.maximum.accumulate(np.where(np.concatenate((edge, changes), -1), places, 0), -1)
        end = np.minimum.accumulate(np.where(np.concatenate((changes, edge), -1), places, samples)[..., ::-1], -1)[..., ::-1]
        twice = start + end
    ranks: Array = (twice + 2) / 2  # from 1
    sums: Array = (ranks * positive).sum(-1)
    return sums
